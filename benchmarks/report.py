"""What the benchmarks have in common: running a side in a process of its own, and writing down the result.

Standard library only: it is also imported by Pythons that have no Corral.
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
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

Measured = list[dict[str, Any]]
"""One dict for each step or batch, with at least its `seconds`."""


class SideFailed(Exception):
    """One side could not be measured; the others go on."""


def run_side(python: str, script: str, arguments: Sequence[str], threads: int, **environment: str) -> Any:
    """Runs `python script ARGUMENTS --out FILE` and returns what it left in FILE."""
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        out = Path(folder) / "out.json"
        log = Path(folder) / "log.txt"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **environment,
        }
        with log.open("w") as output:
            # In an empty folder: TRL takes a folder named `vllm` for the package.
            code = subprocess.run(
                [python, str(HERE / script), *arguments, "--threads", str(threads), "--out", str(out)],
                env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder, check=False,
            ).returncode  # fmt: skip
        if code:
            tail = "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-15:])
            raise SideFailed(f"{shlex.join([script, *arguments])} ended with code {code}:\n{tail}")
        return json.loads(out.read_text())


def take_turns(sides: Sequence[str], rounds: int, measure: Callable[[str], Measured]) -> dict[str, Measured]:
    """A B C A B C: noise of the machine hits all. Variants of a rival (`trl`, `trl-tuned`) all have a first turn; the
    later ones are for the fastest of each. A side that fails is left out, with a line."""
    measured: dict[str, Measured] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sides if turn == 0 else fastest_variants(measured):
            try:
                new = measure(side)
            except SideFailed as error:
                print(error, flush=True)
                continue
            measured[side] += new
            seconds = ", ".join(f"{run['seconds']:.2f}" for run in new)
            print(f"  turn {turn + 1}, {side}: {seconds} s", flush=True)
    return {side: runs for side, runs in measured.items() if runs}


def fastest_variants(measured: dict[str, Measured]) -> list[str]:
    best: dict[str, str] = {}
    for side, runs in measured.items():
        family = side.partition("-")[0]
        if runs and (family not in best or seconds_of(runs) < seconds_of(measured[best[family]])):
            best[family] = side
    return list(best.values())


def seconds_of(runs: Measured) -> float:
    return statistics.median(run["seconds"] for run in runs)


def machine() -> dict[str, Any]:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": fields.get("Model name", platform.processor() or "unknown"),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def found_versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


class Report:
    """A JSON file with every measurement, and a Markdown file with the tables. Written again after each workload, so
    that a run that is cut short leaves what it has."""

    def __init__(self, name: str, title: str, out: Path, packages: Sequence[str] = ()) -> None:
        self.title, self.out = title, out / name
        self.facts: dict[str, Any] = {
            "date": datetime.datetime.now().isoformat(timespec="minutes"),
            "commit": commit(),
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(),
            "versions": found_versions("torch", "transformers", *packages),
        }
        self.workloads: dict[str, Any] = {}
        self.tables: list[str] = []

    def add(self, workload: str, heading: str, columns: list[str], rows: list[list[str]], measured: Any) -> None:
        self.workloads[workload] = measured
        lines = [f"## {workload}: {heading}", "", "| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        self.tables.append("\n".join(lines))
        print("\n" + self.tables[-1] + "\n", flush=True)
        self.write()

    def write(self) -> None:
        """`NAME.json` and `NAME.md`."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        facts, machine = self.facts, self.facts["machine"]
        about = [
            f"- {facts['date']}, commit {facts['commit']}",
            f"- {machine['cpu']} ({machine['architecture']}), {machine['cores']} cores, load average at the start "
            f"{machine['load_at_start']}",
            "- " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
            f"- `{facts['command']}`",
        ]
        text = "\n\n".join([f"# {self.title}", "\n".join(about), *self.tables]) + "\n"
        self.out.with_suffix(".md").write_text(text)
        self.out.with_suffix(".json").write_text(json.dumps({**facts, "workloads": self.workloads}, indent=1) + "\n")


def spread(runs: Measured) -> str:
    """`12.34 (12.10-12.90)`: median, fastest, slowest."""
    seconds = [run["seconds"] for run in runs]
    return f"{seconds_of(runs):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"


def ratio(runs: Measured, corral: Measured | None) -> str:
    return "" if corral is None else f"{seconds_of(runs) / seconds_of(corral):.2f} x"
