"""Nodes that are cut off or end. Ray's own health checks are as they are by default, and take a minute."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import wait_until, within

sys.path.insert(0, str(Path(__file__).parent))

from hosts import Driver, Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.core, pytest.mark.xdist_group("node_loss")]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Ray believes that each host has two GPUs. The third host has the second rank."""
    with Lab(3) as lab:
        lab.start_ray(devices=2, gpus=True, ranks=[0, 2, 1], health_checks={})
        yield lab


@pytest.fixture(scope="module")
def driver(lab: Lab) -> Driver:
    return Driver(lab, 0)


@pytest.fixture(scope="module")
def cut(lab: Lab, driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The second host, which has the third rank, is cut off."""
    folder = tmp_path_factory.mktemp("cut")
    driver.begin("scenarios:node_cut", logs=str(folder), ready=str(folder / "ready"))
    wait_until((folder / "ready").exists, 90)
    lab.cut(1)
    (folder / "ready.cut").touch()
    return driver.result()


def test_labels_say_how_nodes_are_numbered(cut: Any) -> None:
    assert cut["nodes"] == [[0, "h1"], [1, "h3"], [2, "h2"]]


def test_a_device_is_a_gpu_where_there_are_some(cut: Any) -> None:
    assert cut["accelerators"] == [["0"], ["0"], ["0"]]


def test_a_node_that_is_cut_off_is_noticed_soon_and_named(cut: Any, lab: Lab) -> None:
    lost = f"node 2, h2 ({lab.hosts[1].address}), with device 2, was lost"
    assert cut["watch"]["message"] == f"{lost}: it has not answered for 5 s (`cluster.node_timeout_s`)"
    assert cut["watch"]["node"] == lab.hosts[1].address
    assert cut["noticed_s"] < within(15)


def test_calls_to_a_lost_node_fail_instead_of_hanging(cut: Any, lab: Lab) -> None:
    assert "was lost while rollout.hang" in cut["call"]["message"]
    assert (cut["call"]["device"], cut["call"]["node"]) == (2, lab.hosts[1].address)
    assert cut["replace"]["node"] == lab.hosts[1].address


def test_the_other_nodes_go_on(cut: Any) -> None:
    assert cut["others"] == 1
    assert cut["num_nodes"] == 2
    assert "ValueError: the reason" in cut["error_elsewhere"]


def test_closing_does_not_wait_for_a_lost_node(cut: Any) -> None:
    assert cut["closed_s"] < within(16)


def test_a_run_goes_on_with_the_nodes_that_are_left(cut: Any, driver: Driver, lab: Lab, tmp_path: Path) -> None:
    """And its devices keep their numbers."""
    seen = driver.call("scenarios:without_node", logs=str(tmp_path), address=lab.hosts[1].address)
    assert seen["nodes"] == [[0, "h1"], [1, "h3"]]
    assert seen["roles"] == {"actor": [0, 1]}
    assert seen["all_reduce"] == [3.0] * 2
    assert seen["role_gone"] == f"RunError: rollout has no device left: it was on {lab.hosts[1].address} only"
    assert seen["too_few"].startswith("RunError: the Ray cluster is too small")


def test_a_host_that_ends_is_the_cause_even_if_others_fail_first(cut: Any, lab: Lab, tmp_path: Path) -> None:
    """The host is Ray's head, and the controller on another one. It comes to its end, too."""
    driver, ready = Driver(lab, 2), tmp_path / "ready"
    driver.begin("scenarios:host_killed", logs=str(tmp_path), ready=str(ready), address=lab.hosts[1].address)
    wait_until(ready.exists, 90)
    lab.kill(0)
    seen = driver.result()
    assert seen["lost"]["node"] == lab.hosts[0].address
    assert seen["lost"]["message"].startswith("node 0, h1")
    assert seen["closed_s"] < within(16)
    assert "RunError: Ray's head node" in seen["again"]
    assert driver.end() == 0
