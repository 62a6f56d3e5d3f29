"""Jobs as people see them: a table, one of them in detail, and which one a few letters mean."""

import difflib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self

from corral.cluster.jobs.dashboard import JobApi
from corral.observe.console_lines import duration
from corral.recipe.errors import UserError

FOLDER_KEY = "corral_run_folder"
RESUME_KEY = "corral_resume"
"""Of a job's metadata."""
OPEN_STATES = ("pending", "running")
HINT_LINES = 5


@dataclass(frozen=True)
class Job:
    id: str
    state: str
    """pending, running, succeeded, failed or stopped."""
    started: float | None
    """In seconds since 1970, as `ended`."""
    ended: float | None
    folder: str | None
    """Of its run; None for a job of somebody else's making."""
    is_folder_sure: bool
    """False: with `checkpoint.resume: never` the run may have taken a folder beside it."""
    exit_code: int | None
    message: str
    node: str | None
    """Address of the node on which it is controlled."""
    pid: int | None

    @classmethod
    def of(cls, details: Any) -> Self:
        """From what Ray says of it."""
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

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "state": self.state,
            "started": clock(self.started),
            "ended": clock(self.ended),
            "duration_s": round(self.seconds, 3),
            "run_folder": self.folder,
            "exit_code": self.exit_code,
            "node": self.node,
            "pid": self.pid,
        }


def list_jobs(api: JobApi) -> list[Job]:
    """All that were submitted since the cluster was started, the newest first."""
    found = [Job.of(details) for details in api.list_jobs() if details.submission_id is not None]
    return sorted(found, key=lambda job: job.started or 0.0, reverse=True)


def find_job(api: JobApi, name: str) -> Job:
    """By its id, or by a beginning that no other has."""
    jobs = list_jobs(api)
    for job in jobs:
        if job.id == name:
            return job
    found = [job for job in jobs if job.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"several jobs begin with `{name}`: {some([job.id for job in found])}; write more of it")
    near = difflib.get_close_matches(name, [job.id for job in jobs], n=3, cutoff=0.5)
    others = "; `corral jobs` lists them" if jobs else "; there is none yet"
    raise UserError(f"there is no job `{name}`" + (f"; did you mean {', '.join(near)}?" if near else others))


def some(names: Sequence[str], most: int = HINT_LINES) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_true_folder(api: JobApi, job: Job) -> Job:
    """With the folder that the run itself said, where only it can know."""
    if job.folder is None or job.is_folder_sure:
        return job
    said = re.search(r"^folder +(\S.*)$", logs_of(api, job.id), re.MULTILINE)
    return job if said is None else replace(job, folder=said[1].strip(), is_folder_sure=True)


def logs_of(api: JobApi, job: str) -> str:
    """What it has said so far; nothing before it begins."""
    try:
        return str(api.get_job_logs(job))
    except RuntimeError:
        return ""


def table(jobs: Iterable[Job]) -> str:
    rows = [("job", "state", "started", "duration", "run folder")]
    rows += [(job.id, job.state, clock(job.started) or "-", duration(job.seconds), job.folder or "-") for job in jobs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def describe_job(api: JobApi, name: str) -> tuple[Job, str]:
    """One job, and in words how it does, with the last that it said."""
    job = with_true_folder(api, find_job(api, name))
    rows = {
        "job": job.id,
        "state": job.state if job.exit_code in (None, 0) else f"{job.state}, exit code {job.exit_code}",
        "started": clock(job.started) or "-",
        "duration": duration(job.seconds),
        "run folder": job.folder or "-",
        "controlled": "" if job.node is None else f"by process {job.pid} on {job.node}",
    }
    said = logs_of(api, job.id).strip().splitlines()[-HINT_LINES:] or job.message.splitlines()[-HINT_LINES:]
    width = max(map(len, rows))
    lines = [f"{name.ljust(width)}  {text}" for name, text in rows.items() if text]
    last = ["its last lines", *(f"  {line}" for line in said)] if said else []
    return job, "\n".join([*lines, *last])


def outcome(job: Job) -> str:
    """The last line that is said of a job that has ended."""
    how = {"succeeded": "succeeded", "stopped": "was stopped"}.get(job.state, job.state)
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    folder = "" if job.folder is None else f"; run folder {job.folder}"
    return f"job {job.id} {how}{code} after {duration(job.seconds)}{folder}"


def clock(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
