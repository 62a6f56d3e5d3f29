"""Several hosts out of one machine, for tests of what happens between machines.

A host is a set of Linux namespaces: its own address, name, /etc/hosts, processes, /dev/shm, and what Ray and Corral
keep in /tmp. The home directory is one for all hosts of a lab. Everything
ends with the process that made it, even if that is killed: the kernel ends the hosts, and the bridge between them,
which it leaves behind, is removed by the next one.

    with Lab(3) as lab:
        lab.start_ray(devices=2)
        print(lab.run(0, ["ray", "status"]).stdout)
        lab.cut(2)
"""

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from deadlines import within
from forked_pythons import RAY_PYTHON, forking_python

from corral.cluster.up import RAY
from corral.runtime.token import VARIABLES

CORRAL = [sys.executable, "-m", "corral.cli.main"]
TOOLS = {"ip": "iproute2", "tini": "tini", "nsenter": "util-linux", "unshare": "util-linux", "setpriv": "util-linux"}
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""With these Ray notices in seconds that a node is gone. By default a cable that was pulled takes it a minute."""
SMALL_RAY = ("--num-cpus=2", "--object-store-memory=100000000", "--memory=1000000000", "--include-log-monitor=false")
"""Ray would take a third of the machine on every host, and pass on what workers print, for which nobody asks here."""
FONTS = Path("~/.cache/matplotlib").expanduser()
"""That matplotlib has collected; it needs seconds for it."""
DECOY = "192.168.231"
START_S = within(120)
NUMBERS = itertools.count()


class Host:
    """`process`: ends the host when it is killed. `pid`: of the host's first process. `home`: not that of the user who
    runs the tests, whose files are nobody's business."""

    def __init__(self, name: str, address: str, link: str, home: Path, process: "subprocess.Popen[bytes]") -> None:
        self.name, self.address, self.link, self.home, self.process = name, address, link, home, process
        self.pid = first_child(process)

    def command(self, command: Sequence[str], env: dict[str, str]) -> list[str]:
        enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "-p", "-i", f"--wd={os.getcwd()}", "--"]
        every = {"HOME": str(self.home), "MPLCONFIGDIR": str(FONTS), **import_path(), **env}
        # A test in this process may have used a token of its own, which must not open the hosts' cluster.
        forget = [f"--unset={name}" for name in VARIABLES]
        words = forked(command) if RAY_PYTHON in sys.path else command
        return [*enter, "env", *forget, *(f"{name}={value}" for name, value in every.items()), *words]


class Lab:
    """`loopback_names`: each host's own name is 127.0.1.1 in its /etc/hosts, as Debian has it. `decoys`: each host has
    a network before the right one that leads nowhere."""

    def __init__(self, num_hosts: int, *, name: str = "h", loopback_names: bool = False, decoys: bool = False) -> None:
        skip_unless_possible()
        remove_old_bridges()
        self.num_hosts, self.name, self.loopback_names, self.decoys = num_hosts, name, loopback_names, decoys
        self.bridge = f"crl{os.getpid():x}x{next(NUMBERS)}"
        self.folder = Path(tempfile.mkdtemp(prefix="lab-"))
        self.errors = self.folder / "errors.txt"
        self.errors.touch()
        self.hosts: list[Host] = []
        self.background: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            self.net = self._make_bridge()
            for number in range(self.num_hosts):
                self.hosts.append(self._make_host(number))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self.hosts:
            host.process.kill()
            host.process.wait()
            subprocess.run(["ip", "link", "del", host.link], capture_output=True)
        for process in self.background:
            process.kill()
            process.wait()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what a test does with hosts

    def run(
        self, host: int, command: Sequence[str], *, timeout_s: float = 60, check: bool = True, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        result = subprocess.run(
            self.hosts[host].command(command, env), capture_output=True, text=True, timeout=within(timeout_s)
        )
        if check and result.returncode:
            raise AssertionError(f"{self.hosts[host].name}: {command} failed\n{result.stdout}\n{result.stderr}")
        return result

    def begin(self, host: int, command: Sequence[str], **env: str) -> "subprocess.Popen[str]":
        """In the background. It ends with the host. What it says on its standard error is in `errors`."""
        with self.errors.open("a") as errors:
            process = subprocess.Popen(
                self.hosts[host].command(command, env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.background.append(process)
        return process

    def start_ray(
        self,
        devices: int = 2,
        *,
        hosts: Sequence[int] | None = None,
        gpus: bool = False,
        ranks: Sequence[int] | None = None,
        health_checks: dict[str, str] = HEALTH_CHECKS,
    ) -> None:
        """On all hosts, or on some; the first is the head, and the others, started at the same time, wait for it.
        `gpus`: Ray believes that the devices are such. `ranks`: of the hosts, as labels."""
        chosen = range(self.num_hosts) if hosts is None else hosts
        address = self.hosts[chosen[0]].address
        kind = f"--num-gpus={devices}" if gpus else f"--resources={json.dumps({'corral_device': devices})}"
        small = [*SMALL_RAY, "--disable-usage-stats"]
        as_head = ["--head", "--port=6379", "--include-dashboard=false", "--no-monitor"]
        started = []
        for place, number in enumerate(chosen):
            where = [f"--address={address}:6379"] if place else as_head
            label = [] if ranks is None else [f"--labels=corral.rank={ranks[place]}"]
            own = [*RAY, "start", *where, f"--node-ip-address={self.hosts[number].address}", kind, *label]
            started.append((number, self.begin(number, [*own, *small], **health_checks)))
        for number, process in started:
            said, _ = process.communicate(timeout=START_S)
            assert process.returncode == 0, f"{self.hosts[number].name}: {said}\n{self.errors.read_text()}"

    def cut(self, host: int) -> None:
        """Pulls the cable."""
        ip("link", "set", self.hosts[host].link, "down")

    def heal(self, host: int) -> None:
        ip("link", "set", self.hosts[host].link, "up")

    def kill(self, host: int) -> None:
        """Ends all processes of the host at once."""
        self.hosts[host].process.kill()
        self.hosts[host].process.wait()

    # --- making them

    def _make_bridge(self) -> str:
        """With the machine itself as .1 of a network that nobody else here has."""
        ip("link", "add", self.bridge, "type", "bridge")
        used = ip("-o", "addr")
        free = [
            net
            for net in (f"10.{random.randint(64, 127)}.{random.randint(0, 255)}" for _ in range(20))
            if f"{net}." not in used
        ]
        ip("addr", "add", f"{free[0]}.1/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        return free[0]

    def _make_host(self, number: int) -> Host:
        name, address, link = f"{self.name}{number + 1}", f"{self.net}.{number + 11}", f"{self.bridge}h{number}"
        ray, hosts, resolver = self.folder / f"ray.{name}", self.folder / f"hosts.{name}", self.folder / "resolv.conf"
        home, state = self.folder / "home", f"/tmp/corral-{os.getuid()}"
        home.mkdir(exist_ok=True)
        ray.mkdir()
        resolver.touch()
        hosts.write_text(self._hosts_file(number))
        script = (
            f"hostname {name}; mount --bind {hosts} /etc/hosts; mount --bind {resolver} /etc/resolv.conf; "
            f"mount -t tmpfs -o size=1g tmpfs /dev/shm; mkdir -p /tmp/ray; mount --bind {ray} /tmp/ray; "
            f"mkdir -p -m 700 {state}; mount -t tmpfs -o size=1g,mode=0700 tmpfs {state}; "
            "exec tini -s -g -- sleep infinity"
        )
        spaces = ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child=KILL", "--mount-proc"]
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "sh", "-c", script])
        host = Host(name, address, link, home, process)
        inside = ["nsenter", "-t", str(host.pid), "-n", "ip"]
        if self.decoys:
            pair = "link add ens1 type veth peer name nowhere"
            wrong = f"addr add {DECOY}.{number + 11}/24 dev ens1"
            for command in (pair, wrong, "link set ens1 up", "link set nowhere up"):
                subprocess.run([*inside, *command.split()], check=True)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        ip("link", "set", link, "master", self.bridge, "up")
        for command in (f"addr add {address}/24 dev eth0", "link set lo up", "link set eth0 up"):
            subprocess.run([*inside, *command.split()], check=True)
        return host

    def _hosts_file(self, own: int) -> str:
        lines = ["127.0.0.1 localhost"]
        for number in range(self.num_hosts):
            loopback = self.loopback_names and number == own
            lines.append(f"{'127.0.1.1' if loopback else f'{self.net}.{number + 11}'} {self.name}{number + 1}")
        return "\n".join(lines) + "\n"


class Driver:
    """A process on a host that calls functions of test modules and sends back what they return, as JSON. It stays, so
    that what is slow to import is imported once."""

    def __init__(self, lab: Lab, host: int, **env: str) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.errors = lab.errors
        self.process = lab.begin(host, [sys.executable, __file__], PYTHONPATH=path, OMP_NUM_THREADS="1", **env)

    def call(self, function: str, **arguments: Any) -> Any:
        """`function`: `module:name`, async."""
        self.begin(function, **arguments)
        return self.result()

    def begin(self, function: str, **arguments: Any) -> None:
        """The test goes on meanwhile, and asks for the `result` later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver has ended: {self.errors.read_text()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def end(self) -> int:
        """Its exit code, in good time."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=within(30))


def serve() -> None:
    """The other side of `Driver`. Answers go to the standard output, and what functions print to the standard error."""
    import asyncio
    import importlib
    import traceback

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            function, arguments = json.loads(line)
            module, name = function.split(":")
            try:
                result = runner.run(getattr(importlib.import_module(module), name)(**arguments))
                answers.write(json.dumps({"result": result}) + "\n")
            except BaseException:
                answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")


def forked(command: Sequence[str]) -> list[str]:
    """The same command, with a Python that forks where it is `corral`."""
    python, places = forking_python(), range(len(command))
    return [python if [*command[i : i + 3]] == CORRAL else command[i] for i in places]


def import_path() -> dict[str, str]:
    """The variable of it for programs on hosts, which have forked workers where this process has them."""
    forked = [RAY_PYTHON] if RAY_PYTHON in sys.path else []
    return {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *forked])}


def skip_unless_possible() -> None:
    if missing := [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]:
        pytest.skip(f"hosts out of namespaces need {', '.join(missing)}")
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"hosts out of namespaces are not possible here: {tried.stderr.strip()}")


def remove_old_bridges() -> None:
    """Of processes that were killed."""
    for name, pid in set(re.findall(r"\b(crl([0-9a-f]+)x\d+)\b", ip("-o", "link"))):
        if not Path("/proc", str(int(pid, 16))).exists():
            subprocess.run(["ip", "link", "del", name], capture_output=True)


def first_child(process: "subprocess.Popen[bytes]") -> int:
    """The host's first process, once it is set up."""
    deadline = time.monotonic() + within(10)
    while time.monotonic() < deadline and process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "tini":
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("a host could not be made")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    serve()
