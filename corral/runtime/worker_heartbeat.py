"""Heartbeats of a worker's process: a thread in it counts, and the agent of its node looks whether it still does. And
those of an engine's own process, at which its worker looks.

The count is in a file that both sides have mapped or read, with what the worker computes and since when. It has its
size from the beginning, so a full disk does not stop the count, and a busy network has nothing to do with it.

A thread of Python cannot count while a call of native code holds the interpreter's lock. So a worker is silent only if,
besides, its process uses no CPU time and does not wait for a disk: one that is stopped, or in a deadlock.
"""

import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from corral.child_process import hold_folder, read_stat

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats, of a worker and of a node."""
COUNT, STARTED, CALL = struct.Struct("<Q"), struct.Struct("<Q"), struct.Struct("<d112s")
STARTED_AT, CALL_AT = COUNT.size, COUNT.size + STARTED.size
"""Layout of the file: the count; the start time of the process, in ticks; when the call began, in seconds since the
epoch, and its name."""
BUSY_FRACTION = 0.05
"""Part of a core above which a process computes. The threads of Ray in one that does not use less than a hundredth."""
QUIET_S = 5.0
"""Seconds without a message or progress of an engine, from which on it is looked at whether it computes."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class WorkerHeartbeat:
    """The worker's side. `folder`: the one of the run on this node."""

    def __init__(self, folder: Path) -> None:
        hold_folder(folder)
        path = folder / f"heartbeat-{os.getpid()}"
        stat = read_stat(os.getpid())
        path.write_bytes(COUNT.pack(0) + STARTED.pack(stat.started if stat else 0) + bytes(CALL.size))
        with path.open("r+b") as file:
            self.page = mmap.mmap(file.fileno(), 0)
        self.lock = threading.Lock()
        self.calls: set[tuple[bool, float, str]] = set()
        thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        thread.pydev_do_not_trace = True  # type: ignore[attr-defined]  # debugpy would stop it at every breakpoint
        thread.start()

    def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            COUNT.pack_into(self.page, 0, count)
            time.sleep(HEARTBEAT_S)

    @contextmanager
    def during(self, call: str, computes: bool) -> Iterator[None]:
        """Notes what the worker does for the time of the block. What computes comes before what waits."""
        entry = (computes, time.time(), call)
        with self.lock:
            self.calls.add(entry)
            self._write()
        try:
            yield
        finally:
            with self.lock:
                self.calls.discard(entry)
                self._write()

    def _write(self) -> None:
        _, since, call = max(self.calls, default=(False, 0.0, ""))
        CALL.pack_into(self.page, CALL_AT, since, call.encode())


@dataclass(frozen=True)
class WorkerState:
    """What is known of a worker's process on its node."""

    pid: int
    is_alive: bool
    silent_s: float
    """Seconds for which it has shown no sign of life."""
    call: str
    """What it does, such as `actor.accumulate`; empty: nothing."""
    since: float
    """When that began, in seconds since the epoch."""


@dataclass
class LastLook:
    """What was seen of a process the last time."""

    started: int
    """Start time as the process itself has written it, which tells it from any other with the same id."""
    count: int = 0
    cpu_ticks: int = 0
    silent_s: float = 0.0


class HeartbeatReader:
    """The agent's side, asked about once a second. Only seconds in which it looks are silence: a node that was
    suspended, or an agent that did not run, is not the worker's fault."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock, self.last, self.looked = folder, clock, dict[int, LastLook](), clock()
        self.lock = threading.Lock()

    def look(self) -> list[WorkerState]:
        if sys.platform != "linux":
            return []  # without /proc nothing is known: a hang is bounded by the deadlines of calls alone
        with self.lock:  # the agent has several threads
            now = self.clock()
            passed_s, self.looked = min(now - self.looked, 2 * HEARTBEAT_S), now
            return [self._look_at(path, passed_s) for path in sorted(self.folder.glob("heartbeat-*"))]

    def _look_at(self, path: Path, passed_s: float) -> WorkerState:
        pid, page = int(path.name.partition("-")[2]), path.read_bytes()
        (count,), (started,) = COUNT.unpack_from(page), STARTED.unpack_from(page, STARTED_AT)
        since, call = CALL.unpack_from(page, CALL_AT)
        now, last = read_stat(pid), self.last.get(pid)
        if last is None or last.started != started:  # a new worker may have the process id of one that died
            last = self.last[pid] = LastLook(started)
        is_alive = now is not None and now.state not in "ZX" and now.started == last.started
        if now is not None:
            is_busy = now.cpu_ticks - last.cpu_ticks > BUSY_FRACTION * passed_s * TICKS_PER_S
            shows_life = count != last.count or is_busy or waits_for_disk(pid)
            last.silent_s = 0.0 if shows_life else last.silent_s + passed_s
            last.count, last.cpu_ticks = count, now.cpu_ticks
        return WorkerState(pid, is_alive, last.silent_s, call.rstrip(b"\0").decode(errors="replace"), since)

    def kill(self, pid: int) -> None:
        """Ends a worker's process that does not end by itself. SIGKILL reaches one that is stopped, too."""
        now, last = read_stat(pid), self.last.get(pid)
        if now is not None and last is not None and now.started == last.started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class EngineWatch:
    """A worker's look at its engine's process and at all that this has started, about once a second. Messages of the
    process are heartbeats, and calls that wait must make progress. Where there is neither, and nothing of the process
    group computes or waits for a disk, it is silent: stopped, in a deadlock, or waiting for a part that is."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.pid, self.clock = pid, clock
        self.heard = self.moved = self.looked = clock()
        self.silent_s, self.cpu_ticks = 0.0, 0

    def hear(self, has_moved: bool) -> None:
        """Notes a message. `has_moved`: it answers a call, or reports a step."""
        self.heard = self.clock()
        if has_moved:
            self.moved = self.heard

    def look(self, has_calls: bool) -> tuple[float, float]:
        """Returns the seconds of silence, and those for which calls have waited without any progress."""
        now = self.clock()
        passed_s, self.looked = min(now - self.looked, 2 * HEARTBEAT_S), now
        if not has_calls:
            self.moved = now
        if now - min(self.heard, self.moved) < QUIET_S:
            self.silent_s = 0.0
        elif sys.platform == "linux":
            self.silent_s = 0.0 if self._shows_life(passed_s) else self.silent_s + passed_s
        return self.silent_s, now - self.moved

    def _shows_life(self, passed_s: float) -> bool:
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        stats = {pid: stat for pid in pids if (stat := read_stat(pid)) is not None and stat.group == self.pid}
        before, self.cpu_ticks = self.cpu_ticks, sum(stat.cpu_ticks for stat in stats.values())
        is_busy = self.cpu_ticks - before > BUSY_FRACTION * passed_s * TICKS_PER_S
        # While it starts there are no messages, and on a busy machine it may wait for a core for longer than the limit.
        return is_busy or any(waits_for_disk(pid) or has_thread(pid, "R") for pid in stats)


def waits_for_disk(pid: int) -> bool:
    """Whether one of its threads waits for the kernel, which is busy with a disk or a network file system."""
    return has_thread(pid, "D")


def has_thread(pid: int, state: str) -> bool:
    """Whether one of its threads is in this state, as /proc has it; R: it would compute, if a core were free."""
    stats = (read_stat(pid, int(thread.name)) for thread in Path(f"/proc/{pid}/task").glob("*"))
    return any(stat is not None and stat.state == state for stat in stats)
