"""Heartbeats of real processes that wait, compute, hold the interpreter's lock, are stopped or killed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest
from deadlines import wait_until, within

from corral.child_process import read_stat, start_child, terminate_group
from corral.runtime import worker_heartbeat
from corral.runtime.worker_heartbeat import COUNT, HEARTBEAT_S, TICKS_PER_S, EngineWatch, HeartbeatReader

WORKER = """
import ctypes, sys, time
from pathlib import Path
from corral.child_process import read_stat
from corral.runtime.worker_heartbeat import WorkerHeartbeat
heartbeat = WorkerHeartbeat(Path(sys.argv[1]))
with heartbeat.during("rollout.collect", computes=False), heartbeat.during("actor.step", computes=True):
    print("ready", flush=True)
    exec(sys.stdin.readline())
print("done", flush=True)
time.sleep(600)
"""
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker that does what it is given."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", WORKER, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write(f"{code}\n")
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


class Clock:
    """Of a reader: it goes on when a test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def silence(reader: HeartbeatReader, clock: Clock, seconds: float = 1.0) -> float:
    """Of the only worker, as it is seen so many seconds after the last look."""
    clock.now_s += seconds
    [state] = reader.look()
    return state.silent_s


def count_of(folder: Path) -> int:
    """How often the worker's heart has beaten."""
    [file] = folder.glob("heartbeat-*")
    return int(COUNT.unpack_from(file.read_bytes())[0])


def next_beat(folder: Path) -> None:
    before = count_of(folder)
    wait_until(lambda: count_of(folder) > before)


def stop(process: "subprocess.Popen[str]") -> None:
    """Returns when no thread of it runs."""
    process.send_signal(signal.SIGSTOP)
    threads = [int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir()]
    wait_until(lambda: {stat.state for thread in threads if (stat := read_stat(process.pid, thread))} == {"T"})


def test_a_worker_that_waits_is_not_silent(start: Start, tmp_path: Path) -> None:
    process, clock = start("time.sleep(600)"), Clock()
    reader = HeartbeatReader(tmp_path, clock)
    [state] = reader.look()
    assert (state.pid, state.is_alive, state.call) == (process.pid, True, "actor.step")
    assert abs(state.since - time.time()) < within(60)
    for _ in range(2):
        next_beat(tmp_path)
        assert silence(reader, clock) == 0


def test_a_worker_that_is_stopped_is_silent_until_it_goes_on(start: Start, tmp_path: Path) -> None:
    process, clock = start("time.sleep(600)"), Clock()
    reader = HeartbeatReader(tmp_path, clock)
    stop(process)
    reader.look()
    assert [silence(reader, clock) for _ in range(3)] == [1, 2, 3]
    process.send_signal(signal.SIGCONT)
    next_beat(tmp_path)
    assert silence(reader, clock) == 0


@pytest.mark.slow
def test_native_code_that_computes_and_holds_the_interpreters_lock_is_not_silent(start: Start, tmp_path: Path) -> None:
    """One call of C that runs longer than anybody would wait. In more than a second of it no heart beats."""
    process, clock = start("sum(range(10**12))"), Clock()
    reader = HeartbeatReader(tmp_path, clock)

    def cpu_ticks() -> int:
        stat = read_stat(process.pid)
        assert stat is not None
        return stat.cpu_ticks

    counts = []
    for _ in range(8):
        before = cpu_ticks()
        wait_until(lambda before=before: cpu_ticks() > before + 0.2 * TICKS_PER_S)
        assert silence(reader, clock) == 0
        counts.append(count_of(tmp_path))
    assert len(set(counts[1:])) == 1


@pytest.mark.slow
def test_native_code_that_waits_for_ever_with_the_interpreters_lock_is_silent(start: Start, tmp_path: Path) -> None:
    start("ctypes.PyDLL(None).sleep(600)")
    reader = HeartbeatReader(tmp_path)
    wait_until(lambda: reader.look()[0].silent_s > 2)


def test_a_worker_that_has_ended_is_known_at_once(start: Start, tmp_path: Path) -> None:
    process, reader = start("time.sleep(600)"), HeartbeatReader(tmp_path)
    assert reader.look()[0].is_alive
    process.kill()
    wait_until(lambda: not reader.look()[0].is_alive)  # before anybody has asked how it ended
    process.wait()
    assert not reader.look()[0].is_alive


def test_a_stopped_worker_can_be_killed_and_no_other_process(start: Start, tmp_path: Path) -> None:
    process, other, reader = start("time.sleep(600)"), subprocess.Popen(["sleep", "600"]), HeartbeatReader(tmp_path)
    reader.look()
    process.send_signal(signal.SIGSTOP)
    reader.kill(other.pid)
    reader.kill(process.pid)
    assert process.wait(within(10)) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_process_that_only_has_the_id_of_a_worker_is_not_taken_for_it(tmp_path: Path) -> None:
    """As with two nodes that share a folder, or a process id that was used again."""
    other, reader = subprocess.Popen(["sleep", "600"]), HeartbeatReader(tmp_path)
    (tmp_path / f"heartbeat-{other.pid}").write_bytes(bytes(1000))
    assert not reader.look()[0].is_alive
    reader.kill(other.pid)
    time.sleep(0.2)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_seconds_in_which_nobody_looked_are_nobodys_silence(start: Start, tmp_path: Path) -> None:
    process, clock = start("time.sleep(600)"), Clock()
    reader = HeartbeatReader(tmp_path, clock)
    stop(process)
    reader.look()
    assert silence(reader, clock, seconds=60) == 2 * HEARTBEAT_S


# --- an engine's own process


def group_that(does: str) -> "subprocess.Popen[bytes]":
    """A process of a group of its own, whose child does this."""
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {does!r}])"
    return start_child([sys.executable, "-c", program])


@pytest.mark.parametrize(
    ("does", "least", "lives"),
    [("while True: pass", 0.05, True), ("while True: pass", inf, True), ("import time; time.sleep(600)", 0.05, False)],
    ids=["computes", "waits for a core", "waits"],
)
def test_what_an_engine_has_started_lives_for_it(
    does: str, least: float, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls wait, and messages say that nothing was done. `least`: part of a core above which a process computes."""
    monkeypatch.setattr(worker_heartbeat, "QUIET_S", 0.5)
    monkeypatch.setattr(worker_heartbeat, "BUSY_FRACTION", least)
    process = group_that(does)
    try:
        watch, silent = EngineWatch(process.pid), [0.0]
        deadline = time.monotonic() + within(30)
        while time.monotonic() < deadline and silent[-1] < 2 and len(silent) < 40:
            time.sleep(0.2)
            watch.hear(has_moved=False)
            silent.append(watch.look(has_calls=True)[0])
        assert (silent[-1] >= 2) == (not lives), silent
        assert watch.look(has_calls=True)[1] > 1
        watch.hear(has_moved=False)
        assert watch.look(has_calls=False) == (0, 0)  # nobody waits for it
    finally:
        terminate_group(process)
