"""Checkpoints of a run: everything needed to go on as if nothing had happened.

The random state is the seed, the sampler's position and the ledger: every sampled number is a function of these, so
there is no generator to save. Prompts that were in flight when the checkpoint was made are open in the ledger, and are
rolled out again.
"""

import asyncio
import logging
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from corral.child_process import describe_exit, last_lines, start_child, terminate_group
from corral.loop.components import RunComponents
from corral.observe.console import Console
from corral.observe.ledger import Ledger
from corral.observe.run_files import MetricsFile
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryWriter
from corral.recipe.errors import RunError, UserError, one_line
from corral.runtime.group import Group, gather_calls
from corral.runtime.model_workers import ModelWorker
from corral.runtime.rollout_worker import RolloutWorker
from corral.training.checkpoint import (
    list_files,
    prune,
    retire_later_checkpoints,
    step_folder,
    writing_checkpoint,
)

logger = logging.getLogger(__name__)

UPLOAD_POLL_S = 0.2


async def begin_save(
    parts: RunComponents,
    ledger: Ledger,
    folder: RunFolder,
    step: int,
    state: dict[str, Any],
    is_ending: Callable[[], bool],
) -> "asyncio.Task[None]":
    """Copies the state of the run, and returns the task that writes it down while training goes on. `state`: what only
    the loop knows. `is_ending`: whether the run ends, and has something more urgent to do than to upload this
    checkpoint. The trainers must not be called by others until this returns."""
    copied = asyncio.Event()
    task = asyncio.create_task(save(parts, ledger, folder, step, state, copied, is_ending))
    waiting = asyncio.create_task(copied.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        waiting.cancel()
    if not copied.is_set():
        await task  # raises
    return task


async def save(
    parts: RunComponents,
    ledger: Ledger,
    folder: RunFolder,
    step: int,
    state: dict[str, Any],
    copied: asyncio.Event,
    is_ending: Callable[[], bool],
) -> None:
    """Writes a checkpoint. Until all is written, hashed and flushed to disk, the last one is the run's newest."""
    state = {
        "step": step,
        "num_steps": parts.num_steps,
        "seed": parts.recipe.seed,
        "trained_with": folder.trained_with,
        "dtype": parts.dtype,
        "sampler": parts.sampler.state(),
        "kl": None if parts.kl is None else parts.kl.state(),
        **state,
    }
    hashes: dict[str, dict[str, Any]] = {}
    try:
        with writing_checkpoint(step_folder(folder.checkpoints, step), state, hashes) as work:
            (work / "ledger.jsonl").write_text(ledger.snapshot())
            if parts.history is not None:
                parts.history.save(work)
            if parts.reference_cache is not None:
                parts.reference_cache.save(work)
            parts.tokenizer.save_pretrained(work)
            if parts.tokenizer.vision is not None:
                parts.tokenizer.vision.save(work)
            writers: dict[str, Sequence[int]] = {}
            groups = [trainers.group for trainers in (parts.actor, parts.critic) if trainers is not None]
            for group in groups:
                writers[group.role] = await find_writers(group, work)
                await group.all(ModelWorker.save, work, writers[group.role])
            copied.set()
            await gather_calls(*(group.all(ModelWorker.finish_save) for group in groups))
            # Those that see the files hash them, each its share of the files.
            group, names = groups[0], list_files(work)
            ranks = writers[group.role]
            shares = [(work, names[first :: len(ranks)]) for first in range(len(ranks))]
            for own in await group.each(ModelWorker.hash_files, shares, ranks=ranks):
                hashes |= own
    except OSError as error:
        raise RunError(
            f"the checkpoint of step {step} could not be written ({error.strerror or error}); "
            f"earlier ones in {folder.checkpoints} are as they were"
        ) from error
    settings = parts.recipe.checkpoint
    if settings.upload:
        await upload(settings.upload, step_folder(folder.checkpoints, step), step, is_ending)
    # Where updates are not finite, these weights may be the reason: older checkpoints stay until one was made.
    keep = None if settings.keep == "all" or state["skipped_in_a_row"] else settings.keep
    weights = folder.weights if settings.keep_weights else None
    await asyncio.to_thread(prune, folder.checkpoints, keep, settings.best, weights)


async def upload(command: Sequence[str], checkpoint: Path, step: int, is_ending: Callable[[], bool]) -> None:
    """Runs the user's command for a checkpoint. Its end is waited for, since the checkpoint may be pruned after that,
    unless the run ends: a job that is stopped has little time, and a newer checkpoint to save."""
    words = [word.replace("{checkpoint}", str(checkpoint)).replace("{step}", str(step)) for word in command]
    with tempfile.TemporaryFile() as output:
        try:
            process = start_child(words, stdout=output, stderr=output, death_signal=signal.SIGTERM)
        except OSError as error:
            logger.warning("checkpoint.upload: %s could not be started: %s", words[0], error.strerror or error)
            return
        try:
            while process.poll() is None and not is_ending():
                await asyncio.sleep(UPLOAD_POLL_S)
        finally:
            has_ended = process.poll() is not None
            code = terminate_group(process)
            if not has_ended:
                logger.warning("checkpoint.upload: the command for step %d was ended, as the run ends", step)
        if has_ended and code:
            last = "".join(f": {line}" for line in last_lines(output, 1))
            logger.warning("checkpoint.upload: the command for step %d %s%s", step, describe_exit(code), last)


async def find_writers(group: Group[Any], folder: Path) -> Sequence[int]:
    """Returns the trainers that see the folder: those on this machine, and all where it is on a shared file system."""
    mark = folder / f".{uuid4().hex}"
    mark.touch()
    sees = await group.all(ModelWorker.can_see, mark)
    mark.unlink()
    if not any(sees):
        raise RunError(
            f"no worker of {group.role} can write to {folder}: put `logging.runs` on a file system that all "
            "nodes share, or start the run on a node that has one"
        )
    if not all(sees):
        logger.warning(
            "not all workers of %s see %s: copy a checkpoint to the same path on their nodes before it is resumed from",
            group.role,
            folder.parent,
        )
    return [rank for rank, sees_it in enumerate(sees) if sees_it]


async def restore(parts: RunComponents, checkpoint: Path, state: dict[str, Any]) -> None:
    """Restores all but the model, which was loaded from the checkpoint already, and the ledger."""
    seed = parts.recipe.seed
    if missing := sorted({"seed", "dtype", "sampler"} - state.keys()):
        raise UserError(f"{checkpoint}: its state.json has no {missing[0]}")
    if state["seed"] != seed:
        raise UserError(f"{checkpoint} was made with seed {state['seed']}; the recipe says {seed}")
    if state["dtype"] != parts.dtype:
        raise UserError(f"{checkpoint} was made with model.dtype {state['dtype']}; now it is {parts.dtype}")
    with one_line(f"{checkpoint}: its state.json is not one that a run has written"):
        parts.sampler.load_state(state["sampler"])
    if parts.history is not None:
        with one_line(f"the rewards of rows in {checkpoint} cannot be read"):
            parts.history.load(checkpoint)
    await parts.actor.group.all(ModelWorker.load, checkpoint)
    if parts.critic is not None:
        if not (checkpoint / "critic").is_dir():
            raise UserError(f"{checkpoint} has no critic; it was made with another algorithm")
        await parts.critic.group.all(ModelWorker.load, checkpoint)
    if parts.reference_cache is not None:
        with one_line(f"the reference's log-probs in {checkpoint} cannot be read"):
            parts.reference_cache.load(checkpoint)
    if parts.kl is not None and state.get("kl"):  # a fixed coefficient has no state
        with one_line(f"{checkpoint}: its state.json is of another `algorithm.kl`"):
            parts.kl.load_state(state["kl"])
    parts.publisher.version = int(state["step"])
    await parts.scheduler.group.all(RolloutWorker.set_version, parts.publisher.version)


def truncate_after(folder: RunFolder, checkpoint: Path | None, state: dict[str, Any], console: Console) -> Ledger:
    """Removes from the run's folder what it did after the checkpoint that it goes on from, since it will do that again.
    Without a checkpoint it is kept, under another name. `state`: the checkpoint's."""
    step = int(state.get("step", -1))
    if checkpoint is None and folder.holds_run:
        console.warn(f"there is no checkpoint to go on from; what the run did before is in {folder.archive_attempt()}")
    ledger = Ledger(folder.ledger)
    written = None if checkpoint is None else checkpoint / "ledger.jsonl"
    text = written.read_text() if written is not None and written.exists() else None
    ledger.restore(text, max(step, 0), None if text is None else state["sampler"].get("next_prompt_id"))
    MetricsFile(folder.metrics).truncate_after(step)
    TrajectoryWriter(folder.trajectories).truncate_after(step)
    retire_later_checkpoints(folder.weights, step)
    for unused, problem in retire_later_checkpoints(folder.checkpoints, step):
        console.warn(f"{unused} is not used ({problem or 'the run goes on from an earlier one'}); renamed, not deleted")
    return ledger
