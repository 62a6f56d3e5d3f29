"""A side in a process of its own, seen from both ends: its memory, its device context and its failure are its own.

The side reports by marked lines on its standard output. Everything else that libraries print there is kept only to show
its last lines if the side fails.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corral.bench.workloads import BenchSettings
from corral.child_process import die_with_stdin, signal_group

MARK = "@corral-bench "
TAIL_LINES = 15
PACKAGE_ROOT = str(Path(__file__).parents[2])
BOOTSTRAP = (
    "import json, sys; sys.path[:] = [path for path in [*sys.path, *json.loads(sys.argv[1])] if path]; "
    "from corral.bench.side_process import main; main(*sys.argv[2:])"
)
"""Search paths are appended: a Python with vLLM keeps its own packages, and finds Corral behind them. The current
folder is left out, for libraries take a folder that is named like a package for that package."""


class SideFailed(Exception):
    """One side could not be measured, or not all of it; the others go on."""


# --- outside: the process that compares


def run_side(
    side: str,
    function: str,
    settings: BenchSettings,
    on_event: Callable[[dict[str, Any]], None],
    python: str | None = None,
) -> None:
    """Calls `function` in a new process, and `on_event` with what it reports, as soon as it does."""
    search_paths = sys.path if python is None else [PACKAGE_ROOT]
    process = subprocess.Popen(
        [python or sys.executable, "-c", BOOTSTRAP, json.dumps(search_paths), side, function, settings.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own, so that what it has started can be killed with it
    )
    assert process.stdout is not None
    expired = threading.Event()
    waiter = threading.Thread(target=wait_and_kill_group, args=(process, settings.timeout_s, expired), daemon=True)
    waiter.start()
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        for line in process.stdout:
            _, mark, event = line.partition(MARK)
            if mark:
                on_event(json.loads(event))
            elif line.strip():
                tail.append(line.rstrip())
    finally:
        signal_group(process.pid)
        waiter.join()
    if expired.is_set() or process.returncode:
        how = f"ended with code {process.returncode}"
        if expired.is_set():
            how = f"took more than {settings.timeout_s:g} s"
        raise SideFailed("\n".join([f"{side} {how}", *(f"    {line}" for line in tail)]))


def wait_and_kill_group(process: "subprocess.Popen[str]", timeout_s: float, expired: threading.Event) -> None:
    """Waits for the process, up to the limit, and kills what is left of its group.

    Also after a normal end: a child that was left behind would hold on to the device, and to the pipe that is read.
    """
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        expired.set()
    signal_group(process.pid)
    process.wait()


# --- inside: the side's process


def main(side: str, function: str, settings: str) -> None:
    """Calls `function` (`module:name`) with the settings and a reporter."""
    die_with_stdin()
    reporter = SideReporter(side)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(BenchSettings.from_json(settings), reporter)
    sys.stderr.flush()
    os._exit(0)  # everything is reported: how long libraries take to shut down, or fail to, does not matter


class SideReporter:
    """Reports progress, rows of the table and facts from a side's process to the one that compares."""

    def __init__(self, side: str) -> None:
        self.side, self.started = side, time.perf_counter()
        self.ready_after_s: float | None = None

    def progress(self, text: str) -> None:
        self._send({"progress": f"{self.side}: {text}"})

    def row(self, **measured: Any) -> None:
        self._send({"row": {"side": self.side, **measured}})

    def facts(self, **found: Any) -> None:
        self._send({"facts": found})

    def ready(self) -> float:
        """Seconds from the start of the process to the first call of this method."""
        if self.ready_after_s is None:
            self.ready_after_s = self.elapsed_s
        return self.ready_after_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the process began."""
        return time.perf_counter() - self.started

    def _send(self, event: dict[str, Any]) -> None:
        # On a line of its own, whatever others have begun to print.
        sys.stdout.write(f"\n{MARK}{json.dumps(event)}\n")
        sys.stdout.flush()
