"""Players that are lost at awkward moments: what is replaced, how often, and who gets the weights."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral.loop.rollout_scheduler import RolloutScheduler
from corral.loop.supervisor import Supervisor
from corral.recipe.placement import Placement
from corral.recipe.schema import Cluster
from corral.runtime.group import Group, WorkerLost


class Workers(Group):
    """Players that never finish a game; the ranks in `dead` are lost."""

    def __init__(self, size: int) -> None:
        super().__init__("rollout", [f"player {rank}" for rank in range(size)], 60.0)
        self.dead: set[int] = set()

    async def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if rank in self.dead:
            raise WorkerLost(f"player {rank} died", device=rank)
        if method == "collect":
            await asyncio.Event().wait()


class Runtime:
    """Players on the first devices, the trainer on the last; each device is a node of its own."""

    def __init__(self, players: int) -> None:
        self.placement = Placement(players + 1, {"actor": (players,), "rollout": tuple(range(players))})
        self.workers, self.replaced, self.num_nodes = Workers(players), list[int](), players + 1
        self.cannot_start = False

    def devices_of(self, address: str) -> tuple[int, ...]:
        return (int(address),)

    async def replace(self, device: int) -> None:
        self.replaced.append(device)
        if self.cannot_start:
            raise WorkerLost(f"player {device} died again", device=device)
        self.workers.dead.discard(device)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def build(self, role: str, recipe: Any, resume_from: Path | None, *, rank: int | None = None) -> None: ...


class WeightPublisher:
    def __init__(self, workers: Workers) -> None:
        self.workers, self.sent = workers, list[tuple[int, ...]]()

    def reopen(self) -> None: ...

    async def publish(self, version: int, ranks: set[int]) -> dict[str, float]:
        self.sent.append(tuple(sorted(ranks)))
        await self.workers.all("receive_weights", ranks=sorted(ranks))
        return {"sent": 1.0}


class Scene:
    """Made within an event loop."""

    def __init__(self, players: int, **cluster: Any) -> None:
        self.runtime = Runtime(players)
        self.scheduler = RolloutScheduler(self.runtime.workers, 100)
        self.publisher = WeightPublisher(self.runtime.workers)
        parts: Any = SimpleNamespace(
            runtime=self.runtime,
            scheduler=self.scheduler,
            publisher=self.publisher,
            recipe=SimpleNamespace(cluster=Cluster(nodes=players + 1, **cluster)),
        )
        self.lost_nodes: set[str] = set()
        self.mender = Supervisor(parts, 7, self.lost_nodes)
        for rank in range(players):
            self.scheduler.open(rank)

    async def mended(self) -> None:
        while self.mender.mending:
            await asyncio.sleep(0)


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 20))


def test_one_death_is_replaced_once_however_many_hear_of_it() -> None:
    async def scene() -> None:
        s = Scene(2)
        s.runtime.workers.dead = {1}
        lost = WorkerLost("player 1 died", device=1)
        assert s.mender.lose(lost)
        assert s.mender.lose(lost)
        await s.mended()
        assert s.runtime.replaced == [1]
        assert set(s.scheduler.lanes) == {0, 1}

    run(scene())


def test_a_player_that_dies_while_weights_are_sent_gets_them_when_it_is_back() -> None:
    async def scene() -> None:
        s = Scene(2)
        s.runtime.workers.dead = {1}
        async with s.mender.trainers:
            assert await s.mender.publish() == {"sent": 1.0}
        await s.mended()
        assert s.publisher.sent == [(0, 1), (0,), (0, 1)]

    run(scene())


def test_the_only_player_dies_while_weights_are_sent() -> None:
    async def scene() -> None:
        s = Scene(1)
        s.runtime.workers.dead = {0}
        async with s.mender.trainers:
            assert await s.mender.publish() == {}
        await s.mended()
        assert set(s.scheduler.lanes) == {0}

    run(scene())


def test_nothing_is_sent_to_a_new_player_while_the_trainers_are_busy() -> None:
    async def scene() -> None:
        s = Scene(2)
        s.runtime.workers.dead = {1}
        async with s.mender.trainers:
            s.mender.lose(WorkerLost("player 1 died", device=1))
            for _ in range(100):
                await asyncio.sleep(0)
            assert s.runtime.replaced == [1]
            assert s.publisher.sent == []
        await s.mended()
        assert s.publisher.sent == [(0, 1)]

    run(scene())


def test_a_run_without_any_player_that_can_be_started_ends() -> None:
    async def scene() -> None:
        s = Scene(1)
        s.runtime.cannot_start = True
        s.runtime.workers.dead = {0}
        assert s.mender.lose(WorkerLost("player 0 died", device=0))
        with pytest.raises(WorkerLost, match="died again"):
            await s.mender.guard(asyncio.Event().wait())
        assert len(s.runtime.replaced) == 3

    run(scene())


def test_a_trainer_is_not_done_without() -> None:
    async def scene() -> None:
        assert not Scene(2).mender.lose(WorkerLost("the trainer died", device=2))

    run(scene())


def test_nodes_that_only_played_are_done_without_until_none_is_left() -> None:
    async def scene() -> None:
        s = Scene(2, min_nodes=1)
        for device, goes_on in ((0, True), (1, False)):
            s.runtime.num_nodes -= 1
            assert s.mender.lose(WorkerLost("gone", device=device, node=str(device))) is goes_on
        assert s.lost_nodes == {"0", "1"}
        assert s.runtime.replaced == []

    run(scene())


def test_a_node_below_the_minimum_is_not_done_without() -> None:
    async def scene() -> None:
        s = Scene(2)
        s.runtime.num_nodes -= 1
        assert not s.mender.lose(WorkerLost("gone", device=0, node="0"))

    run(scene())
