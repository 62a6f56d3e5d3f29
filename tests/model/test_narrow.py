"""A narrow model computes with the same architecture, and can be cut for the same meshes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from corral.model.families import FAST_TYPES
from corral.model.narrow import save_narrow_model
from corral.recipe.shape import ModelShape

INCOMPLETE = {"deepseek_v2", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"}
"""Configuration classes whose own defaults are no model; those of released models are."""
QWEN2_7B = {
    **{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("model_type", sorted(set(FAST_TYPES) - INCOMPLETE))
def test_every_family_of_the_fast_path_becomes_narrow(tmp_path: Path, model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]().to_dict()
    save_narrow_model(config, {"pipeline": 2, "tensor": 2, "expert": 2}, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == model_type
    assert sum(parameter.numel() for parameter in model.parameters()) < 5_000_000
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()


@pytest.mark.parametrize("mesh", [{}, {"pipeline": 4, "tensor": 4}, {"tensor": 2}])
def test_what_divides_still_does(tmp_path: Path, mesh: dict[str, int]) -> None:
    save_narrow_model(QWEN2_7B, mesh, tmp_path)
    shape, tensor = ModelShape.read(str(tmp_path)), mesh.get("tensor", 1)
    assert shape.num_heads % tensor == shape.num_kv_heads % tensor == shape.intermediate_size % tensor == 0
    assert shape.num_kv_heads < shape.num_heads
    assert shape.num_layers >= 2 * mesh.get("pipeline", 1)


def test_what_does_not_divide_does_not(tmp_path: Path) -> None:
    config = {**QWEN2_7B, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    save_narrow_model(config, {"tensor": 2}, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["num_attention_heads"], written["num_key_value_heads"]) == (9, 3)
