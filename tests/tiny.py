"""Tiny random models of several families, and a character tokenizer with a chat template."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""The same tests run on both."""
CHARACTERS = "\n !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{|}~"
SPECIAL = ["<pad>", "<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_config(family: str = "llama") -> PretrainedConfig:
    configs = {
        "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
        "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
        "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
        "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    }
    return configs[family]()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<|start|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
    )


def save_tiny_model(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> None:
    """`changes`: of its configuration."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def save_tiny_classifier(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> None:
    """A random reward model. `changes`: of its configuration."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    for key, value in {"num_labels": 1, **changes}.items():
        setattr(config, key, value)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.normal_()  # scores that differ by more than rounding
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def save_vowel_classifier(folder: Path) -> None:
    """A reward model that prefers conversations with many vowels: attention is the mean over all tokens, and writes how
    many are vowels where the head looks."""
    config = tiny_config("llama")
    config.num_labels, config.num_hidden_layers = 1, 1
    model = AutoModelForSequenceClassification.from_config(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        for module in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
            module.weight.zero_()
        model.score.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        for number, token in enumerate([*SPECIAL, *CHARACTERS]):
            model.model.embed_tokens.weight[number, 0 if token in tuple("aeiou") else 1] = 1.0
        layer.self_attn.v_proj.weight[0, 0] = layer.self_attn.o_proj.weight[2, 0] = model.score.weight[0, 2] = 1.0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
