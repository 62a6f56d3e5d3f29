"""The Ray that a run starts for itself is out of the reach of other users of the machine."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deadlines import within

from corral.cluster.up import check_temp_dir
from corral.recipe.errors import UserError
from corral.recipe.schema import Cluster
from corral.runtime.connection import address_of_ray_start, connect, find_cluster, make_ray_folder
from corral.runtime.membership import private_folder, state_folder

STRANGER = 65534
START = """
import json, os, sys, ray
from corral.recipe.schema import Cluster
from corral.runtime.connection import connect, disconnect
sessions = []
for wait in (lambda: None, lambda: print(json.dumps(sessions), flush=True) or sys.stdin.readline()):
    connect(Cluster(devices_per_node=1))
    sessions.append(ray._private.worker._global_node.get_session_dir_path())
    wait()
    disconnect()
"""
TAKE = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    try:
        os.rename(path, path + ".old")  # to listen in its place
        print("taken")
    except OSError as error:
        print(error.strerror)
"""

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@as_root
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_another_user_takes_no_socket_of_a_runs_own_ray_and_nothing_of_it_stays() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.Popen(
        [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert run.stdin is not None
    assert run.stdout is not None
    earlier, session = map(Path, json.loads(run.stdout.readline()))
    sockets = [str(path) for path in (session / "sockets").iterdir()]
    monitors = list((session / "logs").glob("*monitor*"))
    taken = subprocess.run([sys.executable, "-c", TAKE, *sockets], capture_output=True, text=True, check=True)
    run.stdin.write("\n")
    run.stdin.close()
    assert run.wait(within(60)) == 0
    assert len(sockets) == 2
    assert taken.stdout.splitlines() == ["Permission denied"] * 2
    assert monitors == []
    assert session.is_relative_to(state_folder())
    assert not session.parent.exists()
    assert not earlier.parent.exists()  # Ray's settings name it where one process starts a second Ray


@pytest.mark.slow
def test_the_folder_of_a_run_that_was_killed_is_removed_by_the_next_one() -> None:
    command = "from corral.runtime.connection import make_ray_folder; print(make_ray_folder())"
    left = Path(subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout.strip())
    own, second = make_ray_folder(), make_ray_folder()
    assert not left.exists()
    assert own.is_dir()
    for folder in (own, second):
        folder.rmdir()


def test_a_folder_that_others_can_open_or_replace_is_refused(tmp_path: Path) -> None:
    assert private_folder(tmp_path / "new" / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UserError, match="its mode is 755: `chmod 700` it"):
        private_folder(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "new" / "own")
    with pytest.raises(UserError, match="must be a folder, and your own"):
        private_folder(tmp_path / "link")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UserError, match=r"since all may write to .*/open: choose another place"):
        private_folder(tmp_path / "open" / "own")


@as_root
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", STRANGER, STRANGER)
    with pytest.raises(UserError, match="user 65534 has made it"):
        private_folder(tmp_path / "theirs")


def test_a_temp_dir_leaves_room_for_the_paths_of_sockets() -> None:
    assert check_temp_dir(state_folder() / "short") == state_folder() / "short"
    (state_folder() / "short").rmdir()
    with pytest.raises(UserError, match=r"/tmp/x{33} has 38 bytes, and 36 are left for it"):
        check_temp_dir(Path("/tmp") / ("x" * 33))


@as_root
def test_a_cluster_that_another_user_has_named_for_everybody_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    named = tmp_path / "ray" / "ray_current_cluster"
    named.parent.mkdir()
    named.write_text("10.0.0.66:6379")
    assert address_of_ray_start() == "10.0.0.66:6379"
    os.chown(named, STRANGER, STRANGER)
    assert address_of_ray_start() is None
    assert "the Ray cluster of user 65534 on this machine is not used" in caplog.text


def test_a_folder_that_another_run_removes_meanwhile_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.runtime.connection.state_folder", lambda: tmp_path)
    (tmp_path / "run-gone").symlink_to(tmp_path / "nowhere")  # listed, and not there when it is opened
    assert make_ray_folder().is_dir()


def test_runs_that_start_together_do_not_remove_each_others_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.runtime.connection.state_folder", lambda: tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: make_ray_folder(), range(100)))
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("http://localhost:8265", "10.0.0.1:6379"),
        ("auto", "10.0.0.1:6379"),
        ("10.0.0.2:6379", "10.0.0.2:6379"),
        ("ray://10.0.0.2:10001", "ray://10.0.0.2:10001"),
    ],
)
def test_a_dashboard_in_ray_address_names_no_cluster(
    variable: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("corral.runtime.membership.state_folder", lambda: tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert find_cluster(None) == expected


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_cluster_of_ray_address_that_does_not_answer_is_not_replaced_by_another(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.runtime.connection.start_here", lambda cluster: pytest.fail("another one was started"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"RAY_ADDRESS.*127\.0\.0\.1:1"):
        connect(Cluster(nodes=nodes))
