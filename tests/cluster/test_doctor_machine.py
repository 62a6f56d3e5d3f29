"""The doctor's checks of a node alone: memory, limits, disks, processes, access."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from deadlines import wait_until
from hosts import skip_unless_possible

from corral.cluster.doctor.findings import Finding
from corral.cluster.doctor.machine_checks import (
    GIB,
    MIB,
    UNLIMITED,
    DiskSpace,
    ProcessLimits,
    SharedMemory,
    check_disks,
    check_limits,
    check_memory,
    check_shared_memory,
    disks,
    limits,
    shared_memory,
)
from corral.cluster.doctor.network_checks import (
    TokenFile,
    check_open_ports,
    check_processes,
    check_token_files,
    open_ports,
)
from corral.cluster.node_processes import NodeProcess, all_processes, parse_endpoint, raylet_of
from corral.host_memory import NodeMemory, cgroup_memory, node_memory

SHM = SharedMemory(total=64 * GIB, free=63 * GIB, objects=20 * GIB, largest=(), container="")
LIMITS = ProcessLimits(65536, 65536, UNLIMITED, UNLIMITED, has_infiniband=False, container="")


def only(findings: Iterator[Finding]) -> Finding:
    [finding] = findings
    return finding


# --- memory


def test_the_shared_memory_of_docker_is_an_error_with_the_option_that_helps() -> None:
    found = only(check_shared_memory(replace(SHM, total=64 * MIB, free=64 * MIB, container="docker")))
    assert (found.level, found.check) == ("error", "shared memory")
    assert "64 MiB" in found.what
    assert "--shm-size" in found.fix


def test_shared_memory_smaller_than_rays_objects_is_a_warning() -> None:
    found = only(check_shared_memory(replace(SHM, total=2 * GIB, free=2 * GIB)))
    assert found.level == "warning"
    assert "remount" in found.fix
    assert only(check_shared_memory(replace(SHM, total=2 * GIB, free=2 * GIB, objects=GIB))).level == "ok"


def test_full_shared_memory_says_what_is_in_it() -> None:
    found = only(check_shared_memory(replace(SHM, free=GIB, largest=("/dev/shm/torch_1 (60 GiB)",))))
    assert found.level == "warning"
    assert "/dev/shm/torch_1" in found.what


def test_a_pod_is_told_of_its_own_way() -> None:
    assert "emptyDir" in only(check_shared_memory(replace(SHM, total=64 * MIB, container="kubernetes"))).fix


def test_this_machine_has_memory() -> None:
    found, shm = node_memory(), shared_memory(None)
    assert 0 < found.available <= found.total
    assert 0 <= shm.free <= shm.total
    assert only(check_memory(found)).check == "memory"


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    """Both versions of cgroups, as files; what is cached does not count as used."""
    first = tmp_path / "memory" / "docker" / "abc"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    (first / "memory.usage_in_bytes").write_text(f"{5 * GIB}\n")
    (first / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {2 * GIB}\n")
    assert cgroup_memory("4:memory:/docker/abc\n3:cpuset:/\n", tmp_path) == [(8 * GIB, 3 * GIB)]
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text("anon 5\n")
    assert cgroup_memory("0::/not/visible/here\n", tmp_path) == [(4 * GIB, GIB)]
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_memory("0::/\n", tmp_path) == []


def test_little_memory_is_a_warning_that_names_the_limit() -> None:
    found = only(check_memory(NodeMemory(16 * GIB, GIB, limited=True)))
    assert found.level == "warning"
    assert "limit of its container" in found.what


# --- limits and disks


@pytest.mark.parametrize(
    ("files", "hard", "container", "level", "fix"),
    [
        (256, 256, "", "error", "limits.conf"),
        (1024, 524288, "", "warning", "ulimit -n 65536"),
        (1024, 1024, "docker", "warning", "--ulimit nofile"),
        (65536, 65536, "", "ok", ""),
    ],
)
def test_the_file_limit_comes_with_what_raises_it(files: int, hard: int, container: str, level: str, fix: str) -> None:
    found = only(check_limits(replace(LIMITS, files=files, files_hard=hard, container=container)))  # type: ignore[arg-type]
    assert found.level == level
    assert fix in found.fix


def test_limits_that_only_some_nodes_feel() -> None:
    few, locked = list(check_limits(replace(LIMITS, processes=512, locked=64 * 1024, has_infiniband=True)))[1:]
    assert "512 processes" in few.what
    assert "InfiniBand" in locked.what
    assert limits().files > 0


def test_disks_are_one_finding_each_and_know_what_the_recipe_writes(tmp_path: Path) -> None:
    real = disks(tmp_path / "runs" / "not there yet", 0, None)
    assert {disk.purpose for disk in real} == {"runs", "Ray's logs and objects", "the Hugging Face cache"}
    one = DiskSpace("/a", "runs", 100 * GIB, 50 * GIB, 1.0, device=1)
    other = replace(one, path="/b", purpose="the Hugging Face cache")
    [same] = check_disks([one, other])
    assert same.level == "ok"
    assert "/a (runs), /b (the Hugging Face cache)" in same.what
    [too_much] = check_disks([replace(one, needs=60 * GIB), other])
    assert too_much.level == "error"
    assert "checkpoints take 60 GiB" in too_much.what
    levels = [only(check_disks([replace(one, free=free)])).level for free in (GIB // 8, GIB, 20 * GIB)]
    assert levels == ["error", "warning", "ok"]


# --- processes


@contextmanager
def running(*command: str, name: str | None = None, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [name or command[0], *command[1:]],
        executable=command[0],
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_worker_whose_cluster_is_gone_is_named_with_its_pid() -> None:
    with running("/bin/sleep", "60", name="ray::DeviceProcess") as left:
        found = next(one for one in check_processes(all_processes(), None, lambda _: True) if one.level == "warning")
    assert found.check == "stray processes"
    assert f"ray::DeviceProcess (pid {left.pid}, " in found.what
    assert str(left.pid) in found.fix


@pytest.mark.lab
def test_a_worker_in_a_container_is_none_of_this_nodes_business() -> None:
    """It has a network of its own, and from here its head is not to be reached."""
    skip_unless_possible()
    with running("/usr/bin/unshare", "--net", "bash", "-c", "exec -a ray::DeviceProcess sleep 60") as contained:
        wait_until(lambda: (found := all_processes().get(contained.pid)) and found.is_rays, 10)
        found = all_processes()[contained.pid]
        assert found.is_elsewhere
        assert str(contained.pid) not in str(list(check_processes({found.pid: found}, None, lambda _: False)))


def process(pid: int, parent: int, name: str, command: str = "", token: bool | None = None) -> NodeProcess:
    return NodeProcess(pid, parent, name, command or name, "me", token)


OURS = process(10, 1, "raylet", "raylet --gcs-address=10.0.0.1:6379 --node_id=a", token=True)
WORKER = process(11, 10, "ray::DeviceProcess")
HEAD = process(9, 1, "gcs_server", "gcs_server --gcs_server_port=6379 --node-ip-address=10.0.0.1")


def test_processes_of_this_cluster_are_none_of_its_business() -> None:
    table = {one.pid: one for one in (OURS, WORKER, HEAD)}
    assert [one.head for one in (OURS, WORKER, HEAD)] == ["10.0.0.1:6379", None, "10.0.0.1:6379"]
    assert raylet_of(WORKER, table) == OURS
    assert [one.level for one in check_processes(table, "10.0.0.1:6379", lambda _: False)] == ["ok"]


def test_another_cluster_on_the_node_is_a_warning_and_a_dead_one_is_stray() -> None:
    theirs = process(20, 1, "raylet", "raylet --gcs-address=10.0.0.9:6379")
    table = {one.pid: one for one in (OURS, WORKER, theirs)}
    there = list(check_processes(table, "10.0.0.1:6379", lambda head: True))
    assert [(one.level, one.check) for one in there] == [("warning", "other clusters"), ("ok", "stray processes")]
    gone = list(check_processes(table, "10.0.0.1:6379", lambda head: False))
    assert [(one.level, one.check) for one in gone] == [("warning", "stray processes")]
    assert gone[0].fix == "kill 20"


# --- access

LISTEN = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("address", "mode", "levels"), [("0.0.0.0", "", ["error"]), ("0.0.0.0", "token", ["ok"]), ("127.0.0.1", "", [])]
)
def test_ports_of_ray_that_others_can_reach_are_found(
    tmp_path: Path, address: str, mode: str, levels: list[str]
) -> None:
    """One that wants a token may listen."""
    server = tmp_path / "ray" / "dashboard" / "server.py"
    server.parent.mkdir(parents=True)
    server.write_text(LISTEN)
    with running(sys.executable, str(server), address, RAY_AUTH_MODE=mode) as listening:
        assert listening.stdout is not None
        port = int(listening.stdout.readline())
        found = [one for one in open_ports(all_processes()) if one.port == port]
    assert [one.wants_token for one in found] == [level == "ok" for level in levels]
    said = list(check_open_ports(found, "h2"))
    assert [one.level for one in said] == levels
    assert all(str(port) in one.what and "corral up" in one.fix for one in said if one.level == "error")


def test_a_token_that_others_can_read_is_an_error() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        token = Path(folder, "token")
        token.write_text("secret")
        token.chmod(0o644)
        assert list(check_token_files([TokenFile.at(token, is_used=True)])) == []  # nobody else gets to it
        Path(folder).chmod(0o755)
        found = only(check_token_files([TokenFile.at(token, is_used=True)]))
        assert found.level == "error"
        assert found.fix == f"chmod 600 {token}"
        assert only(check_token_files([TokenFile.at(token, is_used=False)])).level == "warning"
        token.chmod(0o600)
        assert list(check_token_files([TokenFile.at(token, is_used=True)])) == []


def test_an_address_of_the_kernels_table_is_read_in_its_byte_order() -> None:
    def written(address: str, family: socket.AddressFamily) -> str:
        packed = socket.inet_pton(family, address)
        words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
        return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)

    for address in ("127.0.0.1", "10.0.0.1"):
        assert parse_endpoint(f"{written(address, socket.AF_INET)}:1F90") == (address, 8080)
    assert parse_endpoint(f"{written('::ffff:127.0.0.1', socket.AF_INET6)}:0000") == ("127.0.0.1", 0)
    assert parse_endpoint(f"{written('::', socket.AF_INET6)}:0000") == ("::", 0)
