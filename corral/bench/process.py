"""A side in a process of its own: its memory and its state of the device are its own, and so is its failure."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from corral.bench.settings import Settings
from corral.bench.side import MARK

TAIL = 15
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from corral.bench.side import main; main(*sys.argv[2:])"
)


class SideFailed(Exception):
    """One side could not be measured, or not all of it; the others go on."""


def run_side(side: str, function: str, settings: Settings, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Calls `function` in a new process, and `on_event` with what it tells, as soon as it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", BOOTSTRAP, json.dumps(sys.path), side, function, settings.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # what it has started ends with it
    )
    assert process.stdout is not None
    keeper = Keeper(process, settings.timeout_s)
    tail: deque[str] = deque(maxlen=TAIL)
    try:
        for line in process.stdout:
            _, mark, event = line.partition(MARK)
            if mark:
                on_event(json.loads(event))
            elif line.strip():
                tail.append(line.rstrip())
    finally:
        keeper.end()
    if keeper.timed_out or process.returncode:
        how = (
            f"took more than {settings.timeout_s:g} s" if keeper.timed_out else f"ended with code {process.returncode}"
        )
        raise SideFailed("\n".join([f"{side} {how}", *(f"    {line}" for line in tail)]))


class Keeper:
    """Waits for a process, for so long, and ends what is left of its group: it would hold on to the device, and to the
    pipe that is read."""

    def __init__(self, process: "subprocess.Popen[str]", timeout_s: float) -> None:
        self.process, self.timeout_s, self.timed_out = process, timeout_s, False
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self._kill()
        self.thread.join()

    def _wait(self) -> None:
        try:
            self.process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            self.timed_out = True
        self._kill()
        self.process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
