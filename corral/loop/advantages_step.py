"""The second stage of a step: what was played is scored, and rewards become advantages."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from corral.algorithms.advantages import ADVANTAGES, RewardedBatch, Turns
from corral.algorithms.corrections import correction_weights
from corral.algorithms.kl import kl_penalty
from corral.algorithms.ragged import segment_mean, whiten
from corral.algorithms.shaping import clipped_rewards, overlong_penalty
from corral.data.batch import Batch
from corral.data.trajectory import IntArray, Trajectory
from corral.loop.components import RunComponents
from corral.loop.rollout_step import RolloutResult
from corral.loop.trainer_group import TrainerGroup
from corral.recipe.presets import BY_TURN
from corral.runtime.group import together


def plan_updates(parts: RunComponents, batch: Batch) -> list[list[int]]:
    """Trajectories of each update of one pass: groups in the order drawn, cut into parts that differ by one at most."""
    order = np.argsort(batch.groups, kind="stable")
    return [rows.tolist() for rows in np.array_split(order, min(parts.recipe.batch.updates_per_step, len(batch)))]


async def score(parts: RunComponents, batch: Batch, updates: list[list[int]]) -> None:
    """Adds `old_logprobs`, and where they are used `reference_logprobs` and `values`.

    Consumes what was played; waits for actor, reference and critic: at the same time where they have devices of their
    own, else one after the other, in the same order on all of these devices. The actor's are computed in the very
    packs that will be learnt from, so that a recomputed log-prob is the same number, bit for bit, as the one of the
    first update's forward pass.
    """
    wanted: dict[str, tuple[TrainerGroup, str]] = {}
    if parts.algorithm.old_logprobs == "recompute":
        wanted["old_logprobs"] = (parts.actor, "logprobs")
    if parts.reference is not None:
        wanted["reference_logprobs"] = (parts.reference, "logprobs")
    if parts.critic is not None:
        wanted["values"] = (parts.critic, "values")
    by_devices: dict[tuple[str, ...], list[str]] = {}
    for column, (learners, _) in wanted.items():
        by_devices.setdefault(tuple(learners.group.names), []).append(column)

    async def one_after_the_other(columns: list[str]) -> None:
        for column in columns:
            learners, method = wanted[column]
            batch.columns[column] = await learners.column(method, batch, updates)

    batch.columns["old_logprobs"] = batch.logprobs
    await together(*map(one_after_the_other, by_devices.values()))


def advantages(parts: RunComponents, batch: Batch, played: RolloutResult) -> dict[str, float]:
    """Adds `advantages`, `returns` and, where asked for, `correction`; shapes the rewards first."""
    algorithm, metrics = parts.algorithm, dict[str, float]()
    mask, offsets = torch.from_numpy(batch.generated), torch.from_numpy(batch.offsets)
    rewards = torch.from_numpy(batch.token_rewards.copy())
    old = torch.from_numpy(batch.columns["old_logprobs"])
    if algorithm.overlong_buffer is not None:
        lengths = torch.tensor([trajectory.num_generated for trajectory in played.trajectories])
        limit = parts.recipe.rollout.max_response_tokens
        penalties = overlong_penalty(lengths, limit, algorithm.overlong_buffer, algorithm.overlong_penalty)
        rewards[last_generated(batch)] += penalties
        metrics["reward/overlong_penalty"] = float(penalties.mean())
    baselines = torch.tensor([played.baselines.get(int(group), 0.0) for group in batch.groups])
    if algorithm.reward_clip is not None:
        rewards = clipped_rewards(rewards, mask, offsets, algorithm.reward_clip)
        baselines = baselines.double().clamp(-algorithm.reward_clip, algorithm.reward_clip)
    if parts.kl is not None:
        reference = torch.from_numpy(batch.columns["reference_logprobs"])
        penalty = kl_penalty(old, reference, algorithm.kl_estimator)
        kl = float(segment_mean(penalty, mask, offsets).mean())
        metrics |= {"kl/mean": kl, "kl/coefficient": parts.kl.coefficient}
        if algorithm.kl_where == "reward":
            rewards = torch.where(mask, rewards - parts.kl.coefficient * penalty, 0.0)
    if algorithm.correction_name != "none":
        correction = correction_weights(
            old, torch.from_numpy(batch.logprobs), mask, offsets, algorithm.correction_name,
            algorithm.correction_cap, algorithm.correction_floor, algorithm.correction_level,
        )  # fmt: skip
        batch.columns["correction"] = correction.weights.numpy()
        metrics |= {f"correction/{name}": float(value) for name, value in correction.metrics.items()}
    values = batch.columns.get("values")
    result = ADVANTAGES[algorithm.advantage](
        RewardedBatch(
            token_rewards=rewards,
            mask=mask,
            offsets=offsets,
            groups=torch.from_numpy(batch.groups),
            values=None if values is None else torch.from_numpy(values),
            baselines=baselines,
            turns=turns_of(played.trajectories, batch.offsets) if algorithm.advantage in BY_TURN else None,
        ),
        **algorithm.advantage_options,
    )
    found, bound = result.advantages, algorithm.advantage_clip
    if algorithm.whiten:
        found = whiten(found, mask)
    batch.columns["advantages"] = (found if bound is None else found.clamp(-bound, bound)).float().numpy()
    batch.columns["returns"] = result.returns.float().numpy()
    return metrics


def turns_of(trajectories: Sequence[Trajectory], offsets: IntArray) -> Turns:
    """`offsets` of the batch that has these trajectories."""
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


def steer_kl(parts: RunComponents, metrics: dict[str, float], num_trajectories: int) -> None:
    """The controller's next coefficient, from the step's KL."""
    if parts.kl is not None and math.isfinite(metrics["kl/mean"]):  # else the update was skipped
        parts.kl.update(metrics["kl/mean"], num_trajectories)
