"""Reward functions in processes of their own, so that one that hangs or crashes costs one sample and no more.

A thread of the pool takes the next job, sends it to its worker and waits for the reply until the deadline; a worker
that is late is killed, one that is late or dead is replaced at once, before the next job is taken.

Of a quick function a thread takes several jobs at once, where many wait, and hands several scores to the event loop at
once: to change between threads takes longer than the function does. The worker still has one after the other, each with
its own deadline and its own reply; those behind one that is late or deadly are put back into the queue.

What waits for what: `score` waits for its job's future. Whatever way a thread leaves its job, it resolves the future.
"""

import asyncio
import contextlib
import dataclasses
import math
import pickle
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

from corral.data.plugins import error_line, portable
from corral.data.rows import Row
from corral.recipe.schema import Environment, Reward
from corral.rewards.reward_function import call_reward_async, check_name, load_function
from corral.rewards.worker_process import WorkerPool, WorkerProcess

WORKER = "corral.rewards.scorer_worker"
MAX_JOBS_AT_ONCE = 16
AT_ONCE_S = 0.05
"""The jobs that a thread takes at once are to last at most this long."""

Outcome = Literal["ok", "raised", "timed_out", "died"]


@dataclass(frozen=True)
class Score:
    reward: float
    error: str | None = None
    """What went wrong; the reward is then the recipe's `on_error`."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreCounts:
    """How all calls so far have ended."""

    ok: int = 0
    raised: int = 0
    timed_out: int = 0
    died: int = 0

    def plus(self, outcome: Outcome) -> "ScoreCounts":
        return dataclasses.replace(self, **{outcome: getattr(self, outcome) + 1})


class RewardScorer(Protocol):
    """What runs the reward function: a `ScorerPool`, or for a debugger an `InProcessScorer`."""

    @property
    def counts(self) -> ScoreCounts: ...

    async def score(self, response: str, row: Row) -> Score:
        """Run the function on one response. Never raises for what the function does; see `Score.error`."""
        ...

    def close(self) -> None: ...


class ScorerPools:
    """The reward functions of a recipe: one scorer for each environment that uses one, by the environment's tag."""

    def __init__(self, by_tag: Mapping[str, RewardScorer]) -> None:
        self.by_tag = by_tag

    @classmethod
    def start(cls, environments: Mapping[str, Environment]) -> "ScorerPools":
        """Returns when every function is loaded, in all pools at the same time; or raises what is wrong with one."""
        pools = {tag: ScorerPool(environment.reward) for tag, environment in environments.items()}
        try:
            for pool in pools.values():
                pool.start()
            for pool in pools.values():
                pool.check()
        except BaseException:
            cls(pools).close()
            raise
        return cls(pools)

    def close(self) -> None:
        for pool in self.by_tag.values():
            with contextlib.suppress(Exception):
                pool.close()


class InProcessScorer:
    """The reward function in this process, for a debugger, in place of a `ScorerPool`. Nothing bounds a call: who looks
    at it may take their time. `on_error` gets what the function raises, before that counts as a failed sample."""

    def __init__(self, reward: Reward, on_error: Callable[[BaseException], None] = lambda error: None) -> None:
        self._reward, self._on_error = reward, on_error
        self._function = load_function(reward.name, reward.options)
        self.counts = ScoreCounts()

    async def score(self, response: str, row: Row) -> Score:
        try:
            result = await call_reward_async(self._function, response, row, self._reward.options)
        except (Exception, SystemExit) as error:
            self._on_error(error)
            self.counts = self.counts.plus("raised")
            return Score(self._reward.on_error, error_line(error))
        self.counts = self.counts.plus("ok")
        return Score(result.score, metrics=result.metrics)

    def close(self) -> None:
        """There is nothing to end."""


@dataclass(frozen=True)
class ScoringJob:
    response: str
    row: Row
    future: "asyncio.Future[Score]"


class ScorerPool(WorkerPool[ScoringJob]):
    """`reward.workers` processes that run the reward function, from `start`, `check` or the first `score` on."""

    thread_name = "reward worker"

    def __init__(self, reward: Reward) -> None:
        check_name(reward.name)
        load = pickle.dumps((portable(reward.name), reward.options))
        super().__init__(f"reward `{reward.name}`", WORKER, load, reward.workers)
        self._reward = reward
        self._counts = ScoreCounts()
        self._job_s = math.inf
        """Seconds that each of the last jobs took."""
        self._loaded: Future[None] = Future()

    def check(self) -> None:
        """Wait until the function is loaded; UserError if it can't be."""
        self.start()
        self._loaded.result()

    async def score(self, response: str, row: Row) -> Score:
        """Run the function on one response. Never raises for what the function does; see `Score.error`."""
        job = ScoringJob(response, row, asyncio.get_running_loop().create_future())
        self.submit(job)
        return await job.future

    @property
    def counts(self) -> ScoreCounts:
        with self._lock:
            return self._counts

    def _serve_job(self, worker: WorkerProcess, job: ScoringJob) -> WorkerProcess:
        """Resolve the future of the job and of some more, or put back what was not begun."""
        jobs, began = [job, *self._more_jobs()], time.monotonic()
        try:
            worker = self._idle_worker(worker)
            is_well = self._run(worker, jobs)
        except Exception as error:
            resolve([(job, error) for job in jobs])
            raise
        self._job_s = (time.monotonic() - began) / len(jobs)
        return worker if is_well else self._start_worker()

    def _more_jobs(self) -> Iterator[ScoringJob]:
        """Jobs to go with one that was taken. Of a short queue none, so that no other worker runs dry."""
        num_quick = int(AT_ONCE_S / max(self._job_s, AT_ONCE_S / MAX_JOBS_AT_ONCE))
        for _ in range(min(self._jobs.qsize() // (2 * self.num_workers), num_quick - 1)):
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._jobs.put(None)  # the end, for the thread that looks there next
                return
            yield job

    def _run(self, worker: WorkerProcess, jobs: Sequence[ScoringJob]) -> bool:
        """Whether the worker is fit for more."""
        sent = [(job, request) for job in jobs if (request := self._request(job)) is not None]
        worker.send(request for _, request in sent)
        waiting = deque(job for job, _ in sent)
        settled: list[tuple[ScoringJob, Outcome, Score]] = []
        while waiting:
            outcome, score = self._next_score(worker)
            settled.append((waiting.popleft(), outcome, score))
            is_lost = outcome in ("timed_out", "died")
            if is_lost or not waiting or not worker.has_reply:
                self._settle(settled, put_back=waiting if is_lost else ())
                settled = []
            if is_lost:
                return False
        return True

    def _request(self, job: ScoringJob) -> bytes | None:
        """None: nobody waits for the job any more, or it has failed."""
        if job.future.cancelled():
            return None
        try:
            return pickle.dumps((job.response, job.row))
        except Exception as error:
            failed = self._failed(f"the row can't be sent to another process: {error_line(error)}")
            self._settle([(job, "raised", failed)])
            return None

    def _next_score(self, worker: WorkerProcess) -> tuple[Outcome, Score]:
        timeout_s = self._reward.timeout_s
        try:
            reply = worker.next_reply(timeout_s)
        except TimeoutError:
            self._end_worker(worker)
            return "timed_out", self._failed(f"the reward function took longer than {timeout_s:g} s and was killed")
        except (EOFError, OSError, ValueError):
            return "died", self._failed(f"the reward function's process died: it {self._end_worker(worker)}")
        if "error" in reply:
            return "raised", self._failed(reply["error"])
        return "ok", Score(reply["score"], metrics=reply["metrics"])

    def _failed(self, error: str) -> Score:
        return Score(self._reward.on_error, error)

    def _settle(
        self, settled: Sequence[tuple[ScoringJob, Outcome, Score]], put_back: Iterable[ScoringJob] = ()
    ) -> None:
        """Count and resolve jobs that are done, and put back those that were not begun."""
        with self._lock:
            if self._unusable is not None:
                raise self._unusable
            for _, outcome, _ in settled:
                self._counts = self._counts.plus(outcome)
            for job in put_back:
                self._jobs.put(job)
        resolve([(job, score) for job, _, score in settled])

    def _start_worker(self) -> WorkerProcess:
        worker = super()._start_worker()
        with self._lock:
            if not self._loaded.done():
                self._loaded.set_result(None)
        return worker

    def _fail(self, job: ScoringJob, error: Exception) -> None:
        resolve([(job, error)])

    def _refuse(self, error: Exception) -> None:
        with self._lock:
            super()._refuse(error)
            if not self._loaded.done():
                self._loaded.set_exception(error)


def resolve(answers: Sequence[tuple[ScoringJob, Score | Exception]]) -> None:
    """Resolve futures in the event loops that wait. Each loop is woken once, which takes longer than to resolve one."""

    def set_results(own: "Sequence[tuple[asyncio.Future[Score], Score | Exception]]") -> None:
        for future, answer in own:
            if future.done():  # it was cancelled
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    for loop in {job.future.get_loop() for job, _ in answers}:
        own = [(job.future, answer) for job, answer in answers if job.future.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # it is closed: nobody waits any more
            loop.call_soon_threadsafe(set_results, own)
