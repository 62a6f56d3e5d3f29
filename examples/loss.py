"""A policy loss of your own, with an option: REINFORCE with a ratio that is capped from above only.

Takes about 20 seconds on two CPU cores.
"""

from dataclasses import dataclass
from typing import Any

from reward import RECIPE, ROWS, digits
from torch import Tensor

import corral


@dataclass(frozen=True)
class CapOptions:
    cap: float = 2.0
    """Upper bound of the ratio of new to old probability."""


@corral.loss(summary="importance-weighted REINFORCE with a cap", options=CapOptions)
def capped(terms: Any, options: CapOptions) -> Tensor:
    """One number for each token; what is not generated counts as zero whatever is returned for it."""
    ratio = (terms.logprobs - terms.old_logprobs).detach().exp().clamp(max=options.cap)
    return -ratio * terms.advantages * terms.logprobs


if __name__ == "__main__":
    changes = {"name": "example-loss", "algorithm.loss.cap": 1.5}
    run = corral.train(RECIPE, reward=digits, data=ROWS, loss=capped, **changes)
    rewards = run.metrics["reward/mean"].to_pylist()
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
