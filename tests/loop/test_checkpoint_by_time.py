"""Checkpoints are saved by time where nobody asked for a number of steps."""

from pathlib import Path

import pytest
from runs import train_here


@pytest.mark.parametrize(("minutes", "steps"), [("0.00001", [1, 2, 3]), ("30", [3]), ("0", [3])])
def test_a_run_saves_when_its_last_checkpoint_is_old(
    tmp_path: Path, tiny_model: Path, minutes: str, steps: list[int]
) -> None:
    train_here(tmp_path, tiny_model, "schedule.steps=3", f"checkpoint.minutes={minutes}", "checkpoint.keep=9")
    saved = sorted(path.name for path in (tmp_path / "runs" / "tiny" / "checkpoints").iterdir())
    assert saved == [f"step_{step:06d}" for step in steps]
