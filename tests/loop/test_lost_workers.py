"""Workers of a run on this machine that hang or die at awkward moments: the run goes on, and says what happened."""

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from commands import Command, start_corral
from deadlines import wait_until, within
from runs import num_steps, slowly, steps_of, write_recipe
from served import free_port

from corral.child_process import read_stat
from corral.runtime.presence import Presence, present
from corral.training.checkpoint import problem_with, step_folder

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("ray")]

APART = ("cluster.devices_per_node=2", "cluster.placement={rollout: 0, actor: 1}")
LIMIT_S = 240.0


class LocalRun:
    """A run with one rollout worker and one trainer, each a process of this machine."""

    def __init__(self, folder: Path, model: Path, *changes: str, before: Callable[[], None] | None = None) -> None:
        write_recipe(folder, model)
        self.folder, self.name, self.path = folder, folder.name, folder / "runs" / folder.name
        self.signaled: set[int] = set()
        every = (f"name={self.name}", "schedule.steps=6", "checkpoint.every=2", *APART, *slowly(folder, 0.05), *changes)
        self.command: Command = start_corral(folder, "train", "recipe.yaml", *every, before=before)

    def worker(self, role: str) -> Presence | None:
        """The process that has the role now."""
        return next((one for one in present() if one.run == self.name and role in one.roles), None)

    def signal_worker(self, role: str, number: signal.Signals) -> int:
        """Sends a signal to a role's process, during the rollout of the fourth step; returns its pid."""
        self.command.wait_until(lambda: self.num_steps >= 3 and len((self.folder / "calls").read_bytes()) > 3 * 16 + 2)
        worker = self.worker(role)
        assert worker is not None, self.output
        os.kill(worker.pid, number)
        self.signaled.add(worker.pid)
        return worker.pid

    def kill_starting_worker(self) -> None:
        """Kills the next worker whose process has begun and that has no role yet."""
        ready = {one.pid for one in present() if one.run == self.name} | self.signaled
        starting: list[int] = []

        def has_begun() -> bool:
            all_of_them = [
                pid for pid in descendants(self.command.process.pid) if "ray::DeviceProcess" in title_of(pid)
            ]
            # What a worker forks has its title.
            stats = {pid: stat for pid in all_of_them if (stat := read_stat(pid))}
            new = {pid: stat for pid, stat in stats.items() if stat.parent not in all_of_them and pid not in ready}
            starting[:] = [pid for pid, stat in new.items() if stat.cpu_ticks > 150]  # it imports torch
            return bool(starting)

        self.command.wait_until(has_begun)
        assert starting, self.output
        os.kill(starting[0], signal.SIGKILL)

    @property
    def num_steps(self) -> int:
        return num_steps(self.path)

    @property
    def output(self) -> str:
        return self.command.stdout.read_text() + self.command.stderr.read_text()

    def finish(self) -> str:
        """Its output on one line: the console breaks lines to the width of a terminal."""
        finished = self.command.wait(LIMIT_S)
        output = " ".join(self.output.split())
        assert finished.code == 0, output
        assert [row["step"] for row in steps_of(self.path)] == [1, 2, 3, 4, 5, 6]
        return output


def descendants(pid: int | None) -> Iterator[int]:
    """Children of a process, their children, and so on."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                yield int(child)
                yield from descendants(int(child))


def title_of(pid: int) -> str:
    """The title that Ray gives to an actor's process; empty where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def test_a_rollout_worker_that_hangs_is_reported_and_replaced(tmp_path: Path, tiny_model: Path) -> None:
    run = LocalRun(tmp_path, tiny_model, "cluster.worker_timeout_s=34")
    pid = run.signal_worker("rollout", signal.SIGSTOP)
    stopped = time.monotonic()
    run.command.wait_until(lambda: "has not answered for 30 s" in " ".join(run.output.split()))
    assert 28 < time.monotonic() - stopped < within(45)
    output = run.finish()
    assert "device 0 on" in output
    assert "has not answered for 30 s; it is in rollout." in output
    assert f"(pid {pid}) did not answer for 34 s (`cluster.worker_timeout_s`), in rollout." in output
    assert "prompts are rolled out elsewhere" in output
    assert "device 0 takes rollouts again" in output
    assert "started again, and the run goes on" not in output
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.core
def test_a_trainer_that_hangs_costs_the_steps_since_the_last_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    run = LocalRun(tmp_path, tiny_model, "cluster.worker_timeout_s=5")
    pid = run.signal_worker("actor", signal.SIGSTOP)
    output = run.finish()
    assert f"device 1 on {os.uname().nodename}" in output
    assert f"(pid {pid}) did not answer for 5 s (`cluster.worker_timeout_s`)" in output
    assert "and was killed by Corral" in output
    assert "the run goes on from step_000002" in output
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.core
def test_a_trainer_that_dies_while_nobody_asks_it_is_noticed_at_once(tmp_path: Path, tiny_model: Path) -> None:
    """During a rollout of a minute, for the end of which the trainer waits."""
    run = LocalRun(tmp_path, tiny_model, "environment.reward.options.seconds=3")
    run.command.wait_until(lambda: (tmp_path / "calls").exists())
    worker = run.worker("actor")
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    killed = time.monotonic()
    run.command.wait_until(lambda: "was killed by signal 9" in " ".join(run.output.split()))
    noticed_s = time.monotonic() - killed
    assert run.num_steps == 0
    run.command.send(signal.SIGTERM)
    run.command.wait()
    assert noticed_s < within(8), run.output


@pytest.mark.usefixtures("real_workers")
def test_workers_that_die_while_they_start_are_started_again(tmp_path: Path, tiny_model: Path) -> None:
    """One when the run begins, and one when it begins again."""
    run = LocalRun(tmp_path, tiny_model)
    run.kill_starting_worker()
    run.signal_worker("actor", signal.SIGKILL)
    run.kill_starting_worker()
    output = run.finish()
    assert output.count("was killed by signal 9") == 3
    assert output.count("while it started") == 2
    assert "the run goes on from the beginning" in output
    assert output.count("the run goes on from step_000002") == 2
    assert "The actor died" not in output  # Ray's words


@pytest.mark.usefixtures("real_workers")
def test_a_replacement_that_dies_while_it_starts_is_started_again(tmp_path: Path, tiny_model: Path) -> None:
    run = LocalRun(tmp_path, tiny_model)
    run.signal_worker("rollout", signal.SIGKILL)
    run.kill_starting_worker()
    output = run.finish()
    assert output.count("was killed by signal 9") == 2
    assert "while it started (attempt 1 of 3 to replace it)" in output
    assert "device 0 takes rollouts again" in output
    assert "could not be replaced" not in output
    assert "started again, and the run goes on" not in output


SERVICE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_service_whose_node_agent_died_is_started_again(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    port = free_port()
    # A shell between them: it gets SIGTERM when the agent dies, and the program itself does not.
    command = f"[sh, -c, '{sys.executable} {tmp_path}/service.py {port}; true']"
    services = f"cluster.services={{echo: {{command: {command}, port: {port}}}}}"
    run = LocalRun(tmp_path, tiny_model, services, "schedule.steps=600")

    def service() -> int | None:
        address = ("127.0.0.1", port)  # where it is not there, or ends before it has answered
        with suppress(OSError, IndexError), socket.create_connection(address, timeout=within(5)) as connection:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return int(connection.makefile("rb").read().split(b"\r\n\r\n")[1])
        return None

    run.command.wait_until(lambda: run.num_steps >= 1)
    first = service()
    agents = [pid for pid in descendants(run.command.process.pid) if title_of(pid).startswith("ray::NodeAgent")]
    os.kill(agents[0], signal.SIGKILL)
    run.command.wait_until(lambda: service() not in (first, None), timeout_s=60)
    assert service() not in (first, None), run.output
    run.command.send(signal.SIGINT)
    assert run.command.wait().code == 130, run.output
    assert service() is None


@pytest.mark.usefixtures("real_workers")
def test_without_rays_head_process_the_run_is_saved_and_ends_with_one_line(tmp_path: Path, tiny_model: Path) -> None:
    changes = ("schedule.steps=600", "checkpoint.every=1000", "cluster.node_timeout_s=5")
    run = LocalRun(tmp_path, tiny_model, *changes)
    run.command.wait_until(lambda: run.num_steps >= 2)
    own = list(descendants(run.command.process.pid))
    workers = [pid for pid in own if "ray::DeviceProcess" in title_of(pid)]
    assert len(workers) == 2
    os.kill(next(pid for pid in own if "gcs_server" in title_of(pid)), signal.SIGKILL)
    finished = run.command.wait(120)
    assert finished.code == 1, run.output
    [error] = finished.errors
    assert error.startswith("error: Ray's head process (GCS, 127.0.0.1:")
    assert f"all {run.num_steps} steps are saved" in error
    assert "Traceback" not in finished.stderr
    assert problem_with(step_folder(run.path / "checkpoints", run.num_steps), hashes=True) is None
    wait_until(lambda: not any("ray::DeviceProcess" in title_of(pid) for pid in workers), 20)


def test_a_worker_is_not_replaced_without_rays_head_and_the_end_has_its_line(tmp_path: Path, tiny_model: Path) -> None:
    """Ray's calls would wait for its head in the controller's own thread, until Ray ends it."""
    changes = ("schedule.steps=600", "cluster.node_timeout_s=5", "cluster.worker_timeout_s=8")
    run = LocalRun(tmp_path, tiny_model, *changes)
    run.command.wait_until(lambda: run.num_steps >= 2)
    run.signal_worker("rollout", signal.SIGSTOP)
    own = descendants(run.command.process.pid)
    os.kill(next(pid for pid in own if "gcs_server" in title_of(pid)), signal.SIGKILL)
    finished = run.command.wait(150)
    assert finished.code == 1, run.output
    assert finished.errors, run.output
    assert all(line.startswith("error: Ray's head process (GCS, 127.0.0.1:") for line in finished.errors)


def test_the_end_of_rays_process_on_the_controllers_node_is_printed_at_once(tmp_path: Path, tiny_model: Path) -> None:
    run = LocalRun(tmp_path, tiny_model, "schedule.steps=600")
    run.command.wait_until(lambda: run.num_steps >= 1)
    own = descendants(run.command.process.pid)
    raylet = next(pid for pid in own if "raylet/raylet" in title_of(pid))
    os.kill(raylet, signal.SIGKILL)
    killed_at = time.monotonic()
    run.command.wait_until(lambda: f"error: Ray's process on this node (raylet, {raylet}) has ended" in run.output)
    # Ray itself takes longer, and a call of Ray's in the meantime ends the run.
    assert time.monotonic() - killed_at < within(5)
    assert run.command.wait(60).code == 1, run.output


SOON_WITHOUT_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
"""With this Ray's helpers stay for ten seconds without a head, and not for a minute."""


def use_temporary_folder(folder: Path) -> None:
    os.environ.update({"TMPDIR": str(folder), **SOON_WITHOUT_HEAD})


@pytest.mark.parametrize("end", ["good", "ctrl_c", "killed_worker", "killed_controller"])
def test_nothing_is_left_after_any_end(tmp_path: Path, tiny_model: Path, end: str) -> None:
    """Neither processes, with their ports, nor shared memory, nor temporary folders."""
    temporary = Path(tempfile.mkdtemp(prefix="c"))  # short: the names of Ray's sockets are limited
    try:
        steps = "schedule.steps=4" if end == "good" else "schedule.steps=60"
        run = LocalRun(tmp_path, tiny_model, steps, before=partial(use_temporary_folder, temporary))
        run.command.wait_until(lambda: run.num_steps >= 2)
        own = {pid: read_stat(pid) for pid in descendants(run.command.process.pid)}
        folders = {path.name for path in temporary.iterdir()}
        assert any(name.startswith("corral-") for name in folders), folders
        if end == "killed_worker":
            worker = run.worker("rollout")
            assert worker is not None
            os.kill(worker.pid, signal.SIGKILL)
            run.command.wait_until(lambda: "takes rollouts again" in run.output)
        if end != "good":
            run.command.send(signal.SIGKILL if end == "killed_controller" else signal.SIGINT)
        run.command.wait(LIMIT_S)

        def left() -> list[str]:
            same = [
                pid for pid, stat in own.items() if stat and (now := read_stat(pid)) and now.started == stat.started
            ]
            files = [path.name for path in temporary.iterdir() if path.name != "ray"]
            memory = [path.name for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in own)]
            return [*(f"{pid} {title_of(pid)}" for pid in same if title_of(pid)), *files, *memory]

        # Ray's own helpers wait for the head, if the controller was killed.
        wait_until(lambda: not left(), 150, left, pause_s=0.5)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
