"""`corral up`, `check`, `status` and `down` on three hosts."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from clusters import SMALL, begin_up, bring_up, corral
from deadlines import within
from hosts import CORRAL, RAY, Lab

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("up")]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """With a cluster, brought up in an order that is not that of the ranks."""
    with Lab(3, loopback_names=True) as made:
        bring_up(made, order=(2, 0, 1))
        yield made


@pytest.mark.core
def test_the_nodes_find_each_other_in_any_order(lab: Lab) -> None:
    said = json.loads(corral(lab, 2, "status", "--json").stdout)
    assert [(node["rank"], node["hostname"], node["devices"]) for node in said["nodes"]] == [
        (0, "h1", 2),
        (1, "h2", 2),
        (2, "h3", 2),
    ]
    assert [node["address"] for node in said["nodes"]] == [host.address for host in lab.hosts]


@pytest.mark.core
def test_check_says_what_is_there(lab: Lab) -> None:
    result = corral(lab, 1, "check", "6")
    assert result.returncode == 0
    assert "6 devices on 3 nodes" in result.stdout
    assert "dashboard http://127.0.0.1:8265" in result.stdout
    heading, *rows = result.stdout.splitlines()
    assert " ".join(heading.split()) == "rank host address devices memory corral ray torch python driver"
    assert [row.split()[1] for row in rows[:3]] == ["h1", "h2", "h3"]


def test_check_names_what_is_missing_in_time(lab: Lab) -> None:
    result = corral(lab, 0, "check", "8", "--timeout=1")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: after 1 s the cluster does not have 8 devices: 6 on 3 nodes")
    assert "h2" in result.stdout


def test_the_same_command_again_changes_nothing(lab: Lab) -> None:
    before = corral(lab, 1, "status").stdout
    again = begin_up(lab, 1, RANK="1", WORLD_SIZE="3", MASTER_ADDR=lab.hosts[0].address)
    said, _ = again.communicate(timeout=within(60))
    assert "rank 1" in said
    assert "all 3 nodes are there" in said
    assert corral(lab, 1, "status").stdout == before


def test_a_second_cluster_on_a_host_is_refused_in_one_line(lab: Lab) -> None:
    result = corral(lab, 0, "up", "--port=7000")
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert "this node is rank 0 of the cluster at" in line
    assert "corral down" in line


def test_a_second_cluster_can_run_beside_it_and_each_is_ended_alone(lab: Lab) -> None:
    """On the host of the other cluster's head, which has the usual ports of a head."""
    started = corral(lab, 0, "up", "--port=7000", "--beside", "--devices=1", *SMALL)
    assert started.returncode == 0, started.stderr
    assert "127.0.0.1:7000" in started.stdout
    assert listens_on(lab, 0, 7000) == {"127.0.0.1"}
    assert listens_on(lab, 0, 52366) == {"127.0.0.1"}  # where its jobs come in
    assert listens_on(lab, 0, 10000) == {"127.0.0.1"}  # where Ray's clients do, below the ports of workers
    ambiguous = corral(lab, 0, "status")
    assert "part of several clusters" in ambiguous.stderr
    assert "1 device on 1 node" in corral(lab, 0, "status", "--address=127.0.0.1:7000").stdout
    ended = corral(lab, 0, "down", "--port=7000")
    assert listens_on(lab, 0, 7000) == set()
    assert "cluster 127.0.0.1:7000" in ended.stdout
    assert corral(lab, 1, "check", "6", f"--timeout={within(5):g}").returncode == 0


def listens_on(lab: Lab, host: int, port: int) -> set[str]:
    rows = [line.split()[3].rpartition(":") for line in lab.run(host, ["ss", "-ltnH"]).stdout.splitlines()]
    return {address.strip("[]").removeprefix("::ffff:") for address, _, number in rows if number == str(port)}


@pytest.mark.core
def test_another_machine_can_do_nothing_without_the_token(lab: Lab) -> None:
    """Every port that listens on the network asks for it, or tells nothing but that it is alive."""
    for host in (0, 1):
        listening = lab.run(host, ["ss", "-ltnpH"]).stdout
        rows = [line.split()[3] for line in listening.splitlines()]
        open_ports = {row.rpartition(":")[2] for row in rows if "127.0.0.1" not in row and "127.0.1.1" not in row}
        assert len(open_ports) >= 5
        said = lab.run(2, [sys.executable, "-c", ASK, lab.hosts[host].address, *sorted(open_ports)]).stdout
        for port, answers in json.loads(said).items():
            refused = [answer for answer in answers.values() if answer in ("UNAUTHENTICATED", 401)]
            allowed = [question for question, answer in answers.items() if answer in ("OK", 200)]
            assert refused, (port, answers, listening)
            assert allowed in ([], ["/grpc.health.v1.Health/Check"]), (port, answers)


ASK = """
import json, sys, urllib.error, urllib.request
import grpc

calls = ["/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", "/ray.rpc.NodeManagerService/GetNodeStats",
         "/ray.rpc.ObjectManagerService/Push", "/ray.rpc.ReporterService/GetTraceback",
         "/ray.rpc.RayletDriver/ClusterInfo", "/ray.rpc.InternalKVGcsService/InternalKVGet",
         "/grpc.health.v1.Health/Check"]
pages = ["/", "/api/version", "/api/jobs/", "/metrics", "/get_or_create_runtime_env"]

def call(port, name):
    try:
        grpc.insecure_channel(f"{sys.argv[1]}:{port}").unary_unary(name)(b"", timeout=5)
        return "OK"
    except grpc.RpcError as error:
        return error.code().name

def page(port, name):
    try:
        return urllib.request.urlopen(f"http://{sys.argv[1]}:{port}{name}", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except Exception as error:
        return type(error).__name__

print(json.dumps({port: {**{name: call(port, name) for name in calls}, **{name: page(port, name) for name in pages}}
                  for port in sys.argv[2:]}))
"""


def test_a_wrong_token_is_refused_in_one_line(lab: Lab) -> None:
    result = corral(lab, 1, "status", "--address", f"{lab.hosts[0].address}:6379", RAY_AUTH_TOKEN="wrong" * 10)
    assert result.returncode == 0  # this node is part of it, and knows better
    outside = subprocess.run(
        [*CORRAL, "status", "--address", f"{lab.hosts[0].address}:6379"],
        env={"RAY_AUTH_TOKEN": "wrong" * 10, "HOME": "/nonexistent", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=within(60),
    )
    assert outside.returncode == 2
    assert "refuses this token" in outside.stderr.splitlines()[-1]


def test_status_works_from_outside_with_the_token(lab: Lab) -> None:
    """On a machine that is not a node, as the user who has the token."""
    address = f"{lab.hosts[0].address}:6379"
    said = subprocess.run(
        [*CORRAL, "status", "--address", address],
        env={"HOME": str(lab.hosts[0].home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=within(60),
    )
    assert "6 devices on 3 nodes" in said.stdout, said.stderr


# --- from here on the third host has no part in the cluster


@pytest.fixture(scope="module")
def smaller(lab: Lab) -> "subprocess.Popen[str]":
    """Another process of the third host, on which `corral down` was typed."""
    other = lab.begin(2, ["sleep", "600"])
    assert corral(lab, 2, "down").returncode == 0
    return other


@pytest.mark.core
def test_down_ends_what_up_started_and_nothing_else(lab: Lab, smaller: "subprocess.Popen[str]") -> None:
    """Another Ray and other processes of the node go on."""
    assert smaller.poll() is None
    left = lab.run(2, ["ps", "ax", "-o", "comm="]).stdout.split()
    assert not {"raylet", "gcs_server"} & set(left)
    assert corral(lab, 2, "down").stdout.strip() == "nothing was up on this node"
    missing = corral(lab, 0, "check", "6", "--timeout=5")
    assert missing.returncode == 1
    assert "rank 2 of 3 missing" in missing.stderr.splitlines()[-1]
    assert "h3" in missing.stderr.splitlines()[-1]


@pytest.mark.usefixtures("smaller")
def test_a_rank_that_is_taken_is_refused(lab: Lab) -> None:
    result = corral(lab, 2, "up", "--rank=1", f"--join={lab.hosts[0].address}")
    assert result.returncode == 2
    assert "rank 1 of the cluster" in result.stderr
    assert "taken by h2" in result.stderr


@pytest.mark.usefixtures("smaller")
def test_a_node_without_the_token_cannot_join_and_is_told_what_to_do(lab: Lab) -> None:
    result = corral(lab, 2, "up", "--rank=2", f"--join={lab.hosts[0].address}", HOME="/nonexistent")
    assert result.returncode == 2
    assert "needs a token and this node has none: copy the head's ~/.corral/token here" in result.stderr
    wrong = corral(lab, 2, "up", "--rank=2", f"--join={lab.hosts[0].address}", RAY_AUTH_TOKEN="wrong" * 10)
    assert wrong.returncode == 2
    assert "refuses this token" in wrong.stderr.splitlines()[-1]


@pytest.mark.usefixtures("smaller")
def test_a_version_that_differs_is_said_before_anything_starts(lab: Lab) -> None:
    """The head claims another torch; a node that would join is told so."""
    address, head = f"{lab.hosts[0].address}:6379", lab.run(0, [*CORRAL, "status", "--json"]).stdout
    [report] = [node for node in json.loads(head)["nodes"] if node["rank"] == 0]
    key, original = f"node/{report['id']}", report["report"]
    try:
        lab.run(0, [sys.executable, "-c", PUT, address, key, json.dumps({**original, "torch": "1.0"})])
        checked = corral(lab, 0, "check", "4")
        assert checked.returncode == 1
        assert "torch differs between nodes: 1.0 on h1; " in checked.stdout
        result = corral(lab, 2, "up", "--rank=2", f"--join={address}")
        assert result.returncode == 2
        assert "does not fit the head, h1" in result.stderr
        assert "1.0 there" in result.stderr
    finally:
        lab.run(0, [sys.executable, "-c", PUT, address, key, json.dumps(original)])


PUT = """
import json, sys
from corral.cluster.gcs import Gcs, find_head

Gcs(find_head(sys.argv[1])).put(sys.argv[2], json.loads(sys.argv[3]))
"""


@pytest.mark.usefixtures("smaller")
def test_another_ray_that_runs_is_named(lab: Lab) -> None:
    options = ["--head", "--port=7100", "--include-dashboard=false", *SMALL[1:]]
    lab.run(2, [*RAY, "start", *options], RAY_AUTH_MODE="disabled")
    result = corral(lab, 2, "up", "--head")
    assert result.returncode == 2
    assert "another Ray runs on this node: " in result.stderr
    assert "raylet (pid" in result.stderr
