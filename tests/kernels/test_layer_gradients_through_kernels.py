"""Fused layers that compute with the kernels around attention have the gradients of the model's own code."""

import copy

import numpy as np
import pytest
import torch
from flash_on_cpu import flash_on_cpu
from tiny import DEVICE, tiny_config
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

from corral.data.batch import TokenTree
from corral.kernels.gpu.column_sum_kernel import column_sums
from corral.kernels.rotary import Rotate, RotateMerged
from corral.model.attention import TreeAttention, forward_hidden, register
from corral.model.fused_layers import fuse

pytestmark = pytest.mark.slow


def gradients(model: torch.nn.Module, gradient_checkpointing: bool) -> dict[str, torch.Tensor]:
    tree = TokenTree.build([np.array([3, 4, 5, *range(6, 8 + n), n]) for n in range(4)])
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    tokens, positions = (torch.from_numpy(array).to(DEVICE) for array in (tree.tokens, tree.positions))
    hidden = forward_hidden(model, tokens, positions, TreeAttention(tree, DEVICE))
    hidden.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE))
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gradients_through_the_kernels_around_attention(
    family: str, gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="corral").eval().to(DEVICE)
    expected = gradients(copy.deepcopy(model), gradient_checkpointing=False)
    assert fuse(model)
    monkeypatch.setattr("corral.model.fused_layers.rotate", Rotate.apply)
    monkeypatch.setattr("corral.model.fused_layers.rotate_merged", RotateMerged.apply)
    monkeypatch.setattr("corral.kernels.merged_linear.column_sums", column_sums)
    with flash_on_cpu():
        found = gradients(model, gradient_checkpointing)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
