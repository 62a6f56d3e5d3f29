"""How nodes are numbered, what is left of a placement without some, and what a node knows of itself."""

import socket
from typing import Any

import pytest

from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import parse_placement
from corral.runtime.network import check_interfaces, interface_towards
from corral.runtime.nodes import HEAD_RESOURCE, Node, number_nodes, restrict_placement


def entry(address: str, *, head: bool = False, rank: int | None = None, alive: bool = True) -> dict[str, Any]:
    """As `ray.nodes()` has it."""
    return {
        "NodeID": f"id of {address}",
        "NodeManagerAddress": address,
        "NodeManagerHostname": f"host of {address}",
        "Alive": alive,
        "Resources": {HEAD_RESOURCE: 1.0} if head else {},
        "Labels": {} if rank is None else {"corral.rank": str(rank)},
    }


def ranks(nodes: list[Node]) -> dict[str, int]:
    return {node.address: node.rank for node in nodes}


def test_the_head_is_first_and_the_others_follow_by_address() -> None:
    entries = [entry("10.0.0.10"), entry("10.0.0.9"), entry("10.0.0.30", head=True)]
    assert ranks(number_nodes(entries, 3, frozenset())) == {"10.0.0.30": 0, "10.0.0.9": 1, "10.0.0.10": 2}


def test_labels_come_before_addresses() -> None:
    entries = [entry("10.0.0.1", head=True, rank=2), entry("10.0.0.2", rank=1), entry("10.0.0.3", rank=0)]
    assert ranks(number_nodes(entries, 3, frozenset())) == {"10.0.0.3": 0, "10.0.0.2": 1, "10.0.0.1": 2}


def test_a_lost_node_keeps_its_place() -> None:
    entries = [entry("10.0.0.2", alive=False), entry("10.0.0.1", head=True), entry("10.0.0.3")]
    assert ranks(number_nodes(entries, 3, frozenset({"10.0.0.2"}))) == {"10.0.0.1": 0, "10.0.0.3": 2}


def test_a_lost_node_that_came_back_is_left_out() -> None:
    entries = [entry("10.0.0.2", alive=False), entry("10.0.0.1", head=True), entry("10.0.0.2"), entry("10.0.0.3")]
    assert ranks(number_nodes(entries, 3, frozenset({"10.0.0.2"}))) == {"10.0.0.1": 0, "10.0.0.3": 2}


def test_a_spare_node_takes_the_place_of_a_lost_one() -> None:
    entries = [entry("10.0.0.1", head=True), entry("10.0.0.3"), entry("10.0.0.4")]
    lost = frozenset({"10.0.0.2"})
    assert ranks(number_nodes(entries, 3, lost)) == {"10.0.0.1": 0, "10.0.0.4": 1, "10.0.0.3": 2}


def test_a_node_that_is_dead_and_not_missed_has_no_place() -> None:
    entries = [entry("10.0.0.2", alive=False), entry("10.0.0.1", head=True), entry("10.0.0.3")]
    assert ranks(number_nodes(entries, 2, frozenset())) == {"10.0.0.1": 0, "10.0.0.3": 1}


def nodes_without(rank: int, num_nodes: int) -> list[Node]:
    return [Node(number, "", f"10.0.0.{number}", "") for number in range(num_nodes) if number != rank]


def test_roles_keep_the_devices_that_are_left() -> None:
    nodes = nodes_without(1, 3)
    left = restrict_placement(parse_placement({"actor": "0-1", "rollout": "2-5"}, 6), nodes, 2, frozenset({"10.0.0.1"}))
    assert left.roles == {"actor": (0, 1), "rollout": (4, 5)}
    assert [node.devices for node in nodes] == [(0, 1), (4, 5)]


def test_a_role_without_devices_ends_the_run() -> None:
    placement = parse_placement({"actor": "0-1", "rollout": "2-3"}, 4)
    with pytest.raises(RunError, match=r"rollout has no device left: it was on 10\.0\.0\.1 only"):
        restrict_placement(placement, nodes_without(1, 2), 2, frozenset({"10.0.0.1"}))


def test_devices_that_nobody_uses_are_left_alone() -> None:
    nodes = nodes_without(-1, 2)
    restrict_placement(parse_placement({"actor": "1"}, 4), nodes, 2, frozenset())
    assert [node.devices for node in nodes] == [(1,), ()]


def test_loopback_is_chosen_for_what_is_on_this_machine_only() -> None:
    assert interface_towards("127.0.0.1") == interface_towards("::1") == "lo"


@pytest.mark.parametrize("written", ["eth77", "=l", "lo,eth77"])
def test_an_interface_that_is_not_there_is_named(written: str) -> None:
    with pytest.raises(UserError, match=f"NCCL_SOCKET_IFNAME={written}: .* no network interface .* but lo"):
        check_interfaces({"NCCL_SOCKET_IFNAME": written})


def test_interfaces_may_be_named_as_gloo_and_nccl_take_them() -> None:
    for written in ("lo", "=lo", "l", "^eth77", "lo:4000"):
        check_interfaces({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": written})
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME=l: "):
        check_interfaces({"GLOO_SOCKET_IFNAME": "l"})


def test_an_address_that_nothing_leads_to_gives_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_route)
    assert interface_towards("10.255.255.1") is None
