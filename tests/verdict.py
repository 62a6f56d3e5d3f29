"""What the tests' verdict is, with `--verdict`: a pytest plugin.

If all tests that failed have the marker `deadline`, and are at most five, they are repeated, each alone, and must
pass then; they are reported as late. A test that was skipped must be in `tests/skips.txt`. With `--share COMMIT` only
what `selection.py` chooses is run, with the same random examples each time; else everything, and if all passes, its
record and the costs of slow tests are written.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from selection import (
    LAST_FULL,
    Case,
    age_of_last_full,
    choose,
    git,
    read_costs,
    why_everything,
    without_group,
    write_costs,
)

MAX_LATE = 5
SKIPS = Path(__file__).parent / "skips.txt"
CGROUP = Path("/sys/fs/cgroup/cpuacct")


class Verdict:
    """In the process that others run tests for. `share`: the commit that chooses; None: everything is run."""

    def __init__(self, share: str | None) -> None:
        self.share, self.started, self.counts = share, time.monotonic(), Counter[str]()
        self.costs: dict[str, float] = {}
        self.failed: dict[str, bool] = {}
        """Whether they may be late, by their ids."""
        self.skipped: dict[str, str] = {}
        self.left_out = ""
        self.commit, self.has_changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = without_group(report.nodeid)
        if report.failed:
            self.failed[name] = "deadline" in report.keywords
        elif report.skipped:
            self.skipped[name] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.when == "call":
            self.counts["passed"] += 1
        if report.when == "teardown" and {"slow", "lab"} & set(report.keywords):
            self.costs[name] = dict(report.user_properties)["cpu_s"]

    def pytest_testnodedown(self, node: Any) -> None:
        self.left_out = getattr(node, "workeroutput", {}).get("left_out", self.left_out)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        yield  # the summary is printed
        lines, late = [], []
        unlisted = [name for name in self.skipped if not any(fnmatchcase(name, one) for one in listed_skips())]
        lines += [f"skipped, but not in tests/skips.txt: {name}: {self.skipped[name]}" for name in unlisted]
        is_green = session.exitstatus == pytest.ExitCode.OK
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and self.failed and all(self.failed.values()):
            if len(self.failed) > MAX_LATE:
                lines.append(f"{len(self.failed)} tests with deadlines failed, which is more than {MAX_LATE}")
            else:
                late = [name for name in self.failed if passes_alone(name)]
                is_green = len(late) == len(self.failed)
                lines += [f"late, and passed when it was repeated alone: {name}" for name in late]
        session.exitstatus = int(not is_green or bool(unlisted)) if session.exitstatus in (0, 1) else session.exitstatus
        if self.share is None and session.exitstatus in (0, 1):
            lines.append(self._write_record(session, late))
        sys.stdout.write("\n".join(["", *filter(None, [self.left_out]), *lines, ""]))

    def _write_record(self, session: pytest.Session, late: list[str]) -> str:
        config, option = session.config, session.config.option
        partly = option.keyword or option.markexpr or option.lf or option.collectonly
        if partly or config.args_source != pytest.Config.ArgsSource.TESTPATHS:
            return "no record is written: not everything was run"
        write_costs(self.costs)
        if session.exitstatus != pytest.ExitCode.OK or self.has_changes:
            why = "the tree had changes that are not committed" if self.has_changes else "not everything passed"
            return f"tests/costs.json is written, and no record: {why}"
        record = {
            "commit": self.commit,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "passed": self.counts["passed"] + len(late),
            "skipped": len(self.skipped),
            "minutes": round((time.monotonic() - self.started) / 60, 1),
            "cpu_s_of_slow_tests": round(sum(self.costs.values())),
            "late": late,
        }
        LAST_FULL.write_text(json.dumps(record, indent=1) + "\n")
        return "tests/costs.json and .ci/last-full are written: commit them"


class Share:
    """In a process that runs tests: takes away what is not chosen, and measures what tests cost."""

    def __init__(self, share: str | None, clusters: Collection[str]) -> None:
        self.share, self.clusters, self.left_out = share, clusters, ""
        self.meter = CpuMeter()
        self.before = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.share is None:
            return
        if reason := why_everything():
            self.left_out = f"everything was run: {reason}"
            return
        slow = {item: self.case_of(item) for item in items if {"slow", "lab"} & set(item.keywords)}
        chosen = choose(slow.values(), read_costs(), self.share)
        away = [item for item, case in slow.items() if case.id not in chosen]
        items[:] = [item for item in items if item not in slow or slow[item].id in chosen]
        config.hook.pytest_deselected(items=away)
        run = {case.function for case in slow.values() if case.id in chosen}
        self.left_out = "\n".join(
            [
                f"{len(items)} of {len(items) + len(away)} tests were run, {len(chosen)} of {len(slow)} slow ones.",
                "Functions of which no case was run:",
                *by_file({case.function for case in slow.values()} - run),
                f"Everything was run {age_of_last_full()}, and is by: make test-all",
                f"The same choice again: make test SHARE={self.share}",
            ]
        )

    def case_of(self, item: pytest.Item) -> Case:
        group = item.get_closest_marker("xdist_group")
        has_cluster = group is not None and group.args[0] in self.clusters
        return Case(item.nodeid, has_cluster, item.get_closest_marker("core") is not None)

    def pytest_runtest_setup(self) -> None:
        self.before = self.before or self.meter.cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            after = self.meter.cpu_s()
            report.user_properties.append(("cpu_s", after - self.before))
            self.before = after
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = self.left_out


class CpuMeter:
    """CPU seconds of this process and all that it starts: by a control group of their own, which forked processes join
    (`forked_pythons.py`); where there is none to be made, of this process and its children that have ended."""

    def __init__(self) -> None:
        self.usage: Path | None = None
        for old in CGROUP.glob("corral-tests-*"):
            if not Path("/proc", old.name.rpartition("-")[2]).exists():
                with suppress(OSError):
                    old.rmdir()
        group = CGROUP / f"corral-tests-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
            self.usage = group / "cpuacct.usage"

    def cpu_s(self) -> float:
        return int(self.usage.read_text()) / 1e9 if self.usage else sum(os.times()[:4])


def by_file(functions: Iterable[str]) -> list[str]:
    files = defaultdict[str, list[str]](list)
    for function in sorted(functions):
        file, _, name = function.partition("::")
        files[file].append(name)
    return [f"  {file}: {', '.join(names)}" for file, names in files.items()]


def listed_skips() -> list[str]:
    return [line.split("  ")[0] for line in SKIPS.read_text().splitlines() if line and not line.startswith("#")]


def passes_alone(name: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadgroup", "-p", "no:cacheprovider", "-v", name]
    print(f"\n=== {name}, again", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done.returncode == 0 and "1 passed" in done.stdout.splitlines()[-1]  # one that is skipped now did not pass
