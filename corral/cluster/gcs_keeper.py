"""`corral up --gcs-storage`: the GCS (Ray's head process) has its tables on disk, and is started again when it dies.

Without it the tables are in its memory, nobody starts it again, and a minute after its death all raylets end. The
keeper is a process of the head's node. It waits for the GCS or the node's raylet to end: of the GCS it starts another
with the same command, which reads the tables and takes up the connections of the nodes; with the raylet it ends itself.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from corral.child_process import read_stat
from corral.runtime.membership import Membership, marked_processes, member_folder

POLL_S = 0.5
FIND_S = 30.0
MAX_RESTARTS, WINDOW_S = 5, 60.0
"""A GCS that dies more often than this cannot read its tables, or has no memory or disk."""


def storage_folder(member: Membership) -> Path:
    """The folder of the tables. Its name has the mark of this start: tables of an earlier cluster list nodes and
    workers that are gone."""
    return Path(member.temp_dir) / f"gcs-{member.mark}"


def storage_variables(member: Membership) -> dict[str, str]:
    """Settings with which Ray puts the tables on disk."""
    folder = storage_folder(member)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder)}


def start_keeper(member: Membership, environment: dict[str, str]) -> None:
    """Starts the keeper. It has the mark of the membership, so it ends with it."""
    with (member_folder(member.port) / "gcs-keeper.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "corral.cluster.gcs_keeper", member.mark],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )


def remove_storage(member: Membership) -> None:
    shutil.rmtree(storage_folder(member), ignore_errors=True)


def keep(mark: str) -> None:
    """Returns when the raylet has ended, or the GCS cannot be kept alive."""
    raylet, gcs = find_process(mark, "raylet"), find_process(mark, "gcs_server")
    command = [word.decode() for word in Path(f"/proc/{gcs}/cmdline").read_bytes().split(b"\0")[:-1]]
    restarted: list[float] = []
    process: subprocess.Popen[bytes] | None = None
    while is_running(raylet, "raylet"):
        if process is not None:
            process.poll()  # or what has ended would stay in the table of processes
        if not is_running(gcs, "gcs_server"):
            restarted = [moment for moment in restarted if time.monotonic() - moment < WINDOW_S]
            if len(restarted) == MAX_RESTARTS:
                report(f"the GCS has died {MAX_RESTARTS + 1} times in {WINDOW_S:g} s, and is not started again")
                return
            restarted.append(time.monotonic())
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            gcs = process.pid
            report(f"the GCS has died, and is started again as process {gcs}")
        time.sleep(POLL_S)


def find_process(mark: str, name: str) -> int:
    deadline = time.monotonic() + FIND_S
    while time.monotonic() < deadline:
        for pid, found in marked_processes(mark):
            if found == name:
                return pid
        time.sleep(POLL_S)
    raise SystemExit(f"there is no process {name}")


def is_running(pid: int, name: str) -> bool:
    """Whether the process has not ended. A program that is only just being started still has its parent's name."""
    process = read_stat(pid)
    return process is not None and process.state != "Z" and (process.name == name or process.parent == os.getpid())


def report(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)


if __name__ == "__main__":
    keep(sys.argv[1])
