"""What happens when a worker is lost.

One that only plays is done without: its prompts go to the others, and a new one takes its place where its node is still
there. Any other takes the weights or a part of them along: the run ends here with `WorkerLost`, and the supervisor
begins again at the last checkpoint.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from corral.loop.components import RunComponents
from corral.runtime.group import WorkerLost

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""To start a lost player again."""
LAST_TRANSFER_S = 60.0
"""For weights that are on their way to a new player when the run ends."""


class Supervisor:
    """Also the one way in which weights are published, since that is when a new player gets its own.

    `lost_nodes`: addresses are added as nodes are lost. `trainers`: to be held by who asks anything of the trainers,
    which compute together and so must all be asked for the same things in the same order.
    """

    def __init__(self, parts: RunComponents, version: int, lost_nodes: set[str]) -> None:
        self.parts, self.lost_nodes = parts, lost_nodes
        self.version = version
        """Of the trainers' weights."""
        self.trainers = asyncio.Lock()
        self.mending: dict[int, asyncio.Task[None]] = {}
        """By the player's rank."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parts.scheduler.on_lost = self.lose

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the steps, until they end or something is lost that the run cannot do without."""
        task = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({task, watching, self.failure}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=5.0)
                await (watching if watching.done() else self.failure)
            await task
            async with asyncio.timeout(LAST_TRANSFER_S):
                await self.trainers.acquire()  # so that all trainers are free for the last checkpoint
            self.trainers.release()
        finally:
            for other in (task, watching, *self.mending.values()):
                other.cancel()

    async def publish(self, joining: int | None = None) -> dict[str, float]:
        """To all engines that are there, and to a new one; again without those that are lost meanwhile. The loss of
        `joining` is for the caller. `trainers` is held."""
        scheduler, rollout = self.parts.scheduler, self.parts.runtime.placement.roles["rollout"]
        while ranks := {*scheduler.lanes, *(() if joining is None else (joining,))}:
            try:
                return await self.parts.publisher.publish(self.version, ranks)
            except WorkerLost as lost:
                if joining is not None and lost.device == rollout[joining]:
                    raise
                if not self.lose(lost):
                    raise
        return {}

    def lose(self, lost: WorkerLost) -> bool:
        """Takes lost players out. Whether the run goes on, without them or with new ones."""
        runtime, scheduler = self.parts.runtime, self.parts.scheduler
        devices = set(runtime.devices_of(lost.node)) if lost.node is not None else {lost.device}
        if any(devices & set(own) for role, own in runtime.placement.roles.items() if role != "rollout"):
            return False
        if lost.node is not None:
            self.lost_nodes.add(lost.node)
        rollout = runtime.placement.roles["rollout"]
        for rank in [rank for rank, device in enumerate(rollout) if device in devices]:
            if scheduler.lose(rank, lost) and lost.node is None:  # else it was heard of before
                self.mending[rank] = asyncio.get_running_loop().create_task(self._replace(rank, rollout[rank]))
        least = self.parts.recipe.cluster.min_nodes or self.parts.recipe.cluster.nodes
        return bool(scheduler.lanes or self.mending) and runtime.num_nodes >= least

    async def _replace(self, rank: int, device: int) -> None:
        """Waits for the new process, then for the trainers to be free. Nothing waits for this, unless no other player
        is left."""
        error: Exception | None = None
        try:
            for _ in range(ATTEMPTS):
                try:
                    await self._start_again(rank, device)
                    return
                except WorkerLost as lost:
                    error = lost
                    if lost.node is not None or lost.device != device:
                        break
        except Exception as other:
            error = other
        finally:
            self.mending.pop(rank, None)
        logger.warning("device %d could not be replaced: %s", device, error)
        if error is not None and not self.parts.scheduler.lanes and not self.mending and not self.failure.done():
            self.failure.set_exception(error)

    async def _start_again(self, rank: int, device: int) -> None:
        parts = self.parts
        await parts.runtime.replace(device)
        for role in ("rewards", "rollout"):
            await parts.runtime.build(role, parts.recipe, None, rank=rank)
        async with self.trainers:
            parts.publisher.reopen()
            await self.publish(joining=rank)
            parts.scheduler.open(rank)
        logger.warning("device %d plays again", device)

    async def _watch(self) -> None:
        """Until a node is lost that is needed."""
        while True:
            try:
                await self.parts.runtime.watch()
            except WorkerLost as lost:
                if not self.lose(lost):
                    raise
                logger.warning("%s; the run goes on without it", lost)
