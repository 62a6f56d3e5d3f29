"""What a run is made of, built from the recipe in the order in which mistakes are cheapest to find."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from corral.algorithms.kl import AdaptiveKL, FixedKL, KLController
from corral.data.sampler import Sampler
from corral.data.sources import PreparedPrompt, fit_prompts, load_rows, render_prompt
from corral.envs.registry import make_env_factory
from corral.model.load import default_device, end_tokens, load_model, load_tokenizer
from corral.model.smollm2 import needs_conversion
from corral.observe.console import Console
from corral.observe.log import quiet_libraries
from corral.recipe.errors import UserError
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import Model, Recipe, Source
from corral.rewards.pool import ScorerPool
from corral.rollout.chat import Chat
from corral.rollout.driver import Driver
from corral.rollout.engine import Sampling
from corral.rollout.native import NativeEngine
from corral.train.native import NativeCritic, NativePolicy, ValueModel

CLOSE_TIMEOUT_S = 5.0


@dataclass
class Player:
    """All that plays: enough to evaluate a model."""

    recipe: Recipe
    tokenizer: Any
    engine: NativeEngine
    driver: Driver
    pool: ScorerPool
    validation: list[PreparedPrompt]
    runner: asyncio.Runner
    """One event loop for the whole run; the pool's answers arrive on it."""

    def sampling(self, *, greedy: bool = False) -> Sampling:
        rollout = self.recipe.rollout
        return Sampling(
            max_tokens=rollout.max_response_tokens,
            temperature=0.0 if greedy else rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
            stop_tokens=end_tokens(self.engine.model, self.tokenizer) | frozenset(rollout.stop_token_ids),
        )

    def close(self) -> None:
        self.pool.close()
        close_runner(self.runner)
        self.engine.close()


@dataclass
class Parts(Player):
    """And all that learns."""

    algorithm: ResolvedAlgorithm
    train: list[PreparedPrompt]
    sampler: Sampler
    num_steps: int
    actor: NativePolicy
    reference: NativePolicy | None
    critic: NativeCritic | None
    kl: KLController | None


def build_player(recipe: Recipe, console: Console, model_path: str | None = None) -> Player:
    """`model_path`: another model than the recipe's, such as a checkpoint; the tokenizer is its own."""
    if recipe.data.validation is None:
        raise UserError("data.validation: there is nothing to evaluate on")
    model_recipe = recipe.model if model_path is None else recipe.model.model_copy(update={"path": model_path})
    with started_pool(recipe) as pool:
        tokenizer = tokenizer_of(model_recipe, console)
        validation = prompts_of(recipe, recipe.data.validation, tokenizer, console)
        with console.stage("loading the model"):
            model = load_model(model_recipe, device_of(recipe))
        return Player(
            recipe=recipe,
            tokenizer=tokenizer,
            pool=pool,
            validation=validation[: recipe.validation.max_prompts],
            runner=asyncio.Runner(),
            **playing_parts(recipe, model, tokenizer, pool),
        )


def build_parts(recipe: Recipe, console: Console, resume_from: Path | None) -> Parts:
    check_scale(recipe)
    algorithm = resolve_algorithm(recipe)
    with started_pool(recipe) as pool:
        tokenizer = tokenizer_of(recipe.model, console)
        train = prompts_of(recipe, recipe.data.train, tokenizer, console)
        validation = []
        if recipe.data.validation is not None:
            validation = prompts_of(recipe, recipe.data.validation, tokenizer, console)
        num_steps = steps_of(recipe, len(train))
        with console.stage("loading the model"):
            path = recipe.model.path if resume_from is None else str(resume_from)
            model = load_model(recipe.model.model_copy(update={"path": path}), device_of(recipe))
            learning = learning_parts(recipe, algorithm, model, num_steps)
        return Parts(
            recipe=recipe,
            tokenizer=tokenizer,
            pool=pool,
            validation=validation[: recipe.validation.max_prompts],
            runner=asyncio.Runner(),
            algorithm=algorithm,
            train=train,
            sampler=Sampler(len(train), recipe.seed, recipe.data.shuffle),
            num_steps=num_steps,
            kl=kl_controller(algorithm),
            **learning,
            **playing_parts(recipe, model, tokenizer, pool),
        )


def close_runner(runner: asyncio.Runner) -> None:
    """With a deadline: an environment may ignore that its task is cancelled."""
    tasks = asyncio.all_tasks(runner.get_loop())
    for task in tasks:
        task.cancel()
    if tasks:
        runner.run(asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S))
    if all(task.done() for task in tasks):
        runner.close()


def check_scale(recipe: Recipe) -> None:
    devices = recipe.cluster.nodes * recipe.cluster.devices_per_node
    if devices > 1:
        raise UserError(
            f"cluster: the recipe is for {devices} devices. They can be planned, but training runs on one as yet: set "
            "cluster.nodes and cluster.devices_per_node to 1"
        )


@contextmanager
def started_pool(recipe: Recipe) -> Iterator[ScorerPool]:
    """Started first: its processes import while the model is loaded, and a wrong reward is known before that.

    Closed again if what follows fails.
    """
    pool = ScorerPool(recipe.environment.reward)
    try:
        pool.check()
        yield pool
    except BaseException:
        pool.close()
        raise


def tokenizer_of(model: Model, console: Console) -> Any:
    with console.stage(f"preparing {model.path}" + (", once, half a minute" if needs_conversion(model.path) else "")):
        tokenizer = load_tokenizer(model)
    quiet_libraries()  # transformers was imported just now
    return tokenizer


def prompts_of(recipe: Recipe, source: Source, tokenizer: Any, console: Console) -> list[PreparedPrompt]:
    data = recipe.data
    rows = load_rows(source, data)
    prompts, counts = fit_prompts(
        rows, lambda row: render_prompt(tokenizer, row, data.chat), data.max_prompt_tokens, data.overlong
    )
    if counts.num_filtered or counts.num_truncated:
        console.warn(
            f"{source.path}: {counts.num_filtered} of {counts.num_rows} prompts left out, {counts.num_truncated} "
            f"truncated, for having more than {data.max_prompt_tokens} tokens"
        )
    return prompts


def learning_parts(recipe: Recipe, algorithm: ResolvedAlgorithm, model: Any, num_steps: int) -> dict[str, Any]:
    num_updates = num_steps * recipe.batch.updates_per_step * recipe.batch.passes
    policy = partial(NativePolicy, temperature=recipe.rollout.temperature, logits_chunk=recipe.train.logits_chunk)
    recompute = recipe.train.recompute == "full"

    def load(path: str | None) -> Any:
        return load_model(recipe.model.model_copy(update={"path": path or recipe.model.path}), device_of(recipe))

    reference = critic = None
    if algorithm.needs_reference:
        reference = policy(load(recipe.reference.path).requires_grad_(False))
    if algorithm.needs_critic:
        critic = NativeCritic(ValueModel(load(recipe.critic.path)), recipe.critic.optimiser, num_updates, recompute)
    actor = policy(model, optimiser=recipe.optimiser, total_updates=num_updates, recompute=recompute)
    return {"actor": actor, "reference": reference, "critic": critic}


def playing_parts(recipe: Recipe, model: Any, tokenizer: Any, pool: ScorerPool) -> dict[str, Any]:
    rollout, environment = recipe.rollout, recipe.environment
    limit = recipe.data.max_prompt_tokens + rollout.max_response_tokens
    positions = model.config.get_text_config().max_position_embeddings
    if limit > positions:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_response_tokens = {limit}, but the model has {positions} positions"
        )
    engine = NativeEngine(
        model,
        tokenizer,
        max_sequences=rollout.max_sequences,
        max_prefill_tokens=rollout.max_prefill_tokens,
        max_length=limit,
    )
    driver = Driver(
        engine=engine,
        make_env=make_env_factory(environment, pool),
        chat=Chat(tokenizer, recipe.data.chat),
        max_turns=rollout.max_turns,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        env_timeout_s=environment.timeout_s,
        on_error=environment.reward.on_error,
        seed=recipe.seed,
    )
    return {"engine": engine, "driver": driver}


def steps_of(recipe: Recipe, num_rows: int) -> int:
    if recipe.schedule.steps is not None:
        return recipe.schedule.steps
    assert recipe.schedule.epochs is not None, "the rules see to it that one is given"
    return math.ceil(recipe.schedule.epochs * num_rows / recipe.batch.prompts_per_step)


def device_of(recipe: Recipe) -> torch.device:
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    return default_device()


def kl_controller(algorithm: ResolvedAlgorithm) -> KLController | None:
    if algorithm.kl_where is None:
        return None
    if algorithm.kl_controller == "adaptive":
        return AdaptiveKL(algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon)
    return FixedKL(algorithm.kl_coefficient)
