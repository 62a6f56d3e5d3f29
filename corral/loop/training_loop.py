"""The training loop. Draw, play, score, advantages, learn, publish; everything else here is book-keeping around it."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from corral.data.batch import Batch
from corral.data.trajectory import Trajectory
from corral.loop.advantages_step import advantages, plan_updates, score, steer_kl
from corral.loop.components import RunComponents
from corral.loop.interrupt import Interrupt
from corral.loop.pipelined import train_while_rolling_out
from corral.loop.rollout_step import AsyncRollouts, RolloutResult
from corral.loop.run_checkpoint import save
from corral.loop.step_records import save_failed_batch, staleness_metrics, step_metrics, trajectory_records
from corral.loop.supervisor import Supervisor
from corral.loop.update import TrainResult, learn
from corral.loop.validation import show_samples, validate
from corral.observe.console import Console
from corral.observe.ledger import Ledger
from corral.observe.run_folder import RunFolder
from corral.observe.trackers import Trackers
from corral.observe.trajectories import TrajectoryWriter
from corral.recipe.errors import RunError
from corral.recipe.schema import Recipe

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3


@dataclass
class Run:
    """A run in progress: its parts, its folder, and where it is."""

    recipe: Recipe
    parts: RunComponents
    folder: RunFolder
    ledger: Ledger
    console: Console
    trackers: Trackers
    interrupt: Interrupt
    mender: Supervisor
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
    step while it is played. Who asks the trainers for anything holds `trainers`."""
    parts, ahead, trainers = run.parts, AsyncRollouts(run.parts, run.ledger), run.mender.trainers
    await validate_if_due(run)
    run.console.begin(parts.num_steps, run.step)
    while not run.is_complete and not run.interrupt.requested:
        run.times = {}
        with run.timed("step"):
            ahead.begin(version=run.step)
            if parts.recipe.schedule.pipelined:
                played, batch, metrics, learnt = await rollout_and_train(run, ahead)
            else:
                with run.timed("rollout"):
                    played = await finish_rollout(run, ahead)
                batch = Batch.of(played.trajectories)
                updates = plan_updates(parts, batch)
                async with trainers:
                    with run.timed("logprobs"):
                        await score(parts, batch, updates)
                        metrics = advantages(parts, batch, played)
                    with run.timed("train"):
                        learnt = await learn(parts, batch, updates, run.step + 1)
            steer_kl(parts, metrics, len(batch))
            run.step = run.mender.version = run.step + 1
            async with trainers:
                metrics |= await run.mender.publish()
        settle(run, played, learnt)

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


async def finish_rollout(run: Run, ahead: AsyncRollouts) -> RolloutResult:
    """The step's trajectories. Waits until all are played; a request to stop ends the wait."""
    playing = ahead.playing.pop(run.step + 1)
    with run.console.stage("playing") as progress:
        playing.on_progress = progress.update
        played = await run.interrupt.cuts_short(playing.whole())
    if not played.trajectories:
        raise RunError(nothing_to_learn(run, played))
    return played


async def rollout_and_train(
    run: Run, ahead: AsyncRollouts
) -> tuple[RolloutResult, Batch, dict[str, float], TrainResult]:
    playing = ahead.playing.pop(run.step + 1)
    with run.console.stage("playing and learning") as progress, run.timed("rollout_and_train"):
        playing.on_progress = progress.update
        played, batch, metrics, learnt = await train_while_rolling_out(
            run.parts, playing, run.step + 1, run.interrupt, run.mender.trainers
        )
    if batch is None:
        raise RunError(nothing_to_learn(run, played))
    return played, batch, metrics, learnt


def settle(run: Run, played: RolloutResult, learnt: TrainResult) -> None:
    """What became of the step's prompts."""
    if learnt.finite and not any(learnt.finite):
        run.ledger.dropped(run.step, played.prompt_ids, "update not finite")
    elif learnt.too_far and len(learnt.too_far) == len(learnt.finite):
        run.ledger.dropped(run.step, played.prompt_ids, "mean ratio too high")
    else:
        run.ledger.trained(run.step, played.prompt_ids)
    run.ledger.dropped(run.step, played.failed, "environment failed")
    run.ledger.dropped(run.step, played.zero_variance, "equal rewards")


def nothing_to_learn(run: Run, played: RolloutResult) -> str:
    if not played.zero_variance:
        return (
            f"step {run.step + 1}: all {played.num_failed} trajectories failed in the environment, the last one with: "
            f"{played.last_error}"
        )
    return (
        f"step {run.step + 1}: dynamic sampling found no group with different rewards in "
        f"{run.parts.algorithm.max_rounds} rounds: the task is too easy or too hard for the model, "
        "or raise algorithm.dynamic_sampling.max_rounds"
    )


def guard(run: Run, learnt: TrainResult, batch: Batch) -> None:
    """Says which updates were not made. A number that is not finite never reached the weights; the batch is kept, and
    three in a row end the run."""
    if learnt.too_far:
        num_skipped, num_updates = len(learnt.too_far), len(learnt.finite)
        logger.warning("step %d: %d of %d updates skipped, %s", run.step, num_skipped, num_updates, learnt.too_far[-1])
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
            f"the batches are in {run.folder.failures}. Lower optimizer.learning_rate, or look for the cause in the "
            "rewards"
        )


async def validate_if_due(run: Run) -> None:
    """Also after a resume: the run may have been stopped between a step and its validation."""
    when = name_of_validation(run)
    if when is None or run.step in run.validations or not run.parts.validation:
        return
    started = time.perf_counter()
    result = await run.interrupt.cuts_short(validate(run.parts, run.console))
    run.console.validation(when, result.metrics, result.num_prompts, result.noun)
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
    async with run.mender.trainers:
        await save(run.parts, run.ledger, run.folder, run.step, state)
    run.saved_step = run.step


def log_step(run: Run, metrics: dict[str, float], trajectories: list[Trajectory], batch: Batch) -> None:
    run.trackers.log(run.step, metrics)
    for trajectory in trajectories:
        if trajectory.error:
            logger.info(
                "step %d, prompt %d, sample %d: %s", run.step, trajectory.prompt_id, trajectory.sample, trajectory.error
            )
    if run.recipe.logging.trajectories:
        writer = TrajectoryWriter(run.folder.trajectories)
        writer.write(run.step, trajectory_records(trajectories, run.parts.tokenizer, batch))
