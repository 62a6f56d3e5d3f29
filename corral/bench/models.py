"""Models to measure with: random weights of a known shape, or a folder of the user's.

A shape is written once, as a transformers folder that every side can load, into the user's cache. Its tokenizer reads
bytes and can write every token of the vocabulary; its end token lies outside of the vocabulary, so that nothing ends
early on any side.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from corral.data.plugins import did_you_mean
from corral.recipe.errors import UserError

NEVER_SAID = "<|never|>"
SPECIAL_TOKENS = ("<|pad|>", "<|start|>")
WEIGHTS = (".safetensors", ".bin")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
    },
}
COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def folder_of(model: str, dtype: str) -> Path:
    """Where the model is, or will be once `make_shape` has run."""
    if model in SHAPES:
        return Path.home() / ".cache" / "corral" / "models" / f"bench-{model}-{dtype}"
    folder = Path(model).expanduser().resolve()
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise UserError(f"--model {model}: {what}, and the shapes are {', '.join(SHAPES)}{did_you_mean(model, SHAPES)}")
    return folder


def make_shape(shape: str, folder: Path, device: str, dtype: str) -> None:
    """Random weights; on the device, where drawing them takes a second instead of a minute."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def write(work: Path) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(**SHAPES[shape], **COMMON)
        with torch.device(device):
            model = Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(work)
        padded_tokenizer(config.vocab_size).save_pretrained(work)

    write_whole(folder, write)


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """The folder is there with all that belongs into it, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(work)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def padded_tokenizer(vocab_size: int) -> Any:
    """A token for every byte, and number words for the rest of the vocabulary: different tokens are different text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [f"Ġ{number}" for number in range(vocab_size - len(known))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*known, *words])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=start,
        eos_token=NEVER_SAID,
        clean_up_tokenization_spaces=False,
    )


def endless_copy(source: Path, folder: Path) -> None:
    """The model, its weights linked, with an end token that is new and so never drawn, or hardly ever."""
    from transformers import AutoTokenizer

    folder.mkdir()
    for file in source.iterdir():
        if file.suffix in WEIGHTS:
            (folder / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"eos_token": NEVER_SAID})
    if tokenizer.pad_token is None:
        tokenizer.pad_token = NEVER_SAID
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**values, "eos_token_id": None}))


def prompt_texts(tokenizer: Any, num_prompts: int, num_tokens: int) -> list[str]:
    """Distinct texts of so many tokens each, the same in every run."""
    dice, texts = Random(0), dict[str, None]()
    for _ in range(100 * num_prompts):
        letters = "".join(dice.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(4 * num_tokens))
        text = tokenizer.decode(tokenizer(letters)["input_ids"][:num_tokens], skip_special_tokens=True)
        if len(tokenizer(text)["input_ids"]) == num_tokens:
            texts[text] = None
        if len(texts) == num_prompts:
            return list(texts)
    raise UserError(f"--model: its tokenizer finds no {num_prompts} texts of {num_tokens} tokens")
