"""What happens when a worker is lost.

A rollout worker can be done without: its prompts go to the others, and a new one takes its place where its node is
still there. A trainer of whose model there are copies is replaced as well (`trainer_recovery.py`). Any other worker
takes the weights or a part of them along: the run ends here with `WorkerLost`, and `train.py` begins again at the last
checkpoint.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from corral.loop.components import RunComponents
from corral.loop.trainer_recovery import TrainerRecovery
from corral.recipe.errors import RunError
from corral.runtime.group import WorkerLost

logger = logging.getLogger(__name__)

NUM_ATTEMPTS = 3
"""How often the process of a lost rollout worker is started."""


class Supervisor:
    """Replaces lost workers. `lost_nodes`: addresses are added as nodes are lost."""

    def __init__(self, parts: RunComponents, lost_nodes: set[str]) -> None:
        self.parts, self.lost_nodes = parts, lost_nodes
        self.replacing: dict[int, asyncio.Task[None]] = {}
        """Rollout workers that are being started again, by rank."""
        self.trainers = TrainerRecovery(parts)
        self.recovering: set[asyncio.Task[None]] = set()
        """Recoveries of trainers that were lost while nobody called them."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when no rollout worker is left and none can be started, or a trainer cannot be replaced."""
        parts.scheduler.on_lost = self.handle_loss

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the steps. Waits until they end, or something is lost that the run cannot do without: then that is
        raised."""
        task = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._watch_losses())
        try:
            await asyncio.wait({task, watching, self.failure}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=5.0)
                await (watching if watching.done() else self.failure)
            await task
            if self.recovering:
                await asyncio.wait(self.recovering)
            if self.failure.done():
                await self.failure
            # The last checkpoint needs all trainers. One that is still sending weights to a new rollout worker is let
            # finish: to cancel it would leave the trainers of one model in different places.
            limit_s = self.parts.recipe.cluster.call_timeout_s
            try:
                async with asyncio.timeout(limit_s), self.parts.trainer_lock:
                    pass
            except TimeoutError:
                raise RunError(
                    f"{limit_s:.0f} s (`cluster.call_timeout_s`) after the last step a trainer was still sending "
                    "weights to a new rollout worker, so that the last checkpoint could not be written"
                ) from None
        finally:
            for other in (task, watching, *self.replacing.values(), *self.recovering):
                other.cancel()
            for noticed in (watching, self.failure):
                if noticed.done() and not noticed.cancelled():
                    noticed.exception()  # the same loss that `task` has raised; asyncio would print it otherwise

    def handle_loss(self, lost: WorkerLost) -> bool:
        """Removes lost rollout workers, and begins to replace lost trainers. Returns whether the run goes on, without
        them or with new ones. The same loss may be reported by several that waited for the worker; only the first
        report has an effect."""
        runtime, scheduler = self.parts.runtime, self.parts.scheduler
        devices = self.trainers.devices_of(lost)
        others = {device for role, own in runtime.placement.roles.items() if role != "rollout" for device in own}
        needed = devices & others
        # Without a device a relay was lost, with what it passed on: nobody knows who has computed it.
        if not devices or not all(map(self.trainers.can_recover, needed)):
            return False
        if lost.node is not None and not needed:  # else a spare one takes its place, or the loss is raised
            self.lost_nodes.add(lost.node)
        rollout = runtime.placement.roles.get("rollout", ())
        for rank in [rank for rank, device in enumerate(rollout) if device in devices]:
            if scheduler.remove_worker(rank, lost) and lost.node is None and not needed:
                self.replacing[rank] = asyncio.get_running_loop().create_task(self._replace(rank, rollout[rank]))
        if needed:
            if not (scheduler.queues or self.replacing or needed & {*rollout}):
                return False  # a spare node takes the place of trainers, and nobody would roll out
            task = asyncio.get_running_loop().create_task(self._recover(lost))
            self.recovering.add(task)
            task.add_done_callback(self.recovering.discard)
            return True
        min_nodes = self.parts.recipe.cluster.min_nodes or self.parts.recipe.cluster.nodes
        return bool(scheduler.queues or self.replacing) and runtime.num_nodes >= min_nodes

    async def _recover(self, lost: WorkerLost) -> None:
        """Waits for whoever calls the trainers: the call fails, and replaces them."""
        try:
            async with self.parts.trainer_lock:
                if not await self.trainers.recover(lost):
                    raise lost
                publisher, scheduler = self.parts.publisher, self.parts.scheduler
                if publisher.returning and scheduler.waiting and not scheduler.queues:
                    # Prompts wait for workers that wait for weights. Those of the trainers are a version's: whoever
                    # updates them holds the lock until they are published.
                    await publisher.publish(publisher.version)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)

    async def _replace(self, rank: int, device: int) -> None:
        """Waits for the new process, then for the trainers to be free. Nothing waits for this, unless no other rollout
        worker is left."""
        error: Exception | None = None
        try:
            for attempt in range(1, NUM_ATTEMPTS + 1):
                try:
                    await self._start_again(rank, device)
                    return
                except WorkerLost as lost:
                    error = lost
                    if lost.node is not None or lost.device != device:
                        break
                    logger.warning("%s (attempt %d of %d to replace it)", lost, attempt, NUM_ATTEMPTS)
        except Exception as other:
            error = other
        finally:
            self.replacing.pop(rank, None)
        logger.warning("device %d could not be replaced: %s", device, error)
        if error is not None and not self.parts.scheduler.queues and not self.replacing and not self.failure.done():
            self.failure.set_exception(error)

    async def _start_again(self, rank: int, device: int) -> None:
        parts = self.parts
        await parts.runtime.replace(device)
        for role in ("rewards", "rollout"):
            await parts.runtime.build(role, parts.recipe, None, ranks=[rank])
        # The lock is held until the worker takes requests: with weights published in between, it would have old ones.
        async with parts.trainer_lock:
            await parts.publisher.add_receiver(rank, device)
            parts.scheduler.add_worker(rank)
        logger.warning("device %d takes rollouts again", device)

    async def _watch_losses(self) -> None:
        """Runs until a node or worker is lost that is needed, and raises that."""
        while True:
            try:
                await self.parts.runtime.watch()
            except WorkerLost as lost:
                if not self.handle_loss(lost):
                    raise
                rollout = self.parts.runtime.placement.roles.get("rollout", ())
                # What is not replaced is a node, or a device that only lends its GPU to an engine (`tensor_parallel`).
                if not self.recovering and lost.device not in [rollout[rank] for rank in self.replacing]:
                    logger.warning("%s; the run goes on without it", lost)
