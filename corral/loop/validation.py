"""The held-out score: a fixed set of prompts, rolled out greedily unless the recipe says otherwise."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from corral.data.batch import Trajectory
from corral.data.images import decode_tokens
from corral.data.rows import Row
from corral.data.sources import BOARDS
from corral.envs.base import EnvSet, find_class
from corral.envs.baselines import Baseline, baselines
from corral.loop.components import RolloutComponents
from corral.loop.rollout_step import environment_metrics, sampling_of
from corral.observe.console import Console, ShownSample
from corral.recipe.schema import Recipe
from corral.rollout.driver import Prompt

MAX_BASELINE_ROWS = 1000


@dataclass(frozen=True)
class ValidationResult:
    """A validation's metrics and trajectories."""

    metrics: dict[str, float]
    trajectories: list[Trajectory]
    num_prompts: int
    noun: str
    """What a prompt is: a question or a board."""


async def validate(parts: RolloutComponents, console: Console) -> ValidationResult:
    """Rolls out the validation set. Seeds depend on the prompt alone: the same model gives the same score at every step
    and in every run."""
    settings = parts.recipe.validation
    own = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0, "min_p": 0.0}
    sampling = sampling_of(parts.recipe.rollout.model_copy(update=own))
    prompts = [Prompt.of(prompt, i, i) for i, prompt in enumerate(parts.validation)]
    samples = settings.samples_per_prompt
    with console.stage("validating", len(prompts) * samples) as progress:
        results = parts.scheduler.submit(prompts, samples, sampling, "validation", first=True)
        for result in results:
            result.add_done_callback(lambda _: progress.update(progress.done + samples))
        trajectories = [trajectory for group in await asyncio.gather(*results) for trajectory in group]
    metrics = summarize(trajectories, settings.pass_threshold)
    metrics |= environment_metrics(trajectories, "validation/environment")
    if parts.baselines is None:
        parts.baselines = await baseline_metrics(parts.recipe, [prompt.row for prompt in prompts])
    source = parts.recipe.data.validation
    noun = "board" if source is not None and source.path == BOARDS else "question"
    return ValidationResult(metrics | parts.baselines, trajectories, len(prompts), noun)


def summarize(trajectories: list[Trajectory], pass_threshold: float) -> dict[str, float]:
    """Computes mean@k with its 95 % interval over prompts (normal approximation), pass@k, lengths and stop reasons."""
    rewards = defaultdict(list)
    for trajectory in trajectories:
        rewards[trajectory.prompt_id].append(trajectory.reward)
    k = max(len(samples) for samples in rewards.values())
    means = np.array([np.mean(samples) for samples in rewards.values()])
    std = float(means.std(ddof=1)) if len(means) > 1 else 0.0
    metrics = {
        f"validation/mean@{k}": float(means.mean()),
        "validation/ci95": 1.96 * std / math.sqrt(len(means)),
        "validation/length": float(np.mean([trajectory.num_generated for trajectory in trajectories])),
        "validation/cut_off": float(np.mean([trajectory.stop == "length" for trajectory in trajectories])),
        "validation/errors": float(sum(trajectory.error is not None for trajectory in trajectories)),
    }
    if k > 1:
        passed = [max(samples) >= pass_threshold for samples in rewards.values()]
        metrics[f"validation/pass@{k}"] = float(np.mean(passed))
    return metrics


def show_samples(parts: RolloutComponents, result: ValidationResult, console: Console, title: str = "") -> None:
    """Prints a few answers, spread over the set."""
    wanted = parts.recipe.logging.samples
    if not wanted:
        return
    every = max(1, len(result.trajectories) // wanted)
    samples = []
    for trajectory in result.trajectories[::every][:wanted]:
        row = parts.validation[trajectory.row].row
        response = decode_tokens(
            parts.tokenizer, trajectory.tokens[trajectory.prompt_length :].tolist(), skip_special_tokens=True
        )
        answer = "" if row.answer is None else str(row.answer)
        samples.append(ShownSample(row.prompt[-1]["content"], response, answer, trajectory.reward))
    console.samples(samples, title)


# --- random and optimal baselines, between which a game's score is read


async def baseline_metrics(recipe: Recipe, rows: Sequence[Row]) -> dict[str, float]:
    """Computes `validation/random/...` and `validation/optimal/...` of reward and success, by tag where there are
    several environments. Nothing for environments that have no such policies."""
    known = {
        tag: environment
        for tag, environment in recipe.tagged_environments.items()
        if any(hasattr(find_class(environment.name), policy) for policy in ("random_reply", "best_reply"))
    }
    own = [row for row in rows if len(recipe.tagged_environments) == 1 or row.extra.get("environment") in known]
    if not own or not known:
        return {}
    env_set = EnvSet(known, {}, recipe.rollout)
    computed = baselines(env_set, own[:MAX_BASELINE_ROWS], recipe.rollout.max_turns, recipe.seed)
    try:
        # In a thread: solvers compute, and the event loop has others to serve.
        return metrics_of_baselines(await asyncio.to_thread(asyncio.run, computed))
    finally:
        env_set.close()


def metrics_of_baselines(baselines: Mapping[str, Baseline]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for tag, baseline in baselines.items():
        where = f"{tag}/" if tag else ""
        values = {
            f"validation/random/{where}reward": baseline.random_reward,
            f"validation/random/{where}success": baseline.random_success,
            f"validation/optimal/{where}reward": baseline.best_reward,
            f"validation/optimal/{where}success": baseline.best_success,
        }
        metrics |= {name: value for name, value in values.items() if value is not None}
    return metrics
