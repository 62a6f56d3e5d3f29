"""Trajectories for tests: a prompt, a response, a reward."""

import numpy as np

from corral.data.trajectory import StopReason, Trajectory


def make_trajectory(
    prompt: list[int],
    response: list[int],
    *,
    group: int = 0,
    sample: int = 0,
    reward: float = 0.0,
    logprobs: list[float] | None = None,
) -> Trajectory:
    tokens = np.array([*prompt, *response], np.int64)
    generated = np.arange(len(tokens)) >= len(prompt)
    return Trajectory(
        tokens=tokens,
        generated=generated,
        logprobs=np.array([0.0] * len(prompt) + (logprobs or [0.0] * len(response)), np.float32),
        versions=np.where(generated, 0, -1),
        turn_rewards=[(len(tokens) - 1, reward)],
        stop=StopReason.LENGTH,
        ordinal=group,
        sample=sample,
        row=group,
    )
