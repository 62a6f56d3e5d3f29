"""The first stage of a step: prompts are drawn and played."""

from dataclasses import dataclass, field

import torch

from corral.algorithms.shaping import informative_groups
from corral.data.trajectory import Trajectory
from corral.loop.parts import Parts
from corral.observe.console import Stage
from corral.rollout.driver import Prompt


@dataclass
class Played:
    """What a step has to learn from."""

    trajectories: list[Trajectory]
    baselines: dict[int, float] = field(default_factory=dict)
    """Greedy reward of each prompt, where the algorithm compares with it."""
    num_failed: int = 0
    """Trajectories left out because their environment failed before the model said anything."""
    num_dull_groups: int = 0
    """Groups left out because all their rewards were equal (dynamic sampling)."""
    last_error: str | None = None
    """Of those that failed."""
    rounds: int = 1


def play(parts: Parts, progress: Stage) -> Played:
    """Draws prompts and plays them; with dynamic sampling, draws others for those that have nothing to teach."""
    wanted, algorithm = parts.recipe.batch.prompts_per_step, parts.algorithm
    played = play_round(parts, wanted, progress)
    if not algorithm.dynamic_sampling:
        return played
    keep_informative(played)
    while (missing := wanted - num_groups(played)) > 0 and played.rounds < algorithm.max_rounds:
        more = play_round(parts, missing, progress)
        keep_informative(more)
        played.trajectories += more.trajectories
        played.baselines |= more.baselines
        played.num_failed += more.num_failed
        played.last_error = more.last_error or played.last_error
        played.num_dull_groups += more.num_dull_groups
        played.rounds += 1
    return played


def play_round(parts: Parts, num_prompts: int, progress: Stage) -> Played:
    prompts = [
        Prompt(draw.ordinal, draw.index, parts.train[draw.index].row, parts.train[draw.index].tokens)
        for draw in parts.sampler.draw(num_prompts)
    ]
    samples = parts.recipe.batch.samples_per_prompt
    progress.update(0, num_prompts * samples)

    async def both() -> tuple[list[Trajectory], list[Trajectory]]:
        sampled = await parts.driver.play(
            prompts, samples, parts.sampling(), on_finished=lambda: progress.update(progress.done + 1)
        )
        greedy = []
        if parts.algorithm.needs_greedy_baseline:
            greedy = await parts.driver.play(prompts, 1, parts.sampling(greedy=True), purpose="baseline")
        return sampled, greedy

    sampled, greedy = parts.runner.run(both())
    answered = [trajectory for trajectory in sampled if trajectory.num_generated]
    errors = [trajectory.error for trajectory in sampled if not trajectory.num_generated]
    return Played(
        trajectories=answered,
        baselines={trajectory.ordinal: trajectory.reward for trajectory in greedy},
        num_failed=len(errors),
        last_error=errors[-1] if errors else None,
    )


def keep_informative(played: Played) -> None:
    if not played.trajectories:
        return
    rewards = torch.tensor([trajectory.reward for trajectory in played.trajectories])
    groups = torch.tensor([trajectory.ordinal for trajectory in played.trajectories])
    informative = informative_groups(rewards, groups)
    played.num_dull_groups = len(set(groups[~informative].tolist()))
    played.trajectories = [t for t, keep in zip(played.trajectories, informative.tolist(), strict=True) if keep]


def num_groups(played: Played) -> int:
    return len({trajectory.ordinal for trajectory in played.trajectories})
