"""The third stage of a step: rewards become advantages."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from corral.algorithms.advantages import RewardedBatch, Turns, compute_advantages
from corral.algorithms.corrections import correction_weights
from corral.algorithms.kl import kl_penalty
from corral.algorithms.ragged import segment_mean, whiten
from corral.algorithms.shaping import clipped_rewards, overlong_penalty
from corral.data.batch import Batch, IntArray, Trajectory
from corral.loop.components import RunComponents
from corral.loop.rollout_step import RolloutResult


def add_advantages(parts: RunComponents, batch: Batch, rollout: RolloutResult) -> dict[str, float]:
    """Adds `advantages`, `returns` and, where the recipe has one, `correction`; shapes the rewards first."""
    algorithm, metrics = parts.algorithm, dict[str, float]()
    mask, offsets = torch.from_numpy(batch.generated), torch.from_numpy(batch.offsets)
    rewards = torch.from_numpy(batch.token_rewards.copy())
    old = torch.from_numpy(batch.columns["old_logprobs"])
    if algorithm.overlong_buffer is not None:
        lengths = torch.tensor([trajectory.num_generated for trajectory in rollout.trajectories])
        limit = parts.recipe.rollout.max_response_tokens
        penalties = overlong_penalty(lengths, limit, algorithm.overlong_buffer, algorithm.overlong_penalty)
        rewards[last_generated(batch)] += penalties
        metrics["reward/overlong_penalty"] = float(penalties.mean())
    baselines = torch.tensor([rollout.baselines.get(int(group), 0.0) for group in batch.groups])
    if algorithm.reward_clip is not None:
        rewards = clipped_rewards(rewards, mask, offsets, algorithm.reward_clip)
        baselines = baselines.double().clamp(-algorithm.reward_clip, algorithm.reward_clip)
    if parts.kl is not None and algorithm.kl is not None:
        reference = torch.from_numpy(batch.columns["reference_logprobs"])
        penalty = kl_penalty(algorithm.kl.estimator, old, reference)
        kl = float(segment_mean(penalty, mask, offsets).mean())
        metrics |= {"kl/mean": kl, "kl/coefficient": parts.kl.coefficient}
        if algorithm.kl.where == "reward":
            rewards = torch.where(mask, rewards - parts.kl.coefficient * penalty, 0.0)
    if algorithm.correction.name != "none":
        engine = torch.from_numpy(batch.logprobs)
        correction = correction_weights(algorithm.correction, old, engine, mask, offsets)
        batch.columns["correction"] = correction.weights.numpy()
        metrics |= {f"correction/{name}": float(value) for name, value in correction.metrics.items()}
    values = batch.columns.get("values")
    needs = algorithm.advantage.declaration.needs
    result = compute_advantages(
        algorithm.advantage,
        RewardedBatch(
            token_rewards=rewards,
            mask=mask,
            offsets=offsets,
            groups=torch.from_numpy(batch.groups),
            values=None if values is None else torch.from_numpy(values),
            baselines=baselines,
            turns=turns_of(rollout.trajectories, batch.offsets) if needs.turns else None,
        ),
    )
    found, bound = result.advantages, algorithm.advantage_clip
    if algorithm.whiten:
        found = whiten(found, mask)
    batch.columns["advantages"] = (found if bound is None else found.clamp(-bound, bound)).float().numpy()
    batch.columns["returns"] = result.returns.float().numpy()
    return metrics


def turns_of(trajectories: Sequence[Trajectory], offsets: IntArray) -> Turns:
    """The turns of a batch of these trajectories, which begin at `offsets`."""
    turns = [
        (int(start) + last, row, state)
        for row, (start, trajectory) in enumerate(zip(offsets, trajectories, strict=False))
        for (last, _), state in zip(trajectory.turn_rewards, trajectory.turn_states, strict=True)
    ]
    ends, rows, states = torch.tensor(turns, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return Turns(ends.contiguous(), rows.contiguous(), states.contiguous())


def last_generated(batch: Batch) -> Tensor:
    """Index of each trajectory's last generated token."""
    ends = [
        start + int(np.flatnonzero(batch.generated[start:end])[-1])
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    return torch.tensor(ends)


def update_kl_coefficient(parts: RunComponents, metrics: dict[str, float], num_trajectories: int) -> None:
    """Lets the KL controller choose its next coefficient, from the step's KL."""
    if parts.kl is not None and math.isfinite(metrics["kl/mean"]):  # else the update was skipped
        parts.kl.update(metrics["kl/mean"], num_trajectories)
