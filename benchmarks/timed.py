"""What benchmarks of the whole loop need: its steps with a clock, a folder, and the tests' tiny model."""

import sys
import tempfile

from report import HERE

from corral.bench.timed import timed_steps

sys.path.append(str(HERE.parent / "tests"))  # for the tiny model and its tokenizer

__all__ = ["bench_folder", "timed_steps"]


def bench_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="corral-bench-", ignore_cleanup_errors=True)
