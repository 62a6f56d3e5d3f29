"""The script of `corral launch slurm` on a real Slurm with two hosts."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deadlines import within
from hosts import Lab
from runs import num_steps, steps_of, write_recipe
from slurm import Outcome, Slurm, job_in

import corral
from corral.observe.ledger import Ledger

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("slurm")]

NODES = ("cluster.nodes=2", "cluster.devices_per_node=1", "--accelerator=none", f"--check-timeout={within(90):g}")
LIMIT_S = 240
GONE_S = within(20)
"""Ray's agents look every few seconds whether their node still runs."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Lab(2, loopback_names=True) as lab, Slurm(lab) as made:
        yield made


@pytest.fixture
def user(slurm: Slurm, tmp_path: Path, tiny_model: Path) -> "User":
    return User(slurm, tmp_path, tiny_model)


class User:
    """Someone on the first host, in a folder with a recipe."""

    def __init__(self, slurm: Slurm, folder: Path, model: Path) -> None:
        self.slurm, self.folder = slurm, folder
        write_recipe(folder, model)
        program = folder / "bin" / "corral"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m corral.cli.main "$@"\n')
        program.chmod(0o755)
        self.environment = {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(corral.__file__).parent.parent),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return self.slurm.run(["env", f"--chdir={self.folder}", *command], **self.environment)

    def launch(self, *arguments: str) -> str:
        """What `corral launch slurm` says."""
        return self.run("corral", "launch", "slurm", "recipe.yaml", *NODES, *arguments).stdout

    def wait(self, job: int) -> Outcome:
        return self.slurm.wait(job, LIMIT_S)

    def wait_until(self, job: int, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + within(LIMIT_S)
        while not condition():
            assert time.monotonic() < deadline, self.slurm.log(job)
            assert self.slurm.show(job)["JobState"] in ("PENDING", "RUNNING"), self.slurm.log(job)
            time.sleep(0.2)

    @property
    def path(self) -> Path:
        return self.folder / "runs" / "tiny"

    @property
    def num_steps(self) -> int:
        return num_steps(self.path)


@pytest.mark.core
def test_a_command_runs_on_all_hosts(slurm: Slurm) -> None:
    """Of the harness itself."""
    said = slurm.run(["srun", "--nodes=2", "--ntasks-per-node=1", "hostname"]).stdout
    assert sorted(said.split()) == ["h1", "h2"]


def test_it_trains_to_the_end_on_two_nodes(user: User) -> None:
    job = job_in(user.launch("--go"))
    ended = user.wait(job)
    assert ended.state == "COMPLETED", ended.log
    assert "2 devices on 2 nodes" in ended.log
    assert ended.last_line == f"corral: job {job} is done"
    assert [row["step"] for row in steps_of(user.path)] == [1, 2]
    audit = Ledger(user.path / "ledger.jsonl").audit()
    assert (audit.clean, audit.trained) == (True, 8)
    assert_nothing_is_left(user)


def test_a_run_that_fails_ends_the_job_with_its_reason(user: User, tiny_model: Path) -> None:
    model = user.folder / "model"
    model.symlink_to(tiny_model)
    user.launch(f"model.path={model}", "cluster.nodes=1")
    model.unlink()  # it was there when the script was written, and is not where the job runs
    job = job_in(user.run("sbatch", "launch/tiny.sbatch").stdout)
    ended = user.wait(job)
    assert (ended.state, ended.exit_code) == ("FAILED", 2)
    assert ended.last_line.startswith(f"corral: job {job} failed: ")
    assert str(model) in ended.last_line
    assert_nothing_is_left(user)


def test_a_worker_that_cannot_start_ends_the_job_and_is_named(user: User) -> None:
    started = time.monotonic()
    state = f"/tmp/corral-{os.getuid()}"
    user.slurm.lab.run(1, ["chmod", "755", state])
    try:
        ended = user.wait(job_in(user.launch("--go")))
    finally:
        user.slurm.lab.run(1, ["chmod", "700", state])
    assert (ended.state, ended.exit_code) == ("FAILED", 1)
    assert f"h2: {state} must be a folder that only you can open" in ended.last_line
    assert time.monotonic() - started < within(60)
    assert_nothing_is_left(user)


def test_a_head_that_cannot_start_ends_the_job_and_is_named(user: User) -> None:
    started = time.monotonic()
    with occupied(user.slurm.lab, 6399):
        ended = user.wait(job_in(user.launch("--go", "--port=6399")))
    assert (ended.state, ended.exit_code) == ("FAILED", 1)
    assert "failed while starting the head: h1: port 6399 of this node is in use" in ended.last_line
    assert time.monotonic() - started < within(40)
    assert_nothing_is_left(user)


@pytest.mark.core
def test_a_job_that_is_to_stop_saves_a_checkpoint_first(user: User) -> None:
    job = job_in(user.launch("--go", "schedule.steps=1000"))
    user.wait_until(job, lambda: user.num_steps >= 2)
    user.run("scancel", "--batch", "--signal=TERM", str(job))
    ended = user.wait(job)
    assert (ended.state, ended.exit_code) == ("FAILED", 143)
    assert ended.last_line == (f"corral: job {job} was stopped; submit the script again to go on")
    [checkpoint] = (user.path / "checkpoints").glob("step_*")
    assert json.loads((checkpoint / "state.json").read_text())["step"] == user.num_steps
    assert_nothing_is_left(user)


def assert_nothing_is_left(user: User) -> None:
    """Neither Ray, nor the address and the token of a cluster that is gone."""
    assert not list(user.folder.glob("launch/logs/*/head*"))
    deadline = time.monotonic() + GONE_S
    for host in range(2):
        while left := user.slurm.lab.run(host, ["pgrep", "-af", "ray|corral.cli"], check=False).stdout:
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


@contextmanager
def occupied(lab: Lab, port: int) -> Iterator[None]:
    """Another program listens on a port of the first host."""
    listen = f"import socket; s = socket.create_server(('', {port})); print(flush=True); input()"
    process = lab.begin(0, [sys.executable, "-c", listen])
    assert process.stdout is not None
    process.stdout.readline()
    yield
    process.communicate("\n")
