"""KL divergence to a reference policy, estimated on sampled tokens, and the coefficient it is weighted with."""

import math
from typing import Protocol

from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) (Schulman, 2020, joschu.net/blog/kl-approx.html).

    With x = log pi - log ref:

    - `k1`: x. Unbiased, high variance, negative half of the time.
    - `k2`: x^2 / 2. Biased a little, and its gradient is that of the KL.
    - `k3`: exp(-x) + x - 1. Unbiased, never negative. x is clamped to [-20, 20] and the result to at most 10.
    - `abs`: |x|.
    - `k1+`, `k3+`: the value of k1 or k3 with the gradient of k2. (In expectation, k1's own gradient is 0, and k3's is
      that of the KL in the other direction.)

    Tokens that were not generated are the aggregation's business, as with every per-token loss.
    """
    x = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return x
        case "k2":
            return _k2(x)
        case "k3":
            return _k3(x)
        case "abs":
            return x.abs()
        case "k1+":
            return x.detach() + _only_gradient(_k2(x))
        case "k3+":
            return _k3(x).detach() + _only_gradient(_k2(x))
    raise ValueError(f"`{estimator}` is not a KL estimator; choose one of {', '.join(KL_ESTIMATORS)}")


def _k2(x: Tensor) -> Tensor:
    return x.square() / 2


def _k3(x: Tensor) -> Tensor:
    x = x.clamp(-20, 20)
    return ((-x).exp() + x - 1).clamp(max=10)


def _only_gradient(values: Tensor) -> Tensor:
    """0, with the gradient of `values`."""
    return values - values.detach()


class KLController(Protocol):
    @property
    def coefficient(self) -> float: ...

    def update(self, kl: float, num_sequences: int) -> None: ...

    def state(self) -> dict[str, float]: ...

    def load_state(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """The coefficient of the recipe, always; it has no state, so a resumed run follows its recipe."""

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, kl: float, num_sequences: int) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        pass


class AdaptiveKL:
    """Steers the KL towards a target (Ziegler et al., 2019, arXiv 1909.08593).

    `coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon`, where `kl` is the mean over
    sequences of their token mean (`seq_mean_token_mean`) and `horizon` counts sequences. A step of more sequences than
    the horizon counts as the horizon: beyond five times that, the coefficient would change its sign.
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        self._coefficient = coefficient
        self.target = target
        self.horizon = horizon

    @property
    def coefficient(self) -> float:
        return self._coefficient

    def update(self, kl: float, num_sequences: int) -> None:
        if not math.isfinite(kl):
            raise ValueError(f"the KL divergence to the reference is {kl}; the coefficient cannot follow it")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self._coefficient *= 1 + error * min(num_sequences / self.horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"coefficient": self._coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        self._coefficient = state["coefficient"]
