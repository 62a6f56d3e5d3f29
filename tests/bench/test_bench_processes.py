"""A side's process: what it tells arrives, and how it ends is told."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.bench.process import SideFailed, run_side
from corral.bench.settings import Settings

SETTINGS = Settings(verb="rollout", model="tiny", folder=".", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def _own_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


def events_of(name: str, settings: Settings = SETTINGS) -> tuple[list[dict[str, Any]], str]:
    """What it told, and why it failed, if it did."""
    events: list[dict[str, Any]] = []
    try:
        run_side("corral", f"side_functions:{name}", settings, events.append)
    except SideFailed as error:
        return events, str(error)
    return events, ""


def test_what_a_side_tells_arrives_whatever_else_is_said() -> None:
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
