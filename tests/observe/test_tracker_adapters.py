"""The real libraries, offline; those that are not installed are skipped."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from corral.observe.run_folder import RunFolder
from corral.observe.trackers import make_trackers
from corral.recipe.schema import Logging

CONFIG = {"name": "run", "cluster": {"placement": {"actor,rollout": "all"}}, "data": {"system": None}}


def track(
    name: str, runs: Path, steps: range, saved: dict[str, dict[str, str]] | None = None
) -> dict[str, dict[str, str]]:
    with RunFolder.open(runs, "run", "auto") as folder:
        trackers = make_trackers(Logging.model_validate({"trackers": [name]}), folder, "run", saved, CONFIG)
        for step in steps:
            trackers.log(step, {"reward/mean": step / 10, "validation/mean@1": float("nan") if step == 1 else 0.25})
        state = trackers.state()
        trackers.close()
    assert not trackers.failures
    return state


def scalars(folder: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("reward/mean")}


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    track("tensorboard", tmp_path, range(1, 4))
    assert scalars(tmp_path / "run" / "logs" / "tensorboard") == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})


def test_tensorboard_drops_the_steps_that_a_resumed_run_makes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    state = track("tensorboard", tmp_path, range(1, 6))
    track("tensorboard", tmp_path, range(3, 4), state)
    assert sorted(scalars(tmp_path / "run" / "logs" / "tensorboard")) == [1, 2, 3]


def test_tensorboard_is_written_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    program = """
import sys
from pathlib import Path
from corral.observe.trackers import TensorBoard
writer = TensorBoard(Path(sys.argv[1]), "project", "run", {}, {})
writer.log(1, {"reward/mean": 1.0})
writer.close()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    state = track("wandb", tmp_path, range(1, 4))
    assert track("wandb", tmp_path, range(3, 5), state) == state
    runs = sorted((tmp_path / "run" / "logs" / "wandb").glob("offline-run-*"))
    assert all(run.name.endswith(state["wandb"]["id"]) for run in runs)


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    state = track("mlflow", tmp_path, range(1, 4))
    assert track("mlflow", tmp_path, range(4, 6), state) == state
    client = MlflowClient()
    run_id = state["mlflow"]["run_id"]
    assert [metric.step for metric in client.get_metric_history(run_id, "reward/mean")] == [1, 2, 3, 4, 5]
    assert client.get_metric_history(run_id, "validation/mean_at_1")
    assert client.get_run(run_id).data.params["cluster.placement.actor_rollout"] == "all"
    assert client.get_run(run_id).info.status == "FINISHED"


def test_swanlab_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    state = track("swanlab", tmp_path, range(1, 4))
    assert track("swanlab", tmp_path, range(4, 6), state) == state
    runs = list((tmp_path / "run" / "logs" / "swanlab").glob("run-*"))
    assert all(run.name.endswith(state["swanlab"]["id"]) for run in runs)


def test_trackio_goes_on_with_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    program = """
import sys
from pathlib import Path
from corral.observe.trackers import Trackio
first = Trackio(Path(), "project", "run", {"seed": 0}, {})
first.log(1, {"reward/mean": 0.5, "validation/mean@1": float("nan")})
first.close()
second = Trackio(Path(), "project", "run", {"seed": 0}, first.state())
second.log(2, {"reward/mean": 0.6})
second.close()
"""
    # Its folder is fixed when it is imported.
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, env={**os.environ, "TRACKIO_DIR": str(tmp_path)}
    )
    with sqlite3.connect(tmp_path / "project.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("run", 1), ("run", 2)]
    assert json.loads(rows[1][2])["reward/mean"] == 0.6
