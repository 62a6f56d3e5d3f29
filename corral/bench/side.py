"""The inside of a side's process: what it is told, and how it tells what it has found.

What it tells are marked lines on its standard output; everything else that is said there is only looked at if the side
fails.
"""

import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from corral.bench.settings import Settings

MARK = "@corral-bench "

Measured = list[dict[str, Any]]
"""One dict for each step, with at least its `seconds`."""


class Tell:
    """The way back to who has started this process."""

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
        """Seconds until there was something to measure, which is when this is called first."""
        if self.ready_after_s is None:
            self.ready_after_s = self.elapsed_s
        return self.ready_after_s

    @property
    def elapsed_s(self) -> float:
        """Since the process began."""
        return time.perf_counter() - self.started

    def _send(self, event: dict[str, Any]) -> None:
        """On a line of its own, whatever others have begun to say."""
        sys.stdout.write(f"\n{MARK}{json.dumps(event)}\n")
        sys.stdout.flush()


def main(side: str, function: str, settings: str) -> None:
    """`function`: `module:name`, called with the settings and the way back."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    tell = Tell(side)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(Settings.from_json(settings), tell)
    sys.stderr.flush()
    os._exit(0)  # everything has been told: how long others take to tidy up, or fail to, is not of interest


def end_with_parent() -> None:
    """Nothing comes through the standard input but its end, when who started this is gone."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
