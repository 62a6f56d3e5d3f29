"""All checks, in order: each node for itself, then the nodes together, then what the recipe asks of them."""

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.cluster.doctor.agent import Examined, Question
from corral.cluster.doctor.clocks import ROUND_TRIPS, check_clocks, offset_of
from corral.cluster.doctor.collectives import check_pairs
from corral.cluster.doctor.crowd import Alone, Cluster, Crowd, round_trips
from corral.cluster.doctor.diagnosis import Diagnosis, Order
from corral.cluster.doctor.files import check_named, digest_of, named_in
from corral.cluster.doctor.findings import Finding, Place, at
from corral.cluster.doctor.gpu import check_number
from corral.cluster.doctor.network import Target, check_head, check_proxy, check_reach, check_variables, split
from corral.cluster.doctor.pairs import Meetings
from corral.cluster.doctor.recipe import Capacity, check_devices, check_fit, checkpoint_bytes, read_recipe
from corral.cluster.doctor.rewards import NUM_ROWS, check_reward
from corral.cluster.doctor.security import check_open_ports
from corral.cluster.doctor.shared import PATIENCE_S, SharedPath, check_shared
from corral.cluster.doctor.software import check_versions
from corral.cluster.smi import has_devices
from corral.recipe.errors import UserError, first_line
from corral.recipe.placement import runs_on_ray
from corral.recipe.plan import Plan
from corral.recipe.schema import Recipe
from corral.runtime.network import INTERFACE_VARIABLES

RUNS = "`logging.runs`"
PROMPTS = 256
"""Rows whose prompts are rendered."""


def check(order: Order, address: str | None, everywhere: bool, here: bool) -> Diagnosis:
    """Of the cluster that is meant, or of this node where there is none. One that cannot be reached is a finding,
    unless it was asked for by name. `everywhere`: there has to be one."""
    named = everywhere or address is not None
    if here:
        return check_here(order)
    try:
        from corral.cluster.reach import attached, reach
        from corral.runtime.connection import find_cluster
    except ImportError as error:
        if named:
            raise UserError("a cluster needs Ray: pip install 'corral[cluster]'") from error
        return check_here(order)
    try:
        if not named and find_cluster(None) is None:
            return check_here(order)
        found = reach(address)
        with attached(found):
            return check_cluster(order, found)
    except UserError as error:
        if named:
            raise
        diagnosis = check_here(order)
        fix = "the rest is of this node alone; where its Ray still runs, `corral down` first"
        diagnosis.findings.insert(0, Finding("error", "cluster", first_line(error), fix, (diagnosis.places[0],)))
        return diagnosis


def check_here(order: Order) -> Diagnosis:
    """This node only."""
    place, (plan, findings) = Place(socket.gethostname()), plan_of(order)
    crowd = Alone(place, question_for(place, order, plan, None, None))
    try:
        return Survey(crowd, order, plan, place, {place: {}}, Diagnosis([place], findings)).run()
    finally:
        crowd.close()


def check_cluster(order: Order, address: str) -> Diagnosis:
    """All nodes of the cluster that this process has joined, whose head is at `address`."""
    import ray

    from corral.runtime.nodes import place as order_of

    plan, findings = plan_of(order)
    known = sorted(ray.nodes(), key=order_of)
    alive = [entry for entry in known if entry["Alive"]]
    places = [Place(one["NodeManagerHostname"], one["NodeManagerAddress"], rank) for rank, one in enumerate(alive)]
    entries = dict(zip(places, alive, strict=True))
    findings += check_dead(known, alive)
    own_id = ray.get_runtime_context().get_node_id()
    own = next(place for place, entry in entries.items() if entry["NodeID"] == own_id)
    order.say(f"asking {len(entries)} nodes")
    crowd = Cluster.start(entries, lambda place: question_for(place, order, plan, address, objects_of(entries[place])))
    try:
        return Survey(crowd, order, plan, own, entries, Diagnosis(list(entries), findings), address).run()
    finally:
        crowd.close()


def plan_of(order: Order) -> tuple[Plan | None, list[Finding]]:
    if order.recipe is None:
        return None, []
    return read_recipe(order.recipe, order.overrides, bool(has_devices()))


def objects_of(entry: Mapping[str, Any]) -> int | None:
    """Bytes that Ray's object store has on the node."""
    return int(entry["Resources"].get("object_store_memory", 0)) or None


def question_for(place: Place, order: Order, plan: Plan | None, cluster: str | None, objects: int | None) -> Question:
    return Question(
        cluster=cluster,
        address=place.address or "127.0.0.1",
        folder=os.getcwd(),
        runs=os.path.abspath("runs" if plan is None else plan.recipe.logging.runs),
        writes=0 if plan is None else checkpoint_bytes(plan),
        objects=objects,
        environment={name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ},
        limit_s=order.limit_s * 0.75,
    )


def check_dead(known: Sequence[Mapping[str, Any]], alive: Sequence[Mapping[str, Any]]) -> list[Finding]:
    there = {entry["NodeManagerAddress"] for entry in alive}
    dead = {entry["NodeManagerAddress"]: entry["NodeManagerHostname"] for entry in known}
    return [
        Finding(
            "warning",
            "nodes",
            "was part of this cluster and is gone",
            "`corral up` on it again, if it is needed",
            (Place(host, address),),
        )
        for address, host in dead.items()
        if address not in there
    ]


@dataclass
class Survey:
    """One examination. The order of the checks is that of `run`."""

    crowd: Crowd
    order: Order
    plan: Plan | None
    own: Place
    """Where this process runs, and a training would be started."""
    entries: Mapping[Place, Mapping[str, Any]]
    """What Ray knows of the nodes; nothing without a cluster."""
    diagnosis: Diagnosis
    head: str = ""
    """host:port."""
    examined: dict[Place, Examined] = field(default_factory=dict)

    def run(self) -> Diagnosis:
        self.each_for_itself()
        broken: set[frozenset[Place]] = set()
        if len(self.crowd.places) > 1:
            self.clocks()
            broken = self.ports()
        self.shared_folders()
        self.all_reduces(broken)
        self.access()
        if self.plan is not None and self.own in self.crowd.places:
            self.recipe(self.plan)
        self.add(self.crowd.findings)
        return self.diagnosis

    def add(self, findings: Any) -> None:
        self.diagnosis.findings += list(findings)

    def ask(self, method: str, arguments: Any = None, **options: Any) -> dict[Place, Any]:
        return self.crowd.ask(method, arguments, **{"limit_s": self.order.limit_s, **options})

    # --- nodes

    def each_for_itself(self) -> None:
        self.examined = self.ask("examine")
        for place, examined in self.examined.items():
            self.add(at(place, examined.findings))
            gpus = int(self.entries[place].get("Resources", {}).get("GPU", 0))
            if gpus:
                self.add(at(place, check_number(examined.torch.num_devices, gpus)))
        self.add(check_versions({place: examined.versions for place, examined in self.examined.items()}))
        self.add(check_variables({place: examined.variables for place, examined in self.examined.items()}))
        self.add(at(self.own, check_proxy(os.environ, [place.address for place in self.crowd.places if place.address])))

    def clocks(self) -> None:
        offsets = {}
        for place in self.crowd.places:
            if trips := round_trips(self.crowd, place, ROUND_TRIPS, self.order.limit_s):
                offsets[place] = offset_of(trips)
        self.add(check_clocks(offsets))

    def ports(self) -> set[frozenset[Place]]:
        """Returns the pairs that cannot talk."""
        self.order.say("connecting every node to every other")
        places = self.crowd.places
        ports = {place: self.examined[place].port for place in places}
        targets = {to: Target(to.address, ports[to], f"corral {to.address}") for to in places}
        answers = self.ask("connect", lambda place: [[targets[to] for to in places if to != place]])
        tried = {
            (place, to): why
            for place, reasons in answers.items()
            for to, why in zip((other for other in places if other != place), reasons, strict=True)
        }
        self.add(check_reach(ports, tried))
        answers = self.ask("connect", lambda place: [[Target(*split(self.head))]])
        self.add(check_head(self.head, {place: why for place, [why] in answers.items()}))
        return {frozenset(pair) for pair, why in tried.items() if why}

    def access(self) -> None:
        """Ports that take commands without a token, as far as another node reaches them."""
        for place, examined in self.examined.items():
            ports, other = examined.ports, next((one for one in self.crowd.places if one != place), None)
            if other is not None and not all(port.wants_token for port in ports):
                targets = [Target(place.address, port.port) for port in ports]
                reasons = self.ask("connect", lambda _, targets=targets: [targets], only=[other]).get(other, [])
                ports = tuple(port for port, why in zip(ports, reasons, strict=False) if not why)
            self.add(at(place, check_open_ports(ports, None if other is None else other.host)))

    def shared_folders(self) -> None:
        wanted = [SharedPath(os.path.abspath(path), "--shared") for path in self.order.shared]
        if self.plan is not None and self.plan.recipe.cluster.nodes > 1:
            wanted.append(SharedPath(os.path.abspath(self.plan.recipe.logging.runs), RUNS))
        for one in wanted:
            self.order.say(f"looking at {one.path} from all nodes")
            made = one.why == RUNS and not os.path.isdir(one.path)  # a run would make it
            with contextlib.suppress(OSError):
                os.makedirs(one.path) if made else None
            try:
                self.shared_folder(one)
            finally:
                with contextlib.suppress(OSError):
                    os.rmdir(one.path) if made else None

    def shared_folder(self, one: SharedPath) -> None:
        token, numbers = secrets.token_hex(4), {place: number for number, place in enumerate(self.crowd.places)}
        places = {number: place for place, number in numbers.items()}
        within_s = min(PATIENCE_S, self.order.limit_s / 10)
        try:
            written = self.ask("leave", lambda place: [one.path, token, numbers[place]])
            left = [numbers[place] for place, why in written.items() if not why]
            others = {place: [n for n in left if n != number] for place, number in numbers.items()}
            unseen = self.ask("unseen", lambda place: [one.path, token, others[place], within_s])
            missing = {place: [places[number] for number in unseen_there] for place, unseen_there in unseen.items()}
        finally:
            self.ask("remove", lambda place: [one.path, token, numbers[place]])
        self.add(check_shared(one, written, missing))

    def all_reduces(self, broken: set[frozenset[Place]]) -> None:
        """`broken`: pairs that cannot talk, which is told already."""
        busy = [place for place, examined in self.examined.items() if examined.is_busy]
        if busy:
            what = "a run is under way here: speeds are what it leaves; NCCL, which would take its memory, is not tried"
            self.add([Finding("note", "all-reduce", what, nodes=tuple(busy))])
        meetings = Meetings(self.crowd, self.examined, self.order.limit_s, self.order.say)
        self.diagnosis.pairs += meetings.all_pairs("gloo", broken)
        if not busy:
            self.diagnosis.pairs += meetings.all_pairs("nccl", broken)
            self.diagnosis.pairs += meetings.inside("nccl")
        self.add(check_pairs(self.diagnosis.pairs))

    # --- the recipe

    def recipe(self, plan: Plan) -> None:
        recipe = plan.recipe
        self.order.say("what the recipe needs")
        capacities = {place: self.capacity(place) for place in self.crowd.places}
        on_cluster = runs_on_ray(recipe) and bool(self.entries[self.own])
        if on_cluster:
            self.add(check_devices(recipe, capacities))
        able = {place: own for place, own in capacities.items() if own.devices >= recipe.cluster.devices_per_node}
        self.add(check_fit(plan, able if on_cluster else {self.own: capacities[self.own]}))
        self.files(recipe)
        self.rows(plan)

    def capacity(self, place: Place) -> Capacity:
        examined, devices = self.examined[place], 0
        if resources := self.entries[place].get("Resources"):
            from corral.runtime.nodes import WORKER_SLOT

            devices = int(resources.get("GPU") or resources.get(WORKER_SLOT, 0))
        return Capacity(devices, tuple(gpu.total for gpu in examined.gpus), examined.memory)

    def files(self, recipe: Recipe) -> None:
        assert self.order.recipe is not None
        named = named_in(recipe, self.order.recipe)
        digests = self.ask("digests", lambda _: [named])
        before = len(self.diagnosis.findings)
        for number, one in enumerate(named):
            own = {place: found[number] for place, found in digests.items() if one.everywhere or place == self.own}
            self.add(check_named(one, own, self.own, self.examined[self.own].offline))
        if before == len(self.diagnosis.findings):
            self.add([Finding("ok", "files", "what the recipe names is there", nodes=tuple(digests))])

    def rows(self, plan: Plan) -> None:
        """What is done with the first rows of the data."""
        from corral.data.sources import load_rows

        data, rollout = plan.recipe.data, plan.recipe.rollout
        source = data.train.model_copy(update={"max_rows": min(data.train.max_rows or PROMPTS, PROMPTS)})
        try:
            rows = load_rows(source, data, plan.recipe.mixing_weights("train"))
        except UserError as error:
            self.add([Finding("error", "data", str(error))])
            return
        self.chat(plan.recipe, rows)
        self.order.say("calling the reward function")
        everywhere = self.crowd.places if runs_on_ray(plan.recipe) else [self.own]
        for tag, environment in plan.recipe.tagged_environments.items():
            some = [row for row in rows if row.extra.get("environment", tag) == tag][:NUM_ROWS]
            arguments = [environment, some, rollout.max_response_tokens]
            for place, trial in self.ask("try_reward", lambda _, given=arguments: given, only=everywhere).items():
                self.add(at(place, check_reward(trial, plan, tag)))

    def chat(self, recipe: Recipe, rows: Sequence[Any]) -> None:
        from corral.cluster.doctor.chat import check_chat, check_prompts
        from corral.model.load import load_tokenizer

        model = next(one for one in named_in(recipe, Path()) if one.key == "model.path")
        if not digest_of(model):
            self.add([Finding("note", "chat template", f"not checked: {recipe.model.path} is not on this node")])
            return
        try:
            tokenizer = load_tokenizer(recipe.model)
        except UserError as error:
            self.add([Finding("error", "chat template", first_line(error))])
            return
        self.add(check_chat(tokenizer, recipe))
        self.add(check_prompts(tokenizer, recipe, rows))
