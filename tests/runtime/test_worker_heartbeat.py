"""Heartbeats of real processes that wait, compute, hold the interpreter's lock, are stopped or killed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corral.runtime.worker_heartbeat import HeartbeatReader, WorkerState

WORKER = """
import ctypes, sys, time
from pathlib import Path
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


def look(reader: HeartbeatReader, seconds: float) -> list[WorkerState]:
    """What is seen of the only worker, five times a second."""
    states = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.2)
        states += reader.look()
    return states


def test_a_worker_that_waits_is_not_silent(start: Start, tmp_path: Path) -> None:
    process = start("time.sleep(600)")
    states = look(HeartbeatReader(tmp_path), 2.5)
    assert {(state.pid, state.is_alive, state.call) for state in states} == {(process.pid, True, "actor.step")}
    assert abs(states[-1].since - time.time()) < 60
    assert max(state.silent_s for state in states) < 2


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_silent_until_it_goes_on(start: Start, tmp_path: Path) -> None:
    process, reader = start("time.sleep(600)"), HeartbeatReader(tmp_path)
    look(reader, 1)
    process.send_signal(signal.SIGSTOP)
    assert 2 < look(reader, 3)[-1].silent_s < 4
    process.send_signal(signal.SIGCONT)
    assert look(reader, 1.5)[-1].silent_s < 2


@pytest.mark.slow
def test_native_code_that_computes_and_holds_the_interpreters_lock_is_not_silent(start: Start, tmp_path: Path) -> None:
    """One call of C that runs longer than anybody would wait."""
    start("sum(range(10**12))")
    assert max(state.silent_s for state in look(HeartbeatReader(tmp_path), 5)) < 2


@pytest.mark.slow
def test_native_code_that_waits_for_ever_with_the_interpreters_lock_is_silent(start: Start, tmp_path: Path) -> None:
    start("ctypes.PyDLL(None).sleep(600)")
    assert look(HeartbeatReader(tmp_path), 4)[-1].silent_s > 2


def test_a_worker_that_has_ended_is_known_at_once(start: Start, tmp_path: Path) -> None:
    process, reader = start("time.sleep(600)"), HeartbeatReader(tmp_path)
    assert reader.look()[0].is_alive
    process.kill()
    assert not look(reader, 0.5)[-1].is_alive
    process.wait()
    assert not reader.look()[0].is_alive


def test_a_stopped_worker_can_be_killed_and_no_other_process(start: Start, tmp_path: Path) -> None:
    process, other, reader = start("time.sleep(600)"), subprocess.Popen(["sleep", "600"]), HeartbeatReader(tmp_path)
    reader.look()
    process.send_signal(signal.SIGSTOP)
    reader.kill(other.pid)
    reader.kill(process.pid)
    assert process.wait(10) == -signal.SIGKILL
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


@pytest.mark.slow
def test_seconds_in_which_nobody_looked_are_nobodys_silence(start: Start, tmp_path: Path) -> None:
    process, reader = start("time.sleep(600)"), HeartbeatReader(tmp_path)
    look(reader, 0.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    assert reader.look()[0].silent_s < 3
