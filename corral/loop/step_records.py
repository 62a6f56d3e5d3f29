"""What is written down of a step: its metrics, its trajectories, and a batch that could not be trained on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corral.data.batch import Batch, FloatArray, StopReason, Trajectory
from corral.loop.rollout_step import RolloutResult


def step_metrics(rollout: RolloutResult, batch: Batch, samples_per_prompt: int) -> dict[str, float]:
    rewards = np.array([trajectory.reward for trajectory in rollout.trajectories])
    lengths = np.array([trajectory.num_generated for trajectory in rollout.trajectories])
    by_group = [rewards[batch.groups == group] for group in np.unique(batch.groups)]
    equal = [float(np.ptp(group) == 0) for group in by_group]
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/best": float(np.mean([group.max() for group in by_group])),
        "length/mean": float(lengths.mean()),
        "length/turns": float(np.mean([len(trajectory.turn_rewards) for trajectory in rollout.trajectories])),
        "length/max": float(lengths.max()),
        "samples/trajectories": float(len(rewards)),
        "samples/equal_groups": float(np.mean(equal)) if samples_per_prompt > 1 else 0.0,
        "samples/errors": float(sum(trajectory.error is not None for trajectory in rollout.trajectories)),
        "samples/failed": float(rollout.num_failed),
    }
    if rollout.rounds > 1 or rollout.zero_variance:
        metrics["samples/dropped_groups"] = float(len(rollout.zero_variance))
        metrics["samples/rounds"] = float(rollout.rounds)
    for reason in StopReason:
        fraction = np.mean([trajectory.stop is reason for trajectory in rollout.trajectories])
        if fraction:
            metrics[f"stop/{reason}"] = float(fraction)
    return metrics | environment_metrics(rollout.trajectories)


def environment_metrics(trajectories: Sequence[Trajectory], prefix: str = "environment") -> dict[str, float]:
    """Averages what environments measured; where there are several, also by tag, with rewards, turns, lengths and stop
    reasons."""
    found = averages(trajectories, prefix)
    tags = sorted({trajectory.tag for trajectory in trajectories} - {""})
    for tag in tags:
        own = [trajectory for trajectory in trajectories if trajectory.tag == tag]
        found |= averages(own, f"{prefix}/{tag}")
        found |= {
            f"{prefix}/{tag}/reward": float(np.mean([t.reward for t in own])),
            f"{prefix}/{tag}/turns": float(np.mean([len(t.turn_rewards) for t in own])),
            f"{prefix}/{tag}/length": float(np.mean([t.num_generated for t in own])),
            **{
                f"{prefix}/{tag}/stop/{reason}": float(np.mean([t.stop is reason for t in own]))
                for reason in StopReason
                if any(t.stop is reason for t in own)
            },
        }
    return found


def averages(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, float]:
    names = sorted({name for trajectory in trajectories for name in trajectory.metrics})
    return {
        f"{prefix}/{name}": float(np.mean([t.metrics[name] for t in trajectories if name in t.metrics]))
        for name in names
    }


def staleness_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Counts how many versions older than the weights that were trained on them the generated tokens were."""
    ages = version - batch.versions[batch.generated]
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **{f"staleness/fraction_{age}": float((ages == age).mean()) for age in np.unique(ages).tolist()},
    }


def trajectory_records(
    trajectories: Sequence[Trajectory], tokenizer: Any, batch: Batch | None = None
) -> Iterator[dict[str, Any]]:
    for i, trajectory in enumerate(trajectories):
        start = trajectory.prompt_length
        record = {
            "prompt_id": trajectory.prompt_id,
            "sample": trajectory.sample,
            "row": trajectory.row,
            "tag": trajectory.tag,
            "reward": trajectory.reward,
            "turn_rewards": [reward for _, reward in trajectory.turn_rewards],
            "stop": str(trajectory.stop),
            "error": trajectory.error,
            "prompt": tokenizer.decode(trajectory.tokens[:start]),
            "response": tokenizer.decode(trajectory.tokens[start:]),
            "metrics": trajectory.metrics,
            "prompt_tokens": trajectory.tokens[:start].tolist(),
            "response_tokens": trajectory.tokens[start:].tolist(),
            "generated": trajectory.generated[start:].astype(int).tolist(),
            "logprobs": rounded(trajectory.logprobs[start:]),
            "versions": trajectory.versions[start:].tolist(),
        }
        if batch is not None:
            span = slice(int(batch.offsets[i]) + start, int(batch.offsets[i + 1]))
            record["advantages"] = rounded(batch.columns["advantages"][span])
        yield record


def rounded(numbers: FloatArray) -> list[float]:
    """Rounds to six digits behind the point, as `round` does: times 10^6 a float32 is still exact in float64."""
    digits: list[float] = np.round(numbers.astype(np.float64), 6).tolist()
    return digits


def save_failed_batch(batch: Batch, path: Path) -> None:
    """Writes everything the update saw, for a post-mortem: `numpy.load(path)`."""
    np.savez_compressed(
        path,
        tokens=batch.tokens,
        generated=batch.generated,
        logprobs=batch.logprobs,
        token_rewards=batch.token_rewards,
        offsets=batch.offsets,
        groups=batch.groups,
        **batch.columns,  # type: ignore[arg-type]
    )
