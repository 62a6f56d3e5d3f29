"""podman with images, containers and settings of its own, for tests of what is started in containers.

No image can be pulled where tests run. So the image is a few links and files, and containers see the machine's own
programs and Python, read-only: the rest of a container, its processes, network, memory and root, is real. What tests
that were killed have left behind is removed by the next ones.
"""

import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
from deadlines import within

REPOSITORY = Path(__file__).parents[1]
IMAGE = "localhost/corral-test"
TOOLS = {
    "podman": "podman",
    "runc": "runc",
    "netavark": "netavark",
    "aardvark-dns": "aardvark-dns",
    "catatonit": "catatonit",
    "iptables": "iptables",
}
HELPERS = (Path("/usr/lib/podman"), Path("/usr/libexec/podman"), Path("/usr/sbin"))
"""Where podman's own programs are, which are on nobody's PATH."""
FONTS = Path("~/.cache/matplotlib").expanduser()
SETTINGS = """\
[containers]
default_ulimits = ["nofile={nofile}:{nofile}", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{folder}/graph"
runroot = "{folder}/run"
"""
CORRAL = """\
#!/bin/sh
exec {python} -m corral.cli.main "$@"
"""


class Podman:
    def __init__(self) -> None:
        skip_unless_possible()
        remove_old()
        self.folder = Path(tempfile.mkdtemp(prefix=f"podman-{os.getpid()}-"))
        self.env = environment(self.folder)
        settings, storage = self.folder / "containers.conf", self.folder / "storage.conf"
        # A machine may not let its root raise limits, and podman's own are higher than what it allows.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        settings.write_text(SETTINGS.format(nofile=most, folder=self.folder))
        storage.write_text(STORAGE.format(folder=self.folder))
        self.service: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._make_image()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.service is not None:
            self.service.terminate()
            self.service.wait(timeout=within(20))
        remove(self.folder)

    def run(self, *words: str, timeout_s: float = 60, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return self.command(["podman", *words], timeout_s=timeout_s, check=check)

    def command(
        self, command: Sequence[str], *, timeout_s: float = 60, check: bool = True, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        timeout_s = within(timeout_s)
        result = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
        if check and result.returncode:
            raise AssertionError(f"{' '.join(command)} failed\n{result.stdout}\n{result.stderr}")
        return result

    @property
    def mounts(self) -> list[str]:
        """What containers must see of this machine for `corral` to run in them."""
        paths = {"/usr", sys.prefix, sys.base_prefix, str(REPOSITORY), *([str(FONTS)] if FONTS.is_dir() else [])}
        seen = [path for path in sorted(paths) if path == "/usr" or not path.startswith("/usr/")]
        return [f"{path}:{path}:ro" for path in seen]

    def docker_host(self) -> str:
        """Where podman answers docker's client."""
        socket = self.folder / "docker.sock"
        if self.service is None:
            self.service = subprocess.Popen(
                ["podman", "system", "service", "--time=0", f"unix://{socket}"], env=self.env
            )
            deadline = time.monotonic() + within(30)
            while not socket.exists():
                assert self.service.poll() is None, "podman's service has ended"
                assert time.monotonic() < deadline, "podman's service did not start"
                time.sleep(0.02)
        return f"unix://{socket}"

    def _make_image(self) -> None:
        file = self.folder / "image.tar"
        with tarfile.open(file, "w") as tar:
            for name in ("proc", "sys", "dev", "run", "etc", "root", "tmp", "var/tmp", "usr", "corral/bin"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
                tar.addfile(entry)
            for link in ("bin", "sbin", "lib", "lib64"):
                if Path("/", link).is_symlink():
                    tar.add(f"/{link}", link)
            for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache", "localtime"):
                if Path("/etc", name).exists():
                    tar.add(f"/etc/{name}", f"etc/{name}")
            program = CORRAL.format(python=sys.executable).encode()
            entry = tarfile.TarInfo("corral/bin/corral")
            entry.size, entry.mode = len(program), 0o755
            tar.addfile(entry, io.BytesIO(program))
        variables = {
            "PATH": f"/corral/bin:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/usr/sbin",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MPLCONFIGDIR": str(FONTS),
            "OMP_NUM_THREADS": "1",
        }
        changes = [word for name, value in variables.items() for word in ("--change", f"ENV {name}={value}")]
        self.run("import", *changes, str(file), IMAGE)


def environment(folder: Path) -> dict[str, str]:
    """Of a podman that keeps all it has below that folder."""
    files = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
    return {**os.environ, **{name: str(folder / file) for name, file in files.items()}}


def remove(folder: Path) -> None:
    for words in (["rm", "--force", "--all", "--time", "0"], ["network", "prune", "--force"]):
        subprocess.run(["podman", *words], env=environment(folder), capture_output=True, timeout=within(60))
    subprocess.run(["umount", str(folder / "graph" / "overlay")], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_old() -> None:
    for folder in Path(tempfile.gettempdir()).glob("podman-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdecimal() and not Path("/proc", pid).exists() and (folder / "storage.conf").exists():
            remove(folder)


def skip_unless_possible() -> None:
    if os.getuid() != 0:
        pytest.skip("containers are started as root")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, HELPERS)])
    if missing := [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool, path=path) is None]:
        pytest.skip(f"containers need {', '.join(missing)}")
