"""Schedules, clipping, state, and float16's loss scale."""

import math

import pytest
import torch
from torch import nn

from corral.kernels.stochastic_rounding import round_to_bfloat16
from corral.recipe.schema import Optimizer
from corral.training.optimizer import LossScaler, MasterOptimizer


def make(
    total_updates: int = 10, dtype: torch.dtype = torch.float32, **recipe: object
) -> tuple[MasterOptimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=dtype))
    return MasterOptimizer([("weight", parameter)], Optimizer(**recipe), total_updates), parameter


def rates(optimizer: MasterOptimizer, updates: int) -> list[float]:
    return [optimizer.learning_rate(update) for update in range(updates)]


def test_warm_up_rises_in_a_line_to_the_learning_rate() -> None:
    optimizer, _ = make(learning_rate=1.0, warmup_steps=4)
    assert rates(optimizer, 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_warm_up_may_be_a_fraction_of_all_updates() -> None:
    share, _ = make(13, learning_rate=1.0, schedule="cosine", warmup_ratio=0.25)
    number, _ = make(13, learning_rate=1.0, schedule="cosine", warmup_steps=3)
    assert rates(share, 15) == rates(number, 15)
    assert rates(make(13, learning_rate=1.0, warmup_ratio=0.0)[0], 2) == [1.0, 1.0]


def test_linear_decay_ends_at_its_floor() -> None:
    optimizer, _ = make(10, learning_rate=1.0, schedule="linear", min_learning_rate_ratio=0.2)
    assert optimizer.learning_rate(0) == 1.0
    assert optimizer.learning_rate(5) == pytest.approx(0.6)
    assert optimizer.learning_rate(10) == optimizer.learning_rate(99) == pytest.approx(0.2)


def test_cosine_decay_is_halfway_at_half_time() -> None:
    optimizer, _ = make(12, learning_rate=1.0, schedule="cosine", warmup_steps=2)
    assert optimizer.learning_rate(7) == pytest.approx(0.5)
    assert optimizer.learning_rate(12) == pytest.approx(0.0)


@pytest.mark.parametrize(
    "changes", [{"updates": -1}, {"loss_scale": math.nan}, {"loss_scale": 0}, {"loss_scale": 2.0}, {"good": math.inf}]
)
def test_counters_that_no_optimizer_has_are_refused(changes: dict[str, float]) -> None:
    optimizer, _ = make()
    with pytest.raises((ValueError, OverflowError)):
        optimizer.load_counters({**optimizer.counters(), **changes})
    assert optimizer.counters() == {"updates": 0, "loss_scale": 1.0, "good": 0}


def test_updates_equal_torchs_adamw() -> None:
    optimizer, parameter = make(learning_rate=0.1, weight_decay=0.01, betas=[0.8, 0.9], max_gradient_norm=9.0)
    theirs = nn.Parameter(parameter.detach().clone())
    adamw = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.01, betas=(0.8, 0.9))
    for step in range(5):
        for target, finish in ((parameter, optimizer.step), (theirs, adamw.step)):
            loss = (target * torch.tensor([0.1, 0.2, -0.1]) * (step + 1)).sum()
            loss.backward()
            finish()
        adamw.zero_grad()
    torch.testing.assert_close(parameter, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_long_gradient_is_clipped_and_its_true_norm_reported(dtype: torch.dtype) -> None:
    optimizer, parameter = make(dtype=dtype, learning_rate=1.0, max_gradient_norm=0.5)
    optimizer.backward(parameter.float().sum())
    result = optimizer.step()
    assert result.gradient_norm == pytest.approx(math.sqrt(3))
    assert optimizer.masters[0].state["exp_avg"].norm() == pytest.approx(0.1 * 0.5, rel=1e-4)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_state_continues_exactly(dtype: torch.dtype, state_dtype: str) -> None:
    def advance(optimizer: MasterOptimizer, parameter: nn.Parameter, steps: range) -> None:
        for step in steps:
            optimizer.backward((parameter.float() * torch.tensor([1.0, 2.0, 3.0]) * (step + 1)).sum())
            optimizer.step()

    whole, parameter = make(dtype=dtype, learning_rate=0.1, schedule="linear", state_dtype=state_dtype)
    advance(whole, parameter, range(3))
    tensors = {name: tensor.clone() for name, tensor in whole.state_of(whole.masters[0]).items()}
    numbers = whole.counters()
    resumed, other = make(dtype=dtype, learning_rate=0.1, schedule="linear", state_dtype=state_dtype)
    other.data.copy_(parameter)
    resumed.load_state(resumed.masters[0], tensors)
    resumed.load_counters(numbers)
    advance(whole, parameter, range(3, 6))
    advance(resumed, other, range(3, 6))
    assert torch.equal(parameter, other)
    assert torch.equal(whole.masters[0].weight, resumed.masters[0].weight)
    wide, _ = make(dtype=dtype, state_dtype="float32")  # whatever the moments were saved in
    wide.load_state(wide.masters[0], tensors)
    assert wide.masters[0].state["exp_avg"].dtype == torch.float32
    assert torch.equal(wide.masters[0].state["exp_avg"], tensors["exp_avg"].float())


def test_float16_halves_its_loss_scale_after_an_overflow_and_goes_on() -> None:
    optimizer, parameter = make(dtype=torch.float16, learning_rate=0.1)
    assert optimizer.scaler.scale == 2.0**15
    optimizer.backward((parameter * 10).sum())
    result = optimizer.step()
    assert result.skipped
    assert result.overflow
    assert optimizer.scaler.scale == 2.0**14
    while result.skipped:
        optimizer.backward((parameter * 10).sum())
        result = optimizer.step()
    assert result.gradient_norm == pytest.approx(math.sqrt(300), rel=1e-2)


def test_the_loss_scale_doubles_after_many_good_updates() -> None:
    scaler = LossScaler(enabled=True)
    for _ in range(200):
        scaler.update(finite=True)
    assert scaler.scale == 2.0**16


def moments_in(dtype: str, **recipe: object) -> tuple[MasterOptimizer, nn.Parameter]:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(400))
    return MasterOptimizer([("weight", parameter)], Optimizer(state_dtype=dtype, **recipe), 10**6), parameter


def test_bfloat16_moments_fall_as_fast_as_float32_ones() -> None:
    """A second moment falls by a thousandth in an update, less than half of what bfloat16 resolves: rounded to the
    nearest it would never fall. 600 updates without a gradient: 0.999^600 = 0.549."""
    optimizer, parameter = moments_in("bfloat16", learning_rate=1e-3, max_gradient_norm=1e9)
    for update in range(601):
        parameter.grad = torch.linspace(0.5, 1.0, 400) * (update == 0)
        optimizer.step()
    state = optimizer.masters[0].state
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.bfloat16
    fell_to = state["exp_avg_sq"].float() / (1e-3 * torch.linspace(0.5, 1.0, 400).square())
    assert fell_to.mean() == pytest.approx(0.999**600, rel=0.02)
    nearest = torch.tensor(1.0).bfloat16()
    assert (nearest.float() * 0.999).bfloat16() == nearest


def test_losses_with_bfloat16_moments_are_close_to_those_with_float32() -> None:
    """100 updates of a least-squares problem whose loss falls to a fortieth: within 2 %, or a ten-thousandth of the
    first loss."""
    losses: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        optimizer, parameter = moments_in(dtype, learning_rate=0.03, betas=[0.9, 0.999])
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(64, 400, generator=generator)
        targets = inputs @ torch.randn(400, generator=generator)
        for _ in range(100):
            loss = (inputs @ parameter - targets).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            losses.setdefault(dtype, []).append(loss.item())
    assert losses["float32"][-1] < losses["float32"][0] / 40
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02, abs=1e-4 * losses["float32"][0])
    assert losses["bfloat16"] != losses["float32"]


def test_the_mean_of_what_is_rounded_is_what_it_was() -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1e-3
    constant = torch.full_like(values, 1 + 1 / 1000)
    for these in (values, -values, constant):
        for update in (1.0, 2.0, 1000.0):
            rounded = round_to_bfloat16(these, values, torch.tensor(update)).float()
            assert ((rounded - these) / these).abs().max() < 2**-7
            assert ((rounded - these) / these).mean().abs() < 5e-5
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-100])
    assert torch.equal(round_to_bfloat16(exact, exact, torch.tensor(3.0)).float(), exact)
