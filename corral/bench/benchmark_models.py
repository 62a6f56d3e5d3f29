"""Models to measure with: random weights of a known shape, a built-in model, or a folder of the user's.

A shape is written once, as a transformers folder that every side can load, into the user's cache. Its tokenizer can
encode every byte and decode every token of the vocabulary; its end token lies outside of the vocabulary, so that no
sample ends early on any side.
"""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from corral.data.plugins import did_you_mean
from corral.hub import BLANK, SMOLLM2, cached_folder
from corral.model.builtin_models import builtin_folder, byte_tokenizer, write_whole_folder
from corral.recipe.errors import UserError

NEVER_SAMPLED = "<|never|>"
SPECIAL_TOKENS = ("<|pad|>", "<|start|>")
WEIGHT_SUFFIXES = (".safetensors", ".bin")
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
    "qwen2.5-3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
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
COMMON_CONFIG: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def model_folder(model: str, dtype: str) -> Path:
    """Folder of the model, in which it is, or will be once `save_random_model` has run."""
    if model in SHAPES:
        return cached_folder(f"bench-{model}-{dtype}")
    if (builtin := builtin_folder(model)) is not None:
        return builtin
    folder = Path(model).expanduser().resolve()
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        known = [*SHAPES, SMOLLM2, BLANK]
        raise UserError(
            f"--model {model}: {what}, and the known models are {', '.join(known)}{did_you_mean(model, known)}"
        )
    return folder


def save_random_model(shape: str, folder: Path, device: str, dtype: str) -> None:
    """Writes a model with random weights; made on the device, where that takes a second instead of a minute."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def write(work: Path) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(**(COMMON_CONFIG | SHAPES[shape]))
        with torch.device(device):
            model = Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(work)
        save_tokenizer(work, config.vocab_size)

    write_whole_folder(folder, write)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A token for every byte, and numbers for the rest: different tokens are different text."""
    words = tuple(f"Ġ{number}" for number in range(vocab_size - len(SPECIAL_TOKENS) - 256))
    special = {"pad_token": SPECIAL_TOKENS[0], "bos_token": SPECIAL_TOKENS[1], "eos_token": NEVER_SAMPLED}
    byte_tokenizer(SPECIAL_TOKENS, words, use_regex=False, **special).save_pretrained(folder)


def endless_copy(source: Path, folder: Path) -> None:
    """Copies the model, its weights as links, with an end token that is new and so never sampled, or hardly ever."""
    from transformers import AutoTokenizer

    folder.mkdir()
    for file in source.iterdir():
        if file.suffix in WEIGHT_SUFFIXES:
            (folder / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"eos_token": NEVER_SAMPLED})
    if tokenizer.pad_token is None:
        tokenizer.pad_token = NEVER_SAMPLED
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**values, "eos_token_id": None}))


def prompt_texts(tokenizer: Any, num_prompts: int, num_tokens: int, num_shared: int = 0) -> list[str]:
    """Distinct texts of `num_tokens` tokens each, of which all have the first `num_shared` in common; the same in every
    run. Texts that are not tokenized as they were made are left out."""
    rng = Random(0)

    def tokens_of(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    def random_text(length: int) -> str:
        letters = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(4 * length))
        return str(tokenizer.decode(tokens_of(letters)[:length], skip_special_tokens=True))

    prefix = random_text(num_shared)
    shared, texts = tokens_of(prefix), dict[str, None]()
    for _ in range(100 * num_prompts):
        text = prefix + random_text(num_tokens - num_shared)
        tokens = tokens_of(text)
        if len(tokens) == num_tokens and tokens[: len(shared)] == shared:
            texts[text] = None
        if len(texts) == num_prompts:
            return list(texts)
    raise UserError(f"--model: its tokenizer has no {num_prompts} texts of {num_tokens} tokens")
