"""Which models Corral computes, and how: the fast path for families that were compared with transformers, the general
path for every other causal model, and a refusal in words for the rest.

The fast path (`corral.model.attention`) runs transformers' own layers over packed token trees and paged caches, with
Corral's attention. That is right if a layer's only dealing with other tokens is attention, and if it hands its mask,
scale, window, sinks and soft-cap to the attention function. Which families do is not guessed from a configuration: a
family is in `FAMILIES` once `tests/model/test_families.py` has compared it with plain transformers.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from corral.data.sources import check_sizes
from corral.hub import BLANK_VISION, BUILTIN_MODELS
from corral.recipe.errors import RecipeError, UserError, one_line
from corral.recipe.plan import Plan, make_plan
from corral.recipe.schema import Model, Parallel, Recipe
from corral.recipe.shape import ModelShape, base_model, model_folder


@dataclass(frozen=True)
class ModelFamily:
    """Architectures of the fast path with one kind of layer. (Which of them have fused layers is `fused_layers.py`'s
    matter, which decides it by a layer's parts.)"""

    name: str
    model_types: tuple[str, ...]
    """`model_type` of the configuration of the text model."""
    difference: str = ""
    """How its attention differs from Llama's."""


FAMILIES = (
    ModelFamily("Llama, Mistral, Qwen", ("llama", "mistral", "qwen2", "qwen3")),
    ModelFamily(
        "dense, full attention",
        (
            "apertus", "arcee", "bitnet", "cwm", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "granite", "helium",
            "hunyuan_v1_dense", "hyperclovax", "jais2", "mellum", "ministral", "ministral3", "olmo", "olmo2",
            "olmo3", "phi", "phi3", "seed_oss", "smollm3", "starcoder2",
        ),
    ),
    ModelFamily(
        "GPT-2 and its kind",
        ("gpt2", "gpt_bigcode", "gpt_neox", "opt", "biogpt", "persimmon"),
        "learned or partly rotary positions",
    ),
    ModelFamily(
        "mixtures of experts",
        (
            "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe",
            "ernie4_5_moe", "exaone_moe", "flex_olmo", "hunyuan_v1_moe", "hy_v3", "laguna", "minimax_m2", "phimoe",
            "solar_open", "afmoe",
        ),
    ),
    ModelFamily("Gemma 2, Gemma 3, Cohere", ("gemma2", "gemma3_text", "vaultgemma", "cohere", "cohere2", "nanochat"),
                "windows, soft-capped attention, soft-capped or scaled logits"),
    ModelFamily("gpt-oss", ("gpt_oss",), "windows and attention sinks"),
    ModelFamily("latent attention", ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "axk1"),
                "values narrower than keys"),
)  # fmt: skip
FAST_TYPES = {model_type: family for family in FAMILIES for model_type in family.model_types}

VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Types of models whose images were compared with transformers' own processor and forward pass (`vision.py`)."""

WINDOW_OF_MASK = {"phimoe": "sliding_window", "qwen2_moe": "use_sliding_window"}
"""Families that window their attention by a mask alone, and the key with which they do."""
FAST_ROPE = ("default", "linear", "llama3", "yarn", "proportional", "dynamic", "longrope")
"""Rotary embeddings that depend on a token's position only; the last two do up to a length (`check_length`)."""
LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class ModelPath:
    """How a model is computed."""

    kind: Literal["fast", "general"]
    reason: str
    reads_images: bool = False

    def __str__(self) -> str:
        return f"{self.kind} path ({self.reason})"


def choose_path(config: Any, path: str, implementation: str = "auto") -> ModelPath:
    """How to compute a model with this configuration; raises where Corral cannot. `path`: as the recipe names it."""
    with one_line(f"model.path: {path}: its config.json makes no sense"):
        return _choose_path(config, path, implementation)


def _choose_path(config: Any, path: str, implementation: str) -> ModelPath:
    check_trainable(config, path)
    text = config.get_text_config(decoder=True)
    model_type = str(getattr(text, "model_type", ""))
    family = FAST_TYPES.get(model_type)
    if implementation == "general":
        return ModelPath("general", "`model.implementation: general`")
    if getattr(config, "model_type", None) in VISION_TYPES:
        return ModelPath("general", "it reads images", reads_images=True)
    if family is None:
        return ModelPath("general", f"`{model_type}` has no fast path yet")
    if getattr(config, "auto_map", None):
        return ModelPath("general", "its code comes with the model")
    if text is not config:
        return ModelPath("general", "it is part of a larger model")
    if rope := rope_types(text) - set(FAST_ROPE):
        return ModelPath("general", f"its rope scaling `{min(rope)}` is not known here")
    if getattr(text, "alibi", False):
        return ModelPath("general", "its attention is biased by position (ALiBi)")
    if layer_types := set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES:
        return ModelPath("general", f"layers of the type `{min(layer_types)}`")
    if getattr(text, WINDOW_OF_MASK.get(model_type, ""), None):
        return ModelPath("general", "its window is in a mask, and attention is not asked for it")
    return ModelPath("fast", family.name)


def find_path(model: Model) -> ModelPath | None:
    """How a model will be computed, by its `config.json`; None where there is none without a hub. Raises if the model
    is refused. Needs neither torch nor, for models with a fast path, transformers."""
    source = base_model(model.path)
    if (name := source.lower()) in BUILTIN_MODELS:
        written: dict[str, Any] = {"model_type": "qwen2_5_vl" if name == BLANK_VISION else "llama"}
    else:
        try:
            written = json.loads(((model_folder(source) or Path(source)) / "config.json").read_text())
        except (OSError, ValueError, RecursionError):
            return None  # a hub name, or what loading will complain of
        if not isinstance(written, dict):
            return None
    return choose_path(_WrittenConfig({**written, **model.config_overrides}), model.path, model.implementation)


class _WrittenConfig:
    """`config.json`, with the little of transformers' interface that `choose_path` needs."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def get_text_config(self, decoder: bool) -> "_WrittenConfig":
        inner = getattr(self, "text_config", None)
        return _WrittenConfig(inner) if isinstance(inner, dict) else self


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embedding; a configuration may have one for each type of layer. `rope_scaling` is the name
    that files of older releases have."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {str(one.get("rope_type") or one.get("type") or "default") for one in nested}


def check_length(config: Any, limit: int, key: str = "data.max_prompt_tokens + rollout.max_response_tokens") -> None:
    """Raises if sequences of up to `limit` tokens are more than the model computes, or computes as one. `key`: what the
    user has set the limit with.

    Dynamic NTK scaling changes all positions of a sequence once it is longer than the trained length, and longrope once
    it is longer than the original one: what the engine sampled from would not be what the trainer computes.
    """
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and 0 < positions < limit:  # XLNet says -1 for no limit
        raise UserError(f"{key} = {limit}, but the model has {positions} positions")
    if "longrope" in rope_types(text):
        original = getattr(text, "original_max_position_embeddings", None) or text.rope_parameters.get(
            "original_max_position_embeddings", positions
        )
        if original is not None and limit > original:
            raise UserError(
                f"{key} = {limit}, but the model turns to other rotary frequencies (longrope) behind {original} "
                f"tokens, for those before them too; keep sequences within {original}"
            )


def checked_plan(recipe: Recipe, device: str | None = None) -> Plan:
    """The plan of a recipe, with how its model is computed; raises where the recipe, its model, or a mesh that this
    model cannot be spread over is refused. `device`: as `make_plan` has it."""
    check_sizes(recipe.data)
    path, shape = find_path(recipe.model), ModelShape.find(recipe.model.path)
    plan = make_plan(recipe, shape, device=device, model_path=None if path is None else str(path))
    if path is not None and path.kind == "general":
        used = {name for mesh in plan.meshes.values() for name, size in asdict(mesh).items() if size > 1}
        check_parallel(recipe.model.path, used, path.reads_images)
    elif shape is not None:
        check_divides(plan.recipe.train.parallel, shape)
    return plan


def check_divides(parallel: Parallel, shape: ModelShape) -> None:
    """Raises if the model cannot be cut into so many parts."""
    counts = [
        ("tensor", shape.num_heads, "attention heads"),
        ("tensor", shape.num_kv_heads, "key and value heads"),
        ("tensor", shape.intermediate_size, "numbers between the matrices of an MLP"),
        ("expert", shape.num_experts, "experts"),
    ]
    problems = [
        f"`train.parallel.{name}: {size}` does not divide the model's {number} {what}"
        for name, number, what in counts
        if number % (size := getattr(parallel, name))
    ]
    if parallel.expert > 1 and not shape.num_experts:
        problems.append(f"`train.parallel.expert: {parallel.expert}`: the model has no experts")
    if problems:
        raise RecipeError(problems)


GENERAL_CANNOT = ("context", "expert", "pipeline", "tensor")
"""Dimensions of a mesh that cut sequences or layers, which the general path computes as a whole."""


def check_parallel(model: str, dimensions: Collection[str], reads_images: bool) -> None:
    """Raises if a model of the general path cannot be spread over these dimensions of a mesh."""
    if reads_images and "shard" in dimensions:
        raise UserError(
            f"train.parallel.shard: {model} reads images, and ranks whose sequences have none would not take part in "
            "gathering what reads them; set `train.parallel.shard: 1` and `replicate` to the number of devices"
        )
    if dimensions := set(dimensions) & set(GENERAL_CANNOT):
        raise UserError(
            f"train.parallel.{min(dimensions)}: {model} is computed sequence by sequence (the general path), which "
            "only `train.parallel.shard` and `replicate` distribute"
        )


def check_trainable(config: Any, path: str) -> None:
    """Raises for models that no path can train, before anything is loaded."""
    model_type = str(getattr(config, "model_type", ""))
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model.path: {path} (`{model_type}`) is an encoder-decoder; Corral trains decoder-only models")
    if quantization := getattr(config, "quantization_config", None):
        written = quantization if isinstance(quantization, dict) else vars(quantization)
        method = written.get("quant_method") or "quantization_config"
        raise UserError(
            f"model.path: {path} has quantized weights ({method}), which cannot be trained; "
            "use the model in bfloat16 or float32"
        )
    if model_type in FAST_TYPES:
        return
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or has_own_code:
        if getattr(config, "is_decoder", None) is False and model_type in ENCODERS:
            raise UserError(
                f"model.path: {path} (`{model_type}`) is an encoder: its tokens see those behind them; Corral trains "
                "causal models"
            )
        return
    if model_type in VISION_TYPES:
        return
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise UserError(
            f"model.path: {path} (`{model_type}`) reads images, which Corral trains only for "
            f"{', '.join(VISION_TYPES)}; use one of these or a text model"
        )
    raise UserError(
        f"model.path: {path} (`{model_type}`) is not a causal language model of transformers; "
        "Corral trains those that AutoModelForCausalLM loads"
    )


ENCODERS = frozenset((
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
))  # fmt: skip
"""Types whose models are causal only if their configuration says `is_decoder`."""
