"""KL divergence to a reference policy, estimated on sampled tokens, and the coefficient it is weighted with.

Estimators (Schulman, 2020, joschu.net/blog/kl-approx.html) are functions of x = log pi - log ref of a token. Tokens
that were not generated are the aggregation's business, as with every per-token loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from corral.algorithms.declarations import KL_CONTROLLERS as KL_CONTROLLERS
from corral.algorithms.declarations import KL_ESTIMATORS as KL_ESTIMATORS
from corral.algorithms.declarations import AlgorithmPart, Declaration, kl_controller, kl_estimator

if TYPE_CHECKING:
    from torch import Tensor


def kl_penalty(part: AlgorithmPart[Declaration], logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference)."""
    penalty: Tensor = part.declaration.function(logprobs - reference_logprobs)
    return penalty


@kl_estimator("k1", "x: unbiased, high variance, negative half of the time; its own gradient is 0 on average")
def k1(x: Tensor) -> Tensor:
    return x


@kl_estimator("k2", "x^2 / 2: biased a little; its gradient is that of the KL")
def k2(x: Tensor) -> Tensor:
    return x.square() / 2


@kl_estimator("k3", "exp(-x) + x - 1: unbiased, never negative; its gradient is that of the KL in the other direction")
def k3(x: Tensor) -> Tensor:
    """x is clamped to [-20, 20] and the result to at most 10."""
    x = x.clamp(-20, 20)
    return ((-x).exp() + x - 1).clamp(max=10)


@kl_estimator("abs", "|x|")
def absolute(x: Tensor) -> Tensor:
    return x.abs()


@kl_estimator("k1+", "the value of k1 with the gradient of k2")
def k1_plus(x: Tensor) -> Tensor:
    return x.detach() + _only_gradient(k2(x))


@kl_estimator("k3+", "the value of k3 with the gradient of k2")
def k3_plus(x: Tensor) -> Tensor:
    return k3(x).detach() + _only_gradient(k2(x))


def _only_gradient(values: Tensor) -> Tensor:
    """0, with the gradient of `values`."""
    return values - values.detach()


# --- the coefficient


@kl_controller("fixed", "the coefficient stays as it is")
class KLController:
    """The coefficient of the recipe, always; it has no state, so a resumed run follows its recipe."""

    def __init__(self, coefficient: float, options: Any) -> None:
        self.coefficient = coefficient
        self.options = options

    def update(self, kl: float, num_sequences: int) -> None:
        """Chooses the next coefficient, from the KL of a step."""

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        pass


@dataclass(frozen=True)
class AdaptiveKLOptions:
    target: Annotated[float, Gt(0)] = 0.1
    """KL towards which the coefficient steers."""
    horizon: Annotated[int, Ge(1)] = 10_000
    """Trajectories over which the coefficient follows; fewer steer faster."""


@kl_controller(
    "adaptive",
    "the coefficient grows while the KL is above `target` and shrinks while it is below",
    options=AdaptiveKLOptions,
)
class AdaptiveKL(KLController):
    """Steers the KL towards a target (Ziegler et al., 2019, arXiv 1909.08593).

    `coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon`, where `kl` is the mean over
    sequences of their token mean (`seq_mean_token_mean`) and `horizon` counts sequences. A step of more sequences than
    the horizon counts as the horizon: beyond five times that, the coefficient would change its sign.
    """

    options: AdaptiveKLOptions

    def update(self, kl: float, num_sequences: int) -> None:
        if not math.isfinite(kl):
            raise ValueError(f"the KL divergence to the reference is {kl}; the coefficient cannot follow it")
        error = min(max(kl / self.options.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * min(num_sequences / self.options.horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
