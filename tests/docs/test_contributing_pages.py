"""The pages that add a loss and an environment, done as they say."""

import json
from pathlib import Path

import pytest
from guide_commands import files_of, run
from guides import block


def rewards_of(folder: Path) -> list[float]:
    [metrics] = (folder / "runs").glob("*/metrics.jsonl")
    return [
        row["reward/mean"] for line in metrics.read_text().splitlines() if "reward/mean" in (row := json.loads(line))
    ]


def test_an_environment_is_one_file(tmp_path: Path) -> None:
    files_of("contributing-an-environment.md", tmp_path)
    assert "random  reward" in run(tmp_path, block("contribute-env-test"))[0]


@pytest.mark.slow
def test_a_model_is_trained_in_that_environment(tmp_path: Path) -> None:
    files_of("contributing-an-environment.md", tmp_path)
    run(tmp_path, block("contribute-env-train"))
    assert len(rewards_of(tmp_path)) == 3
