"""Jobs of the cluster: listing them, finding one, following its output, and stopping one so that it can save.

The dashboard serves Ray's job API over HTTP on the head node. Where `corral up` started it, it listens on the head's
loopback only, unless an option says otherwise.
"""

import asyncio
import difflib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self
from urllib.parse import urlsplit

from corral.cluster.gcs import format_table
from corral.cluster.identity import own_addresses
from corral.observe.console import duration
from corral.recipe.errors import RunError, UserError, first_line, install_command
from corral.runtime.membership import find_membership, own_memberships
from corral.runtime.network import answers, is_loopback, is_numeric
from corral.runtime.token import use_token_of

try:
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient
except ImportError as error:
    raise UserError(f"jobs need Ray: {install_command('cluster')}") from error

FOLDER_KEY, RESUME_KEY = "corral_run_folder", "corral_resume"  # of a job's metadata
OPEN_STATES = ("pending", "running")
NUM_LAST_LINES = 5
MAX_NAMES = 5
SILENCE_S = 20.0
"""After which it is checked whether the job still runs: a broken connection may not raise."""
RETRIES = 10  # in a row, without output between them
RETRY_S = 3.0
POLL_S = 0.3
SETTLE_S = 30.0  # between a job's last output and its end
Write = Callable[[str], object]
REQUEST_S = 30.0
VERBOSE_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
)
FROM_ELSEWHERE = (
    "run this on the head node; or forward its port, `ssh -L {port}:127.0.0.1:{port} {head}`, and add "
    "`--address http://127.0.0.1:{port}`; or start the head with `corral up --dashboard-host 0.0.0.0`"
)
PORT = 8265
VARIABLE = "RAY_API_SERVER_ADDRESS"


class JobApi(JobSubmissionClient):  # type: ignore[misc]
    """Ray's own client, with a timeout for every request and errors in one line."""

    def __init__(self, url: str) -> None:
        for name in VERBOSE_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        self.url = url
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = url  # or RAY_ADDRESS would be taken, whatever is passed here
        try:
            super().__init__(url)
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before

    @property
    def is_on_head(self) -> bool:
        """Whether this is the head node."""
        return any(member.is_head and member.dashboard == self.url for member in own_memberships())

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        try:
            return super()._do_request(method, endpoint, timeout=REQUEST_S, **options)
        except AuthenticationError as error:
            raise UserError(
                f"the cluster at {self.url} refuses this token; copy the head's ~/.corral/token to this machine, or "
                "set RAY_AUTH_TOKEN_PATH"
            ) from error
        except requests.RequestException as error:
            raise no_answer(self.url) from error

    def put_package(self, name: str, content: bytes) -> None:
        """Stores content among the packages of code that jobs bring, which cannot be listed or read over HTTP."""
        response = self._do_request("PUT", f"/api/packages/gcs/{name}", data=content)
        if response.status_code != requests.codes.ok:
            self._raise_error(response)


def open_jobs(address: str | None = None) -> JobApi:
    """Connects to the cluster with this dashboard or head; else to that of Ray's variables; else to this node's own."""
    url = find_dashboard(address)
    parts = urlsplit(url)
    bypass_proxies(parts.hostname or "")
    if not answers(f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"):
        raise no_answer(url)
    try:
        return JobApi(url)
    except (RuntimeError, ValueError, KeyError, requests.RequestException) as error:
        raise UserError(f"{url} is not the dashboard of a Ray cluster: {first_line(error)}") from error


def find_dashboard(address: str | None) -> str:
    """URL of the dashboard. The cluster's token is used from here on."""
    named = address or os.environ.get(VARIABLE) or os.environ.get("RAY_ADDRESS") or None
    if named == "auto":
        named = None
    if named is not None and "://" in named:
        if not named.startswith(("http://", "https://")):
            raise UserError(f"{named} is not the address of a dashboard, such as http://HEAD:{PORT}")
        url = named.rstrip("/")
        use_token_of(next((member for member in own_memberships() if member.dashboard == url), None))
        return url
    member = find_membership(named)
    use_token_of(member)
    if member is not None:
        url = member.dashboard or query_head(member.address)
        if not member.is_head:
            refuse_loopback(url, member.address.rpartition(":")[0])
        return url
    if named is not None and speaks_http(named):
        return f"http://{named}"
    return query_head(named)


def query_head(address: str | None) -> str:
    """URL of the dashboard, as the head process knows it also of a cluster that `corral up` did not start."""
    from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD

    from corral.cluster.gcs import Gcs
    from corral.runtime.connection import address_of_ray_start

    head = address or address_of_ray_start()
    if head is None:
        how = FROM_ELSEWHERE.format(port=PORT, head="HEAD")
        raise UserError(f"this machine is not part of a cluster that runs: {how}")
    known = Gcs(head).get_of_ray(DASHBOARD_ADDRESS.encode(), KV_NAMESPACE_DASHBOARD)
    if not known:
        raise UserError(f"the cluster at {head} was started without a dashboard, and jobs need one")
    url, host = f"http://{known.decode()}", head.rpartition(":")[0]
    if host not in (*own_addresses().values(), "localhost") and not is_loopback(host):
        refuse_loopback(url, host)
    return url


def refuse_loopback(url: str, head: str) -> None:
    """Raises for a loopback address of another machine: here it would be another dashboard, or none."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        how = FROM_ELSEWHERE.format(port=parts.port, head=head)
        raise UserError(f"the dashboard listens on the loopback of the head node, {head}, only: {how}")


def speaks_http(address: str) -> bool:
    """Tells the dashboard, which does, from Ray's head process, which does not."""
    if not answers(address):
        raise no_answer(f"http://{address}")
    bypass_proxies(address.rpartition(":")[0])
    try:
        requests.get(f"http://{address}/api/version", timeout=REQUEST_S)
    except requests.RequestException:
        return False
    return True


def no_answer(url: str) -> UserError:
    how = FROM_ELSEWHERE.format(port=urlsplit(url).port or PORT, head="HEAD")
    return UserError(f"no dashboard of a Ray cluster answers at {url}: {how}")


def bypass_proxies(host: str) -> None:
    """Keeps requests to a node of the cluster away from a proxy that the environment names for the internet. (Names may
    be known to the proxy only.)"""
    if not is_numeric(host):
        return
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), host]))


@dataclass(frozen=True)
class Job:
    id: str
    state: str  # pending, running, succeeded, failed or stopped
    started: float | None  # in seconds since 1970, as `ended`
    ended: float | None
    folder: str | None  # of its run; None for a job that Corral did not submit
    is_folder_sure: bool  # False: with `checkpoint.resume: never` the run may have taken a folder beside it
    exit_code: int | None
    message: str
    node: str | None  # address of the node on which its controller runs
    pid: int | None

    @classmethod
    def of(cls, details: Any) -> Self:
        """A job from Ray's details of it."""
        metadata, driver = details.metadata or {}, details.driver_info
        return cls(
            id=details.submission_id,
            state=str(details.status.value).lower(),
            started=None if details.start_time is None else details.start_time / 1000,
            ended=details.end_time / 1000 if details.end_time else None,
            folder=metadata.get(FOLDER_KEY),
            is_folder_sure=metadata.get(RESUME_KEY) != "never",
            exit_code=details.driver_exit_code,
            message=(details.message or "").strip(),
            node=None if driver is None else driver.node_ip_address,
            pid=None if driver is None else int(driver.pid),
        )

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_STATES

    @property
    def seconds(self) -> float:
        return 0.0 if self.started is None else (self.ended or time.time()) - self.started

    @property
    def outcome(self) -> str:
        """The last line that is printed about a job that has ended."""
        how = {"succeeded": "succeeded", "stopped": "was stopped"}.get(self.state, self.state)
        code = f" with exit code {self.exit_code}" if self.exit_code else ""
        folder = "" if self.folder is None else f"; run folder {self.folder}"
        return f"job {self.id} {how}{code} after {duration(self.seconds)}{folder}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "state": self.state,
            "started": format_time(self.started),
            "ended": format_time(self.ended),
            "duration_s": round(self.seconds, 3),
            "run_folder": self.folder,
            "exit_code": self.exit_code,
            "node": self.node,
            "pid": self.pid,
        }


def format_time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def list_jobs(api: JobApi) -> list[Job]:
    """All jobs that were submitted since the cluster was started, the newest first."""
    found = [Job.of(details) for details in api.list_jobs() if details.submission_id is not None]
    return sorted(found, key=lambda job: job.started or 0.0, reverse=True)


def find_job(api: JobApi, name: str) -> Job:
    """The job with this id, or whose id alone begins with it."""
    jobs = list_jobs(api)
    ids = [job.id for job in jobs]
    found = [job for job in jobs if job.id == name] or [job for job in jobs if job.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(job.id for job in found[:MAX_NAMES])
        more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
        raise UserError(f"several jobs begin with `{name}`: {names}{more}; write more of it")
    near = difflib.get_close_matches(name, ids, n=3, cutoff=0.5)
    others = "; `corral jobs` lists them" if jobs else "; there is none yet"
    raise UserError(f"there is no job `{name}`" + (f"; did you mean {', '.join(near)}?" if near else others))


def with_true_folder(api: JobApi, job: Job) -> Job:
    """The job with the folder that its run has printed, where only the run can know."""
    if job.folder is None or job.is_folder_sure:
        return job
    printed = re.search(r"^folder +(\S.*)$", logs_of(api, job.id), re.MULTILINE)
    return job if printed is None else replace(job, folder=printed[1].strip(), is_folder_sure=True)


def logs_of(api: JobApi, job: str) -> str:
    """Output of the job so far; empty before it begins."""
    try:
        return str(api.get_job_logs(job))
    except RuntimeError:
        return ""


def format_jobs(jobs: Iterable[Job]) -> str:
    rows = [
        (job.id, job.state, format_time(job.started) or "-", duration(job.seconds), job.folder or "-") for job in jobs
    ]
    return "\n".join(format_table([("job", "state", "started", "duration", "run folder"), *rows]))


def describe_job(api: JobApi, name: str) -> tuple[Job, str]:
    """One job, and a text about it with the last lines of its output."""
    job = with_true_folder(api, find_job(api, name))
    rows = {
        "job": job.id,
        "state": job.state if job.exit_code in (None, 0) else f"{job.state}, exit code {job.exit_code}",
        "started": format_time(job.started) or "-",
        "duration": duration(job.seconds),
        "run folder": job.folder or "-",
        "controlled": "" if job.node is None else f"by process {job.pid} on {job.node}",
    }
    last = (logs_of(api, job.id).strip() or job.message).splitlines()[-NUM_LAST_LINES:]
    lines = format_table([(name, text) for name, text in rows.items() if text])
    return job, "\n".join([*lines, *(["its last lines", *(f"  {line}" for line in last)] if last else [])])


# --- following and stopping


def follow(api: JobApi, job: str, write: Write, *, skip: int = 0, timeout_s: float | None = None) -> Job:
    """Writes the job's output, but for the first `skip` characters, until it ends or the timeout is over. A connection
    that breaks is made again."""
    deadline, failures, written = None if timeout_s is None else time.monotonic() + timeout_s, 0, skip

    def write_new(text: str) -> None:
        nonlocal written, failures
        written, failures = written + len(text), 0
        write(text)

    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            asyncio.run(_stream(api, job, write_new, written, left))
            return _wait_for_end(api, job, SETTLE_S if left is None else min(left, SETTLE_S))
        except (ConnectionError, UserError) as broken:
            failures += 1
            if failures > RETRIES:
                raise RunError(
                    f"the connection to {api.url} is lost; job {job} goes on without it: `corral logs {job} -f`"
                ) from broken
            time.sleep(RETRY_S)


async def _stream(api: JobApi, job: str, write: Write, skip: int, timeout_s: float | None) -> None:
    """Writes output until the job's last, or the timeout is over."""
    import aiohttp

    received, messages = 0, api.tail_job_logs(job)
    try:
        async with asyncio.timeout(timeout_s):
            while (text := await _next_message(api, job, messages)) is not None:
                received += len(text)
                if received > skip:
                    write(text[max(0, len(text) - (received - skip)) :])
                    skip = received
    except TimeoutError:
        return
    except (RuntimeError, OSError, aiohttp.ClientError) as error:
        raise ConnectionError(str(error)) from error


async def _next_message(api: JobApi, job: str, messages: AsyncIterator[str]) -> str | None:
    message = asyncio.ensure_future(anext(messages, None))
    try:
        while not (await asyncio.wait({message}, timeout=SILENCE_S))[0]:
            if not await asyncio.to_thread(lambda: Job.of(api.get_job_info(job)).is_open):
                return None
        return message.result()
    finally:
        message.cancel()


def _wait_for_end(api: JobApi, job: str, timeout_s: float) -> Job:
    """The job when it has ended, or when the timeout is over."""
    deadline = time.monotonic() + timeout_s
    while (found := Job.of(api.get_job_info(job))).is_open and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return with_true_folder(api, found)


def stop(api: JobApi, name: str, write: Write, timeout_s: float) -> str:
    """Stops a job, which makes its run save a checkpoint first, and writes its output meanwhile. Returns what came of
    it. Ray gives the job `submit.STOP_WAIT_S`, however long this waits."""
    job = find_job(api, name)
    ended = {"stopped": "was stopped", "succeeded": "has succeeded", "failed": "has failed"}
    if not job.is_open:
        raise UserError(f"job {job.id} does not run any more: it {ended[job.state]}")
    skip = len(logs_of(api, job.id))
    api.stop_job(job.id)
    found = follow(api, job.id, write, skip=skip, timeout_s=timeout_s)
    if found.is_open:
        end = "" if found.pid is None else f"; `kill -9 {found.pid}` on {found.node} ends it without saving"
        raise RunError(f"job {job.id} got the signal to stop and has not ended within {timeout_s:g} s{end}")
    return f"job {job.id} {ended[found.state]}: {describe_saved(found, logs_of(api, job.id))}"


def describe_saved(job: Job, output: str) -> str:
    """What the job has saved, by its run's own last output."""
    if job.state == "succeeded":
        return f"all of its steps are done; run folder {job.folder or 'as it says itself'}"
    steps = re.findall(r"\(stopped after step (\d+) of (\d+)\)", output)
    if not steps and job.folder is None:
        return (
            "its output does not say what it saved; look into its run's folder. A job of `ray job submit` is killed "
            "3 s after the signal, unless RAY_JOB_STOP_WAIT_TIME_S among its runtime environment's variables is more"
        )
    if not steps:
        return "it was not in the middle of training, and saved nothing"
    done, total = map(int, steps[-1])
    folder = job.folder or "its run's folder"
    if done == 0:
        return f"no step was done yet, so there was nothing to save; run folder {folder}"
    return f"a checkpoint of step {done} of {total} is in {folder}; `corral submit RECIPE --resume` continues from it"
