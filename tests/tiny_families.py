"""Tiny random models of every causal architecture that transformers has, and what they are compared by.

A configuration class's own defaults are shrunk: sizes by their names, and what a family needs beyond that by a table.
Weights are large enough that a wrong mask, position or state moves log-probs by tenths of nats at least.
"""

import inspect
import math
import warnings
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "attention_hidden_size", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
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
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OVERRIDES: dict[str, dict[str, Any]] = {}


def causal_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_family_config(model_type: str, **changes: Any) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    accepted = set(inspect.signature(config_class.__init__).parameters) | set(default.to_dict())
    sizes = {key: value for key, value in SIZES.items() if key in accepted and getattr(default, key, 0) is not None}
    return config_class(**{**sizes, **OVERRIDES.get(model_type, {}), **changes})


def tiny_family_model(config: Any, seed: int = 0, attention: str | None = None) -> Any:
    """The model with random weights in float32; ValueError if it is not tiny."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if num_parameters > 20e6:
        raise ValueError(f"{num_parameters / 1e6:.0f} M parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    randomize(model, seed)
    return model.eval()


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.dim() >= 2:
            parameter.copy_(noise * 1.2 / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(0.2 * noise)
