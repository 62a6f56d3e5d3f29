"""A recipe with which the tiny model learns in seconds, and ways to run it and to look at what it left."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from corral.loop.train import running, train
from corral.loop.training_loop import Interrupt, run_steps
from corral.model.families import checked_plan
from corral.observe.console import Console
from corral.observe.run_files import read_metrics
from corral.observe.run_folder import RunFolder
from corral.recipe.load import load_recipe
from corral.recipe.rules import check
from corral.recipe.schema import Recipe
from corral.training.checkpoint import MANIFEST, list_files, size_and_hash

RECIPE = """\
name: tiny
model: {{path: {model}, dtype: float32}}
data:
  train: {{path: "arithmetic:addition", size: 40, options: {{digits: 1}}}}
  max_prompt_tokens: 48
environment: {{reward: {{name: "{folder}/vowels.py:share_of_vowels", workers: 1}}}}
rollout: {{max_response_tokens: 8}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, max_tokens_per_micro_batch: 256}}
optimizer: {{learning_rate: 0.01}}
schedule: {{steps: 2}}
logging: {{runs: {folder}/runs, trajectories: false, curve: false}}
"""
REWARD = '''\
import time


def share_of_vowels(response):
    """Easy to learn for a model that says random letters."""
    return sum(letter in "aeiou" for letter in response) / 8


def slowly(response, calls, seconds, after=0):
    """The same, and a test can see how far it has come. The first calls, `after` of them, take no time."""
    with open(calls, "a") as file:
        file.write(".")
        is_slow = file.tell() > after
    time.sleep(seconds * is_slow)
    return share_of_vowels(response)
'''
VALIDATION = (
    "data.validation.path=arithmetic:addition",
    "data.validation.size=6",
    "data.validation.seed=1",
    "data.validation.options.digits=1",
)
"""Overrides that give the recipe questions to validate on."""


def write_recipe(folder: Path, model: Path) -> Path:
    (folder / "vowels.py").write_text(REWARD)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, model=model))
    return path


def slowly(folder: Path, seconds: float) -> tuple[str, ...]:
    """Overrides: the reward takes its time, and `calls` has a byte for each call."""
    reward = "environment.reward"
    return (
        f"{reward}.name={folder}/vowels.py:slowly",
        f"{reward}.options.calls={folder}/calls",
        f"{reward}.options.seconds={seconds}",
    )


def num_steps(run: Path) -> int:
    """Rows of metrics that it has written so far."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def train_here(folder: Path, model: Path, *overrides: str) -> Path:
    """In this process; returns the run's folder."""
    recipe = load_recipe(write_recipe(folder, model), overrides)
    return train(recipe, checked_plan(recipe), Console(io.StringIO()))


def steps_here(folder: Path, model: Path, *overrides: str) -> list[dict[str, Any]]:
    """The rows of a run's steps, without its last checkpoint and picture: faster."""
    return [row for row in rows_here(load_recipe(write_recipe(folder, model), overrides)) if "reward/mean" in row]


def rows_here(recipe: Recipe, resume_from: Path | None = None) -> list[dict[str, Any]]:
    """The metrics of a run in this process, without its last checkpoint and picture."""
    check(recipe)
    console = Console(io.StringIO())

    async def run_here(run_folder: RunFolder, interrupt: Interrupt) -> None:
        async with running(recipe, run_folder, console, interrupt, resume_from) as run:
            await run_steps(run)

    with (
        RunFolder.open(Path(recipe.logging.runs), recipe.name, "never") as run_folder,
        Interrupt(console.warn) as interrupt,
    ):
        asyncio.run(run_here(run_folder, interrupt))
    return rows_of(run_folder.path)


def steps_in_mode(folder: Path, model: Path, pipelined: bool, *overrides: str) -> list[dict[str, Any]]:
    """For a pipeline the rules want devices of its own for rollout; a CPU can do without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runs.check", lambda recipe: [])
        return steps_here(folder, model, f"schedule.pipelined={str(pipelined).lower()}", *overrides)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The rows of training steps; those of validations left out."""
    return [row for row in rows_of(run) if "reward/mean" in row]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Everything in metrics.jsonl that must be the same in every run; that is all but times."""
    return [without_times(row) for row in read_metrics(run / "metrics.jsonl")]


def same_outcome(run: Path, other: Path, step: int) -> bool:
    """To the bit: numbers, trajectories without durations, by their hashes all files of the last checkpoint but for
    what it was trained with, and what became of each prompt, but for how often it was issued."""
    return (
        rows_of(run) == rows_of(other)
        and _checkpoint(run, step) == _checkpoint(other, step)
        and _trajectories(run / "trajectories") == _trajectories(other / "trajectories")
    )


def _checkpoint(run: Path, step: int) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    folder = run / "checkpoints" / f"step_{step:06d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    del files["ledger.jsonl"], files["state.json"]
    state = json.loads((folder / "state.json").read_text())
    del state["trained_with"]  # recipe.2.yaml where it was resumed with another one, nothing without `corral train`
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return files, state, [{key: value for key, value in line.items() if key != "times"} for line in lines]


def _trajectories(folder: Path) -> dict[str, pyarrow.Table]:
    tables = {path.name: pyarrow.parquet.read_table(path) for path in folder.iterdir()}
    return {
        name: table.drop_columns([column for column in table.column_names if column.endswith("_s")])
        for name, table in tables.items()
    }


def make_manifest(checkpoint: Path) -> None:
    """So that it fits the files, as by somebody who has changed them on purpose."""
    files = {name: size_and_hash(checkpoint / name) for name in list_files(checkpoint) if name != MANIFEST}
    (checkpoint / MANIFEST).write_text(json.dumps({"format": 1, "files": files}))


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(("time/", "speed/", "memory/"))}
