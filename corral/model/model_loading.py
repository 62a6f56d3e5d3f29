"""Loading models and tokenizers: from a folder, by a hub name, or built-in ones."""

import gc
import json
import platform
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from corral.hub import is_only_path, model_files
from corral.model.attention import ATTENTION_NAME, make_exact, register
from corral.model.builtin_models import builtin_folder, no_model
from corral.model.families import choose_path
from corral.model.fused_layers import fuse
from corral.model.general_forward import is_general
from corral.model.joined_weights import joining_later
from corral.model.lora import AdapterFolder, add_adapters, merge_adapters, scale_of
from corral.model.model_check import check_model
from corral.model.quantization import quantize, round_weights
from corral.model.vision import load_vision
from corral.recipe.errors import UserError, first_line, one_line
from corral.recipe.schema import Lora, Model
from corral.recipe.shape import ModelShape, model_folder

MAX_TEMPLATE_BYTES = 1 << 20


def default_device() -> torch.device:
    """Returns this process's device, a GPU with its number: torch refuses one without in many places."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name. `auto` is bfloat16 where the device multiplies it in hardware; else float16 on a GPU,
    such as a V100, and float32 on a CPU."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if has_bfloat16(device) else torch.float16
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16. With AVX-512 alone oneDNN says so too, and is 2 to 4 times slower at it than
    at float32."""
    if not torch.backends.mkldnn.is_available():  # as in builds for macOS: plain loops
        return False
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_bfloat16(device: torch.device) -> bool:
    """Whether the GPU multiplies bfloat16: NVIDIA's since Ampere (sm_80), and AMD's."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def model_source(path: str, key: str = "model.path") -> str:
    """A folder or a hub name that transformers understands: of an adapter, that of its base model. Built-in models are
    made on first use, GGUF files converted, those on ModelScope downloaded. `key`: of the recipe, for errors."""
    if (adapter := AdapterFolder.find(path)) is not None:
        return model_source(adapter.base, key)
    if (builtin := builtin_folder(path, key)) is not None:
        return str(builtin)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{key}: {folder} is a folder without config.json, so not a model in Hugging Face layout")
        return str(folder)
    if folder.exists() or is_only_path(path):
        raise UserError(f"{key}: {no_model(path)}")
    return model_files(path, key)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector, for what imports transformers: that makes 200,000 objects which stay, and the
    collector would look at them again and again, for a sixth of the time. Not for loading weights, which are large and
    must be freed at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Into the oldest generation, as if collections had seen them survive: else the next one would look at all.
        if not gc.get_freeze_count():  # what a program around Corral has frozen stays so
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@collector_paused()
def load_config(model: Model) -> Any:
    """transformers' configuration of the model, with the recipe's changes."""
    source = model_source(model.path)  # first: a name on a hub that is not there does not wait for imports
    ModelShape.find(model.path)  # raises for sizes up to which transformers would count without an end
    from transformers import AutoConfig

    with one_line(f"model.path: {model.path} could not be loaded"):
        config, unknown = AutoConfig.from_pretrained(
            source, trust_remote_code=model.trust_remote_code, return_unused_kwargs=True, **model.config_overrides
        )
    if unknown := unknown.keys() - {"trust_remote_code"}:
        raise UserError(f"model.config_overrides: the configuration of {model.path} has no {min(unknown)!r}")
    return config


def load_model(model: Model, device: torch.device) -> Any:
    """A transformers causal model on the device, for rollout and training."""
    dtype = resolve_dtype(model.dtype, device)
    loaded = read_model(model, dtype)
    if model.quantization is not None:
        load_adapter(loaded, model)
        folder = AdapterFolder.find(model.path)
        quantize(loaded, model.quantization, device, dtype if folder is None else folder.encoded_from or dtype)
        loaded = loaded.to(device)
    else:
        loaded = loaded.to(device)
        load_adapter(loaded, model)
    if is_fusible_on(device, loaded, model):
        fuse(loaded)
    check_model(loaded)
    return loaded


STORED_WEIGHTS = "_stored_weights"
"""Attribute of a model whose parameters have no memory yet: their weights, by parameter."""


def load_to_shard(model: Model, device: torch.device) -> Any:
    """A model whose parameters have no memory (`torch.device("meta")`), for a trainer that shards it and computes on
    the device. The whole weights are files mapped into memory in the files' own dtype, or lists of such, so a rank
    reads only what it copies out of them. The trainer checks the model when it has its weights."""
    dtype = resolve_dtype(model.dtype, device)
    is_merged = model.lora is None and AdapterFolder.find(model.path) is not None
    with nullcontext() if is_merged else joining_later():
        loaded = read_model(model, dtype, as_stored=True)
    if is_merged:
        load_adapter(loaded, model)  # merged into the whole weights, which are in memory then
    setattr(loaded, STORED_WEIGHTS, detach_weights(loaded, dtype))
    if model.lora is not None:
        load_adapter(loaded, model)
    if is_fusible_on(device, loaded, model):
        fuse(loaded, move_weights=False)  # the weights that FSDP gathers are not where these are
    return loaded


def read_model(model: Model, dtype: torch.dtype, as_stored: bool = False) -> Any:
    """transformers' model on the CPU, with the attention of its path. Its weights are mapped files where they need no
    conversion. `as_stored`: they keep the dtype of the files."""
    with collector_paused():
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        register()
    hide_bars()
    if model.exact and dtype != torch.float32:
        raise UserError("model.exact: only float32 can be exact; set `model.dtype: float32`")
    config = load_config(model)
    path = choose_path(config, model.path, model.implementation)
    source = model_source(model.path)
    vision = load_vision(config, source)
    auto_class = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    with one_line(f"model.path: {model.path} could not be loaded"), explaining_shapes():
        loaded, report = auto_class.from_pretrained(
            source,
            output_loading_info=True,
            config=config,
            dtype="auto" if as_stored else dtype,
            attn_implementation=ATTENTION_NAME if path.kind == "fast" else None,
            trust_remote_code=model.trust_remote_code,
        )
    refuse_missing(report["missing_keys"], loaded, model.path)
    refuse_integers(loaded, source, model.path)
    if model.exact and path.kind == "general":
        raise UserError(f"model.exact: {model.path} takes the {path}, which rounds as transformers does; leave it out")
    if model.exact:
        make_exact(loaded)
        prefer_blas()
    if path.kind == "general":
        serialize_convolutions()
    if vision is not None:
        loaded.vision = vision
    return loaded.eval()


def hide_bars() -> None:
    """Hides transformers' bars of reading and writing weights. Those of a download stay on a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars  # type: ignore[attr-defined]
    from transformers.utils.logging import disable_progress_bar

    shows_downloads = sys.stderr.isatty() and not are_progress_bars_disabled()
    disable_progress_bar()
    if shows_downloads:
        enable_progress_bars()


@contextmanager
def explaining_shapes() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" in str(error):
            raise ValueError("its weights have other shapes than its config.json says") from error
        raise


def refuse_missing(missing: Collection[str], loaded: Any, path: str) -> None:
    """transformers gives tensors that the files lack random numbers."""
    if missing:
        whole = sum(1 for _ in loaded.parameters())
        raise UserError(
            f"model.path: {path} has no weights for {len(missing)} of the model's {whole} tensors, such as "
            f"{min(missing)}: they would be random. A file may be missing, or the names belong to another architecture"
        )


def refuse_integers(loaded: Any, source: str, path: str) -> None:
    """transformers rounds weights that are stored as integers, most of them to 0."""
    own = {name for name, parameter in loaded.named_parameters() if parameter.is_floating_point()}
    for file in (model_folder(source) or Path(source)).glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            for name in own.intersection(stored.keys()):
                if not (dtype := stored.get_slice(name).get_dtype()).startswith(("F", "BF")):
                    raise UserError(f"model.path: {path}: {name} is stored as {dtype}, and the model has real numbers")


def load_adapter(loaded: Any, model: Model) -> None:
    """Gives the model adapters as the recipe has them: new ones, or those in the folder that is the model's path.
    Without `model.lora`, such a folder's adapter is merged into the weights, which are rounded before as they were in
    its training."""
    folder = AdapterFolder.find(model.path)
    lora = folder.lora if model.lora is None and folder is not None else model.lora
    if lora is None:
        return
    if folder is not None and (theirs := adapter_shape(folder.lora)) != (ours := adapter_shape(lora)):
        raise UserError(f"model.lora: the adapter in {folder.path} has (rank, scale) {theirs}, the recipe {ours}")
    if folder is not None and folder.quantization is not None and folder.encoded_from is not None:
        if model.lora is None:
            round_weights(loaded, folder.quantization, folder.encoded_from)
        elif model.quantization != folder.quantization:
            raise UserError(
                f"model.quantization: the adapter in {folder.path} was trained beside weights in "
                f"{folder.quantization.bits} bits; set `model.quantization.bits: {folder.quantization.bits}`"
            )
    trained = [parameter for parameter in loaded.parameters() if parameter.requires_grad]
    add_adapters(loaded, lora)
    if folder is not None:
        folder.load_into(loaded)
    if model.lora is None:
        merge_adapters(loaded)
        for parameter in trained:  # adapters have frozen them
            parameter.requires_grad_()


def adapter_shape(lora: Lora) -> tuple[int, float]:
    return lora.rank, scale_of(lora)


def is_fusible_on(device: torch.device, loaded: Any, model: Model) -> bool:
    """Whether the fused layers are for this device: their Triton kernels need a GPU that has bfloat16. Older ones
    compute layer by layer with torch's own."""
    is_plain = not is_general(loaded) and not model.exact and model.quantization is None
    return device.type == "cuda" and is_plain and has_bfloat16(device)


def detach_weights(model: Any, dtype: torch.dtype | None = None) -> dict[nn.Parameter, Tensor]:
    """Replaces the parameters of a model by ones without memory, and returns what they held, by new parameter. `dtype`:
    parameters in the model's dtype get this one, but for those that transformers keeps in float32 then; what they held
    stays as it is."""
    weights: dict[nn.Parameter, Tensor] = {}
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    before, kept = None if dtype is None else model.dtype, () if dtype is None else model._get_dtype_plan(dtype)
    is_kept = re.compile("|".join(name.replace("*", ".*") for name in kept) or "$^").search
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                continue
            if parameter not in replaced:
                new = dtype if parameter.dtype == before and dtype is not None else parameter.dtype
                new = torch.float32 if is_kept(f"{prefix}.{name}") else new
                empty = torch.empty(parameter.shape, dtype=new, device="meta")
                replaced[parameter] = nn.Parameter(empty, parameter.requires_grad)
                weights[replaced[parameter]] = parameter.data
            setattr(module, name, replaced[parameter])
    return weights


@collector_paused()
def load_skeleton(model: Model, dtype: torch.dtype) -> Any:
    """The model without its weights, which are on the meta device: names, shapes, and how it ends its turns."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    config, source = load_config(model), model_source(model.path)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    with suppress(OSError):  # not all have one
        skeleton.generation_config = GenerationConfig.from_pretrained(source)
    return skeleton


def prefer_blas() -> None:
    """Sends matrix products on ARM to OpenBLAS instead of oneDNN.

    In OpenBLAS a row's result does not depend on how many other rows there are, which `model.exact` rests on. It is
    somewhat faster on a quiet machine and much slower on a busy one, so it is not the default. On other CPUs torch does
    not use oneDNN for float32 in the first place.
    """
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(False)


@cache
def serialize_convolutions() -> None:
    """Lets one thread at a time compute a convolution, on ARM.

    There oneDNN computes depthwise ones, which state space models have, with the Arm Compute Library, and keeps one
    object per shape for all threads: two that convolve the same shape at once get each other's numbers. The engine and
    the trainer of a run in one process are two threads. A backward pass is computed in another way, and is right.
    """
    if platform.machine() not in ("aarch64", "arm64"):
        return
    lock = threading.Lock()

    def serialized(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(convolve)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            with lock:
                return convolve(*args, **kwargs)

        return call

    for name in ("conv1d", "conv2d"):
        setattr(nn.functional, name, serialized(getattr(nn.functional, name)))


@collector_paused()
def load_tokenizer(model: Model) -> Any:
    """The model's tokenizer, with the recipe's chat template if it has one. Its attribute `vision` says how the model
    reads images, or is None."""
    source = model_source(model.path)
    from transformers import AutoTokenizer

    if (Path(model.path).expanduser() / "tokenizer_config.json").is_file():  # of an adapter's folder, its own
        source = str(Path(model.path).expanduser())
    config = load_config(model)  # first: transformers' tokenizers look at it, too
    with one_line(f"model.path: no tokenizer could be loaded from {model.path}"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = read_chat_template(model.chat_template)
    if model.chat_template_arguments and isinstance(tokenizer.chat_template, str):
        # Set within the template, so that everybody who renders with this tokenizer does so, also from a checkpoint.
        # JSON's values are Jinja's, but for null.
        arguments = model.chat_template_arguments.items()
        assignments = [f"{{% set {key} = {json.dumps(value)} %}}" for key, value in arguments]
        tokenizer.chat_template = "".join(["{% set null = none %}", *assignments, tokenizer.chat_template])
    tokenizer.vision = load_vision(config, model_source(model.path))
    return tokenizer


def read_chat_template(given: str) -> str:
    """A template, which may be given as the path of its file."""
    if len(given) >= 4096 or "{" in given:
        return given
    try:
        file = Path(given).expanduser()
        if not file.is_file():
            raise UserError(f"model.chat_template: {file} is neither a file nor a template")
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise UserError(f"model.chat_template: {file} has more than {MAX_TEMPLATE_BYTES} bytes; is it a template?")
        return file.read_text("utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: an unknown user's home
        raise UserError(f"model.chat_template: {given} cannot be read: {first_line(error)}") from error


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens with which the model ends its turn: the generation config's and the tokenizer's."""
    configured = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    tokens = configured if isinstance(configured, list) else [configured]
    for token in tokens:
        if token is not None and type(token) is not int:
            raise UserError(f"model.path: {model.name_or_path} has the end token {token!r}, which is not a number")
    return frozenset(token for token in [*tokens, tokenizer.eos_token_id] if token is not None)
