"""Loading models and tokenizers: from a folder, by a hub name, or built-in ones."""

import json
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from corral.model.attention import ATTENTION_NAME, make_exact, register
from corral.model.builtin_models import builtin_folder
from corral.model.families import choose_path
from corral.model.fused_layers import fuse
from corral.model.model_check import check_model
from corral.model.vision import load_vision
from corral.recipe.errors import UserError
from corral.recipe.schema import Model


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name. `auto` is bfloat16 where the device multiplies it in hardware; else float16 on a GPU,
    such as a V100, and float32 on a CPU."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if has_bfloat16(device) else torch.float16
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def has_bfloat16(device: torch.device) -> bool:
    """Whether the GPU multiplies bfloat16: NVIDIA's since Ampere (sm_80), and AMD's."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def model_source(path: str) -> str:
    """A folder or a hub name that transformers understands. Built-in models are made on first use."""
    if (builtin := builtin_folder(path)) is not None:
        return str(builtin)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model.path: {folder} is a folder without config.json, so not a model in Hugging Face layout"
            )
        return str(folder)
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"model.path: {path} is not a folder")
    return path


def load_config(model: Model) -> Any:
    """transformers' configuration of the model, with the recipe's changes."""
    from transformers import AutoConfig

    try:
        config, unknown = AutoConfig.from_pretrained(
            model_source(model.path),
            trust_remote_code=model.trust_remote_code,
            return_unused_kwargs=True,
            **model.config_overrides,
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path: {model.path} could not be loaded: {first_line(error)}") from error
    if unknown := unknown.keys() - {"trust_remote_code"}:
        raise UserError(f"model.config_overrides: the configuration of {model.path} has no {min(unknown)!r}")
    return config


def load_model(model: Model, device: torch.device, computes_on: torch.device | None = None) -> Any:
    """A transformers causal model for rollout and training. `computes_on`: the device that will compute, where that is
    not the one it is loaded to, as with a model that is sharded after it was loaded."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    register()
    computes_on = computes_on or device
    dtype = resolve_dtype(model.dtype, computes_on)
    if model.exact and dtype != torch.float32:
        raise UserError("model.exact: only float32 can be exact; set `model.dtype: float32`")
    config = load_config(model)
    path = choose_path(config, model.path, model.implementation)
    source = model_source(model.path)
    vision = load_vision(config, source)
    auto_class = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    try:
        loaded = auto_class.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME if path.kind == "fast" else None,
            trust_remote_code=model.trust_remote_code,
        )
    except (OSError, ValueError, json.JSONDecodeError, SafetensorError) as error:
        raise UserError(f"model.path: {model.path} could not be loaded: {first_line(error)}") from error
    if model.exact and path.kind == "general":
        raise UserError(f"model.exact: {model.path} takes the {path}, which rounds as transformers does; leave it out")
    if model.exact:
        make_exact(loaded)
        prefer_blas()
    loaded = loaded.to(device).eval()
    if vision is not None:
        loaded.vision = vision
    # The Triton kernels are for GPUs that have bfloat16; older ones compute layer by layer with torch's own.
    if computes_on.type == "cuda" and path.kind == "fast" and not model.exact and has_bfloat16(computes_on):
        fuse(loaded)
    check_model(loaded, model.path)
    return loaded


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


def load_tokenizer(model: Model) -> Any:
    """The model's tokenizer, with the recipe's chat template if it has one. Its attribute `vision` says how the model
    reads images, or is None."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_source(model.path), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: no tokenizer could be loaded from {model.path}: {first_line(error)}") from error
    if model.chat_template is not None:
        file = Path(model.chat_template)
        is_file = len(model.chat_template) < 4096 and "{" not in model.chat_template
        if is_file and not file.is_file():
            raise UserError(f"model.chat_template: {file} is neither a file nor a template")
        tokenizer.chat_template = file.read_text() if is_file else model.chat_template
    if model.chat_template_arguments and isinstance(tokenizer.chat_template, str):
        # Set within the template, so that everybody who renders with this tokenizer does so, also from a checkpoint.
        # JSON's values are Jinja's, but for null.
        arguments = model.chat_template_arguments.items()
        assignments = [f"{{% set {key} = {json.dumps(value)} %}}" for key, value in arguments]
        tokenizer.chat_template = "".join(["{% set null = none %}", *assignments, tokenizer.chat_template])
    tokenizer.vision = load_vision(load_config(model), model_source(model.path))
    return tokenizer


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens with which the model ends its turn: the generation config's and the tokenizer's."""
    configured = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    tokens = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in [*tokens, tokenizer.eos_token_id] if token is not None)


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
