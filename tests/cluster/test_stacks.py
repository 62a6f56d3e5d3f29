"""What `corral stacks` says of processes and of a run that hangs on two hosts, and what `ray debug` shows of it."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pexpect
import pytest
from clusters import bring_up
from commands import corral
from deadlines import wait_until, within
from forked_pythons import path_without_forks
from guides import Block, block
from hosts import CORRAL, RAY, Lab
from runs import write_recipe

from corral.cluster.stacks import (
    IDLE,
    LIBRARIES,
    MARKS,
    NO_PERMISSION,
    OWN,
    ProcessStacks,
    StackFrame,
    ThreadStack,
    explain,
    find_py_spy,
    format_stacks,
    parse_frame,
    stacks_here,
)
from corral.runtime.presence import present
from corral.runtime.remote_debugger import has_legacy_debugger

SLEEPER = """\
import time

from corral.runtime.presence import announce


def sleeps_long():
    print("asleep", flush=True)
    time.sleep(60)


announce("worker", "night", 3, ("actor", "rollout"))
sleeps_long()
"""
TROUBLE = '''\
import os

from corral.envs.built_in.question import QuestionEnv
from corral.runtime.model_workers import ActorWorker


def hangs(response, gate):
    """Until somebody writes to the pipe. The one call before training, with which the run tries the reward, passes."""
    if not os.path.exists(f"{gate}.tried"):
        open(f"{gate}.tried", "w").close()
        return 0.0
    open(f"{gate}.{os.uname().nodename}", "w").close()
    open(gate).close()
    return len(response) / 8


class Question(QuestionEnv):
    """With a trainer that fails on the second device."""

    def __init__(self, pool):
        super().__init__(pool)
        ActorWorker.accumulate = broken


def broken(self, *arguments, accumulate=ActorWorker.accumulate):
    number = 41 + 1
    if self.context.rank == 1:
        raise ValueError("no good")
    return accumulate(self, *arguments)
'''


def test_the_functions_and_commands_that_processes_are_known_by_exist() -> None:
    sources = {path: path.read_text() for path in OWN.rglob("*.py")}
    for owner, function in (name.split(".") for name in IDLE):
        owners = [text for text in sources.values() if f"class {owner}(" in text or f"class {owner}:" in text]
        assert [f"def {function}(" in text for text in owners] == [True], f"{owner}.{function}"
    for mark in MARKS.values():
        exec(mark)


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that says it is a worker."""
    path = tmp_path / "sleeper.py"
    path.write_text(SLEEPER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asleep\n"
        yield process
        process.kill()


def test_a_process_is_shown_with_what_it_is_and_does(sleeper: "subprocess.Popen[str]") -> None:
    [found] = [process for process in stacks_here() if process.pid == sleeper.pid]
    assert (found.kind, found.run, found.device, found.roles) == ("worker", "night", 3, ("actor", "rollout"))
    assert found.doing == "sleeps_long (sleeper.py:8), waits"


def test_programs_get_json(tmp_path: Path, sleeper: "subprocess.Popen[str]") -> None:
    [command] = block("stacks-json").commands
    ended = corral(tmp_path, *command.split()[1:])
    assert ended.code == 0, ended.stderr
    [found] = [process for process in json.loads(ended.stdout)["processes"] if process["pid"] == sleeper.pid]
    assert found["device"] == 3
    [thread] = found["threads"]
    assert any("nanosleep" in frame for frame in thread["frames"])
    assert "sleeps_long (sleeper.py:8)" in thread["frames"]


def test_a_process_that_has_ended_is_forgotten(sleeper: "subprocess.Popen[str]") -> None:
    assert sleeper.pid in [one.pid for one in present()]
    sleeper.kill()
    sleeper.wait()
    assert sleeper.pid not in [one.pid for one in present()]


def test_processes_that_do_the_same_are_one_block() -> None:
    stack = ThreadStack(
        "corral-worker_0", True, (StackFrame("ActorWorker.step", "runtime/model_workers.py", 118, True),)
    )
    about = ("worker", "r")
    alike = [ProcessStacks(f"h{own // 4 + 1}", 100 + own, *about, own, ("actor",), (stack,)) for own in range(7)]
    other = ProcessStacks("h2", 107, *about, 7, ("actor",))
    same, alone = format_stacks([*alike, other]).split("\n\n")
    assert same.startswith("devices 0-6, actor of run r (7 alike): ActorWorker.step (runtime/model_workers.py:118)\n")
    assert "h1, pid 100, 101, 102, 103; h2, pid 104, 105, 106" in same
    assert alone.startswith("device 7, actor of run r: waits for work\n")


def test_a_file_of_a_library_has_one_name_on_every_node() -> None:
    """The folder of libraries is inside the one of Python itself in a virtual environment."""
    inside, outside = sysconfig.get_path("purelib"), Path(sysconfig.get_path("purelib")).parent
    assert parse_frame("run", f"{inside}/torch/nn.py", 1).file == "torch/nn.py"
    assert [str(outside), inside] == [folder for folder in LIBRARIES[::-1] if folder in (str(outside), inside)]


def test_threads_that_look_after_a_run_come_last() -> None:
    looks = ("DebuggerWatch._report_others", "DebuggerWatch._look")
    watch = ThreadStack("debuggers", True, tuple(StackFrame(name, "remote_debugger.py", 1, True) for name in looks))
    main = ThreadStack("MainThread", False, (StackFrame("Training.run", "loop/train.py", 1, True),))
    assert ProcessStacks("h1", 1, "controller", "r", None, (), (watch, main)).shown == (main, watch)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_must_not_be_looked_at_says_how_it_may_be(sleeper: "subprocess.Popen[str]") -> None:
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    dump = subprocess.run(
        [*as_nobody, find_py_spy(), "dump", "--pid", str(sleeper.pid)], capture_output=True, text=True
    )
    assert dump.returncode
    assert explain(dump.stderr) == NO_PERMISSION


# --- on two hosts


@dataclass
class Run:
    """Its reward functions wait for somebody who writes to `gate`, a pipe. Then its trainer fails, on the second
    host."""

    process: "subprocess.Popen[str]"
    gate: Path

    def says(self, pattern: str) -> str:
        """The first line with it; those before are gone."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"it has ended without {pattern!r}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `corral` and `ray` as commands."""
    made = tmp_path_factory.mktemp("run")
    programs = {"corral": [sys.executable, "-m", "corral.cli.main"], "ray": [*RAY]}
    for name, command in programs.items():
        (made / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (made / name).chmod(0o755)
    return made


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[Lab]:
    """Its processes are started as everywhere else: they are looked at."""
    [command] = block("up-legacy").commands
    with pytest.MonkeyPatch.context() as patch, Lab(2) as lab:
        patch.setattr(sys, "path", path_without_forks())
        bring_up(lab, *command.split()[2:], devices=1)
        yield lab


@pytest.fixture(scope="module")
def run(lab: Lab, folder: Path, tiny_model: Path) -> Run:
    (folder / "trouble.py").write_text(TROUBLE)
    gate, recipe = folder / "gate", write_recipe(folder, tiny_model)
    os.mkfifo(gate)
    settings = (
        "cluster.nodes=2",
        f"environment.name={folder}/trouble.py:Question",
        f"environment.reward.name={folder}/trouble.py:hangs",
        f"environment.reward.options={{gate: {gate}}}",
        f"environment.reward.timeout_s={within(100)}",
    )
    options = ["train", str(recipe), "--post-mortem", "name=stuck", *settings]
    started = lab.begin(0, [*CORRAL, *options], OMP_NUM_THREADS="1")

    def hangs_on_both() -> bool:
        assert started.poll() is None, lab.errors.read_text()
        return all(gate.with_suffix(f".{host}").exists() for host in ("h1", "h2"))

    wait_until(hangs_on_both, 180)
    return Run(started, gate)


def typed(folder: Path, one: Block) -> list[str]:
    """A command of the guide, as a shell runs it."""
    [command] = one.commands
    return ["sh", "-c", f"PATH={shlex.quote(str(folder))}:$PATH; {command}"]


@pytest.mark.core
@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("stacks")
def test_where_a_run_hangs_is_seen_from_any_node(lab: Lab, folder: Path, run: Run) -> None:
    said = lab.run(1, typed(folder, block("stacks"))).stdout
    controller, workers, rewards = said.strip().split("\n\n")
    assert re.match(r"controller of run stuck: \S+ \(loop/train.py:\d+\), waits\n    h1, pid \d+\n", controller)
    assert re.match(
        r"devices 0-1, actor\+rollout of run stuck \(2 alike\): \S+exchange \(rewards/worker_pool.py", workers
    )
    assert re.search(r"\n    h1, pid \d+; h2, pid \d+\n    reward worker 0\n", workers)
    assert re.match(r"reward function on devices 0-1 of run stuck \(2 alike\): hangs \(trouble.py:13\), waits", rewards)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("stacks")
def test_ray_debug_enters_a_worker_that_failed(lab: Lab, folder: Path, run: Run) -> None:
    if not has_legacy_debugger():  # a second of imports, which the collection of tests can do without
        pytest.skip("this Ray has no `ray debug`")
    opened = os.open(run.gate, os.O_RDWR)  # stays open for the calls after those that wait
    line = run.says("waits for")
    assert re.search(r"device 1 on h2 .* waits for `ray debug` on that node \(ValueError: no good", line)
    command = lab.hosts[1].command(typed(folder, block("ray-debug")), {})
    debugger = pexpect.spawn(command[0], command[1:], encoding="utf-8", timeout=within(30), dimensions=(40, 200))
    try:
        debugger.expect("Enter breakpoint index or press enter to refresh: ")
        assert "ValueError: no good" in str(debugger.before)
        debugger.sendline("0")
        debugger.expect(r"\(Pdb\) ")
        debugger.sendline("p number")
        debugger.expect("42")
        debugger.expect(r"\(Pdb\) ")
        debugger.sendline("c")
        run.process.communicate(timeout=within(60))
    finally:
        debugger.close(force=True)
        os.close(opened)
    assert run.process.returncode == 1
    assert "actor.accumulate on device 1 on h2" in lab.errors.read_text()
