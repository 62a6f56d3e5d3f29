"""`corral up` where something is wrong: a node is missing, a head file is old, a network or a port is the wrong one.

Hosts have two networks. The first one leads nowhere, and their own names are 127.0.1.1.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from clusters import begin_up, bring_up, corral
from deadlines import wait_until, within
from hosts import DECOY, Lab

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("trouble")]


@pytest.fixture
def lab() -> Iterator[Lab]:
    """New hosts for every test: sooner made than `corral down` has ended what a test started."""
    with two_networks() as made:
        yield made


@contextmanager
def two_networks() -> Iterator[Lab]:
    with Lab(2, loopback_names=True, decoys=True) as made:
        assert made.run(0, ["hostname", "-I"]).stdout.split()[0].startswith(DECOY)
        yield made


# --- one cluster, and what comes over it


@dataclass(frozen=True)
class CallTimeout:
    """A cluster whose worker came when the head had stopped waiting for it."""

    lab: Lab
    code: int
    said: str
    error: str
    waited_s: float


@pytest.fixture(scope="module")
def late() -> Iterator[CallTimeout]:
    with two_networks() as lab:
        started = time.monotonic()
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": lab.hosts[0].address}
        head = begin_up(lab, 0, "--timeout=3", devices=1, OMP_NUM_THREADS="1", **place)
        said, _ = head.communicate(timeout=within(60))
        error, waited_s = lab.errors.read_text().splitlines()[-1], time.monotonic() - started
        bring_up(lab, devices=1)  # what was up stays, and the rest can still come
        yield CallTimeout(lab, head.returncode, said, error, waited_s)


@pytest.mark.core
def test_a_node_that_is_missing_is_waited_for_in_bounded_time_and_named(late: CallTimeout) -> None:
    assert late.code == 1
    assert "rank 0 (head)" in late.said
    assert late.error.startswith("error: after 3 s the cluster lacks rank 1 of 2; here: 0 h1.")
    assert late.waited_s < within(45)


@pytest.mark.core
def test_the_network_that_leads_to_the_head_is_used_and_not_the_first(late: CallTimeout) -> None:
    lab = late.lab
    nodes = json.loads(corral(lab, 0, "status", "--json").stdout)["nodes"]
    assert [node["address"] for node in nodes] == [host.address for host in lab.hosts]
    for host in (0, 1):
        [raylet] = lab.run(host, ["pgrep", "-x", "raylet"]).stdout.split()
        variables = lab.run(host, ["cat", f"/proc/{raylet}/environ"]).stdout.split("\0")
        assert "GLOO_SOCKET_IFNAME=eth0" in variables
        assert "NCCL_SOCKET_IFNAME==eth0" in variables


def test_a_head_that_was_started_again_gets_its_worker_back(late: CallTimeout) -> None:
    lab = late.lab
    corral(lab, 0, "down")
    bring_up(lab, devices=1)  # the worker's Ray, of the first cluster, is still there
    assert corral(lab, 0, "check", "2", f"--timeout={within(5):g}").returncode == 0


# --- everything else


def test_a_head_with_two_networks_asks_which_one(lab: Lab) -> None:
    result = corral(lab, 0, "up", "--head", "--nodes=2", "--devices=1")
    assert result.returncode == 2
    assert "several networks" in result.stderr
    assert f"ens1 {DECOY}.11, eth0 {lab.hosts[0].address}" in result.stderr
    wrong = corral(lab, 0, "up", "--head", "--nodes=2", MASTER_ADDR="10.0.0.99")
    assert "but that is 10.0.0.99, and this node has ens1" in wrong.stderr


def test_a_head_that_is_missing_is_waited_for_in_bounded_time(lab: Lab) -> None:
    result = corral(lab, 1, "up", "--timeout=2", RANK="1", WORLD_SIZE="2", MASTER_ADDR=lab.hosts[0].address)
    assert result.returncode == 1
    assert "the head was not there within 2 s: nothing answers at" in result.stderr
    unknown = corral(lab, 1, "up", "--timeout=1", RANK="1", WORLD_SIZE="2", MASTER_ADDR="nobody")
    assert "the name nobody is unknown on this node" in unknown.stderr
    nowhere = corral(lab, 1, "up", RANK="1", WORLD_SIZE="2")
    assert nowhere.returncode == 2
    assert "where is the head?" in nowhere.stderr


def test_a_head_file_of_an_earlier_cluster_is_refused(lab: Lab, tmp_path: Path) -> None:
    file, address = tmp_path / "head.json", lab.hosts[0].address
    stale = {
        "id": "old",
        "cluster_id": "ab",
        "address": f"{address}:6379",
        "time": time.time() - 7201,
        "hostname": "h1",
    }
    file.write_text(json.dumps(stale))
    worker = ("--rank=1", "--nodes=2", f"--head-file={file}")
    off = corral(lab, 1, "up", *worker, "--timeout=2")
    assert off.returncode == 1
    assert "it is stale: written 2h00m ago by h1, and no cluster answers at" in off.stderr.splitlines()[-1]

    head = begin_up(
        lab, 0, "--rank=0", "--nodes=2", f"--head-file={file}", "--id=new", f"--address={address}", devices=1
    )
    wait_until(lambda: file.exists() and json.loads(file.read_text())["id"] == "new", 60, lab.errors.read_text)
    fresh = json.loads(file.read_text())
    other = corral(lab, 1, "up", *worker, "--id=another", "--timeout=2")
    assert "it is of another start (new, written" in other.stderr.splitlines()[-1]
    file.write_text(json.dumps({**fresh, "cluster_id": "cd"}))
    replaced = corral(lab, 1, "up", *worker, "--timeout=2")
    assert "another cluster answers at" in replaced.stderr.splitlines()[-1]

    # A worker that has the token of another cluster waits for the right one, and finds it.
    token, old = file.with_name("head.json.token"), tmp_path / "home" / ".corral" / "token"
    old.parent.mkdir(parents=True)
    old.write_text("old" * 20)
    old.chmod(0o600)
    token.rename(tmp_path / "later")
    file.write_text(json.dumps(fresh))
    joined = begin_up(lab, 1, *worker, "--id=new", devices=1, HOME=str(tmp_path / "home"))
    wait_until(lambda: "refuses it" in lab.errors.read_text(), 60, lab.errors.read_text)
    (tmp_path / "later").rename(token)
    assert "all 2 nodes are there" in joined.communicate(timeout=within(60))[0]
    assert "all 2 nodes are there" in head.communicate(timeout=within(60))[0]
    assert token.stat().st_mode & 0o777 == 0o600

    # Another node's part of it on the head's host would take the place of the head's record, and leave Ray behind.
    second = corral(lab, 0, "up", "--rank=2", "--nodes=3", f"--head-file={file}", "--id=new", "--beside", "--port=7000")
    assert second.returncode == 2
    assert "this node is rank 0 of the cluster at" in second.stderr.splitlines()[-1]
    corral(lab, 0, "down")
    assert not token.exists()
    assert not file.exists()


def test_a_port_in_use_is_said_with_who_has_it(lab: Lab) -> None:
    lab.begin(0, ["python3", "-m", "http.server", "--bind", "0.0.0.0", "7200"])
    lab.run(0, ["sh", "-c", "until ss -ltn | grep -q 7200; do sleep 0.1; done"])
    result = corral(lab, 0, "up", "--head", "--port=7200")
    assert result.returncode == 2
    assert "port 7200 of this node is in use by python3 (pid " in result.stderr


def test_a_worker_must_agree_that_there_is_no_token(lab: Lab) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": lab.hosts[0].address}
    head = begin_up(lab, 0, "--insecure", "--no-wait", devices=1, RANK="0", **variables)
    said, _ = head.communicate(timeout=within(60))
    assert "no token: whoever reaches this node can run commands on it" in said
    result = corral(lab, 1, "up", RANK="1", RAY_AUTH_TOKEN="any" * 20, **variables)
    assert result.returncode == 2
    assert "was started with --insecure, and so must this node be" in result.stderr


def test_one_that_stays_and_waits_ends_with_a_signal_too(lab: Lab) -> None:
    said = len(lab.errors.read_text())
    head = begin_up(lab, 0, "--block", devices=1, RANK="0", WORLD_SIZE="2", MASTER_ADDR=lab.hosts[0].address)
    wait_until(lambda: "waiting for rank 1 of 2" in lab.errors.read_text()[said:], 60, lab.errors.read_text)
    lab.run(0, ["pkill", "-TERM", "-f", "corral.cli.main up"])
    assert head.wait(timeout=within(30)) == 0
    assert not lab.run(0, ["pgrep", "-x", "raylet|gcs_server"], check=False).stdout


def test_one_that_stays_ends_with_a_signal_and_says_why_when_the_head_is_gone(lab: Lab) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": lab.hosts[0].address}
    head = begin_up(lab, 0, "--block", devices=1, RANK="0", **variables)
    worker = begin_up(lab, 1, "--block", devices=1, RANK="1", **variables)
    assert corral(lab, 1, "check", "2", "--nodes=2", f"--timeout={within(60):g}").returncode == 0
    [blocking] = lab.run(0, ["pgrep", "-f", "corral.cli.main up"]).stdout.split()
    lab.run(0, ["kill", f"-{signal.SIGTERM.value}", blocking])
    assert head.wait(timeout=within(30)) == 0
    assert not lab.run(0, ["pgrep", "-x", "raylet|gcs_server"], check=False).stdout
    assert worker.wait(timeout=within(60)) == 1
    assert "error: the head," in lab.errors.read_text().splitlines()[-1]
    assert not lab.run(1, ["pgrep", "-x", "raylet"], check=False).stdout


def test_a_gcs_with_storage_is_started_again_and_the_cluster_lives_on(lab: Lab) -> None:
    bring_up(lab, "--gcs-storage", devices=1)
    address = f"{lab.hosts[0].address}:6379"
    driver = lab.begin(1, [sys.executable, "-c", COUNTING, address])
    assert driver.stdout is not None
    assert driver.stdin is not None
    assert driver.stdout.readline() == "1\n"
    [killed] = lab.run(0, ["pgrep", "-x", "gcs_server"]).stdout.split()
    lab.run(0, ["kill", "-KILL", killed])

    def is_back() -> bool:
        return lab.run(0, ["pgrep", "-x", "gcs_server"], check=False).stdout.split() not in ([], [killed])

    wait_until(is_back, 60, lab.errors.read_text, pause_s=0.1)
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert [driver.stdout.readline() for _ in range(2)] == ["2\n", "1\n"]
    status = corral(lab, 1, "status", "--json")
    assert [node["rank"] for node in json.loads(status.stdout)["nodes"]] == [0, 1]  # which the tables on disk have
    assert corral(lab, 0, "down").returncode == 0
    assert not lab.run(0, ["pgrep", "-f", "gcs_server|gcs_keeper"], check=False).stdout
    assert not lab.run(0, ["sh", "-c", "ls -d /tmp/corral-*/ray-6379/gcs-?*/"], check=False).stdout


COUNTING = """
import sys
import ray
from corral.runtime.membership import find_membership
from corral.runtime.token import use_token
from pathlib import Path

use_token(Path(find_membership().token_file))
ray.init(address=sys.argv[1], logging_level="ERROR")

@ray.remote(num_cpus=0.1)
class Counter:
    count = 0

    def add(self):
        self.count += 1
        return self.count

counters = [Counter.remote()]
print(ray.get(counters[0].add.remote()), flush=True)
sys.stdin.readline()
counters.append(Counter.remote())
for counter in counters:  # the old one has its state, and a new one can be made
    print(ray.get(counter.add.remote(), timeout=100), flush=True)
"""


def test_a_rendezvous_answers_on_the_chosen_address_alone(lab: Lab) -> None:
    """torch's store has no password: what reaches its port may read and write, so nothing else is to reach it."""
    stores = lab.begin(0, [sys.executable, "-c", RENDEZVOUS, lab.hosts[0].address])
    assert stores.stdout is not None
    ports = json.loads(stores.stdout.readline())
    decoy = lab.run(0, ["hostname", "-I"]).stdout.split()[0]

    def answering(host: int, address: str) -> list[str]:
        """Which of the stores a host reaches at an address."""
        return json.loads(lab.run(host, [sys.executable, "-c", CONNECT, address, json.dumps(ports)]).stdout)

    assert answering(1, lab.hosts[0].address) == ["network"]
    assert answering(0, lab.hosts[0].address) == ["network"]
    assert answering(0, decoy) == []
    assert answering(0, "127.0.0.1") == ["loopback"]


RENDEZVOUS = """
import json, sys, time
from corral.runtime.worker import Worker

workers = {"network": Worker(0, 2, sys.argv[1], timeout_s=60), "loopback": Worker(0, 2, "127.0.0.1", timeout_s=60)}
addresses = {name: worker.open_rendezvous() for name, worker in workers.items()}
print(json.dumps({name: int(address.rpartition(":")[2]) for name, address in addresses.items()}), flush=True)
time.sleep(600)
"""
CONNECT = """
import json, socket, sys

def answers(port):
    try:
        socket.create_connection((sys.argv[1], port), 5).close()
    except ConnectionRefusedError:
        return False
    return True

print(json.dumps([name for name, port in json.loads(sys.argv[2]).items() if answers(port)]))
"""
