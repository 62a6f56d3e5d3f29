"""Workers on the devices of a Ray cluster: one process per device, all booked in one placement group, so that nothing
runs on a device twice."""

import asyncio
import atexit
import faulthandler
import os
import shlex
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import MESH_ROLES, Placement
from corral.recipe.schema import Recipe
from corral.runtime.group import CallTimeout, Group
from corral.runtime.worker import BUILDER

try:
    import ray
except ImportError as error:
    raise UserError("`cluster.runtime: ray` needs Ray: pip install 'corral[cluster]'") from error

from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from corral.runtime.cluster import book, find_nodes, given_by_ray, remote_class
from corral.runtime.connection import connect
from corral.runtime.network import INTERFACE_VARIABLES, answers
from corral.runtime.nodes import WORKER_SLOT, Heartbeats, Node, NodeAgent, head_address, restrict
from corral.runtime.process import DeviceProcess, Seat
from corral.runtime.remote import Device, NodeGone, Process, RayGroup, node_lost, reply
from corral.runtime.remote_debugger import LOOPBACK, Lookout, Wanted, WorkerDebugger, check
from corral.runtime.services import END_WITHIN_S

LIVES_WITH = {"rewards": "rollout"}
"""Roles that the placement does not name."""
CALLS_AT_ONCE = 1000
"""On one worker."""
AGENT_THREADS = 16
"""More than a node has workers that die at once; the agent does not answer for longer than their last words take."""
GOODBYE_S = 3.0
"""For roles to close."""
CLOSE_S = 15.0


@dataclass(frozen=True)
class DeviceSet:
    """Devices with the same roles."""

    roles: tuple[str, ...]
    devices: tuple[int, ...]

    @property
    def is_world(self) -> bool:
        """Whether its workers are one world of torch.distributed. Those that only play know nothing of each other, so
        that each can be done without."""
        return len(self.devices) > 1 and any(role in MESH_ROLES for role in self.roles)


class RayRuntime:
    """Workers on the devices of a Ray cluster."""

    placement: Placement
    """As it is now: without the devices of nodes that were lost."""
    groups: dict[str, Group]
    """By role, and `worker` with all workers. Ranks follow the order of devices."""
    sets: list[DeviceSet]
    nodes: list[Node]
    """Those with devices that are used, in the order of their ranks."""

    def __init__(self, recipe: Recipe, logs: Path, builder: str, debugger: Wanted) -> None:
        self.recipe, self.cluster, self.builder, self.debugger = recipe, recipe.cluster, builder, debugger
        self.logs = logs.resolve()
        self.token, self.gcs_address = uuid.uuid4().hex[:12], ""
        self.nodes, self.sets, self.groups = [], [], {}
        self.devices: dict[int, Device] = {}
        self.heartbeats: Heartbeats | None = None
        self.lookout: Lookout | None = None
        self.booking: Any = None
        self.actors: list[Any] = []
        self.told: set[str] = set()
        self.is_guest = True

    @classmethod
    async def start(
        cls,
        recipe: Recipe,
        placement: Placement,
        logs: Path,
        *,
        say: Callable[[str], None],
        without_nodes: frozenset[str] = frozenset(),
        builder: str = BUILDER,
        debugger: Wanted = Wanted(),
    ) -> "RayRuntime":
        """`without_nodes`: addresses of those that were lost. Their devices are missing from the placement then."""
        runtime = cls(recipe, logs, builder, debugger)
        try:
            await runtime._start(placement, say, without_nodes)
        except BaseException:
            runtime.close()
            raise
        return runtime

    async def _start(self, placement: Placement, say: Callable[[str], None], without: frozenset[str]) -> None:
        self.is_guest = ray.is_initialized()
        connect(self.cluster)
        self.gcs_address = ray.get_runtime_context().gcs_address
        self.resource, nodes = await find_nodes(self.cluster, without, say)
        self.placement = restrict(placement, nodes, self.cluster.devices_per_node, without)
        self.nodes = [node for node in nodes if node.devices]
        self.booking, bundles = await book(self.cluster, self.resource, self.nodes, say)
        await self._start_agents()
        check(self.debugger, self.nodes)
        await asyncio.gather(*(self._start_node(node, bundles) for node in self.nodes))
        await asyncio.gather(*(self._await_services(node) for node in self.nodes))
        self.sets = [DeviceSet(roles, devices) for roles, devices in self.placement.groups().items()]
        self.groups = {role: self._group(role, devices) for role, devices in self.placement.roles.items()}
        self.groups["worker"] = self._group("worker", sorted(self.devices))
        names = {number: str(device) for number, device in self.devices.items()}
        self.lookout = Lookout(self.token, names, self.debugger.warn)
        await asyncio.gather(*(self._seat(device) for device in self.devices.values()))
        await asyncio.gather(*(self._meet(one) for one in self.sets if one.is_world))

    # --- while it runs

    async def build(
        self, role: str, recipe: Recipe, resume_from: Path | None, *, rank: int | None = None
    ) -> list[dict[str, Any]]:
        """Builds a role on its workers, or on one of them. Returns what each has to say of itself."""
        devices = self.placement.roles[LIVES_WITH.get(role, role)]
        ranks = None if rank is None else [rank]
        arguments = (self.builder, role, recipe, resume_from)
        facts = await self._group("worker", devices).all("build", *arguments, ranks=ranks)
        self.groups.setdefault(role, self._group(role, devices))
        return facts

    async def watch(self) -> None:
        """Runs until a node is lost, and raises that; each once."""
        watched = [node for node in self.nodes if node.address not in self.told]
        for_ever = asyncio.get_running_loop().create_future()
        await asyncio.wait({for_ever, *(node.gone for node in watched)}, return_when=asyncio.FIRST_COMPLETED)
        lost = next(node for node in watched if node.lost.done())
        self.told.add(lost.address)
        raise node_lost(lost, None)

    @property
    def num_nodes(self) -> int:
        """That were not lost."""
        return sum(not node.lost.done() for node in self.nodes)

    def devices_of(self, address: str) -> tuple[int, ...]:
        return next(node.devices for node in self.nodes if node.address == address)

    async def replace(self, device: int) -> None:
        """Starts a worker's process again in its place, without roles. Not one that has made a world with others: those
        must all begin again."""
        own = self.devices[device]
        assert not self._set_of(device).is_world, "the other workers of its world would wait for it for ever"
        if own.node.lost.done():
            raise node_lost(own.node, device)
        with suppress(RayError):
            ray.kill(own.process.actor)
        own.process = await self._start_process(own.node, own.process.bundle)
        await self._seat(own)
        own.is_dead = False

    def close(self) -> None:
        """Ends what was started, in bounded time even if the cluster does not answer. Where its head is gone, Ray ends
        the rest by itself."""
        if not ray.is_initialized():
            return
        for watcher in (self.heartbeats, self.lookout):
            if watcher is not None:
                watcher.close()
        thread = threading.Thread(target=self._close, daemon=True)
        if answers(self.gcs_address):
            thread.start()
            thread.join(CLOSE_S)
        else:
            atexit.register(end_within, CLOSE_S)

    def _close(self) -> None:
        alive = [device for device in self.devices.values() if not device.is_dead and not device.node.lost.done()]
        goodbyes = [device.process.actor.call.remote("worker", "close") for device in alive]
        goodbyes += [node.agent.close.remote() for node in self.nodes if node.agent and not node.lost.done()]
        if goodbyes:
            timeout_s = GOODBYE_S + (2 * END_WITHIN_S if self.cluster.services else 0)
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=timeout_s)
        for actor in self.actors:
            ray.kill(actor)
        if self.booking is not None:
            remove_placement_group(self.booking)
        if not self.is_guest:
            ray.shutdown()

    # --- starting

    async def _start_agents(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        marker = self.logs / f".seen-{self.token}"
        marker.touch()
        head = head_address()
        for node in self.nodes:
            where = NodeAffinitySchedulingStrategy(node.id, soft=False)
            options = remote_class(NodeAgent, where, max_restarts=-1, max_concurrency=AGENT_THREADS)
            node.agent = options.remote(head, marker, self.token, self.cluster.services, own_folder())
            node.gone = asyncio.wrap_future(node.lost)
            self.actors.append(node.agent)
        facts = (self._in_time(node.agent.facts.remote(), node, "its agent") for node in self.nodes)
        try:
            for node, known in zip(self.nodes, await asyncio.gather(*facts), strict=True):
                node.facts = known
        finally:
            marker.unlink(missing_ok=True)
        self.heartbeats = Heartbeats(self.nodes, self.cluster.node_timeout_s, self.gcs_address)

    async def _await_services(self, node: Node) -> None:
        if self.cluster.services:
            longest_s = max(service.start_timeout_s for service in self.cluster.services.values())
            waiting = node.agent.await_services.remote()
            problems = await self._in_time(waiting, node, "what `cluster.services` names", longest_s + GOODBYE_S)
            if problems:
                raise RunError(f"{node}: {problems[0]}")

    async def _start_node(self, node: Node, bundles: dict[int, int]) -> None:
        """The processes of a node. Which accelerator each got is known afterwards: devices are numbered by these."""
        started = await asyncio.gather(*(self._start_process(node, bundles[number]) for number in node.devices))
        folder = self.logs if node.facts.sees_logs else node.facts.folder
        for number, process in zip(node.devices, sorted(started, key=accelerator_order), strict=True):
            self.devices[number] = Device(number, node, process, folder / f"worker-{number}.log")

    async def _start_process(self, node: Node, bundle: int) -> Process:
        facts = node.facts
        shim = [facts.python, "-I", "-S", facts.exits, str(facts.folder), facts.python]
        actor = remote_class(
            DeviceProcess,
            PlacementGroupSchedulingStrategy(self.booking, bundle),
            py_executable=shlex.join(shim),
            max_concurrency=CALLS_AT_ONCE,
            **({"num_gpus": 1} if self.resource == "GPU" else {"resources": {self.resource: 1}}),
        ).remote()
        self.actors.append(actor)
        pid, accelerators = await self._in_time(actor.start.remote(), node, "a worker")
        return Process(actor, bundle, pid, accelerators)

    async def _seat(self, device: Device) -> None:
        own, facts = self._set_of(device.number), device.node.facts
        threads = self.recipe.train.threads
        if threads is None and self.resource == WORKER_SLOT:
            threads = max(1, facts.num_cores // len(device.node.devices))
        interfaces = {name: os.environ.get(name, facts.interface) for name in INTERFACE_VARIABLES}
        seat = Seat(
            device=device.number,
            roles=own.roles,
            run=self.recipe.name,
            rank=own.devices.index(device.number),
            size=len(own.devices),
            address=device.node.address,
            timeout_s=self.cluster.call_timeout_s,
            threads=threads,
            log=device.log,
            folder=own_folder(),
            environment={name: value for name, value in interfaces.items() if value is not None},
            chosen={name: os.environ[name] for name in self.cluster.environment if name in os.environ},
            debugger=WorkerDebugger(
                self.token,
                device.number,
                facts.debugger,
                self.debugger.post_mortem,
                device.node.address if self.debugger.insecure else LOOPBACK,
            ),
        )
        await self._in_time(device.process.actor.sit.remote(seat), device.node, f"device {device.number}")

    async def _in_time(self, reference: Any, node: Node, who: str, limit_s: float | None = None) -> Any:
        limit = limit_s or self.cluster.start_timeout_s
        try:
            return await reply(reference, node, limit)
        except NodeGone:
            raise node_lost(node, None, f"{who} started") from None
        except TimeoutError:
            raise CallTimeout(f"{who} on {node} did not start within {limit:g} s (`cluster.start_timeout_s`)") from None
        except RayError as error:
            raise RunError(f"{who} on {node} could not start; is Corral installed there? {error}") from error

    async def _meet(self, one: DeviceSet) -> None:
        """Makes the world of a set."""
        group, limit = self._group("worker", one.devices), self.cluster.start_timeout_s
        meeting = await group.one(0, "rendezvous", timeout_s=limit)
        calls = [asyncio.ensure_future(group.one(rank, "join", meeting)) for rank in range(group.size)]
        done, late = await asyncio.wait(calls, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        for call in late:
            call.cancel()
        for call in done:
            call.result()
        if late:
            names = ", ".join(name for name, call in zip(group.names, calls, strict=True) if call in late)
            raise CallTimeout(
                f"the workers of {', '.join(one.roles)} did not all connect to {meeting} and to each other within "
                f"{limit:g} s (`cluster.start_timeout_s`): {names}. A firewall between the nodes, or the wrong network "
                f"({' and '.join(INTERFACE_VARIABLES)} choose another)"
            )

    def _set_of(self, device: int) -> DeviceSet:
        return next(one for one in self.sets if device in one.devices)

    def _group(self, role: str, devices: Sequence[int]) -> RayGroup:
        own = [self.devices[number] for number in devices]
        return RayGroup(role, own, self.nodes, self.cluster.call_timeout_s, self.cluster.node_timeout_s)


def own_folder() -> Path | None:
    """In which the controller works, and so the workers. None: Ray has put a copy of it on every node."""
    return None if given_by_ray(Path.cwd()) else Path.cwd()


def accelerator_order(process: Process) -> tuple[int, str]:
    """By number; names of other kinds (parts of a GPU) by name. Without accelerators all are alike."""
    name = process.accelerators[0] if process.accelerators else ""
    return (int(name), "") if name.isdecimal() else (sys.maxsize, name)


def end_within(limit_s: float) -> None:
    """This process, with an error, should Ray still wait for its head then. Called at exit, before Ray's own."""
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback_later(limit_s, exit=True, file=os.open(os.devnull, os.O_WRONLY))
