"""`corral doctor` on a cluster of three hosts: well, and with everything wrong at once."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from clusters import bring_up, corral
from deadlines import within
from hosts import Driver, Lab
from runs import write_recipe

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("doctor")]

FIREWALL = """
table inet doctor {{
  chain input {{
    type filter hook input priority 0;
    ip saddr {address} tcp flags & (syn|ack) == syn drop
  }}
}}
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3, loopback_names=True) as made:
        bring_up(made)
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def recipe(folder: Path, tiny_model: Path) -> Path:
    return write_recipe(folder, tiny_model)


@pytest.fixture(scope="module")
def well(lab: Lab, folder: Path) -> "subprocess.CompletedProcess[str]":
    return corral(lab, 1, "doctor", "--shared", str(folder))


@pytest.mark.core
def test_a_cluster_that_is_well_gets_no_error(well: "subprocess.CompletedProcess[str]") -> None:
    assert well.returncode == 0, well.stdout + well.stderr
    lines = well.stdout.splitlines()
    assert lines[0].startswith("3 nodes: 0 h1 (")
    assert not [line for line in lines if line.startswith("error")]
    seen = {line[9:].split("  ")[0] for line in lines if line.startswith("ok ")}
    assert seen >= {"ports", "clocks", "versions", "shared folder", "all-reduce", "access", "memory", "torch"}


@pytest.mark.core
def test_clocks_of_one_machine_agree(well: "subprocess.CompletedProcess[str]") -> None:
    [line] = [line for line in well.stdout.splitlines() if line.startswith("ok") and "clocks" in line]
    assert float(line.split("within ")[1].split()[0]) <= within(0.1)


@pytest.mark.core
def test_names_that_mean_loopback_are_noted_for_all_nodes_at_once(well: "subprocess.CompletedProcess[str]") -> None:
    noted = [line for line in well.stdout.splitlines() if "127.0.1.1" in line]
    assert len(noted) == 3
    assert all(line.startswith("note") for line in noted)


@pytest.mark.core
def test_every_pair_is_in_the_table(well: "subprocess.CompletedProcess[str]") -> None:
    at = well.stdout.splitlines().index("gloo all-reduce between pairs, over eth0")
    rows = well.stdout.splitlines()[at + 2 : at + 4]
    assert [row.count("B/s") for row in rows] == [1, 2]


@pytest.fixture(scope="module")
def sick(lab: Lab, folder: Path, recipe: Path, well: object) -> dict[str, Any]:
    """h2 cannot connect to h3 and has its own folder and another transformers; h3 has a tiny /dev/shm and another
    recipe; and all of it is as before afterwards."""
    if shutil.which("nft") is None:
        pytest.skip("a firewall needs nft (nftables)")
    own = folder / "own"
    own.mkdir()
    shared = folder / "shared"
    shared.mkdir()
    metadata = next(Path(str(distribution("transformers").locate_file(""))).glob("transformers-*.dist-info/METADATA"))
    (own / "METADATA").write_text(metadata.read_text().replace("\nVersion: ", "\nVersion: 9.", 1))
    (own / "recipe.yaml").write_text(recipe.read_text() + "# changed\n")
    (own / "firewall").write_text(FIREWALL.format(address=lab.hosts[1].address))
    done = {
        1: [f"mount -t tmpfs tmpfs {shared}", f"mount --bind {own}/METADATA {metadata}"],
        2: [
            f"nft -f {own}/firewall",
            "mount -t tmpfs -o size=64m tmpfs /dev/shm",
            f"mount --bind {own}/recipe.yaml {recipe}",
        ],
    }
    for host, commands in done.items():
        lab.run(host, ["sh", "-ec", "\n".join(commands)])
    overrides = ("cluster.nodes=3", "cluster.devices_per_node=2", "model.path=nobody/nothing")
    options = ("--shared", str(shared), "--timeout=40", "--json")
    result = corral(lab, 0, "doctor", str(recipe), *overrides, *options)
    lab.run(1, ["umount", str(shared), str(metadata)])
    lab.run(2, ["sh", "-c", f"nft delete table inet doctor; umount /dev/shm {recipe}"])
    assert result.returncode == 1, result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def of(sick: dict[str, Any], check: str) -> list[tuple[str, list[str], str]]:
    """Level, hosts and text of what is not well."""
    return [
        (finding["level"], [node["host"] for node in finding["nodes"]], finding["what"])
        for finding in sick["findings"]
        if finding["check"] == check and finding["level"] != "ok"
    ]


def test_a_firewall_is_named_with_the_direction(sick: dict[str, Any]) -> None:
    [(level, hosts, what)] = of(sick, "ports")
    assert (level, hosts) == ("error", ["h2", "h3"])
    assert what.startswith("h2 cannot connect to h3:")
    assert "h3 to h2 works: a firewall on h3" in what
    assert sorted(pair["nodes"] for pair in sick["speeds"]) == [["h1", "h2"], ["h1", "h3"]]


def test_a_folder_that_is_not_shared_is_named(sick: dict[str, Any]) -> None:
    [(level, hosts, what)] = of(sick, "shared folder")
    assert (level, hosts) == ("error", ["h2"])
    assert "h1, h3" in what


def test_another_version_on_one_node_is_named(sick: dict[str, Any]) -> None:
    [(level, hosts, what)] = [one for one in of(sick, "versions") if one[2].startswith("transformers")]
    assert (level, hosts) == ("warning", ["h2"])
    assert what.startswith("transformers 9.")


def test_another_recipe_on_one_node_is_named(sick: dict[str, Any]) -> None:
    recipe, model = of(sick, "files")
    assert recipe[:2] == ("warning", ["h3"])
    assert "is not the same as on h1" in recipe[2]
    assert model[:2] == ("note", ["h1", "h2", "h3"])
    assert "nobody/nothing is not in the Hugging Face cache" in model[2]


def test_a_tiny_shared_memory_is_named(sick: dict[str, Any]) -> None:
    [(level, hosts, what)] = of(sick, "shared memory")
    assert (level, hosts) == ("error", ["h3"])
    assert "64 MiB" in what


def test_the_reward_is_tried_on_every_node(sick: dict[str, Any]) -> None:
    tried = [finding for finding in sick["findings"] if finding["check"] == "reward" and finding["level"] == "ok"]
    assert sorted(finding["nodes"][0]["host"] for finding in tried) == ["h1", "h2", "h3"]


def test_a_node_that_does_not_answer_is_named_with_what_can_be_said_from_here(lab: Lab) -> None:
    """The last one: the node is cut off."""
    driver = Driver(lab, 0)
    assert len(driver.call("doctor_scenarios:start_inspectors")) == 3
    lab.cut(2)
    found = driver.call("doctor_scenarios:call_inspectors")
    assert found["answered"] == found["left"] == ["h1", "h2"]
    [finding] = found["findings"]
    assert (finding["level"], finding["check"], finding["nodes"][0]["host"]) == ("error", "nodes", "h3")
    assert "it has not answered for 2 s" in finding["what"]
    assert "this node cannot connect to" in finding["what"]
