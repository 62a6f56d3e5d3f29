"""docker and podman: one container per node, in which `corral up` stays in the foreground.

Commands are lists of arguments for the engine. No shell reads them, and no value of a secret is in them: a secret is
passed by the name of its variable, or is a file that the container may read. Also the script that prepares a machine
for containers with GPUs.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from corral.cluster.launchers.launch_spec import Accelerator, LaunchSpec, check_names_only
from corral.recipe.errors import UserError

ContainerEngine = Literal["docker", "podman"]

DEVICES: dict[tuple[ContainerEngine, Accelerator], tuple[str, ...]] = {
    ("docker", "nvidia"): ("--gpus", "all"),
    # The devices come from the host's CDI file (`nvidia-ctk cdi generate`); with labels, SELinux would not open them.
    ("podman", "nvidia"): ("--device", "nvidia.com/gpu=all", "--security-opt", "label=disable"),
}
AMD = (
    *("--device", "/dev/kfd", "--device", "/dev/dri"),
    *("--group-add", "video", "--group-add", "render"),
    # RCCL reads the memory of the other ranks' processes, which the default filter of system calls forbids.
    *("--cap-add", "SYS_PTRACE", "--security-opt", "seccomp=unconfined"),
)
INFINIBAND = ("--device", "/dev/infiniband", "--cap-add", "IPC_LOCK")
LIMITS = (
    # Ray keeps many connections per worker; NCCL, and RDMA even more so, pins memory; the stack is NVIDIA's advice.
    *("--ulimit", "nofile=65536:65536"),
    *("--ulimit", "memlock=-1:-1"),
    *("--ulimit", "stack=67108864:67108864"),
)
TOKEN = "/run/corral/token"  # where a container finds the token, if that comes as a file
PackageManager = Literal["apt", "yum"]
PARTS = Path(__file__).with_name("host_setup.sh")
SOURCES = {
    "docker": "https://download.docker.com/linux",
    "nvidia": "https://nvidia.github.io/libnvidia-container",
}
"""Where the makers publish their packages; the lists of packages begin there."""


def run_command(
    engine: ContainerEngine,
    accelerator: Accelerator,
    image: str,
    *,
    folder: Path,
    mode: Sequence[str] = ("--detach",),
    shm: str = "10g",
    mounts: Sequence[str] = (),
    environment: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    network: str = "host",
    infiniband: bool = False,
) -> list[str]:
    """`docker run`, up to and including the image; the command comes after it.

    `folder`: in which the command runs. `mode`: options that come first. `mounts`: `/here`, `/here:/there` or
    `/here:/there:ro`. `environment`: names of variables, whose values the engine takes from the environment of whoever
    runs this. `settings`: variables with values that everybody may see.
    """
    check_names_only(environment)
    if image.startswith("-"):
        raise UserError(f"--image {image} is not the name of an image")
    flags = [engine, "run", *mode]
    # Ray's ports are many and chosen at run time, so publishing some of them is no use: the host's network, or one that
    # the containers have among themselves.
    flags += ["--network", network]
    # PID 1 must collect processes that have ended, or they pile up and Ray waits for them when it stops. `--init` puts
    # an init there (docker brings its own, podman takes the package catatonit), which also passes SIGTERM on.
    flags += ["--init"]
    # A /dev/shm of the container's own, with a size: Ray's object store and NCCL live there. With `--ipc=host` it would
    # be the host's, and docker ignores `--shm-size` then without a word.
    flags += ["--shm-size", shm]
    if engine == "podman":
        flags += ["--pids-limit", "-1"]  # docker has no limit; podman's is 2048, threads included
    if accelerator != "none":
        flags += [*LIMITS, *(AMD if accelerator == "amd" else DEVICES[engine, accelerator])]
    if infiniband:
        flags += INFINIBAND
    for mount in mounts:
        flags += ["--mount", mount_flag(mount)]
    for variable, value in (settings or {}).items():
        flags += ["--env", f"{variable}={value}"]
    for variable in environment:
        flags += ["--env", variable]
    return [*flags, "--workdir", str(folder), image]


def mount_flag(mount: str) -> str:
    """Value of `--mount`; with `--volume` docker would make an empty folder out of a path that is not there."""
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    if not source.startswith("/") or not (target or source).startswith("/") or mode not in ("", "ro", "rw"):
        raise UserError(f"--mount {mount} is not /here, /here:/there or /here:/there:ro")
    fields = ["type=bind", f"source={source}", f"target={target or source}", *(["readonly"] if mode == "ro" else [])]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)  # that is how the engines read it, commas and quotes included
    return line.getvalue()


@dataclass(frozen=True)
class ContainerStep:
    """A command, and where it must run. `undo` removes what it makes; `made` succeeds if that exists."""

    where: str
    command: Sequence[str]
    undo: Sequence[str] | None = None
    made: Sequence[str] | None = None


@dataclass(frozen=True)
class ContainerCluster:
    """`head`: the first node's name for the others. `is_local`: all nodes are containers of this machine, on a network
    of their own. `folder`: seen by every container under the same path; commands run in it."""

    engine: ContainerEngine
    spec: LaunchSpec
    image: str
    name: str
    head: str | None
    folder: Path
    token_file: Path | None  # None: the token is in RAY_AUTH_TOKEN, which `environment` names
    shm: str = "10g"
    mounts: Sequence[str] = ()
    environment: Sequence[str] = ()
    port: int = 6379
    infiniband: bool = False
    is_local: bool = False

    def bring_up(self) -> list[ContainerStep]:
        """Steps that start the head and wait for it, then the other nodes, in any order, and wait for them."""
        commands = ([self.engine, "network", what, self.name] for what in ("create", "rm", "inspect"))
        network = [ContainerStep("on this machine", *commands)] if self.is_local else []
        workers = [self._run(rank) for rank in range(1, self.spec.num_nodes)]
        all_nodes = [self._check(self.spec.num_nodes)] if workers else []
        return [*network, self._run(0), self._check(1), *workers, *all_nodes]

    def train(self, is_terminal: bool = False) -> ContainerStep:
        """`is_terminal`: there is one, through which Ctrl-C reaches the training."""
        options = ["--interactive", "--tty"] if is_terminal else []
        return ContainerStep(self._where(0), [*self._exec(*options), *self.spec.train_command])

    def container(self, rank: int) -> str:
        return f"{self.name}-{rank}" if self.is_local else self.name

    def logs(self, rank: int) -> list[str]:
        return [self.engine, "logs", "--tail", "20", self.container(rank)]

    def _run(self, rank: int) -> ContainerStep:
        settings = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.spec.num_nodes),
            **({} if self.head is None else {"MASTER_ADDR": self.head}),
            "MASTER_PORT": str(self.port),
        }
        recipe = (self.folder / self.spec.file).resolve()
        elsewhere = [] if recipe.is_relative_to(self.folder.resolve()) else [f"{recipe.parent}::ro"]
        mounts = [str(self.folder), *elsewhere, *self.mounts]
        if self.token_file is not None:
            mounts.append(f"{self.token_file}:{TOKEN}:ro")
            settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": TOKEN}
        name = self.container(rank)
        command = run_command(
            self.engine,
            self.spec.accelerator,
            self.image,
            folder=self.folder,
            mode=("--detach", "--name", name),
            shm=self.shm,
            mounts=mounts,
            environment=self.environment,
            settings=settings,
            network=self.name if self.is_local else "host",
            infiniband=self.infiniband,
        )
        undo, made = [self.engine, "rm", "--force", name], [self.engine, "container", "inspect", name]
        return ContainerStep(self._where(rank), [*command, *self.spec.up_command("--block")], undo, made)

    def _check(self, num_nodes: int) -> ContainerStep:
        num_devices = str(num_nodes * self.spec.devices_per_node)
        check = ["corral", "check", num_devices, "--nodes", str(num_nodes)]
        return ContainerStep(self._where(0), [*self._exec(), *check])

    def _exec(self, *options: str) -> list[str]:
        return [self.engine, "exec", *options, self.container(0)]

    def _where(self, rank: int) -> str:
        if self.is_local:
            return "on this machine"
        if self.spec.num_nodes == 1:
            return "on the node"
        return f"on the head, {self.head}" if rank == 0 else f"on the node with rank {rank}"


# --- the script that prepares a machine. It is printed, not run: it changes packages and a daemon of the machine, as
# root, and who does that should read it first. Every step can be repeated.


def host_setup(family: PackageManager, is_amd: bool, sources: Mapping[str, str | None] = MappingProxyType({})) -> str:
    """`sources`: addresses of mirrors, instead of those in `SOURCES`."""
    pieces = re.split(r"^#@ (\w+)\n", PARTS.read_text(), flags=re.MULTILINE)
    parts = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    gpu = ["amd", "amd_check"] if is_amd else [f"nvidia_{family}", "nvidia_check"]
    text = "\n".join(parts[name] for name in ["start", f"docker_{family}", "daemon", *gpu])
    for name, address in SOURCES.items():
        text = text.replace(f"@{name}@", check_source(name, sources.get(name) or address))
    return text


def check_source(name: str, address: str) -> str:
    """It becomes part of a script that root runs."""
    if re.fullmatch(r"https?://[\w.:/%~-]+", address) is None:
        raise UserError(f"the source of {name}, {address}, is not the address of a folder, such as {SOURCES[name]}")
    return address.rstrip("/")
