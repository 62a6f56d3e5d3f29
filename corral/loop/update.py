"""The third stage of a step: the batch is learnt from, update by update."""

from collections.abc import Sequence

import numpy as np
import torch

from corral.algorithms.aggregate import GlobalCounts
from corral.algorithms.regularizers import num_preserved
from corral.data.batch import Batch
from corral.loop.components import RunComponents
from corral.runtime.loss_functions import LossStats, UpdateTerms
from corral.train.optimizer import UpdateResult


class TrainResult:
    """Sums over a step's updates, and what became of each update."""

    def __init__(self) -> None:
        self.sums = LossStats()
        self.losses: list[float] = []
        self.value_losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.learning_rate = 0.0
        self.num_updates = 0
        self.num_empty = 0
        """Updates without any trajectory that could change the weights."""
        self.skipped: list[str] = []
        """One line for each update that was not made because something was not finite."""
        self.too_far: list[str] = []
        """One line for each update that was not made because the policy had moved too far (`max_mean_ratio`)."""
        self.finite: list[bool] = []
        """Of each update in order, critic and policy together."""
        self.num_overflows = 0

    def add_policy(self, loss: float, sums: LossStats, result: UpdateResult) -> None:
        self.sums.merge(sums)
        self.losses.append(loss)
        self.gradient_norms.append(result.gradient_norm)
        self.learning_rate = result.learning_rate
        self.num_updates += not result.skipped
        if result.overflow:
            self.num_overflows += 1
        elif result.skipped:
            self.skipped.append(f"policy loss {loss:g}, gradient norm {result.gradient_norm:g}")

    def add_too_far(self, loss: float, sums: LossStats, limit: float) -> None:
        self.sums.merge(sums)
        self.losses.append(loss)
        self.too_far.append(f"mean ratio {sums.mean_ratio:.4g}, above algorithm.max_mean_ratio: {limit:g}")

    def add_value(self, loss: float, result: UpdateResult) -> None:
        self.value_losses.append(loss)
        if result.skipped and not result.overflow:
            self.skipped.append(f"value loss {loss:g}, gradient norm {result.gradient_norm:g}")

    def metrics(self) -> dict[str, float]:
        mean = {name: value / max(self.sums.num_tokens, 1) for name, value in self.sums.sums.items()}
        finite = [norm for norm in self.gradient_norms if np.isfinite(norm)]
        result = {
            **mean,
            **self.sums.maxima,
            "policy/loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "policy/gradient_norm": float(np.mean(finite)) if finite else 0.0,
            "policy/learning_rate": self.learning_rate,
            "updates/made": float(self.num_updates),
            "updates/skipped": float(len(self.skipped) + len(self.too_far)),
            "updates/empty": float(self.num_empty),
        }
        if self.num_overflows:
            result["updates/overflowed"] = float(self.num_overflows)
        if self.value_losses:
            result["value/loss"] = float(np.mean(self.value_losses))
        return result


async def learn(parts: RunComponents, batch: Batch, updates: list[list[int]], step: int) -> TrainResult:
    """`ppo_epochs` times over the batch, one optimizer step for each update.

    Consumes a scored batch with advantages, produces new weights in the trainers. Waits for critic and actor, one after
    the other; a trainer that is lost ends the wait.
    """
    learnt = TrainResult()
    if is_broken(batch, learnt):
        return learnt
    only_critic = parts.critic is not None and step <= parts.recipe.critic.warmup_steps
    for _ in range(parts.recipe.batch.ppo_epochs):
        for rows in updates:
            num_skipped = len(learnt.skipped)
            if parts.critic is not None:
                await update_critic(parts, batch, rows, learnt)
            if not only_critic:
                await update_policy(parts, batch, rows, learnt)
            learnt.finite.append(len(learnt.skipped) == num_skipped)
    return learnt


def is_broken(batch: Batch, learnt: TrainResult) -> bool:
    """Said here, because samples of a broken model may well have equal rewards, and then no loss is computed."""
    if np.isfinite(batch.logprobs).all():
        return False
    learnt.skipped.append("the log-probs of what was played")
    learnt.finite.append(False)
    return True


async def update_policy(parts: RunComponents, batch: Batch, rows: Sequence[int], learnt: TrainResult) -> None:
    trainable = trainable_rows(parts, batch, rows)
    if not trainable:
        learnt.num_empty += 1
        return
    sums = await parts.actor.accumulate(batch, trainable, terms_of(parts, batch, rows))
    await step_policy(parts, sums, learnt)


async def step_policy(parts: RunComponents, sums: LossStats, learnt: TrainResult, scale: float = 1.0) -> None:
    """One update with the gradients times `scale`, unless these are of a policy too far from the one that played."""
    limit = parts.algorithm.max_mean_ratio
    if limit is not None and sums.mean_ratio > limit:
        await parts.actor.group.all("zero_grad")
        learnt.add_too_far(sums.loss * scale, sums, limit)
    else:
        learnt.add_policy(sums.loss * scale, sums, await parts.actor.step(scale))


async def update_critic(parts: RunComponents, batch: Batch, rows: Sequence[int], learnt: TrainResult) -> None:
    assert parts.critic is not None
    sums = await parts.critic.accumulate(batch, rows, terms_of(parts, batch, rows))
    learnt.add_value(sums.loss, await parts.critic.step())


def terms_of(parts: RunComponents, batch: Batch, rows: Sequence[int]) -> UpdateTerms:
    """What losses are divided by: tokens and trajectories of the whole update, whatever is left out or split off."""
    flat = batch.positions_of(rows)
    offsets = np.cumsum([0, *(batch.offsets[row + 1] - batch.offsets[row] for row in rows)])
    mask = torch.from_numpy(batch.generated[flat])
    preserved = num_preserved(torch.from_numpy(batch.columns["advantages"][flat]), mask, torch.from_numpy(offsets))
    return UpdateTerms(GlobalCounts(int(mask.sum()), len(rows)), preserved, kl_coefficient(parts))


def kl_coefficient(parts: RunComponents) -> float:
    return 0.0 if parts.kl is None else parts.kl.coefficient


def trainable_rows(parts: RunComponents, batch: Batch, rows: Sequence[int]) -> list[int]:
    """Trajectories that can move the weights. One whose advantages are all zero has no gradient, and is not computed,
    unless another term of the loss looks at it, or its log-probs were recomputed in packs that must stay as they are.
    """
    algorithm = parts.algorithm
    others = algorithm.kl_where == "loss" or algorithm.entropy_coefficient or algorithm.llds_coefficient
    if others or algorithm.loss == "dro" or algorithm.old_logprobs == "recompute":
        return list(rows)
    moves = batch.columns["advantages"] != 0
    return [row for row in rows if moves[batch.offsets[row] : batch.offsets[row + 1]].any()]
