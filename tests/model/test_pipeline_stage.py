"""The stages of a pipeline, one behind the other, compute what the whole model computes."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_families import VARIANTS, config_of, tiny_family_model
from torch import Tensor

from corral.model.attention import register
from corral.model.families import FAST_TYPES
from corral.model.fused_layers import fuse, layer_forward
from corral.model.model_check import packed_hidden, packed_logprobs, plain_forward, plain_hidden, plain_logprobs
from corral.model.pipeline_stage import PipelineStage
from corral.recipe.errors import UserError

CPU = torch.device("cpu")
TOKENS = [5, 7, 11, 13, 6, 5, 9]
WITHOUT_PLAN = {
    "bitnet", "hunyuan_v1_dense", "gpt2", "gpt_bigcode", "opt", "biogpt", "persimmon", "olmoe", "granitemoe",
    "granitemoeshared", "hunyuan_v1_moe", "phimoe", "nanochat",
}  # fmt: skip


def logprobs_in_stages(name: str, num_stages: int) -> tuple[Tensor, Tensor]:
    """(log-probs of the whole model, of its stages)"""
    torch.manual_seed(0)
    model = tiny_family_model(config_of(name))
    hidden = torch.zeros(0)
    for rank in range(num_stages):
        part = deepcopy(model)
        stage = PipelineStage(part, part, rank, num_stages)
        stage.received = hidden
        with torch.no_grad():
            compute = plain_logprobs if rank == num_stages - 1 else plain_hidden
            hidden = compute(part, TOKENS, CPU)
    return plain_logprobs(model, TOKENS), hidden


@pytest.mark.parametrize("name", [name for name in [*FAST_TYPES, *VARIANTS] if name.partition("-")[0] in FAST_TYPES])
def test_every_family_is_right_in_stages_or_refused(name: str) -> None:
    if name.partition("-")[0] in WITHOUT_PLAN:
        with pytest.raises(UserError, match="transformers has no plan to deal the layers"):
            logprobs_in_stages(name, 2)
    else:
        whole, staged = logprobs_in_stages(name, 2)
        assert torch.equal(staged, whole)


def test_a_stage_has_its_own_parameters_and_both_ends_a_tied_embedding() -> None:
    model = tiny_family_model(config_of("llama"))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    parts = [deepcopy(model) for _ in range(2)]
    stages = [PipelineStage(part, part, rank, 2) for rank, part in enumerate(parts)]
    names = [set(dict(part.named_parameters())) for part in parts]
    assert names[0] & names[1] == {"model.embed_tokens.weight"}
    assert stages[0].holders["model.embed_tokens.weight"] == (0, 1)
    assert names[0] | names[1] == set(dict(model.named_parameters()))
    assert "model.norm.weight" not in names[0]


def test_fused_layers_stay_fused_in_stages() -> None:
    """Also after a plain forward pass, which takes them apart for a while."""
    register()
    model = tiny_family_model(config_of("llama"), attention="corral")
    assert fuse(model)
    sequences, hidden = [TOKENS, TOKENS[:3] + TOKENS], torch.zeros(0)
    expected = packed_logprobs(model, sequences, CPU)
    for rank in range(2):
        part = deepcopy(model)
        stage = PipelineStage(part, part, rank, 2)
        with plain_forward(part):
            assert not is_fused(part)
        assert is_fused(part)
        stage.received = hidden
        hidden = (packed_logprobs if rank == 1 else packed_hidden)(part, sequences, CPU)
    assert torch.equal(hidden, expected)


def is_fused(model: Any) -> bool:
    forwards = [getattr(layer.forward, "__func__", None) for layer in model.model.layers]
    return layer_forward in forwards


def test_a_stage_without_anything_to_train_is_refused_on_every_rank() -> None:
    model = tiny_family_model(config_of("llama"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.0." in name
    for rank in range(2):
        part = deepcopy(model)
        with pytest.raises(UserError, match="nothing is trained in stage 1 of 2"):
            PipelineStage(part, part, rank, 2)
