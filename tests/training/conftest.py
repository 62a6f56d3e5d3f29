"""Processes for the tests of sharded training: started when they are first needed, and kept for a number of them."""

from collections.abc import Callable, Generator, Iterator

import pytest
import torch
from team import DEVICE, DEVICE_NAME, MEASURED, Team

pytest.register_assert_rewrite("trainer_contract")


MAX_RUNS = 12
"""Every mesh makes process groups, whose threads wake up all the time for as long as their process lives."""


@pytest.fixture(scope="session")
def team() -> Iterator[Callable[[int], Team]]:
    teams: dict[int, Team] = {}

    def of_size(size: int) -> Team:
        if size in teams and (not teams[size].is_alive or teams[size].num_runs >= MAX_RUNS):
            teams.pop(size).close()
        if size not in teams:
            teams[size] = Team(size)
        return teams[size]

    yield of_size
    for started in teams.values():
        started.close()


# --- the table of `make test-gpu`


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    MEASURED.clear()
    try:
        return (yield)
    finally:
        item.user_properties += MEASURED.items()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if DEVICE_NAME is None or terminalreporter.config.option.collectonly:
        return
    gpu = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if DEVICE.type == "cuda" else "no"
    rows = [f"{gpu}, torch {torch.__version__}, {nccl} NCCL", ""]
    rows += ["| test | ranks | result | s | largest deviation |", "| --- | --- | --- | --- | --- |"]
    for result in ("passed", "skipped", "failed", "error"):
        for report in terminalreporter.stats.get(result, ()):
            found = dict(report.user_properties)
            test = report.nodeid.removeprefix("tests/training/").replace("::", ": ", 1)
            deviation = f"{found['deviation']:.1e}" if "deviation" in found else ""
            rows.append(f"| {test} | {found.get('ranks', '')} | {result} | {report.duration:.1f} | {deviation} |")
    terminalreporter.write_line("\n".join(["", *rows]))
