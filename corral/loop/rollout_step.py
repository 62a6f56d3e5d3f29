"""The first stage of a step: its prompts are sampled and rolled out, up to `schedule.max_staleness` steps ahead of
training. Or, where the answers of rows are trained on, its rows are sampled, and that is all."""

import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean

import numpy as np
import torch

from corral.algorithms.advantages import informative_groups
from corral.data.batch import Batch, StopReason, Trajectory
from corral.data.sampler import SampledPrompt
from corral.data.supervised import trajectories_of
from corral.loop.components import RolloutComponents, RunComponents
from corral.loop.sample_errors import ErrorCounts
from corral.observe.ledger import Ledger
from corral.observe.trajectory_store import repeated_fraction
from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.schema import Rollout
from corral.rewards.reward_function import reward_on_error
from corral.rewards.scorer_pool import weighted_sum
from corral.rollout.driver import Prompt
from corral.rollout.engine import Sampling
from corral.runtime.rollout_worker import PendingTrajectories

logger = logging.getLogger(__name__)

PIECES_PER_STEP = 8
"""Number of pieces into which a step is cut at most, when it is pipelined."""
ReportProgress = Callable[[int, int, int], None]
"""Called with the samples that are finished, all of the step, and the tokens generated for the finished ones."""


@dataclass
class RolloutResult:
    """Trajectories of a step, or of a piece of it, and what was left out."""

    trajectories: list[Trajectory]
    baselines: dict[int, float] = field(default_factory=dict)
    """Greedy reward of each prompt, where the algorithm compares with it."""
    unanswered: list[Trajectory] = field(default_factory=list)
    """Trajectories left out because their environment failed before the model generated anything."""
    failed: list[int] = field(default_factory=list)
    """Prompts of which no trajectory is left, because all failed."""
    dropped: list[Trajectory] = field(default_factory=list)
    """Trajectories left out because they have no reward, or are to be compared with a greedy answer that has none."""
    filtered: list[Trajectory] = field(default_factory=list)
    """Trajectories left out because all rewards of their group were equal (dynamic sampling)."""
    errors: ErrorCounts = field(default_factory=ErrorCounts)
    """What failed of all that was rolled out, also of what was left out."""
    row_rewards: list[tuple[int, list[float], bool]] = field(default_factory=list)
    """For each prompt its row, the rewards of its samples without those that failed, and whether none has; also of
    groups that dynamic sampling leaves out."""
    rounds: int = 1

    @classmethod
    def join(cls, pieces: Sequence["RolloutResult"]) -> "RolloutResult":
        return cls(
            trajectories=[trajectory for piece in pieces for trajectory in piece.trajectories],
            baselines={prompt_id: reward for piece in pieces for prompt_id, reward in piece.baselines.items()},
            unanswered=[trajectory for piece in pieces for trajectory in piece.unanswered],
            failed=[prompt_id for piece in pieces for prompt_id in piece.failed],
            dropped=[trajectory for piece in pieces for trajectory in piece.dropped],
            filtered=[trajectory for piece in pieces for trajectory in piece.filtered],
            errors=ErrorCounts.join([piece.errors for piece in pieces]),
            row_rewards=[one for piece in pieces for one in piece.row_rewards],
            rounds=max((piece.rounds for piece in pieces), default=1),
        )

    @property
    def prompt_ids(self) -> list[int]:
        """Prompts to train on."""
        return list(dict.fromkeys(trajectory.prompt_id for trajectory in self.trajectories))

    @property
    def all_trajectories(self) -> list[Trajectory]:
        return [*self.trajectories, *self.dropped, *self.filtered, *self.unanswered]

    @property
    def zero_variance(self) -> list[int]:
        """Prompts left out because all their rewards were equal (dynamic sampling)."""
        return list(dict.fromkeys(trajectory.prompt_id for trajectory in self.filtered))

    @property
    def without_reward(self) -> list[int]:
        """Prompts of which no trajectory is left, because those that did not fail were dropped."""
        others = {*self.prompt_ids, *self.zero_variance}
        return [one for one in dict.fromkeys(t.prompt_id for t in self.dropped) if one not in others]


@dataclass
class PromptGroup:
    """A prompt in flight."""

    prompt_id: int
    sampled: PendingTrajectories
    greedy: PendingTrajectories | None

    @property
    def is_finished(self) -> bool:
        return self.sampled.done() and (self.greedy is None or self.greedy.done())


class PendingRollout:
    """The prompts of one step, in flight from the moment this is made."""

    def __init__(self, parts: RunComponents, ledger: Ledger, step: int) -> None:
        self.recipe, self.algorithm = parts.recipe, parts.algorithm
        self.components, self.ledger, self.step = parts, ledger, step
        self.groups: list[PromptGroup] = []
        self.num_taken = 0
        self.num_finished = self.num_tokens = 0
        self.on_progress: ReportProgress = lambda done, total, num_tokens: None
        self._issue(prompts_of_step(parts, ledger, step))

    async def pieces(self, max_pieces: int = PIECES_PER_STEP) -> AsyncIterator[RolloutResult]:
        """Yields up to `max_pieces` pieces in the order of their prompts, each as soon as it is finished. Waits for the
        rollout workers: an engine without progress raises, and environments have deadlines. With dynamic sampling,
        zero-variance groups are replaced by other prompts, in rounds of as many pieces. Raises `TooManyErrors` after a
        round, before anything is trained on it."""
        wanted, kept, rounds = self.recipe.batch.prompts_per_step, 0, 1
        errors: list[ErrorCounts] = []
        size = -(-wanted // max_pieces)
        while True:
            async for groups in self._finished(size):
                await add_model_scores(self.components, finished_trajectories(groups))
                piece = collect(groups, rounds)
                mask_samples(piece.trajectories, self.algorithm)
                if self.algorithm.dynamic_sampling:
                    drop_zero_variance_groups(piece, self.algorithm.reward_clip)
                kept += len(piece.prompt_ids)
                errors.append(piece.errors)
                yield piece
            ErrorCounts.join(errors).check(
                f"step {self.step}", self.recipe.tagged_environments, is_first=self.step == 1
            )
            if not self.algorithm.dynamic_sampling or kept >= wanted or rounds == self.algorithm.max_rounds:
                return
            self._issue(next_prompts(self.components, self.ledger, self.step, wanted - kept))
            rounds += 1

    def _issue(self, sampled_prompts: Sequence[SampledPrompt]) -> None:
        parts, samples = self.components, self.recipe.batch.samples_per_prompt
        prompts = [Prompt.of(parts.train[one.index], one.prompt_id, one.index) for one in sampled_prompts]
        self.ledger.issue(self.step, [prompt.prompt_id for prompt in prompts])
        sampled = parts.scheduler.submit(prompts, samples, sampling_of(self.recipe.rollout))
        greedy: Sequence[PendingTrajectories | None] = [None] * len(prompts)
        if self.algorithm.needs_greedy_baseline:
            greedy = parts.scheduler.submit(prompts, 1, sampling_of(self.recipe.rollout, greedy=True), "baseline")
        for prompt, result, baseline in zip(prompts, sampled, greedy, strict=True):
            result.add_done_callback(self._count_finished)
            self.groups.append(PromptGroup(prompt.prompt_id, result, baseline))

    def _count_finished(self, result: PendingTrajectories) -> None:
        if result.cancelled() or result.exception() is not None:
            return
        samples = self.recipe.batch.samples_per_prompt
        self.num_finished += samples
        self.num_tokens += sum(trajectory.num_generated for trajectory in result.result())
        self.on_progress(self.num_finished, len(self.groups) * samples, self.num_tokens)

    async def _finished(self, size: int) -> AsyncIterator[list[PromptGroup]]:
        """Yields runs of at least `size` groups (or the rest), in the order of their prompts."""
        while self.num_taken < len(self.groups):
            start = end = self.num_taken
            while end < len(self.groups) and (end - start < size or self.groups[end].is_finished):
                await self.groups[end].sampled
                greedy = self.groups[end].greedy
                if greedy is not None:
                    await greedy
                end += 1
            self.num_taken = end
            self.ledger.generated(self.step, [group.prompt_id for group in self.groups[start:end]])
            yield self.groups[start:end]


def finished_trajectories(groups: Iterable[PromptGroup]) -> list[Trajectory]:
    """Returns all trajectories of finished groups, also the greedy ones that others are compared with."""
    pending = [one for group in groups for one in (group.sampled, group.greedy) if one is not None]
    return [trajectory for one in pending for trajectory in one.result()]


async def add_model_scores(parts: RolloutComponents, trajectories: Sequence[Trajectory]) -> None:
    """Completes the last turn's reward of the trajectories that wait for the reward model's score, all in one batch.
    Where it has none (the conversation is too long, say), `on_error` of the reward takes its place."""
    waiting = [(one, one.conversation) for one in trajectories if one.conversation is not None]
    if not waiting:
        return
    assert parts.reward_model is not None, "only the reward that needs one lets trajectories wait"
    scores = await parts.reward_model.score([conversation for _, conversation in waiting])
    for (trajectory, _), score in zip(waiting, scores, strict=True):
        environment = parts.recipe.tagged_environments[trajectory.tag]
        [(name, reward)] = [(name, one) for name, one in environment.named_rewards.items() if one.is_model]
        total = score.reward if score.error is None else reward_on_error(reward.on_error)
        if environment.rewards:
            trajectory.rewards[name] = total
            total = weighted_sum(environment.rewards, trajectory.rewards)
        last, _ = trajectory.turn_rewards.pop()
        trajectory.turn_rewards.append((last, total or 0.0))
        trajectory.is_dropped = trajectory.is_dropped or total is None
        trajectory.conversation = None
        if score.error is not None:
            trajectory.error, trajectory.stop = trajectory.error or score.error, StopReason.ERROR


def collect(groups: Sequence[PromptGroup], rounds: int) -> RolloutResult:
    """Sorts out what is trained on. Whatever is left out here enters no batch, so it is in no statistic of its group or
    of the step, and in no count by which losses are divided."""
    result = RolloutResult([], rounds=rounds)
    for group in groups:
        trajectories = group.sampled.result()
        answered = [trajectory for trajectory in trajectories if trajectory.num_generated]
        greedy = None if group.greedy is None else group.greedy.result()[0]
        if greedy is not None:
            result.baselines[group.prompt_id] = greedy.reward
        for trajectory in answered:
            is_dropped = trajectory.is_dropped or (greedy is not None and greedy.is_dropped)
            (result.dropped if is_dropped else result.trajectories).append(trajectory)
        judged = [one.reward for one in answered if not one.is_dropped and one.error is None]
        result.row_rewards += [(answered[0].row, judged, len(judged) == len(trajectories))] if judged else []
        if not answered:
            result.failed.append(group.prompt_id)
        result.unanswered += [trajectory for trajectory in trajectories if not trajectory.num_generated]
    result.errors = ErrorCounts.of(one for group in groups for one in group.sampled.result())
    return result


class PendingRows:
    """The rows of one step, where their answers are trained on: there from the moment this is made."""

    def __init__(self, parts: RunComponents, ledger: Ledger, step: int) -> None:
        self.ledger, self.step = ledger, step
        self.on_progress: ReportProgress = lambda done, total, num_tokens: None
        prompts = prompts_of_step(parts, ledger, step)
        ledger.issue(step, [one.prompt_id for one in prompts])
        self.trajectories = [own for one in prompts for own in trajectories_of(parts.train[one.index], one)]

    async def pieces(self, max_pieces: int = 1) -> AsyncIterator[RolloutResult]:
        """Yields all of them, in one piece."""
        result = RolloutResult(self.trajectories)
        self.ledger.generated(self.step, result.prompt_ids)
        yield result


def prompts_of_step(parts: RunComponents, ledger: Ledger, step: int) -> list[SampledPrompt]:
    """Returns the next prompts. After a resume: what was in flight when the checkpoint was made is open in the ledger,
    and is issued again."""
    opened = ledger.open(step)
    prompts = parts.sampler.with_ids(opened)
    if not opened or parts.algorithm.dynamic_sampling:
        prompts += next_prompts(parts, ledger, step, max(0, parts.recipe.batch.prompts_per_step - len(prompts)))
    return prompts


def next_prompts(parts: RunComponents, ledger: Ledger, step: int, number: int) -> list[SampledPrompt]:
    """Samples so many prompts for a step. Those that the curriculum skips on the way are dropped at once, which the
    ledger records with the reason."""
    if parts.history is None:
        return parts.sampler.next(number)
    if parts.history.bring_back_if_none_is_left():
        logger.warning("step %d: the curriculum would skip all rows; it begins again with all of them", step)
    kept: list[SampledPrompt] = []
    skipped: dict[str, list[int]] = {}
    while len(kept) < number:
        [prompt] = parts.sampler.next(1)
        reason = parts.history.reason_to_skip(prompt)
        if reason is None:
            kept.append(prompt)
        else:
            skipped.setdefault(reason, []).append(prompt.prompt_id)
    for reason, prompt_ids in skipped.items():
        ledger.issue(step, prompt_ids)
        ledger.dropped(step, prompt_ids, reason)
    return kept


def sampling_of(rollout: Rollout, *, greedy: bool = False) -> Sampling:
    """Returns the recipe's settings, without the model's own end tokens, which rollout workers add."""
    return Sampling(
        max_tokens=rollout.max_response_tokens,
        temperature=0.0 if greedy else rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
    )


def mask_samples(trajectories: Sequence[Trajectory], algorithm: ResolvedAlgorithm) -> None:
    """Marks samples that are in no loss. Those of a prompt are beside each other."""
    low, high = algorithm.mask_mean_reward or (-math.inf, math.inf)
    for _, samples in groupby(trajectories, key=lambda one: one.prompt_id):
        group = list(samples)
        is_between = len(group) == 1 or low < fmean(one.reward for one in group) < high
        for one in group:
            if not is_between:
                one.mask_reason = "of a prompt that is too hard or too easy"
            elif algorithm.mask_truncated and one.stop is StopReason.LENGTH:
                one.mask_reason = "cut off by length"


def drop_zero_variance_groups(result: RolloutResult, reward_clip: float | None) -> None:
    """Drops groups whose rewards, as far as they count, are all equal."""
    if not result.trajectories:
        return
    rewards = torch.tensor([trajectory.reward for trajectory in result.trajectories])
    if reward_clip is not None:
        rewards = rewards.clamp(-reward_clip, reward_clip)
    groups = torch.tensor([trajectory.prompt_id for trajectory in result.trajectories])
    informative = list(zip(result.trajectories, informative_groups(rewards, groups).tolist(), strict=True))
    result.filtered = [trajectory for trajectory, keep in informative if not keep]
    result.trajectories = [trajectory for trajectory, keep in informative if keep]


PendingStep = PendingRollout | PendingRows
"""Where the trajectories of a step come from."""


class AsyncRollouts:
    """The steps that are in flight. Step s is started as soon as the weights of version s - 1 - max_staleness are in
    the engine: no token is ever older than that when it is trained on, and none is thrown away for its age."""

    def __init__(self, parts: RunComponents, ledger: Ledger) -> None:
        self.components, self.ledger = parts, ledger
        self.pending: dict[int, PendingStep] = {}
        self.make: type[PendingStep] = PendingRows if parts.recipe.trains_on_rows else PendingRollout

    def start(self, version: int) -> None:
        """Samples and submits the prompts of all steps that `version` allows. Which prompts belong to which step is
        decided here, so it never depends on timing."""
        last = min(version + 1 + self.components.recipe.schedule.max_staleness, self.components.num_steps)
        for step in range(version + 1, last + 1):
            if step not in self.pending:
                self.pending[step] = self.make(self.components, self.ledger, step)


# --- metrics of a rollout


def row_metrics(batch: Batch, num_rows: int, last_prompt: int) -> dict[str, float]:
    """Of a step that trains on rows: `num_rows` of them are an epoch. Lengths are of what is trained on."""
    trained = np.add.reduceat(batch.generated, batch.offsets[:-1], dtype=np.int64)
    return {
        "length/mean": float(trained.mean()),
        "length/max": float(trained.max()),
        "samples/trajectories": float(len(batch)),
        "samples/tokens": float(len(batch.tokens)),
        "samples/epoch": (last_prompt + 1) / num_rows,
    }


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
        "samples/errors": float(sum(one.error is not None for one in [*rollout.trajectories, *rollout.dropped])),
        "samples/failed": float(len(rollout.unanswered)),
        "samples/error_rate": rollout.errors.rate,
        "samples/dropped": float(len(rollout.dropped)),
    }
    repeats = [repeated_fraction(one.tokens[one.generated]) for one in rollout.trajectories]
    if known := [repeated for repeated in repeats if repeated is not None]:
        metrics["samples/repeats"] = float(np.mean(known))
    if rollout.rounds > 1 or rollout.zero_variance:
        metrics["samples/dropped_groups"] = float(len(rollout.zero_variance))
        metrics["samples/rounds"] = float(rollout.rounds)
    for reason in StopReason:
        fraction = np.mean([trajectory.stop is reason for trajectory in rollout.trajectories])
        if fraction:
            metrics[f"stop/{reason}"] = float(fraction)
    metrics |= reward_metrics([*rollout.trajectories, *rollout.dropped])
    return metrics | environment_metrics(rollout.trajectories, dropped=rollout.dropped)


def source_metrics(rollout: RolloutResult, parts: RunComponents) -> dict[str, float]:
    """Counts the prompts of each source, where there are several, and averages their rewards."""
    metrics: dict[str, float] = {}
    for name in parts.source_names:
        own = [one for one in rollout.trajectories if parts.train[one.row].row.source_name == name]
        metrics[f"source/{name}/prompts"] = float(len({one.prompt_id for one in own}))
        if own and not parts.recipe.trains_on_rows:
            metrics[f"source/{name}/reward"] = float(np.mean([one.reward for one in own]))
    return metrics


def reward_metrics(trajectories: Sequence[Trajectory], prefix: str = "reward") -> dict[str, float]:
    """Mean and deviation of each of several rewards, over all trajectories that have it, also those that were dropped
    for want of another."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, reward in trajectory.rewards.items():
            if reward is not None:
                values.setdefault(name, []).append(reward)
    means = {f"{prefix}/{name}/mean": float(np.mean(own)) for name, own in sorted(values.items())}
    return means | {f"{prefix}/{name}/std": float(np.std(own)) for name, own in sorted(values.items())}


def environment_metrics(
    trajectories: Sequence[Trajectory], prefix: str = "environment", dropped: Sequence[Trajectory] = ()
) -> dict[str, float]:
    """Averages what environments and rewards measured, also in trajectories that were dropped; where there are several
    environments, also by tag, with rewards, turns, lengths and stop reasons."""
    found = averages([*trajectories, *dropped], prefix)
    tags = sorted({trajectory.tag for trajectory in trajectories} - {""})
    for tag in tags:
        own = [trajectory for trajectory in trajectories if trajectory.tag == tag]
        found |= averages([*own, *(one for one in dropped if one.tag == tag)], f"{prefix}/{tag}")
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
