"""`corral launch ssh`: the hosts file, the lines, and real hosts with real sshds."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import pytest
from deadlines import wait_until, within
from hosts import CORRAL, Lab
from launching import HOSTILE, work
from runs import steps_of, write_recipe
from ssh_hosts import REPOSITORY, SshHosts

from corral.cluster.launchers.ssh import RemoteCommand, SshCluster, SshHost, read_hosts
from corral.recipe.errors import UserError

RUN_S = 240


# --- the hosts file


def hosts_in(folder: Path, text: str) -> list[SshHost]:
    file = folder / "hosts"
    file.write_text(text)
    return read_hosts(file)


def test_a_hosts_file_has_users_ports_devices_and_comments(tmp_path):
    text = "# the head\nroot@gpu1:2222 devices=8\n\n10.0.0.2   # no user\n  a.b@gpu-3.cluster.local devices=4\n"
    assert hosts_in(tmp_path, text) == [
        SshHost("gpu1", "root", 2222, 8),
        SshHost("10.0.0.2"),
        SshHost("gpu-3.cluster.local", "a.b", None, 4),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-oProxyCommand=reboot", "is not [user@]host[:port]"),
        ("gpu1;reboot", "is not [user@]host[:port]"),
        ("$(reboot)@gpu1", "is not [user@]host[:port]"),
        ("gpu1:99999", "is not a port"),
        ("gpu1 devices=many", "devices=N"),
        ("gpu1 slots=8", "devices=N"),
        ("gpu0", "there twice"),
    ],
)
def test_a_line_that_is_no_host_is_named(tmp_path, line, said):
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        hosts_in(tmp_path, f"gpu0\n{line}\n")
    assert f"{tmp_path}/hosts:2: " in str(refused.value)


def test_a_file_without_hosts_is_refused(tmp_path):
    with pytest.raises(UserError, match="names no host"):
        hosts_in(tmp_path, "# nothing\n")


# --- the lines


def cluster(recipes: Path, *overrides: str, **options: Any) -> SshCluster:
    hosts = [SshHost("gpu1", "me", 2222), SshHost("gpu2", None, None, 4)]
    given = {"id": "tiny-1234", "head": "gpu1", "folder": recipes}
    return SshCluster(work(recipes, *overrides), hosts, **{**given, **options})


def every(of: SshCluster) -> list[RemoteCommand]:
    steps = [*of.prepare("0123abcd"), *map(of.up, range(len(of.hosts))), of.check(), of.train()]
    return [*steps, *map(of.stop, of.hosts), *map(of.remove_token, of.hosts)]


def test_the_token_is_on_no_command_line(tmp_path):
    of = cluster(tmp_path)
    assert not any("0123abcd" in word for remote in every(of) for word in remote.command(None))
    assert all(remote.stdin == "0123abcd" for remote in of.prepare("0123abcd"))


def test_the_token_arrives_in_a_file_for_its_owner_alone(tmp_path):
    """The line, in a shell of this machine."""
    home, program = tmp_path / "home", tmp_path / "corral"
    home.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    remote = cluster(tmp_path, program=str(program)).prepare("0123abcd")[0]
    env = {**os.environ, "HOME": str(home)}
    subprocess.run(shlex.split(remote.command(None)[-1]), input=remote.stdin, env=env, text=True, check=True)
    (file,) = (home / ".corral").iterdir()
    assert file.read_text() == "0123abcd"
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("program", "file", "said"), [("corrral", "recipe.yaml", "corrral"), ("sh", "x.yaml", "x.yaml")]
)
def test_what_is_missing_on_a_host_is_named(tmp_path, program, file, said):
    of = cluster(tmp_path, program=program)
    if file != "recipe.yaml":
        (tmp_path / "recipe.yaml").rename(tmp_path / file)
        said = "recipe.yaml"
    env = {**os.environ, "HOME": str(tmp_path)}
    line = shlex.split(of.prepare("0123abcd")[0].command(None)[-1])
    result = subprocess.run(line, input="x", env=env, capture_output=True, text=True)
    assert result.returncode == 1
    assert said in result.stderr


def test_no_question_is_asked_and_no_wait_is_without_end(tmp_path):
    of = cluster(tmp_path)
    for remote in every(of):
        command = remote.command(None)
        assert {"BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15"} <= set(command)
        assert remote.timeout_s is not None or remote == of.train()


def test_hosts_are_told_who_they_are(tmp_path):
    head, worker = map(cluster(tmp_path).up, range(2))
    assert head.command(None)[-2] == "me@gpu1"
    assert "-p 2222 -- me@gpu1" in " ".join(head.command(None))
    assert "RANK=0 WORLD_SIZE=2 MASTER_ADDR=gpu1 MASTER_PORT=6379 corral up" in head.line
    assert "RANK=1 WORLD_SIZE=2" in worker.line
    assert "--devices 4" in worker.line
    assert cluster(tmp_path).check().line.endswith("corral check 12 --nodes 2 --timeout 600")


def test_what_the_recipe_says_is_text_for_the_remote_shell(tmp_path):
    """Through two shells, as with ssh: the login shell there, and `sh` that it starts."""
    folder = tmp_path / "a; touch spilt; $(touch spilt)"
    folder.mkdir()
    program = tmp_path / "say"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$PWD" "$@"\n')
    program.chmod(0o755)
    of = cluster(tmp_path, HOSTILE, folder=folder, program=str(program))
    line = of.train().command(None)[-1]
    said = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert said.split("\0")[:-1] == [str(folder), *of.spec.train_command[1:]]
    assert HOSTILE in said
    assert not list(tmp_path.rglob("spilt"))


# --- real hosts


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2) as made:
        yield made


@pytest.fixture(scope="module")
def ssh(lab: Lab) -> SshHosts:
    return SshHosts(lab)


def begin(ssh: SshHosts, folder: Path, *, hosts: str | None = None, program: Path | None = None) -> Popen[str]:
    """`program`: instead of `corral`."""
    (folder / "hosts").write_text(hosts or "".join(f"{host.address} devices=1\n" for host in ssh.lab.hosts))
    there = ["--hosts", "hosts", "--corral", str(program or ssh.program), "--ssh-config", str(ssh.config)]
    command = [*CORRAL, "launch", "ssh", "recipe.yaml", "cluster.nodes=2", *there, "--accelerator", "none", "--go"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return Popen(command, cwd=folder, env=env, stdout=PIPE, stderr=PIPE, stdin=DEVNULL, text=True)


def end(process: Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=within(RUN_S))
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def is_up(lab: Lab, host: int) -> bool:
    return lab.run(host, ["pgrep", "raylet"], check=False).returncode == 0


def tokens(lab: Lab) -> list[Path]:
    return list((lab.hosts[0].home / ".corral").glob("*.token"))


@pytest.mark.core
@pytest.mark.lab
@pytest.mark.xdist_group("ssh")
def test_a_cluster_comes_up_over_ssh_trains_and_is_taken_down(lab, ssh, tmp_path, tiny_model):
    write_recipe(tmp_path, tiny_model)
    code, stdout, stderr = end(begin(ssh, tmp_path))
    assert code == 0, f"{stdout}\n{stderr}\n{lab.errors.read_text()}"
    assert "2 devices on 2 nodes" in stdout
    assert len(steps_of(tmp_path / "runs" / "tiny")) == 2
    assert not any(is_up(lab, host) for host in range(2))
    assert tokens(lab) == []


@pytest.mark.lab
@pytest.mark.xdist_group("ssh")
def test_a_host_that_cannot_be_reached_is_named_before_anything_is_started(lab, ssh, tmp_path, tiny_model):
    write_recipe(tmp_path, tiny_model)
    first, second = (host.address for host in lab.hosts)
    code, _, stderr = end(begin(ssh, tmp_path, hosts=f"{first}\n{second}:23\n"))
    assert code == 1
    (line,) = stderr.splitlines()
    assert line.startswith(f"error: {lab.hosts[1].address}: getting ready failed: ")
    assert "refused" in line
    assert not is_up(lab, 0)
    assert tokens(lab) == []


def stand_in(folder: Path, cases: str) -> tuple[Path, Path]:
    """A program in place of `corral`, which writes down on which host it was called with what, and then does as the
    cases say. And where it writes."""
    program, log = folder / "stand-in", folder / "calls"
    log.touch()
    program.write_text(f'#!/bin/sh\necho "$(hostname) $*" >> {log}\ncase "$(hostname) $1" in {cases} esac\n')
    program.chmod(0o755)
    return program, log


def calls(log: Path) -> list[str]:
    """Host and verb of each."""
    return [" ".join(line.split()[:2]) for line in log.read_text().splitlines()]


@pytest.mark.lab
@pytest.mark.xdist_group("ssh")
def test_a_host_that_refuses_is_named_and_only_what_came_up_is_taken_down(lab, ssh, tmp_path, tiny_model):
    write_recipe(tmp_path, tiny_model)
    program, log = stand_in(tmp_path, '"h2 up") echo noise >&2; echo "error: another Ray runs here" >&2; exit 2 ;;')
    code, _, stderr = end(begin(ssh, tmp_path, program=program))
    assert code == 1
    assert stderr == f"error: {lab.hosts[1].address}: corral up failed: another Ray runs here\n"
    assert calls(log) == ["h1 up", "h2 up", "h1 down"]
    assert tokens(lab) == []


@pytest.mark.lab
@pytest.mark.xdist_group("ssh")
def test_a_training_that_fails_ends_the_cluster_and_is_said(lab, ssh, tmp_path, tiny_model):
    write_recipe(tmp_path, tiny_model)
    program, log = stand_in(tmp_path, '"h1 train") exit 3 ;;')
    code, _, stderr = end(begin(ssh, tmp_path, program=program))
    assert code == 1
    assert stderr == f"error: {lab.hosts[0].address}: corral train failed: exit code 3\n"
    assert calls(log)[:4] == ["h1 up", "h2 up", "h1 check", "h1 train"]
    assert sorted(calls(log)[4:]) == ["h1 down", "h2 down"]


@pytest.mark.lab
@pytest.mark.xdist_group("ssh")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launch_that_is_stopped_takes_the_cluster_down(lab, ssh, tmp_path, tiny_model, number):
    write_recipe(tmp_path, tiny_model)
    program, log = stand_in(tmp_path, '"h1 train") sleep 60 ;;')
    process = begin(ssh, tmp_path, program=program)
    wait_until(lambda: "h1 train" in calls(log) or process.poll() is not None)
    process.send_signal(number)
    code, _, _ = end(process)
    assert code == 130
    assert sorted(calls(log)[4:]) == ["h1 down", "h2 down"]
    assert tokens(lab) == []


def launch_lines(folder: Path, hosts: str) -> "subprocess.CompletedProcess[str]":
    write_recipe(folder, folder / "model")
    (folder / "hosts").write_text(hosts)
    command = [*CORRAL, "launch", "ssh", "recipe.yaml", "cluster.nodes=2", "--hosts", "hosts"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_lines_are_printed_for_who_wants_to_type_them(tmp_path):
    printed = launch_lines(tmp_path, "me@gpu1:2222\ngpu2\n").stdout
    lines = [shlex.split(line) for line in printed.splitlines() if not line.startswith("#")]
    targets = [line[line.index("--") + 1] for line in lines]
    assert targets == ["me@gpu1", "gpu2", "me@gpu1", "gpu2", "me@gpu1", "me@gpu1", "me@gpu1", "gpu2"]
    assert all(line[0] == "ssh" for line in lines)


@pytest.mark.slow
def test_too_few_hosts_are_said(tmp_path):
    result = launch_lines(tmp_path, "gpu1\n")
    assert result.returncode == 2
    assert "2 nodes" in result.stderr
