"""The guide "from one laptop to four nodes", command by command, on four hosts.

What stands for the hardware: a device is a worker slot, and each host has one instead of eight.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import SMALL, corral
from deadlines import within
from guides import Block, block
from hosts import Lab
from runs import write_recipe

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("four_nodes")]

SMALLER = {"check 32": "check 4", "devices_per_node=8": "devices_per_node=1"}
LIMIT_S = 240


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(4, name="node", loopback_names=False) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Where the user is: a recipe, and `corral` on the path."""
    made = tmp_path_factory.mktemp("guide")
    write_recipe(made, tiny_model)
    script = made / "bin" / "corral"
    script.parent.mkdir()
    python = f"exec {shlex.quote(sys.executable)} -m corral.cli.main"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = up ]; then exec {python[5:]} "$@" --devices=1 {shlex.join(SMALL)}; fi\n{python} "$@"\n'
    )
    script.chmod(0o755)
    return made


def run(lab: Lab, host: int, folder: Path, script: str) -> "subprocess.CompletedProcess[str]":
    for text, smaller in SMALLER.items():
        script = script.replace(text, smaller)
    path = f"{folder}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    command = ["sh", "-ec", f"cd {shlex.quote(str(folder))}\n{script}"]
    return lab.run(host, command, timeout_s=LIMIT_S, PATH=path, OMP_NUM_THREADS="1")


def run_everywhere(lab: Lab, folder: Path, one: Block, hosts: int = 4, **replaced: str) -> list[str]:
    """At the same time, each host with its own rank; or on the first hosts."""
    from concurrent.futures import ThreadPoolExecutor

    def at(host: int) -> str:
        script = one.text.replace("RANK=0", f"RANK={host}").replace("WORLD_SIZE=4", f"WORLD_SIZE={hosts}")
        for text, other in replaced.items():
            script = script.replace(f"/{text}", other)
        return run(lab, host, folder, script).stdout

    with ThreadPoolExecutor(hosts) as threads:
        return list(threads.map(at, range(hosts)))


def test_a_laptop_plans_and_trains(lab: Lab, folder: Path) -> None:
    said = run(lab, 0, folder, block("laptop").text).stdout
    assert "trajectories ->" in said
    assert (folder / "runs" / "tiny" / "checkpoints").is_dir()


def test_all_devices_of_a_machine_train_without_anything_being_started(lab: Lab, folder: Path) -> None:
    run(lab, 0, folder, block("devices").text)
    assert (folder / "runs" / "two-devices" / "metrics.jsonl").is_file()
    assert "raylet" not in lab.run(0, ["ps", "ax"]).stdout


@pytest.fixture(scope="module")
def cluster(lab: Lab, folder: Path) -> list[str]:
    """-> what each node printed; it is up until the guide takes it down"""
    return run_everywhere(lab, folder, block("every-node"))


@pytest.mark.core
def test_the_same_two_lines_on_every_node_make_a_cluster(cluster: list[str]) -> None:
    for said in cluster:
        assert "all 4 nodes are there" in said


@pytest.mark.usefixtures("cluster")
def test_check_and_doctor_find_nothing_wrong(lab: Lab, folder: Path) -> None:
    said = run(lab, 0, folder, block("look").text).stdout
    assert "4 devices on 4 nodes" in said


@pytest.mark.usefixtures("cluster")
def test_a_job_is_submitted_listed_and_followed_to_its_end(lab: Lab, folder: Path) -> None:
    said = run(lab, 0, folder, block("submit").text).stdout
    assert "four-nodes" in said
    assert "succeeded" in run(lab, 0, folder, "corral jobs").stdout
    assert any((folder / "runs" / "four-nodes" / "checkpoints").iterdir())


@pytest.mark.usefixtures("cluster")
def test_a_job_that_is_stopped_goes_on_later_on_fewer_nodes(lab: Lab, folder: Path) -> None:
    begin, stop, go_on = block("resume").commands
    run(lab, 0, folder, f"{begin} schedule.steps=400 cluster.nodes=2")
    metrics = folder / "runs" / "stopped" / "metrics.jsonl"
    wait_until_lines(metrics, 2)
    refused = corral(lab, 1, "down")
    assert "error: stopped trains on this node: stop it first" in refused.stderr
    run(lab, 0, folder, stop)
    done = len(metrics.read_text().splitlines())
    run(lab, 0, folder, f"{go_on} schedule.steps={done + 1} cluster.nodes=1")
    assert len(metrics.read_text().splitlines()) == done + 1


def wait_until_lines(file: Path, number: int) -> None:
    deadline = time.monotonic() + within(LIMIT_S)
    while not file.exists() or len(file.read_text().splitlines()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.core
@pytest.mark.usefixtures("cluster")
def test_nothing_is_left_after_down(lab: Lab, folder: Path) -> None:
    for said in run_everywhere(lab, folder, block("go-home")):
        assert said.startswith("ended ")
    for host in range(lab.num_hosts):
        assert not lab.run(host, ["pgrep", "raylet|gcs_server"], check=False).stdout


def test_a_head_file_tells_the_nodes_where_the_head_is(lab: Lab, folder: Path) -> None:
    """Two are enough to see it. They are in no cluster any more, whatever the tests before did."""
    for host in (1, 0):
        corral(lab, host, "down")
    for said in run_everywhere(lab, folder, block("head-file"), hosts=2, shared=str(folder)):
        assert "all 2 nodes are there" in said
