"""One invocation: the model, the ceilings of the device, then one side after the other."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from corral.bench.models import SHAPES
from corral.bench.process import SideFailed, run_side
from corral.bench.report import Report, ceilings_in_words
from corral.bench.settings import Settings
from corral.bench.sides import SIDES, why_skipped
from corral.recipe.errors import RunError

Say = Callable[[str], None]
OnEvent = Callable[[dict[str, Any]], None]
RunSide = Callable[[str, str, Settings, OnEvent], None]
"""(side, function, settings, what becomes of what it tells)."""


def bench(
    settings: Settings, sides: Sequence[str], out: Path, command: Sequence[str], say: Say, run: RunSide = run_side
) -> Report:
    """Sides that are missing or fail are remarks in the report; raises at the end if any failed."""
    report = Report(settings, out, command)
    started = time.monotonic()

    def on_event(event: dict[str, Any]) -> None:
        if "progress" in event:
            say(f"[{time.monotonic() - started:4.0f} s] {event['progress']}")
        report.take(event)

    if settings.model in SHAPES and not (Path(settings.folder) / "config.json").is_file():
        required("the model", "corral.bench.sides:prepare", settings, on_event, run)
    required("the ceilings", "corral.bench.ceilings:ceilings", settings, on_event, run)
    say(f"{report.facts['device']}: {ceilings_in_words(report.facts)}")
    failed = [side for side in sides if not measured(report, side, on_event, say, run)]
    say(f"\n{report.table}\n")
    say(f"wrote {report.name}.json and .md")
    if failed:
        raise RunError(f"{len(failed)} of {len(sides)} sides failed: {', '.join(failed)}")
    return report


def required(what: str, function: str, settings: Settings, on_event: OnEvent, run: RunSide) -> None:
    try:
        run(what, function, settings, on_event)
    except SideFailed as error:
        raise RunError(str(error)) from None


def measured(report: Report, side: str, on_event: OnEvent, say: Say, run: RunSide) -> bool:
    """False: it failed."""
    settings = report.settings
    missing = why_skipped(settings.verb, side, settings.device)
    if missing is not None:
        say(missing)
        report.remark(missing)
        return True
    try:
        run(side, SIDES[settings.verb][side].function, settings, on_event)
    except SideFailed as error:
        say(str(error))
        report.remark(str(error))
        return False
    return True
