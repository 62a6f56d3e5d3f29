"""The rollout workers, as the controller has them: requests go to who has capacity, those of a lost one to the others,
and new weights to all of them."""

import asyncio
import heapq
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from corral.data.batch import Batch
from corral.data.trajectory import FloatArray, Trajectory
from corral.recipe.errors import RunError
from corral.rollout.driver import Prompt
from corral.rollout.engine import Sampling
from corral.runtime.group import Group, WorkerLost, gather_calls
from corral.runtime.model_workers import ActorWorker, TrainerGroup
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


# --- the last stage of a step: the engines get the new weights, and a probe shows that they have them
#
# In one process with whole tensors nothing travels: the engine decodes with the trainer's own. Otherwise weights go
# through a channel (`runtime/transfer_channels.py`), in buckets, and every engine computes the log-probs of one prompt
# afterwards, which must be the trainer's. A tensor that did not arrive, arrived twice or in the wrong place, or belongs
# to another version, shows there, whichever it is: all of them take part in every log-prob.


PROBE_TOKENS = 64
"""Tokens of the probe: one forward pass of next to no time."""

PROBE_BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 1.0, torch.float16: 0.1}
"""Largest deviation of a log-prob, by the model's data type: three to five times what mere rounding does. Where engine
and trainer use the same kernels the deviation is 0. With others (the same 64 tokens of SmolLM2-135M computed one by one
instead of all at once) it was 4e-5, 0.3 and 0.02: a log-prob is a difference of logits of up to 40, which bfloat16
rounds to multiples of 0.25. One of the model's 272 tensors missing made it 1.4 and more. Weights that are one update
old show in float32 (7e-4 for a learning rate of 1e-6), and not in the others with any bound that rounding keeps."""


class WeightPublisher:
    """Sends the actor's weights to all rollout workers that are there.

    `scheduler`: knows which rollout workers there are, and whom to tell when one is lost. `kind`: shared, collective,
    object or ipc. `prompt`: some tokens to probe with. Whoever calls it holds the lock of the trainers.
    """

    def __init__(
        self,
        actor: TrainerGroup[ActorWorker],
        scheduler: RolloutScheduler,
        kind: str,
        dtype: str,
        prompt: Sequence[int],
        version: int = 0,
    ) -> None:
        self.actor, self.scheduler, self.rollout, self.kind = actor, scheduler, scheduler.group, kind
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.probe = probe_batch(prompt if len(prompt) > 1 else [*prompt, *prompt])
        self.version = version
        """Version of the trainers' weights."""
        self.channel_ranks: list[int] | None = None
        """Ranks of the rollout workers that have joined the channel; None: there is no channel that works."""

    async def publish(self, version: int) -> dict[str, float]:
        """Consumes the trainers' weights; afterwards all engines sample with them. Waits for both sides. What is being
        generated goes on with the new weights, after a pause that is a metric."""
        self.version = version
        return await self._publish()

    async def add_receiver(self, rank: int, device: int) -> None:
        """Sends the current weights to a rollout worker that is new, and to all others again: a channel has a fixed set
        of ends, so there is a new one anyway. The loss of the new one is raised."""
        self.channel_ranks = None
        await self._publish((rank, device))

    async def _publish(self, joining: tuple[int, int] | None = None) -> dict[str, float]:
        """Publishes, and again without those that are lost meanwhile. `joining`: rank and device of a new one."""
        while ranks := sorted({*self.scheduler.queues, *(() if joining is None else joining[:1])}):
            try:
                return await self._publish_to(ranks)
            except WorkerLost as lost:
                if joining is not None and lost.device == joining[1]:
                    raise
                if not self.scheduler.on_lost(lost):
                    raise
        return {}

    async def _publish_to(self, ranks: Sequence[int]) -> dict[str, float]:
        started = time.perf_counter()
        # One that died while it was idle is noticed here, before others wait for it in a collective.
        await self.rollout.all(RolloutWorker.ping, ranks=ranks)
        if self.kind == "shared":
            pauses = await self.rollout.all(RolloutWorker.load_local_weights, self.version)
            if self.actor.mesh.is_whole:  # the engine's tensors are the trainer's
                return {}
        else:
            try:
                pauses = await self._send(list(ranks))
            except BaseException:
                self.channel_ranks = None  # it failed, or one of its ends is gone: of no use any more
                raise
        return {
            "time/transfer_s": time.perf_counter() - started,
            "time/pause_s": max(pauses),
            "transfer/probe_deviation": await self._check(ranks),
        }

    async def _send(self, ranks: list[int]) -> list[float]:
        actor, rollout = self.actor.group, self.rollout
        if ranks != self.channel_ranks:
            size = len(ranks) + 1
            rendezvous = await actor.one(0, ActorWorker.open_channel, self.kind)
            ends = [(self.kind, rendezvous, end, size) for end in range(1, size)]
            await gather_calls(
                actor.one(0, ActorWorker.join_channel, rendezvous, size),
                rollout.each(RolloutWorker.join_channel, ends, ranks=ranks),
            )
            self.channel_ranks = ranks
        pauses: list[float]
        if self.kind == "collective":  # both sides at the same time
            _, pauses = await gather_calls(
                actor.all(ActorWorker.send_weights),
                rollout.all(RolloutWorker.receive_weights, None, self.version, ranks=ranks),
            )
        else:
            handle = (await actor.all(ActorWorker.send_weights))[0]
            pauses = await rollout.all(RolloutWorker.receive_weights, handle, self.version, ranks=ranks)
        await actor.one(0, ActorWorker.release_weights)
        return pauses

    async def _check(self, ranks: Sequence[int]) -> float:
        trainer = await self.actor.compute_column(ActorWorker.compute_logprobs, self.probe, [[0]])
        engines = await self.rollout.all(RolloutWorker.compute_logprobs, self.probe.tokens.tolist(), ranks=ranks)
        return max(
            compare_logprobs(trainer[1:], engine, self.dtype, version=self.version, name=self.rollout.names[rank])
            for rank, engine in zip(ranks, engines, strict=True)
        )


def probe_batch(prompt: Sequence[int]) -> Batch:
    """Makes a batch of the beginning of a prompt, every token behind the first marked as generated."""
    return Batch.of([Trajectory.from_tokens(prompt[:PROBE_TOKENS])])


def compare_logprobs(
    trainer: Sequence[float] | FloatArray,
    engine: Sequence[float] | FloatArray,
    dtype: torch.dtype,
    *,
    version: int,
    name: str,
) -> float:
    """Returns the largest difference of two log-probs of the same token. `name`: of the engine, for the error if it is
    too large."""
    difference = np.abs(np.asarray(trainer, np.float64) - np.asarray(engine, np.float64))
    deviation, bound = float(difference.max()), PROBE_BOUNDS[dtype]
    if not deviation <= bound:  # nor when it is not a number
        raise RunError(
            f"after the transfer of version {version} the engine on {name} disagrees with the trainer by "
            f"{deviation:.2g} on the probe prompt (bound {bound:g}): its weights are not those that were sent, or the "
            "two do not compute the same model"
        )
    return deviation
