"""A worker as a Ray actor, from both sides: the process on its device, and the calls of the controller to it.

Whoever dies is named, with how and with its last output. Others that talked to it fail too, perhaps sooner, so before
an error is believed every node is asked whether it is still there.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from corral.child_process import describe_exit
from corral.recipe.errors import RunError, UserError, first_line
from corral.recipe.placement import format_devices
from corral.runtime.group import CallTimeout, Group, RoleT, WorkerLost, gather_calls
from corral.runtime.membership import state_folder
from corral.runtime.node_relay import MissingAnswer
from corral.runtime.nodes import EXIT_WAIT_S, SHARED_GPUS, Node
from corral.runtime.presence import announce
from corral.runtime.remote_debugger import WorkerDebugger
from corral.runtime.worker import Worker
from corral.runtime.worker_heartbeat import HEARTBEAT_S, WorkerHeartbeat, WorkerState

RELAYED_FROM = 64
"""Number of workers from which calls to all of them go through a relay on each node. With fewer, its hop is longer than
what the controller saves."""
SMALL_TYPES = (str, bytes, int, float, bool, type(None), Path)
"""Types of arguments that are sent along, and not put where all workers fetch them."""


# --- in the worker's process


@dataclass(frozen=True)
class WorkerSetup:
    """What a process must know to be a worker."""

    device: int
    roles: tuple[str, ...]
    run: str
    """Name of the run."""
    run_folder: Path
    rank: int
    """Rank among the workers of its set of devices."""
    size: int
    address: str
    timeout_s: float
    threads: int | None
    accelerators: tuple[str, ...]
    log: Path
    node_folder: Path
    """Folder of the run on this node, for heartbeats."""
    folder: Path | None
    """Folder in which the controller was started; files that the recipe names are relative to it. None: Ray has put a
    copy of it on every node, and the process is in its own."""
    environment: dict[str, str]
    """Variables that are set where the node's own environment does not."""
    chosen: dict[str, str] = field(repr=False)
    """Variables that are set whatever the node's own environment has (`cluster.environment`). Here, and not in Ray's
    `runtime_env`, which Ray shows to whoever asks: they may be secrets."""
    debugger: WorkerDebugger


@dataclass(frozen=True)
class RemoteError:
    """What a role raised, returned as a value: so it arrives as it was, and not wrapped in an error of Ray's."""

    expected: Exception | None
    """The error itself, where it is meant for the user as it is."""
    line: str
    """Last line of its traceback; all of it is in the worker's log."""


class DeviceProcess:
    """The actor. It becomes a worker in two steps, because only a process that runs knows which GPU Ray gave it, and so
    which device of the recipe it is. All methods are async, so that many calls are under way at once and one that
    computes blocks none."""

    worker: Worker
    debugger: WorkerDebugger

    async def start(self) -> tuple[int, list[str]]:
        """Returns its process id and the accelerators that it got."""
        return os.getpid(), [str(number) for number in ray.get_gpu_ids()]

    async def set_up(self, setup: WorkerSetup) -> None:
        write_output_to(setup.log)
        if setup.folder is not None and setup.folder.is_dir():
            os.chdir(setup.folder)
        for name, value in setup.environment.items():
            os.environ.setdefault(name, value)
        # A home folder may be on a network, where processes of many nodes would compile the same kernels at once.
        os.environ.setdefault("TRITON_CACHE_DIR", str(state_folder() / "triton"))
        os.environ.update(setup.chosen)
        os.environ.update(shared_gpu([str(number) for number in ray.get_gpu_ids()], os.environ))
        announce("worker", setup.run, setup.device, setup.roles, setup.run_folder)
        self.debugger = setup.debugger
        self.debugger.install()
        self.worker = Worker(
            setup.rank,
            setup.size,
            setup.address,
            timeout_s=setup.timeout_s,
            threads=setup.threads,
            accelerators=setup.accelerators,
            can_be_replaced=True,
            heartbeat=WorkerHeartbeat(setup.node_folder),
        )

    async def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Calls a role's method. Arguments come one by one: Ray fetches those that are in its object store."""
        try:
            return await self.worker.call(role, method, arguments)
        except Exception as error:
            traceback.print_exc()
            if self.debugger.post_mortem and not isinstance(error, UserError):
                await asyncio.to_thread(self.debugger.open_at, error)
            expected = error if isinstance(error, UserError | RunError | OSError) else None
            return RemoteError(expected, traceback.format_exception_only(error)[-1].strip())


def shared_gpu(numbers: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables of a worker whose GPU others have, too (`cluster.address: here`). `numbers`: of its GPUs, of
    which Ray counts as many as the recipe has."""
    if SHARED_GPUS not in environment or not numbers:
        return {}
    return {
        "CUDA_VISIBLE_DEVICES": str(int(numbers[0]) % int(environment[SHARED_GPUS])),
        # NCCL refuses two ranks with one host and GPU. Ranks of different hosts talk over the network, here loopback.
        "NCCL_HOSTID": f"{os.uname().nodename}-{os.getpid()}",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }


def write_output_to(log: Path) -> None:
    """Redirects all output of this process, below Python too. It goes straight to the file, unbuffered, so that the
    last lines of a process that is killed are there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    print(f"process {os.getpid()}")  # the file may have the output of one that died before it
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


# --- at the controller


@dataclass
class ActorProcess:
    """The process of a worker, as the controller knows it."""

    name: str
    """Name under which its exit code is recorded."""
    actor: Any
    bundle: Any
    """Bundle of a placement group, as a strategy of Ray's scheduler."""
    pid: int
    accelerators: list[str]
    is_silent: bool = False
    """Whether the user was warned that it does not answer."""
    hang: str | None = None
    """Why it was killed, if that was because it did not answer."""


@dataclass
class DeviceSlot:
    """A device of the recipe, and the process that is on it now."""

    number: int
    node: Node
    process: ActorProcess
    log: Path
    is_dead: bool = False
    seen: WorkerState | None = None
    """What its node's agent has reported last."""

    def __str__(self) -> str:
        return f"device {self.number} on {self.node}"

    @property
    def state(self) -> str:
        if self.is_dead or self.node.lost.done():
            return "lost"
        if self.seen is None:
            return "starting"
        return "silent" if self.process.is_silent else "busy" if self.seen.call else "idle"


class RayGroup(Group[RoleT]):
    """Workers on a Ray cluster. `nodes`: all of the run, not only those of this group."""

    def __init__(
        self, role: str, devices: Sequence[DeviceSlot], nodes: Sequence[Node], timeout_s: float, node_timeout_s: float
    ) -> None:
        super().__init__(role, [str(device) for device in devices], timeout_s)
        self.devices, self.nodes, self.node_timeout_s = list(devices), nodes, node_timeout_s

    def prepare(self, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Puts an object that goes to several workers into Ray's store once, to be fetched once by each node."""
        uses = Counter(id(one) for own in arguments for one in own if not isinstance(one, SMALL_TYPES))
        common = {id(one): one for own in arguments for one in own if uses[id(one)] > 1}
        references = {identity: ray.put(one) for identity, one in common.items()}
        return [tuple(references.get(id(one), one) for one in own) for own in arguments]

    async def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        device, call = self.devices[rank], f"{self.role}.{method}"
        process, node = device.process, device.node
        present = [one for one in self.nodes if not one.lost.done()]
        try:
            answer = await wait_for_reply(process.actor.call.remote(self.role, method, *arguments), node)
        except NodeGone:
            raise node_lost(node, device.number, f"while {call}") from None
        except RayActorError:
            raise await self.describe_death(device, f"while {call}", process) from None
        except RayError as error:
            raise RunError(f"{call} on {device}: {first_line(error)}") from error
        if isinstance(answer, RemoteError):
            raise await self._explain(answer, device, call, present)
        return answer

    async def send_each(
        self, ranks: Sequence[int], method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Through the relays of the nodes, where many are called."""
        if len(ranks) < RELAYED_FROM:
            return await super().send_each(ranks, method, arguments)
        places: dict[int, list[int]] = {}
        for place, rank in enumerate(ranks):
            places.setdefault(self.devices[rank].node.rank, []).append(place)
        answers = await gather_calls(
            *(
                self._send_to_node([ranks[i] for i in own], method.__name__, [arguments[i] for i in own])
                for own in places.values()
            )
        )
        found = list[Any]([None] * len(ranks))
        for own, some in zip(places.values(), answers, strict=True):
            for place, answer in zip(own, some, strict=True):
                found[place] = answer
        return found

    async def _send_to_node(self, ranks: Sequence[int], method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls workers of one node through its relay."""
        devices, call = [self.devices[rank] for rank in ranks], f"{self.role}.{method}"
        node, present = devices[0].node, [one for one in self.nodes if not one.lost.done()]
        processes = [device.process for device in devices]
        calls = [(process.actor, own) for process, own in zip(processes, arguments, strict=True)]
        try:
            answers = await wait_for_reply(node.relay.call.remote(self.role, method, calls), node, self.timeout_s)
        except TimeoutError:
            numbers = format_devices([one.number for one in devices])
            raise CallTimeout(
                f"{call}: no answer from one of the devices {numbers} on {node} within {self.timeout_s:g} s; it may "
                "hang, or `cluster.call_timeout_s` is too short for it"
            ) from None
        except NodeGone:
            raise node_lost(node, devices[0].number, f"while {call}") from None
        except RayActorError:  # Ray starts another; what the workers made of the call nobody knows
            raise WorkerLost(f"the relay of {node} ended while {call}") from None
        except RayError as error:
            raise RunError(f"{call} on {node}: {first_line(error)}") from error
        for device, process, answer in zip(devices, processes, answers, strict=True):
            if answer is MissingAnswer.DIED:
                raise await self.describe_death(device, f"while {call}", process)
        for device, answer in zip(devices, answers, strict=True):
            if isinstance(answer, RemoteError):
                raise await self._explain(answer, device, call, present)
        return list(answers)

    async def _explain(self, error: RemoteError, device: DeviceSlot, call: str, present: Sequence[Node]) -> Exception:
        """Finds what an error is to be reported as. `present`: the nodes that were there when the call was made; the
        loss of one of them, which breaks the connections of the others, is the true cause."""
        if isinstance(error.expected, UserError):
            return error.expected
        if (lost := await self._find_lost(present)) is not None:
            return node_lost(lost, lost.devices[0], f"while {call}")
        if error.expected is not None:
            return error.expected
        return RunError(f"{call} on {device}: {error.line} (the traceback is in {device.log})")

    async def describe_death(self, device: DeviceSlot, when: str, process: ActorProcess) -> WorkerLost:
        """Describes how a process ended. Its node may be dead too, which takes longer to know."""
        device.is_dead |= device.process is process  # else another one has taken its place already
        node, pid = device.node, process.pid
        code, lines = None, list[str]()
        try:
            report = node.agent.exit_report.remote(process.name, pid, device.log)
            code, lines = await wait_for_reply(report, node, EXIT_WAIT_S + HEARTBEAT_S)
        except (NodeGone, TimeoutError, RayError):
            if await self._find_lost([node]) is node:
                return node_lost(node, device.number, when)
        output = f"; its last lines, of {device.log}:\n  " + "\n  ".join(lines) if lines else ""
        how = process.hang or describe_exit(code)
        message = f"{device}: its process (pid {pid}) {' '.join([how, when]).strip()}"
        return WorkerLost(message, device=device.number, output=output)

    async def _find_lost(self, nodes: Sequence[Node]) -> Node | None:
        """Returns the first node that is lost, once each has answered or is found to be lost."""
        deadline = asyncio.get_running_loop().time() + self.node_timeout_s + 3 * HEARTBEAT_S
        await asyncio.gather(*(wait_until_known(node, deadline) for node in nodes))
        return next((node for node in nodes if node.lost.done()), None)


class NodeGone(Exception):
    """The node from which an answer was awaited is lost."""


async def wait_for_reply(reference: Any, node: Node, timeout_s: float | None = None) -> Any:
    """Returns what the reference refers to, unless its node is lost first. When the caller is cancelled, so is the
    call."""
    answer = reference.as_future()
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio complains of late ones
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait({answer, node.gone}, return_when=asyncio.FIRST_COMPLETED)
    except (asyncio.CancelledError, TimeoutError):
        with suppress(RayError, TypeError):  # TypeError: of a Ray that has ended since
            ray.cancel(reference)
        raise
    if not answer.done():
        raise NodeGone
    return answer.result()


async def wait_until_known(node: Node, deadline: float) -> None:
    """Waits until the node answers, is lost, or the deadline has passed."""
    loop = asyncio.get_running_loop()
    while not node.gone.done() and (left_s := deadline - loop.time()) > 0:
        try:
            await wait_for_reply(node.agent.ping.remote(), node, left_s)
            return
        except RayError:
            await asyncio.wait({node.gone}, timeout=HEARTBEAT_S)
        except (NodeGone, TimeoutError):
            return


def node_lost(node: Node, device: int | None, when: str = "") -> WorkerLost:
    during = f" {when}" if when else ""
    devices = f"device{'s' * (len(node.devices) > 1)} {format_devices(node.devices)}"
    message = f"node {node.rank}, {node}, with {devices}, was lost{during}: {node.lost.result()}"
    return WorkerLost(message, device=device, node=node.address)
