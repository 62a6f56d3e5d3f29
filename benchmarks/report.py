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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


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


def versions(*packages: str) -> dict[str, str]:
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

    def __init__(self, name: str, title: str, out: Path) -> None:
        self.title, self.out = title, out / name
        self.facts = {
            "date": datetime.datetime.now().isoformat(timespec="minutes"),
            "commit": commit(),
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(),
            "versions": versions("torch", "transformers", "trl"),
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


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """`12.3 (12.1-12.9)`: median, fastest, slowest."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
