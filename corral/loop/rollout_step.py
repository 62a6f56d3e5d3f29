"""The first stage of a step: its prompts are sampled and rolled out, up to `schedule.max_staleness` steps ahead of
training."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from corral.algorithms.advantages import informative_groups
from corral.data.batch import Batch, StopReason, Trajectory
from corral.data.sampler import SampledPrompt
from corral.loop.components import RunComponents
from corral.observe.ledger import Ledger
from corral.recipe.schema import Rollout
from corral.rollout.driver import Prompt
from corral.rollout.engine import Sampling
from corral.runtime.rollout_worker import PendingTrajectories

PIECES_PER_STEP = 8
"""Number of pieces into which a step is cut at most, when it is pipelined."""


@dataclass
class RolloutResult:
    """Trajectories of a step, or of a piece of it, and what was left out."""

    trajectories: list[Trajectory]
    baselines: dict[int, float] = field(default_factory=dict)
    """Greedy reward of each prompt, where the algorithm compares with it."""
    num_failed: int = 0
    """Number of trajectories left out because their environment failed before the model generated anything."""
    failed: list[int] = field(default_factory=list)
    """Prompts of which no trajectory is left."""
    zero_variance: list[int] = field(default_factory=list)
    """Prompts left out because all their rewards were equal (dynamic sampling)."""
    last_error: str | None = None
    """Error of the last trajectory that failed."""
    rounds: int = 1

    @classmethod
    def join(cls, pieces: Sequence["RolloutResult"]) -> "RolloutResult":
        return cls(
            trajectories=[trajectory for piece in pieces for trajectory in piece.trajectories],
            baselines={prompt_id: reward for piece in pieces for prompt_id, reward in piece.baselines.items()},
            num_failed=sum(piece.num_failed for piece in pieces),
            failed=[prompt_id for piece in pieces for prompt_id in piece.failed],
            zero_variance=[prompt_id for piece in pieces for prompt_id in piece.zero_variance],
            last_error=next((piece.last_error for piece in reversed(pieces) if piece.last_error), None),
            rounds=max((piece.rounds for piece in pieces), default=1),
        )

    @property
    def prompt_ids(self) -> list[int]:
        """Prompts to train on."""
        return list(dict.fromkeys(trajectory.prompt_id for trajectory in self.trajectories))


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
        self.num_finished = 0
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        # After a resume: what was in flight when the checkpoint was made is open in the ledger, and is issued again.
        opened = ledger.open(step)
        prompts = parts.sampler.with_ids(opened)
        if not opened or self.algorithm.dynamic_sampling:
            prompts += parts.sampler.next(max(0, self.recipe.batch.prompts_per_step - len(prompts)))
        self._issue(prompts)

    async def pieces(self, max_pieces: int = PIECES_PER_STEP) -> AsyncIterator[RolloutResult]:
        """Yields up to `max_pieces` pieces in the order of their prompts, each as soon as it is finished. Waits for the
        rollout workers: an engine without progress raises, and environments have deadlines. With dynamic sampling,
        zero-variance groups are replaced by other prompts, in rounds of as many pieces."""
        wanted, kept, rounds = self.recipe.batch.prompts_per_step, 0, 1
        size = -(-wanted // max_pieces)
        while True:
            async for groups in self._finished(size):
                piece = self._collect(groups, rounds)
                if self.algorithm.dynamic_sampling:
                    drop_zero_variance_groups(piece, self.algorithm.reward_clip)
                kept += len(piece.prompt_ids)
                yield piece
            if not self.algorithm.dynamic_sampling or kept >= wanted or rounds == self.algorithm.max_rounds:
                return
            self._issue(self.components.sampler.next(wanted - kept))
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
            result.add_done_callback(lambda _: self._count_finished())
            self.groups.append(PromptGroup(prompt.prompt_id, result, baseline))

    def _count_finished(self) -> None:
        samples = self.recipe.batch.samples_per_prompt
        self.num_finished += samples
        self.on_progress(self.num_finished, len(self.groups) * samples)

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

    def _collect(self, groups: Iterable[PromptGroup], rounds: int) -> RolloutResult:
        result = RolloutResult([], rounds=rounds)
        for group in groups:
            trajectories = group.sampled.result()
            answered = [trajectory for trajectory in trajectories if trajectory.num_generated]
            result.trajectories += answered
            if not answered:
                result.failed.append(group.prompt_id)
            if len(answered) < len(trajectories):
                result.num_failed += len(trajectories) - len(answered)
                result.last_error = [t.error for t in trajectories if not t.num_generated][-1]
            if group.greedy is not None:
                result.baselines[group.prompt_id] = group.greedy.result()[0].reward
        return result


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


def drop_zero_variance_groups(result: RolloutResult, reward_clip: float | None) -> None:
    """Drops groups whose rewards, as far as they count, are all equal."""
    if not result.trajectories:
        return
    rewards = torch.tensor([trajectory.reward for trajectory in result.trajectories])
    if reward_clip is not None:
        rewards = rewards.clamp(-reward_clip, reward_clip)
    groups = torch.tensor([trajectory.prompt_id for trajectory in result.trajectories])
    informative = informative_groups(rewards, groups)
    result.zero_variance = sorted(set(groups[~informative].tolist()))
    result.trajectories = [t for t, keep in zip(result.trajectories, informative.tolist(), strict=True) if keep]


class AsyncRollouts:
    """The steps that are in flight. Step s is started as soon as the weights of version s - 1 - max_staleness are in
    the engine: no token is ever older than that when it is trained on, and none is thrown away for its age."""

    def __init__(self, parts: RunComponents, ledger: Ledger) -> None:
        self.components, self.ledger = parts, ledger
        self.pending: dict[int, PendingRollout] = {}

    def start(self, version: int) -> None:
        """Samples and submits the prompts of all steps that `version` allows. Which prompts belong to which step is
        decided here, so it never depends on timing."""
        last = min(version + 1 + self.components.recipe.schedule.max_staleness, self.components.num_steps)
        for step in range(version + 1, last + 1):
            if step not in self.pending:
                self.pending[step] = PendingRollout(self.components, self.ledger, step)


# --- metrics of a rollout


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
