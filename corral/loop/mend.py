"""What happens when a worker is lost.

One that only plays is done without: its prompts go to the others, and a new one takes its place where its node is still
there. Any other takes the weights or a part of them along: the run ends here with `WorkerLost`, and the supervisor
begins again at the last checkpoint.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from corral.loop.parts import Parts
from corral.runtime.group import WorkerLost

logger = logging.getLogger(__name__)


class Mender:
    """Also the one way in which weights are published, since that is when a new worker gets its own."""

    def __init__(self, parts: Parts, version: int) -> None:
        self.parts, self.version = parts, version
        self.lock = asyncio.Lock()
        """Weights are either being changed or sent."""
        self.mending: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parts.playground.on_lost = self.lose

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
        finally:
            for other in (task, watching, *self.mending):
                other.cancel()

    async def publish(self, version: int) -> dict[str, float]:
        """To all engines that are there. One that is lost meanwhile is left out."""
        self.version = version
        async with self.lock:
            while True:
                try:
                    return await self.parts.publisher.publish(version, self.parts.playground.lanes)
                except WorkerLost as lost:
                    if not self.lose(lost):
                        raise

    def lose(self, lost: WorkerLost) -> bool:
        """Whether the run goes on."""
        placement, playground = self.parts.runtime.placement, self.parts.playground
        if lost.device is None or placement.users(lost.device) != ("rollout",):
            return False
        if lost.node is not None and not self._can_do_without(lost):
            return False
        rank = placement.roles["rollout"].index(lost.device)
        playground.lose(rank, lost)
        if lost.node is not None:
            return True
        task = asyncio.get_running_loop().create_task(self._replace(rank, lost.device))
        self.mending.add(task)
        task.add_done_callback(self.mending.discard)
        return True

    async def _replace(self, rank: int, device: int) -> None:
        """Waits for the new process, then for the weights to be free; nothing waits for this, unless no engine is
        left to play."""
        parts = self.parts
        try:
            await parts.runtime.replace(device)
            for role in ("rewards", "rollout"):
                await parts.runtime.build(role, parts.recipe, None, rank=rank)
            async with self.lock:
                parts.publisher.reopen()
                await parts.publisher.publish(self.version, {*parts.playground.lanes, rank})
                parts.playground.open(rank)
            logger.warning("device %d plays again", device)
        except WorkerLost as lost:
            if not parts.playground.lanes and not self.failure.done():
                self.failure.set_exception(lost)
            logger.warning("device %d could not be replaced: %s", device, lost)

    async def _watch(self) -> None:
        """Until a node is lost that is needed."""
        while True:
            try:
                await self.parts.runtime.watch()
            except WorkerLost as lost:
                if not self._can_do_without(lost):
                    raise
                logger.warning("%s; the run goes on without it", lost)

    def _can_do_without(self, lost: WorkerLost) -> bool:
        """Whether all that the node did was to play, and enough nodes are left."""
        placement, runtime = self.parts.runtime.placement, self.parts.runtime
        assert lost.node is not None
        devices = runtime.devices_of(lost.node)
        only_played = all(placement.users(device) in (("rollout",), ()) for device in devices)
        others = set(placement.roles["rollout"]) - set(devices)
        least = self.parts.recipe.cluster.min_nodes or self.parts.recipe.cluster.nodes
        return only_played and bool(others) and runtime.num_nodes >= least
