"""A side's process: what it reports arrives, and so does the way it ends."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.bench.side_process import SideFailed, run_side
from corral.bench.workloads import BenchSettings

SETTINGS = BenchSettings(verb="rollout", model="tiny", folder=".", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def _own_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


def events_of(name: str, settings: BenchSettings = SETTINGS) -> tuple[list[dict[str, Any]], str]:
    """What it reported, and why it failed, if it did."""
    events: list[dict[str, Any]] = []
    try:
        run_side("corral", f"side_functions:{name}", settings, events.append)
    except SideFailed as error:
        return events, str(error)
    return events, ""


def test_reports_of_a_side_arrive_whatever_else_is_printed() -> None:
    events, failure = events_of("good")
    assert events == [{"progress": "corral: on its way"}, {"row": {"side": "corral", "workload": "fixed-128"}}]
    assert failure == ""


def test_a_side_that_fails_is_reported_with_its_last_lines_and_keeps_its_rows() -> None:
    events, failure = events_of("failing")
    assert [event["row"]["workload"] for event in events] == ["before"]
    assert failure.startswith("corral ended with code 1")
    assert failure.endswith("ValueError: this side is broken")


def test_a_side_that_takes_too_long_is_ended() -> None:
    _, failure = events_of("endless", replace(SETTINGS, timeout_s=0.5))
    assert failure.startswith("corral took more than 0.5 s")


def test_a_side_may_run_in_another_python_that_finds_corral_behind_its_own_packages(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={Path(__file__).parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run_side("vllm", "side_functions:good", SETTINGS, events.append, str(python))
    assert events[-1] == {"row": {"side": "vllm", "workload": "fixed-128"}}
