import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from deadlines import within
from guides import ROOT

from corral.observe import trackers as module
from corral.observe.metric_names import VERL
from corral.observe.run_files import Tracker, read_metrics
from corral.observe.run_folder import RunFolder
from corral.observe.trackers import ADAPTERS, make_trackers
from corral.recipe.errors import UserError
from corral.recipe.schema import Logging


class Memory(Tracker):
    """A tracker that behaves as its test wants."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.saved: Mapping[str, str] = {}
        self.fails_on: set[int] = set()
        self.start_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.is_closed = False

    def start(
        self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]
    ) -> "Memory":
        if self.start_error is not None:
            raise self.start_error
        self.saved = saved
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.gate.wait()
        if step in self.fails_on:
            raise ConnectionError("server is gone")
        self.rows.append(step)

    def close(self) -> None:
        self.is_closed = True

    def state(self) -> dict[str, str]:
        return {"id": "abc"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.open(tmp_path, "run", "auto") as folder:
        yield folder


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setitem(ADAPTERS, "tensorboard", memory.start)
    return memory


TENSORBOARD = Logging(trackers=["tensorboard"])


def test_metrics_are_always_in_the_file(folder: RunFolder) -> None:
    trackers = make_trackers(Logging(trackers=[]), folder, "run")
    trackers.log(1, {"reward/mean": 0.5})
    trackers.close()
    assert read_metrics(folder.metrics) == [{"step": 1, "reward/mean": 0.5}]


def test_names_of_verl_are_for_trackers_and_not_for_the_file(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = make_trackers(Logging(trackers=["tensorboard"], names="verl"), folder, "run")
    metrics = {"reward/mean": 0.5, "policy/entropy": 1.0, "time/rollout_s": 2.0, "validation/gsm8k/mean@4": 0.25}
    trackers.log(1, {**metrics, "reward/best": 0.75, "speed/tokens_per_device_s": 9.0})
    trackers.close()
    assert read_metrics(folder.metrics)[0].keys() == {"step", *metrics, "reward/best", "speed/tokens_per_device_s"}
    events = EventAccumulator(str(folder.logs / "tensorboard"))
    events.Reload()
    assert {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]} == {
        "critic/score/mean": 0.5,
        "critic/rewards/mean": 0.5,
        "actor/entropy": 1.0,
        "timing_s/gen": 2.0,
        "val-core/gsm8k/reward/mean@4": 0.25,
        "reward/best": 0.75,
        "perf/throughput": 9.0,
    }


def test_every_name_of_verl_is_in_the_guide_and_given_once() -> None:
    guide = (ROOT / "docs" / "runs-and-checkpoints.md").read_text()
    new = [name for names in VERL.values() for name in names]
    assert len(set(new)) == len(new)
    assert [name for name in (*VERL, *new) if f"`{name}`" not in guide] == []


def test_a_tracker_gets_every_row_before_it_is_closed(folder: RunFolder, memory: Memory) -> None:
    trackers = make_trackers(TENSORBOARD, folder, "run")
    for step in range(100):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert memory.rows == list(range(100))
    assert memory.is_closed


def test_a_failing_tracker_warns_once_is_counted_and_goes_on(
    folder: RunFolder, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.fails_on = {1, 2, 3}
    trackers = make_trackers(TENSORBOARD, folder, "run")
    for step in range(6):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert memory.rows == [0, 4, 5]
    assert trackers.failures["tensorboard"] == 3
    assert [record.getMessage() for record in caplog.records if "server is gone" in record.getMessage()] == [
        "the tracker tensorboard failed (server is gone); training goes on, further failures are counted"
    ]
    assert caplog.records[-1].getMessage() == "the tracker tensorboard failed 3 times in this run"
    assert len(read_metrics(folder.metrics)) == 6


def test_a_hung_tracker_neither_holds_up_a_step_nor_the_end(
    folder: RunFolder, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_DEADLINE_S", 0.2)
    memory.gate.clear()
    trackers = make_trackers(TENSORBOARD, folder, "run")
    start = time.monotonic()
    for step in range(20):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert time.monotonic() - start < within(5)
    assert trackers.failures["tensorboard"] == 1
    memory.gate.set()


def test_rows_do_not_pile_up_without_end_behind_a_hung_tracker(
    folder: RunFolder, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_ROWS", 5)
    memory.gate.clear()
    trackers = make_trackers(TENSORBOARD, folder, "run")
    for step in range(20):
        trackers.log(step, {"x": 1.0})
    memory.gate.set()
    trackers.close()
    assert trackers.failures["tensorboard"] == 20 - len(memory.rows) > 0


def test_a_metrics_file_that_cannot_be_written_does_not_end_training(folder: RunFolder) -> None:
    trackers = make_trackers(Logging(trackers=[]), folder, "run")
    folder.metrics.mkdir()
    trackers.log(1, {"x": 1.0})
    assert trackers.failures["metrics.jsonl"] == 1


def test_the_saved_state_reaches_the_tracker(folder: RunFolder, memory: Memory) -> None:
    first = make_trackers(TENSORBOARD, folder, "run")
    state = first.state()
    first.close()
    assert state == {"tensorboard": {"id": "abc"}}
    make_trackers(TENSORBOARD, folder, "run", state).close()
    assert memory.saved == {"id": "abc"}


def test_a_tracker_that_cannot_start_ends_a_new_run(folder: RunFolder, memory: Memory) -> None:
    memory.start_error = RuntimeError("no API key")
    with pytest.raises(UserError, match=r"tensorboard could not start \(no API key\)"):
        make_trackers(TENSORBOARD, folder, "run")


def test_a_tracker_that_does_not_answer_ends_a_new_run(
    folder: RunFolder, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_DEADLINE_S", 0.1)
    monkeypatch.setitem(ADAPTERS, "tensorboard", lambda *_: memory.gate.wait(within(10)))
    memory.gate.clear()
    with pytest.raises(UserError, match="no answer within"):
        make_trackers(TENSORBOARD, folder, "run")
    memory.gate.set()


def test_a_tracker_that_cannot_start_does_not_end_a_resumed_run_and_keeps_its_state(
    folder: RunFolder, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.start_error = RuntimeError("no network")
    trackers = make_trackers(TENSORBOARD, folder, "run", {"tensorboard": {"id": "abc"}})
    trackers.log(1, {"x": 1.0})
    assert trackers.state() == {"tensorboard": {"id": "abc"}}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_tracker_that_is_not_installed_is_an_error_that_names_the_extra(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'corral\[wandb\]'"):
        make_trackers(Logging(trackers=["wandb"]), folder, "run")


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    program = """
import sys
import corral.observe.console, corral.observe.curve, corral.observe.trackers
import corral.observe.run_files
heavy = {"torch", "transformers", "matplotlib", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=within(30))


def test_the_console_gets_the_numbers_only_if_the_recipe_names_it(folder: RunFolder) -> None:
    named, not_named = Memory(), Memory()
    make_trackers(Logging(trackers=["console"]), folder, "run", console=named).log(1, {"x": 1.0})
    make_trackers(Logging(trackers=[]), folder, "run", console=not_named).log(1, {"x": 1.0})
    assert (named.rows, not_named.rows) == ([1], [])
