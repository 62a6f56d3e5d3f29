"""Sides that do nothing but what a test wants to see, for processes of their own."""

import threading

from corral.bench.settings import Settings
from corral.bench.side import Tell


def good(settings: Settings, tell: Tell) -> None:
    print("something that nobody asked for", end="")
    tell.progress("on its way")
    tell.row(workload=settings.workloads[0])


def failing(settings: Settings, tell: Tell) -> None:
    tell.row(workload="before")
    raise ValueError("this side is broken")


def endless(settings: Settings, tell: Tell) -> None:
    threading.Event().wait()
