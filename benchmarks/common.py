"""What the scripts in this folder have in common. Reports and clocks are those of `corral.bench`."""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

sys.path.append(str(HERE.parent / "tests"))  # for the tiny model and its tokenizer


def temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="corral-bench-", ignore_cleanup_errors=True)
