"""Results of benchmarks: a JSON file with every measurement, and the tables as Markdown beside it.

Both are written again after every row or table, so that a run that is cut short leaves what it has.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from corral.bench.workloads import BenchSettings

Row = Mapping[str, Any]
StepTimes = list[dict[str, Any]]
"""One dict for each measured step or batch, with at least its `seconds`."""
NAMES = {"corral": "Corral", "vllm": "vLLM", "trl": "TRL", "transformers": "transformers"}
TITLES = {
    "rollout": "Rollout: new tokens a second",
    "train": "Training: forward, backward and AdamW",
    "step": "A GRPO step",
}
COLUMNS = {
    "rollout": "workload | side | new tokens/s | against Corral | of the bandwidth | seconds | mean log-prob"
    " | start-up s | peak GB | device GB",
    "train": "side | recompute | masters | ms a step | tokens/s | of the matrix peak | against Corral | peak GB",
    "step": "side | s a step: median (min-max) | generation s | rest s | new tokens/s | time against Corral"
    " | start-up s | peak GB | device GB",
}


class BenchmarkReport:
    """Report of a benchmark with a table for each of its workloads."""

    def __init__(
        self, name: str, title: str, out: Path, packages: Sequence[str] = (), command: Sequence[str] | None = None
    ) -> None:
        self.path, self.title = out / name, title
        self.about: dict[str, Any] = {
            "date": datetime.datetime.now().isoformat(timespec="minutes"),
            "commit": source_commit(),
            "command": shlex.join(["python", *sys.argv] if command is None else command),
            "machine": machine_facts(),
            "versions": installed_versions("corral", "torch", "transformers", *packages),
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
        if self.settings.peers.vllm_python and "vllm_version" in facts:
            notes.append(f"vLLM {facts['vllm_version']}, in another Python")
        return notes

    def markdown_sections(self) -> list[str]:
        return [self.table, *(f"```text\n{remark}\n```" for remark in self.remarks)]


# --- tables


def table_cells(verb: str, rows: Sequence[Row], facts: Row) -> list[list[str]]:
    """The table as rows of text; the first has the names of the columns."""
    cells = {"rollout": rollout_cells, "train": train_cells, "step": step_cells}[verb]
    ordered = sorted(rows, key=lambda row: row["workload"]) if verb == "rollout" else rows
    return [COLUMNS[verb].split(" | "), *(cells(row, find_corral_row(row, rows), facts) for row in ordered)]


def find_corral_row(row: Row, rows: Sequence[Row]) -> Row | None:
    """Corral's row for the same work in the same round."""
    same = ("workload", "recompute", "round")
    for other in rows:
        if other["side"] == "corral" and all(other.get(key) == row.get(key) for key in same):
            return other
    return None


def rollout_cells(row: Row, corral: Row | None, facts: Row) -> list[str]:
    seconds = row["tokens"] / row["tokens_per_s"]
    bandwidth = None if row["decode_bytes"] is None else row["decode_bytes"] / seconds / 1e12
    return [
        f"{row['workload']} ({row['num_requests']} requests)",
        side_name(row),
        f"{row['tokens_per_s']:,.0f}",
        format_ratio("tokens_per_s", row, corral),
        format_fraction(bandwidth, facts.get("copy_tbs")),
        ", ".join(f"{seconds:.2f}" for seconds in row["seconds"]),
        "" if row["mean_logprob"] is None else f"{row['mean_logprob']:.3f}",
        f"{row['start_up_s']:.0f}",
        format_gb(row.get("peak_gb")) if row["side"] != "vllm" else "",  # its engine is another process
        format_gb(row.get("device_gb")),
    ]


def train_cells(row: Row, corral: Row | None, facts: Row) -> list[str]:
    return [
        side_name(row),
        row["recompute"],
        row["masters"],
        f"{1000 * row['step_s']:.1f}",
        f"{row['tokens_per_s']:,.0f}",
        format_fraction(row["tflops"], facts.get("matrix_tflops")),
        format_ratio("tokens_per_s", row, corral),
        format_gb(row.get("peak_gb")),
    ]


def step_cells(row: Row, corral: Row | None, facts: Row) -> list[str]:
    return [
        side_name(row),
        format_spread(row["seconds"]),
        f"{row['generation_s']:.2f}",
        f"{row['rest_s']:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        format_ratio("step_s", row, corral),
        f"{row['start_up_s']:.0f}",
        format_gb(row.get("peak_gb")),
        format_gb(row.get("device_gb")),
    ]


def side_name(row: Row) -> str:
    variant = row.get("variant")
    return NAMES[row["side"]] + (f" ({variant})" if variant else "")


def format_fraction(value: float | None, peak: float | None) -> str:
    return "" if value is None or not peak else f"{value / peak:.1%}"


def format_ratio(key: str, row: Row, corral: Row | None) -> str:
    return "" if corral is None else f"{row[key] / corral[key]:.2f} x"


def format_gb(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def format_spread(seconds: Sequence[float]) -> str:
    """`12.34 (12.10-12.90)`: median, fastest, slowest."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


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


# --- where it was measured


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


def installed_versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_commit() -> str:
    """The commit of Corral's source, where that is a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
