"""The example programs run, and reach what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import within
from guides import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=within(300), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    reached = re.search(r"reward (-?[\d.]+) -> (-?[\d.]+)", result.stdout)
    if reached:
        assert float(reached[2]) > float(reached[1])


def test_the_page_lists_every_example() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text()
    for example in EXAMPLES:
        assert f"(../examples/{example.name})" in page
