"""The training loop. Draw, play, score, advantages, learn, publish; everything else here is book-keeping around it."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from corral.data.batch import Batch
from corral.data.trajectory import Trajectory
from corral.loop.interrupt import Interrupt, Interrupted
from corral.loop.learn import Learnt, learn
from corral.loop.parts import Parts, build_parts
from corral.loop.play import Played, play
from corral.loop.record import save_failed_batch, step_metrics, trajectory_records
from corral.loop.score import advantages, plan_updates, score
from corral.loop.validate import show_samples, validate
from corral.observe.console import Console
from corral.observe.curve import draw_curve
from corral.observe.lines import held_out_score
from corral.observe.log import run_log
from corral.observe.metrics import MetricsFile, read
from corral.observe.run_folder import RunFolder
from corral.observe.trackers import Trackers, make_trackers
from corral.observe.trajectories import TrajectoryWriter
from corral.recipe.errors import RunError, UserError
from corral.recipe.load import dump_recipe
from corral.recipe.schema import Recipe
from corral.train.checkpoint import (
    find_checkpoint,
    prune,
    read_state,
    set_aside_after,
    step_folder,
    write_checkpoint,
    write_model,
)
from corral.train.tensors import load_tensors, save_tensors

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3


@dataclass
class Run:
    """A run in progress: its parts, its folder, and where it is."""

    recipe: Recipe
    parts: Parts
    folder: RunFolder
    console: Console
    trackers: Trackers
    interrupt: Interrupt
    step: int = 0
    """Steps made."""
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


def train(recipe: Recipe, plan_text: str, plan_lines: list[str], console: Console) -> Path:
    """Runs the recipe to its end and returns the run folder."""
    with RunFolder.open(Path(recipe.logging.runs), recipe.name, recipe.checkpoint.resume) as folder:
        checkpoint = find_checkpoint(folder.checkpoints, recipe.checkpoint.resume)
        state = {} if checkpoint is None else read_state(checkpoint)
        recipe_file = folder.write_recipe(dump_recipe(recipe))
        folder.write_plan(plan_text)
        console.banner(folder.name, folder.path, recipe.model.path, plan_lines, state.get("step"))
        with (
            Interrupt(console.warn) as interrupt,
            run_log(folder.logs / "main.log", console),
            running(recipe, folder, console, interrupt, checkpoint, state) as run,
        ):
            with suppress(Interrupted):
                steps(run)
            finish(run, recipe_file)
    return folder.path


def steps(run: Run) -> None:
    """The loop. It must read like this."""
    parts = run.parts
    validate_if_due(run)
    run.console.begin(parts.num_steps, run.step)
    while not run.is_complete and not run.interrupt.requested:
        started = time.perf_counter()
        with run.timed("play"):
            played = play_now(run)
        batch = Batch.of(played.trajectories)
        updates = plan_updates(parts, batch)
        with run.timed("score"):
            score(parts, batch, updates)
            metrics = advantages(parts, batch, played)
        with run.timed("learn"):
            learnt = learn(parts, batch, updates, run.step + 1)
        parts.engine.load((), version=run.step + 1)
        run.step += 1

        metrics |= step_metrics(played, batch, run.recipe.batch.samples_per_prompt) | learnt.metrics()
        run.times["time/step_s"] = time.perf_counter() - started
        metrics |= run.times | {"speed/tokens_per_s": batch.num_generated / run.times["time/step_s"]}
        log_step(run, metrics, played.trajectories, batch)
        guard(run, learnt, batch)
        validate_if_due(run)
        save_if_due(run)


def play_now(run: Run) -> Played:
    before = run.parts.sampler.state()
    try:
        with run.interrupt.cuts_short(run.parts.runner), run.console.stage("playing") as progress:
            played = play(run.parts, progress)
    except Interrupted:
        run.parts.sampler.load_state(before)  # not trained on: to be drawn again
        raise
    if not played.trajectories:
        raise RunError(nothing_to_learn(run, played))
    return played


def nothing_to_learn(run: Run, played: Played) -> str:
    if not played.num_dull_groups:
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


def validate_if_due(run: Run) -> None:
    """Also after a resume: the run may have been stopped between a step and its validation."""
    when = name_of_validation(run)
    if when is None or run.step in run.validations or not run.parts.validation:
        return
    started = time.perf_counter()
    with run.interrupt.cuts_short(run.parts.runner):
        result = validate(run.parts, run.console)
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


def save_if_due(run: Run) -> None:
    every = run.recipe.checkpoint.every
    if every and run.step % every == 0 and not run.is_complete:
        save(run)


def finish(run: Run, recipe_file: Path) -> None:
    """The last checkpoint, the picture, and what to do next."""
    if run.step > run.saved_step and (run.recipe.checkpoint.at_end or not run.is_complete):
        with run.console.stage("saving a checkpoint"):
            save(run)
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


# --- starting, saving and resuming


@contextmanager
def running(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    interrupt: Interrupt,
    checkpoint: Path | None,
    state: dict[str, Any],
) -> Iterator[Run]:
    """A run, ready for its next step; closed when the block ends."""
    parts = build_parts(recipe, console, checkpoint)
    try:
        if checkpoint is not None:
            restore(parts, checkpoint, state)
        forget_after(folder, state.get("step", -1), console)
        own = checkpoint is not None and checkpoint.resolve().is_relative_to(folder.path.resolve())
        trackers = make_trackers(
            recipe.logging,
            folder,
            folder.name,
            saved_state=state.get("trackers") if own else None,
            config=recipe.model_dump(mode="json"),
            console=console,
        )
        step = int(state.get("step", 0))
        try:
            yield Run(
                recipe=recipe,
                parts=parts,
                folder=folder,
                console=console,
                trackers=trackers,
                interrupt=interrupt,
                step=step,
                saved_step=step if own else 0,
                skipped_in_a_row=int(state.get("skipped_in_a_row", 0)),
                validations={row["step"]: row for row in read_rows(folder) if held_out_score(row) is not None},
            )
        finally:
            trackers.close()
    finally:
        parts.close()
        console.close()


def forget_after(folder: RunFolder, step: int, console: Console) -> None:
    """What a run did after the checkpoint that it goes on from, it will do again. Without one it is kept aside."""
    if step < 0 and folder.holds_run:
        console.warn(f"there is no checkpoint to go on from; what the run did before is in {folder.set_aside()}")
    MetricsFile(folder.metrics).truncate_after(step)
    TrajectoryWriter(folder.trajectories).truncate_after(step)
    for checkpoint, problem in set_aside_after(folder.checkpoints, step):
        console.warn(
            f"{checkpoint} is not used ({problem or 'the run goes on from an earlier one'}); renamed, not deleted"
        )


def save(run: Run) -> None:
    """Everything needed to go on as if nothing had happened. The random state is the seed and the sampler's position:
    every draw is a function of these, so there is no generator to save."""
    parts = run.parts

    def write(work: Path) -> None:
        write_model(parts.actor.model, parts.tokenizer, work)
        (work / "actor").mkdir()
        parts.actor.save(work / "actor")
        if parts.critic is not None:
            (work / "critic").mkdir()
            parts.critic.save(work / "critic")
            save_tensors(dict(parts.critic.model.named_parameters()), work / "critic" / "model.safetensors")

    state = {
        "step": run.step,
        "seed": run.recipe.seed,
        "dtype": dtype_of(parts),
        "sampler": parts.sampler.state(),
        "kl": None if parts.kl is None else parts.kl.state(),
        "skipped_in_a_row": run.skipped_in_a_row,
        "trackers": run.trackers.state(),
    }
    try:
        write_checkpoint(step_folder(run.folder.checkpoints, run.step), write, state)
    except OSError as error:
        raise RunError(
            f"the checkpoint of step {run.step} could not be written ({error.strerror or error}); "
            f"earlier ones in {run.folder.checkpoints} are as they were"
        ) from error
    run.saved_step = run.step
    prune(run.folder.checkpoints, run.recipe.checkpoint.keep)


def restore(parts: Parts, checkpoint: Path, state: dict[str, Any]) -> None:
    """The model was loaded from the checkpoint already; this is the rest."""
    seed = parts.recipe.seed
    if state["seed"] != seed:
        raise UserError(f"{checkpoint} was made with seed {state['seed']}; the recipe says {seed}")
    if state["dtype"] != dtype_of(parts):
        raise UserError(f"{checkpoint} was made with model.dtype {state['dtype']}; now it is {dtype_of(parts)}")
    parts.sampler.load_state(state["sampler"])
    parts.actor.load(checkpoint / "actor")
    if parts.critic is not None:
        if not (checkpoint / "critic").is_dir():
            raise UserError(f"{checkpoint} has no critic; it was made with another algorithm")
        own = dict(parts.critic.model.named_parameters())
        with torch.no_grad():
            for name, tensor in load_tensors(checkpoint / "critic" / "model.safetensors").items():
                own[name].copy_(tensor)
        parts.critic.load(checkpoint / "critic")
    if parts.kl is not None and state["kl"] is not None:
        parts.kl.load_state(state["kl"])
    parts.engine.load((), version=int(state["step"]))


def dtype_of(parts: Parts) -> str:
    return str(parts.actor.model.dtype).removeprefix("torch.")
