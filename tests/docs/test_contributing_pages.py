"""The pages that add a loss and an environment, done as they say."""

from pathlib import Path

import pytest
from guide_commands import files_of, run
from guides import block

from corral.observe.run_files import read_metrics


def test_an_environment_is_one_file(tmp_path: Path) -> None:
    files_of("contributing-an-environment.md", tmp_path)
    assert "random  reward" in run(tmp_path, block("contribute-env-test"))[0]


@pytest.mark.slow
def test_a_model_is_trained_in_that_environment(tmp_path: Path) -> None:
    files_of("contributing-an-environment.md", tmp_path)
    run(tmp_path, block("contribute-env-train"))
    [metrics] = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert sum("reward/mean" in row for row in read_metrics(metrics)) == 3
