"""A JSON file with every measurement, and the table as Markdown beside it.

Both are written again after every row, so that a run that is cut short leaves what it has.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from corral.bench.settings import Settings
from corral.bench.tables import TITLES, in_markdown, table

PACKAGES = ("corral", "torch", "triton", "transformers", "vllm", "trl")


@dataclass
class Report:
    settings: Settings
    out: Path
    command: Sequence[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the device: its name and its ceilings; and a remark on Corral's side."""
    remarks: list[str] = field(default_factory=list)
    """Sides that were skipped, or failed."""

    def __post_init__(self) -> None:
        self.about: dict[str, Any] = {
            "date": datetime.datetime.now().isoformat(timespec="minutes"),
            "command": shlex.join(self.command),
            "commit": commit(),
            "versions": found_versions(),
            "machine": {
                "architecture": platform.machine(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            },
        }

    @property
    def name(self) -> Path:
        return self.out / f"bench_{self.settings.verb}"

    def take(self, event: dict[str, Any]) -> None:
        """What a side has told."""
        if "row" in event:
            self.rows.append(event["row"])
        self.facts |= event.get("facts", {})
        if "progress" not in event:
            self.write()

    def remark(self, text: str) -> None:
        self.remarks.append(text)
        self.write()

    @property
    def table(self) -> str:
        return in_markdown(table(self.settings.verb, self.rows, self.facts))

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {**self.about, "device": self.facts, "settings": asdict(self.settings)}
        found |= {"rows": self.rows, "remarks": self.remarks}
        self.name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        self.name.with_suffix(".md").write_text(self.markdown())

    def markdown(self) -> str:
        facts, machine = self.facts, self.about["machine"]
        lines = [
            f"- {self.about['date']}, commit {self.about['commit']}",
            f"- model {self.settings.model}, {self.settings.dtype}",
            "- " + ", ".join(f"{name} {version}" for name, version in self.about["versions"].items()),
            f"- {machine['architecture']}, {machine['cores']} cores, Python {machine['python']}",
            f"- `{self.about['command']}`",
        ]
        if facts.get("matrix_tflops"):
            lines.insert(1, f"- {facts['device']}: {ceilings_in_words(facts)}")
        if "remark" in facts:
            lines.append(f"- Corral: {facts['remark']}")
        remarks = [f"```text\n{remark}\n```" for remark in self.remarks]
        parts = [f"# {TITLES[self.settings.verb]}", "\n".join(lines), self.table, *remarks]
        return "\n\n".join(parts) + "\n"


def ceilings_in_words(facts: dict[str, Any]) -> str:
    return (
        f"{facts['matrix_tflops']:.3g} TFLOP/s ({facts['matrix']}), "
        f"{facts['copy_tbs']:.3g} TB/s (copy of {facts['copy']})"
    )


def found_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of Corral's source, where it is a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
