"""Keeps the rollout workers busy: games go to who has room, and those of a worker that was lost go to the others."""

import asyncio
import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from corral.data.trajectory import Trajectory
from corral.recipe.errors import RunError
from corral.rollout.driver import Prompt
from corral.rollout.engine import Sampling
from corral.runtime.group import Group, WorkerLost
from corral.runtime.rollout_worker import Game

logger = logging.getLogger(__name__)

Result = asyncio.Future[list[Trajectory]]
CANCEL_S = 10.0
MAX_DEATHS = 3
"""Of workers, one after the other, that a prompt may have seen before it is taken to be the cause."""


@dataclass
class WorkerQueue:
    """One worker's games."""

    rank: int
    inbox: list[Game] = field(default_factory=list)
    """To be submitted."""
    playing: dict[int, Game] = field(default_factory=dict)
    load: int = 0
    """Trajectories of all these."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class RolloutScheduler:
    """`room`: trajectories that a worker has in flight at most; the rest waits here, so that a slow one takes less.

    `on_lost` hears of a worker that was lost, and either calls `lose` and returns True, or all games fail.
    """

    def __init__(self, group: Group, room: float, on_lost: Callable[[WorkerLost], bool] = lambda lost: False) -> None:
        self.group, self.room, self.on_lost = group, room, on_lost
        self.lanes: dict[int, WorkerQueue] = {}
        self.by_load: list[tuple[int, int]] = []
        """A heap of (load, rank); an entry that is no longer true is skipped when it comes up."""
        self.waiting: deque[Game] = deque()
        self.results: dict[int, Result] = {}
        self.numbers = itertools.count()
        self.deaths: Counter[int] = Counter()
        """Of workers, while they were playing a game."""
        self.error: Exception | None = None
        """After which nothing is played any more."""

    def open(self, rank: int) -> None:
        """From now on the worker takes games."""
        lane = self.lanes[rank] = WorkerQueue(rank)
        lane.task = asyncio.get_running_loop().create_task(self._feed(lane))
        heapq.heappush(self.by_load, (0, rank))
        self._deal()

    def play(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        purpose: str = "train",
        *,
        first: bool = False,
    ) -> list[Result]:
        """One future for each prompt, with its trajectories. `first`: before what waits already."""
        loop = asyncio.get_running_loop()
        games = [Game(next(self.numbers), prompt, samples, sampling, purpose) for prompt in prompts]
        self.results |= {game.number: loop.create_future() for game in games}
        results = [self.results[game.number] for game in games]
        if self.error is not None:
            self._fail(self.error)
            return results
        if first:
            self.waiting.extendleft(reversed(games))
        else:
            self.waiting.extend(games)
        self._deal()
        return results

    async def cancel(self) -> None:
        """Forgets all games."""
        for result in self.results.values():
            result.cancel()
        self.results.clear()
        self.waiting.clear()
        for lane in self.lanes.values():
            lane.inbox.clear()
            lane.playing.clear()
            self._load(lane, -lane.load)
        calls = (self.group.one(rank, "cancel", timeout_s=CANCEL_S) for rank in self.lanes)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                logger.warning("a player did not drop its games: %s", answer)

    async def close(self) -> None:
        tasks = [lane.task for lane in self.lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _deal(self) -> None:
        """Each game to the lane with the least in flight, while one has room."""
        while self.waiting and self.by_load:
            load, rank = self.by_load[0]
            lane = self.lanes.get(rank)
            if lane is None or lane.load != load:
                heapq.heappop(self.by_load)
                continue
            if load and load + self.waiting[0].samples > self.room:
                return
            game = self.waiting.popleft()
            lane.inbox.append(game)
            self._load(lane, game.samples)
            lane.wake.set()

    def _load(self, lane: WorkerQueue, more: int) -> None:
        lane.load += more
        heapq.heappush(self.by_load, (lane.load, lane.rank))
        if len(self.by_load) > 8 * len(self.lanes) + 64:
            self.by_load = [(lane.load, rank) for rank, lane in self.lanes.items()]
            heapq.heapify(self.by_load)

    async def _feed(self, lane: WorkerQueue) -> None:
        """Consumes a lane's inbox, produces results. Waits for games (unblocked by `_deal`) and for the worker's next
        finished ones (at most the group's deadline: a player that makes no progress says so before)."""
        collecting: asyncio.Task[list[tuple[int, list[Trajectory]]]] | None = None
        waking = asyncio.ensure_future(lane.wake.wait())
        try:
            while True:
                if lane.inbox:
                    games, lane.inbox = lane.inbox, []
                    lane.playing |= {game.number: game for game in games}
                    await self.group.one(lane.rank, "submit", games)
                if collecting is None and lane.playing:
                    collecting = asyncio.ensure_future(self.group.one(lane.rank, "collect"))
                await asyncio.wait({waking, *([collecting] if collecting else [])}, return_when="FIRST_COMPLETED")
                if waking.done():
                    lane.wake.clear()
                    waking = asyncio.ensure_future(lane.wake.wait())
                if collecting is not None and collecting.done():
                    finished, collecting = collecting.result(), None
                    self._finish(lane, finished)
        except WorkerLost as lost:
            if not self.on_lost(lost):
                self._fail(lost)
        except Exception as error:
            self._fail(error)
        finally:
            waking.cancel()
            if collecting is not None:
                collecting.cancel()

    def _finish(self, lane: WorkerQueue, finished: list[tuple[int, list[Trajectory]]]) -> None:
        for number, trajectories in finished:
            self.deaths.pop(number, None)
            if (game := lane.playing.pop(number, None)) is not None:
                self._load(lane, -game.samples)
            result = self.results.pop(number, None)
            if result is not None and not result.done():
                result.set_result(trajectories)
        self._deal()

    def lose(self, rank: int, lost: WorkerLost) -> bool:
        """Takes a worker out; its games are played by the others, or by the next one that is opened. False: it was
        taken out before."""
        lane = self.lanes.pop(rank, None)
        if lane is None:
            return False
        if lane.task is not None and lane.task is not asyncio.current_task():
            lane.task.cancel()
        games = [*lane.playing.values(), *lane.inbox]
        logger.warning("%s; the %d prompts that it was playing are played elsewhere", lost, len(games))
        self.deaths.update(game.number for game in lane.playing.values())
        for game in games:
            if self.deaths[game.number] >= MAX_DEATHS:
                self._fail(
                    RunError(f"{MAX_DEATHS} workers died while they played prompt {game.prompt.prompt_id}: {lost}")
                )
                return True
        self.waiting.extendleft(reversed(games))
        self._deal()
        return True

    def _fail(self, error: Exception) -> None:
        self.error = error
        for result in self.results.values():
            if not result.done():
                result.set_exception(error)
                result.exception()  # one of them is going to be asked for it, and that is enough
        self.results.clear()
