import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from corral.model.attention import register
from corral.model.builtin_models import BLANK_SHAPE
from corral.recipe.errors import UserError
from corral.recipe.memory import layer_activations
from corral.recipe.shape import SMOLLM2_135M, ModelShape, UnknownShape
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine
from corral.rollout.slot_core import SlotCore

QWEN25_05B = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA4_MAVERICK = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 128,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "vocab_size": 202048, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA4_26B_A4B = {
    "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 2112, "enable_moe_block": True, "num_experts": 128,
    "top_k_experts": 8, "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0, "vocab_size": 262144,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers: 1000000000` is not one of a model"),
        ({"num_attention_heads": 0}, "`num_attention_heads: 0` is not one of a model"),
        ({"vocab_size": -1}, "`vocab_size: -1` is not one of a model"),
        ({"hidden_size": 10**30}, "`hidden_size: 1000000000000000000000000000000` is not one of a model"),
        ({"text_config": 5}, "is not a model's configuration"),
        ({"layer_types": 5}, "is not a model's configuration"),
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B | changes))
    with pytest.raises(UserError, match=problem) as raised:
        ModelShape.read(str(tmp_path))
    assert not isinstance(raised.value, UnknownShape)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN25_05B, 494_032_768),
        (LLAMA3_8B, 8_030_261_248),
        (QWEN3_30B_A3B, 30_532_122_624),
        (MIXTRAL, 46_702_792_704),
    ],
)
def test_parameters_are_counted_exactly_for_known_models(config, parameters):
    assert ModelShape.from_config(config).num_parameters == parameters


def test_the_built_in_model_is_known_without_a_file():
    assert ModelShape.find("SmolLM2-135M-Instruct") == SMOLLM2_135M
    assert SMOLLM2_135M.num_parameters == 134_515_008


def test_gpt2s_names_are_understood():
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "vocab_size": 50257}
    shape = ModelShape.from_config(config)
    assert (shape.intermediate_size, shape.head_dim, shape.num_kv_heads) == (3072, 64, 12)
    assert shape.num_parameters == pytest.approx(124_439_808, rel=0.01)


def test_the_text_part_of_a_larger_model_is_what_counts():
    assert ModelShape.from_config({"model_type": "some_vlm", "text_config": LLAMA3_8B}).num_layers == 32


def test_a_folder_is_read_from_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert ModelShape.find(str(tmp_path)) == ModelShape.from_folder(tmp_path) == ModelShape.from_config(LLAMA3_8B)


def test_a_hub_name_has_no_known_shape():
    assert ModelShape.find("Qwen/Qwen2.5-0.5B") is None


def test_of_numbers_for_each_layer_the_largest_counts():
    assert ModelShape.from_config(LLAMA3_8B | {"intermediate_size": [8192, 14336]}) == ModelShape.from_config(LLAMA3_8B)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"model_type": "jamba"}, "the layers of `jamba` are of kinds that are not counted"),
        ({"model_type": "nemotron_h"}, "the layers of `nemotron_h`"),
        ({"text_config": {"model_type": "qwen3_5_text"}}, "the layers of `qwen3_5_text`"),
        ({"layer_types": ["mamba", "attention"]}, "layers of the type `mamba` are not counted"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of the type `linear_attention`"),
    ],
    ids=str,
)
def test_layers_of_other_kinds_are_not_counted_as_if_they_were_attention(tmp_path, other, words):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B | other))
    assert ModelShape.find(str(tmp_path)) is None
    with pytest.raises(UnknownShape, match=words):
        ModelShape.read(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "parameters", "experts_per_token"),
    [
        (LLAMA4_MAVERICK, 400_711_848_960, 1),
        (GEMMA4_26B_A4B, 25_334_067_200, 8),
    ],
    ids=["Llama 4 Maverick", "Gemma 4 26B-A4B"],
)
def test_dense_layers_between_and_beside_experts_are_counted(config, parameters, experts_per_token):
    shape = ModelShape.from_config(config)
    assert shape.num_parameters == pytest.approx(parameters, rel=0.01)
    assert shape.experts_per_token == experts_per_token


def test_a_folder_without_a_config_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"config.json: cannot be read: No such file"):
        ModelShape.from_folder(tmp_path)


def test_a_config_that_is_not_json_is_one_line(tmp_path):
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config.json: is not valid JSON"):
            ModelShape.from_folder(tmp_path)


def test_a_missing_number_is_named():
    with pytest.raises(UserError, match="has no vocab_size, so the model's shape is unknown"):
        ModelShape.from_config({key: value for key, value in LLAMA3_8B.items() if key != "vocab_size"})


def test_the_blank_model_has_the_shape_that_a_plan_counts_with() -> None:
    found = ModelShape.find("blank-1m")
    assert found is not None
    assert ModelShape.from_config(BLANK_SHAPE, "blank") == replace(
        found, dense_intermediate_size=found.intermediate_size
    )


@pytest.mark.parametrize(
    "config",
    [
        LLAMA3_8B | SMALL | {"intermediate_size": 896},
        QWEN3_30B_A3B | SMALL | {"moe_intermediate_size": 96, "num_experts": 32},
        MIXTRAL | SMALL | {"intermediate_size": 896},
    ],
    ids=lambda config: config["model_type"],
)
def test_what_a_layer_keeps_for_its_backward_pass_is_within_a_quarter(config: dict[str, Any]) -> None:
    """Compared with the tensors that autograd keeps of plain transformers."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(torch.zeros(1, 256, dtype=torch.int64), logits_to_keep=1)
    assert output.logits.requires_grad
    measured = sum(kept.values()) / 256 / config["num_hidden_layers"]
    assert 0.8 < layer_activations(ModelShape.from_config(config), 4) / measured < 1.25


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "intermediate_size": 512, "moe_intermediate_size": 64, "n_routed_experts": 16, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [LLAMA3_8B | SMALL | {"intermediate_size": 896}, DEEPSEEK_V3, DEEPSEEK_V3 | {"q_lora_rank": None}],
    ids=["llama", "latent attention", "latent keys and values"],
)
def test_a_tokens_keys_and_values_are_those_of_the_engines_cache(config: dict[str, Any]) -> None:
    register()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="corral").eval()
    engine = NativeEngine(model, tiny_tokenizer(), max_sequences=2, max_prefill_tokens=64, max_length=64, paged=False)
    asyncio.run(engine.generate([5, 6, 7], Sampling(max_tokens=2), 0))
    assert isinstance(engine.core, SlotCore)
    tensors = [tensor for tensor in (*engine.core.cache.keys, *engine.core.cache.values) if tensor is not None]
    shape = ModelShape.from_config(config)
    assert shape.kv_values_per_token == sum(tensor.shape[1] * tensor.shape[3] for tensor in tensors)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_parameters == pytest.approx(num_parameters, rel=0.001)


GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 8, "vocab_size": 128}
STARCODER2 = {"model_type": "starcoder2", **SMALL, "intermediate_size": 896}


@pytest.mark.parametrize(
    ("config", "targets", "largest"),
    [
        (STARCODER2, ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"], 1),
        (GPT2, ["c_attn"], 5),
        (DEEPSEEK_V3, ["q_b_proj", "kv_b_proj"], 10),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else str(value),
)
def test_adapters_of_layers_with_names_of_their_own_have_a_bound(
    config: dict[str, Any], targets: list[str], largest: int
) -> None:
    """`largest`: how many times too large the bound may be."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weights = {name.split(".")[-2]: tuple(one.shape) for name, one in model.named_parameters() if one.ndim == 2}
    exact = 8 * config.get("num_hidden_layers", 3) * sum(sum(weights[target]) for target in targets)
    assert exact <= ModelShape.from_config(config).num_adapter_parameters(8, targets) <= largest * exact


@pytest.mark.slow
def test_any_architecture_has_its_number_of_parameters_within_a_tenth_or_is_unknown() -> None:
    """As transformers makes it from its own default configuration, which most often is that of a published model. Files
    leave out whether embeddings are tied where that is the default."""
    num_compared, wrong = 0, {}
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for kind in re.findall(r"^\| (\w+) \| (?:fast|general) \|", page, re.MULTILINE):
        try:
            config = AutoConfig.for_model(kind, **({"num_experts_per_tok": 6} if kind == "deepseek_v2" else {}))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception:  # there is no default
            continue
        try:
            shapes = [ModelShape.from_config(one) for one in (config.to_dict(), without_ties(config.to_dict()))]
        except UnknownShape:
            continue
        num_compared += 1
        counted = sum(parameter.numel() for parameter in model.parameters())
        ratios = [shape.num_parameters / counted for shape in shapes]
        if not all(0.9 < ratio < 1.1 for ratio in ratios):
            wrong[kind] = ratios
        assert shapes[0].experts_per_token > 0 or not shapes[0].num_experts, kind
    assert wrong == {}
    assert num_compared > 90


def without_ties(config: dict[str, Any]) -> dict[str, Any]:
    config = {key: without_ties(value) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in config.items() if key != "tie_word_embeddings"}
