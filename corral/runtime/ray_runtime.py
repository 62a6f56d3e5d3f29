"""Workers on the devices of a Ray cluster: one process per device, all reserved in one placement group, so that nothing
runs on a device twice."""

import asyncio
import atexit
import faulthandler
import json
import logging
import os
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from corral.child_process import describe_exit
from corral.observe.run_files import write_atomically
from corral.recipe.errors import RunError, UserError, install_command
from corral.recipe.memory import GIB
from corral.recipe.mesh import MeshShape
from corral.recipe.placement import MESH_ROLES, Placement, check_ipc_of_gpus, role_mesh
from corral.recipe.schema import Recipe
from corral.runtime.group import CallTimeout, Ranks, Runtime, WorkerLost, gather_calls
from corral.runtime.worker import BUILDER, Worker

try:
    import ray
except ImportError as error:
    raise UserError(f"`cluster.runtime: ray` needs Ray: {install_command('cluster')}") from error

from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from corral.runtime import ray_group
from corral.runtime.connection import connect, disconnect
from corral.runtime.network import INTERFACE_VARIABLES, answers, variables_of_interface
from corral.runtime.node_relay import NodeRelay
from corral.runtime.nodes import (
    EXIT_WAIT_S,
    HEAD_RESOURCE,
    Heartbeats,
    Node,
    NodeAgent,
    ShowMessage,
    copied_by_ray,
    find_nodes,
    node_order,
    remote_class,
    reserve_devices,
    restrict_placement,
)
from corral.runtime.ray_group import (
    ActorProcess,
    DeviceProcess,
    DeviceSlot,
    NodeGone,
    RayGroup,
    WorkerSetup,
    node_lost,
    wait_for_reply,
)
from corral.runtime.remote_debugger import LOOPBACK, DebuggerOptions, DebuggerWatch, WorkerDebugger, check_debugger
from corral.runtime.services import END_WITHIN_S
from corral.runtime.worker_heartbeat import HEARTBEAT_S, WorkerState

logger = logging.getLogger(__name__)

BUILT_WITH = {"rewards": "rollout"}
"""Roles that the placement does not name, and the role on whose devices they are."""
CONCURRENT_CALLS = 1000
"""Calls that may be under way on one worker."""
AGENT_THREADS = 16
"""More than a node has workers that die at once: the agent does not answer for longer than an exit report takes."""
WORKERS_EVERY_S = 5.0
"""Seconds between two versions of `workers.json`."""
SILENCE_S = 30.0
"""Seconds after which the user is warned of a worker that does not answer."""
CLOSE_ROLES_S = 3.0
CLOSE_S = 15.0


@dataclass(frozen=True)
class DeviceSet:
    """Devices with the same roles."""

    roles: tuple[str, ...]
    devices: tuple[int, ...]
    is_world: bool
    """Whether its workers are one world of torch.distributed. Rollout workers know nothing of each other, so that the
    run can do without any of them; nor do reward models that are whole."""


class RayRuntime(Runtime):
    """Workers on the devices of a Ray cluster."""

    sets: list[DeviceSet]
    nodes: list[Node]
    """Nodes with devices that are used, in the order of their ranks; behind them spare ones that have taken the place
    of lost ones."""
    report: ShowMessage

    def __init__(self, recipe: Recipe, logs: Path, builder: str, debugger: DebuggerOptions) -> None:
        self.recipe, self.cluster, self.builder, self.debugger = recipe, recipe.cluster, builder, debugger
        self.logs = logs.resolve()
        self.token, self.gcs_address = uuid.uuid4().hex[:12], ""
        self.nodes, self.sets, self.groups = [], [], {}
        self.devices: dict[int, DeviceSlot] = {}
        self.heartbeats: Heartbeats | None = None
        self.debugger_watch: DebuggerWatch | None = None
        self.reservations: list[Any] = []
        """Placement groups: one of all devices, and one for each node that was replaced."""
        self.started_beside: set[int] = set()
        """Devices of a lost node that a spare one has started with those of another set, which `replace_copies` asks
        for one after the other."""
        self.joined: set[DeviceSet] = set()
        """Sets whose workers have made their worlds."""
        self.actors: list[Any] = []
        self.reported: set[str] = set()
        """Addresses of lost nodes that `watch` has raised."""
        self.lost_workers: asyncio.Queue[WorkerLost] = asyncio.Queue()
        """Losses of workers that `watch` has not raised yet."""
        self.describing: set[asyncio.Task[None]] = set()
        self.writing_workers: asyncio.Task[None] | None = None
        self.owns_connection = False

    @classmethod
    async def start(
        cls,
        recipe: Recipe,
        placement: Placement,
        logs: Path,
        *,
        report: ShowMessage,
        without_nodes: frozenset[str] = frozenset(),
        builder: str = BUILDER,
        debugger: DebuggerOptions = DebuggerOptions(),
    ) -> "RayRuntime":
        """`without_nodes`: addresses of those that were lost. Their devices are missing from the placement then."""
        runtime = cls(recipe, logs, builder, debugger)
        runtime.report = report
        try:
            await runtime._start(placement, without_nodes)
        except BaseException:
            runtime.close()
            raise
        return runtime

    async def _start(self, placement: Placement, without: frozenset[str]) -> None:
        self.owns_connection, self.loop = not ray.is_initialized(), asyncio.get_running_loop()
        connect(self.cluster)
        self.gcs_address = ray.get_runtime_context().gcs_address
        self.resource, nodes = await find_nodes(self.cluster, without, self.report)
        if self.resource == "GPU":
            check_ipc_of_gpus(self.recipe, placement)
        self.placement = restrict_placement(placement, nodes, self.cluster.devices_per_node, without)
        self.nodes = [node for node in nodes if node.devices]
        await self._start_nodes(self.nodes)
        together = {*MESH_ROLES, *(["reward_model"] if self.recipe.reward_model.shard > 1 else [])}
        self.sets = [
            DeviceSet(roles, devices, len(devices) > 1 and not together.isdisjoint(roles))
            for roles, devices in self.placement.groups().items()
        ]
        self.groups = {role: self._group(role, devices) for role, devices in self.placement.roles.items()}
        self.debugger_watch = DebuggerWatch(self.token, self.devices, self.debugger.warn)
        self.writing_workers = asyncio.get_running_loop().create_task(self._write_workers())
        await asyncio.gather(*(self._set_up(device) for device in self.devices.values()))

    # --- while it runs

    async def build(
        self, role: str, recipe: Recipe, resume_from: Path | None, *, ranks: Ranks = None
    ) -> list[dict[str, Any]]:
        devices = self.placement.roles[BUILT_WITH.get(role, role)]
        own = self._set_of(devices[0])
        if own.is_world and role in (*MESH_ROLES, "reward_model") and own not in self.joined:
            self.joined.add(own)
            shape = role_mesh(recipe, role, len(own.devices))
            await self._join_worlds(own, shape, range(shape.replicate))
        workers: RayGroup[Worker] = self._group("worker", devices)
        facts = await workers.all(Worker.build, self.builder, role, recipe, resume_from, ranks=ranks)
        self.groups.setdefault(role, self._group(role, devices))
        return facts

    async def find_blind(self, checkpoint: Path) -> dict[str, str]:
        workers: RayGroup[Worker] = self._group("worker", list(self.devices))
        problems = await workers.all(Worker.problem_with, checkpoint)
        return {name: problem for name, problem in zip(workers.names, problems, strict=True) if problem is not None}

    async def device_memory(self) -> float | None:
        workers: RayGroup[Worker] = self._group("worker", list(self.devices))
        free = await workers.all(Worker.free_device_memory)
        return min((size / GIB for size in free if size is not None), default=None)

    async def watch(self) -> None:
        watched = [node for node in self.nodes if node.address not in self.reported]
        worker = asyncio.ensure_future(self.lost_workers.get())
        try:
            losses: set[asyncio.Future[Any]] = {worker, *(node.gone for node in watched)}
            await asyncio.wait(losses, return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                raise worker.result()
        finally:
            worker.cancel()
        lost = next(node for node in watched if node.lost.done())
        self.reported.add(lost.address)
        raise node_lost(lost, None)

    def _check_workers(self, node: Node, states: Sequence[WorkerState]) -> None:
        """Called with each answer of a node's agent. A worker that has ended is lost even if nobody asks it for
        anything; one that does not answer is reported, and after a time killed, which ends the call that waits for
        it."""
        by_pid = {state.pid: state for state in states}
        for device in self.devices.values():
            process = device.process
            if device.node is not node or device.is_dead or (state := by_pid.get(process.pid)) is None:
                continue
            device.seen = state
            since = time.strftime("%X", time.localtime(state.since))
            now_in = f"in {state.call} since {since}" if state.call else "idle"
            if not state.is_alive:
                self._report_loss(device, f"while {state.call}" if state.call else "while it had nothing to do")
            elif state.silent_s > self.cluster.worker_timeout_s:
                limit = f"{self.cluster.worker_timeout_s:g} s (`cluster.worker_timeout_s`)"
                process.hang = f"did not answer for {limit}, {now_in}, and was killed by Corral"
                node.agent.kill.remote(process.pid)
                self._report_loss(device, "")
            elif process.is_silent != (state.silent_s > SILENCE_S):
                process.is_silent = not process.is_silent
                if process.is_silent:
                    logger.warning("%s has not answered for %g s; it is %s", device, SILENCE_S, now_in)
                else:
                    logger.warning("%s answers again", device)

    async def _write_workers(self) -> None:
        """Writes what the workers do beside their logs, for those who look at the run (`corral view`), as long as it
        runs. A file that cannot be written is an old one, which says how old it is."""
        while True:
            workers = [self._describe(device) for device in self.devices.values()]
            content = json.dumps({"written": time.time(), "workers": workers})
            with suppress(OSError):
                await asyncio.to_thread(write_atomically, self.logs / "workers.json", content)
            await asyncio.sleep(WORKERS_EVERY_S)

    def _describe(self, device: DeviceSlot) -> dict[str, Any]:
        return {
            "node": device.node.hostname,
            "address": device.node.address,
            "device": device.number,
            "roles": self.placement.users(device.number),
            "pid": device.process.pid,
            "state": device.state,
            "call": device.seen.call if device.seen else "",
            "since": device.seen.since if device.seen and device.seen.call else None,
            "log": device.log.name if device.log.parent == self.logs else None,
        }

    def _end_without_head(self) -> None:
        """Workers can be called without Ray's head, and save a checkpoint, until Ray ends them after a minute."""
        self.ending = (
            f"Ray's head process (GCS, {self.gcs_address}) has not answered for {self.cluster.node_timeout_s:g} s "
            "(`cluster.node_timeout_s`), and without it Ray ends all workers"
        )
        self.on_ending()

    def _report_loss(self, device: DeviceSlot, when: str) -> None:
        """Lets `watch` raise the loss, unless a new process takes its place before it could be described: then others
        have reported it."""
        process, device.is_dead = device.process, True

        async def describe() -> None:
            lost = await self._group("worker", [device.number]).describe_death(device, when, process)
            if device.process is process:
                self.lost_workers.put_nowait(lost)

        task = asyncio.get_running_loop().create_task(describe())
        self.describing.add(task)
        task.add_done_callback(self.describing.discard)

    def hurry(self) -> None:
        async def tell() -> None:
            with suppress(RunError):
                await self._group("worker", list(self.devices)).all(Worker.hurry)

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(tell())
            self.describing.add(task)
            task.add_done_callback(self.describing.discard)

        with suppress(RuntimeError):  # the run has ended, and its loop with it
            self.loop.call_soon_threadsafe(begin)

    @property
    def num_nodes(self) -> int:
        return sum(not node.lost.done() for node in self.nodes)

    def devices_of(self, address: str) -> tuple[int, ...]:
        return next(node.devices for node in self.nodes if node.address == address)

    @property
    def lost_devices(self) -> set[int]:
        return {number for number in self.devices if self._is_lost(number)} | self.started_beside

    def _is_lost(self, number: int) -> bool:
        return self.devices[number].is_dead or self.devices[number].node.lost.done()

    async def replace(self, device: int) -> None:
        """Not for a worker that has made a world with others, which `replace_copies` starts together."""
        own = self.devices[device]
        if own.node.lost.done():
            raise node_lost(own.node, device)
        await self._wait_for_head()
        own.is_dead = True  # what ends it now is no loss
        with suppress(RayError):
            ray.kill(own.process.actor)
        own.process = await self._start_process(own.node, own.process.bundle, device)
        await self._set_up(own)
        own.is_dead = False

    async def _wait_for_head(self) -> None:
        """Calls of Ray's would wait for its head in this thread, where `_end_without_head` could not end the run."""
        while not await asyncio.to_thread(answers, self.gcs_address):
            await asyncio.sleep(HEARTBEAT_S)

    async def replace_copies(self, role: str, shape: MeshShape, copies: Sequence[int]) -> None:
        own = self._set_of(self.placement.roles[role][0])
        numbered = [own.devices[rank] for copy in copies for rank in shape.ranks_of_copy(copy)]
        by_node: dict[str, list[DeviceSlot]] = {}
        started = {number for number in self.started_beside if not self._is_lost(number)}
        for device in [self.devices[number] for number in numbered if number not in started]:
            by_node.setdefault(device.node.id, []).append(device)
        starting: list[Coroutine[Any, Any, None]] = []
        for own_devices in by_node.values():
            numbers, node = [device.number for device in own_devices], own_devices[0].node
            starting += [self._take_spare(node, numbers)] if node.lost.done() else map(self.replace, numbers)
        await gather_calls(*starting)
        self.started_beside -= set(numbered)
        await self._join_worlds(own, shape, copies)

    async def abort_replicas(self, devices: Sequence[int]) -> None:
        await self._group("worker", devices).all(Worker.abort_replicas)

    async def _take_spare(self, lost: Node, devices: Sequence[int]) -> None:
        """Starts workers for devices of a lost node on a node that the run does not use; where that has enough devices,
        for those of all trainers on the lost one, whose turn comes next."""
        used = {node.address for node in self.nodes} | self.reported
        entries = [one for one in ray.nodes() if one["Alive"] and one["NodeManagerAddress"] not in used]
        sizes = [(one, one["Resources"].get(self.resource, 0)) for one in sorted(entries, key=node_order)]
        trained = [number for one in self.sets if set(MESH_ROLES) & set(one.roles) for number in one.devices]
        beside = sorted(number for number in trained if self.devices[number].node is lost)
        for wanted in (beside, devices):
            num_devices = len(wanted) + self.cluster.num_service_devices
            if spare := next((entry for entry, size in sizes if size >= num_devices), None):
                break
        else:
            raise RunError(f"no spare node takes the place of {lost}")
        self.started_beside |= set(wanted) - set(devices)
        devices = wanted
        address, hostname = spare["NodeManagerAddress"], spare["NodeManagerHostname"]
        node = Node(lost.rank, spare["NodeID"], address, hostname, tuple(devices))
        self.reported.add(node.address)  # `watch` may be waiting already, for the nodes that it knows
        await self._start_nodes([node])
        node.gone.add_done_callback(lambda _: self.lost_workers.put_nowait(node_lost(node, None)))
        for number in devices:
            await self._set_up(self.devices[number])
            self.devices[number].is_dead = False
        for role, group in self.groups.items():
            group.names[:] = [str(self.devices[number]) for number in self.placement.roles[BUILT_WITH.get(role, role)]]

    def close(self) -> None:
        """Ends what was started, in bounded time even if the cluster does not answer. Where its head is gone, Ray ends
        the rest by itself."""
        if self.writing_workers is not None:
            self.writing_workers.cancel()
        if not ray.is_initialized():
            return
        for watcher in (self.heartbeats, self.debugger_watch):
            if watcher is not None:
                watcher.close()
        has_head = answers(self.gcs_address)
        thread = threading.Thread(target=self._close, args=(has_head,), daemon=True)
        thread.start()
        thread.join(CLOSE_S)
        if not has_head:
            # Ray's own exit handler would wait for its head for minutes.
            atexit.register(exit_within, CLOSE_S)

    def _close(self, has_head: bool) -> None:
        """Actors can still be called without Ray's head, but not be ended through it."""
        alive = [device for device in self.devices.values() if not device.is_dead and not device.node.lost.done()]
        closing = [device.process.actor.call.remote("worker", Worker.close.__name__) for device in alive]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_ROLES_S)
        closing = [node.agent.close.remote() for node in self.nodes if node.agent and not node.lost.done()]
        if closing:
            timeout_s = CLOSE_ROLES_S + (2 * END_WITHIN_S if self.cluster.services else 0)
            ray.wait(closing, num_returns=len(closing), timeout=timeout_s)
        if not has_head:
            return
        for actor in self.actors:
            ray.kill(actor)
        for reservation in self.reservations:
            remove_placement_group(reservation)
        if self.owns_connection:
            disconnect()

    # --- starting

    async def _start_nodes(self, nodes: Sequence[Node]) -> None:
        """Reserves the devices of nodes, and starts their agents, processes and services."""
        reservation, bundles, of_services = await reserve_devices(self.cluster, self.resource, nodes, self.report)
        self.reservations.append(reservation)
        at = partial(PlacementGroupSchedulingStrategy, reservation)
        await self._start_agents(nodes, {node: at(bundle) for node, bundle in of_services.items()})
        self.nodes += [node for node in nodes if not any(node is one for one in self.nodes)]
        if self.heartbeats is None:
            self._watch_nodes()
        check_debugger(self.debugger, nodes)
        strategies = {device: at(bundle) for device, bundle in bundles.items()}
        await asyncio.gather(*(self._start_node(node, strategies) for node in nodes))
        await asyncio.gather(*(self._wait_for_services(node) for node in nodes))

    async def _start_agents(self, nodes: Sequence[Node], bundles: dict[str, Any]) -> None:
        """`bundles`: of devices for services, by the id of their node. An agent has them as its own, and with them Ray
        tells it which GPUs they are."""
        self.logs.mkdir(parents=True, exist_ok=True)
        marker = self.logs / f".seen-{self.token}"
        marker.touch()
        entries = [entry for entry in ray.nodes() if entry["Alive"]]
        head = next((entry for entry in entries if HEAD_RESOURCE in entry["Resources"]), entries[0])
        for node in nodes:
            where: Any = NodeAffinitySchedulingStrategy(node.id, soft=False)
            devices: dict[str, Any] = {}
            if node.id in bundles:
                where = bundles[node.id]
                devices = self._devices(self.cluster.num_service_devices)
            agent = remote_class(NodeAgent, where, max_restarts=-1, max_concurrency=AGENT_THREADS, **devices)
            # One machine that stands for all nodes has each port once.
            services = {} if self.cluster.is_here and node.rank else self.cluster.services
            node.agent = agent.remote(head["NodeManagerAddress"], marker, self.token, services, own_folder())
            node.gone = asyncio.wrap_future(node.lost)
            self.actors.append(node.agent)
            if sum(len(one.devices) for one in self.nodes) >= ray_group.RELAYED_FROM:
                beside = NodeAffinitySchedulingStrategy(node.id, soft=False)
                node.relay = remote_class(NodeRelay, beside, max_restarts=-1, max_concurrency=CONCURRENT_CALLS).remote()
                self.actors.append(node.relay)
        facts = (self._in_time(node.agent.facts.remote(), node, "its agent") for node in nodes)
        try:
            for node, known in zip(nodes, await asyncio.gather(*facts), strict=True):
                node.facts = known
        finally:
            marker.unlink(missing_ok=True)

    def _watch_nodes(self) -> None:
        loop = asyncio.get_running_loop()

        def on_answer(node: Node, workers: list[WorkerState]) -> None:
            loop.call_soon_threadsafe(self._check_workers, node, workers)

        limit_s = self.cluster.node_timeout_s
        self.heartbeats = Heartbeats(
            self.nodes, limit_s, self.gcs_address, on_answer, self._end_without_head, self.report
        )

    async def _wait_for_services(self, node: Node) -> None:
        if self.cluster.services:
            limit_s = CLOSE_ROLES_S + max(service.start_timeout_s for service in self.cluster.services.values())
            ready = node.agent.wait_for_services.remote()
            problems = await self._in_time(ready, node, "what `cluster.services` names", limit_s)
            if problems:
                raise RunError(f"{node}: {problems[0]}")

    async def _start_node(self, node: Node, bundles: dict[int, Any]) -> None:
        """Starts the processes of a node. Which accelerator each got is known afterwards: devices are numbered by
        these."""
        started = await asyncio.gather(*(self._start_process(node, bundles[number]) for number in node.devices))
        folder = self.logs if node.facts.sees_logs else node.facts.folder
        for number, process in zip(node.devices, sorted(started, key=accelerator_order), strict=True):
            log = folder / f"worker-{number}.log"
            if (slot := self.devices.get(number)) is None:
                self.devices[number] = DeviceSlot(number, node, process, log)
            else:  # of a node that was lost
                slot.node, slot.process, slot.log = node, process, log

    async def _start_process(self, node: Node, bundle: Any, device: int | None = None) -> ActorProcess:
        """`device`: its number, where that is known before."""
        facts, name = node.facts, uuid.uuid4().hex[:12]
        shim = [facts.python, "-I", "-S", facts.shim, str(facts.folder), name, facts.python]
        actor = remote_class(
            DeviceProcess,
            bundle,
            py_executable=shlex.join(shim),
            max_concurrency=CONCURRENT_CALLS,
            **self._devices(1),
        ).remote()
        self.actors.append(actor)
        what = "a worker" if device is None else f"device {device}"
        pid, accelerators = await self._in_time(actor.start.remote(), node, what, process=name, device=device)
        return ActorProcess(name, actor, bundle, pid, accelerators)

    def _devices(self, number: int) -> dict[str, Any]:
        """Returns options of an actor that has so many devices."""
        return {"num_gpus": number} if self.resource == "GPU" else {"resources": {self.resource: number}}

    async def _set_up(self, device: DeviceSlot) -> None:
        own, facts = self._set_of(device.number), device.node.facts
        threads = self.recipe.train.threads
        if threads is None:  # Ray would give an actor with a GPU one
            threads = max(1, facts.num_cores // len(device.node.devices))
        interfaces = variables_of_interface(facts.interface) if facts.interface else {}
        interfaces |= {name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ}
        rank = own.devices.index(device.number)
        span = own.devices[rank : rank + self.recipe.rollout.engine.tensor_parallel]
        setup = WorkerSetup(
            device=device.number,
            roles=own.roles,
            run=self.recipe.name,
            run_folder=self.logs.parent,
            rank=rank,
            size=len(own.devices),
            address=device.node.address,
            timeout_s=self.cluster.call_timeout_s,
            threads=threads,
            accelerators=tuple(name for number in span for name in self.devices[number].process.accelerators),
            log=device.log,
            node_folder=facts.folder,
            folder=own_folder(),
            environment=interfaces,
            chosen={name: os.environ[name] for name in self.cluster.environment if name in os.environ},
            debugger=WorkerDebugger(
                self.token,
                device.number,
                facts.debugger,
                self.debugger.post_mortem,
                device.node.address if self.debugger.insecure else LOOPBACK,
            ),
        )
        process, number = device.process, device.number
        ready = process.actor.set_up.remote(setup)
        await self._in_time(ready, device.node, f"device {number}", process=process.name, device=number)

    async def _in_time(
        self,
        reference: Any,
        node: Node,
        what: str,
        limit_s: float | None = None,
        *,
        process: str = "",
        device: int | None = None,
    ) -> Any:
        """Returns what something that starts answers. `process`: the name under which its exit code is recorded."""
        limit = limit_s or self.cluster.start_timeout_s
        try:
            return await wait_for_reply(reference, node, limit)
        except NodeGone:
            raise node_lost(node, None, f"while {what} started") from None
        except TimeoutError:
            raise CallTimeout(
                f"{what} on {node} did not start within {limit:g} s (`cluster.start_timeout_s`)"
            ) from None
        except RayError as error:
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                raise await self._lost_at_start(node, what, process, device) from None
            raise RunError(f"{what} on {node} could not start; is Corral installed there? {error}") from error

    async def _lost_at_start(self, node: Node, what: str, process: str, device: int | None) -> WorkerLost:
        code = None
        with suppress(NodeGone, TimeoutError, RayError):
            report = node.agent.exit_report.remote(process)
            code, _ = await wait_for_reply(report, node, EXIT_WAIT_S + HEARTBEAT_S)
        return WorkerLost(f"{what} on {node}: its process {describe_exit(code)} while it started", device=device)

    async def _join_worlds(self, one: DeviceSet, shape: MeshShape, copies: Iterable[int]) -> None:
        """Makes the worlds of torch.distributed of these copies of a set's models, each of which is one, and connects
        all copies. A world cannot get a new member: the workers of a copy are new together."""
        group: RayGroup[Worker] = self._group("worker", one.devices)
        if shape.copy.size > 1:
            of_copies = [shape.ranks_of_copy(copy) for copy in copies]
            await gather_calls(*(self._meet(one, group, Worker.join_world, shape, ranks) for ranks in of_copies))
        if shape.replicate > 1:
            await self._meet(one, group, Worker.join_replicas, shape, range(group.size))

    async def _meet(
        self,
        one: DeviceSet,
        group: RayGroup[Worker],
        join: Callable[[Worker, str, MeshShape], None],
        shape: MeshShape,
        ranks: Sequence[int],
    ) -> None:
        """Lets workers of a set connect to each other, at the first of them."""
        limit_s = self.cluster.start_timeout_s
        rendezvous = await group.one(ranks[0], Worker.open_rendezvous, timeout_s=limit_s)
        calls = [asyncio.ensure_future(group.one(rank, join, rendezvous, shape)) for rank in ranks]
        done, late = await asyncio.wait(calls, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for call in late:
            call.cancel()
        for call in done:
            call.result()
        if late:
            names = ", ".join(group.names[rank] for rank, call in zip(ranks, calls, strict=True) if call in late)
            nodes = {node.id: node for rank in ranks for node in [self.devices[one.devices[rank]].node]}
            used = ", ".join(f"{node.facts.interface} on {node}" for node in nodes.values())
            raise CallTimeout(
                f"the workers of {', '.join(one.roles)} did not all connect to {rendezvous} and to each other within "
                f"{limit_s:g} s (`cluster.start_timeout_s`): {names}. A firewall between the nodes, or the wrong "
                f"network: they use {used}, unless {' and '.join(INTERFACE_VARIABLES)} name another"
            )

    def _set_of(self, device: int) -> DeviceSet:
        return next(one for one in self.sets if device in one.devices)

    def _group(self, role: str, devices: Sequence[int]) -> RayGroup[Any]:
        own = [self.devices[number] for number in devices]
        return RayGroup(role, own, self.nodes, self.cluster.call_timeout_s, self.cluster.node_timeout_s)


def own_folder() -> Path | None:
    """Returns the folder in which the controller works, and so the workers. None: Ray has put a copy of it on every
    node."""
    return None if copied_by_ray(Path.cwd()) else Path.cwd()


def accelerator_order(process: ActorProcess) -> tuple[int, str]:
    """Sorts by number; names of other kinds (parts of a GPU) by name. Without accelerators all are alike."""
    name = process.accelerators[0] if process.accelerators else ""
    return (int(name), "") if name.isdecimal() else (sys.maxsize, name)


def exit_within(limit_s: float) -> None:
    """Ends this process with an error, should Ray still wait for its head then. Called at exit, before Ray's own
    handler."""
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback_later(limit_s, exit=True, file=os.open(os.devnull, os.O_WRONLY))
