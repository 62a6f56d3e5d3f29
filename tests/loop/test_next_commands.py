"""What a run says to do next can be given to a shell."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from corral.loop.train import next_commands
from corral.training.checkpoint import step_folder


def test_commands_are_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "(a) $x & more"
    checkpoint = step_folder(folder / "checkpoints", 3)
    checkpoint.mkdir(parents=True)
    recipe = SimpleNamespace(trains_on_rows=False, validates_by_generation=True, code_names={})
    places = SimpleNamespace(checkpoints=folder / "checkpoints")
    run: Any = SimpleNamespace(recipe=recipe, folder=places, step=3, is_complete=True)
    commands = next_commands(run, folder / "recipe.yaml")
    assert shlex.split(commands["evaluate"]) == [
        "corral", "evaluate", str(folder / "recipe.yaml"), "--model", str(checkpoint)
    ]  # fmt: skip
    assert shlex.split(commands["export"]) == ["corral", "export", str(checkpoint), "OUT"]
