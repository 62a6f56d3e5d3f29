"""What a run is made of, built from the recipe in the order in which mistakes are cheapest to find."""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from corral.algorithms.losses import KLController
from corral.data.reference_cache import ReferenceCache
from corral.data.rows import Row, number_in
from corral.data.sampler import RewardHistory, SampledSource, Sampler
from corral.data.sources import PreparedPrompt, describe_skipped, load_part
from corral.data.supervised import prepare_prompts
from corral.loop.preflight import check_sources, report_trial, rows_by_tag, try_algorithm
from corral.loop.sample_errors import ErrorReport
from corral.model.builtin_models import needs_conversion
from corral.model.lora import AdapterFolder
from corral.model.model_loading import load_tokenizer
from corral.observe.console import Console, quiet_libraries
from corral.recipe.default_mesh import with_default_mesh
from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import (
    Placement,
    engine_returns_weights,
    resolve_meshes,
    resolve_placement,
    runs_on_ray,
    transfer_kind,
)
from corral.recipe.plan import count_steps, describe_mesh
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import Part, Recipe, TeacherEndpoint
from corral.recipe.shape import ModelShape
from corral.rollout.chat_rendering import check_template
from corral.runtime.group import Group, LocalGroup, LocalRuntime, Runtime
from corral.runtime.local_debugger import Debugging
from corral.runtime.model_workers import ActorWorker, CriticWorker, PolicyWorker, TrainerGroup
from corral.runtime.remote_debugger import DebuggerOptions
from corral.runtime.reward_model_worker import RewardModelGroup
from corral.runtime.rollout_worker import RolloutScheduler, RolloutWorker
from corral.runtime.teacher_endpoint import EndpointTeacher
from corral.runtime.weight_publisher import WeightPublisher
from corral.runtime.worker import BUILD_ORDER, RewardWorker

OVERSUBSCRIPTION = 3.0
"""Trajectories that a worker has in flight, in multiples of what its engine decodes at once: the rest waits at the
controller, so that a slow worker gets fewer. A prompt counts with all its samples until the longest is done, so with
less an engine is half empty while its prompts wait for their last samples (`benchmarks/overlap.py`: with 1.5, rollouts
took 1.2 times as long)."""


OpenWorkers = Callable[[Recipe, Placement, Path, Console, frozenset[str]], AbstractAsyncContextManager[Runtime]]
"""Type of `open_runtime`, and of those that a debugger or a benchmark has in its place."""


class CheckpointUnseen(RunError):
    """A checkpoint is not there for all workers."""

    def __init__(self, checkpoint: Path, blind: Mapping[str, str]) -> None:
        """`blind`: workers that cannot load it, each with what is wrong there."""
        self.checkpoint = checkpoint
        worker, problem = next(iter(blind.items()))
        others = f" and {len(blind) - 1} other workers" if len(blind) > 1 else ""
        super().__init__(
            f"{checkpoint} cannot be gone on from: {worker}{others} cannot load it ({problem}). Copy it to the same "
            "path on their nodes, or put `logging.runs` on a file system that all nodes share"
        )


@dataclass
class RolloutComponents:
    """All that rollouts need: enough to evaluate a model."""

    recipe: Recipe
    tokenizer: Any
    validation: list[PreparedPrompt]
    runtime: Runtime
    scheduler: RolloutScheduler
    reward_model: RewardModelGroup | None = field(default=None, kw_only=True)
    baselines: dict[str, float] | None = field(default=None, kw_only=True)
    """Scores of a random and an optimal policy on the validation set; computed at the first validation."""


@dataclass
class RunComponents(RolloutComponents):
    """All that a training run needs."""

    algorithm: ResolvedAlgorithm
    train: list[PreparedPrompt]
    validation_rows: list[PreparedPrompt]
    """Held-out rows with answers, to compute the loss of; only where rows are trained on."""
    sampler: Sampler
    history: RewardHistory | None
    """Rewards of each row so far; only where the curriculum goes by them."""
    num_steps: int
    dtype: str
    """Data type of the model."""
    actor: TrainerGroup[ActorWorker]
    reference: TrainerGroup[PolicyWorker] | None
    teacher: EndpointTeacher | None
    """The teacher of distillation where it is behind an endpoint, instead of a reference."""
    reference_cache: ReferenceCache | None
    """Where rows are trained on with a reference, what was computed of its log-probs."""
    critic: TrainerGroup[CriticWorker] | None
    kl: KLController | None
    publisher: WeightPublisher
    trainer_lock: asyncio.Lock = field(default_factory=asyncio.Lock, kw_only=True)
    """Held by whoever calls the trainers, which compute together and so must all be called for the same things in the
    same order."""
    has_updated: bool = field(default=False, kw_only=True)
    """Whether the policy was updated since the weights were loaded."""

    @cached_property
    def source_names(self) -> list[str]:
        """Names of the training rows' sources, for metrics; empty where there is one source."""
        return several_names([prompt.row for prompt in self.train])


def several_names(rows: Iterable[Row]) -> list[str]:
    """Names of the sources of the rows, where there are several. Rows without a name are in none."""
    names = {row.source_name for row in rows}
    return sorted(names - {""}) if len(names) > 1 else []


@asynccontextmanager
async def open_rollout_components(
    recipe: Recipe, console: Console, model_path: str | None = None
) -> AsyncIterator[RolloutComponents]:
    """Opens what an evaluation needs. `model_path`: another model than the recipe's, such as a checkpoint; the
    tokenizer is its own."""
    if recipe.data.validation is None:
        raise UserError("data.validation: there is nothing to evaluate on")
    if not recipe.validates_by_generation:
        raise UserError("environment: the recipe has none, so there is no reward to score generated answers with")
    if model_path is not None:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model_path})})
    if loads_base_only(recipe):
        raise UserError(
            f"{recipe.model.path} is an adapter, and {recipe.rollout.engine.name} in a process of its own would load "
            "its base model alone: set `rollout.engine=native`, or write the whole model with `corral export --merge`"
        )
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    placement = placement.only(["rollout", "reward_model"])
    recipe = recipe.model_copy(update={"name": f"{recipe.name}-evaluation"})  # logs of a run are its own
    async with open_runtime(recipe, placement, recipe.logging.folder / recipe.name / "logs", console) as runtime:
        tokenizer = await prepare_rewards_and_tokenizer(runtime, recipe, console)
        validation = prompts_of(recipe, "validation", tokenizer, console)
        await try_environments(runtime, recipe, validation, console)
        with console.stage("loading the model"):
            facts = {role: await runtime.build(role, recipe, None) for role in BUILD_ORDER if role in placement.roles}
        of_engine = facts["rollout"][0]
        if warning := of_engine.get("warning"):
            console.warn(warning)
        async with open_scheduler(
            runtime, of_engine["max_sequences"], recipe.rollout.engine.tensor_parallel, console
        ) as scheduler:
            yield RolloutComponents(
                recipe,
                tokenizer,
                validation[: recipe.validation.max_prompts],
                runtime,
                scheduler,
                reward_model=reward_model_of(runtime, recipe),
            )


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
    try_algorithm(algorithm)
    placement, _ = resolve_placement(recipe, algorithm)
    async with AsyncExitStack() as closing, open_workers(recipe, placement, logs, console, lost_nodes) as runtime:
        if resume_from is not None and (blind := await runtime.find_blind(resume_from)):
            raise CheckpointUnseen(resume_from, blind)
        tokenizer = await prepare_rewards_and_tokenizer(runtime, recipe, console)
        if resume_from is not None:
            check_checkpoint_tokens(recipe, tokenizer, resume_from)
        train = prompts_of(recipe, "train", tokenizer, console, with_answers=recipe.trains_on_rows)
        validation, validation_rows = [], []
        if recipe.validates_by_generation:
            validation = prompts_of(recipe, "validation", tokenizer, console)
        if recipe.needs_engine:
            prompts = validation if recipe.trains_on_rows else [*train, *validation]
            await try_environments(runtime, recipe, prompts, console)
        teacher = None
        if recipe.reference.endpoint is not None:
            teacher = await open_teacher(recipe.reference.endpoint, train[0].tokens, tokenizer, closing)
        elif algorithm.needs_teacher or (recipe.trains_on_rows and recipe.reference.path is not None):
            check_reference(recipe, tokenizer)
        if recipe.trains_on_rows and recipe.data.validation is not None:
            validation_rows = prompts_of(recipe, "validation", tokenizer, console, with_answers=True)
        recipe = with_steps(recipe, len(train))
        recipe = await with_mesh_for_devices(recipe, runtime, console)
        assert recipe.schedule.steps is not None
        with console.stage("loading the model"):
            roles = [role for role in BUILD_ORDER if role in placement.roles]
            facts = {role: await runtime.build(role, recipe, resume_from) for role in roles}
        of_engine: dict[str, Any] = facts["rollout"][0] if recipe.needs_engine else {"max_sequences": 0}
        if warning := of_engine.get("warning"):
            console.warn(warning)
        async with open_scheduler(
            runtime, of_engine["max_sequences"], recipe.rollout.engine.tensor_parallel, console
        ) as scheduler:
            dtype = facts["actor"][0]["dtype"]
            meshes = resolve_meshes(recipe, runtime.placement)
            trainers: dict[str, TrainerGroup[Any]] = {
                role: TrainerGroup(runtime.groups[role], mesh) for role, mesh in meshes.items()
            }
            publisher = WeightPublisher(
                trainers["actor"],
                scheduler,
                transfer_kind(recipe, runtime.placement),
                dtype,
                train[0].tokens,
                in_process=recipe.rollout.engine.in_process,
                has_adapters=recipe.model.lora is not None,
                returns_weights=recipe.needs_engine and engine_returns_weights(recipe, runtime.placement),
                senders=first_of_each_node([fact["address"] for fact in facts["actor"]]),
            )
            if recipe.needs_engine:
                await publisher.connect()
                if loads_base_only(recipe, resume_from):
                    await publisher.publish(publisher.version)
            yield RunComponents(
                recipe=recipe,
                tokenizer=tokenizer,
                validation=validation[: recipe.validation.max_prompts],
                runtime=runtime,
                scheduler=scheduler,
                reward_model=reward_model_of(runtime, recipe),
                algorithm=algorithm,
                train=train,
                validation_rows=validation_rows[: recipe.validation.max_prompts],
                sampler=make_sampler(recipe, [prompt.row for prompt in train]),
                history=(
                    RewardHistory(recipe.data.curriculum, len(train), recipe.seed)
                    if recipe.data.curriculum.uses_rewards
                    else None
                ),
                num_steps=recipe.schedule.steps,
                dtype=dtype,
                actor=trainers["actor"],
                reference=trainers.get("reference"),
                teacher=teacher,
                reference_cache=ReferenceCache(recipe.reference.path or recipe.model.path)
                if recipe.trains_on_rows and algorithm.needs_reference
                else None,
                critic=trainers.get("critic"),
                kl=kl_controller(algorithm),
                publisher=publisher,
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
        if sys.platform != "linux":
            raise UserError(
                f"a recipe with a `cluster` section needs Linux, and this is {sys.platform}: without it, or with "
                "`cluster.runtime: local`, the run is one process on one device"
            )
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
    runtime: Runtime, max_sequences: int, devices_per_engine: int, console: Console
) -> AsyncIterator[RolloutScheduler]:
    """`max_sequences`: sequences that an engine decodes at the same time. `console`: where errors of samples are
    printed. Where no engine was built, the scheduler has no workers, and weights are published to nobody."""
    rollout: Group[RolloutWorker] = runtime.groups.get("rollout") or LocalGroup("rollout", [], timeout_s=math.inf)
    max_load = math.inf if rollout.size == 1 else OVERSUBSCRIPTION * max_sequences
    scheduler = RolloutScheduler(rollout, max_load, on_finished=ErrorReport(console.warn).see)
    for rank in range(0, rollout.size, devices_per_engine):
        scheduler.add_worker(rank)
    try:
        yield scheduler
    finally:
        await scheduler.close()


def reward_model_of(runtime: Runtime, recipe: Recipe) -> RewardModelGroup | None:
    group = runtime.groups.get("reward_model")
    return None if group is None else RewardModelGroup(group, recipe.reward_model.shard > 1)


async def prepare_rewards_and_tokenizer(runtime: Runtime, recipe: Recipe, console: Console) -> Any:
    """Builds the rewards and returns the tokenizer. Warns where the model's chat template does not allow that a
    conversation is extended token by token."""
    if recipe.needs_engine:
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


def prompts_of(
    recipe: Recipe, part: Part, tokenizer: Any, console: Console, *, with_answers: bool = False
) -> list[PreparedPrompt]:
    """Prompts to roll out, or whole rows to train on (`with_answers`)."""
    data = recipe.data
    source = data.train if part == "train" else data.validation
    assert source is not None
    rows = load_part(recipe, part, source, console.warn, console.note)
    prompts, counts = prepare_prompts(tokenizer, rows, data, with_answers=with_answers)
    if counts.problems:
        console.warn(f"data.{part}: {describe_skipped(counts.problems, counts.num_rows)}")
    if counts.num_filtered or counts.num_truncated:
        noun = "rows" if with_answers else "prompts"
        console.warn(
            f"data.{part}: {counts.num_filtered} of {counts.num_rows} {noun} left out, {counts.num_truncated} "
            f"truncated, for having more than {data.max_prompt_tokens} tokens"
        )
    return prompts


def first_of_each_node(addresses: Sequence[str]) -> list[int]:
    """Returns the ranks of the workers that are the first at their address."""
    return sorted({address: rank for rank, address in reversed(list(enumerate(addresses)))}.values())


def make_sampler(recipe: Recipe, rows: Sequence[Row]) -> Sampler:
    """Rows of named sources follow each other, in the order of the recipe. Sources without weights are one."""
    named, curriculum = recipe.data.train.sources, recipe.data.curriculum
    sources = [SampledSource(len(rows))]
    if any(one.weight for one in named.values()):
        counts = Counter(row.origin for row in rows)
        sources = [SampledSource(counts[name], one.weight or 0.0) for name, one in named.items()]
        if empty := [name for name in named if not counts[name]]:
            raise UserError(f"data.train.sources.{empty[0]}: no prompt of it is left that fits data.max_prompt_tokens")
    difficulties = None
    if (column := curriculum.order_by) is not None:
        numbers = [number_in(row.extra, column, "`data.curriculum.order_by`", row.where) for row in rows]
        difficulties = [-number for number in numbers] if curriculum.descending else numbers
    return Sampler(sources, recipe.seed, recipe.data.shuffle, difficulties)


async def try_environments(
    runtime: Runtime, recipe: Recipe, prompts: Sequence[PreparedPrompt], console: Console
) -> None:
    """Calls each environment and reward once where it is going to run, before any model is loaded. A benchmark that
    simulates rollouts may have none."""
    rewards: Group[RewardWorker] | None = runtime.groups.get("rewards")
    if rewards is None:
        return
    check_sources(recipe, (prompt.row for prompt in prompts))
    rows = rows_by_tag(recipe, (prompt.row for prompt in prompts))
    report_trial(recipe, await rewards.one(0, RewardWorker.try_out, rows), console.warn)


def loads_base_only(recipe: Recipe, checkpoint: Path | None = None) -> bool:
    """Whether the engine cannot load what the model begins with: one in a process of its own loads whole models, and
    this one is an adapter."""
    return not recipe.rollout.engine.in_process and AdapterFolder.find(str(checkpoint or recipe.model.path)) is not None


async def open_teacher(
    endpoint: TeacherEndpoint, prompt: Sequence[int], tokenizer: Any, closing: AsyncExitStack
) -> EndpointTeacher:
    """Returns a teacher that has the model's tokens, until `closing` ends."""
    teacher = EndpointTeacher(endpoint)
    closing.push_async_callback(teacher.close)
    await teacher.check(prompt, tokenizer)
    return teacher


def check_reference(recipe: Recipe, tokenizer: Any) -> None:
    """Raises where the reference, such as a teacher, reads other tokens than the model: its log-probs would be those of
    other texts."""
    path = recipe.reference.path
    assert path is not None, "the rules see to it that a teacher has one"
    if difference := token_difference(recipe, tokenizer, path):
        raise UserError(f"reference.path: {path} has other tokens than {recipe.model.path}: {difference}")


def check_checkpoint_tokens(recipe: Recipe, tokenizer: Any, checkpoint: Path) -> None:
    """Raises where the checkpoint's model was trained with other tokens than the recipe's model has."""
    if difference := token_difference(recipe, tokenizer, str(checkpoint)):
        raise UserError(f"{checkpoint} was trained with other tokens than {recipe.model.path} has: {difference}")


def token_difference(recipe: Recipe, tokenizer: Any, path: str) -> str | None:
    """Returns a token that is another one in the model at `path`, if there is any."""
    theirs = load_tokenizer(recipe.model.model_copy(update={"path": path, "lora": None})).get_vocab()
    ours = tokenizer.get_vocab()
    other = next((token for token, number in ours.items() if theirs.get(token) != number), None)
    if other is None:
        return None
    return f"{other!r} is number {ours[other]} here and {theirs.get(other, 'no token')} there"


async def with_mesh_for_devices(recipe: Recipe, runtime: Runtime, console: Console) -> Recipe:
    """Returns the recipe with its mesh: where it has none, one for the memory that devices turn out to have."""
    shape, cluster = ModelShape.find(recipe.model.path), recipe.cluster
    if cluster.device_memory is None:
        cluster = cluster.model_copy(update={"device_memory": await runtime.device_memory()})
    chosen, reason = with_default_mesh(recipe.model_copy(update={"cluster": cluster}), runtime.placement, shape)
    if reason is not None and cluster.device_memory != recipe.cluster.device_memory:
        mesh = resolve_meshes(chosen, runtime.placement)["actor"]
        console.note(f"mesh: {describe_mesh(mesh)}; {reason} (each has {cluster.device_memory:.0f} GiB free)")
    return recipe.model_copy(update={"train": chosen.train})


def with_steps(recipe: Recipe, num_rows: int) -> Recipe:
    """Returns the recipe with its number of steps, where it has epochs."""
    schedule = recipe.schedule
    if schedule.steps is None:
        schedule = schedule.model_copy(update={"steps": count_steps(recipe, num_rows), "epochs": None})
    return recipe.model_copy(update={"schedule": schedule})


def kl_controller(algorithm: ResolvedAlgorithm) -> KLController | None:
    if algorithm.kl is None:
        return None
    controller: KLController = algorithm.kl.controller.declaration.function(
        algorithm.kl.coefficient, algorithm.kl.controller.options
    )
    return controller
