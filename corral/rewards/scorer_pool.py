"""Reward functions in processes that may be killed at any moment (`worker_pool.py`): one that hangs or crashes costs
one sample and no more.

`ScorerPool` runs the reward function. A thread of the pool takes the next job, sends it to its worker process and waits
for the reply until the deadline; a worker that is late is killed, one that is late or dead is replaced at once, before
the next job is taken. Of a quick function a thread takes several jobs at once, where many wait, and hands several
scores to the event loop at once: to change between threads takes longer than the function does. The worker still has
one after the other, each with its own deadline and its own reply; those behind one that is late or deadly are put back
into the queue. Of an `async` function a worker has `reward.concurrency` calls at once (`concurrent_calls.py`). Whatever
way a thread leaves its job, it resolves the future for which `score` waits.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import os
import pickle
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from corral.data.plugins import adopt, error_line, place_of, portable, with_place
from corral.data.rows import Row
from corral.recipe.errors import UserError
from corral.rewards.concurrent_calls import CallMark, serve_concurrently
from corral.rewards.reward_function import (
    Score,
    call_with,
    call_with_async,
    check_name,
    is_group_function,
    load_function,
    reward_on_error,
)
from corral.rewards.worker_pool import Doorbell, Served, WorkerPool, WorkerProcess, serve_requests

if TYPE_CHECKING:
    from corral.recipe.schema import Environment, Reward, WeightedReward

MAX_JOBS_AT_ONCE = 16
AT_ONCE_S = 0.05
"""The jobs that a thread takes at once are to last at most this long."""
SILENCE_S = 10.0
"""A process with calls in flight that sends nothing for so long beyond their deadline is stuck."""
MAX_DEATHS = 3
"""A call that was in flight when so many processes ended, nobody knows through which call, has failed."""


class RewardScorer(Protocol):
    """What runs the reward function: a `ScorerPool`, or for a debugger an `InProcessScorer`."""

    async def score(self, response: str, row: Row) -> Score:
        """Run the function on one response. Never raises for what the function does; see `Score.error`. What a function
        that compares samples has to score comes back as it is, for `score_group` (`Score.response`)."""
        ...

    async def score_group(self, scores: Sequence[Score], row: Row) -> list[Score]:
        """Complete the scores of a prompt's samples that have a `response`, once all samples are finished."""
        ...

    def close(self) -> None: ...


class ScorerPools:
    """The reward functions of a recipe: one scorer for each environment that uses one, by the environment's tag."""

    def __init__(self, by_tag: Mapping[str, RewardScorer]) -> None:
        self.by_tag = by_tag

    @classmethod
    def start(cls, environments: "Mapping[str, Environment]", prints: Path | None = None) -> "ScorerPools":
        """Returns when every function is loaded, in all pools at the same time; or raises what is wrong with one.
        `prints`: file for what the functions print."""
        pools: list[ScorerPool] = []

        def make(variables: Sequence[str], reward: "Reward") -> ScorerPool:
            pools.append(ScorerPool(reward, variables, prints))
            return pools[-1]

        try:
            by_tag = {tag: make_scorer(one, functools.partial(make, one.env)) for tag, one in environments.items()}
            for pool in pools:
                pool.start()
            for pool in pools:
                pool.check()
        except BaseException:
            for pool in pools:
                pool.close()
            raise
        return cls(by_tag)

    def close(self) -> None:
        for pool in self.by_tag.values():
            with contextlib.suppress(Exception):
                pool.close()


def make_scorer(environment: "Environment", make: "Callable[[Reward], RewardScorer]") -> RewardScorer:
    """The environment's one reward, or the sum of its rewards; `make` makes the scorer of a function."""
    scorers = {
        name: RewardModelMark() if reward.is_model else make(reward)
        for name, reward in environment.named_rewards.items()
    }
    return RewardSum(environment.rewards, scorers) if environment.rewards else scorers[""]


class RewardModelMark:
    """Stands in for the reward model, which is another role: marks what it is to score when the trajectory is over."""

    async def score(self, response: str, row: Row) -> Score:
        return Score(None, awaits_model=True)

    async def score_group(self, scores: Sequence[Score], row: Row) -> list[Score]:
        return [Score(None, awaits_model=True)] * len(scores)

    def close(self) -> None:
        """There is nothing to end."""


class RewardSum:
    """The sum of several rewards, each with its weight and for the rows of its sources. One that has no reward for a
    sample leaves the sum unknown: the sample is dropped."""

    def __init__(self, rewards: "Mapping[str, WeightedReward]", scorers: Mapping[str, RewardScorer]) -> None:
        self._rewards, self._scorers = rewards, scorers

    async def score(self, response: str, row: Row) -> Score:
        names = [name for name, reward in self._rewards.items() if reward.is_for(row.source)]
        if not names:
            whose = f"`data_source: {row.source}`" if row.source else "a row without `data_source`"
            return Score(None, error=f"none of the rewards ({', '.join(self._rewards)}) is for {whose}")
        scores = await asyncio.gather(*(self._scorers[name].score(response, row) for name in names))
        return self._sum(dict(zip(names, scores, strict=True)), {})

    async def score_group(self, scores: Sequence[Score], row: Row) -> list[Score]:
        waiting = [score for score in scores if score.response is not None]
        done = {name for score in waiting for name in score.by_name}
        names = [name for name, reward in self._rewards.items() if reward.is_for(row.source) and name not in done]
        groups = await asyncio.gather(*(self._scorers[name].score_group(waiting, row) for name in names))
        return [
            self._sum(dict(zip(names, own, strict=True)), before.by_name)
            for before, own in zip(waiting, zip(*groups, strict=True), strict=True)
        ]

    def _sum(self, scores: Mapping[str, Score], before: Mapping[str, float | None]) -> Score:
        """`before`: rewards of the sample that were known before, whose metrics and errors are reported already."""
        response = next((score.response for score in scores.values() if score.response is not None), None)
        is_known = {name: score.response is None and not score.awaits_model for name, score in scores.items()}
        by_name = {**before, **{name: score.reward for name, score in scores.items() if is_known[name]}}
        errors = [f"{name}: {score.error}" for name, score in scores.items() if score.error is not None]
        return Score(
            reward=weighted_sum(self._rewards, by_name) if all(is_known.values()) else None,
            error="; ".join(errors) or None,
            metrics={f"{name}/{key}": value for name, score in scores.items() for key, value in score.metrics.items()},
            by_name=by_name,
            response=response,
            awaits_model=any(score.awaits_model for score in scores.values()),
        )

    def close(self) -> None:
        for scorer in self._scorers.values():
            with contextlib.suppress(Exception):
                scorer.close()


def weighted_sum(rewards: "Mapping[str, WeightedReward]", by_name: Mapping[str, float | None]) -> float | None:
    """The sum of several rewards, each times its weight; None where one of them is not known."""
    known = {name: reward for name, reward in by_name.items() if reward is not None}
    total = sum(rewards[name].weight * reward for name, reward in known.items())
    return total if len(known) == len(by_name) else None


class InProcessScorer:
    """The reward function in this process, for a debugger, in place of a `ScorerPool`. Nothing bounds a call: who looks
    at it may take their time. `on_error` gets what the function raises, before that counts as a failed sample."""

    def __init__(self, reward: "Reward", on_error: Callable[[BaseException], None] = lambda error: None) -> None:
        self._reward, self._on_error = reward, on_error
        self._function = load_function(reward.name, reward.options)

    async def score(self, response: str, row: Row) -> Score:
        if is_group_function(self._function):
            return Score(None, response=response)
        return (await self._call(response, row))[0]

    async def score_group(self, scores: Sequence[Score], row: Row) -> list[Score]:
        return await self._call(waiting_responses(scores), row)

    async def _call(self, response: str | list[str], row: Row) -> list[Score]:
        try:
            return await call_with_async(self._function, response, row, self._reward.options)
        except (Exception, SystemExit) as error:
            self._on_error(error)
            failed = Score(reward_on_error(self._reward.on_error), error=error_line(error))
            return [failed] * (1 if isinstance(response, str) else len(response))

    def close(self) -> None:
        """There is nothing to end."""


def waiting_responses(scores: Sequence[Score]) -> list[str]:
    """What a function that compares samples has to score."""
    return [score.response for score in scores if score.response is not None]


# --- the pool that runs a reward function


@dataclass(eq=False)
class ScoringJob:
    response: str | list[str]
    """The response, or those of a group."""
    row: Row
    future: "asyncio.Future[list[Score]]"
    num_deaths: int = 0
    """Number of processes that ended while the call was in flight, nobody knows through which call."""


class ScorerPool(WorkerPool[ScoringJob]):
    """`reward.workers` processes that run the reward function, from `start`, `check` or the first `score` on."""

    thread_name = "reward worker"

    def __init__(self, reward: "Reward", variables: Iterable[str] = (), prints: Path | None = None) -> None:
        """`variables`: names of environment variables that the function gets, besides those that are no secret and the
        one that its option `api_key_variable` names."""
        check_name(reward.name)
        key = reward.options.get("api_key_variable")
        variables = [*variables, *([key] if isinstance(key, str) else [])]
        load = pickle.dumps((portable(reward.name), reward.options, reward.timeout_s))
        super().__init__(f"reward `{reward.name}`", __name__, load, reward.workers, variables, prints)
        self._reward = reward
        self._job_s = math.inf
        """Seconds that each of the last jobs took."""
        self._doorbell = Doorbell()

    def check(self) -> None:
        super().check()
        if not self.is_async and "concurrency" in self._reward.model_fields_set:
            raise UserError(
                f"{self.label}: `concurrency` has no effect: only an `async def` function has calls at once"
            )

    @property
    def is_async(self) -> bool:
        """Whether a worker has several calls at once; known once one has loaded the function."""
        return bool(self._loaded.result()["is_async"])

    @property
    def calls_at_once(self) -> int:
        """Number of calls that one worker has in flight."""
        return self._reward.concurrency if self.is_async else 1

    async def score(self, response: str, row: Row) -> Score:
        if not self._loaded.done():
            self.start()
            await asyncio.shield(asyncio.wrap_future(self._loaded))
        if self._loaded.result()["is_group"]:
            return Score(None, response=response)
        return (await self._submitted(response, row))[0]

    async def score_group(self, scores: Sequence[Score], row: Row) -> list[Score]:
        return await self._submitted(waiting_responses(scores), row)

    async def _submitted(self, response: str | list[str], row: Row) -> list[Score]:
        job = ScoringJob(response, row, asyncio.get_running_loop().create_future())
        self.submit(job)
        self._doorbell.ring()
        return await job.future

    def close(self) -> None:
        super().close()
        self._doorbell.close()

    def _make_process(self) -> WorkerProcess:
        return WorkerProcess(self.module, CallMark(), self.variables, self.prints)

    def _serve_job(self, worker: WorkerProcess, job: ScoringJob) -> WorkerProcess:
        """Resolve the future of the job and of some more, or put back what was not begun."""
        if self.is_async:
            return self._serve_concurrently(worker, job)
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
        return self._waiting_jobs(min(self._jobs.qsize() // (2 * self.num_workers), num_quick - 1))

    def _waiting_jobs(self, most: int) -> Iterator[ScoringJob]:
        for _ in range(most):
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
        scored: list[tuple[ScoringJob, list[Score]]] = []
        while waiting:
            job = waiting.popleft()
            scores, is_lost = self._next_scores(worker, job)
            scored.append((job, scores))
            if is_lost or not waiting or not worker.has_reply:
                self._settle(scored, put_back=waiting if is_lost else ())
                scored = []
            if is_lost:
                return False
        return True

    def _serve_concurrently(self, worker: WorkerProcess, job: ScoringJob) -> WorkerProcess:
        """Resolve the futures of the job and of those that come meanwhile, up to `concurrency` at once, until none is
        in flight. Waits for a reply, or for a job where there is room for one."""
        calls: dict[int, ScoringJob] = {}
        numbers, new = count(1), iter([job])
        try:
            worker = self._idle_worker(worker)
            while True:
                for one in new:
                    number = next(numbers)
                    calls[number] = one
                    request = self._request(one, number)
                    if request is None:
                        del calls[number]
                    else:
                        worker.send([request])
                if not calls:
                    return worker
                room = self._reward.concurrency - len(calls)
                if why := self._exchange(worker, calls, self._doorbell if room else None):
                    self._lose_calls(worker, calls, why)
                    return self._start_worker()
                new = self._waiting_jobs(self._reward.concurrency - len(calls))
        except Exception as error:
            resolve([(one, error) for one in [job, *calls.values()]])  # those that are done already keep their result
            raise

    def _exchange(self, worker: WorkerProcess, calls: dict[int, ScoringJob], doorbell: Doorbell | None) -> str | None:
        """Resolve what is done. Returns why the worker is lost, if it is."""
        assert worker.mark is not None
        timeout_s = self._reward.timeout_s
        scored: dict[int, list[Score]] = {}
        try:
            with contextlib.suppress(TimeoutError):
                worker.exchange(min(1.0, timeout_s / 4), doorbell)
            while worker.has_reply:
                reply = worker.read_reply()
                scored[reply["number"]] = self._read_reply(reply, calls[reply["number"]])
        except (EOFError, OSError, ValueError, KeyError):
            return "the reward function's process died: it {}"
        finally:
            self._settle([(calls[number], scores) for number, scores in scored.items()])
            for number in scored:
                del calls[number]
        if worker.mark.seconds > timeout_s or worker.mark.silence_s > timeout_s + SILENCE_S:
            return f"the reward function blocked its event loop for longer than {timeout_s:g} s and was killed"
        return None

    def _lose_calls(self, worker: WorkerProcess, calls: Mapping[int, ScoringJob], why: str) -> None:
        """Fail the call that was computing when the worker was lost, and put back the others. Where nobody knows which
        one it was, all are put back, until they have seen `MAX_DEATHS`."""
        assert worker.mark is not None
        culprit = calls.get(worker.mark.number)
        error = why.format(self._end_worker(worker))
        if culprit is None:
            for job in calls.values():
                job.num_deaths += 1
        failed = [job for job in calls.values() if job is culprit or job.num_deaths >= MAX_DEATHS]
        self._settle(
            [(job, self._lost(job, error)) for job in failed], [job for job in calls.values() if job not in failed]
        )
        self._doorbell.ring()

    def _request(self, job: ScoringJob, *number: int) -> bytes | None:
        """None: nobody waits for the job any more, or it has failed."""
        if job.future.cancelled():
            return None
        try:
            return pickle.dumps((*number, job.response, job.row))
        except Exception as error:
            self._settle([(job, self._failed(job, f"the row can't be sent to another process: {error_line(error)}"))])
            return None

    def _next_scores(self, worker: WorkerProcess, job: ScoringJob) -> tuple[list[Score], bool]:
        """The scores of the next job, and whether the worker was lost with it."""
        timeout_s = self._reward.timeout_s
        try:
            reply = worker.next_reply(timeout_s)
        except TimeoutError:
            self._end_worker(worker)
            return self._lost(job, f"the reward function took longer than {timeout_s:g} s and was killed"), True
        except (EOFError, OSError, ValueError):
            return self._lost(job, f"the reward function's process died: it {self._end_worker(worker)}"), True
        return self._read_reply(reply, job), False

    def _read_reply(self, reply: Mapping[str, Any], job: ScoringJob) -> list[Score]:
        if "error" in reply:
            return self._failed(job, reply["error"], reply.get("metrics", {}))
        return [Score(one["reward"], metrics=one["metrics"]) for one in reply["scores"]]

    def _lost(self, job: ScoringJob, error: str) -> list[Score]:
        """Of a call that left no traceback; its place is where the function is defined."""
        return self._failed(job, with_place(error, self._loaded.result()["place"]))

    def _failed(self, job: ScoringJob, error: str, metrics: Mapping[str, float] = MappingProxyType({})) -> list[Score]:
        score = Score(reward_on_error(self._reward.on_error), error=error, metrics=dict(metrics))
        return [score] * (1 if isinstance(job.response, str) else len(job.response))

    def _settle(self, scored: Sequence[tuple[ScoringJob, list[Score]]], put_back: Iterable[ScoringJob] = ()) -> None:
        """Resolve jobs that are done, and put back those that were not begun."""
        with self._lock:
            if self._unusable is not None:
                raise self._unusable
            for job in put_back:
                self._jobs.put(job)
        resolve(scored)

    def _fail(self, job: ScoringJob, error: Exception) -> None:
        resolve([(job, error)])


def resolve(answers: "Sequence[tuple[ScoringJob, list[Score] | Exception]]") -> None:
    """Resolve futures in the event loops that wait. Each loop is woken once, which takes longer than to resolve one."""

    def set_results(own: "Sequence[tuple[asyncio.Future[list[Score]], list[Score] | Exception]]") -> None:
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


# --- inside a worker process


class RewardServer:
    """A loaded reward function, and how its calls are answered."""

    def __init__(self, name: tuple[str, bytes | None], options: Mapping[str, Any], timeout_s: float) -> None:
        self.function, self.options, self.timeout_s = load_function(adopt(*name), options), options, timeout_s
        self.is_async = inspect.iscoroutinefunction(self.function)
        self.place = place_of(self.function)
        self.facts = {"is_async": self.is_async, "is_group": is_group_function(self.function), "place": self.place}

    def answer(self, request: bytes) -> dict[str, Any]:
        response, row = pickle.loads(request)
        return to_reply(call_with(self.function, response, row, self.options))

    async def score(self, response: str | list[str], row: Row) -> dict[str, Any]:
        return to_reply(await call_with_async(self.function, response, row, self.options))


def to_reply(scores: Sequence[Score]) -> dict[str, Any]:
    return {"scores": [{"reward": score.reward, "metrics": score.metrics} for score in scores]}


def main(descriptor: int, mark: int) -> None:
    def load(message: bytes) -> Served:
        server = RewardServer(*pickle.loads(message))
        serve = functools.partial(
            serve_concurrently,
            score=server.score,
            timeout_s=server.timeout_s,
            mark=CallMark(mark),
            place=server.place,
        )
        return Served(server.answer, server.facts, serve if server.is_async else None)

    os.set_inheritable(mark, False)
    serve_requests(descriptor, load)
