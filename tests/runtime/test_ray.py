"""Workers on a Ray cluster of two hosts whose own names are loopback addresses, and on one without a cluster."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import within

sys.path.insert(0, str(Path(__file__).parent))

from hosts import Driver, Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.core, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """The third host has no Ray."""
    with Lab(3, loopback_names=True) as lab:
        lab.start_ray(devices=2, hosts=[0, 1])
        yield lab


@pytest.fixture(scope="module")
def driver(lab: Lab) -> Driver:
    return Driver(lab, 0)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def colocated(driver: Driver, logs: Path) -> Any:
    return driver.call("scenarios:colocated", logs=str(logs))


@pytest.fixture(scope="module")
def deaths(driver: Driver, logs: Path) -> Any:
    return driver.call("scenarios:deaths", logs=str(logs))


def test_devices_are_numbered_node_by_node(colocated: Any, lab: Lab) -> None:
    first, second = lab.hosts[0].address, lab.hosts[1].address
    assert colocated["nodes"] == [[0, "h1", first, [0, 1]], [1, "h2", second, [2, 3]]]
    assert [facts["rank"] for facts in colocated["actor"]] == [0, 1, 2, 3]
    assert [facts["address"] for facts in colocated["actor"]] == [first, first, second, second]
    assert colocated["names"][3] == f"device 3 on h2 ({second})"


def test_roles_on_the_same_devices_are_in_the_same_process(colocated: Any) -> None:
    assert colocated["sets"] == [[["actor", "rollout"], [0, 1, 2, 3]]]
    assert [one["pid"] for one in colocated["actor"]] == [one["pid"] for one in colocated["rollout"]]
    assert colocated["rollout"][0]["beside"] == ["actor", "rollout"]


def test_workers_are_in_the_controllers_folder(colocated: Any) -> None:
    assert {facts["cwd"] for facts in colocated["actor"]} == {str(Path.cwd())}


def test_a_group_asks_one_each_or_some(colocated: Any) -> None:
    assert colocated["one"] == "hello"
    assert colocated["each"] == [0, 1, 2, 3]
    assert colocated["some"] == ["x", "x"]
    assert colocated["shared"] == [200_000.0] * 4


def test_collectives_work_where_a_hosts_own_name_is_loopback(colocated: Any) -> None:
    assert colocated["all_reduce"] == [10.0] * 4
    assert colocated["interfaces"] == ["eth0"] * 4


def test_a_deadline_names_what_was_waited_for(colocated: Any, lab: Lab) -> None:
    assert f"actor.hang: no answer from device 3 on h2 ({lab.hosts[1].address}) within 0.5 s" in colocated["late"]


def test_a_file_says_what_each_worker_does(colocated: Any, lab: Lab) -> None:
    workers = colocated["workers"]
    assert [(one["node"], one["device"], one["log"]) for one in workers] == [
        (f"h{1 + device // 2}", device, f"worker-{device}.log") for device in range(4)
    ]
    assert [one["pid"] for one in workers] == [facts["pid"] for facts in colocated["actor"]]
    assert [one["state"] for one in workers] == ["idle", "idle", "idle", "busy"]
    assert workers[3]["since"] > 0
    assert {one["address"] for one in workers[2:]} == {lab.hosts[1].address}
    assert workers[0]["roles"] == ["actor", "rollout"]


def test_rays_head_keeps_nothing_of_the_calls(colocated: Any) -> None:
    """It would keep the last 100,000, and grow by 3 kB with each of them."""
    assert "the last call" in colocated["kept_by_ray"]
    assert [name for name in colocated["kept_by_ray"] if "." in name] == []


def test_errors_for_the_user_arrive_as_they_are(colocated: Any) -> None:
    assert colocated["late_user_error"] == "UserError: the reason"
    assert colocated["late_run_error"] == "RunError: the reason"


def test_other_errors_name_the_worker_and_their_traceback_is_in_its_log(colocated: Any, lab: Lab, logs: Path) -> None:
    log = logs / "worker-1.log"
    where = f"actor.fail on device 1 on h1 ({lab.hosts[0].address})"
    assert colocated["late_other_error"] == f"RunError: {where}: ValueError: the reason (the traceback is in {log})"
    assert "about to fail" in log.read_text()
    assert "Traceback" in log.read_text()
    assert colocated["still_works"] == [1] * 4


def test_the_processs_signal_handlers_stay(colocated: Any) -> None:
    assert colocated["keeps_signal_handler"]


def test_calls_through_relays_are_as_calls_to_each(driver: Driver, logs: Path, lab: Lab) -> None:
    seen = driver.call("scenarios:relayed", logs=str(logs))
    assert (seen["each"], seen["shared"], seen["async"]) == (["a", "b"], [200_000.0] * 2, [1, 1])
    assert seen["all_reduce"] == [3.0] * 2
    assert seen["order"] == seen["pids"]
    assert seen["user_error"] == "UserError: the reason"
    assert seen["other_error"] == "RunError: the reason"
    second = lab.hosts[1].address
    assert f"rollout.hang: no answer from one of the devices 2-3 on h2 ({second}) within 1 s" in seen["late"]
    assert seen["killed"]["message"].startswith(f"device 2 on h2 ({second}): its process (pid ")
    assert "was killed by signal 9" in seen["killed"]["message"]
    assert (seen["killed"]["device"], seen["after"]) == (2, [2, 2])
    assert seen["relay_ends"]["message"] == f"the relay of h2 ({second}) ended while rollout.hang"
    assert seen["relay_ends_s"] < within(20)


def test_roles_on_devices_of_their_own_are_worlds_of_their_own(deaths: Any) -> None:
    assert deaths["sets"] == [[["actor"], [0, 1], True], [["rollout"], [2, 3], False]]
    assert [facts["rank"] for facts in deaths["rollout"]] == [0, 1]
    assert deaths["all_reduce"] == [3.0] * 2
    assert deaths["rollout"][0]["beside"] == ["rollout"]


def test_a_worker_that_is_killed_is_named_with_how_and_its_last_words(deaths: Any, lab: Lab) -> None:
    message, pid = deaths["killed"]["message"], deaths["rollout"][1]["pid"]
    where = f"device 3 on h2 ({lab.hosts[1].address}): its process (pid {pid})"
    assert message.startswith(f"{where} was killed by signal 9 (SIGKILL; often out of memory")
    assert "while rollout.end" in message
    assert "my last words" in message
    assert (deaths["killed"]["device"], deaths["killed"]["node"]) == (3, None)
    assert deaths["killed_s"] < within(10)
    assert "was killed by signal 9" in deaths["again"]["message"]


def test_an_exit_code_is_reported(deaths: Any) -> None:
    assert "ended with exit code 3 while rollout.end" in deaths["exited"]["message"]


def test_a_dead_worker_is_replaced_and_the_others_stay(deaths: Any) -> None:
    assert deaths["replaced"] == [True, False]
    assert deaths["actor_lives"] == [3.0] * 2


def test_devices_are_never_used_twice(deaths: Any, lab: Lab) -> None:
    table = f"h2 ({lab.hosts[1].address}) has 2 devices, 0 free"
    assert deaths["booked"].startswith("UserError: devices of the Ray cluster were not free within 2 s")
    assert table in deaths["booked"]
    assert table in deaths["output"][0]
    assert deaths["freed"] == 2


def test_a_cluster_that_is_too_small_is_described(driver: Driver, logs: Path, lab: Lab) -> None:
    seen = driver.call("scenarios:refusals", logs=str(logs))
    lack = f"h1 ({lab.hosts[0].address}) has 2 devices, 2 free"
    assert seen["three_nodes"].startswith("UserError: the Ray cluster is too small")
    assert lack in seen["three_nodes"]
    assert "needed: 3 nodes with 2 devices each" in seen["three_nodes"]
    assert lack in seen["output"][0]
    assert "`cluster.address`: there is no Ray cluster at 127.0.0.1:1" in seen["no_cluster"]


def test_ray_is_started_for_the_run_where_there_is_none(lab: Lab, logs: Path) -> None:
    by_default = {"RAY_prestart_worker_first_driver": "true"}
    seen = Driver(lab, 2, **by_default).call("scenarios:started_here", logs=str(logs))
    assert "this machine is not part of a Ray cluster; start one with `corral up`" in seen["two_nodes"]
    assert seen["all_reduce"] == [3.0] * 2
    assert seen["interfaces"] == ["lo"] * 2
    assert seen["caches"] == [f"/tmp/corral-{os.getuid()}/triton"] * 2
    assert any("ray::DeviceProc" in line for line in seen["listening"])  # torch's rendezvous
    assert all("127.0.0.1]:" in line or "127.0.0.1:" in line for line in seen["listening"])
    named = [line.split()[0] for line in seen["processes"] if line.startswith("ray::")]
    assert named.count("ray::DeviceProcess") == 2
    assert "ray::IDLE" not in named
    assert seen["after_ctrl_c"] == [3.0] * 2
    assert "raylet" not in lab.run(2, ["ps", "ax"]).stdout
