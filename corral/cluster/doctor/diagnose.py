"""All checks, in order: each node for itself, then the nodes together, then what the recipe needs of them."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from corral.cluster.doctor import file_checks, network_checks, recipe_checks
from corral.cluster.doctor.findings import Diagnosis, Finding, GroupSpeed, NodeRef, at_node
from corral.cluster.doctor.machine_checks import check_num_gpus
from corral.cluster.doctor.network_checks import ConnectionTarget, check_open_ports
from corral.cluster.doctor.node_inspector import (
    ClusterNodes,
    InspectionRequest,
    NodeArguments,
    NodeInspector,
    NodeSet,
    NodeState,
    same_for_all,
)
from corral.cluster.node_report import device_vendor
from corral.recipe.errors import UserError, first_line, install_command
from corral.recipe.placement import runs_on_ray
from corral.recipe.plan import Plan
from corral.recipe.schema import WeightedReward
from corral.runtime.network import INTERFACE_VARIABLES, split_address

RUNS = "`logging.runs`"
NUM_PROMPTS = 256  # rows whose prompts are rendered
NUM_ROUND_TRIPS = 5
PAIR_S = 30.0  # for two nodes to connect and sum a tensor


@dataclass(frozen=True)
class DoctorOptions:
    recipe: Path | None = None
    overrides: Sequence[str] = ()
    shared: Sequence[str] = ()
    limit_s: float = 120.0
    report: Callable[[str], None] = lambda text: None  # called with what is being done

    def plan(self) -> tuple[Plan | None, list[Finding]]:
        if self.recipe is None:
            return None, []
        return recipe_checks.read_recipe(self.recipe, self.overrides, bool(device_vendor()))


def diagnose(options: DoctorOptions, address: str | None, everywhere: bool, here: bool) -> Diagnosis:
    """Checks the cluster that is meant, or this node where there is none. A cluster that cannot be reached is a
    finding, unless it was named. `everywhere`: there has to be one."""
    must_exist = everywhere or address is not None
    if here:
        return diagnose_here(options)
    try:
        from corral.cluster.gcs import attached, find_head
        from corral.runtime.connection import find_cluster
    except ImportError as error:
        if must_exist:
            raise UserError(f"a cluster needs Ray: {install_command('cluster')}") from error
        return diagnose_here(options)
    try:
        if not must_exist and find_cluster(None) is None:
            return diagnose_here(options)
        found = find_head(address)
        with attached(found):
            return diagnose_cluster(options, found)
    except UserError as error:
        if must_exist:
            raise
        diagnosis = diagnose_here(options)
        fix = "the rest is of this node alone; where its Ray still runs, `corral down` first"
        diagnosis.findings.insert(0, Finding("error", "cluster", first_line(error), fix, (diagnosis.nodes[0],)))
        return diagnosis


def diagnose_here(options: DoctorOptions) -> Diagnosis:
    """Checks this node only."""
    node, (plan, findings) = NodeRef(socket.gethostname()), options.plan()
    local = NodeSet({node: NodeInspector(request_for(node, options, plan))}, options.limit_s)
    with contextlib.closing(local):
        return Survey(local, options, plan, node, {node: {}}, Diagnosis([node], findings)).run()


def diagnose_cluster(options: DoctorOptions, address: str) -> Diagnosis:
    """Checks all nodes of the cluster that this process has joined, whose head is at `address`."""
    import ray

    from corral.runtime.nodes import node_order as rank_order

    plan, findings = options.plan()
    known = sorted(ray.nodes(), key=rank_order)
    alive = [entry for entry in known if entry["Alive"]]
    nodes = [NodeRef(one["NodeManagerHostname"], one["NodeManagerAddress"], rank) for rank, one in enumerate(alive)]
    entries = dict(zip(nodes, alive, strict=True))
    for lost in dict.fromkeys(NodeRef(one["NodeManagerHostname"], one["NodeManagerAddress"]) for one in known):
        if lost.address not in {node.address for node in nodes}:
            what, fix = "was part of this cluster and is gone", "`corral up` on it again, if it is needed"
            findings.append(Finding("warning", "nodes", what, fix, (lost,)))
    own_id = ray.get_runtime_context().get_node_id()
    own = next(node for node, entry in entries.items() if entry["NodeID"] == own_id)
    options.report(f"asking {len(entries)} nodes")
    cluster = ClusterNodes(
        entries, lambda node: request_for(node, options, plan, address, entries[node]), options.limit_s
    )
    with contextlib.closing(cluster):
        return Survey(cluster, options, plan, own, entries, Diagnosis(nodes, findings), address).run()


def request_for(
    node: NodeRef,
    options: DoctorOptions,
    plan: Plan | None,
    cluster: str | None = None,
    entry: Mapping[str, Any] | None = None,
) -> InspectionRequest:
    """`entry`: what Ray knows of the node."""
    return InspectionRequest(
        cluster=cluster,
        address=node.address or "127.0.0.1",
        folder=os.getcwd(),
        runs=os.path.abspath("runs" if plan is None else plan.recipe.logging.folder),
        writes=0 if plan is None else recipe_checks.checkpoint_bytes(plan),
        objects=int(entry["Resources"].get("object_store_memory", 0)) or None if entry else None,
        environment={name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ},
        limit_s=options.limit_s * 0.75,
    )


@dataclass
class Survey:
    """Runs all checks on a set of nodes, in the order of `run`."""

    nodes: NodeSet
    options: DoctorOptions
    plan: Plan | None
    own: NodeRef  # where this process runs, and a training would be started
    entries: Mapping[NodeRef, Mapping[str, Any]]  # what Ray knows of the nodes; empty without a cluster
    diagnosis: Diagnosis
    head: str = ""  # host:port
    states: dict[NodeRef, NodeState] = field(default_factory=dict)

    def run(self) -> Diagnosis:
        self.check_each_node()
        broken: set[frozenset[NodeRef]] = set()
        if len(self.nodes.refs) > 1:
            self.check_clocks()
            broken = self.check_ports()
        self.check_shared_folders()
        self.check_all_reduces(broken)
        self.check_access()
        if self.plan is not None and self.own in self.nodes.refs:
            self.check_recipe(self.plan)
        self.add(self.nodes.findings)
        return self.diagnosis

    def add(self, findings: Iterable[Finding]) -> None:
        self.diagnosis.findings += findings

    # --- nodes

    def check_each_node(self) -> None:
        self.states = self.nodes.call(NodeInspector.examine)
        for node, state in self.states.items():
            self.add(at_node(node, state.findings))
            gpus = int(self.entries[node].get("Resources", {}).get("GPU", 0))
            if gpus:
                self.add(at_node(node, check_num_gpus(state.torch.num_devices, gpus)))
        self.add(file_checks.check_versions({node: state.versions for node, state in self.states.items()}))
        self.add(network_checks.check_variables({node: state.variables for node, state in self.states.items()}))
        addresses = [node.address for node in self.nodes.refs if node.address]
        self.add(at_node(self.own, network_checks.check_proxy(os.environ, addresses)))

    def check_clocks(self) -> None:
        offsets = {}
        for node in self.nodes.refs:
            round_trips = []
            for _ in range(NUM_ROUND_TRIPS):
                sent = time.time()
                answered = self.nodes.call(NodeInspector.clock, only=[node]).get(node)
                if answered is None:
                    break
                round_trips.append((sent, answered, time.time()))
            if round_trips:
                offsets[node] = network_checks.clock_offset(round_trips)
        self.add(network_checks.check_clocks(offsets))

    def check_ports(self) -> set[frozenset[NodeRef]]:
        """Returns the pairs that cannot connect."""
        self.options.report("connecting every node to every other")
        nodes = self.nodes.refs
        ports = {node: self.states[node].port for node in nodes}
        targets = {to: ConnectionTarget(to.address, ports[to], f"corral {to.address}") for to in nodes}
        answers = self.nodes.call(
            NodeInspector.try_connections, lambda node: [[targets[to] for to in nodes if to != node]]
        )
        tried = {
            (node, to): why
            for node, reasons in answers.items()
            for to, why in zip((other for other in nodes if other != node), reasons, strict=True)
        }
        self.add(network_checks.check_connections(ports, tried))
        answers = self.nodes.call(
            NodeInspector.try_connections, same_for_all([ConnectionTarget(*split_address(self.head))])
        )
        self.add(network_checks.check_head(self.head, {node: why for node, [why] in answers.items()}))
        return {frozenset(pair) for pair, why in tried.items() if why}

    def check_access(self) -> None:
        """Checks ports that take commands without a token, as far as another node reaches them."""
        for node, state in self.states.items():
            ports, other = state.ports, next((one for one in self.nodes.refs if one != node), None)
            if other is not None and not all(port.wants_token for port in ports):
                targets = [ConnectionTarget(node.address, port.port) for port in ports]
                answers = self.nodes.call(NodeInspector.try_connections, same_for_all(targets), only=[other])
                ports = tuple(port for port, why in zip(ports, answers.get(other, []), strict=False) if not why)
            self.add(at_node(node, check_open_ports(ports, None if other is None else other.host)))

    def check_shared_folders(self) -> None:
        wanted = [file_checks.SharedPath(os.path.abspath(path), "--shared") for path in self.options.shared]
        if self.plan is not None and self.plan.recipe.cluster.nodes > 1:
            wanted.append(file_checks.SharedPath(os.path.abspath(self.plan.recipe.logging.folder), RUNS))
        for shared in wanted:
            self.options.report(f"looking at {shared.path} from all nodes")
            is_made = shared.why == RUNS and not os.path.isdir(shared.path)  # a run would make it
            with contextlib.suppress(OSError):
                os.makedirs(shared.path) if is_made else None
            try:
                self.check_shared_folder(shared)
            finally:
                with contextlib.suppress(OSError):
                    os.rmdir(shared.path) if is_made else None

    def check_shared_folder(self, shared: file_checks.SharedPath) -> None:
        token, nodes = secrets.token_hex(4), self.nodes.refs
        number_of = {node: number for number, node in enumerate(nodes)}
        within_s = min(file_checks.MARKER_S, self.options.limit_s / 10)
        marker: NodeArguments = lambda node: [shared.path, token, number_of[node]]  # noqa: E731
        try:
            written = self.nodes.call(NodeInspector.write_marker, marker)
            left = [number_of[node] for node, why in written.items() if not why]
            others = {node: [one for one in left if one != number] for node, number in number_of.items()}
            unseen = self.nodes.call(
                NodeInspector.unseen_markers, lambda node: [shared.path, token, others[node], within_s]
            )
        finally:
            self.nodes.call(NodeInspector.remove_marker, marker)
        missing = {node: [nodes[number] for number in numbers] for node, numbers in unseen.items()}
        self.add(file_checks.check_shared(shared, written, missing))

    def check_all_reduces(self, broken: set[frozenset[NodeRef]]) -> None:
        """`broken`: pairs that cannot connect, which is reported already."""
        busy = [node for node, state in self.states.items() if state.is_busy]
        if busy:
            what = "a run is under way here: speeds are what it leaves; NCCL, which would take its memory, is not tried"
            self.add([Finding("note", "all-reduce", what, nodes=tuple(busy))])
        speeds = self.diagnosis.speeds
        speeds += self.measure_pairs("gloo", broken)
        if not busy:
            speeds += self.measure_pairs("nccl", broken)
            speeds += self.measure_all_devices("nccl")
        self.add(network_checks.check_speeds(speeds))

    def measure_pairs(self, backend: str, broken: set[frozenset[NodeRef]]) -> list[GroupSpeed]:
        """Measures all pairs but the broken ones, in rounds as of a tournament: in each of them every node is in one
        pair at most, and so disturbs no other."""
        able = [node for node in self.nodes.refs if backend == "gloo" or self.states[node].torch.available]
        found = []
        for number, pairs_of_round in enumerate(network_checks.pair_rounds(len(able)), start=1):
            pairs = [(able[one], able[other]) for one, other in pairs_of_round]
            pairs = [pair for pair in pairs if frozenset(pair) not in broken and set(pair) <= set(self.nodes.refs)]
            self.options.report(f"{backend} all-reduce, round {number}: {len(pairs)} pairs")
            found += self.measure_groups([{one: 1, other: 1} for one, other in pairs], backend, PAIR_S)
        return found

    def measure_all_devices(self, backend: str) -> list[GroupSpeed]:
        """Measures the GPUs of each node that has several, then those of all nodes in one group, as a run makes it."""
        devices = {node: self.states[node].torch.num_devices for node in self.nodes.refs}
        devices = {node: number for node, number in devices.items() if number}
        found = []
        if inside := [{node: number} for node, number in devices.items() if number > 1]:
            self.options.report(f"{backend} all-reduce inside nodes")
            found += self.measure_groups(inside, backend, 2 * PAIR_S)
        if len(devices) > 1 and sum(devices.values()) > 2:
            self.options.report(f"{backend} all-reduce of all GPUs")
            found += self.measure_groups([devices], backend, 2 * PAIR_S)
        return found

    def measure_groups(self, groups: Sequence[Mapping[NodeRef, int]], backend: str, most_s: float) -> list[GroupSpeed]:
        """Measures groups that have no node in common, at once. A group: how many devices of each node."""
        limit_s = min(most_s, self.options.limit_s)
        wait_s = limit_s + self.options.limit_s
        first = [next(iter(group)) for group in groups]
        ports = self.nodes.call(NodeInspector.open_store, same_for_all(limit_s), only=first, limit_s=wait_s)
        arguments: dict[NodeRef, list[Any]] = {}
        for head, group in zip(first, groups, strict=True):
            store = [head.address or "127.0.0.1", ports.get(head)]
            if isinstance(store[1], int):
                for node, rank in zip(group, accumulate(group.values(), initial=0), strict=False):
                    arguments[node] = [*store, rank, group[node], sum(group.values()), backend, limit_s]
        answers = self.nodes.call(
            NodeInspector.measure_group, arguments.__getitem__, only=list(arguments), limit_s=wait_s
        )
        measured = [
            GroupSpeed(tuple(group), backend, self.states[head].interface, sum(group.values()))
            for head, group in zip(first, groups, strict=True)
        ]
        return [network_checks.group_result(one, ports.get(one.nodes[0]), answers) for one in measured]

    # --- the recipe

    def check_recipe(self, plan: Plan) -> None:
        recipe = plan.recipe
        self.options.report("what the recipe needs")
        capacities = {node: self.capacity(node) for node in self.nodes.refs}
        on_cluster = runs_on_ray(recipe) and bool(self.entries[self.own])
        if on_cluster:
            self.add(recipe_checks.check_devices(recipe, capacities))
        able = {node: own for node, own in capacities.items() if own.devices >= recipe.cluster.devices_per_node}
        self.add(recipe_checks.check_fit(plan, able if on_cluster else {self.own: capacities[self.own]}))
        self.check_files(plan)
        self.check_rows(plan)

    def capacity(self, node: NodeRef) -> recipe_checks.NodeCapacity:
        state, devices = self.states[node], 0
        if resources := self.entries[node].get("Resources"):
            from corral.runtime.nodes import WORKER_SLOT

            devices = int(resources.get("GPU") or resources.get(WORKER_SLOT, 0))
        return recipe_checks.NodeCapacity(devices, tuple(gpu.total for gpu in state.gpus), state.memory)

    def check_files(self, plan: Plan) -> None:
        assert self.options.recipe is not None
        required = file_checks.required_files(plan.recipe, self.options.recipe)
        digests = self.nodes.call(NodeInspector.digests, same_for_all(required))
        found: list[Finding] = []
        for number, one in enumerate(required):
            own = {node: every[number] for node, every in digests.items() if one.everywhere or node == self.own}
            found += file_checks.check_required(one, own, self.own, self.states[self.own].offline)
        self.add(found or [Finding("ok", "files", "what the recipe names is there", nodes=tuple(digests))])

    def check_rows(self, plan: Plan) -> None:
        """Checks what is done with the first rows of the data."""
        from corral.data.sources import load_part

        recipe, rollout = plan.recipe, plan.recipe.rollout
        try:
            rows = load_part(
                recipe,
                "train",
                recipe.data.train.first_rows(NUM_PROMPTS),
                warn=lambda text: self.add([Finding("warning", "data", text)]),
            )
        except UserError as error:
            self.add([Finding("error", "data", str(error))])
            return
        self.check_tokenizer(plan, rows)
        if not plan.recipe.needs_engine:
            return
        self.options.report("calling the reward function")
        everywhere = self.nodes.refs if runs_on_ray(plan.recipe) else [self.own]
        for tag, environment in plan.recipe.tagged_environments.items():
            some = [row for row in rows if row.extra.get("environment", tag) == tag]
            for reward in environment.named_rewards.values():
                if reward.is_model:
                    what = f"not tried: {plan.recipe.reward_model.path} is loaded when the run begins"
                    self.add([Finding("note", "reward model", what)])
                    continue
                own = [row for row in some if not isinstance(reward, WeightedReward) or reward.is_for(row.source)]
                own = own[: recipe_checks.NUM_ROWS]
                alone = environment.model_copy(update={"reward": reward, "rewards": {}})
                arguments = same_for_all(alone, own, rollout.max_response_tokens)
                trials = self.nodes.call(NodeInspector.try_reward, arguments, only=everywhere)
                for node, trial in trials.items():
                    self.add(at_node(node, recipe_checks.check_reward(trial, plan, reward)))

    def check_tokenizer(self, plan: Plan, rows: Sequence[Any]) -> None:
        from corral.model.model_loading import load_tokenizer

        recipe = plan.recipe
        model = next(one for one in file_checks.required_files(recipe, Path()) if one.key == "model.path")
        if not file_checks.digest_of(model):
            self.add([Finding("note", "chat template", f"not checked: {recipe.model.path} is not on this node")])
            return
        try:
            tokenizer = load_tokenizer(recipe.model)
        except UserError as error:
            self.add([Finding("error", "chat template", first_line(error))])
            return
        self.add(recipe_checks.check_chat(tokenizer, recipe))
        self.add(recipe_checks.check_prompts(tokenizer, recipe, rows))
