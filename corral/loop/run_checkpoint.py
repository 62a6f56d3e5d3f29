"""Checkpoints of a run: everything needed to go on as if nothing had happened.

The random state is the seed, the sampler's position and the ledger: every sampled number is a function of these, so
there is no generator to save. Prompts that were in flight when the checkpoint was made are open in the ledger, and are
rolled out again.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from corral.loop.components import RunComponents
from corral.observe.console import Console
from corral.observe.ledger import Ledger
from corral.observe.run_files import MetricsFile
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryWriter
from corral.recipe.errors import RunError, UserError
from corral.runtime.model_workers import ModelWorker, TrainerGroup
from corral.runtime.rollout_worker import RolloutWorker
from corral.training.checkpoint import prune, retire_later_checkpoints, step_folder, writing_checkpoint

logger = logging.getLogger(__name__)


async def save(parts: RunComponents, ledger: Ledger, folder: RunFolder, step: int, state: dict[str, Any]) -> None:
    """Writes a checkpoint. `state`: what only the loop knows."""
    state = {
        "step": step,
        "num_steps": parts.num_steps,
        "seed": parts.recipe.seed,
        "dtype": parts.dtype,
        "sampler": parts.sampler.state(),
        "kl": None if parts.kl is None else parts.kl.state(),
        **state,
    }
    try:
        with writing_checkpoint(step_folder(folder.checkpoints, step), state) as work:
            (work / "ledger.jsonl").write_text(ledger.snapshot())
            if parts.history is not None:
                parts.history.save(work)
            if parts.reference_cache is not None:
                parts.reference_cache.save(work)
            parts.tokenizer.save_pretrained(work)
            if parts.tokenizer.vision is not None:
                parts.tokenizer.vision.processor.save_pretrained(work)
            for trainers in (parts.actor, parts.critic):
                if trainers is not None:
                    await trainers.group.all(ModelWorker.save, work, await find_writers(trainers, work))
    except OSError as error:
        raise RunError(
            f"the checkpoint of step {step} could not be written ({error.strerror or error}); "
            f"earlier ones in {folder.checkpoints} are as they were"
        ) from error
    prune(folder.checkpoints, parts.recipe.checkpoint.keep)


async def find_writers(trainers: TrainerGroup[Any], folder: Path) -> Sequence[int]:
    """Returns the trainers that see the folder: those on this machine, and all where it is on a shared file system."""
    mark = folder / f".{uuid4().hex}"
    mark.touch()
    sees = await trainers.group.all(ModelWorker.can_see, mark)
    mark.unlink()
    if not any(sees):
        raise RunError(
            f"no worker of {trainers.group.role} can write to {folder}: put `logging.runs` on a file system that all "
            "nodes share, or start the run on a node that has one"
        )
    if not all(sees):
        logger.warning(
            "not all workers of %s see %s: copy a checkpoint to the same path on their nodes before it is resumed from",
            trainers.group.role,
            folder.parent,
        )
    return [rank for rank, sees_it in enumerate(sees) if sees_it]


async def restore(parts: RunComponents, checkpoint: Path, state: dict[str, Any]) -> None:
    """Restores all but the model, which was loaded from the checkpoint already, and the ledger."""
    seed = parts.recipe.seed
    if state["seed"] != seed:
        raise UserError(f"{checkpoint} was made with seed {state['seed']}; the recipe says {seed}")
    if state["dtype"] != parts.dtype:
        raise UserError(f"{checkpoint} was made with model.dtype {state['dtype']}; now it is {parts.dtype}")
    parts.sampler.load_state(state["sampler"])
    if parts.history is not None:
        parts.history.load(checkpoint)
    await parts.actor.group.all(ModelWorker.load, checkpoint)
    if parts.critic is not None:
        if not (checkpoint / "critic").is_dir():
            raise UserError(f"{checkpoint} has no critic; it was made with another algorithm")
        await parts.critic.group.all(ModelWorker.load, checkpoint)
    if parts.reference_cache is not None:
        parts.reference_cache.load(checkpoint)
    if parts.kl is not None and state["kl"] is not None:
        parts.kl.load_state(state["kl"])
    parts.publisher.version = int(state["step"])
    await parts.scheduler.group.all(RolloutWorker.set_version, parts.publisher.version)


def truncate_after(folder: RunFolder, checkpoint: Path | None, step: int, console: Console) -> Ledger:
    """Removes from the run's folder what it did after the checkpoint that it goes on from, since it will do that again.
    Without a checkpoint it is kept, under another name."""
    if checkpoint is None and folder.holds_run:
        console.warn(f"there is no checkpoint to go on from; what the run did before is in {folder.archive_attempt()}")
    MetricsFile(folder.metrics).truncate_after(step)
    TrajectoryWriter(folder.trajectories).truncate_after(step)
    ledger = Ledger(folder.ledger)
    written = None if checkpoint is None else checkpoint / "ledger.jsonl"
    ledger.restore(written.read_text() if written is not None and written.exists() else None, max(step, 0))
    for unused, problem in retire_later_checkpoints(folder.checkpoints, step):
        console.warn(f"{unused} is not used ({problem or 'the run goes on from an earlier one'}); renamed, not deleted")
    return ledger
