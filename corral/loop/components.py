"""What a run is made of, built from the recipe in the order in which mistakes are cheapest to find."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.algorithms.losses import KLController
from corral.data.sampler import Sampler
from corral.data.sources import PreparedPrompt, fit_prompts, load_rows, render_prompt
from corral.model.builtin_models import needs_conversion
from corral.model.model_loading import load_tokenizer
from corral.observe.console import Console, quiet_libraries
from corral.recipe.errors import UserError
from corral.recipe.placement import Placement, resolve_meshes, resolve_placement, runs_on_ray, transfer_kind
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import Part, Recipe
from corral.rollout.chat_rendering import check_template
from corral.runtime.group import LocalRuntime, Runtime
from corral.runtime.local_debugger import Debugging
from corral.runtime.model_workers import ActorWorker, CriticWorker, PolicyWorker, TrainerGroup, WeightPublisher
from corral.runtime.remote_debugger import DebuggerOptions
from corral.runtime.rollout_worker import RolloutScheduler
from corral.runtime.worker import BUILD_ORDER

OVERSUBSCRIPTION = 3.0
"""Trajectories that a worker has in flight, in multiples of what its engine decodes at once: the rest waits at the
controller, so that a slow worker gets fewer. A prompt counts with all its samples until the longest is done, so with
less an engine is half empty while its prompts wait for their last samples (`benchmarks/overlap.py`: with 1.5, rollouts
took 1.2 times as long)."""


OpenWorkers = Callable[[Recipe, Placement, Path, Console, frozenset[str]], AbstractAsyncContextManager[Runtime]]
"""Type of `open_runtime`, and of those that a debugger or a benchmark has in its place."""


@dataclass
class RolloutComponents:
    """All that rollouts need: enough to evaluate a model."""

    recipe: Recipe
    tokenizer: Any
    validation: list[PreparedPrompt]
    runtime: Runtime
    scheduler: RolloutScheduler
    baselines: dict[str, float] | None = field(default=None, kw_only=True)
    """Scores of a random and an optimal policy on the validation set; computed at the first validation."""


@dataclass
class RunComponents(RolloutComponents):
    """All that a training run needs."""

    algorithm: ResolvedAlgorithm
    train: list[PreparedPrompt]
    sampler: Sampler
    num_steps: int
    dtype: str
    """Data type of the model."""
    actor: TrainerGroup[ActorWorker]
    reference: TrainerGroup[PolicyWorker] | None
    critic: TrainerGroup[CriticWorker] | None
    kl: KLController | None
    publisher: WeightPublisher
    trainer_lock: asyncio.Lock = field(default_factory=asyncio.Lock, kw_only=True)
    """Held by whoever calls the trainers, which compute together and so must all be called for the same things in the
    same order."""
    has_updated: bool = field(default=False, kw_only=True)
    """Whether the policy was updated since the weights were loaded."""


@asynccontextmanager
async def open_rollout_components(
    recipe: Recipe, console: Console, model_path: str | None = None
) -> AsyncIterator[RolloutComponents]:
    """Opens what an evaluation needs. `model_path`: another model than the recipe's, such as a checkpoint; the
    tokenizer is its own."""
    if recipe.data.validation is None:
        raise UserError("data.validation: there is nothing to evaluate on")
    if model_path is not None:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model_path})})
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    async with open_runtime(recipe, placement.only(["rollout"]), Path(recipe.logging.runs), console) as runtime:
        tokenizer = await prepare_rewards_and_tokenizer(runtime, recipe, console)
        validation = prompts_of(recipe, "validation", tokenizer, console)
        with console.stage("loading the model"):
            facts = await runtime.build("rollout", recipe, None)
        if warning := facts[0].get("warning"):
            console.warn(warning)
        async with open_scheduler(
            runtime, facts[0]["max_sequences"], recipe.rollout.engine.tensor_parallel
        ) as scheduler:
            yield RolloutComponents(recipe, tokenizer, validation[: recipe.validation.max_prompts], runtime, scheduler)


@asynccontextmanager
async def open_components(
    recipe: Recipe,
    console: Console,
    logs: Path,
    resume_from: Path | None,
    lost_nodes: frozenset[str],
    open_workers: OpenWorkers,
) -> AsyncIterator[RunComponents]:
    algorithm = resolve_algorithm(recipe)
    placement, _ = resolve_placement(recipe, algorithm)
    async with open_workers(recipe, placement, logs, console, lost_nodes) as runtime:
        tokenizer = await prepare_rewards_and_tokenizer(runtime, recipe, console)
        train = prompts_of(recipe, "train", tokenizer, console)
        validation = []
        if recipe.data.validation is not None:
            validation = prompts_of(recipe, "validation", tokenizer, console)
        recipe = with_steps(recipe, len(train))
        assert recipe.schedule.steps is not None
        with console.stage("loading the model"):
            roles = [role for role in BUILD_ORDER if role in placement.roles]
            facts = {role: await runtime.build(role, recipe, resume_from) for role in roles}
        if warning := facts["rollout"][0].get("warning"):
            console.warn(warning)
        async with open_scheduler(
            runtime, facts["rollout"][0]["max_sequences"], recipe.rollout.engine.tensor_parallel
        ) as scheduler:
            dtype = facts["actor"][0]["dtype"]
            meshes = resolve_meshes(recipe, runtime.placement)
            trainers: dict[str, TrainerGroup[Any]] = {
                role: TrainerGroup(runtime.groups[role], mesh) for role, mesh in meshes.items()
            }
            yield RunComponents(
                recipe=recipe,
                tokenizer=tokenizer,
                validation=validation[: recipe.validation.max_prompts],
                runtime=runtime,
                scheduler=scheduler,
                algorithm=algorithm,
                train=train,
                sampler=Sampler(len(train), recipe.seed, recipe.data.shuffle),
                num_steps=recipe.schedule.steps,
                dtype=dtype,
                actor=trainers["actor"],
                reference=trainers.get("reference"),
                critic=trainers.get("critic"),
                kl=kl_controller(algorithm),
                publisher=WeightPublisher(
                    trainers["actor"],
                    scheduler,
                    transfer_kind(recipe, runtime.placement),
                    dtype,
                    train[0].tokens,
                    in_process=recipe.rollout.engine.in_process,
                ),
            )


@asynccontextmanager
async def open_runtime(
    recipe: Recipe,
    placement: Placement,
    logs: Path,
    console: Console,
    lost_nodes: frozenset[str] = frozenset(),
    debugging: Debugging = Debugging(),
) -> AsyncIterator[Runtime]:
    runtime: Runtime
    if runs_on_ray(recipe):
        from corral.runtime.ray_runtime import RayRuntime

        debugger = DebuggerOptions(debugging.post_mortem, debugging.insecure, console.warn)
        with console.stage("starting workers"):
            runtime = await RayRuntime.start(
                recipe, placement, logs, report=console.note, without_nodes=lost_nodes, debugger=debugger
            )
    else:
        if debugging.here:  # who is at a breakpoint is not hurried
            cluster = recipe.cluster.model_copy(update={"call_timeout_s": math.inf})
            recipe = recipe.model_copy(update={"cluster": cluster})
        runtime = LocalRuntime(recipe, placement, logs, builder=debugging.builder)
    try:
        if isinstance(runtime, LocalRuntime) and recipe.cluster.services:
            with console.stage(f"starting {', '.join(recipe.cluster.services)}"):
                await runtime.wait_for_services()
        yield runtime
    finally:
        runtime.close()


@asynccontextmanager
async def open_scheduler(
    runtime: Runtime, max_sequences: int, devices_per_engine: int
) -> AsyncIterator[RolloutScheduler]:
    """`max_sequences`: sequences that an engine decodes at the same time."""
    rollout = runtime.groups["rollout"]
    scheduler = RolloutScheduler(rollout, math.inf if rollout.size == 1 else OVERSUBSCRIPTION * max_sequences)
    for rank in range(0, rollout.size, devices_per_engine):
        scheduler.add_worker(rank)
    try:
        yield scheduler
    finally:
        await scheduler.close()


async def prepare_rewards_and_tokenizer(runtime: Runtime, recipe: Recipe, console: Console) -> Any:
    """Builds the rewards and returns the tokenizer. Warns where the model's chat template does not allow that a
    conversation is extended token by token."""
    await runtime.build("rewards", recipe, None)
    path = recipe.model.path
    with console.stage(f"preparing {path}" + (", once, half a minute" if needs_conversion(path) else "")):
        tokenizer = load_tokenizer(recipe.model)
    quiet_libraries()  # transformers was imported just now
    multi_turn = recipe.rollout.max_turns > 1 or any(e.name == "search" for e in recipe.tagged_environments.values())
    if multi_turn and recipe.data.chat and tokenizer.chat_template:
        warning = check_template(tokenizer, recipe.data.system)
        if warning is not None:
            console.warn(warning)
    return tokenizer


def prompts_of(recipe: Recipe, part: Part, tokenizer: Any, console: Console) -> list[PreparedPrompt]:
    data = recipe.data
    source = data.train if part == "train" else data.validation
    assert source is not None
    rows = load_rows(source, data, recipe.mixing_weights(part))
    for number, row in enumerate(rows):  # where there are several environments, each row names one of them
        tag = row.extra.get("environment")
        if recipe.environments and tag not in recipe.environments:
            known = ", ".join(recipe.environments)
            raise UserError(f"{source.path}, row {number}: the column `environment` is {tag!r}; there are {known}")
    prompts, counts = fit_prompts(
        rows, lambda row: render_prompt(tokenizer, row, data.chat), data.max_prompt_tokens, data.overlong
    )
    if counts.num_filtered or counts.num_truncated:
        console.warn(
            f"{source.path}: {counts.num_filtered} of {counts.num_rows} prompts left out, {counts.num_truncated} "
            f"truncated, for having more than {data.max_prompt_tokens} tokens"
        )
    return prompts


def with_steps(recipe: Recipe, num_rows: int) -> Recipe:
    """Returns the recipe with its number of steps, where it has epochs."""
    schedule = recipe.schedule
    if schedule.steps is None:
        assert schedule.epochs is not None, "the rules see to it that one is given"
        steps = math.ceil(schedule.epochs * num_rows / recipe.batch.prompts_per_step)
        schedule = schedule.model_copy(update={"steps": steps, "epochs": None})
    return recipe.model_copy(update={"schedule": schedule})


def kl_controller(algorithm: ResolvedAlgorithm) -> KLController | None:
    if algorithm.kl is None:
        return None
    controller: KLController = algorithm.kl.controller.declaration.function(
        algorithm.kl.coefficient, algorithm.kl.controller.options
    )
    return controller
