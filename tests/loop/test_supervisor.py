"""Rollout workers that are lost at awkward moments: what is replaced, how often, and who gets the weights."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral.loop.supervisor import Supervisor
from corral.recipe.mesh import MeshShape
from corral.recipe.placement import Placement
from corral.recipe.schema import Cluster
from corral.runtime.group import Group, Ranks, WorkerLost
from corral.runtime.model_workers import TrainerGroup
from corral.runtime.rollout_worker import RolloutScheduler, RolloutWorker
from corral.runtime.weight_publisher import WeightPublisher


class FakeWorkers(Group[RolloutWorker]):
    """Rollout workers that never finish a request; the ranks in `dead` are lost."""

    def __init__(self, size: int) -> None:
        super().__init__("rollout", [f"worker {rank}" for rank in range(size)], 60.0)
        self.dead: set[int] = set()

    async def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if rank in self.dead:
            raise WorkerLost(f"worker {rank} died", device=rank)
        if method == "collect":
            await asyncio.Event().wait()


class FakeRuntime:
    """Rollout workers on the first devices, the trainer on the last; each device is a node of its own."""

    def __init__(self, num_workers: int) -> None:
        self.placement = Placement(num_workers + 1, {"actor": (num_workers,), "rollout": tuple(range(num_workers))})
        self.workers, self.replaced, self.num_nodes = FakeWorkers(num_workers), list[int](), num_workers + 1
        self.cannot_start, self.lost_devices = False, set[int]()

    def devices_of(self, address: str) -> tuple[int, ...]:
        return (int(address),)

    async def replace(self, device: int) -> None:
        self.replaced.append(device)
        if self.cannot_start:
            raise WorkerLost(f"worker {device} died again", device=device)
        self.workers.dead.discard(device)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def build(self, role: str, recipe: Any, resume_from: Path | None, *, ranks: Ranks = None) -> None: ...


class FakePublisher(WeightPublisher):
    """The real one, but for the transfer itself."""

    def __init__(self, scheduler: RolloutScheduler) -> None:
        self.scheduler, self.rollout = scheduler, scheduler.group
        self.version, self.sent, self.returning = 7, list[tuple[int, ...]](), set[int]()
        self.returns_weights = self.is_released = False
        self.actor: Any = TrainerGroup(scheduler.group, MeshShape())  # type: ignore[arg-type]

    async def _publish_to(self, ranks: Sequence[int]) -> dict[str, float]:
        self.sent.append(tuple(ranks))
        await self.rollout.all(RolloutWorker.ping, ranks=ranks)
        return {"sent": 1.0}


class Scene:
    """Made within an event loop."""

    def __init__(self, num_workers: int, **cluster: Any) -> None:
        self.runtime = FakeRuntime(num_workers)
        self.scheduler = RolloutScheduler(self.runtime.workers, 100)
        self.publisher = FakePublisher(self.scheduler)
        self.trainer_lock = asyncio.Lock()
        parts: Any = SimpleNamespace(
            runtime=self.runtime,
            scheduler=self.scheduler,
            publisher=self.publisher,
            trainer_lock=self.trainer_lock,
            actor=self.publisher.actor,
            critic=None,
            reference=None,
            recipe=SimpleNamespace(cluster=Cluster(nodes=num_workers + 1, **cluster)),
        )
        self.lost_nodes: set[str] = set()
        self.supervisor = Supervisor(parts, self.lost_nodes)
        for rank in range(num_workers):
            self.scheduler.add_worker(rank)

    async def replaced(self) -> None:
        while self.supervisor.replacing:
            await asyncio.sleep(0)


def in_event_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    return run


@in_event_loop
async def test_one_death_is_replaced_once_however_many_hear_of_it() -> None:
    s = Scene(2)
    s.runtime.workers.dead = {1}
    lost = WorkerLost("worker 1 died", device=1)
    assert s.supervisor.handle_loss(lost)
    assert s.supervisor.handle_loss(lost)
    await s.replaced()
    assert s.runtime.replaced == [1]
    assert set(s.scheduler.queues) == {0, 1}


@in_event_loop
async def test_a_rollout_worker_that_dies_while_weights_are_sent_gets_them_when_it_is_back() -> None:
    s = Scene(2)
    s.runtime.workers.dead = {1}
    async with s.trainer_lock:
        assert await s.publisher.publish(8) == {"sent": 1.0}
    await s.replaced()
    assert s.publisher.sent == [(0, 1), (0,), (0, 1)]


@in_event_loop
async def test_the_only_rollout_worker_dies_while_weights_are_sent() -> None:
    s = Scene(1)
    s.runtime.workers.dead = {0}
    async with s.trainer_lock:
        assert await s.publisher.publish(8) == {}
    await s.replaced()
    assert set(s.scheduler.queues) == {0}


@in_event_loop
async def test_nothing_is_sent_to_a_new_rollout_worker_while_the_trainers_are_busy() -> None:
    s = Scene(2)
    s.runtime.workers.dead = {1}
    async with s.trainer_lock:
        s.supervisor.handle_loss(WorkerLost("worker 1 died", device=1))
        for _ in range(100):
            await asyncio.sleep(0)
        assert s.runtime.replaced == [1]
        assert s.publisher.sent == []
    await s.replaced()
    assert s.publisher.sent == [(0, 1)]


@in_event_loop
async def test_a_run_without_any_rollout_worker_that_can_be_started_ends() -> None:
    s = Scene(1)
    s.runtime.cannot_start = True
    s.runtime.workers.dead = {0}
    assert s.supervisor.handle_loss(WorkerLost("worker 0 died", device=0))
    with pytest.raises(WorkerLost, match="died again"):
        await s.supervisor.run(asyncio.Event().wait())
    assert len(s.runtime.replaced) == 3


@in_event_loop
async def test_a_trainer_is_not_done_without() -> None:
    assert not Scene(2).supervisor.handle_loss(WorkerLost("the trainer died", device=2))


@in_event_loop
async def test_a_relay_is_not_done_without() -> None:
    """Who of its workers has made a call, and who has not, nobody knows: to call again might add a gradient twice."""
    assert not Scene(2).supervisor.handle_loss(WorkerLost("the relay of a node ended"))


@in_event_loop
async def test_nodes_with_rollout_workers_only_are_done_without_until_none_is_left() -> None:
    s = Scene(2, min_nodes=1)
    for device, goes_on in ((0, True), (1, False)):
        s.runtime.num_nodes -= 1
        assert s.supervisor.handle_loss(WorkerLost("gone", device=device, node=str(device))) is goes_on
    assert s.lost_nodes == {"0", "1"}
    assert s.runtime.replaced == []


@in_event_loop
async def test_a_node_below_the_minimum_is_not_done_without() -> None:
    s = Scene(2)
    s.runtime.num_nodes -= 1
    assert not s.supervisor.handle_loss(WorkerLost("gone", device=0, node="0"))
