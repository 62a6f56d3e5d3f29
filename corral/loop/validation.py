"""The held-out score: a fixed set of prompts, played greedily unless the recipe says otherwise."""

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from corral.data.sources import BOARDS
from corral.data.trajectory import Trajectory
from corral.loop.components import RolloutComponents
from corral.loop.floors import floor_metrics
from corral.loop.step_records import environment_metrics
from corral.observe.console import Console, Sample
from corral.rollout.driver import Prompt


@dataclass(frozen=True)
class ValidationResult:
    metrics: dict[str, float]
    trajectories: list[Trajectory]
    num_prompts: int
    noun: str
    """What one of them is."""


async def validate(players: RolloutComponents, console: Console) -> ValidationResult:
    """Seeds depend on the prompt alone: the same model gives the same score at every step and in every run."""
    settings = players.recipe.validation
    sampling = replace(players.sampling(), temperature=settings.temperature, top_p=settings.top_p, top_k=0, min_p=0.0)
    prompts = [Prompt(i, i, prompt.row, prompt.tokens) for i, prompt in enumerate(players.validation)]
    samples = settings.samples_per_prompt
    with console.stage("validating", len(prompts) * samples) as progress:
        results = players.scheduler.play(prompts, samples, sampling, "validation", first=True)
        for result in results:
            result.add_done_callback(lambda _: progress.update(progress.done + samples))
        trajectories = [trajectory for group in await asyncio.gather(*results) for trajectory in group]
    metrics = summarise(trajectories, settings.pass_threshold)
    metrics |= environment_metrics(trajectories, "validation/environment")
    if players.floors is None:
        players.floors = await floor_metrics(players.recipe, [prompt.row for prompt in prompts])
    source = players.recipe.data.validation
    noun = "board" if source is not None and source.path == BOARDS else "question"
    return ValidationResult(metrics | players.floors, trajectories, len(prompts), noun)


def summarise(trajectories: list[Trajectory], pass_threshold: float) -> dict[str, float]:
    """mean@k with its 95 % interval over prompts (normal approximation), pass@k, lengths and stop reasons."""
    rewards = defaultdict(list)
    for trajectory in trajectories:
        rewards[trajectory.prompt_id].append(trajectory.reward)
    k = max(len(samples) for samples in rewards.values())
    means = np.array([np.mean(samples) for samples in rewards.values()])
    spread = float(means.std(ddof=1)) if len(means) > 1 else 0.0
    metrics = {
        f"validation/mean@{k}": float(means.mean()),
        "validation/ci95": 1.96 * spread / math.sqrt(len(means)),
        "validation/length": float(np.mean([trajectory.num_generated for trajectory in trajectories])),
        "validation/cut_off": float(np.mean([trajectory.stop == "length" for trajectory in trajectories])),
        "validation/errors": float(sum(trajectory.error is not None for trajectory in trajectories)),
    }
    if k > 1:
        metrics[f"validation/pass@{k}"] = float(
            np.mean([max(samples) >= pass_threshold for samples in rewards.values()])
        )
    return metrics


def show_samples(players: RolloutComponents, result: ValidationResult, console: Console, title: str = "") -> None:
    """A few answers, spread over the set."""
    wanted = players.recipe.logging.samples
    if not wanted:
        return
    every = max(1, len(result.trajectories) // wanted)
    samples = []
    for trajectory in result.trajectories[::every][:wanted]:
        row = players.validation[trajectory.row].row
        response = players.tokenizer.decode(trajectory.tokens[trajectory.prompt_length :], skip_special_tokens=True)
        answer = "" if row.answer is None else str(row.answer)
        samples.append(Sample(row.prompt[-1]["content"], response, answer, trajectory.reward))
    console.samples(samples, title)
