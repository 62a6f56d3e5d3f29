"""The training loop: rollout, log-probs and values, advantages, training, publishing; all else here is book-keeping."""

import asyncio
import logging
import math
import signal
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from corral.data.batch import Batch
from corral.data.sampler import SKIP_REASONS
from corral.loop.components import RunComponents, several_names
from corral.loop.rollout_step import (
    AsyncRollouts,
    PendingStep,
    RolloutResult,
    row_metrics,
    source_metrics,
    step_metrics,
)
from corral.loop.run_checkpoint import begin_save
from corral.loop.sample_errors import ErrorCounts, RunStopped
from corral.loop.supervisor import Supervisor
from corral.loop.train_step import StepTraining, TrainResult, compute_logprobs_and_values, update_kl_coefficient
from corral.loop.trajectory_records import (
    BackgroundWriter,
    StepTrajectories,
    asked_of,
    step_samples,
)
from corral.loop.validation import ValidationResult, show_samples, validate, validation_loss
from corral.observe.console import Console
from corral.observe.ledger import Ledger
from corral.observe.run_files import Trackers
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryWriter
from corral.recipe.errors import RunError
from corral.recipe.schema import Recipe
from corral.runtime.group import WorkerLost
from corral.training.checkpoint import score_of

logger = logging.getLogger(__name__)

MAX_SKIPPED_IN_A_ROW = 3
IDLE_STEPS = (3, 30, 300)
"""After so many steps in a row without anything to train on there is a warning."""


@dataclass
class RunState:
    """A run in progress: its components, its folder, and where it is."""

    recipe: Recipe
    parts: RunComponents
    folder: RunFolder
    ledger: Ledger
    console: Console
    trackers: Trackers
    trajectories: BackgroundWriter
    interrupt: "Interrupt"
    supervisor: Supervisor
    step: int = 0
    """Number of steps made; also the version of the weights."""
    saved_step: int = 0
    """Step of the last checkpoint in the run's folder."""
    saving: "tuple[int, asyncio.Task[None]] | None" = None
    """Step of a checkpoint that is being written, and the task that does it."""
    saved_at: float = field(default_factory=time.monotonic)
    """When that was, or when this process began with the run."""
    has_failed: bool = False
    """Whether the run ends with an error."""
    skipped_in_a_row: int = 0
    """Number of updates that were skipped, at the end of the training so far."""
    save_is_late: bool = False
    """Whether a checkpoint waits for an update that is made: where one is not finite the weights may not be either."""
    idle_steps: int = 0
    """Number of steps without anything to train on, at the end of the training so far."""
    validations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of the validations made so far, by step."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds that the stages of this step took."""
    has_shown_prints: bool = False
    """Whether the console has named the file of what rewards and environments print."""

    @property
    def is_complete(self) -> bool:
        return self.step >= self.parts.num_steps

    def is_ending_after(self, step: int) -> bool:
        """Whether the run ends with an error, or is stopped and has made steps since this one."""
        return self.has_failed or (self.interrupt.requested and self.step > step)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        name = f"time/{stage}_s"
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start


async def run_steps(run: RunState) -> None:
    """Runs all steps that are left.

    Consumes prompts, produces weights, metrics and checkpoints. A step waits for its rollouts (unblocked by the rollout
    workers; a request to stop ends the wait), then for the trainers. It reads the same in every mode: `AsyncRollouts`
    may have started the rollouts of steps to come, a pipelined step comes in pieces, of which the first are trained on
    while the last are rolled out, and rows whose answers are trained on are there at once. Whoever calls the trainers
    holds `trainer_lock`: they compute together, and so must all be called for the same things in the same order.
    """
    parts, trainer_lock, rollouts = run.parts, run.parts.trainer_lock, AsyncRollouts(run.parts, run.ledger)
    await validate_if_due(run)
    run.console.begin(parts.num_steps, run.step)
    while not run.is_complete and not run.interrupt.requested:
        training = StepTraining(parts, run.step + 1)
        with run.timed("step"), samples_written_if_stopped(run, training):
            rollouts.start(version=run.step)  # samples the prompts, and submits them
            async with aclosing(rollout_pieces(run, rollouts.pending.pop(run.step + 1), training.rollouts)) as pieces:
                async for rollout in pieces:
                    if not rollout.trajectories:  # all failed, or were filtered
                        continue
                    batch = Batch.of(rollout.trajectories)
                    async with trainer_lock:
                        await parts.actor.again_when_lost(parts.publisher.release)
                        with run.timed("logprobs"):
                            await compute_logprobs_and_values(parts, batch, training.updates_of(batch))
                        with run.timed("train"):
                            await training.add(rollout, batch)  # advantages and gradients that need this piece only
            async with trainer_lock:
                with run.timed("train"):
                    rollout, batch, metrics, result = await training.finish()  # the others, and the optimizer steps
                run.step += 1
                if not parts.recipe.trains_on_rows or validation_due(run):  # else nobody samples with them
                    metrics |= await parts.publisher.publish(version=run.step)
        update_kl_coefficient(parts, metrics, len(batch))
        record_step(run, rollout, batch, result, metrics)
        if parts.recipe.schedule.max_staleness:
            rollouts.start(version=run.step)
        await validate_if_due(run)
        await save_if_due(run)


@contextmanager
def samples_written_if_stopped(run: RunState, training: StepTraining) -> Iterator[None]:
    """Writes down the samples of a step that ends the run before it is recorded: they show why."""
    try:
        yield
    except RunStopped:
        trajectories = [one for rollout in training.rollouts for one in rollout.all_trajectories]
        if run.recipe.logging.trajectories and trajectories:
            asked = asked_of(trajectories, run.parts.train)
            run.trajectories.write(StepTrajectories(training.step, trajectories, "failed", asked=asked))
        raise


async def rollout_pieces(
    run: RunState, pending: PendingStep, rolled_out: list[RolloutResult]
) -> AsyncGenerator[RolloutResult, None]:
    """Yields the step's trajectories: all of them when they are finished, or piece by piece where it is pipelined.
    `rolled_out` gets each piece at once. A request to stop raises `Interrupted`; nothing has changed the weights
    then."""
    pipelined = run.recipe.schedule.pipelined
    pieces = pending.pieces() if pipelined else pending.pieces(1)

    async def next_piece() -> RolloutResult | None:
        return await anext(pieces, None)

    with run.console.stage("rollout and training" if pipelined else "rollout") as progress:
        pending.on_progress = progress.update
        while True:
            with run.timed("rollout"):
                piece = await run.interrupt.cancel_on_request(next_piece())
            if piece is None:
                break
            rolled_out.append(piece)
            if pipelined:
                yield piece
    if rolled_out and not pipelined:  # with dynamic sampling there is a piece for each round
        yield RolloutResult.join(rolled_out)


def record_step(
    run: RunState, rollout: RolloutResult, batch: Batch, result: TrainResult, metrics: dict[str, float]
) -> None:
    """Writes down what became of the step's prompts, its metrics and its trajectories. Raises a `RunError` after too
    many updates that were not finite."""
    record_prompts(run, rollout, result)
    if run.recipe.schedule.max_staleness:
        metrics |= staleness_metrics(batch, run.step - 1)
    if run.recipe.trains_on_rows:
        metrics |= row_metrics(batch, len(run.parts.train), max(rollout.prompt_ids))
        if run.parts.reference_cache is not None:
            metrics["samples/reference_computed"] = float(run.parts.reference_cache.num_missing)
    else:
        metrics |= step_metrics(rollout, batch, run.recipe.batch.samples_per_prompt)
    metrics |= source_metrics(rollout, run.parts)
    if run.parts.history is not None:
        for row_rewards in rollout.row_rewards:
            run.parts.history.record(*row_rewards)
        metrics["samples/skipped"] = float(run.ledger.num_dropped(run.step, SKIP_REASONS))
        metrics["samples/retired_rows"] = float(run.parts.history.num_retired)
    if run.parts.algorithm.mask_truncated or run.parts.algorithm.mask_mean_reward:
        metrics["samples/masked"] = float(batch.is_masked.mean())
    metrics |= result.metrics() | run.times
    step_s, cluster = run.times["time/step_s"], run.recipe.cluster
    metrics["speed/tokens_per_s"] = batch.num_generated / step_s
    metrics["speed/tokens_per_device_s"] = len(batch.tokens) / (step_s * cluster.nodes * cluster.devices_per_node)
    run.trackers.log(run.step, metrics)
    if run.trackers.shows_samples and not run.recipe.trains_on_rows:
        num_shown = run.recipe.logging.tracked_samples
        run.trackers.log_samples(run.step, step_samples(rollout.trajectories, batch, run.parts.tokenizer, num_shown))
    run.times = {}
    if run.recipe.logging.trajectories:
        reason = why_not_trained(result)
        parts = run.parts
        run.trajectories.write(StepTrajectories.of(run.step, rollout, batch, parts.algorithm, reason, parts.train))
        if (keep := run.recipe.logging.keep_trajectories) != "all":
            TrajectoryWriter(run.folder.trajectories).delete_before(run.step - keep + 1)
    check_updates(run, result, batch)
    warn_if_idle(run, rollout, batch, result)
    if not run.has_shown_prints and (prints := describe_prints(run.folder)):
        run.console.note(f"printed by rewards or environments: {prints}")
        run.has_shown_prints = True


def describe_prints(folder: RunFolder) -> str:
    """How much rewards and environments have printed, and where that is; empty: nothing."""
    if not folder.prints.is_file():
        return ""
    with folder.prints.open("rb") as file:
        num_lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    return f"{num_lines:,} line{'' if num_lines == 1 else 's'} in {folder.prints}" if num_lines else ""


def record_prompts(run: RunState, rollout: RolloutResult, result: TrainResult) -> None:
    in_loss = list(dict.fromkeys(one.prompt_id for one in rollout.trajectories if not one.is_masked))
    if (reason := why_not_trained(result)) is not None:
        run.ledger.dropped(run.step, in_loss, reason)
    else:
        run.ledger.trained(run.step, in_loss)
    masked = {one.prompt_id: one.mask_reason for one in rollout.trajectories if one.prompt_id not in in_loss}
    for reason in dict.fromkeys(masked.values()):
        run.ledger.dropped(run.step, {one for one in masked if masked[one] == reason}, f"all samples {reason}")
    run.ledger.dropped(run.step, rollout.failed, "environment failed")
    run.ledger.dropped(run.step, rollout.without_reward, "no sample with a reward")
    run.ledger.dropped(run.step, rollout.zero_variance, "zero-variance group")


def why_not_trained(result: TrainResult) -> str | None:
    """Returns why no update of the step was made; None: one was, or there was nothing to make one of."""
    if result.finite and not any(result.finite):
        return "update not finite"
    return "mean ratio too high" if result.too_far and len(result.too_far) == len(result.finite) else None


def check_updates(run: RunState, result: TrainResult, batch: Batch) -> None:
    """Reports which updates were not made. A number that is not finite never reached the weights; the batch is kept,
    and three in a row end the run."""
    if result.too_far:
        num_skipped, num_updates = len(result.too_far), len(result.finite)
        logger.warning("step %d: %d of %d updates skipped, %s", run.step, num_skipped, num_updates, result.too_far[-1])
    for finite in result.finite:
        run.skipped_in_a_row = 0 if finite else run.skipped_in_a_row + 1
    if not result.skipped:
        return
    path = run.folder.failures / f"step_{run.step:06d}.npz"
    save_failed_batch(batch, path)
    logger.warning("step %d: update skipped, %s; the batch is in %s", run.step, result.skipped[-1], path)
    if run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise RunError(
            f"step {run.step}: {run.skipped_in_a_row} updates in a row were not finite ({result.skipped[-1]}); "
            f"the batches are in {run.folder.failures}. Lower optimizer.learning_rate, or look for the cause in the "
            "rewards"
        )


def warn_if_idle(run: RunState, rollout: RolloutResult, batch: Batch, result: TrainResult) -> None:
    """Warns when nothing could be trained on for some steps in a row: all advantages were 0, or of masked samples."""
    in_loss = np.repeat(~batch.is_masked, np.diff(batch.offsets))
    if result.skipped or result.too_far or (batch.columns["advantages"] * in_loss).any():
        run.idle_steps = 0
        return
    run.idle_steps += 1
    if run.idle_steps not in IDLE_STEPS:
        return
    rewards = sorted({trajectory.reward for trajectory in rollout.trajectories})
    seen = f"all of them {rewards[0]:g}" if len(rewards) == 1 else f"from {rewards[0]:g} to {rewards[-1]:g}"
    if batch.is_masked.any():
        seen += f"; {batch.is_masked.mean():.0%} of the samples are masked, see `algorithm.mask_*`"
    logger.warning(
        "step %d: in %d steps in a row no sample was better or worse than the others of its prompt (rewards of this "
        "step: %s), so there was nothing to train on. Look at what the model answers and what it gets for it (%s). If "
        "the reward is right, the task is too hard or too easy: give credit for parts of an answer, sample more per "
        "prompt (batch.samples_per_prompt), at a higher rollout.temperature, or longer (rollout.max_response_tokens)",
        run.step,
        run.idle_steps,
        seen,
        run.folder.trajectories if run.recipe.logging.trajectories else "logging.trajectories=true writes it down",
    )


async def validate_if_due(run: RunState) -> None:
    """Also after a resume: the run may have been stopped between a step and its validation."""
    when = validation_due(run)
    parts = run.parts
    if when is None or run.step in run.validations or not (parts.validation or parts.validation_rows):
        return
    started = time.perf_counter()
    noun = "pair" if parts.recipe.trains_on_pairs else "row"
    result = ValidationResult({}, [], len(parts.validation_rows), noun)
    if parts.validation:
        result = await run.interrupt.cancel_on_request(validate(parts, run.console))
    metrics = result.metrics
    if parts.validation_rows:
        async with parts.trainer_lock:
            metrics = {**metrics, **await validation_loss(parts)}
    run.console.validation(when, metrics, result.num_prompts, result.noun)
    if not run.validations or run.is_complete:  # the same prompts every time
        show_samples(parts, result, run.console)
    run.trackers.log(run.step, {**metrics, "time/validate_s": time.perf_counter() - started})
    run.validations[run.step] = metrics
    if run.recipe.logging.trajectories and result.trajectories:
        asked = asked_of(result.trajectories, parts.validation)
        run.trajectories.write(StepTrajectories(run.step, result.trajectories, "validation", asked=asked))
    errors = ErrorCounts.of(result.trajectories)
    errors.check(f"validation {when}", run.recipe.tagged_environments, is_first=run.step == 0)
    check_best(run)


def validation_due(run: RunState) -> str | None:
    """Returns the name of the validation that belongs after the steps made so far, if one does."""
    settings = run.recipe.validation
    if run.step == 0:
        return "before training" if settings.before_training else None
    if run.is_complete:
        return "after training" if settings.after_training else None
    due = settings.every and run.step % settings.every == 0
    return f"after step {run.step}" if due else None


async def save_if_due(run: RunState) -> None:
    settings = run.recipe.checkpoint
    by_step = settings.every and run.step % settings.every == 0
    by_time = settings.minutes and time.monotonic() - run.saved_at >= 60 * settings.minutes
    if run.saving is not None and run.saving[1].done():
        await finish_saving(run)
    due = by_step or by_time or run.save_is_late
    run.save_is_late = bool(due) and run.skipped_in_a_row > 0
    if (due and not run.save_is_late) or is_best(run):
        with run.timed("save"):  # of the next step's metrics
            await begin_saving(run)


def is_best(run: RunState) -> bool:
    """Returns whether this step's validation was the best of those made so far, since training began."""
    metric, own = run.recipe.checkpoint.best, run.validations.get(run.step)
    if metric is None or own is None or metric not in own:
        return False
    # A number that is not finite is null in the metrics that a resumed run has read.
    earlier = (values.get(metric) for step, values in run.validations.items() if 0 < step < run.step)
    others = [score_of(metric, value) for value in earlier if value is not None and math.isfinite(value)]
    score = score_of(metric, own[metric])
    return math.isfinite(score) and all(score > other for other in others)


def check_best(run: RunState) -> None:
    """Raises where `checkpoint.best` names no metric of the validation, at the first one; one that is missing later, or
    of a source none of whose samples has a reward, is a warning."""
    metric, own = run.recipe.checkpoint.best, run.validations[run.step]
    if metric is None or metric in own:
        return
    found = ", ".join(sorted(name for name in own if name.startswith("validation/")))
    problem = f"checkpoint.best: the validation has no metric {metric}; it has {found}"
    sources = [f"validation/{name}/" for name in several_names(prompt.row for prompt in run.parts.validation)]
    without = [name for name in sources if not any(key.startswith(name) for key in own)]
    was_there = any(metric in values for values in run.validations.values())
    if not was_there and not metric.startswith(tuple(without)):
        raise RunStopped(problem)
    run.console.warn(problem)


async def begin_saving(run: RunState) -> None:
    """Begins a checkpoint, which is written while training goes on. Waits for the one before."""
    await finish_saving(run)
    step = run.step
    await asyncio.to_thread(run.trajectories.flush)  # a checkpoint's steps have their files
    state = {
        "skipped_in_a_row": run.skipped_in_a_row,
        "trackers": run.trackers.state(),
        "validation": run.validations.get(run.step, {}),
    }

    def save() -> Awaitable[asyncio.Task[None]]:
        return begin_save(run.parts, run.ledger, run.folder, step, state, lambda: run.is_ending_after(step))

    async with run.parts.trainer_lock:
        run.saving = step, await run.parts.actor.again_when_lost(save)
    run.saved_at = time.monotonic()


async def finish_saving(run: RunState) -> None:
    """Waits for the checkpoint that is being written, if there is one."""
    if run.saving is not None:
        (step, task), run.saving = run.saving, None
        try:
            await task
        except WorkerLost as lost:
            async with run.parts.trainer_lock:
                if not await run.parts.actor.on_lost(lost):
                    raise
            logger.warning("the checkpoint of step %d is not written: a trainer was lost with its part of it", step)
        else:
            run.saved_step = step


# --- what is written down of a step


def staleness_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Counts how many versions older than the weights that were trained on them the generated tokens were."""
    ages = version - batch.versions[batch.generated]
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **{f"staleness/fraction_{age}": float((ages == age).mean()) for age in np.unique(ages).tolist()},
    }


def save_failed_batch(batch: Batch, path: Path) -> None:
    """Writes everything the update saw, for a post-mortem: `numpy.load(path)`."""
    np.savez_compressed(
        path,
        tokens=batch.tokens,
        generated=batch.generated,
        logprobs=batch.logprobs,
        token_rewards=batch.token_rewards,
        offsets=batch.offsets,
        groups=batch.groups,
        is_masked=batch.is_masked,
        **batch.columns,  # type: ignore[arg-type]
    )


# --- Ctrl-C and SIGTERM: the first one ends the run in good order; the second, or one before training, at once


WAKE_AFTER_S = 0.1
Answer = TypeVar("Answer")
SignalHandler = Callable[[int, FrameType | None], None]


class Interrupted(Exception):
    """The user asked to stop during a rollout. No weight has been changed by it yet."""


class Interrupt:
    """A request to stop waits for the end of the step while weights are being changed, and cancels rollouts. Before
    training there is nothing to save, and it ends the run at once."""

    def __init__(self, notify: Callable[[str], None], on_ctrl_c: SignalHandler | None = None) -> None:
        """`on_ctrl_c`: a debugger's, which then has Ctrl-C for itself."""
        self.notify = notify
        self.handlers = {signal.SIGINT: on_ctrl_c or self._handle, signal.SIGTERM: self._handle}
        self.requested = False
        self.is_ctrl_c = False
        """Whether it was the user who asked, and not a SIGTERM or the cluster."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.on_request: Callable[[], object] | None = None
        """Called when the run is asked to stop. None: it is not ready for its first step."""
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers, nor gets signals
            for number, handler in self.handlers.items():
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def cancel_on_request(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Returns what `work` returns. A request to stop cancels it, and `Interrupted` is raised."""
        if self.requested:
            work.close()
            raise Interrupted
        stop, task = asyncio.Event(), asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(stop.wait())
        self._waiting = asyncio.get_running_loop(), stop
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted
        finally:
            self._waiting = None
            task.cancel()
            stopping.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_ctrl_c = self.is_ctrl_c or number == signal.SIGINT
        if self.requested or not self.request():
            raise KeyboardInterrupt

    def request(self) -> bool:
        """Asks the run to stop; may be called from any thread. Returns False before training: then the caller raises
        KeyboardInterrupt in the run's thread."""
        self.requested = True
        waiting = self._waiting
        if self.on_request is None:
            with suppress(RuntimeError):  # it is closed
                if self.loop is not None:  # a thread that waits sees the exception when it wakes
                    self.loop.call_soon_threadsafe(partial(self.loop.call_later, WAKE_AFTER_S, bool))
            return False
        if waiting is None:
            with suppress(RuntimeError):  # a signal may come in the middle of a write, and a second is not allowed then
                self.notify("stopping as soon as this step is done; Ctrl-C again stops at once")
        else:
            loop, stop = waiting
            loop.call_soon_threadsafe(stop.set)
        self.on_request()
        return True
