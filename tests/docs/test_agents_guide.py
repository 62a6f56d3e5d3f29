"""The two examples of the guide to agents, as they stand there, with a tiny model."""

import json
import sqlite3
from pathlib import Path

import pytest
from guide_commands import files_of, run
from guides import Block, block

from corral.data.plugins import load_object
from corral.data.rows import Row

TINY = ("model.path=model", "batch.prompts_per_step=2", "batch.samples_per_prompt=2", "schedule.steps=1")


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """With every file that the guide shows."""
    files_of("agents.md", tmp_path)
    (tmp_path / "model").symlink_to(tiny_model)
    return tmp_path


def train(folder: Path, one: Block, *more: str) -> list[dict[str, object]]:
    """What was measured in each step."""
    run(folder, one, *TINY, *more)
    [metrics] = (folder / "runs").glob("*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.slow
def test_a_model_is_trained_with_tools(folder: Path) -> None:
    [step] = train(folder, block("train-tools"))
    assert step["environment/turns"] == 1.0  # a random model finds no tool, and its first reply is its answer
    assert step["samples/errors"] == 0


@pytest.mark.slow
def test_somebodys_agent_is_trained(folder: Path) -> None:
    pytest.importorskip("openai")
    [step] = train(folder, block("train-agent"), "rollout.max_turn_tokens=8")
    assert step["environment/turns"] == 2.0
    assert step["samples/errors"] == 0


def test_the_models_queries_change_no_table_and_reach_no_other_file(folder: Path) -> None:
    shop = load_object(f"{folder}/shop.py:Shop", "tools")(
        Row([], "", "", {"tables": "create table t (x); insert into t values (1)"})
    )
    assert shop.query("select x from t") == [(1,)]
    for query in ("delete from t", "insert into t values (2)", f"attach '{folder}/other.db' as other"):
        with pytest.raises(sqlite3.OperationalError):
            shop.query(query)
    assert not (folder / "other.db").exists()
    shop.close()
