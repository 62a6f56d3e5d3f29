"""The second half of a step: log-probs and values of its batch, advantages, then gradients and optimizer steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.algorithms.advantages import (
    RewardedBatch,
    ShapedResponses,
    Turns,
    clipped_rewards,
    compute_advantages,
    with_lone_rewards,
)
from corral.algorithms.corrections import correction_weights
from corral.algorithms.losses import GlobalCounts, divisor, kl_penalty, num_preserved
from corral.algorithms.ragged import segment_mean
from corral.data.batch import Batch, FloatArray, IntArray, Trajectory
from corral.data.reference_cache import ReferenceCache
from corral.loop.components import RunComponents
from corral.loop.rollout_step import RolloutResult
from corral.loop.sample_errors import RunStopped
from corral.recipe.errors import RunError
from corral.recipe.recipe_warnings import why_training_waits
from corral.runtime.group import gather_calls
from corral.runtime.model_workers import ActorWorker, CriticWorker, LossStats, PolicyWorker, TrainerGroup, UpdateTerms
from corral.runtime.teacher_endpoint import EndpointTeacher
from corral.training.optimizer import UpdateResult

MAX_FIRST_KL = 0.1


def plan_updates(parts: RunComponents, batch: Batch) -> list[list[int]]:
    """Returns the trajectories of each update of one epoch: groups in the order of their prompts, cut into parts that
    differ by one at most (by one pair, where pairs are trained on). What is masked is in none of them."""
    order = np.argsort(batch.groups, kind="stable")
    units = batch.units(order[~batch.is_masked[order]].tolist())
    if not units:
        return []
    splits = np.array_split(np.arange(len(units)), min(parts.recipe.batch.updates_per_step, len(units)))
    return [[row for i in split.tolist() for row in units[i]] for split in splits]


async def compute_logprobs_and_values(parts: RunComponents, batch: Batch, updates: list[list[int]]) -> None:
    """Adds the columns `old_logprobs`, and where they are used `reference_logprobs` and `values`.

    Consumes a batch of trajectories; waits for actor, reference and critic: at the same time where they have devices of
    their own, else one after the other, in the same order on all of these devices. The actor's are computed in the very
    packs that will be trained on, so that a recomputed log-prob is the same number, bit for bit, as the one of the
    first update's forward pass.
    """
    columns: dict[str, tuple[TrainerGroup[Any], Callable[..., Any]]] = {}
    if parts.algorithm.old_logprobs == "recompute":
        columns["old_logprobs"] = parts.actor, ActorWorker.compute_logprobs
    if parts.reference is not None:
        columns["reference_logprobs"] = parts.reference, PolicyWorker.compute_logprobs
    elif parts.algorithm.needs_reference and parts.teacher is None:
        columns["reference_logprobs"] = parts.actor, ActorWorker.compute_reference_logprobs
    if parts.critic is not None:
        columns["values"] = parts.critic, CriticWorker.compute_values
    by_devices: dict[tuple[str, ...], list[str]] = {}
    for column, (trainers, _) in columns.items():
        by_devices.setdefault(tuple(trainers.group.names), []).append(column)

    async def compute_in_turn(names: list[str]) -> None:
        for name in names:
            trainers, method = columns[name]
            if name == "reference_logprobs" and parts.reference_cache is not None:
                batch.columns[name] = await cached_logprobs(parts.reference_cache, trainers, method, batch)
            else:
                batch.columns[name] = await trainers.compute_column(method, batch, updates)

    async def ask_teacher(teacher: EndpointTeacher) -> None:
        batch.columns["reference_logprobs"] = await teacher.compute_column(batch)

    batch.columns["old_logprobs"] = batch.logprobs
    asking = [] if parts.teacher is None else [ask_teacher(parts.teacher)]
    await gather_calls(*map(compute_in_turn, by_devices.values()), *asking)


async def cached_logprobs(
    cache: ReferenceCache, trainers: TrainerGroup[Any], method: Callable[..., Any], batch: Batch
) -> FloatArray:
    """Returns the reference's log-probs of answers of rows, of which only those are computed that it never was."""
    if missing := cache.missing(batch):
        new = batch.take(missing)
        cache.add(new, await trainers.compute_column(method, new, [list(range(len(new)))]))
    return cache.column(batch)


class StepTraining:
    """Advantages, gradients and optimizer steps of one step, which comes in pieces: in one, unless it is pipelined.

    Pipelined is still on-policy: the engine keeps the step's weights until all of it is rolled out. Where advantages
    follow from a prompt's own samples, gradients of the pieces are summed as they come (`streams`), and divided at the
    end by counts of the whole, so the update is that of the synchronous loop, to rounding. Where something looks at the
    whole batch (whitening, several updates or epochs, dynamic sampling), only the log-probs and values are computed
    piece by piece, and training waits for the last one, as it does when there is only one.
    """

    def __init__(self, parts: RunComponents, step: int) -> None:
        self.components, self.step, self.recipe = parts, step, parts.recipe
        self.streams = self.recipe.schedule.pipelined and not why_training_waits(self.recipe, parts.algorithm)
        self.rollouts: list[RolloutResult] = []
        self.batches: list[Batch] = []
        self.metric_sums: dict[str, float] = {}
        """Metrics of the advantages, summed over trajectories."""
        self.metric_maxima: dict[str, float] = {}
        self.stats = LossStats()
        self.result = new_result(parts)
        self.is_broken = False

    def updates_of(self, batch: Batch) -> list[list[int]]:
        """Returns in which parts log-probs of a piece are computed: those of the updates, where the piece is all, and
        what is masked by itself, since statistics of the batch need its log-probs too."""
        if self.recipe.schedule.pipelined:
            return [list(range(len(batch)))]
        masked: list[int] = np.flatnonzero(batch.is_masked).tolist()
        return [*plan_updates(self.components, batch), *([masked] if masked else [])]

    async def add(self, rollout: RolloutResult, batch: Batch) -> None:
        """Adds a piece of the step with its log-probs and values; with it the gradient, where that needs no other
        piece."""
        self.batches.append(batch)
        if not self.streams:
            return
        parts = self.components
        for name, value in add_advantages(parts, batch, rollout).items():
            if name.endswith("_max"):
                self.metric_maxima[name] = max(self.metric_maxima.get(name, value), value)
            else:
                self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value * len(batch)
        self.is_broken = self.is_broken or is_broken(batch, self.result)
        in_loss: list[int] = np.flatnonzero(~batch.is_masked).tolist()
        trainable = [] if self.is_broken else trainable_rows(parts, batch, in_loss)
        if trainable:
            with_details = self.recipe.logging.trajectories
            terms = UpdateTerms(self.expected_counts, 0, kl_coefficient(parts), with_details)
            self.stats.merge(await parts.actor.accumulate(batch, trainable, terms))

    async def finish(self) -> tuple[RolloutResult, Batch, dict[str, float], "TrainResult"]:
        """Makes the optimizer steps, once all pieces are there. Returns the whole step, its batch, the metrics of its
        advantages, and the result of its training. Waits for critic and actor; a trainer that is lost ends the
        wait."""
        parts, rollout = self.components, RolloutResult.join(self.rollouts)
        if not self.batches:
            raise RunStopped(nothing_to_train_on(parts, self.step, rollout))
        batch = Batch.join(self.batches)
        if self.streams:
            await self._step(batch)
            means = {name: total / len(batch) for name, total in self.metric_sums.items()}
            return rollout, batch, means | self.metric_maxima, self.result
        metrics = add_advantages(parts, batch, rollout)
        self.result = await train(parts, batch, plan_updates(parts, batch), self.step)
        return rollout, batch, metrics, self.result

    async def _step(self, batch: Batch) -> None:
        """Makes the one update of the gradients that were summed piece by piece."""
        parts, result = self.components, self.result
        if self.is_broken:
            await parts.actor.zero_grad()
        elif self.stats.num_tokens:
            in_loss = batch.take(np.flatnonzero(~batch.is_masked).tolist())
            counts = GlobalCounts(int(in_loss.counted.sum()), len(in_loss))
            await step_policy(parts, self.stats, result, self._scale(counts))
            result.finite.append(not result.skipped)
        else:
            result.num_empty += 1

    @property
    def expected_counts(self) -> GlobalCounts:
        """What losses are divided by before the counts are known; near enough to keep float16 gradients in range."""
        num_sequences = self.recipe.batch.prompts_per_step * self.recipe.batch.samples_per_prompt
        return GlobalCounts(num_sequences * self.recipe.rollout.max_response_tokens, num_sequences)

    def _scale(self, counts: GlobalCounts) -> float:
        """Returns the factor from a loss divided by the expected counts to one divided by the true ones."""
        aggregation = self.components.algorithm.aggregation
        return divisor(aggregation, self.expected_counts) / divisor(aggregation, counts)


async def train(parts: RunComponents, batch: Batch, updates: list[list[int]], step: int) -> "TrainResult":
    """Goes `ppo_epochs` times over the batch, with one optimizer step for each update.

    Consumes a batch with advantages, produces new weights in the trainers. Waits for critic and actor, one after the
    other; a trainer that is lost ends the wait.
    """
    result = new_result(parts)
    if is_broken(batch, result):
        return result
    result.num_empty += not updates  # all samples are masked
    only_critic = parts.critic is not None and step <= parts.recipe.critic.warmup_steps
    for epoch in range(parts.recipe.batch.ppo_epochs):
        with_details = epoch == 0 and parts.recipe.logging.trajectories
        for rows in updates:
            num_skipped = len(result.skipped)
            if parts.critic is not None:
                stats = await parts.critic.accumulate(batch, rows, terms_of(parts, batch, rows))
                result.add_value(stats.loss, await parts.critic.step())
            if not only_critic:
                await update_policy(parts, batch, rows, result, with_details)
            result.finite.append(len(result.skipped) == num_skipped)
    return result


async def update_policy(
    parts: RunComponents, batch: Batch, rows: Sequence[int], result: "TrainResult", with_details: bool
) -> None:
    trainable = trainable_rows(parts, batch, rows)
    if not trainable:
        result.num_empty += 1
        return
    terms = replace(terms_of(parts, batch, rows), with_details=with_details)
    stats = await parts.actor.accumulate(batch, trainable, terms)
    await step_policy(parts, stats, result)


async def step_policy(parts: RunComponents, stats: LossStats, result: "TrainResult", scale: float = 1.0) -> None:
    """Makes one update with the gradients times `scale`, unless the policy is too far from the one that sampled."""
    check_agreement(parts, stats.sums.get("policy/approx_kl", 0.0) / max(stats.num_tokens, 1))
    parts.has_updated = True
    limit = parts.algorithm.max_mean_ratio
    if limit is not None and stats.mean_ratio > limit:
        await parts.actor.zero_grad()
        result.add_too_far(stats.loss * scale, stats, limit)
    else:
        result.add_policy(stats.loss * scale, stats, await parts.actor.step(scale))


def check_agreement(parts: RunComponents, approx_kl: float) -> None:
    """Raises if engine and trainer, which have the same weights until the first update, do not agree on what the engine
    sampled: whatever differs then is a mistake in one of them, and training would go on with it."""
    if not parts.has_updated and approx_kl > MAX_FIRST_KL:
        raise RunError(
            f"before the first update, engine and trainer disagree about the sampled tokens by {approx_kl:.2g} nats "
            f"(approximate KL; rounding gives less than {MAX_FIRST_KL}): one of them does not compute this model as "
            "transformers does; please report it, and set `model.implementation: general` meanwhile"
        )


def terms_of(parts: RunComponents, batch: Batch, rows: Sequence[int]) -> UpdateTerms:
    """Returns what losses are divided by: counts of the whole update, whatever is left out or split off."""
    flat = batch.positions_of(rows)
    offsets = np.cumsum([0, *(batch.offsets[row + 1] - batch.offsets[row] for row in rows)])
    mask = torch.from_numpy(batch.counted[flat])
    preserved = num_preserved(torch.from_numpy(batch.columns["advantages"][flat]), mask, torch.from_numpy(offsets))
    return UpdateTerms(GlobalCounts(int(mask.sum()), len(rows)), preserved, kl_coefficient(parts))


def kl_coefficient(parts: RunComponents) -> float:
    return 0.0 if parts.kl is None else parts.kl.coefficient


def trainable_rows(parts: RunComponents, batch: Batch, rows: Sequence[int]) -> list[int]:
    """Returns the trajectories that can move the weights. One whose advantages are all zero has no gradient, and is not
    computed, unless another term of the loss looks at it, or its log-probs were recomputed in packs that must stay as
    they are."""
    has_other_terms = not parts.algorithm.skips_zero_advantage or parts.recipe.train.router_aux_loss_coef > 0
    if has_other_terms or parts.algorithm.old_logprobs == "recompute":
        return list(rows)
    moves = batch.columns["advantages"] != 0
    return [row for row in rows if moves[batch.offsets[row] : batch.offsets[row + 1]].any()]


def is_broken(batch: Batch, result: "TrainResult") -> bool:
    """Whether the model that sampled computes numbers that are not finite. Looked at here, because samples of a broken
    model may well have equal rewards, and then no loss is computed that would show it."""
    if np.isfinite(batch.logprobs).all():
        return False
    result.skipped.append("the log-probs of the rollouts")
    result.finite.append(False)
    return True


def nothing_to_train_on(parts: RunComponents, step: int, rollout: RolloutResult) -> str:
    if not rollout.zero_variance:
        num_samples, why = rollout.errors.num_samples, rollout.errors.describe()
        return f"step {step}: no sample has a reward, all {num_samples} were dropped; {why}"
    return (
        f"step {step}: dynamic sampling found no group with different rewards in {parts.algorithm.max_rounds} rounds: "
        "the task is too easy or too hard for the model, or raise algorithm.dynamic_sampling.max_rounds"
    )


class TrainResult:
    """Sums over a step's updates, and what became of each update."""

    def __init__(self, compares_engine: bool) -> None:
        """`compares_engine`: whether the first update's old log-probs are the engine's."""
        self.compares_engine = compares_engine
        self.mismatch: dict[str, float] = {}
        self.stats = LossStats()
        self.losses: list[float] = []
        self.value_losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.learning_rate = 0.0
        self.num_updates = 0
        self.num_empty = 0
        """Number of updates without any trajectory that could change the weights."""
        self.skipped: list[str] = []
        """One line for each update that was not made because something was not finite."""
        self.too_far: list[str] = []
        """One line for each update that was not made because the policy had moved too far (`max_mean_ratio`)."""
        self.finite: list[bool] = []
        """Whether each update was finite, in order, critic and policy together."""
        self.num_overflows = 0

    def add_policy(self, loss: float, stats: LossStats, update: UpdateResult) -> None:
        self._add(stats)
        self.losses.append(loss)
        self.gradient_norms.append(update.gradient_norm)
        self.learning_rate = update.learning_rate
        self.num_updates += not update.skipped
        if update.overflow:
            self.num_overflows += 1
        elif update.skipped:
            self.skipped.append(f"policy loss {loss:g}, gradient norm {update.gradient_norm:g}")

    def _add(self, stats: LossStats) -> None:
        if self.compares_engine and not self.losses:  # the weights are still those that sampled
            self.mismatch["policy/mismatch_kl"] = stats.sums.get("policy/approx_kl", 0.0) / max(stats.num_tokens, 1)
            self.mismatch["policy/mismatch_max"] = stats.maxima.get("policy/ratio_deviation", 0.0)
        self.stats.merge(stats)

    def add_too_far(self, loss: float, stats: LossStats, limit: float) -> None:
        self._add(stats)
        self.losses.append(loss)
        self.too_far.append(f"mean ratio {stats.mean_ratio:.4g}, above algorithm.max_mean_ratio: {limit:g}")

    def add_value(self, loss: float, update: UpdateResult) -> None:
        self.value_losses.append(loss)
        if update.skipped and not update.overflow:
            self.skipped.append(f"value loss {loss:g}, gradient norm {update.gradient_norm:g}")

    def metrics(self) -> dict[str, float]:
        mean = {name: value / max(self.stats.num_tokens, 1) for name, value in self.stats.sums.items()}
        mean |= {name: value / max(self.stats.num_pairs, 1) for name, value in self.stats.pair_sums.items()}
        finite = [norm for norm in self.gradient_norms if np.isfinite(norm)]
        metrics = {
            **mean,
            **self.stats.maxima,
            **self.mismatch,
            "policy/loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "policy/gradient_norm": float(np.mean(finite)) if finite else 0.0,
            "policy/learning_rate": self.learning_rate,
            "updates/made": float(self.num_updates),
            "updates/skipped": float(len(self.skipped) + len(self.too_far)),
            "updates/empty": float(self.num_empty),
        }
        if self.stats.num_idle_turns:
            turns = self.stats.num_turns + self.stats.num_idle_turns
            metrics["updates/pipeline_bubble"] = self.stats.num_idle_turns / turns
        if self.num_overflows:
            metrics["updates/overflowed"] = float(self.num_overflows)
        counts = np.array(self.stats.expert_counts)  # [layers, experts]; empty without a mixture
        if counts.any():
            metrics["experts/load_max"] = float((counts / counts.mean(1, keepdims=True)).max())
            metrics["experts/unused"] = float((counts == 0).mean())
        if self.value_losses:
            metrics["value/loss"] = float(np.mean(self.value_losses))
        return metrics


def new_result(parts: RunComponents) -> TrainResult:
    sampled = not parts.recipe.trains_on_rows
    return TrainResult(compares_engine=sampled and parts.algorithm.old_logprobs == "engine")


# --- rewards become advantages


def add_advantages(parts: RunComponents, batch: Batch, rollout: RolloutResult) -> dict[str, float]:
    """Adds `advantages`, `returns` and, where the recipe has one, `correction`; shapes the rewards first."""
    algorithm, metrics = parts.algorithm, dict[str, float]()
    mask, offsets = torch.from_numpy(batch.generated), torch.from_numpy(batch.offsets)
    rewards = torch.from_numpy(batch.token_rewards.copy())
    old = torch.from_numpy(batch.columns["old_logprobs"])
    if algorithm.old_logprobs == "recompute":  # else the first update compares them
        log_ratio = (old - torch.from_numpy(batch.logprobs))[mask].double()
        kl = float((log_ratio.exp() - 1 - log_ratio).mean())
        check_agreement(parts, kl)
        metrics |= {"policy/mismatch_kl": kl, "policy/mismatch_max": float((log_ratio.exp() - 1).abs().max())}
    if algorithm.shaping.name != "none":
        lengths = torch.tensor([trajectory.num_generated for trajectory in rollout.trajectories])
        responses = ShapedResponses(lengths, parts.recipe.rollout.max_response_tokens)
        added = algorithm.shaping.declaration.function(responses, algorithm.shaping.options)
        rewards[last_generated(batch)] += added
        metrics["reward/shaping"] = float(added.mean())
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
    if algorithm.correction.declaration.name != "none":
        engine = torch.from_numpy(batch.logprobs)
        correction = correction_weights(algorithm.correction, old, engine, mask, offsets)
        batch.columns["correction"] = correction.weights.numpy()
        if correction.counted is not mask:  # whether tokens were dropped or not: pieces of a step are joined
            batch.columns["counted"] = correction.counted.numpy().astype(np.float32)
        metrics |= {f"correction/{name}": float(value) for name, value in correction.metrics.items()}
    values, teacher_lead = batch.columns.get("values"), None
    needs = algorithm.advantage.declaration.needs
    if needs.teacher:
        teacher_lead = torch.from_numpy(batch.columns["reference_logprobs"]) - old
        metrics["distill/reverse_kl"] = -float(teacher_lead[mask].double().mean())
    rewarded = RewardedBatch(
        token_rewards=rewards,
        mask=mask,
        offsets=offsets,
        groups=torch.from_numpy(batch.groups),
        values=None if values is None else torch.from_numpy(values),
        baselines=baselines,
        teacher_lead=teacher_lead,
        turns=turns_of(rollout.trajectories, batch.offsets) if needs.turns else None,
        domains=domains_of(parts, rollout) if algorithm.whiten_by == "rewards" else None,
    )
    result = compute_advantages(algorithm.advantage, rewarded)
    found, bound = result.advantages, algorithm.advantage_clip
    if algorithm.lone_sample == "raw" and needs.groups:
        found = with_lone_rewards(found, rewarded)
    if algorithm.whiten:
        found = rewarded.whiten(found)
    batch.columns["advantages"] = (found if bound is None else found.clamp(-bound, bound)).float().numpy()
    batch.columns["returns"] = result.returns.float().numpy()
    return metrics


def domains_of(parts: RunComponents, rollout: RolloutResult) -> Tensor:
    """[N]: the same number for trajectories whose rows have the same of `environment.rewards`."""
    rewards = parts.recipe.environment.rewards
    sources = [parts.train[one.row].row.source for one in rollout.trajectories]
    domains = [tuple(name for name, one in rewards.items() if one.is_for(source)) for source in sources]
    return torch.tensor([domains.index(domain) for domain in domains])


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
