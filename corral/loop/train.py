"""The training loop. Draw, play, score, advantages, learn, publish; everything else here is book-keeping around it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.data.batch import Batch
from corral.data.trajectory import Trajectory
from corral.loop.closing import close_runner
from corral.loop.interrupt import Interrupt, Interrupted
from corral.loop.learn import Learnt, learn
from corral.loop.mend import Mender
from corral.loop.parts import OpenWorkers, Parts, open_parts
from corral.loop.play import Ahead, Played
from corral.loop.record import save_failed_batch, staleness_metrics, step_metrics, trajectory_records
from corral.loop.saving import forget_after, restore, save
from corral.loop.score import advantages, plan_updates, score, steer_kl
from corral.loop.stream import learn_while_playing
from corral.loop.validate import show_samples, validate
from corral.observe.console import Console
from corral.observe.curve import draw_curve
from corral.observe.ledger import Ledger
from corral.observe.lines import held_out_score
from corral.observe.log import run_log
from corral.observe.metrics import read
from corral.observe.run_folder import RunFolder
from corral.observe.trackers import Trackers, make_trackers
from corral.observe.trajectories import TrajectoryWriter
from corral.recipe.errors import RunError
from corral.recipe.load import dump_recipe
from corral.recipe.schema import Recipe
from corral.runtime.group import WorkerLost
from corral.train.checkpoint import find_checkpoint, read_state, step_folder

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3


@dataclass
class Run:
    """A run in progress: its parts, its folder, and where it is."""

    recipe: Recipe
    parts: Parts
    folder: RunFolder
    ledger: Ledger
    console: Console
    trackers: Trackers
    interrupt: Interrupt
    mender: Mender
    step: int = 0
    """Steps made; also the version of the weights."""
    saved_step: int = 0
    """Of the last checkpoint in the run's folder."""
    skipped_in_a_row: int = 0
    """Updates, at the end of what was learnt so far."""
    validations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Those made so far, by step."""
    times: dict[str, float] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.step >= self.parts.num_steps

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[f"time/{stage}_s"] = time.perf_counter() - start


async def steps(run: Run) -> None:
    """The loop. It must read like this, in every mode: `ahead` may play steps to come, and `pipelined` learns from a
    step while it is played."""
    parts, ahead = run.parts, Ahead(run.parts, run.ledger)
    await validate_if_due(run)
    run.console.begin(parts.num_steps, run.step)
    while not run.is_complete and not run.interrupt.requested:
        run.times = {}
        with run.timed("step"):
            ahead.begin(version=run.step)
            if parts.recipe.schedule.pipelined:
                played, batch, metrics, learnt = await learn_as_played(run, ahead)
            else:
                with run.timed("play"):
                    played = await play_now(run, ahead)
                batch = Batch.of(played.trajectories)
                updates = plan_updates(parts, batch)
                with run.timed("score"):
                    await score(parts, batch, updates)
                    metrics = advantages(parts, batch, played)
                with run.timed("learn"):
                    steer_kl(parts, metrics, len(batch))
                    learnt = await learn(parts, batch, updates, run.step + 1)
            run.step += 1
            metrics |= await run.mender.publish(run.step)
        settle(run, played)

        if parts.recipe.schedule.max_staleness:
            metrics |= staleness_metrics(batch, run.step - 1)
        metrics |= step_metrics(played, batch, run.recipe.batch.samples_per_prompt) | learnt.metrics() | run.times
        metrics["speed/tokens_per_s"] = batch.num_generated / run.times["time/step_s"]
        log_step(run, metrics, played.trajectories, batch)
        guard(run, learnt, batch)
        if parts.recipe.schedule.max_staleness:
            ahead.begin(version=run.step)
        await validate_if_due(run)
        await save_if_due(run)


async def play_now(run: Run, ahead: Ahead) -> Played:
    """The step's trajectories. Waits until all are played; a request to stop ends the wait."""
    playing = ahead.playing.pop(run.step + 1)
    with run.console.stage("playing") as progress:
        playing.on_progress = progress.update
        played = await run.interrupt.cuts_short(playing.whole())
    if not played.trajectories:
        raise RunError(nothing_to_learn(run, played))
    return played


async def learn_as_played(run: Run, ahead: Ahead) -> tuple[Played, Batch, dict[str, float], Learnt]:
    playing = ahead.playing.pop(run.step + 1)
    with run.console.stage("playing and learning") as progress, run.timed("play_and_learn"):
        playing.on_progress = progress.update
        played, batch, metrics, learnt = await learn_while_playing(run.parts, playing, run.step + 1, run.interrupt)
    if batch is None:
        raise RunError(nothing_to_learn(run, played))
    return played, batch, metrics, learnt


def settle(run: Run, played: Played) -> None:
    """What became of the step's prompts."""
    run.ledger.trained(run.step, played.ordinals)
    run.ledger.dropped(run.step, played.failed, "environment failed")
    run.ledger.dropped(run.step, played.dull, "equal rewards")


def nothing_to_learn(run: Run, played: Played) -> str:
    if not played.dull:
        return (
            f"step {run.step + 1}: all {played.num_failed} trajectories failed in the environment, the last one with: "
            f"{played.last_error}"
        )
    return (
        f"step {run.step + 1}: dynamic sampling found no group with different rewards in "
        f"{run.parts.algorithm.max_rounds} rounds: the task is too easy or too hard for the model, "
        "or raise algorithm.dynamic_sampling.max_rounds"
    )


def guard(run: Run, learnt: Learnt, batch: Batch) -> None:
    """A number that is not finite never reached the weights; the batch is kept, and three in a row end the run."""
    for finite in learnt.finite:
        run.skipped_in_a_row = 0 if finite else run.skipped_in_a_row + 1
    if not learnt.skipped:
        return
    path = run.folder.failures / f"step_{run.step:06d}.npz"
    save_failed_batch(batch, path)
    logger.warning("step %d: update skipped, %s; the batch is in %s", run.step, learnt.skipped[-1], path)
    if run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise RunError(
            f"step {run.step}: {run.skipped_in_a_row} updates in a row were not finite ({learnt.skipped[-1]}); "
            f"the batches are in {run.folder.failures}. Lower optimiser.learning_rate, or look for the cause in the "
            "rewards"
        )


async def validate_if_due(run: Run) -> None:
    """Also after a resume: the run may have been stopped between a step and its validation."""
    when = name_of_validation(run)
    if when is None or run.step in run.validations or not run.parts.validation:
        return
    started = time.perf_counter()
    result = await run.interrupt.cuts_short(validate(run.parts, run.console))
    run.console.validation(when, result.metrics, result.num_prompts)
    show_samples(run.parts, result, run.console)
    run.trackers.log(run.step, {**result.metrics, "time/validate_s": time.perf_counter() - started})
    run.validations[run.step] = result.metrics
    if run.recipe.logging.trajectories:
        writer = TrajectoryWriter(run.folder.trajectories)
        writer.write(run.step, trajectory_records(result.trajectories, run.parts.tokenizer), part="validation")


def name_of_validation(run: Run) -> str | None:
    """Of the one that belongs after the steps made so far, if any does."""
    settings = run.recipe.validation
    if run.step == 0:
        return "before training" if settings.before_training else None
    if run.is_complete:
        return "after training" if settings.after_training else None
    due = settings.every and run.step % settings.every == 0
    return f"after step {run.step}" if due else None


async def save_if_due(run: Run) -> None:
    every = run.recipe.checkpoint.every
    if every and run.step % every == 0 and not run.is_complete:
        await save_run(run)


async def save_run(run: Run) -> None:
    state = {"skipped_in_a_row": run.skipped_in_a_row, "trackers": run.trackers.state()}
    await save(run.parts, run.ledger, run.folder, run.step, state)
    run.saved_step = run.step


def log_step(run: Run, metrics: dict[str, float], trajectories: list[Trajectory], batch: Batch) -> None:
    run.trackers.log(run.step, metrics)
    for trajectory in trajectories:
        if trajectory.error:
            logger.info(
                "step %d, prompt %d, sample %d: %s", run.step, trajectory.ordinal, trajectory.sample, trajectory.error
            )
    if run.recipe.logging.trajectories:
        writer = TrajectoryWriter(run.folder.trajectories)
        writer.write(run.step, trajectory_records(trajectories, run.parts.tokenizer, batch))


async def finish(run: Run, recipe_file: Path) -> None:
    """The last checkpoint, the picture, and what to do next."""
    if run.step > run.saved_step and (run.recipe.checkpoint.at_end or not run.is_complete):
        with run.console.stage("saving a checkpoint"):
            await save_run(run)
    rows = read_rows(run.folder)
    if rows:
        draw_curve(rows, run.folder.curve, run.folder.name)
    first, last = min(run.validations, default=0), max(run.validations, default=0)
    run.console.close()
    run.console.summary(
        run.folder.path,
        run.validations.get(first),
        run.validations.get(last) if last > first else None,
        run.folder.curve if rows else None,
        what_next(run, recipe_file),
    )


def what_next(run: Run, recipe_file: Path) -> dict[str, str]:
    """Commands for the summary."""
    checkpoint = step_folder(run.folder.checkpoints, run.step)
    if not run.is_complete:
        change = ""
        if run.recipe.checkpoint.resume != "auto" and run.step:
            change = f" with checkpoint.resume={checkpoint} name={run.folder.name}"
        where = f"stopped after step {run.step} of {run.parts.num_steps}"
        return {"resume": f"the same command again{change} ({where})"}
    if not checkpoint.exists():
        return {}
    return {
        "evaluate": f"corral evaluate {recipe_file} --model {checkpoint}",
        "export": f"corral export {checkpoint} OUT",
    }


def read_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return read(folder.metrics) if folder.metrics.exists() else []


# --- starting, and starting again


def train(recipe: Recipe, plan_text: str, plan_lines: list[str], console: Console) -> Path:
    """Runs the recipe to its end and returns the run folder."""
    runner = asyncio.Runner()
    try:
        with RunFolder.open(Path(recipe.logging.runs), recipe.name, recipe.checkpoint.resume) as folder:
            checkpoint = find_checkpoint(folder.checkpoints, recipe.checkpoint.resume)
            recipe_file = folder.write_recipe(dump_recipe(recipe))
            folder.write_plan(plan_text)
            step = None if checkpoint is None else read_state(checkpoint)["step"]
            console.banner(folder.name, folder.path, recipe.model.path, plan_lines, step)
            with Interrupt(console.warn) as interrupt, run_log(folder.logs / "main.log", console):
                runner.run(supervise(recipe, folder, console, interrupt, checkpoint, recipe_file))
        return folder.path
    finally:
        console.close()
        close_runner(runner)


async def supervise(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    interrupt: Interrupt,
    checkpoint: Path | None,
    recipe_file: Path,
) -> None:
    """Runs to the end. A run that has lost a worker it cannot do without begins again at its last checkpoint, on the
    nodes that are left."""
    lost_nodes: frozenset[str] = frozenset()
    restarts, saved_step = 0, -1
    while True:
        try:
            async with running(recipe, folder, console, interrupt, checkpoint, lost_nodes) as run:
                try:
                    await run.mender.guard(steps(run))
                except Interrupted:
                    await run.parts.playground.cancel()
                await finish(run, recipe_file)
                return
        except WorkerLost as lost:
            own = find_checkpoint(folder.checkpoints, "auto")
            step = -1 if own is None else int(read_state(own)["step"])
            restarts = 1 if step > saved_step else restarts + 1
            lost_nodes |= {lost.node} if lost.node is not None else set()
            least = recipe.cluster.min_nodes or recipe.cluster.nodes
            too_few = recipe.cluster.nodes - len(lost_nodes) < least
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
    lost_nodes: frozenset[str] = frozenset(),
    open_workers: OpenWorkers | None = None,
) -> AsyncIterator[Run]:
    """A run, ready for its next step; closed when the block ends."""
    state = {} if checkpoint is None else read_state(checkpoint)
    async with open_parts(recipe, console, folder.logs, checkpoint, lost_nodes, open_workers) as parts:
        if checkpoint is not None:
            await restore(parts, checkpoint, state)
        step = int(state.get("step", 0))
        ledger = forget_after(folder, checkpoint, step if state else -1, console)
        own = checkpoint is not None and checkpoint.resolve().is_relative_to(folder.path.resolve())
        trackers = make_trackers(
            recipe.logging,
            folder,
            folder.name,
            saved_state=state.get("trackers") if own else None,
            config=recipe.model_dump(mode="json"),
            console=console,
        )
        try:
            yield Run(
                recipe=recipe,
                parts=parts,
                folder=folder,
                ledger=ledger,
                console=console,
                trackers=trackers,
                interrupt=interrupt,
                mender=Mender(parts, step),
                step=step,
                saved_step=step if own else 0,
                skipped_in_a_row=int(state.get("skipped_in_a_row", 0)),
                validations={row["step"]: row for row in read_rows(folder) if held_out_score(row) is not None},
            )
        finally:
            trackers.close()
