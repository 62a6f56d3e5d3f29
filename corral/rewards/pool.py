"""Reward functions in processes of their own, so that one that hangs or crashes costs one sample and no more.

One thread per worker process. A thread takes the next job, sends it to its worker and waits for the reply until the
deadline; a worker that is late is killed, one that is late or dead is replaced at once, before the next job is taken.
Threads rather than asyncio, because the event loop may stand still for seconds while a model computes; the deadlines
here go on all the same, and a pool can be used from one event loop after another.

Of a quick function a thread takes several jobs at once, where many wait, and tells the event loop of several scores at
once: to change between threads takes longer than the function does. The worker still has one after the other, each with
its own deadline and its own reply; those behind one that is late or deadly are put back into the line.

What waits for what: `score` waits for its job's future. A thread waits for a job (unblocked by `close`), for a worker
that loads (at most START_TIMEOUT_S) or for a reply (at most reward.timeout_s, and sooner if the worker dies or `close`
kills it). Whatever way a thread leaves its job, it resolves the job's future.
"""

import asyncio
import contextlib
import dataclasses
import math
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

from corral.data.plugins import error_line
from corral.data.rows import Row
from corral.recipe.schema import Reward
from corral.rewards.calling import check_name
from corral.rewards.process import WorkerProcess
from corral.rewards.workers import Workers

WORKER = "corral.rewards.worker"
CLOSE_TIMEOUT_S = 5.0
MAX_JOBS_AT_ONCE = 16
AT_ONCE_S = 0.05
"""That the jobs which a thread takes at once are to last at most."""


@dataclass(frozen=True)
class Score:
    reward: float
    error: str | None = None
    """What went wrong; the reward is then the recipe's `on_error`."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts:
    """What became of all calls so far."""

    ok: int = 0
    raised: int = 0
    timed_out: int = 0
    died: int = 0


Outcome = Literal["ok", "raised", "timed_out", "died"]


class Rewards(Protocol):
    """What runs the reward function: a `ScorerPool`, or for a debugger `RewardsHere`."""

    @property
    def counts(self) -> Counts: ...

    async def score(self, response: str, row: Row) -> Score:
        """Run the function on one response. Never raises for what the function does; see `Score.error`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Job:
    response: str
    row: Row
    future: "asyncio.Future[Score]"


class ScorerPool:
    """`reward.workers` processes that run the reward function, from `start`, `check` or the first `score` on."""

    def __init__(self, reward: Reward) -> None:
        check_name(reward.name)
        self._reward = reward
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        load = pickle.dumps((reward.name, reward.options))
        self._workers = Workers(f"reward `{reward.name}`", WORKER, load)
        self._counts = Counts()
        self._loaded: Future[None] = Future()
        self._lock = self._workers.lock

    def start(self) -> None:
        """Start the workers in the background; returns at once."""
        with self._lock:
            if not self._threads and self._workers.unusable is None:
                self._threads = [
                    threading.Thread(target=self._serve, name=f"reward worker {number}", daemon=True)
                    for number in range(self._reward.workers)
                ]
                for thread in self._threads:
                    thread.start()

    def check(self) -> None:
        """Wait until the function is loaded; UserError if it can't be."""
        self.start()
        self._loaded.result()

    async def score(self, response: str, row: Row) -> Score:
        """Run the function on one response. Never raises for what the function does; see `Score.error`."""
        job = _Job(response, row, asyncio.get_running_loop().create_future())
        with self._lock:
            if self._workers.unusable is not None:
                raise self._workers.unusable
            self._jobs.put(job)
            self.start()
        return await job.future

    @property
    def counts(self) -> Counts:
        with self._lock:
            return self._counts

    def close(self) -> None:
        """Kill all workers; calls in flight raise."""
        self._refuse(RuntimeError("the reward pool is closed"))
        self._workers.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        """A thread's life. Consumes jobs, produces scores; waits for a job or for its worker; `close` ends it."""
        worker = None
        try:
            worker, job_s = self._start_worker(), math.inf
            while (job := self._jobs.get()) is not None:
                jobs, began = [job, *self._more_jobs(job_s)], time.monotonic()
                worker = self._serve_jobs(worker, jobs)
                job_s = (time.monotonic() - began) / len(jobs)
        except Exception as error:
            self._refuse(error)
        finally:
            if worker is not None:
                self._workers.end(worker)

    def _more_jobs(self, job_s: float) -> Iterator[_Job]:
        """To go with one that was taken. Of a short line none, so that no other worker runs dry. `job_s`: that the last
        jobs took, each."""
        num_quick = int(AT_ONCE_S / max(job_s, AT_ONCE_S / MAX_JOBS_AT_ONCE))
        share = self._jobs.qsize() // (2 * self._reward.workers)
        for _ in range(min(share, num_quick - 1)):
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._jobs.put(None)  # the end, for who looks there next
                return
            yield job

    def _serve_jobs(self, worker: WorkerProcess, jobs: Sequence[_Job]) -> WorkerProcess:
        """Resolve the jobs' futures, or put back what was not begun; returns the worker for the next jobs."""
        try:
            if not worker.is_idle():  # it died after its last job, which is not this job's fault
                self._workers.end(worker)
                worker = self._start_worker()
            is_well = self._run(worker, jobs)
        except Exception as error:
            _tell([(job, error) for job in jobs])
            raise
        return worker if is_well else self._start_worker()

    def _run(self, worker: WorkerProcess, jobs: Sequence[_Job]) -> bool:
        """Whether the worker is fit for more."""
        sent = [(job, request) for job in jobs if (request := self._request(job)) is not None]
        worker.send(request for _, request in sent)
        waiting = deque(job for job, _ in sent)
        settled: list[tuple[_Job, Outcome, Score]] = []
        while waiting:
            outcome, score = self._next_score(worker)
            settled.append((waiting.popleft(), outcome, score))
            if outcome in ("timed_out", "died"):
                self._settle(settled)
                self._put_back(waiting)
                return False
            if not worker.has_reply:
                self._settle(settled)
                settled = []
        self._settle(settled)
        return True

    def _request(self, job: _Job) -> bytes | None:
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
            self._workers.end(worker)
            return "timed_out", self._failed(f"the reward function took longer than {timeout_s:g} s and was killed")
        except (EOFError, OSError, ValueError):
            return "died", self._failed(f"the reward function's process died: it {self._workers.end(worker)}")
        if "error" in reply:
            return "raised", self._failed(reply["error"])
        return "ok", Score(reply["score"], metrics=reply["metrics"])

    def _failed(self, error: str) -> Score:
        return Score(self._reward.on_error, error)

    def _settle(self, settled: Sequence[tuple[_Job, Outcome, Score]]) -> None:
        with self._lock:
            if self._workers.unusable is not None:
                raise self._workers.unusable
            for _, outcome, _ in settled:
                self._counts = dataclasses.replace(self._counts, **{outcome: getattr(self._counts, outcome) + 1})
        _tell([(job, score) for job, _, score in settled])

    def _put_back(self, jobs: Sequence[_Job]) -> None:
        with self._lock:
            if self._workers.unusable is not None:
                raise self._workers.unusable
            for job in jobs:
                self._jobs.put(job)

    def _start_worker(self) -> WorkerProcess:
        """A worker that has loaded the function."""
        worker = self._workers.start()
        with self._lock:
            if not self._loaded.done():
                self._loaded.set_result(None)
        return worker

    def _refuse(self, error: Exception) -> None:
        """From now on, and for all who wait: `error`."""
        with self._lock:
            self._workers.unusable = self._workers.unusable or error
            if not self._loaded.done():
                self._loaded.set_exception(error)
            with contextlib.suppress(queue.Empty):
                while True:
                    job = self._jobs.get_nowait()
                    if job is not None:
                        _tell([(job, error)])


def _tell(answers: Sequence[tuple[_Job, Score | Exception]]) -> None:
    """In the event loops that wait. Each is woken once: that takes longer than to tell."""
    for loop in {job.future.get_loop() for job, _ in answers}:
        own = [(job.future, answer) for job, answer in answers if job.future.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # it is closed: nobody waits any more
            loop.call_soon_threadsafe(_resolve, own)


def _resolve(answers: "Sequence[tuple[asyncio.Future[Score], Score | Exception]]") -> None:
    for future, answer in answers:
        if future.done():  # it was cancelled
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
