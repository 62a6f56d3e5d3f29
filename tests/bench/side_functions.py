"""Sides that do nothing but what a test checks, for processes of their own."""

import threading

from corral.bench.side_process import SideReporter
from corral.bench.workloads import BenchSettings


def good(settings: BenchSettings, reporter: SideReporter) -> None:
    print("something that a library prints", end="")
    reporter.progress("on its way")
    reporter.row(workload=settings.workloads[0])


def failing(settings: BenchSettings, reporter: SideReporter) -> None:
    reporter.row(workload="before")
    raise ValueError("this side is broken")


def endless(settings: BenchSettings, reporter: SideReporter) -> None:
    threading.Event().wait()
