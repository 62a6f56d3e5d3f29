"""Programs beside the workers: started, awaited, started again, ended, with devices of their own; and what is reported
when that fails."""

import asyncio
import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deadlines import wait_until, within

from corral.recipe.schema import Service
from corral.runtime import services as services_module
from corral.runtime.services import Services, command_of

sys.path.insert(0, str(Path(__file__).parent))

SERVER = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *_): pass
if sys.argv[2:] == ["stubborn"]:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("hello from", sys.argv[1], flush=True)
print("devices", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

Start = Callable[..., Services]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Start]:
    started: list[Services] = []

    def start(command: list[str] | None = None, timeout_s: float = within(20)) -> Services:
        command = [sys.executable, "-c", SERVER, str(port)] if command is None else command
        service = Service(command=command, port=port, start_timeout_s=timeout_s)
        started.append(Services({"echo": service}, tmp_path))
        return started[-1]

    yield start
    for services in started:
        services.close()


def pid_of(port: int) -> int:
    """Of who answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=within(5)) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        return int(connection.makefile("rb").read().split(b"\r\n\r\n")[1])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def test_a_service_is_ready_when_it_answers_and_ends_with_the_run(start: Start, port: int, tmp_path: Path) -> None:
    services = start()
    assert services.wait() == []
    pid = pid_of(port)
    assert f"hello from {port}" in (tmp_path / "service-echo.log").read_text()
    services.close()
    assert not is_alive(pid)


@pytest.mark.parametrize("can_fork", [True, False])
def test_a_service_that_is_killed_is_started_again(
    start: Start, port: int, can_fork: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the node cannot start it for a while."""
    services = start()
    assert services.wait() == []
    first = pid_of(port)
    if not can_fork:
        start_child, failures = services_module.start_child, iter([OSError(errno.EAGAIN, "no more processes")])

        def start_or_fail(*arguments: Any, **options: Any) -> Any:
            for failure in failures:
                raise failure
            return start_child(*arguments, **options)

        monkeypatch.setattr(services_module, "start_child", start_or_fail)
        monkeypatch.setattr(services_module, "LONGEST_PAUSE_S", 0.1)
    os.kill(first, signal.SIGKILL)

    def answers_again() -> bool:
        try:
            return pid_of(port) != first
        except OSError:
            return False

    wait_until(answers_again)


def test_a_service_dies_with_the_process_that_started_it(tmp_path: Path, port: int) -> None:
    program = f"""
import time
from pathlib import Path
from corral.recipe.schema import Service
from corral.runtime.services import Services
command = {[sys.executable, "-c", SERVER, str(port)]!r}
services = Services({{"echo": Service(command=command, port={port})}}, Path({str(tmp_path)!r}))
print(services.wait(), flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "[]\n"
    pid = pid_of(port)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(pid))


@pytest.mark.slow
def test_one_whose_starter_died_is_started_again_by_who_takes_its_place(tmp_path: Path, port: int) -> None:
    """Also a program that ignores SIGTERM, which it gets when its starter dies, and keeps the port."""
    program = f"""
import sys, time
from pathlib import Path
from corral.recipe.schema import Service
from corral.runtime.services import Services
command = {["sh", "-c", shlex.join([sys.executable, "-c", SERVER, str(port), "stubborn"]) + "; true"]!r}
folder = Path({str(tmp_path)!r})
services = Services({{"echo": Service(command=command, port={port})}}, folder, records=folder)
print(services.wait(), flush=True)
sys.stdin.readline()
services.close()
"""
    start = partial(subprocess.Popen, [sys.executable, "-c", program], text=True)
    first = start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == "[]\n"
    pid = pid_of(port)
    first.kill()
    first.wait()
    second = start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert second.stdout is not None
    assert second.stdout.readline() == "[]\n"
    assert pid_of(port) != pid
    assert not is_alive(pid)
    second.communicate("end\n", timeout=within(30))


def test_a_record_that_a_full_disk_left_empty_is_none(port: int, tmp_path: Path) -> None:
    (tmp_path / "service-echo.pid").touch()
    service = Service(command=[sys.executable, "-c", SERVER, str(port)], port=port, start_timeout_s=within(20))
    services = Services({"echo": service}, tmp_path, records=tmp_path)
    assert services.wait() == []
    services.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "timeout_s", "expected"),
    [
        (
            [sys.executable, "-c", "print('no index here'); raise SystemExit(3)"],
            within(20),
            "exit code 3; the last lines of",
        ),
        ([sys.executable, "-c", "import time; time.sleep(60)"], 0.5, "was not ready at http://127.0.0.1:"),
        (["no-such-program-anywhere"], within(20), "exit code 1; the last lines of"),
    ],
)
def test_what_a_service_lacks_is_said(start: Start, command: list[str], timeout_s: float, expected: str) -> None:
    [problem] = start(command, timeout_s).wait()
    assert "`cluster.services.echo`" in problem
    assert expected in problem


def test_an_index_in_the_home_directory_is_found_there() -> None:
    assert str(Path.home() / "index") in command_of(Service(retriever="~/index", port=8000))


@pytest.mark.slow
def test_a_port_that_somebody_else_has_is_not_taken_for_the_service(start: Start, port: int) -> None:
    first = start()
    assert first.wait() == []
    [problem] = start().wait()
    assert "something else answers" in problem


def test_each_service_sees_the_devices_that_it_claims_and_no_others(tmp_path: Path) -> None:
    program = [sys.executable, "-c", 'import os; print("devices", repr(os.environ["CUDA_VISIBLE_DEVICES"]))']
    claims = {"judge": 2, "plain": 0, "retriever": 1}
    services = {name: Service(command=program, port=9, devices=devices) for name, devices in claims.items()}
    running = Services(services, tmp_path, accelerators=["3", "5", "6"])
    try:
        logs = {name: tmp_path / f"service-{name}.log" for name in claims}
        wait_until(lambda: all(log.exists() and "devices" in log.read_text() for log in logs.values()))
        seen = {name: log.read_text().splitlines()[0] for name, log in logs.items()}
    finally:
        running.close()
    assert seen == {"judge": "devices '3,5'", "plain": "devices ''", "retriever": "devices '6'"}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("gpus", [3, 0], ids=["gpus", "worker slots"])
def test_devices_of_a_service_are_reserved_beside_those_of_the_workers(tmp_path: Path, port: int, gpus: int) -> None:
    """Ray believes in as many GPUs as it is started with, and gives out their numbers."""
    import ray
    from scenarios import running

    from corral.runtime.connection import quietly

    service = {"command": [sys.executable, "-c", SERVER, str(port)], "port": port, "devices": 1}
    resource = "GPU" if gpus else "corral_device"

    async def observe() -> dict[str, Any]:
        cluster = {"devices_per_node": 3, "placement": {"actor": "all"}, "services": {"judge": service}}
        async with running(str(tmp_path), build=False, **cluster) as runtime:
            [node], [log] = runtime.nodes, tmp_path.rglob("service-judge.log")
            return {
                "devices": node.devices,
                "workers": [device.process.accelerators for device in runtime.devices.values()],
                "service": [line for line in log.read_text().splitlines() if line.startswith("devices")],
                "free": ray.available_resources().get(resource, 0),
            }

    with quietly():
        ray.init(num_cpus=2, num_gpus=gpus, resources={} if gpus else {resource: 3}, include_dashboard=False)
    try:
        seen = asyncio.run(observe())
    finally:
        ray.shutdown()
    assert (seen["devices"], seen["free"]) == ((0, 1), 0)
    if gpus:
        assert sorted([*(f"devices '{number}'" for [number] in seen["workers"]), *seen["service"]]) == [
            "devices '0'",
            "devices '1'",
            "devices '2'",
        ]
    else:
        assert seen["workers"] == [[], []]
