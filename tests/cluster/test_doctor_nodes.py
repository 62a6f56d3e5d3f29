"""The doctor's checks of nodes together: clocks, ports, versions, variables, shared folders, pairs."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from deadlines import within
from hypothesis import given
from hypothesis import strategies as st

from corral.cluster.doctor.file_checks import (
    SharedPath,
    check_shared,
    check_versions,
    own_versions,
    remove_marker,
    source_digest,
    unseen_markers,
    write_marker,
)
from corral.cluster.doctor.findings import Finding, GroupSpeed, NodeRef, format_pairs
from corral.cluster.doctor.network_checks import (
    ClockOffset,
    ConnectionTarget,
    Listener,
    check_clocks,
    check_connections,
    check_interfaces,
    check_own_name,
    check_proxy,
    check_speeds,
    check_variables,
    clock_offset,
    group_result,
    pair_rounds,
    try_connections,
)
from corral.cluster.doctor.node_inspector import InspectionRequest, NodeInspector

H1, H2, H3 = (NodeRef(f"h{number}", f"10.0.0.{number}", number - 1) for number in (1, 2, 3))
SHARED = SharedPath("/shared", "--shared")


# --- clocks


@given(
    offset=st.floats(-1e5, 1e5),
    trips=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=6),
)
def test_the_true_offset_is_within_the_stated_error(offset: float, trips: list[tuple[float, float]]) -> None:
    """`trips`: seconds to the other node and back."""
    found = clock_offset([(100.0, 100.0 + there + offset, 100.0 + there + back) for there, back in trips])
    assert abs(found.seconds - offset) <= found.error_s + 1e-6
    assert found.error_s == pytest.approx(min(there + back for there, back in trips) / 2)


@pytest.mark.parametrize(("seconds", "level"), [(0.2, "ok"), (2.0, "warning"), (-40.0, "error"), (40.0, "error")])
def test_the_node_whose_clock_is_off_is_named(seconds: float, level: str) -> None:
    found = list(check_clocks({H1: ClockOffset(0, 1e-4), H2: ClockOffset(seconds, 1e-3), H3: ClockOffset(1e-3, 1e-3)}))
    assert [one.level for one in found] == [level]
    if level != "ok":
        assert found[0].nodes == (H2,)
        assert ("ahead" if seconds > 0 else "behind") in found[0].what


def test_the_clock_of_the_one_who_asks_may_be_the_wrong_one() -> None:
    [found] = check_clocks({H1: ClockOffset(0, 1e-4), H2: ClockOffset(100, 1e-3), H3: ClockOffset(100.01, 1e-3)})
    assert found.nodes == (H1,)


def test_what_cannot_be_told_apart_from_a_slow_answer_is_not_told() -> None:
    assert [one.level for one in check_clocks({H1: ClockOffset(0, 1e-4), H2: ClockOffset(1.5, 1.0)})] == ["ok"]


# --- ports


def tried(*failed: tuple[NodeRef, NodeRef]) -> dict[tuple[NodeRef, NodeRef], str]:
    pairs = [(one, other) for one in (H1, H2, H3) for other in (H1, H2, H3) if one != other]
    return {pair: "no answer within 3 s" if pair in failed else "" for pair in pairs}


PORTS = {H1: 1001, H2: 1002, H3: 1003}


def test_a_way_that_works_in_one_direction_only_is_named_with_the_direction() -> None:
    [found] = check_connections(PORTS, tried((H1, H3)))
    assert found.level == "error"
    assert found.what.startswith(
        "h1 cannot connect to h3:1003 (no answer within 3 s); h3 to h1 works: a firewall on h3"
    )
    assert found.nodes == (H1, H3)


def test_a_pair_without_a_way_is_named_once() -> None:
    [found] = check_connections(PORTS, tried((H1, H3), (H3, H1)))
    assert "nor h3 to h1" in found.what


def test_a_node_that_nobody_reaches_is_named_alone() -> None:
    [found] = check_connections(PORTS, tried((H1, H3), (H2, H3)))
    assert found.what.startswith("no other node can connect to h3:1003")
    assert found.nodes == (H3,)


def test_all_ways_open_is_well() -> None:
    assert [one.level for one in check_connections(PORTS, tried())] == ["ok"]


def test_connecting_says_what_happened() -> None:
    listener = Listener("127.0.0.1", "me")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    answers = try_connections(
        [
            ConnectionTarget("127.0.0.1", listener.port, "me"),
            ConnectionTarget("127.0.0.1", listener.port, "somebody else"),
            ConnectionTarget("127.0.0.1", listener.port),
            ConnectionTarget("127.0.0.1", free),
        ]
    )
    listener.close()
    assert answers == ["", "another machine answers there", "", "connection refused"]


# --- names, interfaces, variables


def test_a_name_that_means_loopback_is_a_note() -> None:
    [found] = check_own_name("h1", ["127.0.1.1"])
    assert found.level == "note"
    assert "127.0.1.1" in found.what
    assert list(check_own_name("h1", ["10.0.0.1"])) == []
    assert [one.level for one in check_own_name("h1", [])] == ["note"]


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "error"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "error"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, None),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "error"),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "note"),
        ({}, None),
    ],
)
def test_interface_variables_name_interfaces_of_the_node(variables: dict[str, str], level: str | None) -> None:
    found = list(check_interfaces(variables, {"eth0": "10.0.0.1", "eth1": "192.168.0.1"}, "eth0"))
    assert [one.level for one in found] == ([level] if level else [])


def test_variables_that_only_some_nodes_have_are_named() -> None:
    same = {"NCCL_IB_HCA": "mlx5_0", "GLOO_SOCKET_IFNAME": "eth0"}
    found = list(check_variables({H1: same, H2: {**same, "GLOO_SOCKET_IFNAME": "ens1"}, H3: {"NCCL_IB_HCA": "mlx5_1"}}))
    assert [(one.level, one.nodes) for one in found] == [("warning", ()), ("warning", (H3,))]
    assert "mlx5_1 on h3" in found[0].what
    assert "GLOO_SOCKET_IFNAME is set on h1, h2 and not here" in found[1].what


def test_a_proxy_that_would_swallow_requests_to_ray_is_a_note() -> None:
    proxy = {"http_proxy": "http://proxy:3128"}
    assert [one.level for one in check_proxy(proxy, ["10.0.0.1"])] == ["note"]
    for spared in ("127.0.0.1,10.", "127.0.0.1, 10.0.0.0/8", "*"):
        assert list(check_proxy({**proxy, "no_proxy": spared}, ["10.0.0.1"])) == []
    assert list(check_proxy({}, ["10.0.0.1"])) == []
    assert [one.what[:9] for one in check_proxy({"ALL_PROXY": "socks5://proxy"}, [])] == ["ALL_PROXY"]


# --- versions


def test_the_node_with_another_version_is_named() -> None:
    usual = own_versions("", "")
    old = {**usual, "torch": "2.10.0+cpu", "transformers": "5.0"}
    found = list(check_versions({H1: usual, H2: old, H3: usual}))
    assert [(one.level, one.nodes) for one in found[:2]] == [("error", (H2,)), ("warning", (H2,))]
    assert "torch 2.10.0+cpu, and on h1, h3" in found[0].what
    assert found[2].level == "ok"
    assert "torch" not in found[2].what
    assert source_digest() in found[2].what


# --- shared folders


def test_a_folder_is_shared_when_each_sees_the_others_files(tmp_path: Path) -> None:
    assert [write_marker(str(tmp_path), "token", number) for number in (0, 1)] == ["", ""]
    assert unseen_markers(str(tmp_path), "token", [0, 1], 0) == []
    assert unseen_markers(str(tmp_path), "another", [0, 1], 0) == [0, 1]
    for number in (0, 1):
        remove_marker(str(tmp_path), "token", number)
    assert unseen_markers(str(tmp_path), "token", [1], 0) == [1]
    assert list(tmp_path.iterdir()) == []
    assert write_marker(str(tmp_path / "not there"), "token", 0) == "No such file or directory"


def test_the_node_that_has_another_folder_is_named() -> None:
    [found] = check_shared(SHARED, {H1: "", H2: "", H3: ""}, {H1: [H2], H2: [H1, H3], H3: [H2]})
    assert found.nodes == (H2,)
    assert "h1, h3" in found.what


def test_folders_that_are_all_their_own() -> None:
    [found] = check_shared(SHARED, {H1: "", H2: ""}, {H1: [H2], H2: [H1]})
    assert found.nodes == (H1, H2)


def test_a_folder_that_cannot_be_written_to_is_named_with_the_reason() -> None:
    [found] = check_shared(SHARED, {H1: "", H2: "Read-only file system"}, {H1: [], H2: []})
    assert found.nodes == (H2,)
    assert "Read-only file system" in found.what
    assert [one.level for one in check_shared(SHARED, {H1: "", H2: ""}, {H1: [], H2: []})] == ["ok"]


# --- pairs


@given(st.integers(0, 17))
def test_all_pairs_are_measured_once_and_no_node_twice_in_a_round(num_nodes: int) -> None:
    found = pair_rounds(num_nodes)
    assert sorted(pair for one in found for pair in one) == sorted(combinations(range(num_nodes), 2))
    for one in found:
        nodes = [node for pair in one for node in pair]
        assert len(nodes) == len(set(nodes))
    assert len(found) == max(0, num_nodes - 1 + num_nodes % 2) * (num_nodes > 1)


def pair(one: NodeRef, other: NodeRef, speed: float = 1e9, error: str = "") -> GroupSpeed:
    return GroupSpeed((one, other), "gloo", "eth0", 2, 1e-4, speed, error=error)


def test_a_pair_that_is_far_slower_than_the_others_is_named() -> None:
    [found] = check_speeds([pair(H1, H2), pair(H2, H3), pair(H1, H3, 1e8)])
    assert found.level == "warning"
    assert found.nodes == (H1, H3)
    assert "100" in found.what or "0.10 GB/s" in found.what
    assert [one.level for one in check_speeds([pair(H1, H2), pair(H2, H3, 5e8)])] == ["ok"]


def test_a_pair_that_hangs_is_an_error() -> None:
    hung = group_result(GroupSpeed((H1, H2), "nccl"), 4000, {H1: "no result within 30 s"})
    assert hung.error == "no result within 30 s"
    [found] = check_speeds([hung])
    assert (found.level, found.nodes) == ("error", (H1, H2))
    assert "NCCL_DEBUG" in found.fix


def test_all_devices_are_a_group_beside_pairs() -> None:
    whole = replace(GroupSpeed((H1, H2), "nccl", num_devices=16), bytes_per_s=2e10, exchanged_per_s=1e10)
    found = check_speeds([pair(H1, H2), replace(whole, transports=("NET/IB", "P2P")), replace(whole, error="hangs")])
    texts = {finding.level: finding.what for finding in found if "nccl" in finding.what}
    assert texts["error"] == "all 16 GPUs cannot sum a tensor together with nccl: hangs"
    assert texts["ok"].startswith("nccl between all 16 GPUs: 20.00 GB/s")
    assert texts["ok"].endswith("all-to-all 10.00 GB/s; over NET/IB and P2P")
    assert format_pairs([whole]) == []


def test_the_table_of_pairs_is_a_triangle() -> None:
    assert format_pairs([pair(H1, H2), pair(H2, H3, error="x"), pair(H1, H3, 2e9)]) == [
        "gloo all-reduce between pairs, over eth0",
        "                  h1                h2",
        "h2  1.00 GB/s 100 µs",
        "h3  2.00 GB/s 100 µs            failed",
    ]


@pytest.fixture
def inspector(tmp_path: Path) -> Callable[[], NodeInspector]:
    request = InspectionRequest(None, "127.0.0.1", str(tmp_path), str(tmp_path), 0, None, {}, limit_s=within(60))
    return lambda: NodeInspector(request)


@pytest.mark.slow
def test_processes_of_a_node_sum_a_tensor_and_one_that_waits_in_vain_is_ended(
    inspector: Callable[[], NodeInspector], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = inspector(), inspector()
    try:
        findings: tuple[Finding, ...] = one.examine().findings
        assert {"torch", "memory", "disk"} <= {finding.check for finding in findings}
        port = one.open_store(within(60))
        assert isinstance(port, int)
        with ThreadPoolExecutor(2) as pool:  # two nodes with two devices and one
            ranks = [(one, 0, 2), (other, 2, 1)]
            calls = [
                pool.submit(node.measure_group, "127.0.0.1", port, first, number, 3, "gloo", within(60))
                for node, first, number in ranks
            ]
            for measured in [call.result() for call in calls]:
                assert not isinstance(measured, str), measured
                assert measured["latency_s"] > 0
                assert measured["bytes_per_s"] > 1e6
                assert measured["exchanged_per_s"] > 1e6
        port = one.open_store(within(60))
        assert isinstance(port, int)
        assert one.measure_group("127.0.0.1", port, 0, 1, 2, "gloo", limit_s=0.5) == "no result within 0.5 s"
        assert one.probes[0].process is None
    finally:
        one.close()
        other.close()
