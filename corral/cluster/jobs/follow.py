"""What a job says, while it says it; and stopping one so that it can save."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable

from corral.cluster.jobs.dashboard import JobApi
from corral.cluster.jobs.job import Job, find_job, logs_of, with_true_folder
from corral.recipe.errors import RunError, UserError

Write = Callable[[str], object]

SILENCE_S = 20.0
"""After which the job is asked whether it still runs: a broken connection says nothing."""
RETRIES = 10
"""In a row, without a word between them."""
RETRY_S = 3.0
POLL_S = 0.3
SETTLE_S = 30.0
"""Between a job's last words and its end."""


def follow(api: JobApi, job: str, write: Write, *, skip: int = 0, timeout_s: float | None = None) -> Job:
    """Writes what the job says, but for the first `skip` characters, until it ends or the time is over. A connection
    that breaks is made again."""
    deadline, failures, written = None if timeout_s is None else time.monotonic() + timeout_s, 0, skip

    def write_new(text: str) -> None:
        nonlocal written, failures
        written, failures = written + len(text), 0
        write(text)

    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            asyncio.run(_pass_on(api, job, write_new, written, left))
            return _await_end(api, job, SETTLE_S if left is None else min(left, SETTLE_S))
        except (ConnectionError, UserError) as broken:
            failures += 1
            if failures > RETRIES:
                raise RunError(
                    f"the connection to {api.url} is lost; job {job} goes on without it: `corral logs {job} -f`"
                ) from broken
            time.sleep(RETRY_S)


async def _pass_on(api: JobApi, job: str, write: Write, skip: int, timeout_s: float | None) -> None:
    """Until the job's last word, or the time is over."""
    import aiohttp

    heard, messages = 0, api.tail_job_logs(job)
    try:
        async with asyncio.timeout(timeout_s):
            while (text := await _next(api, job, messages)) is not None:
                heard += len(text)
                if heard > skip:
                    write(text[max(0, len(text) - (heard - skip)) :])
                    skip = heard
    except TimeoutError:
        return
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        raise ConnectionError(str(error)) from error


async def _next(api: JobApi, job: str, messages: AsyncIterator[str]) -> str | None:
    message = asyncio.ensure_future(anext(messages, None))
    try:
        while not (await asyncio.wait({message}, timeout=SILENCE_S))[0]:
            if not await asyncio.to_thread(lambda: Job.of(api.get_job_info(job)).is_open):
                return None
        return message.result()
    finally:
        message.cancel()


def _await_end(api: JobApi, job: str, timeout_s: float) -> Job:
    """As it is when it has ended, or when the time is over."""
    deadline = time.monotonic() + timeout_s
    while (found := Job.of(api.get_job_info(job))).is_open and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return with_true_folder(api, found)


def stop(api: JobApi, name: str, write: Write, timeout_s: float) -> str:
    """Asks a job to end, which makes a run save a checkpoint first, and passes on what it says meanwhile. Returns what
    came of it. Ray gives the job `submit.STOP_WAIT_S`, however long this waits."""
    job = find_job(api, name)
    if not job.is_open:
        raise UserError(f"job {job.id} does not run any more: it {words(job)}")
    skip = len(logs_of(api, job.id))
    api.stop_job(job.id)
    found = follow(api, job.id, write, skip=skip, timeout_s=timeout_s)
    if found.is_open:
        end = "" if found.pid is None else f"; `kill -9 {found.pid}` on {found.node} ends it without saving"
        raise RunError(f"job {job.id} was told to stop and has not ended within {timeout_s:g} s{end}")
    return f"job {job.id} {words(found)}: {saved(found, logs_of(api, job.id))}"


def words(job: Job) -> str:
    return {"stopped": "was stopped", "succeeded": "has succeeded", "failed": "has failed"}[job.state]


def saved(job: Job, said: str) -> str:
    """By what the run itself said last."""
    if job.state == "succeeded":
        return f"all of its steps are done; run folder {job.folder}"
    steps = re.findall(r"\(stopped after step (\d+) of (\d+)\)", said)
    if not steps:
        return "it was not in the middle of training, and saved nothing"
    done, total = map(int, steps[-1])
    if done == 0:
        return f"no step was done yet, so there was nothing to save; run folder {job.folder}"
    return f"a checkpoint of step {done} of {total} is in {job.folder}; `corral submit RECIPE --resume` goes on from it"
