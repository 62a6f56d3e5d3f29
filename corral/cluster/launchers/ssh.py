"""ssh: from this machine to each line of a hosts file, brings a cluster up, trains on its head, and takes it down.

The head is first, then the others at the same time; each step has a deadline, and its error names the hosts where it
failed. The token goes through ssh's standard input into a file that only its owner can read: it is on no command line,
here or there.
"""

import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from corral.cluster.launchers.launch_spec import LaunchSpec
from corral.recipe.errors import RunError, UserError

HOST_LINE = re.compile(r"(?:(?P<user>\w[\w.-]*)@)?(?P<host>\w[\w.-]*)(?::(?P<port>\d{1,5}))?", re.ASCII)
CONNECTION = {
    "BatchMode": "yes",  # a question nobody answers is a wait without end
    "ConnectTimeout": "15",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
}
PREPARE_S = 60.0
DOWN_S = 90.0
SSH_FAILED = 255


@dataclass(frozen=True)
class SshHost:
    name: str  # as ssh and the other hosts know it
    user: str | None = None
    port: int | None = None
    devices: int | None = None

    @property
    def target(self) -> str:
        return self.name if self.user is None else f"{self.user}@{self.name}"


def read_hosts(path: Path) -> list[SshHost]:
    """One per line: `[user@]host[:port] [devices=N]`; `#` begins a comment. The first is the head."""
    hosts: list[SshHost] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}:{number}"
        found = HOST_LINE.fullmatch(words[0])
        if found is None:
            raise UserError(f"{where}: {words[0]!r} is not [user@]host[:port]")
        devices = None
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key != "devices" or not value.isdecimal() or int(value) == 0:
                raise UserError(f"{where}: {word!r} is not devices=N, the only thing that may follow a host")
            devices = int(value)
        port = None if found["port"] is None else int(found["port"])
        if port is not None and not 0 < port < 65536:
            raise UserError(f"{where}: {port} is not a port")
        host = SshHost(found["host"], found["user"], port, devices)
        if any((other.name, other.port) == (host.name, host.port) for other in hosts):
            raise UserError(f"{where}: {words[0]} is there twice")
        hosts.append(host)
    if not hosts:
        raise UserError(f"{path} names no host")
    return hosts


@dataclass(frozen=True)
class RemoteCommand:
    """A line of shell for a host."""

    host: SshHost
    line: str
    what: str  # for messages
    timeout_s: float | None = None
    stdin: str | None = None

    def command(self, config: Path | None, is_terminal: bool = False) -> list[str]:
        """`is_terminal`: there is one, through which Ctrl-C reaches what runs on the host."""
        options = ["-t"] if is_terminal else []
        options += [word for name, value in CONNECTION.items() for word in ("-o", f"{name}={value}")]
        options += [] if config is None else ["-F", str(config)]
        options += [] if self.host.port is None else ["-p", str(self.host.port)]
        # Whatever login shell the user has there, it only has to start `sh`.
        return ["ssh", *options, "--", self.host.target, shlex.join(["sh", "-c", self.line])]


@dataclass(frozen=True)
class SshCluster:
    """Commands that start, use and stop a cluster. `folder`: on the hosts, where relative paths begin. `head`: the
    first host's name for the others. `program`: `corral` on the hosts. `config`: for ssh, instead of the user's."""

    spec: LaunchSpec
    hosts: Sequence[SshHost]
    id: str  # that no other cluster has, so that none is mistaken for this one
    head: str
    folder: Path
    port: int = 6379
    program: str = "corral"
    config: Path | None = None
    start_timeout_s: int = 600

    def prepare(self, token: str | None = None) -> list[RemoteCommand]:
        """Commands that store the token, and check that the hosts have what is needed."""
        program, recipe = shlex.quote(self.program), shlex.quote(str(self.spec.file))
        has_program = or_else(
            f"command -v {program} > /dev/null", f"{self.program} is not there; name it with --corral"
        )
        has_recipe = or_else(f"test -r {recipe}", f"there is no {self.spec.file} in {self.folder}")
        line = f'umask 077 && mkdir -p "$HOME/.corral" && cat > {self._token} && {self._cd} && {has_program}'
        lines = [f"{line} && {has_recipe}", *([line] * (len(self.hosts) - 1))]
        pairs = zip(self.hosts, lines, strict=True)
        return [RemoteCommand(host, line, "getting ready", PREPARE_S, token) for host, line in pairs]

    def check(self) -> RemoteCommand:
        timeout = ["--timeout", str(self.start_timeout_s)]
        num_devices = sum(host.devices or self.spec.devices_per_node for host in self.hosts)
        words = ["check", str(num_devices), "--nodes", str(len(self.hosts)), *timeout]
        return RemoteCommand(self.hosts[0], self._on_host(words), "corral check", self.start_timeout_s + PREPARE_S)

    def train(self) -> RemoteCommand:
        return RemoteCommand(self.hosts[0], self._on_host(self.spec.train_command[1:]), "corral train")

    def stop(self, host: SshHost) -> RemoteCommand:
        line = f"{self.remove_token(host).line}; {self._on_host(['down', '--port', str(self.port), '--force'])}"
        return RemoteCommand(host, line, "corral down", DOWN_S)

    def remove_token(self, host: SshHost) -> RemoteCommand:
        """Command for a host that did not come up."""
        return RemoteCommand(host, f"rm -f {self._token}", "removing the token", PREPARE_S)

    def up(self, rank: int) -> RemoteCommand:
        host = self.hosts[rank]
        who = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "MASTER_ADDR": self.head,
            "MASTER_PORT": str(self.port),
        }
        words = ["up", "--no-wait", "--id", self.id, "--timeout", str(self.start_timeout_s)]
        slots = self.spec.devices_per_node if self.spec.accelerator == "none" else None
        if (devices := host.devices or slots) is not None:
            words += ["--devices", str(devices)]
        line = f"{self._on_host(words, who)} --token-file {self._token}"
        return RemoteCommand(host, line, "corral up", self.start_timeout_s + PREPARE_S)

    def _on_host(self, words: Sequence[str], variables: dict[str, str] | None = None) -> str:
        settings = [f"{name}={value}" for name, value in (variables or {}).items()]
        command = shlex.join([*(["env", *settings] if settings else []), self.program, *words])
        return f"{self._cd} && {command}"

    @property
    def _cd(self) -> str:
        return f"cd {shlex.quote(str(self.folder))}"

    @property
    def _token(self) -> str:
        """Path of the token for a shell on the host. It belongs to this launch alone: the user's own token stays."""
        return f'"$HOME/.corral/{self.id}.token"'


def or_else(line: str, complaint: str) -> str:
    return f"{{ {line} || {{ echo {shlex.quote(complaint)} >&2; exit 1; }}; }}"


def run_over_ssh(cluster: SshCluster, report: Callable[[str], None], *, is_kept: bool = False) -> None:
    """Starts the cluster, trains on it, and takes the hosts that came up down however it ends, unless they are kept."""
    token = secrets.token_hex(32)
    up: list[SshHost] = []
    try:
        run_together(cluster.prepare(token), cluster.config)
        for ranks in (range(1), range(1, len(cluster.hosts))):
            group = [cluster.up(rank) for rank in ranks]
            for remote in group:
                report(f"{remote.host.target}: {remote.what}")
            up += [remote.host for remote in group]
            run_together(group, cluster.config, on_refusal=up.remove)
        for remote in (cluster.check(), cluster.train()):
            report(f"{remote.host.target}: {remote.what}")
            run_shown(remote, cluster.config)
    finally:
        if is_kept:
            report("the cluster is kept; end it with:")
            for host in up:
                report(shlex.join(cluster.stop(host).command(cluster.config)))
        else:
            if up:
                report(f"{', '.join(host.target for host in up)}: corral down")
            commands = [cluster.stop(host) if host in up else cluster.remove_token(host) for host in cluster.hosts]
            try:
                run_together(commands, cluster.config)
            except RunError as error:  # must not hide the error that is being raised
                report(str(error))


def run_together(
    remotes: Sequence[RemoteCommand], config: Path | None, on_refusal: Callable[[SshHost], object] = lambda host: None
) -> None:
    """Runs all at the same time, waits for all, and raises with those that failed. `on_refusal`: called with hosts
    where the command itself failed and so left nothing behind; one that was cut off may have."""
    failed = []
    with ExitStack() as cleanup:
        running = [RunningCommand(remote, config, cleanup) for remote in remotes]
        for one in running:
            code, reason = one.result()
            if code != 0:
                failed.append(f"{one.remote.host.target}: {one.remote.what} failed: {reason}")
            if code not in (0, None, SSH_FAILED):
                on_refusal(one.remote.host)
    if failed:
        raise RunError("\n".join(failed))


class RunningCommand:
    """A command that runs on a host; it is ended with the cleanup, at the latest."""

    def __init__(self, remote: RemoteCommand, config: Path | None, cleanup: ExitStack) -> None:
        self.remote = remote
        self.errors = cleanup.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
        self.deadline = None if remote.timeout_s is None else time.monotonic() + remote.timeout_s
        self.process = subprocess.Popen(
            remote.command(config), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.errors, text=True
        )
        cleanup.callback(self.process.wait)
        cleanup.callback(self.process.kill)
        with suppress(BrokenPipeError), cast(IO[str], self.process.stdin) as stdin:
            stdin.write(remote.stdin or "")

    def result(self) -> tuple[int | None, str]:
        """Exit code, and the last error that was printed. None: it was cut off by its deadline."""
        try:
            code = self.process.wait(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None, f"nothing within {self.remote.timeout_s:g} s"
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return code, (errors or lines or [f"exit code {code}"])[-1].removeprefix("error: ")


def run_shown(remote: RemoteCommand, config: Path | None) -> None:
    """Runs a command with its output on this terminal."""
    where = f"{remote.host.target}: {remote.what}"
    try:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        stdin = None if is_terminal else subprocess.DEVNULL
        code = subprocess.run(remote.command(config, is_terminal), stdin=stdin, timeout=remote.timeout_s).returncode
    except subprocess.TimeoutExpired:
        raise RunError(f"{where} did not end within {remote.timeout_s:g} s") from None
    if code:
        why = "the connection was lost" if code == SSH_FAILED else f"exit code {code}"
        raise RunError(f"{where} failed: {why}")
