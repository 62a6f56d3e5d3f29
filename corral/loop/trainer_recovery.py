"""What happens when a trainer is lost of whose model other devices hold copies (`train.parallel.replicate`).

The states of the lost one are in the memory of its replicas, so no checkpoint is read and nothing is trained twice but
the update that was interrupted:

1. Trainers of whole copies stop waiting for lost ones, and finish what they compute.
2. All workers of a copy that has lost one are started again: a world of torch.distributed cannot get a new member, and
   what the others of the copy hold is in the other copies, too.
3. The copies are connected again. Each trainer gets weights, moments and counters of a copy that has made the most
   updates: a copy makes an update on all of its ranks or on none (`ProcessMesh.agree`), but one copy may have made it
   when another one was lost.
4. Gradients since that update are computed again from the batches, which the controller has, and the call that failed
   is made again.

Where any of this fails, the run begins again at the last checkpoint.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from corral.loop.components import RunComponents
from corral.recipe.errors import RunError, first_line
from corral.recipe.placement import MESH_ROLES
from corral.runtime.group import WorkerLost, gather_calls
from corral.runtime.model_workers import ModelWorker, TrainerGroup, UpdateProgress
from corral.runtime.worker import BUILD_ORDER

logger = logging.getLogger(__name__)


class TrainerRecovery:
    """Starts lost trainers again with the states of their replicas. Whoever calls it holds the trainers' lock."""

    def __init__(self, parts: RunComponents) -> None:
        self.parts = parts
        self.lock = asyncio.Lock()
        """Actor and critic on devices of their own are called at the same time, and may both lose a worker."""
        self.has_failed = False
        """Whether a recovery has failed: the run is about to begin again, and others report the same loss."""
        self.trainers: dict[str, TrainerGroup[Any]] = {"actor": parts.actor}
        if parts.critic is not None:
            self.trainers["critic"] = parts.critic
        if parts.reference is not None:
            self.trainers["reference"] = parts.reference
        for trainers in self.trainers.values():
            trainers.on_lost = self.recover

    def can_recover(self, device: int) -> bool:
        """Whether the worker on this device only holds what others hold, too, or what can be loaded again."""
        roles, recipe = self.parts.runtime.placement.users(device), self.parts.recipe
        trained = [role for role in roles if role in MESH_ROLES]
        return (
            bool(trained)
            and self.trainers[trained[0]].mesh.replicate > 1
            and "reward_model" not in roles
            and not ("rollout" in roles and recipe.rollout.engine.tensor_parallel > 1)
        )

    def devices_of(self, lost: WorkerLost) -> set[int]:
        """Returns what was lost: a device, or all of a node."""
        if lost.node is not None:
            return set(self.parts.runtime.devices_of(lost.node))
        return set() if lost.device is None else {lost.device}

    async def recover(self, lost: WorkerLost) -> bool:
        """Returns whether all trainers are there again. Raises the loss where it took the only states along."""
        runtime = self.parts.runtime
        async with self.lock:
            trained = {device for role in self.trainers for device in runtime.placement.roles[role]}
            devices = runtime.lost_devices & trained
            if not devices:  # a rollout worker is lost; or others have noticed the loss before, and it is repaired
                return bool(self.devices_of(lost) & trained)
            if self.has_failed or not all(map(self.can_recover, devices)):
                return False
            started = time.monotonic()
            worlds = {runtime.placement.roles[role]: role for role in self.trainers}
            try:
                for world, role in worlds.items():
                    if own := devices & set(world):
                        num_workers = await self._recover_world(role, world, own, lost)
                        logger.warning(
                            "%s; %s started again with the states of a replica, and the run goes on at the same update "
                            "after %.1f s",
                            lost.summary,
                            "one worker was" if num_workers == 1 else f"{num_workers} workers were",
                            time.monotonic() - started,
                        )
            except Exception as error:
                self.has_failed = True
                logger.warning("no replica could give its states to the lost trainer: %s", first_line(error))
                raise lost from error
            return True

    async def _recover_world(self, role: str, world: Sequence[int], devices: set[int], lost: WorkerLost) -> int:
        """Replaces lost workers of one set of devices. Returns the number of workers that were started again."""
        parts, mesh = self.parts, self.trainers[role].mesh
        broken = sorted({mesh.place_in_copies(rank)[0] for rank, device in enumerate(world) if device in devices})
        whole = [copy for copy in range(mesh.replicate) if copy not in broken]
        if not whole:
            raise RunError(f"all {mesh.replicate} copies of the model have lost a worker")
        replaced = sorted(rank for copy in broken for rank in mesh.ranks_of_copy(copy))
        kept = sorted(rank for copy in whole for rank in mesh.ranks_of_copy(copy))
        roles = [name for name in BUILD_ORDER if name in parts.runtime.placement.users(world[0])]
        trained = [self.trainers[name] for name in roles if name in ("actor", "critic")]
        if "rollout" in roles:
            roles = ["rewards", *roles]
            for rank in replaced:
                parts.scheduler.remove_worker(rank, lost)
        await parts.runtime.abort_replicas([world[rank] for rank in kept])
        progress, _ = await gather_calls(
            self._read_progress(trained or [self.trainers[role]], kept),
            parts.runtime.replace_copies(role, mesh, broken),
        )
        for name in roles:
            await parts.runtime.build(name, parts.recipe, None, ranks=replaced)
        if "rollout" in roles and parts.publisher.is_released:
            await parts.publisher.release(replaced)
        for trainers, of_ranks in zip(trained, progress, strict=False):
            source, reached = most_advanced(trainers, whole, of_ranks)
            await trainers.go_on_from(source, reached)
        if "rollout" in roles:
            parts.publisher.returning |= set(replaced)
        if "actor" in roles:
            parts.publisher.channel_ranks = None  # a new trainer is no end of it
        return len(replaced)

    async def _read_progress(
        self, groups: Sequence[TrainerGroup[Any]], kept: Sequence[int]
    ) -> list[dict[int, UpdateProgress]]:
        """Waits until the trainers that are left have finished what they were called for, and returns how far each of
        them is."""
        limit_s = self.parts.recipe.cluster.worker_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                answers = await gather_calls(
                    *(trainers.group.all(ModelWorker.read_progress, ranks=kept) for trainers in groups)
                )
        except TimeoutError:
            raise RunError(
                f"the trainers that are left did not finish within {limit_s:g} s (`cluster.worker_timeout_s`)"
            ) from None
        return [dict(zip(kept, own, strict=True)) for own in answers]


def most_advanced(
    trainers: TrainerGroup[Any], copies: Sequence[int], progress: dict[int, UpdateProgress]
) -> tuple[int, UpdateProgress]:
    """Returns the copy of the model that has made the most updates, and its progress."""
    reached = {copy: [progress[rank] for rank in trainers.mesh.ranks_of_copy(copy)] for copy in copies}
    agreeing = [copy for copy, own in reached.items() if len({one.num_updates for one in own}) == 1]
    made = trainers.progress.num_updates
    best = max(agreeing, key=lambda copy: reached[copy][0].num_updates, default=None)
    if best is None or reached[best][0].num_updates - made not in (0, 1):
        raise RunError(f"the replicas of {trainers.group.role} do not agree on how many updates were made")
    return best, reached[best][0]
