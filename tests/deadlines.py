"""Upper bounds on time in tests. A slow or busy machine multiplies all of them at once."""

import os

PATIENCE = float(os.environ.get("CORRAL_TEST_PATIENCE", "1"))
"""The Makefile sets it to 5 for `.ci/run` and `make test-all`. A bound that is met costs nothing, however large."""


def within(seconds: float) -> float:
    return seconds * PATIENCE
