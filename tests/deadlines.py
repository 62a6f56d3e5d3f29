"""Upper bounds on time in tests. A slow or busy machine multiplies all of them at once."""

import os
import time
from collections.abc import Callable

PATIENCE = float(os.environ.get("CORRAL_TEST_PATIENCE", "1"))
"""The Makefile sets it to 5 for `.ci/run` and `make test-all`. A bound that is met costs nothing, however large."""


def within(seconds: float) -> float:
    return seconds * PATIENCE


def wait_until(
    condition: Callable[[], object], timeout_s: float = 30, said: Callable[[], object] = str, pause_s: float = 0.02
) -> None:
    """`said`: what explains it if the condition does not come true; `pause_s`: longer where it costs to look."""
    deadline = time.monotonic() + within(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(pause_s)
