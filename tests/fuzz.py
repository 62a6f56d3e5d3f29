"""Broken inputs of every kind that somebody else may have written, as many as you like: whatever is in them, Corral
takes them or says what is wrong, in time and without a traceback.

python tests/fuzz.py --inputs 1000000 --seed 0                 all kinds; faults are written to fuzz-faults/
python tests/fuzz.py --inputs 1000 --kinds rows retriever      two of them
python tests/fuzz.py --kinds rows --seed 0 --only 4711         one input again, with its traceback

What a verb calls is called in this process; servers are asked through their applications or, where they are no
application, through a socket. Each input follows from its kind, the seed and its number.
"""

import argparse
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
from deadlines import within
from fuzz_kinds import KINDS, Kind

from corral.cli.main import print_error
from corral.observe.console import ENDED_BY
from corral.recipe.errors import RunError, UserError

REFUSALS = (UserError, RunError, OSError)
"""What `corral` itself prints as one line."""
COMPUTING_S, WAITING_S = within(5), within(30)
"""Longest time of an input: of a processor, and on a clock, which also runs while other programs compute."""
MEMORY_BYTES = 16 * 2**30
"""How much address space a process may need beyond what it has when it begins; each thread takes some of it."""
INPUTS_PER_PROCESS = 20_000
SHOWN_CHARACTERS = 20_000


class Hang(BaseException):
    """An input that took longer than COMPUTING_S or WAITING_S."""


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        order = ("accepted", "refused", "traceback", "hang")
        return (
            ", ".join(f"{self.counts[name]:,} {name}" for name in order) + f" in {self.seconds:,.0f} s of a processor"
        )


def fuzz(kind: Kind, numbers: Sequence[int], seed: int, at: "Synchronized[int] | None" = None) -> Report:
    """Tries the inputs with these numbers. `at` always has the number of the one that is being tried."""
    report, logged = Report(), LoggedErrors()
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, watched(logged), kind.opened(Path(folder)) as attempt:
        for number in numbers:
            if at is not None:
                at.value = number
            given = kind.make(random.Random(f"{kind.name} {seed} {number}"))
            outcome, fault = outcome_of(attempt, given, logged)
            report.counts[outcome] += 1
            if fault:
                report.faults.append(f"{kind.name} --seed {seed} --only {number}: {outcome}\n{given!r}\n{fault}")
            if outcome == "hang":
                break  # what was interrupted may be broken now; the rest has a process of its own
    report.seconds = time.process_time() - began
    return report


def outcome_of(attempt: Callable[[Any], bool], given: Any, logged: "LoggedErrors") -> tuple[str, str]:
    """What became of an input, and where it is a fault, the traceback."""
    logged.texts.clear()
    try:
        with deadline():
            try:
                outcome = "accepted" if attempt(given) else "refused"
            except REFUSALS as error:
                print_error(str(error))
                outcome = "refused"
    except Hang:
        return "hang", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()
    return ("traceback", "\n".join(logged.texts)) if logged.texts else (outcome, "")


@contextmanager
def deadline() -> Iterator[None]:
    """Raises Hang when an input has computed or waited for too long. Where no Python runs that could raise, the process
    is killed (`last_report`)."""

    def interrupt(*_: object) -> None:
        raise Hang

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, COMPUTING_S), signal.ITIMER_REAL: (signal.SIGALRM, WAITING_S)}
    for timer, (number, seconds) in timers.items():
        signal.signal(number, interrupt)
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)


class LoggedErrors(logging.Handler):
    """Tracebacks that a server logs, or a thread dies of, while its client sees an answer or nothing."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != ENDED_BY:  # a run's log says why it failed, in the one line that the user gets
            self.texts.append(self.format(record))

    def thread_died(self, args: threading.ExceptHookArgs) -> None:
        self.texts.append("".join(traceback.format_exception(args.exc_value)))  # type: ignore[arg-type]


@contextmanager
def watched(logged: LoggedErrors) -> Iterator[None]:
    """What is printed goes nowhere, encoded as a terminal would have it; errors of logs and threads are collected."""
    hook, threading.excepthook = threading.excepthook, logged.thread_died
    logging.getLogger().addHandler(logged)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        logging.getLogger().removeHandler(logged)
        threading.excepthook = hook


# --- many inputs, in processes that may die


def fuzz_in_processes(kind: Kind, number: int, seed: int, tell: Callable[[Report], None]) -> Report:
    """Tries `number` inputs, some thousands of them in a process each. `tell` gets what is known so far."""
    total, context = Report(), multiprocessing.get_context("fork")
    starts = range(0, number, INPUTS_PER_PROCESS)
    waiting = [range(start, min(number, start + INPUTS_PER_PROCESS)) for start in reversed(starts)]
    while waiting:
        numbers = waiting.pop()
        at, (receiving, sending) = context.Value("q", numbers.start), context.Pipe(duplex=False)
        process = context.Process(target=work, args=(kind, numbers, seed, at, sending))
        process.start()
        sending.close()
        try:
            found = last_report(process, receiving, at)
            rest = [numbers[sum(found.counts.values()) :]]
        except EOFError:  # it died: of the one that it was at, and those before that have to be counted again
            process.join()
            found = Report(Counter({"hang" if process.exitcode == -signal.SIGKILL else "traceback": 1}))
            given = kind.make(random.Random(f"{kind.name} {seed} {at.value}"))
            fault = f"{kind.name} --seed {seed} --only {at.value}: the process ended with {process.exitcode}"
            found.faults.append(f"{fault}\n{given!r}")
            rest = [range(at.value + 1, numbers.stop), range(numbers.start, at.value)]
        process.join()
        waiting += [one for one in rest if one]
        total.counts += found.counts
        total.faults += found.faults
        total.seconds += found.seconds
        tell(total)
    return total


def last_report(process: Any, receiving: Any, at: "Synchronized[int]") -> Report:
    """What a process reports at its end. EOFError if it died, or had to be killed since it got no further."""
    number, since = -1, time.monotonic()
    while not receiving.poll(1.0):
        if at.value != number:
            number, since = at.value, time.monotonic()
        elif time.monotonic() - since > 2 * WAITING_S:
            process.kill()
    return receiving.recv()  # type: ignore[no-any-return]


def work(kind: Kind, numbers: range, seed: int, at: "Synchronized[int]", sending: Any) -> None:
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    sending.send(fuzz(kind, numbers, seed, at))
    os._exit(0)  # servers' threads need not end in order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--inputs", type=int, default=100_000, help="over all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--only", type=int, help="the number of one input, which is printed with its traceback")
    parser.add_argument("--out", type=Path, default=Path("fuzz-faults"), help="folder for faults and counts")
    asked = parser.parse_args()
    kinds = [KINDS[name] for name in asked.kinds]
    if asked.only is not None:
        return try_one(kinds[0], asked.seed, asked.only)
    asked.out.mkdir(parents=True, exist_ok=True)
    weights, reports = sum(kind.weight for kind in kinds), dict[str, Report]()
    for kind in kinds:
        number = round(asked.inputs * kind.weight / weights)

        def tell(report: Report, name: str = kind.name) -> None:
            reports[name] = report
            print(f"{name}: {report}", flush=True)
            counts = {one: {**own.counts, "seconds": round(own.seconds)} for one, own in reports.items()}
            (asked.out / f"counts-{asked.seed}.json").write_text(json.dumps(counts, indent=2))
            for fault in report.faults:
                where = fault.partition(":")[0].replace(" --seed ", "-").replace(" --only ", "-")
                (asked.out / f"{where}.txt").write_text(fault[:SHOWN_CHARACTERS], errors="backslashreplace")

        fuzz_in_processes(kind, number, asked.seed, tell)
    return int(any(report.faults for report in reports.values()))


def try_one(kind: Kind, seed: int, number: int) -> int:
    print(repr(kind.make(random.Random(f"{kind.name} {seed} {number}"))))
    report = fuzz(kind, [number], seed)
    print(report, *report.faults, sep="\n")
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
