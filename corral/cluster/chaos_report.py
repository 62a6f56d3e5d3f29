"""What `corral chaos` has seen: its faults and ends, the audit of a run's folder, and the report."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from corral.cluster.faults import KINDS
from corral.observe.console import is_validation
from corral.observe.ledger import Ledger
from corral.observe.run_files import read_metrics


@dataclass(frozen=True)
class ChaosOptions:
    num_faults: int
    seed: int
    kinds: tuple[str, ...]
    interval_s: float
    recover_timeout_s: float
    max_silence_s: float
    after_step: int = 1
    """No fault comes before this step was made."""


@dataclass
class FaultRecord:
    number: int
    kind: str
    target: str
    pid: int
    at_s: float
    """Seconds since the beginning, as all times here that are no durations."""
    step: int
    """The last step that the run had made, then or when what was lost was there again."""
    is_back: bool = False
    """Whether what was lost is there again."""
    noticed_s: float | None = None
    """Seconds until the console had a warning or an error, or the run ended. None: it went on without a word."""
    recovered_s: float | None = None
    """Seconds until the run had made a step more than ever before, and a lost worker was replaced."""
    outcome: str = "did not recover"


@dataclass(frozen=True)
class EndRecord:
    at_s: float
    code: int
    explanation: str | None
    """The line that explains it; None: there is none."""


@dataclass
class ChaosReport:
    options: ChaosOptions
    run: str
    duration_s: float = 0.0
    faults: list[FaultRecord] = field(default_factory=list)
    ends: list[EndRecord] = field(default_factory=list)
    silence_s: float = 0.0
    silence_at_s: float = 0.0
    impossible: list[str] = field(default_factory=list)
    """Kinds for which this run has no process, and faults that found none."""
    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kinds": summarize(self.faults), "passed": not self.problems}

    def text(self) -> str:
        explained = sum(end.explanation is not None for end in self.ends)
        lines = [f"{len(self.faults)} faults in {self.duration_s:.0f} s, seed {self.options.seed}: {self.run}", ""]
        lines += format_table(summarize(self.faults))
        lines += ["", *self.facts, f"ends: {len(self.ends)}, of which {explained} are explained"]
        lines += [f"longest silence of the console: {self.silence_s:.1f} s, at {self.silence_at_s:.0f} s"]
        lines += [f"not tried: {what}" for what in self.impossible]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join([*lines, "failed" if self.problems else "passed"])


def summarize(faults: Iterable[FaultRecord]) -> list[dict[str, Any]]:
    """One row for each kind of fault, and for each role where workers were hit."""
    rows = dict[str, list[FaultRecord]]()
    for fault in sorted(faults, key=lambda one: list(KINDS).index(one.kind)):
        role = fault.target.partition("(")[2].rstrip(")")
        rows.setdefault(f"{fault.kind} {role}".strip(), []).append(fault)
    return [
        {
            "kind": name,
            "number": len(own),
            "noticed_s": spread(one.noticed_s for one in own),
            "recovered_s": spread(one.recovered_s for one in own),
            "outcomes": dict(Counter(one.outcome for one in own)),
        }
        for name, own in rows.items()
    ]


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"min": min(known), "median": statistics.median(known), "max": max(known)}


def format_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{'fault':<32}{'number':>6}  {'noticed (s)':<20}{'recovered (s)':<22}outcome"
    for row in rows:
        noticed, recovered = (
            " / ".join(f"{value:.1f}" for value in row[key].values()) if row[key] else "-"
            for key in ("noticed_s", "recovered_s")
        )
        outcomes = ", ".join(f"{number} {outcome}" for outcome, number in row["outcomes"].items())
        yield f"{row['kind']:<32}{row['number']:>6}  {noticed:<20}{recovered:<22}{outcomes}"


def explain_end(code: int, lines: Sequence[str]) -> str | None:
    """The line of the console that explains an end; None where there is none."""
    sign = "error: " if code else "resume "
    return next((line for line in lines if line.startswith(sign)), None)


def audit_folder(folder: Path) -> tuple[list[str], list[str]]:
    """What ledger and metrics of a run say, and what is wrong with them."""
    facts, problems = list[str](), list[str]()
    for path in [folder / Ledger.name, *sorted((folder / "attempts").glob(f"*/{Ledger.name}"))]:
        audit = Ledger(path).audit()
        problems += [f"{path}: {problem}" for problem in audit.problems]
        problems += [f"{path}: prompts {list(audit.gaps)} were lost"] if audit.gaps else []
        dropped = sum(audit.dropped.values())
        name = "ledger" if path.parent == folder else f"ledger of attempt {path.parent.name}"
        facts.append(
            f"{name}: {audit.issued} prompts issued ({audit.reissued} times again), {audit.trained} trained, {dropped} "
            f"dropped, {audit.open} open"
        )
        if path.parent == folder:
            steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if not is_validation(row)]
            facts.append(f"metrics: {len(steps)} steps")
            if steps != list(range(1, len(steps) + 1)):
                problems.append(f"the steps in {folder / 'metrics.jsonl'} are not 1, 2, 3, ...: {steps}")
            if audit.trained_steps > len(steps):
                problems.append(f"prompts were trained in {audit.trained_steps} steps, and {len(steps)} have metrics")
    return facts, problems
