"""What is kept for the backward pass, and where, changes no gradient: checkpointed layers, selectively, inputs in the
host's memory, and trajectories that are longer than a micro-batch."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_pythons import FORKED, forking_python
from sharded_cases import Outcome, alone, backward, build_model, deviation, mesh_of, outcome, policy_of
from team import Team, own_memory
from tiny_families import config_of, tiny_family_model
from torch.utils._python_dispatch import TorchDispatchMode
from trajectories import make_trajectory, small_batch
from transformers import AutoModelForCausalLM, LlamaConfig

from corral.data.batch import Batch
from corral.model.attention import register
from corral.model.fused_layers import fuse
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import GradientCheckpointing, Optimizer
from corral.training.activations import OffloadedTensor
from corral.training.native_trainer import NativePolicyTrainer, NativeValueTrainer, ValueModel

FEW = 7
"""Tokens of a micro-batch: fewer than any trajectory has."""


def outcome_with(
    family: str,
    checkpointing: GradientCheckpointing,
    offload: tuple[str, ...] = (),
    max_tokens: int | None = None,
    shape: MeshShape | None = None,
) -> Outcome:
    mesh = mesh_of(shape)
    policy = policy_of(build_model(family), mesh, checkpointing, offload)
    set_max_tokens(policy, max_tokens)
    return outcome(policy, mesh)


def set_max_tokens(policy: Any, max_tokens: int | None) -> None:
    policy.max_tokens = policy.activations.max_tokens = max_tokens


CASES: Any = pytest.mark.parametrize(
    ("checkpointing", "offload", "max_tokens"),
    [
        (True, (), None),
        ("selective", (), None),
        (True, ("activations",), None),
        ("selective", ("activations",), None),
        (False, (), FEW),
        (True, ("activations",), FEW),
    ],
)


@pytest.mark.slow
@CASES
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "llama/sdpa", "llama+lora"])
def test_gradients_and_updates_are_those_of_plain_training(
    family: str, checkpointing: GradientCheckpointing, offload: tuple[str, ...], max_tokens: int | None
) -> None:
    found, expected = outcome_with(family, checkpointing, offload, max_tokens), alone(family)
    tolerance = 0 if max_tokens is None else 5e-6
    assert deviation(found.gradients, expected.gradients) <= tolerance
    assert deviation(found.weights, expected.weights) <= tolerance
    assert deviation({"": found.logprobs}, {"": expected.logprobs}) <= tolerance


@pytest.mark.slow
def test_experts_with_biases_too() -> None:
    kinds: tuple[GradientCheckpointing, ...] = (False, "selective")
    register()
    model = tiny_family_model(config_of("gpt_oss-window8"), attention="corral")
    expected, found = (outcome(policy_of(deepcopy(model), None, kind)) for kind in kinds)
    assert deviation(found.gradients, expected.gradients) == 0


@CASES
@pytest.mark.slow
def test_fused_layers_too(
    checkpointing: GradientCheckpointing, offload: tuple[str, ...], max_tokens: int | None
) -> None:
    model = build_model("llama")
    assert fuse(model)
    policy = policy_of(model, None, checkpointing, offload)
    set_max_tokens(policy, max_tokens)
    found, expected = outcome(policy), alone("llama")
    assert deviation(found.gradients, expected.gradients) < 5e-6
    assert deviation(found.weights, expected.weights) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", MeshShape(shard=2)),
        ("llama", MeshShape(context=2)),
        ("llama", MeshShape(tensor=2)),
        ("llama", MeshShape(pipeline=2)),
        ("qwen3_moe", MeshShape(expert=2)),
    ],
    ids=["shard", "context", "tensor", "pipeline", "expert"],
)
@pytest.mark.parametrize(
    ("checkpointing", "offload", "max_tokens"), [("selective", (), None), (True, ("activations",), 25)]
)
def test_on_a_mesh_too(
    team: Callable[[int], Team],
    family: str,
    shape: MeshShape,
    checkpointing: GradientCheckpointing,
    offload: tuple[str, ...],
    max_tokens: int | None,
) -> None:
    """(25 tokens: some micro-batches have more, and of the ranks with experts one has them and the other has not.)"""
    expected = alone(family)
    for found in team(2).run(outcome_with, family, checkpointing, offload, max_tokens, shape):
        assert deviation(found.gradients, expected.gradients) < 5e-6
        assert deviation(found.weights, expected.weights) < 5e-6


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("max_tokens", [None, FEW])
def test_each_layer_is_computed_once_more_in_the_backward_pass(is_fused: bool, max_tokens: int | None) -> None:
    """Fused layers have forward methods of their own, which transformers' gradient checkpointing does not see."""
    model = build_model("llama")
    assert not is_fused or fuse(model)
    calls = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
    policy = policy_of(model, gradient_checkpointing=max_tokens is None)
    set_max_tokens(policy, max_tokens)
    backward(policy, small_batch().pack(1000))
    assert len(calls) == 2 * len(model.model.layers)
    assert all("forward" not in layer.__dict__ for layer in model.model.layers) or is_fused


class ProductCount(TorchDispatchMode):
    """Counts matrix products, those of experts included."""

    num_products = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += operator in (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_selective_checkpointing_computes_no_product_again(family: str) -> None:
    counts = []
    for checkpointing in (False, "selective", True):
        policy = policy_of(build_model(family), gradient_checkpointing=checkpointing)  # type: ignore[arg-type]
        with ProductCount() as counted:
            backward(policy, small_batch().pack(1000))
        counts.append(counted.num_products)
    assert counts[0] == counts[1] < counts[2]


def test_a_critic_is_trained_in_parts() -> None:
    def gradients(max_tokens: int | None) -> dict[str, torch.Tensor]:
        critic = NativeValueTrainer(ValueModel(build_model("llama")), Optimizer(), 10, max_tokens=max_tokens)
        torch.nn.init.normal_(critic.model.head.weight)
        critic.forward_backward([(pack, lambda values: values.square().sum()) for pack in small_batch().pack(1000)])
        return {name: p.grad for name, p in critic.model.named_parameters() if p.grad is not None}

    torch.manual_seed(0)
    expected = gradients(None)
    torch.manual_seed(0)
    assert deviation(gradients(FEW), expected) < 5e-6


def test_the_backward_pass_gets_what_the_forward_pass_had() -> None:
    tensors = [torch.randn(3, requires_grad=True) for _ in range(3)]
    offloaded: list[OffloadedTensor] = []
    for tensor in tensors:
        offloaded.append(OffloadedTensor(tensor, offloaded[-1] if offloaded else None))
        assert offloaded[-1].take() is tensor
        assert offloaded[-1].tensor is None
    for index in (2, 1, 0):
        again = offloaded[index].take()
        assert torch.equal(again, tensors[index])
        assert again.requires_grad
        assert all((one.tensor is not None) == (i == index - 1) for i, one in enumerate(offloaded))


WIDE = LlamaConfig(
    hidden_size=64,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
)
NUM_TOKENS = 1500


def peak_of_training(checkpointing: bool, max_tokens: int | None) -> int:
    """-> most bytes that a forward and backward pass of one trajectory had at the same time"""
    own_memory()
    register()
    model = AutoModelForCausalLM.from_config(WIDE, attn_implementation="corral").eval()
    policy = NativePolicyTrainer(
        model,
        temperature=1.0,
        optimizer=Optimizer(),
        total_updates=1,
        gradient_checkpointing=checkpointing,
        max_tokens=max_tokens,
    )
    tokens = np.random.default_rng(0).integers(3, 60, NUM_TOKENS).tolist()
    [pack] = Batch.of([make_trajectory(tokens[:10], tokens[10:])]).pack(max_tokens or NUM_TOKENS)
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what there is now
    before = memory("VmRSS")
    policy.forward_backward([(pack, lambda logprobs, entropy: logprobs.sum())])
    return memory("VmHWM") - before


def memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def print_peaks() -> None:
    for checkpointing, max_tokens in ((False, None), (True, None), (False, 100)):
        with closing(Team(1)) as team:
            print(*team.run(peak_of_training, checkpointing, max_tokens))


@pytest.mark.slow
def test_a_long_trajectory_needs_the_feed_forward_memory_of_its_chunks() -> None:
    """Plain, every layer keeps about four of the feed-forward's width for each token; checkpointed, one layer does; in
    chunks, 100 tokens do. In a process of its own: a fork of one that has run other tests has more memory."""
    program = f"{FORKED}\nimport test_activations\ntest_activations.print_peaks()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    peaks = list(map(int, subprocess.check_output([forking_python(), "-c", program], env=environment).split()))
    of_layer = 4 * NUM_TOKENS * WIDE.intermediate_size * 4
    assert peaks[0] > 0.9 * 4 * of_layer
    assert 0.7 * of_layer < peaks[1] < 2.5 * of_layer
    assert peaks[2] < 0.5 * peaks[1]
