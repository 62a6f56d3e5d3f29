"""`schedule.pipelined`: score and learn from what has been played while the rest of the step is still being played.

Still on-policy: the engine keeps the step's weights until all of it is played. Where advantages follow from a prompt's
own samples, gradients of the parts are summed as they come, and divided at the end by counts of the whole, so the
update is that of the synchronous loop, to rounding. Where something looks at the whole batch (whitening, several
updates or passes, dynamic sampling), scoring streams and learning waits.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from corral.algorithms.aggregate import GlobalCounts
from corral.data.batch import Batch
from corral.loop.advantages_step import advantages, plan_updates, score
from corral.loop.components import RunComponents
from corral.loop.interrupt import Interrupt
from corral.loop.rollout_step import PendingRollout, RolloutResult
from corral.loop.update import TrainResult, is_broken, kl_coefficient, learn, step_policy, trainable_rows
from corral.recipe.warnings import why_training_waits
from corral.runtime.loss_functions import LossStats, UpdateTerms


@dataclass
class PipelinedStep:
    """What has come of a step so far."""

    played: list[RolloutResult] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over trajectories."""
    sums: LossStats = field(default_factory=LossStats)
    learnt: TrainResult = field(default_factory=TrainResult)
    is_broken: bool = False

    @property
    def batch(self) -> Batch:
        return Batch.join(self.batches)


async def train_while_rolling_out(
    parts: RunComponents, playing: PendingRollout, step: int, interrupt: Interrupt, trainers: asyncio.Lock
) -> tuple[RolloutResult, Batch | None, dict[str, float], TrainResult]:
    """Consumes pieces of the step as they are finished, in the order drawn. Waits for the next piece (unblocked by the
    engine; a request to stop ends the wait) or for the workers that score and learn."""
    streams, so_far = not why_training_waits(parts.recipe, parts.algorithm), PipelinedStep()
    pieces = playing.parts()
    while (played := await interrupt.cuts_short(following(pieces))) is not None:
        so_far.played.append(played)
        if not played.trajectories:
            continue
        batch = Batch.of(played.trajectories)
        so_far.batches.append(batch)
        async with trainers:
            await score(parts, batch, [list(range(len(batch)))])
            if streams:
                await add_gradient(parts, played, batch, so_far)
    whole = RolloutResult.join(so_far.played)
    if not so_far.batches:
        return whole, None, {}, so_far.learnt
    batch = so_far.batch
    async with trainers:
        if not streams:
            metrics = advantages(parts, batch, whole)
            return whole, batch, metrics, await learn(parts, batch, plan_updates(parts, batch), step)
        await make_update(parts, batch, so_far)
    metrics = {name: value / len(batch) for name, value in so_far.metrics.items()}
    return whole, batch, metrics, so_far.learnt


async def following(pieces: AsyncIterator[RolloutResult]) -> RolloutResult | None:
    return await anext(pieces, None)


async def add_gradient(parts: RunComponents, played: RolloutResult, batch: Batch, so_far: PipelinedStep) -> None:
    for name, value in advantages(parts, batch, played).items():
        so_far.metrics[name] = so_far.metrics.get(name, 0.0) + value * len(batch)
    so_far.is_broken = so_far.is_broken or is_broken(batch, so_far.learnt)
    trainable = [] if so_far.is_broken else trainable_rows(parts, batch, range(len(batch)))
    if trainable:
        terms = UpdateTerms(expected_counts(parts), 0, kl_coefficient(parts))
        so_far.sums.merge(await parts.actor.accumulate(batch, trainable, terms))


async def make_update(parts: RunComponents, batch: Batch, so_far: PipelinedStep) -> None:
    learnt, sums = so_far.learnt, so_far.sums
    scale = scale_to(parts, expected_counts(parts), GlobalCounts(batch.num_generated, len(batch)))
    if so_far.is_broken:
        await parts.actor.group.all("zero_grad")
    elif sums.num_tokens:
        await step_policy(parts, sums, learnt, scale)
        learnt.finite.append(not learnt.skipped)
    else:
        learnt.num_empty += 1


def expected_counts(parts: RunComponents) -> GlobalCounts:
    """To divide by before the counts are known; near enough to keep float16 gradients in range."""
    batch = parts.recipe.batch
    num_sequences = batch.prompts_per_step * batch.samples_per_prompt
    return GlobalCounts(num_sequences * parts.recipe.rollout.max_response_tokens, num_sequences)


def scale_to(parts: RunComponents, guess: GlobalCounts, counts: GlobalCounts) -> float:
    """From a loss that was divided by the guess to one that is divided by the counts."""
    match parts.algorithm.aggregation:
        case "token_mean":
            return guess.num_tokens / max(counts.num_tokens, 1)
        case "token_sum":
            return 1.0
    return guess.num_sequences / max(counts.num_sequences, 1)
