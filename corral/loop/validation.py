"""The held-out score: a fixed set of prompts, rolled out greedily unless the recipe says otherwise."""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from corral.algorithms.losses import GlobalCounts
from corral.data.batch import Batch, FloatArray, Pack, Trajectory
from corral.data.images import decode_tokens
from corral.data.rows import Row
from corral.data.sampler import SampledPrompt
from corral.data.sources import BOARDS
from corral.data.supervised import trajectories_of
from corral.envs.base import EnvSet, find_class
from corral.envs.baselines import Baseline, baselines
from corral.loop.components import RolloutComponents, RunComponents, several_names
from corral.loop.rollout_step import add_model_scores, environment_metrics, reward_metrics, sampling_of
from corral.loop.sample_errors import ErrorCounts, RunStopped
from corral.loop.train_step import compute_logprobs_and_values
from corral.observe.console import Console, ShownSample
from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.schema import Recipe
from corral.rollout.driver import Prompt
from corral.runtime.model_workers import ActorWorker, LossStats, UpdateTerms, policy_loss_of

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
        await add_model_scores(parts, trajectories)
    metrics = summarize(trajectories, settings.pass_threshold)
    for name in several_names([prompt.row for prompt in prompts]):
        of_source = [one for one in trajectories if parts.validation[one.row].row.source_name == name]
        if any(not one.is_dropped for one in of_source):
            metrics |= summarize(of_source, settings.pass_threshold, f"validation/{name}")
    rewarded, dropped = ([one for one in trajectories if one.is_dropped is which] for which in (False, True))
    metrics |= reward_metrics(trajectories, "validation/reward")
    metrics |= environment_metrics(rewarded, "validation/environment", dropped)
    if parts.baselines is None:
        parts.baselines = await baseline_metrics(parts.recipe, [prompt.row for prompt in prompts])
    source = parts.recipe.data.validation
    noun = "board" if source is not None and source.path == BOARDS else "question"
    return ValidationResult(metrics | parts.baselines, trajectories, len(prompts), noun)


async def validation_loss(parts: RunComponents) -> dict[str, float]:
    """Computes the mean loss per trained token of the held-out rows, and its exponential; of pairs their loss, and what
    is reported of pairs in training. Whoever calls it holds the trainers' lock."""
    rows = enumerate(parts.validation_rows)
    batch = Batch.of([one for i, row in rows for one in trajectories_of(row, SampledPrompt(i, i, 0))])
    logprobs = await parts.actor.compute_column(ActorWorker.compute_logprobs, batch, [list(range(len(batch)))])
    if batch.is_chosen is not None:
        await compute_logprobs_and_values(parts, batch, [list(range(len(batch)))])
        return {f"validation/{name}": value for name, value in pair_metrics(parts.algorithm, batch, logprobs).items()}
    metrics = loss_metrics(logprobs[batch.generated], "validation")
    for name in several_names([row.row for row in parts.validation_rows]):
        own = batch.positions_of([i for i, row in enumerate(parts.validation_rows) if row.row.source_name == name])
        metrics |= loss_metrics(logprobs[own][batch.generated[own]], f"validation/{name}")
    return metrics


def loss_metrics(logprobs: FloatArray, prefix: str) -> dict[str, float]:
    loss = -float(logprobs.mean(dtype=np.float64))
    return {f"{prefix}/loss": loss, f"{prefix}/perplexity": float(np.exp(min(loss, 700.0)))}


def pair_metrics(algorithm: ResolvedAlgorithm, batch: Batch, logprobs: FloatArray) -> dict[str, float]:
    """The mean loss of the pairs of a batch, and what the loss reports of them."""
    batch.columns["advantages"] = np.zeros_like(logprobs)
    pack, stats = Pack(batch, tuple(range(len(batch)))), LossStats()
    terms = UpdateTerms(GlobalCounts(batch.num_generated, len(batch)), preserved=0, kl_coefficient=0.0)
    computed = torch.from_numpy(logprobs)
    loss = policy_loss_of(algorithm, pack, terms, stats, computed, entropy=torch.zeros_like(computed))
    sums = stats.read().pair_sums
    metrics = {name.removeprefix("preference/"): value / stats.num_pairs for name, value in sums.items()}
    return {**metrics, "loss": float(loss)}


def summarize(trajectories: list[Trajectory], pass_threshold: float, prefix: str = "validation") -> dict[str, float]:
    """Computes mean@k with its 95 % interval over prompts (normal approximation), pass@k, lengths and stop reasons.
    Samples without a reward are counted and in no score."""
    rewards = defaultdict(list)
    rewarded = [trajectory for trajectory in trajectories if not trajectory.is_dropped]
    if not rewarded:
        why = ErrorCounts.of(trajectories).describe()
        raise RunStopped(f"validation: none of {len(trajectories)} samples has a reward; {why}")
    for trajectory in rewarded:
        rewards[trajectory.prompt_id].append(trajectory.reward)
    k = max(Counter(trajectory.prompt_id for trajectory in trajectories).values())  # also where some were dropped
    means = np.array([np.mean(samples) for samples in rewards.values()])
    std = float(means.std(ddof=1)) if len(means) > 1 else 0.0
    metrics = {
        f"{prefix}/mean@{k}": float(means.mean()),
        f"{prefix}/min": min(trajectory.reward for trajectory in rewarded),
        f"{prefix}/max": max(trajectory.reward for trajectory in rewarded),
        f"{prefix}/ci95": 1.96 * std / math.sqrt(len(means)),
        f"{prefix}/length": float(np.mean([trajectory.num_generated for trajectory in trajectories])),
        f"{prefix}/cut_off": float(np.mean([trajectory.stop == "length" for trajectory in trajectories])),
        f"{prefix}/dropped": float(len(trajectories) - len(rewarded)),
        f"{prefix}/errors": float(sum(trajectory.error is not None for trajectory in trajectories)),
        f"{prefix}/error_rate": float(np.mean([trajectory.error is not None for trajectory in trajectories])),
    }
    if k > 1:
        passed = [max(samples) >= pass_threshold for samples in rewards.values()]
        metrics[f"{prefix}/pass@{k}"] = float(np.mean(passed))
    return metrics


def show_samples(parts: RolloutComponents, result: ValidationResult, console: Console) -> None:
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
        samples.append(
            ShownSample(
                row.prompt[-1]["content"], response, answer, None if trajectory.is_dropped else trajectory.reward
            )
        )
    console.samples(samples)


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
