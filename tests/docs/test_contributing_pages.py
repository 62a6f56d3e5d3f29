"""The pages that add a loss and an environment, done as they say."""

import json
import re
import shlex
from pathlib import Path

import pytest
from commands import corral
from guides import ROOT, Block, block, blocks


def files_of(page: str, folder: Path) -> None:
    """Writes every file that the page shows into the folder."""
    for one in blocks(ROOT / "docs" / page):
        named = re.match(r"# (\S+\.(py|yaml))\n", one.text)
        if named:
            (folder / named[1]).write_text(one.text)


def run(one: Block, folder: Path) -> str:
    output = ""
    for command in one.commands:
        name, *arguments = shlex.split(command)
        assert name == "corral"
        result = corral(folder, *arguments)
        assert result.code == 0, result.stderr
        output += result.stdout
    return output


def rewards_of(folder: Path) -> list[float]:
    [metrics] = (folder / "runs").glob("*/metrics.jsonl")
    return [
        row["reward/mean"] for line in metrics.read_text().splitlines() if "reward/mean" in (row := json.loads(line))
    ]


def test_an_environment_is_one_file(tmp_path: Path) -> None:
    files_of("contributing-an-environment.md", tmp_path)
    assert "random  reward" in run(block("contribute-env-test"), tmp_path)


@pytest.mark.slow
def test_a_model_is_trained_in_that_environment(tmp_path: Path) -> None:
    files_of("contributing-an-environment.md", tmp_path)
    run(block("contribute-env-train"), tmp_path)
    assert len(rewards_of(tmp_path)) == 3
