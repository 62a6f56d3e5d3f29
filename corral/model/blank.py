"""A small Llama that knows nothing, for trying environments and algorithms where no weights are at hand.

It reads bytes: one token for each, so that every cell of a board is a token of its own. The weights are random, by a
fixed seed; the folder, in Hugging Face layout, is made on first use and kept in the user's cache.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

BLANK = "blank-1m"
SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>")
NUM_BYTES = 256
SHAPE: dict[str, Any] = {
    "vocab_size": NUM_BYTES + len(SPECIAL_TOKENS),
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
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def blank_folder() -> Path:
    folder = Path.home() / ".cache" / "corral" / "models" / BLANK
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{BLANK}-", dir=folder.parent))
        try:
            make_blank(work)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def make_blank(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
