"""The rollout role: an engine and the driver that runs environments against it; and the scheduler that keeps such
workers busy.

Requests are submitted in any number at any time and collected as they finish, so tokens, observations and rewards of a
trajectory stay on the worker until it is over.
"""

import asyncio
import heapq
import itertools
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from corral.data.batch import Trajectory
from corral.envs.base import EnvSet
from corral.model.families import check_length
from corral.model.lora import bit_sums, transferred_parameters
from corral.model.model_loading import (
    end_tokens,
    load_model,
    load_skeleton,
    load_tokenizer,
    model_source,
    resolve_dtype,
)
from corral.recipe.errors import RunError, UserError
from corral.recipe.rules import max_trajectory_tokens
from corral.recipe.schema import MAX_PREFILL_TOKENS, MAX_SEQUENCES, Recipe
from corral.rewards.scorer_pool import ScorerPools
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import Engine, Sampling
from corral.rollout.engine_process import EngineSettings
from corral.rollout.native_engine import NativeEngine
from corral.rollout.process_engine import EngineLost, ProcessEngine
from corral.runtime.group import Group, WorkerLost
from corral.runtime.transfer_channels import Channel, TransferHandle, make_channel
from corral.runtime.worker import Role, WorkerContext

logger = logging.getLogger(__name__)

SHARED_MEMORY_FRACTION = 0.4
"""Part of a device's memory that an engine of others takes where trainers are on it, too."""


@dataclass(frozen=True)
class RolloutRequest:
    """A prompt and how to roll it out."""

    id: int
    """Number under which the trajectories come back."""
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    """Settings without the model's own end tokens, which are added here."""
    purpose: str
    """What it is for (train, validation, baseline), which is part of the seed."""


FinishedRequest = tuple[int, list[Trajectory]]
"""A request's id and its trajectories."""


class RolloutWorker(Role):
    """Rolls out requests. `path`: of the model that the engine begins with."""

    channel: Channel | None = None

    def __init__(self, context: WorkerContext, recipe: Recipe, path: str, pools: ScorerPools) -> None:
        self.context, self.recipe = context, recipe
        spec, tokenizer = recipe.model.model_copy(update={"path": path}), load_tokenizer(recipe.model)
        if recipe.rollout.engine.in_process:
            # The engine decodes with the trainer's own tensors where these are here and whole, else with a copy.
            model = context.roles["actor"].trainer.whole_model if "actor" in context.roles else None
            if model is None:
                model = load_model(spec, context.device).requires_grad_(False)
            self.engine: Engine = native_engine(recipe, model, tokenizer)
        else:
            model = load_skeleton(spec, resolve_dtype(spec.dtype, context.device))
            self.engine = process_engine(context, recipe, model, tokenizer, path)
        self.driver = RolloutDriver(
            engine=self.engine,
            envs=EnvSet(recipe.tagged_environments, pools.by_tag, recipe.rollout, context.prints),
            chat=ChatRenderer(tokenizer, recipe.data.chat),
            max_turns=recipe.rollout.max_turns,
            max_prompt_tokens=recipe.data.max_prompt_tokens,
            max_response_tokens=recipe.rollout.max_response_tokens,
            max_turn_tokens=recipe.rollout.max_turn_tokens,
            max_observation_tokens=recipe.rollout.max_observation_tokens,
            seed=recipe.seed,
        )
        self.end_tokens = end_tokens(model, tokenizer) | frozenset(recipe.rollout.stop_token_ids)
        self.shares_weights = "actor" in context.roles and context.roles["actor"].trainer.whole_model is model
        self.finished: list[FinishedRequest] = []
        self.failure: BaseException | None = None
        self.has_news = asyncio.Event()
        self.num_restarts = 0
        """How often the engine's process was started again since a request has finished."""
        self.replacing = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()

    def facts(self) -> dict[str, Any]:
        return {"max_sequences": self.engine.max_sequences, "warning": self.engine.warning}

    # --- rollouts

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Starts requests and returns at once. Those that are alike but for their prompt start together."""
        alike: dict[tuple[int, Sampling, str], list[RolloutRequest]] = {}
        for request in requests:
            alike.setdefault((request.num_samples, request.sampling, request.purpose), []).append(request)
        for some in alike.values():
            task = asyncio.get_running_loop().create_task(self._roll_out(some))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def collect(self, requests: Sequence[RolloutRequest]) -> list[FinishedRequest]:
        """Starts requests, and returns what has finished since the last call. Waits for the next one to finish, or for
        half of the call's deadline: an empty answer shows that the worker lives. Raises what no other request could
        survive either, and an engine that has made no progress meanwhile."""
        await self.submit(requests)
        before = self.engine.num_decode_steps
        try:
            await asyncio.wait_for(self.has_news.wait(), self.context.timeout_s / 2)
        except TimeoutError:
            if self.engine.num_in_flight and self.engine.num_decode_steps == before:
                raise RunError(
                    f"the engine has not generated anything for {self.context.timeout_s / 2:g} s "
                    "(half of `cluster.call_timeout_s`), and something waits for it"
                ) from None
        self.has_news.clear()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        finished, self.finished = self.finished, []
        return finished

    async def ping(self) -> None:
        """Answers, which is enough."""

    async def cancel(self) -> None:
        """Drops all requests."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.finished.clear()
        self.has_news.clear()

    async def _roll_out(self, requests: Sequence[RolloutRequest]) -> None:
        """Consumes requests, produces finished ones; waits for the engine and environments, which have deadlines."""
        remaining = {id(request.prompt): request for request in requests}
        first = requests[0]

        def on_group(prompt: Prompt, trajectories: list[Trajectory]) -> None:
            self.finished.append((remaining.pop(id(prompt)).id, trajectories))
            self.num_restarts = 0
            self.has_news.set()

        try:
            while remaining:
                try:
                    await self.driver.roll_out(
                        [request.prompt for request in remaining.values()],
                        first.num_samples,
                        replace(first.sampling, stop_tokens=self.end_tokens),
                        first.purpose,
                        on_group,
                    )
                except EngineLost as lost:
                    await self._replace_engine(lost)
        except Exception as error:
            self.failure = error
            self.has_news.set()

    async def _replace_engine(self, lost: EngineLost) -> None:
        engine, trainer = self._lost_engine(lost)
        async with self.replacing:  # all requests in flight come here
            if engine.lost is not None:
                await engine.restart(trainer.weights(merged=True), engine.version)

    def _lost_engine(self, lost: EngineLost) -> tuple[ProcessEngine, Any]:
        """Returns the engine, whose process can be started again because its weights are at hand: the trainer's in this
        process, which do not change during a rollout. Else this process ends, and the one that takes its place gets the
        weights that others get."""
        assert isinstance(self.engine, ProcessEngine)
        trainer = self.context.roles["actor"].trainer if "actor" in self.context.roles else None
        if trainer is None or trainer.whole_model is None or self.recipe.schedule.max_staleness:
            if not self.context.can_be_replaced:
                raise lost
            print(f"this worker ends, for another to take its place: {lost}", file=sys.stderr, flush=True)
            self.engine.close()
            os._exit(1)
        self.num_restarts += self.engine.lost is not None and not self.replacing.locked()
        if self.num_restarts > MAX_DEATHS:
            raise RunError(f"the engine's process ended {self.num_restarts} times, one after the other: {lost}")
        if not self.replacing.locked():
            logger.warning("%s\nit is started again", lost)
        return self.engine, trainer

    def release_cache(self) -> None:
        """Gives the cache's memory to who computes next on this device; the next request takes it again. Does nothing
        while trajectories are in progress, whose keys and values are in it."""
        if not self.tasks:
            with suppress(EngineLost):  # which has given all it had
                self.engine.release_cache()

    def release_weights(self) -> None:
        """Gives the memory of the engine's copy of the weights to the trainer beside it, which sends new ones before
        the next request."""
        assert isinstance(self.engine, NativeEngine)
        assert not self.shares_weights
        self.engine.release_weights()

    # --- new weights

    async def join_channel(self, kind: str, rendezvous: str, rank: int, size: int, num_senders: int) -> None:
        """Joins the channel through which weights come from the trainers, as end `rank`; the first ones send."""
        if self.channel is not None:
            self.channel.close()
        self.channel = make_channel(kind, self.context.address, self.context.device)
        await asyncio.to_thread(self.channel.join, rendezvous, rank, size, num_senders)

    async def receive_weights(self, handle: TransferHandle, version: int) -> float:
        """Receives weights from trainers in other processes. Returns the seconds for which decoding paused."""
        assert self.channel is not None
        try:
            return await self.engine.update(self.channel.receive(handle, self.engine.weight_layout), version)
        except EngineLost as lost:
            self._lost_engine(lost)  # ends this process, or raises
            raise

    def load_local_weights(self, version: int) -> bool:
        """Takes the weights of the trainer in this process. Where its tensors are the engine's own there is nothing to
        do but note the version; sharded ones are put together and copied. Returns whether any were."""
        trainer = self.context.roles["actor"].trainer
        merged = not self.recipe.rollout.engine.in_process
        self._load(() if self.shares_weights else trainer.weights(merged), version)
        return not self.shares_weights

    def set_version(self, version: int) -> None:
        """Notes that the weights are of this version."""
        self._load((), version)

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        try:
            self.engine.load(weights, version)
        except EngineLost as lost:
            engine, trainer = self._lost_engine(lost)
            engine.restart_and_load(trainer.weights(merged=True), version)

    def adapter_sums(self) -> dict[str, int]:
        """Returns the sum of the bits of each adapter that the native engine decodes with."""
        assert isinstance(self.engine, NativeEngine)
        return bit_sums((name, parameter.detach()) for name, parameter in transferred_parameters(self.engine.model))

    async def compute_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Returns log-probs of all tokens behind the first, under the weights that the engine decodes with."""
        try:
            return await self.engine.compute_logprobs(tokens, self.recipe.rollout.temperature)
        except EngineLost as lost:
            await self._replace_engine(lost)
            return await self.engine.compute_logprobs(tokens, self.recipe.rollout.temperature)

    def hurry(self) -> None:
        if isinstance(self.engine, ProcessEngine):
            self.engine.hurry()

    def close(self) -> None:
        self.driver.envs.close()
        self.engine.close()


class EngineMember(Role):
    """Holds a device for an engine that begins on another one (`rollout.engine.tensor_parallel`)."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def load_local_weights(self, version: int) -> bool:
        """Helps to put together the sharded tensors that the engine's worker sends."""
        for _ in self.context.roles["actor"].trainer.weights(merged=True):
            pass
        return True

    def set_version(self, version: int) -> None: ...

    def release_cache(self) -> None:
        """The engine's worker does it, for all of its devices, before the trainers begin together."""


def native_engine(recipe: Recipe, model: Any, tokenizer: Any) -> NativeEngine:
    check_length(model.config, max_trajectory_tokens(recipe))
    engine = NativeEngine(
        model,
        tokenizer,
        max_sequences=recipe.rollout.max_sequences or MAX_SEQUENCES[model.device.type],
        max_prefill_tokens=recipe.rollout.max_prefill_tokens or MAX_PREFILL_TOKENS[model.device.type],
        max_length=max_trajectory_tokens(recipe),
    )
    engine.check(recipe.model.path)
    return engine


def process_engine(context: WorkerContext, recipe: Recipe, skeleton: Any, tokenizer: Any, path: str) -> ProcessEngine:
    """Starts an engine in a process of its own. It loads the model itself, and gets new weights from then on."""
    model, rollout, device = recipe.model, recipe.rollout, context.device.type
    if tokenizer.vision is not None:
        raise UserError(f"rollout.engine: {model.path} reads images, which only the native engine takes, in process")
    shares_device = device == "cuda" and "actor" in context.roles
    settings = EngineSettings(
        name=rollout.engine.name,
        model=model_source(path),
        dtype=str(next(skeleton.parameters()).dtype).removeprefix("torch."),
        max_length=max_trajectory_tokens(recipe),
        max_sequences=rollout.max_sequences or MAX_SEQUENCES[device],
        max_prefill_tokens=rollout.max_prefill_tokens or MAX_PREFILL_TOKENS[device],
        seed=recipe.seed + context.rank,
        truncates=rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0,
        trust_remote_code=model.trust_remote_code,
        config_overrides=model.config_overrides,
        exact=model.exact,
        implementation=model.implementation,
        tensor_parallel=rollout.engine.tensor_parallel,
        memory_fraction=rollout.engine.memory_fraction or (SHARED_MEMORY_FRACTION if shares_device else None),
        arguments=rollout.engine.arguments,
    )
    logs = recipe.logging.folder / recipe.name / "logs"
    log = logs / f"engine-{context.rank}.log" if logs.is_dir() else None
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(context.accelerators)} if len(context.accelerators) > 1 else {}
    return ProcessEngine(
        settings,
        tokenizer,
        skeleton,
        context.device,
        python=rollout.engine.python,
        log=log,
        environment=environment,
        silence_s=recipe.cluster.worker_timeout_s,
        model_of_restarts=model_source(model.path),
    )


# --- at the controller: requests go to who has capacity, and those of a lost worker to the others

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

    `on_finished` is called with the trajectories of each prompt, as they come.
    """

    def __init__(
        self,
        group: Group[RolloutWorker],
        max_load: float,
        on_finished: Callable[[list[Trajectory]], None] = lambda trajectories: None,
    ) -> None:
        self.group, self.max_load, self.on_finished = group, max_load, on_finished
        self.on_lost: Callable[[WorkerLost], bool] = lambda lost: False
        """Called with a worker that was lost; it calls `remove_worker` and returns True, or all requests fail."""
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
                requests, queue.unsent = queue.unsent, []
                queue.in_flight |= {request.id: request for request in requests}
                if collecting is None and queue.in_flight:
                    collecting = asyncio.ensure_future(self.group.one(queue.rank, RolloutWorker.collect, requests))
                elif requests:
                    await self.group.one(queue.rank, RolloutWorker.submit, requests)
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
                self.on_finished(trajectories)
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
