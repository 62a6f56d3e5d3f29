import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_lists import quick

from corral.algorithms.declarations import NoOptions, with_options
from corral.algorithms.losses import KL_ESTIMATORS, AdaptiveKL, AdaptiveKLOptions, KLController, kl_penalty


def slow(x: float, estimator: str) -> tuple[float, float]:
    """Value and derivative."""
    exp = math.exp(-min(max(x, -20), 20))
    k3 = exp + x - 1
    k3_bounded, k3_slope = (k3, 1 - exp) if k3 < 10 else (10.0, 0.0)
    return {
        "k1": (x, 1.0),
        "k2": (x * x / 2, x),
        "k3": (k3_bounded, k3_slope),
        "abs": (abs(x), math.copysign(1.0, x) if x else 0.0),
        "k1+": (x, x),
        "k3+": (k3_bounded, x),
    }[estimator]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@quick
@given(x=st.lists(st.floats(-8, 8), max_size=8))
def test_estimators_match_their_formulas_in_value_and_gradient(estimator: str, x: list[float]) -> None:
    logprobs = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    result = kl_penalty(with_options(KL_ESTIMATORS[estimator]), logprobs, torch.zeros_like(logprobs))
    (gradient,) = torch.autograd.grad(result.sum(), logprobs)
    assert result.tolist() == pytest.approx([slow(d, estimator)[0] for d in x], abs=1e-12)
    assert gradient.tolist() == pytest.approx([slow(d, estimator)[1] for d in x], abs=1e-9)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_equal_policies_have_a_kl_of_exactly_zero(estimator: str) -> None:
    logprobs = torch.tensor([-0.3, -7.0])
    assert kl_penalty(with_options(KL_ESTIMATORS[estimator]), logprobs, logprobs).tolist() == [0.0, 0.0]


def test_the_fixed_coefficient_never_moves() -> None:
    controller = KLController(0.1, NoOptions())
    controller.update(kl=100.0, num_sequences=1000)
    controller.load_state(KLController(0.7, NoOptions()).state())
    assert controller.coefficient == 0.1


@pytest.mark.parametrize(("kl", "relative_error"), [(6.6, 0.1), (100.0, 0.2), (0.0, -0.2)])
def test_the_adaptive_coefficient_follows_the_kl_in_bounded_steps(kl: float, relative_error: float) -> None:
    controller = AdaptiveKL(0.1, AdaptiveKLOptions(target=6.0, horizon=1000))
    controller.update(kl, num_sequences=100)
    assert controller.coefficient == pytest.approx(0.1 * (1 + relative_error * 0.1))


@quick
@given(kl=st.floats(-10, 1e6), num_sequences=st.integers(1, 10**9))
def test_the_adaptive_coefficient_stays_positive(kl: float, num_sequences: int) -> None:
    controller = AdaptiveKL(0.1, AdaptiveKLOptions(target=1.0, horizon=10))
    controller.update(kl, num_sequences)
    assert 0.1 * 0.8 <= controller.coefficient <= 0.1 * 1.2


def test_an_infinite_kl_does_not_reach_the_coefficient() -> None:
    controller = AdaptiveKL(0.1, AdaptiveKLOptions(target=1.0, horizon=10))
    with pytest.raises(ValueError, match="KL divergence to the reference is nan"):
        controller.update(math.nan, 1)
    assert controller.coefficient == 0.1


def test_a_resumed_adaptive_controller_goes_on_where_it_was() -> None:
    first = AdaptiveKL(0.1, AdaptiveKLOptions(target=1.0, horizon=10))
    first.update(5.0, 5)
    second = AdaptiveKL(0.1, AdaptiveKLOptions(target=1.0, horizon=10))
    second.load_state(first.state())
    assert second.coefficient == first.coefficient != 0.1
