"""A model of the same architecture with few narrow layers, made of a configuration alone: what it computes is of the
same kinds, in a thousandth of the time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corral.model.builtin_models import BLANK_CHAT_TEMPLATE, BLANK_SHAPE, BLANK_SPECIAL_TOKENS, blank_tokenizer

WIDTHS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "attention_hidden_size", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
}
"""Sizes by their names in configurations. These are as many times larger as it takes to cut them for tensor
parallelism."""
LAYERS = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4)
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
OTHER_SIZES: dict[str, int] = {
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_state_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "time_step_rank": 4,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"), 4),
    "linear_value_head_dim": 8,
}
HEADS, KV_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads"), ("num_key_value_heads", "num_kv_heads")
TOKENS = {name: BLANK_SHAPE[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}


def narrow_values(config: Mapping[str, Any], pipeline: int = 1, tensor: int = 1, expert: int = 1) -> dict[str, Any]:
    """Returns what is another value in a narrow configuration: what divides for a mesh still does, and what does not
    divide stays as it is, for the loader to refuse."""

    def number(names: tuple[str, ...], default: int = 0) -> int:
        return next((int(config[name]) for name in names if config.get(name)), default)

    heads, layers, experts = number(HEADS, 1), number(tuple(LAYERS), 1), number(tuple(EXPERTS))
    kv_heads = number(KV_HEADS, heads)
    times = max(1, tensor // 2)
    values: dict[str, Any] = {name: size * times for name, size in WIDTHS.items()}
    if heads == kv_heads or config.get("kv_lora_rank"):
        values |= dict.fromkeys(KV_HEADS, values["num_attention_heads"])
    if heads % tensor or kv_heads % tensor:
        values |= dict.fromkeys(HEADS, heads) | dict.fromkeys(KV_HEADS, kv_heads)
        values |= {name: 16 * heads for name, size in WIDTHS.items() if size == 64}
    kept_experts = experts if experts % expert else max(4, 2 * expert)
    values |= OTHER_SIZES | dict.fromkeys(EXPERTS, kept_experts) | TOKENS
    if config.get("kv_lora_rank"):
        values["head_dim"] = values["qk_rope_head_dim"]
    kept_layers = min(layers, max(4, 2 * pipeline, *first_of_each(config, layers)))
    values |= dict.fromkeys(LAYERS, kept_layers)
    values |= {
        name: value[:kept_layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == layers > kept_layers
    }
    values["max_position_embeddings"] = max(4096, BLANK_SHAPE["max_position_embeddings"])
    return {name: value for name, value in values.items() if config.get(name) is not None}


def first_of_each(config: Mapping[str, Any], layers: int) -> Iterator[int]:
    """Yields how many layers it takes to have one of each kind that the configuration lists."""
    for value in config.values():
        if isinstance(value, list) and len(value) == layers:
            for kind in {str(one) for one in value}:
                yield next(place for place, one in enumerate(value, 1) if str(one) == kind)


def save_narrow_model(
    config: Mapping[str, Any] | None, mesh: Mapping[str, int], folder: Path, *, scores: bool = False
) -> None:
    """Saves one with random weights, and a tokenizer whose tokens are bytes. `config`: what is in a `config.json`;
    without one it is a Llama. `scores`: a classifier with one label."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    written = dict(config or {**BLANK_SHAPE, "model_type": "llama", "num_key_value_heads": 2})
    full = AutoConfig.for_model(written.pop("model_type"), **written)
    values = full.to_dict()
    narrow = type(full).from_dict(values | narrow_values(values, **mesh))
    if scores:
        narrow.num_labels = 1
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(narrow, dtype=torch.float32)
    model.save_pretrained(folder)
    blank_tokenizer(BLANK_SPECIAL_TOKENS, BLANK_CHAT_TEMPLATE).save_pretrained(folder)
