"""The third stage of a step: the batch is learnt from, update by update, pack by pack."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from corral.algorithms.aggregate import GlobalCounts, aggregate
from corral.algorithms.kl import kl_penalty
from corral.algorithms.losses import LOSSES, LossOptions, PolicyTerms, TokenLoss
from corral.algorithms.regularisers import llds, num_preserved
from corral.algorithms.values import value_loss
from corral.data.batch import Batch, Pack
from corral.loop.parts import Parts
from corral.loop.score import pack_rows


class Learnt:
    """Sums over a step's updates, and what became of each update."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}
        self.num_tokens = 0
        self.losses: list[float] = []
        self.value_losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.learning_rate = 0.0
        self.num_updates = 0
        self.num_empty = 0
        """Updates without any trajectory that could change the weights."""
        self.skipped: list[str] = []
        """One line for each update that was not made because something was not finite."""
        self.finite: list[bool] = []
        """Of each update in order, critic and policy together."""
        self.num_overflows = 0

    def add(self, name: str, token_loss: TokenLoss) -> None:
        for key, value in token_loss.sums.items():
            self.sums[f"{name}/{key}"] = self.sums.get(f"{name}/{key}", 0.0) + float(value)
        for key, value in token_loss.maxima.items():
            self.maxima[f"{name}/{key}"] = max(self.maxima.get(f"{name}/{key}", 0.0), float(value))

    def metrics(self) -> dict[str, float]:
        mean = {name: value / max(self.num_tokens, 1) for name, value in self.sums.items()}
        finite = [norm for norm in self.gradient_norms if np.isfinite(norm)]
        result = {
            **mean,
            **self.maxima,
            "policy/loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "policy/gradient_norm": float(np.mean(finite)) if finite else 0.0,
            "policy/learning_rate": self.learning_rate,
            "updates/made": float(self.num_updates),
            "updates/skipped": float(len(self.skipped)),
            "updates/empty": float(self.num_empty),
        }
        if self.num_overflows:
            result["updates/overflowed"] = float(self.num_overflows)
        if self.value_losses:
            result["value/loss"] = float(np.mean(self.value_losses))
        return result


def learn(parts: Parts, batch: Batch, updates: list[list[int]], step: int) -> Learnt:
    """`passes` times over the batch, one optimiser step for each update."""
    learnt = Learnt()
    if not np.isfinite(batch.logprobs).all():
        # Said here, because samples of a broken model may well have equal rewards, and then no loss is computed.
        learnt.skipped.append("the log-probs of what was played")
        learnt.finite.append(False)
        return learnt
    only_critic = parts.critic is not None and step <= parts.recipe.critic.warmup_steps
    for _ in range(parts.recipe.batch.passes):
        for rows in updates:
            num_skipped = len(learnt.skipped)
            if parts.critic is not None:
                update_critic(parts, batch, rows, learnt)
            if not only_critic:
                update_policy(parts, batch, rows, learnt)
            learnt.finite.append(len(learnt.skipped) == num_skipped)
    return learnt


def update_policy(parts: Parts, batch: Batch, rows: Sequence[int], learnt: Learnt) -> None:
    counts, preserved = counts_of(batch, rows)
    packs = pack_rows(parts, batch, trainable_rows(parts, batch, rows))
    if not packs:
        learnt.num_empty += 1
        return
    loss = 0.0
    for pack in packs:
        share = PolicyShare(parts, pack, counts, preserved, learnt)
        loss += parts.actor.forward_backward(pack, share)
    result = parts.actor.step()
    learnt.losses.append(loss)
    learnt.gradient_norms.append(result.gradient_norm)
    learnt.learning_rate = result.learning_rate
    learnt.num_updates += not result.skipped
    if result.overflow:
        learnt.num_overflows += 1
    elif result.skipped:
        learnt.skipped.append(f"policy loss {loss:g}, gradient norm {result.gradient_norm:g}")


def counts_of(batch: Batch, rows: Sequence[int]) -> tuple[GlobalCounts, int]:
    """What losses are divided by: tokens and trajectories of the whole update, whatever is left out or split off."""
    flat = batch.positions_of(rows)
    offsets = np.cumsum([0, *(batch.offsets[row + 1] - batch.offsets[row] for row in rows)])
    mask = torch.from_numpy(batch.generated[flat])
    preserved = num_preserved(torch.from_numpy(batch.columns["advantages"][flat]), mask, torch.from_numpy(offsets))
    return GlobalCounts(int(mask.sum()), len(rows)), preserved


def trainable_rows(parts: Parts, batch: Batch, rows: Sequence[int]) -> list[int]:
    """Trajectories that can move the weights. One whose advantages are all zero has no gradient, and is not computed,
    unless another term of the loss looks at it, or its log-probs were recomputed in packs that must stay as they are.
    """
    algorithm = parts.algorithm
    others = algorithm.kl_where == "loss" or algorithm.entropy_coefficient or algorithm.llds_coefficient
    if others or algorithm.loss == "dro" or algorithm.old_logprobs == "recompute":
        return list(rows)
    moves = batch.columns["advantages"] != 0
    return [row for row in rows if moves[batch.offsets[row] : batch.offsets[row + 1]].any()]


@dataclass
class PolicyShare:
    """A pack's share of the policy loss, as a function of its log-probs and entropy."""

    parts: Parts
    pack: Pack
    counts: GlobalCounts
    preserved: int
    learnt: Learnt

    def __call__(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        parts, algorithm, device = self.parts, self.parts.algorithm, logprobs.device
        mask, offsets = (torch.from_numpy(array).to(device) for array in (self.pack.generated, self.pack.offsets))
        column = {name: torch.from_numpy(self.pack.column(name)).to(device) for name in self.pack.batch.columns}
        terms = PolicyTerms(logprobs, column["old_logprobs"], column["advantages"], mask, offsets)
        token_loss = LOSSES[algorithm.loss](terms, loss_options(parts))
        entropy_sum = (entropy.detach() * mask).sum()
        self.learnt.add(
            "policy", TokenLoss(token_loss.loss, {**token_loss.sums, "entropy": entropy_sum}, token_loss.maxima)
        )
        self.learnt.num_tokens += int(mask.sum())
        loss = token_loss.loss
        if "correction" in column:
            loss = loss * column["correction"]
        if parts.kl is not None and algorithm.kl_where == "loss":
            penalty = kl_penalty(logprobs, column["reference_logprobs"], algorithm.kl_estimator)
            loss = loss + parts.kl.coefficient * penalty
        if algorithm.entropy_coefficient:
            loss = loss - algorithm.entropy_coefficient * entropy
        share = aggregate(loss, mask, offsets, algorithm.aggregation, self.counts, algorithm.aggregation_norm)
        if algorithm.llds_coefficient:
            fallen = llds(logprobs, terms.old_logprobs, terms.advantages, mask, offsets)
            counts = GlobalCounts(self.counts.num_tokens, self.preserved)
            share = share + algorithm.llds_coefficient * aggregate(fallen, mask, offsets, "seq_mean_token_mean", counts)
        return share


def loss_options(parts: Parts) -> LossOptions:
    algorithm = parts.algorithm
    return LossOptions(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        sapo_tau_positive=algorithm.sapo_tau_positive,
        sapo_tau_negative=algorithm.sapo_tau_negative,
        dro_beta=algorithm.dro_beta,
        dppo_threshold=algorithm.dppo_threshold,
    )


def update_critic(parts: Parts, batch: Batch, rows: Sequence[int], learnt: Learnt) -> None:
    assert parts.critic is not None
    critic, clip = parts.critic, parts.recipe.critic.value_clip
    counts, _ = counts_of(batch, rows)
    total = 0.0
    for pack in pack_rows(parts, batch, rows):

        def share(values: Tensor, pack: Pack = pack) -> Tensor:
            device = values.device
            mask, offsets = (torch.from_numpy(array).to(device) for array in (pack.generated, pack.offsets))
            old, returns = (torch.from_numpy(pack.column(name)).to(device) for name in ("values", "returns"))
            token_loss = value_loss(values, old, returns, mask, clip)
            return aggregate(token_loss.loss, mask, offsets, "token_mean", counts)

        total += critic.forward_backward(pack, share)
    result = critic.step()
    learnt.value_losses.append(total)
    if result.skipped and not result.overflow:
        learnt.skipped.append(f"value loss {total:g}, gradient norm {result.gradient_norm:g}")
