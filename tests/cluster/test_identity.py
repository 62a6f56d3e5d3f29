"""Who a node is: options, then the variables of guides, then those of launchers; and which nodes were lost."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.cluster.gcs import ClusterStatus, Gcs, NodeEntry
from corral.cluster.identity import NodeIdentity, expand_hosts, find_identity
from corral.recipe.errors import UserError

SLURM = {"SLURM_JOB_NODELIST": "gpu-[07-09]", "SLURMD_NODENAME": "gpu-08", "SLURM_JOB_ID": "41"}


def identity(environment: dict[str, str], **options: object) -> NodeIdentity:
    return find_identity(environment, **options)  # type: ignore[arg-type]


GUIDE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.1.0.5"}
TORCHRUN = {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job7"}

KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
KUBEFLOW |= {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}
KUBEFLOW_2 = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
KUBEFLOW_2 |= {"PET_MASTER_ADDR": "job-node-0-0", "PET_MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        (GUIDE, {}, {"rank": 1, "num_nodes": 2, "head": "a", "port": 29500, "is_head": False}),
        (GUIDE, {"rank": 3, "nodes": 4, "join": "b"}, {"rank": 3, "num_nodes": 4, "head": "b"}),
        ({}, {}, {"is_head": True, "num_nodes": None}),
        ({}, {"join": "head.example"}, {"rank": None, "head": "head.example"}),
        # a step on one node calls it 0
        ({**SLURM, "SLURM_NODEID": "0"}, {}, {"rank": 1, "num_nodes": 3, "head": "gpu-07", "id": "41"}),
        (DSTACK, {}, {"rank": 1, "num_nodes": 2, "head": "10.1.0.5"}),
        # RANK counts processes, and torchrun itself listens on MASTER_PORT
        (TORCHRUN, {}, {"rank": 1, "num_nodes": 2, "id": "job7", "port": 6379}),
        # Kubeflow: WORLD_SIZE counts processes, of which each pod has 8
        (KUBEFLOW, {}, {"rank": 1, "num_nodes": 2, "head": "job-master-0", "port": 23456}),
        (KUBEFLOW_2, {}, {"rank": 1, "num_nodes": 2, "head": "job-node-0-0", "port": 29400}),
        # the number of nodes is known from its variable whoever says the rank, unless it has no place among them
        ({"WORLD_SIZE": "4", "RANK": ""}, {"rank": 1, "join": "a"}, {"num_nodes": 4}),
        ({"WORLD_SIZE": "4"}, {"join": "a"}, {"num_nodes": None}),
        ({"RANK": "0"}, {}, {"port": 6379}),
        ({"RANK": "0", "MASTER_PORT": "7000"}, {"port": 7001}, {"port": 7001}),
        ({}, {"join": "10.0.0.1:7002"}, {"port": 7002}),
    ],
    ids=["guides", "options come first", "nothing", "joins", "Slurm", "dstack", "torchrun", "Kubeflow's",
         "its trainer's", "number from its variable", "no place", "default port", "given port", "port of the head"],
)  # fmt: skip
def test_who_a_node_is(environment: dict[str, str], options: dict[str, object], expected: dict[str, object]) -> None:
    found = identity(environment, **options)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_second_process_of_a_node_is_refused() -> None:
    with pytest.raises(UserError, match="once per node"):
        identity({"RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0"})


@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [
        ({"RANK": "two"}, {}, "RANK is 'two'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, {}, "not below the number of nodes"),
        ({"RANK": "0", "MASTER_PORT": "99999"}, {}, "between 1 and 65535"),
        ({"RANK": "1"}, {"head": True}, "--head is rank 0"),
        ({"RANK": "0"}, {"join": "a"}, "joins nobody"),
        ({}, {"head": True, "join": "a"}, "one of them"),
        ({}, {"nodes": 3}, "which node is this"),
        ({"WORLD_SIZE": "3"}, {}, "which node is this"),
        ({}, {"has_head_file": True}, "which node is this"),
        ({}, {"join": "a", "nodes": 3}, "which node is this"),
        ({}, {"join": "a:b"}, "HOST:PORT"),
        ({**SLURM, "SLURMD_NODENAME": "login"}, {}, "not in SLURM_JOB_NODELIST"),
    ],
)
def test_what_does_not_fit_is_one_line(environment: dict[str, str], options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        identity(environment, **options)


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("node1", ["node1"]),
        ("gpu-[0,1]", ["gpu-0", "gpu-1"]),
        ("gpu-[098-101]", ["gpu-098", "gpu-099", "gpu-100", "gpu-101"]),
        ("a[1-2],b,c[3,5-6]x", ["a1", "a2", "b", "c3x", "c5x", "c6x"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
    ],
)
def test_slurms_short_form_is_expanded(short: str, hosts: list[str]) -> None:
    assert expand_hosts(short) == hosts


@given(st.text(alphabet="ab0129-,[]", max_size=12))
def test_any_list_of_hosts_is_expanded_or_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        assert all(isinstance(host, str) for host in expand_hosts(text))


def test_a_node_without_a_rank_that_is_gone_is_lost_although_another_one_is_alive() -> None:
    def entry(name: str, rank: int | None, address: str, is_alive: bool) -> NodeEntry:
        return NodeEntry(name, rank, "", name, address, is_alive, False, {})

    class KnownNodes(Gcs):
        address = "10.0.0.1:6379"

        def __init__(self) -> None: ...

        def nodes(self) -> list[NodeEntry]:
            return [
                entry("head", 0, "10.0.0.1", True),
                entry("earlier-head", 0, "10.0.0.9", False),
                entry("joined", None, "10.0.0.2", True),
                entry("gone", None, "10.0.0.3", False),
                entry("earlier", None, "10.0.0.2", False),
            ]

        def get(self, key: str) -> None: ...

    assert [node.hostname for node in ClusterStatus.query(KnownNodes()).lost] == ["gone"]
