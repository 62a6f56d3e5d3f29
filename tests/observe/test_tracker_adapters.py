"""The real libraries, offline; those that are not installed are skipped."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import within
from runs import train_here

from corral.observe.run_files import StepSamples
from corral.observe.run_folder import RunFolder
from corral.observe.trackers import make_trackers
from corral.observe.trajectory_store import TrajectoryStore
from corral.recipe.schema import Logging

SAMPLES = StepSamples(
    ["prompt", "reply", "reward"],
    [["1 + 1 =", "<b>2</b>\n*yes*", 1.0], ["2 + 2 =", "5", 0.0]],
    {"reward": np.array([1.0, 0.0]), "length": np.array([4, 7, 9]), "advantage": np.array([0.5, -0.5])},
)
CONFIG = {"name": "run", "cluster": {"placement": {"actor,rollout": "all"}}, "data": {"system": None}}


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # where MLflow puts files


def track(
    name: str, runs: Path, steps: range, saved: dict[str, dict[str, str]] | None = None
) -> dict[str, dict[str, str]]:
    with RunFolder.open(runs, "run", "auto") as folder:
        trackers = make_trackers(Logging.model_validate({"trackers": [name]}), folder, "run", saved, CONFIG)
        for step in steps:
            trackers.log(step, {"reward/mean": step / 10, "validation/mean@1": float("nan") if step == 1 else 0.25})
            trackers.log_samples(step, SAMPLES)
        state = trackers.state()
        trackers.close()
    assert not trackers.failures
    return state


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder: Path) -> dict[int, float]:
    return {event.step: event.value for event in events_of(folder).Scalars("reward/mean")}


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    track("tensorboard", tmp_path, range(1, 4))
    assert scalars(tmp_path / "run" / "logs" / "tensorboard") == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})


def test_tensorboard_reads_back_tables_histograms_and_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data
    from tensorboard.util import tensor_util

    track("tensorboard", tmp_path, range(1, 3))
    events = events_of(tmp_path / "run" / "logs" / "tensorboard")
    tables = {one.step: tensor_util.make_ndarray(one.tensor_proto) for one in events.Tensors("trajectories")}
    assert sorted(tables) == [1, 2]
    assert tables[2][0].tolist() == [b"prompt", b"reply", b"reward"]
    assert tables[2][1].tolist() == [b"    1 + 1 =", b"    <b>2</b>\n    *yes*", b"    1.0"]
    buckets = tensor_util.make_ndarray(events.Tensors("histogram/length")[0].tensor_proto)
    assert (buckets[0][0], buckets[-1][1], buckets[:, 2].sum()) == (4, 9, 3)
    plugin = events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data
    hparams = parse_session_start_info_plugin_data(plugin.content).hparams
    assert {key: value.string_value for key, value in hparams.items()} == {
        "name": "run",
        "cluster.placement.actor,rollout": "all",
    }


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
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=within(60))


def check_it_goes_on_with_the_same_run(name: str, runs: Path, folders: str) -> None:
    pytest.importorskip(name)
    state = track(name, runs, range(1, 4))
    assert track(name, runs, range(3, 5), state) == state
    written = list((runs / "run" / "logs" / name).glob(folders))
    assert all(run.name.endswith(state[name]["id"]) for run in written)


def test_wandb_goes_on_with_the_same_run(tmp_path: Path) -> None:
    check_it_goes_on_with_the_same_run("wandb", tmp_path, "offline-run-*")


def test_swanlab_goes_on_with_the_same_run(tmp_path: Path) -> None:
    check_it_goes_on_with_the_same_run("swanlab", tmp_path, "run-*")


def test_wandb_gets_tables_histograms_and_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    track("wandb", tmp_path, range(1, 3))
    [log] = (tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/*.wandb")
    records = [Record.FromString(data) for data in log_records(log.read_bytes())]
    rows = [{":".join(item.nested_key): json.loads(item.value_json) for item in one.history.item} for one in records]
    config = {item.key: json.loads(item.value_json) for one in records for item in one.run.config.update}
    media = [row for row in rows if "trajectories:nrows" in row]
    assert [row["step"] for row in media] == [1, 2]
    assert media[0]["trajectories:nrows"] == 2
    assert sum(media[0]["histogram/length:values"]) == 3
    [first, _] = sorted((log.parent / "files/media/table").glob("trajectories_*.table.json"))
    assert json.loads(first.read_text())["data"][0] == ["1 + 1 =", "<b>2</b>\n*yes*", 1.0]
    assert config["cluster"] == CONFIG["cluster"]


def log_records(content: bytes, block: int = 32768) -> Iterator[bytes]:
    """The records of LevelDB's log format, behind the 7 bytes that wandb begins a file with."""
    record, place = b"", 7
    while place + 7 <= len(content):
        if place % block > block - 7:
            place += block - place % block  # no header fits
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole, or its last part
            yield record
            record = b""


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    state = track("mlflow", tmp_path, range(1, 4))
    assert track("mlflow", tmp_path, range(4, 6), state) == state
    client = MlflowClient()
    run_id = state["mlflow"]["run_id"]
    assert [metric.step for metric in client.get_metric_history(run_id, "reward/mean")] == [1, 2, 3, 4, 5]
    assert client.get_metric_history(run_id, "validation/mean_at_1")
    assert client.get_run(run_id).data.params["cluster.placement.actor_rollout"] == "all"
    assert client.get_run(run_id).info.status == "FINISHED"


def test_mlflow_gets_a_table_of_each_step(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    state = track("mlflow", tmp_path, range(1, 3))
    track("mlflow", tmp_path, range(2, 4), state)
    client, run_id = MlflowClient(), state["mlflow"]["run_id"]
    paths = [one.path for one in client.list_artifacts(run_id, "trajectories")]
    assert sorted(paths) == [f"trajectories/step_00000{step}.json" for step in (1, 2, 3)]
    tables = json.loads(client.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert [one["path"] for one in tables] == sorted(paths)
    table = json.loads(Path(client.download_artifacts(run_id, paths[0])).read_text())
    assert table["columns"] == ["prompt", "reply", "reward"]
    assert table["data"][0] == ["1 + 1 =", "<b>2</b>\n*yes*", 1.0]


def test_swanlab_gets_the_texts_of_samples(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    track("swanlab", tmp_path, range(1, 3))
    written = [path.read_text() for path in (tmp_path / "run" / "logs" / "swanlab").rglob("*.txt")]
    assert any("prompt: 1 + 1 =\nreply: <b>2</b>\n*yes*\nreward: 1.0" in text for text in written), written


def test_trackio_goes_on_with_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    program = """
import sys
from pathlib import Path
from corral.observe.run_files import StepSamples
from corral.observe.trackers import Trackio
first = Trackio(Path(), "project", "run", {"seed": 0}, {})
first.log(1, {"reward/mean": 0.5, "validation/mean@1": float("nan")})
first.log_samples(1, StepSamples(["prompt", "reward"], [["1 + 1 =", 1.0]], {"reward": [1.0, 0.0]}))
first.close()
second = Trackio(Path(), "project", "run", {"seed": 0}, first.state())
second.log(2, {"reward/mean": 0.6})
second.close()
"""
    # Its folder is fixed when it is imported.
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=within(60),
        env={**os.environ, "TRACKIO_DIR": str(tmp_path)},
    )
    with sqlite3.connect(tmp_path / "project.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("run", 1), ("run", 1), ("run", 2)]
    assert json.loads(rows[2][2])["reward/mean"] == 0.6
    media = json.loads(rows[1][2])
    assert media["trajectories"]["_value"] == [{"prompt": "1 + 1 =", "reward": 1.0}]
    assert sum(media["histogram/reward"]["values"]) == 2


@pytest.mark.slow
def test_tables_and_histograms_are_those_of_the_step(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.util import tensor_util

    options = ("logging.trackers=[tensorboard]", "logging.tracked_samples=3", "logging.trajectories=true")
    run = train_here(tmp_path, tiny_model, *options)
    events = events_of(run / "logs" / "tensorboard")
    for step in (1, 2):
        written = {
            (one["prompt_id"], one["sample"]): one for one in TrajectoryStore(run / "trajectories").records(step)
        }
        header, *rows = tensor_util.make_ndarray(events.Tensors("trajectories")[step - 1].tensor_proto)
        assert header.tolist()[2:6] == [b"prompt", b"reply", b"reward", b"advantage"]
        assert len(rows) == 3
        for row in rows:
            prompt_id, sample, prompt, reply, reward, advantage, stop = (textwrap.dedent(cell.decode()) for cell in row)
            one = written[int(prompt_id), int(sample)]
            assert (float(reward), stop) == (one["reward"], one["stop"])
            assert textwrap.dedent(textwrap.indent(one["prompt"], "    ", lambda _: True)) == prompt
            assert textwrap.dedent(textwrap.indent(one["response"], "    ", lambda _: True)) == reply
            own = [value for value, is_own in zip(one["advantages"], one["generated"], strict=True) if is_own]
            assert float(advantage) == pytest.approx(sum(own) / len(own), abs=1e-6)
        buckets = tensor_util.make_ndarray(events.Tensors("histogram/reward")[step - 1].tensor_proto)
        assert buckets[:, 2].sum() == len(written)
