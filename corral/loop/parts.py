"""What a run is made of, built from the recipe in the order in which mistakes are cheapest to find."""

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from corral.algorithms.kl import AdaptiveKL, FixedKL, KLController
from corral.data.sampler import Sampler
from corral.data.sources import PreparedPrompt, fit_prompts, load_rows, render_prompt
from corral.envs.registry import make_env_factory
from corral.model.load import default_device, end_tokens, load_model, load_tokenizer
from corral.observe.console import Console
from corral.recipe.errors import UserError
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import Recipe, Source
from corral.rewards.pool import ScorerPool
from corral.rollout.chat import Chat
from corral.rollout.driver import Driver
from corral.rollout.engine import Sampling
from corral.rollout.native import NativeEngine
from corral.train.native import NativeCritic, NativePolicy, ValueModel


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
        self.runner.close()
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
    pool = start_pool(recipe)
    model_recipe = recipe.model if model_path is None else recipe.model.model_copy(update={"path": model_path})
    tokenizer = load_tokenizer(model_recipe)
    if recipe.data.validation is None:
        raise UserError("data.validation: there is nothing to evaluate on")
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
    algorithm = resolve_algorithm(recipe)
    pool = start_pool(recipe)
    tokenizer = load_tokenizer(recipe.model)
    train = prompts_of(recipe, recipe.data.train, tokenizer, console)
    validation = [] if recipe.data.validation is None else prompts_of(recipe, recipe.data.validation, tokenizer, console)
    num_steps = steps_of(recipe, len(train))
    num_updates = num_steps * recipe.batch.updates_per_step * recipe.batch.passes
    device = device_of(recipe)
    settings = {"temperature": recipe.rollout.temperature, "logits_chunk": recipe.train.logits_chunk}
    recompute = recipe.train.recompute == "full"
    with console.stage("loading the model"):
        current = recipe.model if resume_from is None else recipe.model.model_copy(update={"path": str(resume_from)})
        model = load_model(current, device)
        actor = NativePolicy(
            model, **settings, optimiser=recipe.optimiser, total_updates=num_updates, recompute=recompute
        )
        reference = critic = None
        if algorithm.needs_reference:
            path = recipe.reference.path or recipe.model.path
            frozen = load_model(recipe.model.model_copy(update={"path": path}), device).requires_grad_(False)
            reference = NativePolicy(frozen, **settings)
        if algorithm.needs_critic:
            path = recipe.critic.path or recipe.model.path
            value_model = ValueModel(load_model(recipe.model.model_copy(update={"path": path}), device))
            critic = NativeCritic(value_model, recipe.critic.optimiser, num_updates, recompute)
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
        actor=actor,
        reference=reference,
        critic=critic,
        kl=kl_controller(algorithm),
        **playing_parts(recipe, model, tokenizer, pool),
    )


def start_pool(recipe: Recipe) -> ScorerPool:
    """Started first: its processes import while the model is loaded, and a wrong reward is known before that."""
    pool = ScorerPool(recipe.environment.reward)
    pool.check()
    return pool


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
