"""Training a fused model is training the model: with one process, sharded, and with the optimizer's steps on a GPU."""

import math
from collections.abc import Callable

import pytest
import torch
from sharded_cases import Outcome, alone, build_model, deviation, mesh_of, outcome, policy_of
from team import GRADIENT_ROUNDING, ROUNDING, Team
from tiny import DEVICE

from corral.model.fused_layers import fuse, fused_layers
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import Optimizer
from corral.training.optimizer import MasterOptimizer, total_norm


def fused_outcome(shape: MeshShape | None, gradient_checkpointing: bool = False) -> Outcome:
    model = build_model("llama")
    assert fuse(model)
    return outcome(policy_of(model, mesh_of(shape), gradient_checkpointing=gradient_checkpointing), mesh_of(shape))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_fused_model_trains_the_same(gradient_checkpointing: bool) -> None:
    found, expected = fused_outcome(None, gradient_checkpointing), alone("llama")
    assert deviation(found.gradients, expected.gradients) < 5e-6
    assert deviation(found.weights, expected.weights) < 5e-6
    assert found.norms == pytest.approx(expected.norms, rel=5e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MeshShape(shard=2), MeshShape(context=2), MeshShape(tensor=2)])
def test_a_fused_model_trains_the_same_on_a_mesh(team: Callable[[int], Team], shape: MeshShape) -> None:
    """Sharded weights are not next to each other when they are gathered; cut layers compute module by module."""
    expected = alone("llama")
    for found in team(2).run(fused_outcome, shape):
        assert deviation(found.gradients, expected.gradients) < GRADIENT_ROUNDING
        assert deviation(found.weights, expected.weights) < ROUNDING


@pytest.mark.slow
def test_updates_leave_fused_weights_where_they_are() -> None:
    model = build_model("llama", torch.bfloat16)
    fuse(model)
    outcome(policy_of(model))
    assert fused_layers(model) is not None


def optimizer_of(parameter: torch.nn.Parameter, state_dtype: str = "float32") -> MasterOptimizer:
    recipe = Optimizer(learning_rate=0.1, max_gradient_norm=0.5, state_dtype=state_dtype)
    return MasterOptimizer([("weight", parameter)], recipe, 10)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_that_does_not_wait_for_the_norm_is_the_same_step(dtype: torch.dtype, state_dtype: str) -> None:
    weights = []
    for waits in (True, False):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5).to(DEVICE, dtype))
        optimizer = optimizer_of(parameter, state_dtype)
        for scale in (1.0, 0.5):
            optimizer.backward((parameter * (torch.arange(5) / 4).to(DEVICE, dtype)).sum())
            norm = total_norm(optimizer.masters, None)
            if waits:
                size = optimizer._step_on_host(float(norm), scale, 0.1)
            else:
                size = optimizer._step_on_gpu(norm, scale, 0.1)
            assert size == pytest.approx(math.sqrt(30) / 4 * scale)
            optimizer.zero_grad()
        weights.append(optimizer.masters[0].current)
        assert optimizer.masters[0].state["exp_avg"].dtype == getattr(torch, state_dtype)
    # Moments are rounded by a hash of weights that may differ in the last bit, so one step of a bfloat16 up or down.
    torch.testing.assert_close(*weights, **({} if state_dtype == "float32" else {"rtol": 0.01, "atol": 2e-3}))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_states_pass_through_a_few_slots_of_the_device(
    dtype: torch.dtype, state_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates are those of states that stay on the device, to the last bit, also where a parameter is larger than
    a slot and where slots are used again."""
    monkeypatch.setattr("corral.training.optimizer.OPTIMIZER_SLOT_SIZE", 4)
    outcomes = []
    for on_host in (False, True):
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, size).to(DEVICE, dtype)) for size in (23, 3, 4)]
        named = zip(("first", "second", "third"), parameters, strict=True)
        recipe = Optimizer(learning_rate=0.1, state_dtype=state_dtype)
        optimizer = MasterOptimizer(named, recipe, 10, on_host=on_host)
        for _ in range(3):
            optimizer.backward(sum((one.float() ** 2).sum() for one in parameters))  # type: ignore[arg-type]
            optimizer._step_on_gpu(total_norm(optimizer.masters, None), 1.0, 0.1)
            optimizer.zero_grad()
        states = [optimizer.state_of(master) for master in optimizer.masters]
        if on_host:
            assert {t.device.type for state in states for key, t in state.items() if key.startswith("exp")} == {"cpu"}
            assert all(master.current.device.type == "cpu" for master in optimizer.masters if master.is_copy)
        outcomes.append([one.detach().cpu() for one in parameters] + [t.cpu() for s in states for t in s.values()])
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


def test_a_step_that_does_not_wait_for_the_norm_skips_what_is_not_finite() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device=DEVICE))
    optimizer = optimizer_of(parameter)
    for gradient in (1.0, math.inf, math.nan, 1.0):
        optimizer.masters[0].accumulated = torch.full((3,), gradient, device=DEVICE)
        before = optimizer.masters[0].current.clone()
        size = optimizer._step_on_gpu(total_norm(optimizer.masters, None), 1.0, 0.1)
        assert math.isfinite(size) == math.isfinite(gradient)
        assert torch.equal(before, optimizer.masters[0].current) == (not math.isfinite(gradient))
    assert optimizer.state_of(optimizer.masters[0])["step"].item() == 2
    # To the last bit or the one before: the interpreter cuts where a GPU rounds.
    torch.testing.assert_close(parameter.float(), optimizer.masters[0].current, rtol=2**-7, atol=0)
