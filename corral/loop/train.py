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
from corral.loop.parts import Parts, build_parts
from corral.loop.record import save_failed_batch, step_metrics, trajectory_records
from corral.loop.stages import Learnt, Played, advantages, learn, plan_updates, play, score
from corral.loop.validate import show_samples, validate
from corral.observe.console import Console
from corral.observe.curve import draw_curve
from corral.observe.log import run_log
from corral.observe.metrics import MetricsFile, read
from corral.observe.run_folder import RunFolder
from corral.observe.trackers import Trackers, make_trackers
from corral.observe.trajectories import TrajectoryWriter
from corral.recipe.errors import RunError, UserError
from corral.recipe.load import dump_recipe
from corral.recipe.schema import Recipe
from corral.train.checkpoint import find_checkpoint, prune, read_state, step_folder, write_checkpoint
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
    skipped_in_a_row: int = 0
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    """The first and the last validation: `before` and `after`."""
    times: dict[str, float] = field(default_factory=dict)

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
        folder.write_recipe(dump_recipe(recipe))
        folder.write_plan(plan_text)
        console.banner(folder.name, folder.path, recipe.model.path, plan_lines, state.get("step"))
        with run_log(folder.logs / "main.log", console), Interrupt(console.warn) as interrupt:
            run = start(recipe, folder, console, interrupt, checkpoint, state)
            try:
                with suppress(Interrupted):
                    steps(run)
                finish(run)
            finally:
                run.trackers.close()
                run.parts.close()
                console.close()
    return folder.path


def steps(run: Run) -> None:
    """The loop. It must read like this."""
    parts = run.parts
    if run.step == 0 and run.recipe.validation.before_training:
        validate_now(run, "before training")
    run.console.begin(parts.num_steps, run.step)
    while run.step < parts.num_steps and not run.interrupt.requested:
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
        between_steps(run)


def play_now(run: Run) -> Played:
    before = run.parts.sampler.state()
    try:
        with run.interrupt.cuts_short(run.parts.runner), run.console.stage("playing") as progress:
            played = play(run.parts, progress)
    except Interrupted:
        run.parts.sampler.load_state(before)  # not trained on: to be drawn again
        raise
    if not played.trajectories:
        raise RunError(nothing_to_learn(run, played.num_failed))
    return played


def nothing_to_learn(run: Run, num_failed: int) -> str:
    if num_failed:
        return f"step {run.step + 1}: all {num_failed} trajectories failed in the environment; see {run.folder.logs}/main.log"
    return (
        f"step {run.step + 1}: dynamic sampling found no group with different rewards in "
        f"{run.parts.algorithm.max_rounds} rounds: the task is too easy or too hard for the model, "
        "or raise algorithm.dynamic_sampling.max_rounds"
    )


def guard(run: Run, learnt: Learnt, batch: Batch) -> None:
    """A number that is not finite never reached the weights; the batch is kept, and three in a row end the run."""
    if not learnt.skipped:
        run.skipped_in_a_row = 0
        return
    run.skipped_in_a_row += len(learnt.skipped)
    path = run.folder.failures / f"step_{run.step:06d}.npz"
    save_failed_batch(batch, path)
    logger.warning("step %d: update skipped, %s; the batch is in %s", run.step, learnt.skipped[-1], path)
    if run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise RunError(
            f"step {run.step}: {run.skipped_in_a_row} updates in a row were not finite ({learnt.skipped[-1]}); "
            f"the batches are in {run.folder.failures}. Lower optimiser.learning_rate, or look for the cause in the rewards"
        )


def between_steps(run: Run) -> None:
    recipe, last = run.recipe, run.step == run.parts.num_steps
    if recipe.validation.every and run.step % recipe.validation.every == 0 and not last:
        validate_now(run, f"after step {run.step}")
    if recipe.checkpoint.every and run.step % recipe.checkpoint.every == 0 and not last:
        save(run)


def finish(run: Run) -> None:
    """The last validation, the last checkpoint, the picture, and what to do next."""
    complete = run.step == run.parts.num_steps
    if complete and run.recipe.validation.after_training:
        with suppress(Interrupted):
            validate_now(run, "after training")
    if run.step and (run.recipe.checkpoint.at_end or not complete):
        with run.console.stage("saving a checkpoint"):
            save(run)
    rows = read(run.folder.metrics)
    if rows:
        draw_curve(rows, run.folder.curve, run.folder.name)
    folder, checkpoint = run.folder.path, step_folder(run.folder.checkpoints, run.step)
    commands = {}
    if not complete:
        commands["resume"] = f"the same command again (stopped after step {run.step} of {run.parts.num_steps})"
    elif checkpoint.exists():
        commands["evaluate"] = f"corral evaluate {folder / 'recipe.yaml'} --model {checkpoint}"
        commands["export"] = f"corral export {checkpoint} OUT"
    run.console.close()
    run.console.summary(
        folder,
        run.held_out.get("before"),
        run.held_out.get("after"),
        run.folder.curve if rows else None,
        commands,
    )


def validate_now(run: Run, when: str) -> None:
    if not run.parts.validation:
        return
    started = time.perf_counter()
    with run.interrupt.cuts_short(run.parts.runner):
        result = validate(run.parts, run.console)
    run.console.validation(when, result.metrics, result.num_prompts)
    show_samples(run.parts, result, run.console)
    run.trackers.log(run.step, {**result.metrics, "time/validate_s": time.perf_counter() - started})
    run.held_out["before" if when == "before training" else "after"] = result.metrics
    if run.recipe.logging.trajectories:
        writer = TrajectoryWriter(run.folder.trajectories)
        writer.write(run.step, trajectory_records(result.trajectories, run.parts.tokenizer), part="validation")


def log_step(run: Run, metrics: dict[str, float], trajectories: list[Trajectory], batch: Batch) -> None:
    run.trackers.log(run.step, metrics)
    for trajectory in trajectories:
        if trajectory.error:
            logger.info("step %d, prompt %d, sample %d: %s", run.step, trajectory.ordinal, trajectory.sample, trajectory.error)
    if run.recipe.logging.trajectories:
        writer = TrajectoryWriter(run.folder.trajectories)
        writer.write(run.step, trajectory_records(trajectories, run.parts.tokenizer, batch))


# --- starting, saving and resuming


def start(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    interrupt: Interrupt,
    checkpoint: Path | None,
    state: dict[str, Any],
) -> Run:
    parts = build_parts(recipe, console, checkpoint)
    MetricsFile(folder.metrics).truncate_after(state.get("step", -1))
    TrajectoryWriter(folder.trajectories).truncate_after(state.get("step", -1))
    trackers = make_trackers(
        recipe.logging,
        folder,
        folder.name,
        saved_state=state.get("trackers"),
        config=recipe.model_dump(mode="json"),
        console=console,
    )
    run = Run(recipe, parts, folder, console, trackers, interrupt)
    if checkpoint is not None:
        restore(run, checkpoint, state)
    return run


def save(run: Run) -> None:
    """Everything needed to go on as if nothing had happened. The random state is the seed and the sampler's position:
    every draw is a function of these, so there is no generator to save."""
    parts = run.parts

    def write(work: Path) -> None:
        parts.actor.model.save_pretrained(work)
        parts.tokenizer.save_pretrained(work)
        (work / "actor").mkdir()
        parts.actor.save(work / "actor")
        if parts.critic is not None:
            (work / "critic").mkdir()
            parts.critic.save(work / "critic")
            save_tensors(dict(parts.critic.model.named_parameters()), work / "critic" / "model.safetensors")

    state = {
        "step": run.step,
        "seed": run.recipe.seed,
        "sampler": parts.sampler.state(),
        "kl": None if parts.kl is None else parts.kl.state(),
        "skipped_in_a_row": run.skipped_in_a_row,
        "held_out": run.held_out,
        "trackers": run.trackers.state(),
    }
    try:
        write_checkpoint(step_folder(run.folder.checkpoints, run.step), write, state)
    except OSError as error:
        raise RunError(
            f"the checkpoint of step {run.step} could not be written ({error.strerror or error}); "
            f"earlier ones in {run.folder.checkpoints} are as they were"
        ) from error
    prune(run.folder.checkpoints, run.recipe.checkpoint.keep)


def restore(run: Run, checkpoint: Path, state: dict[str, Any]) -> None:
    """The model was loaded from the checkpoint already; this is the rest."""
    parts = run.parts
    if state["seed"] != run.recipe.seed:
        raise UserError(f"{checkpoint} was made with seed {state['seed']}; the recipe says {run.recipe.seed}")
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
    parts.sampler.load_state(state["sampler"])
    run.step = int(state["step"])
    run.skipped_in_a_row = int(state["skipped_in_a_row"])
    run.held_out = state["held_out"]
    parts.engine.load((), version=run.step)
