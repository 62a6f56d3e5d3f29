"""An advantage of your own: rewards compared with the mean over the whole step instead of the prompt's own samples.

Takes about 20 seconds on two CPU cores.
"""

from typing import Any

from reward import RECIPE, ROWS, digits
from torch import Tensor

import corral
from corral import Needs


@corral.advantage(summary="reward minus the mean of the step", needs=Needs(whole_batch=True))
def step_mean(batch: Any, options: Any) -> Tensor:
    """One number for each trajectory. `whole_batch` is declared, so a pipelined run waits for the whole step."""
    return batch.rewards - batch.rewards.mean()


if __name__ == "__main__":
    run = corral.train(RECIPE, reward=digits, data=ROWS, advantage=step_mean, name="example-advantage")
    rewards = run.metrics["reward/mean"].to_pylist()
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
