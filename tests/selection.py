"""Which tests a submission runs: all fast ones, and of the slow ones as many as a budget of CPU seconds allows.

Always: what is marked `core`, and one case of each slow function that is cheap and starts no cluster; which one is
another in each commit. Of the rest a sixth, drawn by commit and name, until the budget is used. Everything, if the
harness or what is installed has changed since all tests were run (`.ci/last-full`), or if that was more than MAX_AGE
commits ago. So no case is left out for longer than that, and the same commit always chooses the same.
"""

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parent.parent
COSTS = ROOT / "tests" / "costs.json"
"""CPU seconds of each slow case, by file. `make test-all` writes it."""
LAST_FULL = ROOT / ".ci" / "last-full"
HARNESS = (
    *("locks", "pyproject.toml", "constraints.txt", "Makefile", ".ci/run"),
    *(
        f"tests/{name}.py"
        for name in ("conftest", "selection", "verdict", "forked_pythons", "command_preload", "hosts")
    ),
)
MAX_AGE = 100
BUDGET_S = 1600.0
CHEAP_S = 3.0
ONE_OF = 6
UNKNOWN_S = {False: 3.0, True: 15.0}
"""CPU seconds of a case that was never measured, without and with a cluster."""


@dataclass(frozen=True)
class Case:
    """A slow test."""

    id: str
    has_cluster: bool = False
    is_core: bool = False

    @property
    def function(self) -> str:
        return self.id.partition("[")[0]


def choose(cases: Iterable[Case], costs: Mapping[str, float], commit: str, budget_s: float = BUDGET_S) -> set[str]:
    """The ids of the cases that a submission runs."""
    in_order = sorted(cases, key=lambda case: draw(case.id, commit))
    cost = {case.id: costs.get(case.id, UNKNOWN_S[case.has_cluster]) for case in in_order}
    chosen = {case.id for case in in_order if case.is_core}
    functions = {case.function for case in in_order if case.is_core}
    for case in in_order:
        if not case.has_cluster and case.function not in functions and cost[case.id] <= CHEAP_S:
            chosen.add(case.id)
            functions.add(case.function)
    left_s = budget_s - sum(cost[one] for one in chosen)
    for case in in_order:
        if case.id not in chosen and draw(case.id, commit) % ONE_OF == 0 and cost[case.id] <= left_s:
            chosen.add(case.id)
            left_s -= cost[case.id]
    return chosen


def draw(case: str, commit: str) -> int:
    return crc32(f"{commit} {case}".encode())


def read_costs() -> dict[str, float]:
    files = json.loads(COSTS.read_text()) if COSTS.exists() else {}
    return {f"{file}::{case}": cost for file, cases in files.items() for case, cost in cases.items()}


def write_costs(costs: Mapping[str, float]) -> None:
    files = defaultdict[str, dict[str, float]](dict)
    for case, cost in sorted(costs.items()):
        file, _, name = case.partition("::")
        files[file][name] = round(cost, 1)
    lines = (f"{json.dumps(file)}: {json.dumps(cases)}" for file, cases in files.items())
    COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def why_everything() -> str | None:
    """The reason to run all tests, if there is one."""
    if not LAST_FULL.exists():
        return "no run of all tests is on record"
    commit = json.loads(LAST_FULL.read_text())["commit"]
    if (
        git("cat-file", "-e", f"{commit}^{{commit}}") is None
        or git("merge-base", "--is-ancestor", commit, "HEAD") is None
    ):
        return f"the commit of the last run of all tests, {commit[:9]}, is not in this history"
    if (age := int(git("rev-list", "--count", f"{commit}..HEAD") or 0)) > MAX_AGE:
        return f"all tests were last run {age} commits ago, which is more than {MAX_AGE}"
    if changed := git("diff", "--name-only", commit, "--", *HARNESS):
        return f"since all tests were run, {', '.join(changed.split())} changed"
    return None


def age_of_last_full() -> str:
    record = json.loads(LAST_FULL.read_text())
    return f"{git('rev-list', '--count', record['commit'] + '..HEAD')} commits ago, on {record['date']}"


def git(*arguments: str) -> str | None:
    """What it prints. None: it failed."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else done.stdout.strip()


def without_group(node_id: str) -> str:
    """A test's id without the name of its group, which xdist appends."""
    return re.sub(r"@\w+$", "", node_id)
