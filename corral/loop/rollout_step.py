"""The first stage of a step: prompts are drawn and played, up to `schedule.max_staleness` steps ahead of learning."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from corral.algorithms.shaping import informative_groups
from corral.data.sampler import Draw
from corral.data.trajectory import Trajectory
from corral.loop.components import RunComponents
from corral.loop.rollout_scheduler import Result
from corral.observe.ledger import Ledger
from corral.rollout.driver import Prompt

PIECES_PER_STEP = 8
"""When a step is learnt from while it is played: into how many pieces it is cut at most."""


@dataclass
class RolloutResult:
    """What a step, or a piece of it, has to learn from."""

    trajectories: list[Trajectory]
    baselines: dict[int, float] = field(default_factory=dict)
    """Greedy reward of each prompt, where the algorithm compares with it."""
    num_failed: int = 0
    """Trajectories left out because their environment failed before the model said anything."""
    failed: list[int] = field(default_factory=list)
    """Prompts of which no trajectory is left."""
    zero_variance: list[int] = field(default_factory=list)
    """Prompts left out because all their rewards were equal (dynamic sampling)."""
    last_error: str | None = None
    """Of those that failed."""
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
        """Prompts to learn from."""
        return list(dict.fromkeys(trajectory.prompt_id for trajectory in self.trajectories))


@dataclass
class _Group:
    """A prompt in flight."""

    prompt_id: int
    sampled: Result
    greedy: Result | None


class PendingRollout:
    """The prompts of one step, in flight from the moment this is made."""

    def __init__(self, parts: RunComponents, ledger: Ledger, step: int) -> None:
        self.recipe, self.algorithm = parts.recipe, parts.algorithm
        self.parts_of_run, self.ledger, self.step = parts, ledger, step
        self.groups: list[_Group] = []
        self.num_taken = 0
        self.num_finished = 0
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        opened = ledger.open(step)  # by a run that this one goes on from
        draws = parts.sampler.again(opened)
        if not opened or self.algorithm.dynamic_sampling:
            draws += parts.sampler.draw(max(0, self.recipe.batch.prompts_per_step - len(draws)))
        self._issue(draws)

    async def whole(self) -> RolloutResult:
        """Everything. Waits until it is played: a player without progress says so, environments have deadlines."""
        return RolloutResult.join([piece async for piece in self.parts(1)])

    async def parts(self, most: int = PIECES_PER_STEP) -> AsyncIterator[RolloutResult]:
        """Up to `most` pieces, in the order drawn, each as soon as it is played. With dynamic sampling, others are
        drawn for prompts that have nothing to teach."""
        wanted, kept, rounds = self.recipe.batch.prompts_per_step, 0, 1
        size = -(-wanted // most)
        while True:
            async for groups in self._finished(size):
                piece = self._played(groups, rounds)
                if self.algorithm.dynamic_sampling:
                    drop_zero_variance_groups(piece, self.algorithm.reward_clip)
                kept += len(piece.prompt_ids)
                yield piece
            if not self.algorithm.dynamic_sampling or kept >= wanted or rounds == self.algorithm.max_rounds:
                return
            self._issue(self.parts_of_run.sampler.draw(wanted - kept))
            rounds += 1

    def _issue(self, draws: Sequence[Draw]) -> None:
        parts, samples = self.parts_of_run, self.recipe.batch.samples_per_prompt
        prompts = [
            Prompt(draw.prompt_id, draw.index, parts.train[draw.index].row, parts.train[draw.index].tokens)
            for draw in draws
        ]
        self.ledger.issue(self.step, [prompt.prompt_id for prompt in prompts])
        sampled = parts.scheduler.play(prompts, samples, parts.sampling())
        greedy: Sequence[Result | None] = [None] * len(prompts)
        if self.algorithm.needs_greedy_baseline:
            greedy = parts.scheduler.play(prompts, 1, parts.sampling(greedy=True), "baseline")
        for prompt, result, baseline in zip(prompts, sampled, greedy, strict=True):
            result.add_done_callback(lambda _: self._count())
            self.groups.append(_Group(prompt.prompt_id, result, baseline))

    def _count(self) -> None:
        samples = self.recipe.batch.samples_per_prompt
        self.num_finished += samples
        self.on_progress(self.num_finished, len(self.groups) * samples)

    async def _finished(self, size: int) -> AsyncIterator[list[_Group]]:
        """Runs of at least `size` groups (or the rest), in the order drawn."""
        while self.num_taken < len(self.groups):
            start = end = self.num_taken
            while end < len(self.groups) and (end - start < size or is_finished(self.groups[end])):
                await self.groups[end].sampled
                greedy = self.groups[end].greedy
                if greedy is not None:
                    await greedy
                end += 1
            self.num_taken = end
            self.ledger.played(self.step, [group.prompt_id for group in self.groups[start:end]])
            yield self.groups[start:end]

    def _played(self, groups: Iterable[_Group], rounds: int) -> RolloutResult:
        played = RolloutResult([], rounds=rounds)
        for group in groups:
            trajectories = group.sampled.result()
            answered = [trajectory for trajectory in trajectories if trajectory.num_generated]
            played.trajectories += answered
            if not answered:
                played.failed.append(group.prompt_id)
            if len(answered) < len(trajectories):
                played.num_failed += len(trajectories) - len(answered)
                played.last_error = [t.error for t in trajectories if not t.num_generated][-1]
            if group.greedy is not None:
                played.baselines[group.prompt_id] = group.greedy.result()[0].reward
        return played


def is_finished(group: _Group) -> bool:
    return group.sampled.done() and (group.greedy is None or group.greedy.done())


def drop_zero_variance_groups(played: RolloutResult, reward_clip: float | None) -> None:
    """Drops groups whose rewards, as far as they count, are all equal."""
    if not played.trajectories:
        return
    rewards = torch.tensor([trajectory.reward for trajectory in played.trajectories])
    if reward_clip is not None:
        rewards = rewards.clamp(-reward_clip, reward_clip)
    groups = torch.tensor([trajectory.prompt_id for trajectory in played.trajectories])
    informative = informative_groups(rewards, groups)
    played.zero_variance = sorted(set(groups[~informative].tolist()))
    played.trajectories = [t for t, keep in zip(played.trajectories, informative.tolist(), strict=True) if keep]


class AsyncRollouts:
    """The steps that are being played. Step s is begun as soon as the weights of version s - 1 - max_staleness are in
    the engine: no token is ever older than that when it is trained on, and none is thrown away for its age."""

    def __init__(self, parts: RunComponents, ledger: Ledger) -> None:
        self.parts, self.ledger = parts, ledger
        self.playing: dict[int, PendingRollout] = {}

    def begin(self, version: int) -> None:
        """Begins all steps that `version` allows."""
        last = min(version + 1 + self.parts.recipe.schedule.max_staleness, self.parts.num_steps)
        for step in range(version + 1, last + 1):
            if step not in self.playing:
                self.playing[step] = PendingRollout(self.parts, self.ledger, step)
