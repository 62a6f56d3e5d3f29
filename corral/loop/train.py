"""A run from its start to its end: what is opened, begun again after a loss, and reported when it is over. And the
evaluation of a model alone."""

import asyncio
import logging
import shlex
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from corral.data.plugins import IN_MEMORY
from corral.loop.components import CheckpointUnseen, OpenWorkers, open_components, open_rollout_components, open_runtime
from corral.loop.preflight import check_disk
from corral.loop.resuming import (
    RecipeChange,
    find_changes,
    how_to_go_on,
    refuse_changes,
    refuse_finished,
    refuse_other_steps,
    trained_with,
)
from corral.loop.run_checkpoint import restore, truncate_after
from corral.loop.sample_errors import ErrorCounts, RunStopped
from corral.loop.supervisor import Supervisor
from corral.loop.training_loop import (
    Interrupt,
    Interrupted,
    RunState,
    begin_saving,
    describe_prints,
    finish_saving,
    run_steps,
)
from corral.loop.trajectory_process import open_writer
from corral.loop.validation import show_samples, validate
from corral.observe.console import Console, is_validation, run_log
from corral.observe.curve import describe_training, draw_curve
from corral.observe.run_files import read_metrics
from corral.observe.run_folder import RunFolder
from corral.observe.trackers import check_trackers, make_trackers
from corral.recipe.errors import RunError, RunInterrupted
from corral.recipe.load import dump_recipe
from corral.recipe.plan import Plan, describe_batch, describe_rewards, describe_schedule
from corral.recipe.schema import Recipe
from corral.runtime.group import WorkerLost
from corral.runtime.local_debugger import Debugging
from corral.runtime.presence import announce
from corral.training.checkpoint import find_checkpoint, find_model, read_state, step_folder

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


def train(
    recipe: Recipe,
    plan: Plan,
    console: Console,
    debugging: Debugging = Debugging(),
    interrupt: Interrupt | None = None,
    resume_anyway: bool = False,
) -> Path:
    """Runs the recipe to its end and returns the run folder. `plan`: that of the recipe. `interrupt`: the caller's, if
    it has its own. `resume_anyway`: the run of that name goes on, also where it has become another experiment
    (`resuming.py`). Raises `RunInterrupted` where Ctrl-C has stopped it."""
    interrupt = interrupt or Interrupt(console.warn, debugging.on_ctrl_c)
    with (
        event_loop(console) as runner,
        RunFolder.open(recipe.logging.folder, recipe.name, recipe.checkpoint.resume) as folder,
    ):
        checkpoint = find_checkpoint(folder.checkpoints, recipe.checkpoint.resume)
        changes = [] if checkpoint is None else accepted_changes(checkpoint, folder, recipe, console, resume_anyway)
        recipe_file = folder.write_recipe(dump_recipe(recipe))
        recipe = recipe.model_copy(update={"name": folder.name})  # a new run may have a number behind its name
        folder.trained_with = trained_with(recipe_file, recipe)
        if checkpoint is not None and is_finished(checkpoint, folder, recipe, changes):
            report_finished(checkpoint, folder, recipe, recipe_file, console)
            return folder.path
        check_trackers(recipe.logging)
        check_disk(plan, folder.path, console.warn)
        folder.write_plan(plan.text(), plan.as_dict())
        step = None if checkpoint is None else read_state(checkpoint)["step"]
        announce("controller", folder.name, folder=folder.path.resolve())
        rewards = [f"reward: {line}" for line in describe_rewards(recipe)]
        lines = [*describe_batch(plan), *describe_schedule(plan), *rewards]
        if plan.model_path is not None and not plan.model_path.startswith("fast"):
            lines.append(f"computed on the {plan.model_path}")
        console.banner(folder.name, folder.path, recipe.model.path, lines, step)
        for change in changes:
            console.note(f"changed since: {change}")
        with interrupt, run_log(folder.logs / "main.log", console), console.signs_of_life():
            open_workers = partial(open_runtime, debugging=debugging)
            try:
                runner.run(supervise(recipe, folder, console, interrupt, checkpoint, recipe_file, open_workers))
            except KeyboardInterrupt:
                if interrupt.is_ctrl_c or interrupt.on_request is not None:
                    raise
                console.note("stopped before training: there was nothing to save; the same command again starts it")
    if interrupt.is_ctrl_c:
        raise RunInterrupted
    return folder.path


def accepted_changes(
    checkpoint: Path, folder: RunFolder, recipe: Recipe, console: Console, resume_anyway: bool
) -> list[RecipeChange]:
    """Returns what has changed since the run that the checkpoint is of was trained. Raises where this run was trained
    with something else, or is finished and asked for more; a new run that begins at another's checkpoint may differ."""
    step = int(read_state(checkpoint)["step"])
    changes, note = find_changes(checkpoint, recipe)
    if note is not None:
        console.note(note)
    if is_own(checkpoint, folder):
        if not resume_anyway:
            refuse_changes(changes, folder.path, step)
        if recipe.schedule.steps is None:
            refuse_other_steps(changes, step)
        if is_finished(checkpoint, folder, recipe, changes):
            refuse_finished(changes, folder.path, step)
    return changes


def is_own(checkpoint: Path, folder: RunFolder) -> bool:
    return checkpoint.resolve().is_relative_to(folder.path.resolve())


def is_finished(checkpoint: Path, folder: RunFolder, recipe: Recipe, changes: Sequence[RecipeChange]) -> bool:
    """Whether nothing is left to do, as far as is known before anything is loaded: all steps were made, and the
    validation after the last one."""
    state, steps = read_state(checkpoint), recipe.schedule.steps
    if steps is None and not {change.path[0] for change in changes} & {"schedule", "batch", "data"}:
        steps = state.get("num_steps")  # as many as the epochs were
    step = int(state["step"])
    if steps is None or step < steps or not is_own(checkpoint, folder):
        return False
    validates = recipe.data.validation is not None and recipe.validation.after_training
    return not validates or any(row["step"] == step and is_validation(row) for row in read_rows(folder))


def report_finished(checkpoint: Path, folder: RunFolder, recipe: Recipe, recipe_file: Path, console: Console) -> None:
    step = int(read_state(checkpoint)["step"])
    rows = read_rows(folder)
    validations = [row for row in rows if is_validation(row)]
    console.note(f"{folder.path} is finished: all {step} steps were made. {how_to_go_on(folder.path, step)}")
    console.summary(
        folder.path,
        validations[0] if validations else None,
        validations[-1] if len(validations) > 1 else None,
        folder.curve if folder.curve.exists() else None,
        commands_after(recipe, checkpoint, recipe_file),
        describe_training(rows),
    )


def evaluate(recipe: Recipe, model_path: str | None, console: Console) -> dict[str, float]:
    """Validates any model on a recipe's held-out prompts, and prints the result."""
    model_path = None if model_path is None else find_model(model_path)

    async def evaluate_once() -> dict[str, float]:
        async with open_rollout_components(recipe, console, model_path) as parts:
            result = await validate(parts, console)
        console.validation(model_path or recipe.model.path, result.metrics, result.num_prompts, result.noun)
        show_samples(parts, result, console)
        ErrorCounts.of(result.trajectories).check("evaluation", recipe.tagged_environments, is_first=True)
        return result.metrics

    with event_loop(console) as runner:
        return runner.run(evaluate_once())


@contextmanager
def event_loop(console: Console) -> Iterator[asyncio.Runner]:
    runner = asyncio.Runner()
    try:
        yield runner
    finally:
        console.close()
        close_runner(runner)


def close_runner(runner: asyncio.Runner) -> None:
    """Closes an event loop within a deadline. `Runner.close` would wait for tasks for ever, and an environment may
    ignore that its task is cancelled."""
    tasks = asyncio.all_tasks(runner.get_loop())
    _ = [task.cancel() for task in tasks]  # in a scope of its own, so that no variable keeps a task alive
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # of tasks that had not begun
        if tasks:
            runner.run(asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S))
        if all(task.done() for task in tasks):
            runner.close()
        tasks.clear()


async def supervise(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    interrupt: Interrupt,
    checkpoint: Path | None,
    recipe_file: Path,
    open_workers: OpenWorkers = open_runtime,
) -> None:
    """Runs to the end. A run that has lost a worker it cannot do without begins again at its last checkpoint, on the
    nodes that are left, at most `cluster.max_restarts` times without a new checkpoint in between."""
    lost_nodes: set[str] = set()
    restarts, saved_step, began = 0, -1, False
    unseen: set[Path] = set()
    """Checkpoints that not all workers can load, since the last loss."""
    while True:
        try:
            async with running(recipe, folder, console, interrupt, checkpoint, lost_nodes, open_workers) as run:
                began = True
                run.parts.runtime.on_ending = interrupt.request
                try:
                    await run.supervisor.run(run_steps(run))
                except Interrupted:
                    await run.parts.scheduler.cancel()
                except RunStopped:
                    await run.parts.scheduler.cancel()
                    await finish(run, recipe_file)
                    raise
                await finish(run, recipe_file)
                if run.parts.runtime.ending and not run.is_complete:
                    raise RunError(
                        f"{run.parts.runtime.ending}; all {run.step} steps are saved, and the same command goes on"
                    )
                return
        except CheckpointUnseen as error:
            unseen.add(error.checkpoint)
            earlier = find_checkpoint(folder.checkpoints, "auto", unseen)
            if not began or earlier is None:
                raise
            checkpoint, saved_step = earlier, int(read_state(earlier)["step"])
            console.warn(f"{error}; the run goes on from {earlier.name}")
        except WorkerLost as lost:
            unseen.clear()
            own = find_checkpoint(folder.checkpoints, "auto", hashes=False) if began else None
            step = -1 if own is None else int(read_state(own)["step"])
            restarts = 1 if step > saved_step else restarts + 1
            if lost.node is not None:
                lost_nodes.add(lost.node)
            min_nodes = recipe.cluster.min_nodes or recipe.cluster.nodes
            too_few = recipe.cluster.nodes - len(lost_nodes) < min_nodes
            if too_few or restarts > recipe.cluster.max_restarts or interrupt.requested:
                raise
            saved_step, checkpoint = step, own or checkpoint
            where = "from the beginning" if checkpoint is None else f"from {checkpoint.name}"
            console.warn(f"{lost}")
            console.warn(f"the workers are started again, and the run goes on {where}")


@asynccontextmanager
async def running(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    interrupt: Interrupt,
    checkpoint: Path | None = None,
    lost_nodes: set[str] | None = None,
    open_workers: OpenWorkers = open_runtime,
) -> AsyncIterator[RunState]:
    """Opens a run, ready for its next step; closed when the block ends. `lost_nodes`: addresses; more may be added."""
    state = {} if checkpoint is None else read_state(checkpoint)
    lost = set() if lost_nodes is None else lost_nodes
    interrupt.loop, interrupt.on_request = asyncio.get_running_loop(), None
    own = checkpoint is not None and is_own(checkpoint, folder)
    (folder.logs / "workers.json").unlink(missing_ok=True)  # of a cluster that trained it before
    # Before anything is loaded: a tracker without its key, or whose server does not answer, ends a new run.
    trackers = make_trackers(
        recipe.logging,
        folder,
        folder.name,
        saved_state=state.get("trackers") if own else None,
        config=recipe.model_dump(mode="json"),
        console=console,
    )
    with closing(trackers):
        components = open_components(recipe, console, folder.logs, checkpoint, frozenset(lost), open_workers)
        async with components as parts:
            if checkpoint is not None:
                await restore(parts, checkpoint, state)
            step = int(state.get("step", 0))
            ledger = truncate_after(folder, checkpoint, state, console)
            with open_writer(recipe, folder, parts.tokenizer) as trajectories:
                run = RunState(
                    recipe=recipe,
                    parts=parts,
                    folder=folder,
                    ledger=ledger,
                    console=console,
                    trackers=trackers,
                    trajectories=trajectories,
                    interrupt=interrupt,
                    supervisor=Supervisor(parts, lost),
                    step=step,
                    saved_step=step if own else 0,
                    skipped_in_a_row=int(state.get("skipped_in_a_row", 0)),
                    validations={row["step"]: row for row in read_rows(folder) if is_validation(row)},
                )
                interrupt.on_request = parts.runtime.hurry
                try:
                    yield run
                except BaseException as error:
                    # A checkpoint that is being written is let finish, unless a worker took its part of it along.
                    await end_saving(run, cancel=isinstance(error, WorkerLost) or not isinstance(error, Exception))
                    raise


async def end_saving(run: RunState, cancel: bool) -> None:
    """Waits for the checkpoint that is being written, whatever becomes of it: another error is being reported."""
    run.has_failed = True
    if run.saving is not None:
        _, task = run.saving
        if cancel:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def finish(run: RunState, recipe_file: Path) -> None:
    """Writes the last checkpoint and the picture, and prints what to do next."""
    with run.console.stage("saving a checkpoint"):
        await finish_saving(run)
        is_due = run.recipe.checkpoint.at_end or run.save_is_late or not run.is_complete
        while run.step > run.saved_step and is_due:
            await begin_saving(run)
            await finish_saving(run)  # not written where a trainer was lost meanwhile
    if run.interrupt.requested:
        logger.info("stopped after step %d of %d", run.step, run.parts.num_steps)
    rows = read_rows(run.folder)
    has_curve = run.recipe.logging.curve and bool(rows)
    if has_curve:
        draw_curve(rows, run.folder.curve, run.folder.name)
    first, last = min(run.validations, default=0), max(run.validations, default=0)
    run.console.close()
    run.console.summary(
        run.folder.path,
        run.validations.get(first),
        run.validations.get(last) if last > first else None,
        run.folder.curve if has_curve else None,
        next_commands(run, recipe_file),
        describe_training(rows),
        describe_prints(run.folder),
    )


def next_commands(run: RunState, recipe_file: Path) -> dict[str, str]:
    """Returns commands for the summary."""
    checkpoint = step_folder(run.folder.checkpoints, run.step)
    if not run.is_complete:
        change = ""
        if run.recipe.checkpoint.resume != "auto" and run.step:
            changes = [f"checkpoint.resume={checkpoint}", f"name={run.folder.name}"]
            change = f" with {shlex.join(changes)}"
        where = f"stopped after step {run.step} of {run.parts.num_steps}"
        return {"resume": f"the same command again{change} ({where})"}
    return commands_after(run.recipe, checkpoint, recipe_file) if checkpoint.exists() else {}


def commands_after(recipe: Recipe, checkpoint: Path, recipe_file: Path) -> dict[str, str]:
    """Returns what can be done with the last checkpoint of a run."""
    commands = {
        "evaluate": shlex.join(["corral", "evaluate", str(recipe_file), "--model", str(checkpoint)]),
        "export": shlex.join(["corral", "export", str(checkpoint), "OUT"]),
    }
    if recipe.trains_on_rows:
        commands["RL from here"] = shlex.join(["corral", "train", "RECIPE", f"model.path={checkpoint}"])
    needs_program = any(name.startswith(f"{IN_MEMORY}:") for name in recipe.code_names.values())
    if not recipe.validates_by_generation or needs_program:  # there is nothing to evaluate on, or only a program has it
        del commands["evaluate"]
    return commands


def read_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return read_metrics(folder.metrics) if folder.metrics.exists() else []
