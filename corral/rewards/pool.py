"""Reward functions in processes of their own, so that one that hangs or crashes costs one sample and no more.

One thread per worker process. A thread takes the next job, sends it to its worker and waits for the reply until the
deadline; a worker that is late is killed, one that is late or dead is replaced at once, before the next job is taken.
Threads rather than asyncio, because the event loop may stand still for seconds while a model computes; the deadlines
here go on all the same, and a pool can be used from one event loop after another.

What waits for what: `score` waits for its job's future. A thread waits for a job (unblocked by `close`), for a worker
that loads (at most START_TIMEOUT_S) or for a reply (at most reward.timeout_s, and sooner if the worker dies or `close`
kills it). Whatever way a thread leaves its job, it resolves the job's future.
"""

import asyncio
import contextlib
import dataclasses
import pickle
import queue
import threading
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
    future: "Future[Score]"


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
        job = _Job(response, row, Future())
        with self._lock:
            if self._workers.unusable is not None:
                raise self._workers.unusable
            self._jobs.put(job)
        self.start()
        return await asyncio.wrap_future(job.future)

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
            worker = self._start_worker()
            while (job := self._jobs.get()) is not None:
                if job.future.set_running_or_notify_cancel():
                    worker = self._serve_job(worker, job)
        except Exception as error:
            self._refuse(error)
        finally:
            if worker is not None:
                self._workers.end(worker)

    def _serve_job(self, worker: WorkerProcess, job: _Job) -> WorkerProcess:
        """Resolve the job's future; returns the worker for the next job."""
        try:
            if not worker.is_idle():  # it died after its last job, which is not this job's fault
                self._workers.end(worker)
                worker = self._start_worker()
            outcome, score = self._run(worker, job)
            self._settle(job, outcome, score)
        except Exception as error:
            job.future.set_exception(error)
            raise
        return worker if outcome in ("ok", "raised") else self._start_worker()

    def _run(self, worker: WorkerProcess, job: _Job) -> tuple[Outcome, Score]:
        timeout_s = self._reward.timeout_s
        try:
            request = pickle.dumps((job.response, job.row))
        except Exception as error:
            return "raised", self._failed(f"the row can't be sent to another process: {error_line(error)}")
        try:
            reply = worker.ask(request, timeout_s)
        except TimeoutError:
            self._workers.end(worker)
            return "timed_out", self._failed(f"the reward function took longer than {timeout_s:g} s and was killed")
        except (EOFError, OSError, ValueError):
            return "died", self._failed(f"the reward function's process died: {self._workers.end(worker)}")
        if "error" in reply:
            return "raised", self._failed(reply["error"])
        return "ok", Score(reply["score"], metrics=reply["metrics"])

    def _failed(self, error: str) -> Score:
        return Score(self._reward.on_error, error)

    def _settle(self, job: _Job, outcome: Outcome, score: Score) -> None:
        with self._lock:
            if self._workers.unusable is not None:
                raise self._workers.unusable
            self._counts = dataclasses.replace(self._counts, **{outcome: getattr(self._counts, outcome) + 1})
        job.future.set_result(score)

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
                    if job is not None and job.future.set_running_or_notify_cancel():
                        job.future.set_exception(error)
