"""Tiny random models of every causal architecture that transformers has, and what they are compared by.

A configuration class's own defaults are shrunk: sizes by their names, and what a family needs beyond that by a table.
Weights are large enough that a wrong mask, position or state moves log-probs by tenths of nats at least.
"""

import asyncio
import inspect
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import tiny_tokenizer
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corral.data.batch import Batch, Trajectory
from corral.model.attention import attention_layers
from corral.model.families import ModelPath, check_length, choose_path
from corral.model.model_loading import default_device, load_model
from corral.model.narrow import EXPERTS, LAYERS, OTHER_SIZES, WIDTHS
from corral.recipe.schema import Model, Optimizer
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine, core_class
from corral.rollout.paged_core import PagedCore
from corral.rollout.slot_core import SlotCore
from corral.training.native_trainer import NativePolicyTrainer

VOCABULARY = 96
MAX_LENGTH = 64
SIZES: dict[str, Any] = {
    **{**WIDTHS, **LAYERS, **EXPERTS, **OTHER_SIZES},
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
VISION_SIZES = {"depth": 2, "out_hidden_size": 64, "num_position_embeddings": 64, "patch_size": 8, "image_size": 32}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
HYBRID = ["linear_attention", "full_attention"] * 2
DOTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
GEMMA3N = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "layer_types": ALTERNATING,
    "num_kv_shared_layers": 0,
}
GEMMA4 = {**GEMMA3N, "global_head_dim": 32}
ZAMBA = {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 128, "attention_head_dim": 32}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu", "minicpm3", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2"), LATENT),
    "deepseek_v2": {**LATENT, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "bailing_hybrid": {**LATENT, "layer_group_size": 2},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "dots1": {"layer_types": ["full_attention"] * 4, **DOTS},
    "dots3_note_text": {
        **{**DOTS, **LATENT, "layer_types": ["indexed_attention", "sliding_attention"] * 2},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
        **{"swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16, "sliding_window": 8},
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense"] * 4},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "kimi_linear": {**LATENT, "layer_types": HYBRID, "linear_head_dim": 8, "linear_num_heads": 2},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "expand": 2},
    "zamba2": {**ZAMBA, "hybrid_layer_ids": [1, 3], "mamba_headdim": 32},
    "zamba": {**ZAMBA, "use_mamba_kernels": False},
    "gemma3n_text": {**GEMMA3N, "laurel_rank": 8, "intermediate_size": 48, "activation_sparsity_pattern": [0.0] * 4},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA4),
    "reformer": {"is_decoder": True},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 64, "indexer_compress_ratio": 4, "hc_lowrank": 16, "ngram_vocab_size_base": 64},
    },
    "zaya": {"num_hidden_layers": 4, "num_experts_per_tok": 1},
    "xlm": {"n_words": VOCABULARY, "emb_dim": 64, "causal": True},
}
WINDOW = 8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}


def longrope(original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original, **factors}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic-over": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 8},
    ),
    "llama-llama3rope": (
        "llama",
        {"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-longrope-short": ("phi3", longrope(64)),
    "phi3-longrope": ("phi3", longrope(8)),
    "starcoder2-nowindow": ("starcoder2", {"sliding_window": None}),
    "phimoe-window20": ("phimoe", {"sliding_window": 20}),
    "qwen2_moe-window20": ("qwen2_moe", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 4}),
    "mistral-window8": ("mistral", {"sliding_window": WINDOW}),
    "qwen2-window8": (
        "qwen2",
        {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": ALTERNATING},
    ),
    "gemma2-window8": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3-window8": ("gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "olmo3-window8": ("olmo3", {"sliding_window": WINDOW}),
    "exaone4-window8": ("exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "cohere2-window8": ("cohere2", {"sliding_window": WINDOW, "logit_scale": 0.25}),
    "gpt_oss-window8": ("gpt_oss", {"sliding_window": WINDOW}),
    "gemma2-caps": (
        "gemma2",
        {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 5,
            "query_pre_attn_scalar": 100,
        },
    ),
    "gemma2-nocaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 3}),
    "gemma3-window1": ("gemma3_text", {"sliding_window": 1, "attn_logit_softcapping": 2.0}),
    "mistral-window1": ("mistral", {"sliding_window": 1}),
    "mistral-window0": ("mistral", {"sliding_window": 0}),
    "mistral-window-5": ("mistral", {"sliding_window": -5}),
    "gpt_oss-window1": ("gpt_oss", {"sliding_window": 1, "rope_parameters": YARN}),
    "cohere2-allwindows": (
        "cohere2",
        {"sliding_window": 3, "layer_types": ["sliding_attention"] * 4, "logit_scale": 4.0},
    ),
    "ministral3-scaled": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}},
    ),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    "nanochat-cap": ("nanochat", {"final_logit_softcapping": 2.0}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.5}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {"v_head_dim": 12, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "granite-odd": (
        "granite",
        {"embedding_multiplier": 0.1, "residual_multiplier": 2.0, "attention_multiplier": 0.7, "logits_scaling": 0.3},
    ),
    "granite-real": (
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    ),
    "deepseek_v2-v<qk": ("deepseek_v2", {"v_head_dim": 12}),
    "deepseek_v3-v<qk": ("deepseek_v3", {"v_head_dim": 12}),
    "deepseek_v3-samewidth": ("deepseek_v3", {"v_head_dim": 24}),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "llama4-chunk8": ("llama4_text", {"attention_chunk_size": 8}),
    "gemma4-sharedkv": ("gemma4_text", {"num_kv_shared_layers": 2}),
}
MECHANISMS = {
    "grouped queries and rotary positions": "llama",
    "biases": "llama-bias",
    "tied embedding": "llama-tied",
    "scaled rotary frequencies": "llama-yarn",
    "partly rotary positions, joined projections": "phi3-partial",
    "learned positions": "gpt2",
    "ALiBi": "falcon-alibi",
    "norms of queries and keys": "qwen3",
    "norms after attention": "olmo3-window8",
    "attention and MLP in parallel, layers without positions": "cohere2-window8",
    "scaled embeddings, residuals and logits": "granite-real",
    "window in all layers": "mistral-window8",
    "soft cap, windows in some layers": "gemma2-window8",
    "attention sinks": "gpt_oss-window8",
    "attention in chunks": "llama4-chunk8",
    "latent attention": "deepseek_v3-v<qk",
    "sparse attention by an index": "deepseek_v32",
    "keys and values shared by layers": "gemma4-sharedkv",
    "experts": "qwen3_moe",
    "a shared expert with a gate": "qwen2_moe",
    "experts in groups, chosen by sigmoids with a correction": "glm4_moe",
    "a router in float32, and layers without experts": "ernie4_5_moe",
    "experts that are stored together": "granitemoeshared",
    "state space": "mamba",
    "state space and attention": "jamba",
    "linear attention by the delta rule": "qwen3_5_text",
    "convolution": "lfm2",
    "decoder of an encoder-decoder": "bart",
    "text part of a larger model": "gemma3",
    "refused: tokens see those behind them": "cpmant",
    "refused: positions that change with the length": "phi3-longrope",
}
"""What architectures differ in, and for each the one that stands for it: CI compares these in every submission."""


def causal_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_family_config(model_type: str, **changes: Any) -> Any:
    return tiny_config(CONFIG_MAPPING[model_type], changes)


def tiny_config(config_class: Any, changes: dict[str, Any]) -> Any:
    """With its parts (text, vision, audio), where it has any."""
    default = config_class()
    model_type = default.model_type
    accepted = set(inspect.signature(config_class.__init__).parameters) | set(default.to_dict())
    sizes = {key: value for key, value in SIZES.items() if key in accepted and not is_unset(default, key)}
    if "vision" in model_type:
        sizes |= {key: value for key, value in VISION_SIZES.items() if key in accepted}
    parts = {
        key: tiny_config(type(part), {}).to_dict()
        for key in getattr(config_class, "sub_configs", {})
        if isinstance(part := getattr(default, key, None), PretrainedConfig)
    }
    return config_class(**{**sizes, **parts, **OVERRIDES.get(model_type, {}), **changes})


def is_unset(config: Any, key: str) -> bool:
    """Of Gemma 4, whose layers differ in some keys, these are not asked for."""
    return vars(config).get(key, 0) is None


def config_of(name: str) -> Any:
    """The configuration of a type, or of one of the variants."""
    if name in VARIANTS:
        model_type, changes = VARIANTS[name]
        return tiny_family_config(model_type, **changes)
    return tiny_family_config(name)


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


def save_with_tokenizer(name: str, folder: Path) -> Path:
    """A model of the family that speaks the tiny tokenizer's tokens, as runs load it."""
    config, tokenizer = config_of(name), tiny_tokenizer()
    config.update({"vocab_size": len(tokenizer)})
    tiny_family_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if parameter.dim() >= 2:
            parameter.copy_(noise * 1.2 / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(0.2 * noise)


# --- comparing with plain transformers

GENERATOR = np.random.default_rng(5)
STEM = GENERATOR.integers(3, VOCABULARY, 9).tolist()
SEQUENCES = [
    [*STEM, *GENERATOR.integers(3, VOCABULARY, 12).tolist()],
    [*STEM, *GENERATOR.integers(3, VOCABULARY, 5).tolist()],
    [*STEM[:4], *GENERATOR.integers(3, VOCABULARY, 17).tolist()],
    GENERATOR.integers(3, VOCABULARY, 3).tolist(),
]
"""Ragged sequences, some with a common beginning."""


@dataclass(frozen=True)
class Comparison:
    """The largest differences from plain transformers: of log-probs in nats, of gradients relative to the largest."""

    path: ModelPath
    trainer: float
    gradient: float
    engine: float
    cores: str = ""

    @property
    def is_right(self) -> bool:
        """A GPU rounds otherwise than the CPU that it is compared with: up to 0.004 was seen."""
        return max(self.trainer, self.engine, self.gradient) < (1e-2 if torch.cuda.is_available() else 1e-3)


def plain_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-prob of each token after the first, by the model's own forward pass."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]


def compare_folder(folder: Path, **settings: Any) -> Comparison:
    """Loads the model as a run does, onto a GPU where there is one, and compares trainer, gradients and engine cores
    with plain transformers on the CPU; UserError where the model is refused."""
    model = Model(path=str(folder), dtype="float32", **settings)
    path = choose_path(AutoConfig.from_pretrained(folder), str(folder), model.implementation)
    check_length(AutoConfig.from_pretrained(folder), MAX_LENGTH)
    ours = load_model(model, default_device())
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    trainer, gradient = compare_trainer(ours, plain)
    cores = [core_class(ours, None)]
    if cores[0] is SlotCore and fits_paging(ours) and not torch.cuda.is_available():
        cores.append(PagedCore)  # on a GPU it is the one that was chosen, unless heads are too narrow for it
    known: dict[tuple[int, ...], torch.Tensor] = {}
    engine = max(asyncio.run(compare_engine(ours, plain, core is PagedCore, known)) for core in cores)
    return Comparison(path, trainer, gradient, engine, ", ".join(core.__name__ for core in cores))


def compare_trainer(ours: Any, plain: Any) -> tuple[float, float]:
    batch = Batch.of([Trajectory.from_tokens(tokens, prompt_length=2) for tokens in SEQUENCES])
    trainer = NativePolicyTrainer(ours, temperature=1.0, optimizer=Optimizer(), total_updates=1)
    [pack] = batch.pack(10**6)
    weights = torch.linspace(-1, 1, len(pack.flat))
    computed: list[torch.Tensor] = []

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        computed.append(logprobs.detach().cpu())
        return (weights.to(logprobs.device) * logprobs).sum()

    trainer.forward_backward([(pack, loss)])
    places = {int(place): n for n, place in enumerate(pack.flat)}
    difference, start, total = 0.0, 0, torch.zeros(())
    for tokens in SEQUENCES:
        expected = plain_logprobs(plain, tokens)
        rows = [places[start + n] for n in range(2, len(tokens))]
        difference = max(difference, float((expected[1:] - computed[0][rows]).abs().max()))
        total = total + (weights[rows] * expected[1:]).sum()
        start += len(tokens)
    total.backward()
    theirs = dict(plain.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
    worst = 0.0
    for name, parameter in ours.named_parameters():
        own, other = parameter.grad, theirs[name].grad
        if own is not None or other is not None:
            own = torch.zeros(()) if own is None else own.cpu()
            worst = max(worst, float((own - (0 if other is None else other)).abs().max()))
    return difference, worst / largest


async def compare_engine(
    ours: Any, plain: Any, paged: bool, known: dict[tuple[int, ...], torch.Tensor] | None = None
) -> float:
    """Several samples of prompts of different lengths, more than fit at once, each continued by a second turn.
    `known`: log-probs by the plain model, which computes no sequence twice where two cores sample the same."""
    engine = NativeEngine(ours, None, max_sequences=5, max_prefill_tokens=32, max_length=MAX_LENGTH, paged=paged)
    known = {} if known is None else known

    async def conversation(prompt: list[int], seed: int) -> float:
        sampling = Sampling(max_tokens=6 + seed % 3, temperature=1.0)
        first = await engine.generate(prompt, sampling, seed, keep_prefix=True)
        longer = [*prompt, *first.tokens, 7, 8, 9]
        second = await engine.generate(longer, sampling, seed + 100, prefix=first.prefix)
        # One pass over both turns: later tokens change nothing in a causal model, and others were refused before this.
        whole = [*longer, *second.tokens]
        if tuple(whole) not in known:
            with torch.no_grad():
                known[tuple(whole)] = plain_logprobs(plain, whole)
        expected = known[tuple(whole)]
        return max(
            float((expected[start - 1 :][: len(turn.tokens)] - torch.tensor(turn.logprobs)).abs().max())
            for start, turn in ((len(prompt), first), (len(longer), second))
        )

    prompts = [SEQUENCES[0][:10], SEQUENCES[1][:12], SEQUENCES[2][:7], SEQUENCES[3], SEQUENCES[0][:10]]
    worst = await asyncio.gather(*(conversation(prompts[i % 5], i) for i in range(8)))
    engine.close()
    return max(worst)


def fits_paging(model: Any) -> bool:
    """Whether the paged core would decode it, but for the width of its heads, which only the kernels limit."""
    layers = attention_layers(model).values()
    shapes = {(layer.kv_heads, layer.key_width, layer.value_width) for layer in layers}
    return len(shapes) == 1 and all(layer.kernel.softcap is None for layer in layers)
