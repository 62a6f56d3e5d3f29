"""Keeps the rollout workers busy: requests go to who has capacity, and those of a lost worker go to the others."""

import asyncio
import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from corral.data.batch import Trajectory
from corral.recipe.errors import RunError
from corral.rollout.driver import Prompt
from corral.rollout.engine import Sampling
from corral.runtime.group import Group, WorkerLost
from corral.runtime.rollout_worker import FinishedRequest, RolloutRequest, RolloutWorker

logger = logging.getLogger(__name__)

PendingTrajectories = asyncio.Future[list[Trajectory]]
CANCEL_S = 10.0
MAX_DEATHS = 3
"""Workers, one after the other, that may die with a prompt before it is taken to be the cause."""


@dataclass
class WorkerQueue:
    """One worker's requests."""

    rank: int
    unsent: list[RolloutRequest] = field(default_factory=list)
    """Requests to be submitted to the worker."""
    in_flight: dict[int, RolloutRequest] = field(default_factory=dict)
    """Requests that the worker has, by id."""
    load: int = 0
    """Number of trajectories of all these."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class RolloutScheduler:
    """`max_load`: trajectories that a worker has in flight at most; the rest waits here, so that a slow one gets fewer.

    `on_lost` is called with a worker that was lost; it calls `remove_worker` and returns True, or all requests fail.
    """

    def __init__(
        self,
        group: Group[RolloutWorker],
        max_load: float,
        on_lost: Callable[[WorkerLost], bool] = lambda lost: False,
    ) -> None:
        self.group, self.max_load, self.on_lost = group, max_load, on_lost
        self.queues: dict[int, WorkerQueue] = {}
        """Queues of the workers that take requests, by rank."""
        self.by_load: list[tuple[int, int]] = []
        """A heap of (load, rank); an entry that is no longer true is skipped when it comes up."""
        self.waiting: deque[RolloutRequest] = deque()
        self.results: dict[int, PendingTrajectories] = {}
        self.ids = itertools.count()
        self.num_deaths: Counter[int] = Counter()
        """Workers that died while they had a request, by its id."""
        self.error: Exception | None = None
        """What made all requests fail; after that none is taken any more."""

    def add_worker(self, rank: int) -> None:
        """From now on the worker takes requests."""
        queue = self.queues[rank] = WorkerQueue(rank)
        queue.task = asyncio.get_running_loop().create_task(self._feed(queue))
        heapq.heappush(self.by_load, (0, rank))
        self._dispatch()

    def submit(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        purpose: str = "train",
        *,
        first: bool = False,
    ) -> list[PendingTrajectories]:
        """Returns one future for each prompt, with its trajectories. `first`: before what waits already."""
        loop = asyncio.get_running_loop()
        requests = [RolloutRequest(next(self.ids), prompt, num_samples, sampling, purpose) for prompt in prompts]
        results = [self.results.setdefault(request.id, loop.create_future()) for request in requests]
        if self.error is not None:
            self._fail(self.error)
            return results
        if first:
            self.waiting.extendleft(reversed(requests))
        else:
            self.waiting.extend(requests)
        self._dispatch()
        return results

    async def cancel(self) -> None:
        """Drops all requests."""
        for result in self.results.values():
            result.cancel()
        self.results.clear()
        self.waiting.clear()
        for queue in self.queues.values():
            queue.unsent.clear()
            queue.in_flight.clear()
            self._add_load(queue, -queue.load)
        calls = (self.group.one(rank, RolloutWorker.cancel, timeout_s=CANCEL_S) for rank in self.queues)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                logger.warning("a rollout worker did not drop its requests: %s", answer)

    async def close(self) -> None:
        tasks = [queue.task for queue in self.queues.values() if queue.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _dispatch(self) -> None:
        """Gives each waiting request to the worker with the least in flight, while that one has capacity."""
        while self.waiting and self.by_load:
            load, rank = self.by_load[0]
            queue = self.queues.get(rank)
            if queue is None or queue.load != load:
                heapq.heappop(self.by_load)
                continue
            if load and load + self.waiting[0].num_samples > self.max_load:
                return
            request = self.waiting.popleft()
            queue.unsent.append(request)
            self._add_load(queue, request.num_samples)
            queue.wake.set()

    def _add_load(self, queue: WorkerQueue, more: int) -> None:
        queue.load += more
        heapq.heappush(self.by_load, (queue.load, queue.rank))
        if len(self.by_load) > 8 * len(self.queues) + 64:  # mostly entries that are no longer true
            self.by_load = [(queue.load, rank) for rank, queue in self.queues.items()]
            heapq.heapify(self.by_load)

    async def _feed(self, queue: WorkerQueue) -> None:
        """Consumes a worker's queue, produces results. Waits for requests (unblocked by `_dispatch`) and for the
        worker's next finished ones (at most the group's deadline: an engine without progress raises before)."""
        collecting: asyncio.Task[list[FinishedRequest]] | None = None
        waking = asyncio.ensure_future(queue.wake.wait())
        try:
            while True:
                if queue.unsent:
                    requests, queue.unsent = queue.unsent, []
                    queue.in_flight |= {request.id: request for request in requests}
                    await self.group.one(queue.rank, RolloutWorker.submit, requests)
                if collecting is None and queue.in_flight:
                    collecting = asyncio.ensure_future(self.group.one(queue.rank, RolloutWorker.collect))
                await asyncio.wait({waking, *([collecting] if collecting else [])}, return_when="FIRST_COMPLETED")
                if waking.done():
                    queue.wake.clear()
                    waking = asyncio.ensure_future(queue.wake.wait())
                if collecting is not None and collecting.done():
                    finished, collecting = collecting.result(), None
                    self._finish(queue, finished)
        except WorkerLost as lost:
            if not self.on_lost(lost):
                self._fail(lost)
        except Exception as error:
            self._fail(error)
        finally:
            waking.cancel()
            if collecting is not None:
                collecting.cancel()

    def _finish(self, queue: WorkerQueue, finished: list[FinishedRequest]) -> None:
        for request_id, trajectories in finished:
            self.num_deaths.pop(request_id, None)
            if (request := queue.in_flight.pop(request_id, None)) is not None:
                self._add_load(queue, -request.num_samples)
            result = self.results.pop(request_id, None)
            if result is not None and not result.done():
                result.set_result(trajectories)
        self._dispatch()

    def remove_worker(self, rank: int, lost: WorkerLost) -> bool:
        """Gives the requests of a lost worker to the others, or to the next one that is added. Returns False when it
        was removed before."""
        queue = self.queues.pop(rank, None)
        if queue is None:
            return False
        if queue.task is not None and queue.task is not asyncio.current_task():
            queue.task.cancel()
        requests = [*queue.in_flight.values(), *queue.unsent]
        logger.warning("%s; its %d prompts are rolled out elsewhere", lost, len(requests))
        # A prompt that crashes every worker it meets would otherwise take down one after the other, for ever.
        self.num_deaths.update(queue.in_flight.keys())
        for request in requests:
            if self.num_deaths[request.id] >= MAX_DEATHS:
                prompt_id = request.prompt.prompt_id
                self._fail(RunError(f"{MAX_DEATHS} workers died while they rolled out prompt {prompt_id}: {lost}"))
                return True
        self.waiting.extendleft(reversed(requests))
        self._dispatch()
        return True

    def _fail(self, error: Exception) -> None:
        self.error = error
        for result in self.results.values():
            if not result.done():
                result.set_exception(error)
                result.exception()  # one of them is going to be awaited, and that is enough for asyncio
        self.results.clear()
