"""docker and podman: one container per node, in which `corral up` stays in the foreground.

What is made here are lists of words for the engine's command line. No shell reads them, and no value of a secret is in
them: a secret is passed by the name of its variable, or is a file that the container may read.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from corral.cluster.launchers.base import Accelerator, Work
from corral.recipe.errors import UserError

Engine = Literal["docker", "podman"]

DEVICES: dict[tuple[Engine, Accelerator], tuple[str, ...]] = {
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
TOKEN = "/run/corral/token"
"""Where a container finds the token, if that comes as a file."""


def container_flags(
    engine: Engine,
    work: Work,
    image: str,
    *,
    name: str,
    shm: str = "10g",
    mounts: Sequence[str] = (),
    environment: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    network: str = "host",
    infiniband: bool = False,
) -> list[str]:
    """`docker run` of a container in the background, up to and including the image; the command comes after it.

    `mounts`: `/here`, `/here:/there` or `/here:/there:ro`. `environment`: names of variables, whose values the engine
    takes from the environment of whoever runs this. `settings`: variables with values that everybody may see.
    """
    if image.startswith("-"):
        raise UserError(f"--image {image} is not the name of an image")
    flags = [engine, "run", "--detach", "--name", name]
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
    if work.accelerator != "none":
        flags += [*LIMITS, *(AMD if work.accelerator == "amd" else DEVICES[engine, work.accelerator])]
    if infiniband:
        flags += INFINIBAND
    for mount in mounts:
        flags += ["--mount", mount_flag(mount)]
    for variable, value in (settings or {}).items():
        flags += ["--env", f"{variable}={value}"]
    for variable in environment:
        if "=" in variable:
            where = variable.partition("=")[0]
            raise UserError(f"--env {where}=...: give the name alone; its value is taken from the environment")
        flags += ["--env", variable]
    return [*flags, image]


def mount_flag(mount: str) -> str:
    """In the form `--mount`, because with `--volume` docker makes an empty folder out of a path that is not there."""
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    if not source.startswith("/") or not (target or source).startswith("/") or mode not in ("", "ro", "rw"):
        raise UserError(f"--mount {mount} is not /here, /here:/there or /here:/there:ro")
    fields = ["type=bind", f"source={source}", f"target={target or source}", *(["readonly"] if mode == "ro" else [])]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)  # that is how the engines read it, commas and quotes included
    return line.getvalue()


@dataclass(frozen=True)
class Step:
    """A command, and where it belongs. `undo`: the command that removes what this one makes. `made`: one that succeeds
    if it is there."""

    where: str
    command: Sequence[str]
    undo: Sequence[str] | None = None
    made: Sequence[str] | None = None


@dataclass(frozen=True)
class Containers:
    """A cluster of containers. `head`: what the other nodes call the first one, if there are any. `is_local`: all nodes
    are containers of this machine, on a network of their own. `folder`: seen by every container under the same path;
    commands run in it."""

    engine: Engine
    work: Work
    image: str
    name: str
    head: str | None
    folder: Path
    token_file: Path | None
    """None: the token is in RAY_AUTH_TOKEN, which `environment` names."""
    shm: str = "10g"
    mounts: Sequence[str] = ()
    environment: Sequence[str] = ()
    port: int = 6379
    infiniband: bool = False
    is_local: bool = False

    def bring_up(self) -> list[Step]:
        """The head, which is awaited; the others, in any order, which are awaited too."""
        network = [self._network()] if self.is_local else []
        workers = [self._run(rank) for rank in range(1, self.work.num_nodes)]
        return [
            *network,
            self._run(0),
            self._check(1),
            *workers,
            *([self._check(self.work.num_nodes)] if workers else []),
        ]

    def train(self, is_terminal: bool = False) -> Step:
        """`is_terminal`: there is one, through which Ctrl-C reaches the training."""
        return Step(self._place(0), [*self._inside(0, is_terminal), *self.work.train_command])

    def container(self, rank: int) -> str:
        return f"{self.name}-{rank}" if self.is_local else self.name

    def logs(self, rank: int) -> list[str]:
        return [self.engine, "logs", "--tail", "20", self.container(rank)]

    def _network(self) -> Step:
        commands = ([self.engine, "network", what, self.name] for what in ("create", "rm", "inspect"))
        return Step("on this machine", *commands)

    def _run(self, rank: int) -> Step:
        settings = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.work.num_nodes),
            **({} if self.head is None else {"MASTER_ADDR": self.head}),
            "MASTER_PORT": str(self.port),
        }
        recipe = (self.folder / self.work.file).resolve()
        elsewhere = [] if recipe.is_relative_to(self.folder.resolve()) else [f"{recipe.parent}::ro"]
        mounts = [str(self.folder), *elsewhere, *self.mounts]
        if self.token_file is not None:
            mounts.append(f"{self.token_file}:{TOKEN}:ro")
            settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": TOKEN}
        flags = container_flags(
            self.engine,
            self.work,
            self.image,
            name=self.container(rank),
            shm=self.shm,
            mounts=mounts,
            environment=self.environment,
            settings=settings,
            network=self.name if self.is_local else "host",
            infiniband=self.infiniband,
        )
        command = [*flags[:-1], "--workdir", str(self.folder), flags[-1], *self._up()]
        name = self.container(rank)
        undo, made = [self.engine, "rm", "--force", name], [self.engine, "container", "inspect", name]
        return Step(self._place(rank), command, undo, made)

    def _up(self) -> list[str]:
        devices = ["--devices", str(self.work.devices_per_node)] if self.work.accelerator == "none" else []
        return ["corral", "up", "--block", *devices]

    def _check(self, num_nodes: int) -> Step:
        num_devices = str(num_nodes * self.work.devices_per_node)
        return Step(self._place(0), [*self._inside(0), "corral", "check", num_devices, "--nodes", str(num_nodes)])

    def _inside(self, rank: int, is_terminal: bool = False) -> list[str]:
        return [self.engine, "exec", *(["--interactive", "--tty"] if is_terminal else []), self.container(rank)]

    def _place(self, rank: int) -> str:
        if self.is_local:
            return "on this machine"
        if self.work.num_nodes == 1:
            return "on the node"
        return f"on the head, {self.head}" if rank == 0 else f"on the node with rank {rank}"
