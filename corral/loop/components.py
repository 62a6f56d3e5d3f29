"""What a run is made of, built from the recipe in the order in which mistakes are cheapest to find."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from corral.algorithms.kl import AdaptiveKL, FixedKL, KLController
from corral.data.rows import Row
from corral.data.sampler import Sampler
from corral.data.sources import PreparedPrompt, fit_prompts, load_rows, render_prompt
from corral.loop.rollout_scheduler import RolloutScheduler
from corral.loop.trainer_group import TrainerGroup
from corral.loop.weight_publisher import WeightPublisher
from corral.model.load import load_tokenizer
from corral.model.smollm2 import needs_conversion
from corral.observe.console import Console
from corral.observe.log import quiet_libraries
from corral.recipe.errors import UserError
from corral.recipe.mesh import mesh_shape
from corral.recipe.placement import Placement, resolve_placement, runs_on_ray, transfer_kind
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import Model, Part, Recipe, Source
from corral.rollout.engine import Sampling
from corral.rollout.prefix import check_template
from corral.runtime.group import Group
from corral.runtime.local import LocalRuntime
from corral.runtime.remote_debugger import Wanted
from corral.runtime.roles import ORDER

ROOM = 3.0
"""Trajectories that a worker has in flight, in multiples of what its engine decodes at once: the rest waits at the
controller, so that a worker that is slow takes less. A prompt counts with all its samples until the longest is done, so
with less an engine is half empty while its prompts wait for their last samples (`benchmarks/overlap.py`: with 1.5,
playing took 1.2 times as long)."""


class Runtime(Protocol):
    """Where the workers are: `LocalRuntime` or `RayRuntime`."""

    placement: Placement
    """Without the devices of nodes that were lost."""
    groups: dict[str, Group]

    @property
    def num_nodes(self) -> int: ...

    def devices_of(self, address: str) -> tuple[int, ...]: ...

    async def build(
        self,
        role: str,
        recipe: Recipe,
        resume_from: Path | None,
        *,
        rank: int | None = None,
    ) -> list[dict[str, Any]]:
        """Builds a role on its workers, or on one of them. Returns what each has to say of itself."""
        ...

    async def watch(self) -> None:
        """Runs until a node is lost, and raises that."""
        ...

    async def replace(self, device: int) -> None:
        """Starts a worker's process again in its place, without roles."""
        ...

    def close(self) -> None: ...


OpenWorkers = Callable[[Recipe, Placement, Path, Console, frozenset[str]], AbstractAsyncContextManager[Runtime]]
"""`open_runtime`, or another that takes its place to measure the rest."""


@dataclass
class RolloutComponents:
    """All that plays: enough to evaluate a model."""

    recipe: Recipe
    tokenizer: Any
    validation: list[PreparedPrompt]
    runtime: Runtime
    scheduler: RolloutScheduler
    floors: dict[str, float] | None = field(default=None, kw_only=True)
    """What random and optimal play would score on the validation set; found out when it is first played."""

    def sampling(self, *, greedy: bool = False) -> Sampling:
        """Without the model's own end tokens, which players add."""
        rollout = self.recipe.rollout
        return Sampling(
            max_tokens=rollout.max_response_tokens,
            temperature=0.0 if greedy else rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
        )


@dataclass
class RunComponents(RolloutComponents):
    """And all that learns."""

    algorithm: ResolvedAlgorithm
    train: list[PreparedPrompt]
    sampler: Sampler
    num_steps: int
    dtype: str
    """Of the model."""
    actor: TrainerGroup
    reference: TrainerGroup | None
    critic: TrainerGroup | None
    kl: KLController | None
    publisher: WeightPublisher


@asynccontextmanager
async def open_rollout_components(
    recipe: Recipe, console: Console, model_path: str | None = None
) -> AsyncIterator[RolloutComponents]:
    """`model_path`: another model than the recipe's, such as a checkpoint; the tokenizer is its own."""
    if recipe.data.validation is None:
        raise UserError("data.validation: there is nothing to evaluate on")
    if model_path is not None:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model_path})})
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    async with open_runtime(recipe, placement.only(["rollout"]), Path(recipe.logging.runs), console) as runtime:
        await runtime.build("rewards", recipe, None)
        tokenizer = tokenizer_of(recipe.model, console)
        check_turns(recipe, tokenizer, console)
        validation = prompts_of(recipe, "validation", tokenizer, console)
        with console.stage("loading the model"):
            facts = await runtime.build("rollout", recipe, None)
        async with open_scheduler(runtime, facts[0]["max_sequences"]) as scheduler:
            yield RolloutComponents(recipe, tokenizer, validation[: recipe.validation.max_prompts], runtime, scheduler)


@asynccontextmanager
async def open_components(
    recipe: Recipe,
    console: Console,
    logs: Path,
    resume_from: Path | None,
    lost_nodes: frozenset[str] = frozenset(),
    open_workers: OpenWorkers | None = None,
) -> AsyncIterator[RunComponents]:
    algorithm = resolve_algorithm(recipe)
    placement, _ = resolve_placement(recipe, algorithm)
    async with (open_workers or open_runtime)(recipe, placement, logs, console, lost_nodes) as runtime:
        await runtime.build("rewards", recipe, None)
        tokenizer = tokenizer_of(recipe.model, console)
        check_turns(recipe, tokenizer, console)
        train = prompts_of(recipe, "train", tokenizer, console)
        validation = []
        if recipe.data.validation is not None:
            validation = prompts_of(recipe, "validation", tokenizer, console)
        recipe = with_steps(recipe, len(train))
        with console.stage("loading the model"):
            facts = {role: await runtime.build(role, recipe, resume_from) for role in ORDER if role in placement.roles}
        async with open_scheduler(runtime, facts["rollout"][0]["max_sequences"]) as scheduler:
            actor, dtype = learners(recipe, runtime, "actor"), facts["actor"][0]["dtype"]
            yield RunComponents(
                recipe=recipe,
                tokenizer=tokenizer,
                validation=validation[: recipe.validation.max_prompts],
                runtime=runtime,
                scheduler=scheduler,
                algorithm=algorithm,
                train=train,
                sampler=Sampler(len(train), recipe.seed, recipe.data.shuffle),
                num_steps=steps_of(recipe),
                dtype=dtype,
                actor=actor,
                reference=learners(recipe, runtime, "reference") if "reference" in placement.roles else None,
                critic=learners(recipe, runtime, "critic") if "critic" in placement.roles else None,
                kl=kl_controller(algorithm),
                publisher=WeightPublisher(
                    actor,
                    runtime.groups["rollout"],
                    transfer_kind(recipe, runtime.placement),
                    dtype,
                    train[0].tokens,
                ),
            )


@asynccontextmanager
async def open_runtime(
    recipe: Recipe,
    placement: Placement,
    logs: Path,
    console: Console,
    lost_nodes: frozenset[str] = frozenset(),
    debugger: Wanted = Wanted(),
) -> AsyncIterator[Runtime]:
    runtime: Runtime
    if runs_on_ray(recipe):
        from corral.runtime.ray import RayRuntime

        with console.stage("starting workers"):
            runtime = await RayRuntime.start(
                recipe, placement, logs, say=console.note, without_nodes=lost_nodes, debugger=debugger
            )
    else:
        runtime = LocalRuntime(recipe, placement, logs)
    try:
        if isinstance(runtime, LocalRuntime) and recipe.cluster.services:
            with console.stage(f"starting {', '.join(recipe.cluster.services)}"):
                await runtime.await_services()
        yield runtime
    finally:
        runtime.close()


@asynccontextmanager
async def open_scheduler(runtime: Runtime, max_sequences: int) -> AsyncIterator[RolloutScheduler]:
    """`max_sequences`: that a player decodes at the same time."""
    rollout = runtime.groups["rollout"]
    scheduler = RolloutScheduler(rollout, math.inf if rollout.size == 1 else ROOM * max_sequences)
    for rank in range(rollout.size):
        scheduler.open(rank)
    try:
        yield scheduler
    finally:
        await scheduler.close()


def learners(recipe: Recipe, runtime: Runtime, role: str) -> TrainerGroup:
    return TrainerGroup(runtime.groups[role], mesh_shape(recipe.train.parallel, runtime.groups[role].size, role))


def tokenizer_of(model: Model, console: Console) -> Any:
    with console.stage(f"preparing {model.path}" + (", once, half a minute" if needs_conversion(model.path) else "")):
        tokenizer = load_tokenizer(model)
    quiet_libraries()  # transformers was imported just now
    return tokenizer


def check_turns(recipe: Recipe, tokenizer: Any, console: Console) -> None:
    """A conversation is extended token by token: said at once where the model's template does not go along."""
    several = recipe.rollout.max_turns > 1 or any(e.name == "search" for e in recipe.tagged_environments.values())
    if several and recipe.data.chat and tokenizer.chat_template:
        doubt = check_template(tokenizer, recipe.data.system)
        if doubt is not None:
            console.warn(doubt)


def prompts_of(recipe: Recipe, part: Part, tokenizer: Any, console: Console) -> list[PreparedPrompt]:
    data = recipe.data
    source = data.train if part == "train" else data.validation
    assert source is not None
    rows = load_rows(source, data, recipe.mixing_weights(part))
    check_tags(rows, recipe, source)
    prompts, counts = fit_prompts(
        rows, lambda row: render_prompt(tokenizer, row, data.chat), data.max_prompt_tokens, data.overlong
    )
    if counts.num_filtered or counts.num_truncated:
        console.warn(
            f"{source.path}: {counts.num_filtered} of {counts.num_rows} prompts left out, {counts.num_truncated} "
            f"truncated, for having more than {data.max_prompt_tokens} tokens"
        )
    return prompts


def check_tags(rows: list[Row], recipe: Recipe, source: Source) -> None:
    """Every row says whose it is, where there are several environments."""
    for number, row in enumerate(rows):
        tag = row.extra.get("environment")
        if recipe.environments and tag not in recipe.environments:
            known = ", ".join(recipe.environments)
            raise UserError(f"{source.path}, row {number}: the column `environment` is {tag!r}; there are {known}")


def with_steps(recipe: Recipe, num_rows: int) -> Recipe:
    """The recipe with its number of steps, where it says epochs."""
    schedule = recipe.schedule
    if schedule.steps is None:
        assert schedule.epochs is not None, "the rules see to it that one is given"
        steps = math.ceil(schedule.epochs * num_rows / recipe.batch.prompts_per_step)
        schedule = schedule.model_copy(update={"steps": steps, "epochs": None})
    return recipe.model_copy(update={"schedule": schedule})


def steps_of(recipe: Recipe) -> int:
    assert recipe.schedule.steps is not None
    return recipe.schedule.steps


def kl_controller(algorithm: ResolvedAlgorithm) -> KLController | None:
    if algorithm.kl_where is None:
        return None
    if algorithm.kl_controller == "adaptive":
        return AdaptiveKL(algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon)
    return FixedKL(algorithm.kl_coefficient)
