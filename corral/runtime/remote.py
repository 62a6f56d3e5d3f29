"""Calls to workers in processes of a Ray cluster, and what is said when no answer comes.

Whoever dies is named, with how and with its last words. Others that talked to it fail too, perhaps sooner, so before an
error is believed every node is asked whether it is still there.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from corral.child_process import describe_exit
from corral.recipe.errors import RunError, UserError, first_line
from corral.recipe.placement import format_devices
from corral.runtime.group import Group, WorkerLost
from corral.runtime.nodes import EXIT_WAIT_S, TICK_S, Node
from corral.runtime.process import Raised

SMALL = (str, bytes, int, float, bool, type(None), Path)
"""Types of arguments that are sent along, and not put where all workers fetch them."""


@dataclass
class Process:
    actor: Any
    bundle: int
    """Of the placement group."""
    pid: int
    accelerators: list[str]


@dataclass
class Device:
    """A device of the recipe, and the process that is on it now."""

    number: int
    node: Node
    process: Process
    log: Path
    is_dead: bool = False

    def __str__(self) -> str:
        return f"device {self.number} on {self.node}"


class RayGroup(Group):
    """`nodes`: all of the run, not only those of this group."""

    def __init__(
        self, role: str, devices: Sequence[Device], nodes: Sequence[Node], timeout_s: float, node_timeout_s: float
    ) -> None:
        super().__init__(role, [str(device) for device in devices], timeout_s)
        self.devices, self.nodes, self.node_timeout_s = list(devices), nodes, node_timeout_s

    async def each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        return await super().each(method, put_once(arguments), ranks=ranks, timeout_s=timeout_s)

    async def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        device, what = self.devices[rank], f"{self.role}.{method}"
        there = [node for node in self.nodes if not node.lost.done()]
        try:
            answer = await reply(device.process.actor.call.remote(self.role, method, *arguments), device.node)
        except NodeGone:
            raise node_lost(device.node, device.number, what) from None
        except RayActorError:
            raise await self._obituary(device, what) from None
        except RayError as error:
            raise RunError(f"{what} on {device}: {first_line(error)}") from error
        if isinstance(answer, Raised):
            raise await self._explain(answer, device, what, there)
        return answer

    async def _explain(self, raised: Raised, device: Device, what: str, there: Sequence[Node]) -> Exception:
        """`there`: the nodes that were there when the call was made."""
        if isinstance(raised.expected, UserError):
            return raised.expected
        if (lost := await self._lost_of(there)) is not None:
            return node_lost(lost, lost.devices[0], what)
        if raised.expected is not None:
            return raised.expected
        return RunError(f"{what} on {device}: {raised.line} (the traceback is in {device.log})")

    async def _obituary(self, device: Device, what: str) -> WorkerLost:
        """Ray says that the process is dead. Its node may be dead too, and that then takes longer to know."""
        device.is_dead = True
        node, pid = device.node, device.process.pid
        code, lines = None, list[str]()
        try:
            code, lines = await reply(node.agent.last_words.remote(pid, device.log), node, EXIT_WAIT_S + TICK_S)
        except (NodeGone, TimeoutError, RayError):
            if await self._lost_of([node]) is node:
                return node_lost(node, device.number, what)
        words = f"; its last lines, of {device.log}:\n  " + "\n  ".join(lines) if lines else ""
        message = f"{device}: its process (pid {pid}) {describe_exit(code)} while {what}{words}"
        return WorkerLost(message, device=device.number)

    async def _lost_of(self, nodes: Sequence[Node]) -> Node | None:
        """The first that is lost, once each has answered or is found to be lost."""
        deadline = asyncio.get_running_loop().time() + self.node_timeout_s + 3 * TICK_S
        await asyncio.gather(*(settle(node, deadline) for node in nodes))
        return next((node for node in nodes if node.lost.done()), None)


class NodeGone(Exception):
    """The node from which an answer was awaited is lost."""


async def reply(reference: Any, node: Node, timeout_s: float | None = None) -> Any:
    """What the reference refers to, unless its node is lost first. When the caller is cancelled, so is the call."""
    answer = reference.as_future()
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio complains of late ones
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait({answer, node.gone}, return_when=asyncio.FIRST_COMPLETED)
    except (asyncio.CancelledError, TimeoutError):
        ray.cancel(reference)
        raise
    if not answer.done():
        raise NodeGone
    return answer.result()


async def settle(node: Node, deadline: float) -> None:
    """Until the node answers, is lost, or the deadline has passed."""
    loop = asyncio.get_running_loop()
    while not node.gone.done() and (left := deadline - loop.time()) > 0:
        try:
            await reply(node.agent.ping.remote(), node, left)
            return
        except RayError:
            await asyncio.wait({node.gone}, timeout=TICK_S)
        except (NodeGone, TimeoutError):
            return


def node_lost(node: Node, device: int | None, what: str | None = None) -> WorkerLost:
    doing = f" while {what}" if what else ""
    devices = f"device{'s' * (len(node.devices) > 1)} {format_devices(node.devices)}"
    message = f"node {node.rank}, {node}, with {devices}, was lost{doing}: {node.lost.result()}"
    return WorkerLost(message, device=device, node=node.address)


def put_once(arguments: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """An object that goes to several workers is put into Ray's store once, and fetched once by each node."""
    uses = Counter(id(one) for own in arguments for one in own if not isinstance(one, SMALL))
    shared = {id(one): one for own in arguments for one in own if uses[id(one)] > 1}
    references = {identity: ray.put(one) for identity, one in shared.items()}
    return [tuple(references.get(id(one), one) for one in own) for own in arguments]
