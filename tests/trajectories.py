"""Trajectories for tests: a prompt, a response, a reward."""

import numpy as np

from corral.data.batch import Batch, StopReason, Trajectory


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
        prompt_id=group,
        sample=sample,
        row=group,
    )


def small_batch() -> Batch:
    """Three groups of four with a common opening, and samples that start alike."""
    rng = np.random.default_rng(4)
    prompts = [[5, 6, 7, *rng.integers(3, 90, 5 + 3 * g)] for g in range(3)]
    return Batch.of(
        [
            make_trajectory(prompt, rng.integers(3, 6, 2 + i).tolist(), group=g, sample=i)
            for g, prompt in enumerate(prompts)
            for i in range(4)
        ]
    )
