"""Groups of workers, and the runtime that holds them: the loop does not see where code runs.

A group is the workers that host one role, ranked 0, 1, ... A call names a method of the role's class, so that its
arguments and its result are checked by types: `await actor.all(ActorWorker.step, 1.0)`. Only the method's name travels.
Every call has a deadline, and an error says which worker on which node it was.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar, TypeVarTuple, overload

from corral.observe.run_folder import PRINTS
from corral.recipe.errors import RunError
from corral.recipe.mesh import MeshShape
from corral.recipe.placement import Placement
from corral.recipe.schema import Recipe
from corral.runtime.services import Services
from corral.runtime.worker import BUILDER, Worker

RoleT = TypeVar("RoleT")
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
Async = Coroutine[Any, Any, Result]
Ranks = Sequence[int] | None
"""Workers of a group to call; None: all of them."""

GRACE_S = 5.0
"""Seconds to wait for the true cause: when a worker dies, those that talk to it fail too, sometimes sooner."""


class WorkerLost(RunError):
    """A worker's process has ended, or its node is gone. The message says which, how, and its last output."""

    def __init__(self, message: str, *, device: int | None = None, node: str | None = None, output: str = "") -> None:
        """`device`: its number in the recipe. `node`: the address of the node, where that is gone. `output`: the end of
        its log."""
        super().__init__(message + output)
        self.device, self.node, self.summary = device, node, message


class CallTimeout(RunError):
    """A worker did not answer within the deadline."""


class Group(ABC, Generic[RoleT]):
    """The workers of one role. Each call has two overloads, since a worker's methods may be async or plain."""

    def __init__(self, role: str, names: Sequence[str], timeout_s: float) -> None:
        self.role, self.timeout_s = role, timeout_s
        self.names = list(names)
        """Names of the workers in messages, such as `device 3 on 10.0.0.2`."""

    @property
    def size(self) -> int:
        return len(self.names)

    @abstractmethod
    def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        """Returns the answer, or raises what the worker raised, or `WorkerLost`."""

    @overload
    async def one(
        self, rank: int, method: Callable[[RoleT, *Arguments], Async[Result]], *arguments: *Arguments,
        timeout_s: float | None = ...,
    ) -> Result: ...  # fmt: skip
    @overload
    async def one(
        self, rank: int, method: Callable[[RoleT, *Arguments], Result], *arguments: *Arguments,
        timeout_s: float | None = ...,
    ) -> Result: ...  # fmt: skip
    async def one(
        self, rank: int, method: Callable[[RoleT, *Arguments], Any], *arguments: *Arguments,
        timeout_s: float | None = None,
    ) -> Any:  # fmt: skip
        """Calls the method on one worker."""
        limit_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self.send(rank, method.__name__, arguments)
        except TimeoutError:
            if not limit.expired():  # the worker's own, such as of its disk
                raise
            raise CallTimeout(
                f"{self.role}.{method.__name__}: no answer from {self.names[rank]} within {limit_s:g} s; it may hang, "
                "or `cluster.call_timeout_s` is too short for it"
            ) from None

    @overload
    async def all(
        self, method: Callable[[RoleT, *Arguments], Async[Result]], *arguments: *Arguments, ranks: Ranks = ...
    ) -> list[Result]: ...
    @overload
    async def all(
        self, method: Callable[[RoleT, *Arguments], Result], *arguments: *Arguments, ranks: Ranks = ...
    ) -> list[Result]: ...
    async def all(
        self, method: Callable[[RoleT, *Arguments], Any], *arguments: *Arguments, ranks: Ranks = None
    ) -> list[Any]:
        """Calls the method with the same arguments on all workers, or on those of `ranks`."""
        chosen = range(self.size) if ranks is None else ranks
        return await self.each(method, [arguments] * len(chosen), ranks=chosen)

    @overload
    async def each(
        self, method: Callable[[RoleT, *Arguments], Async[Result]], arguments: Sequence[tuple[*Arguments]], *,
        ranks: Ranks = ...,
    ) -> list[Result]: ...  # fmt: skip
    @overload
    async def each(
        self, method: Callable[[RoleT, *Arguments], Result], arguments: Sequence[tuple[*Arguments]], *,
        ranks: Ranks = ...,
    ) -> list[Result]: ...  # fmt: skip
    async def each(
        self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, ranks: Ranks = None
    ) -> list[Any]:
        """Calls the method with its own arguments on each worker. If one fails, the others are not waited for."""
        chosen = range(self.size) if ranks is None else ranks
        return await self.send_each(chosen, method, arguments)

    async def send_each(
        self, ranks: Sequence[int], method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Makes the calls of `each`; a group may make fewer, each for several workers."""
        return await gather_calls(
            *(self.one(rank, method, *own) for rank, own in zip(ranks, self.prepare(arguments), strict=True))
        )

    def prepare(self, arguments: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
        """Arguments of several calls as they are sent; a group may put large ones where all workers fetch them."""
        return arguments


async def gather_calls(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Awaits calls that belong together, and returns their answers. If one fails the others are not waited for."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.done() and task.exception() is not None for task in tasks):
            # Who talks to a worker that died sees a broken connection, perhaps before anyone sees the death. An error
            # is therefore believed only when no loss was reported for a while: the loss explains the rest.
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    while not isinstance(root_cause(tasks), WorkerLost) and not all(task.done() for task in tasks):
                        late = [task for task in tasks if not task.done()]
                        await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
            raise root_cause(tasks)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def root_cause(tasks: Sequence["asyncio.Future[Any]"]) -> BaseException:
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    return next((error for error in errors if isinstance(error, WorkerLost)), errors[0])


class LocalGroup(Group[RoleT]):
    """Roles in this process. A plain method computes at once, in the caller's thread."""

    def __init__(self, role: str, roles: Sequence[RoleT], timeout_s: float) -> None:
        super().__init__(role, ["this process"] * len(roles), timeout_s)
        self.roles = roles

    async def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        answer = getattr(self.roles[rank], method)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer


class Runtime(ABC):
    """Where the workers are: `LocalRuntime` here, or `RayRuntime` on a cluster. By default there is no node to lose."""

    placement: Placement
    """Devices of each role, without those of nodes that were lost."""
    groups: dict[str, Group[Any]]
    """Groups by role. Ranks follow the order of devices."""
    ending: str | None = None
    """Why the workers are going to end soon, though all are there now."""
    on_ending: Callable[[], object] = staticmethod(lambda: None)
    """Called in any thread when that is known: the run can still save a checkpoint."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes that were not lost."""
        return 1

    def devices_of(self, address: str) -> tuple[int, ...]:
        """Returns the devices of the node with this address."""
        return (0,)

    @abstractmethod
    async def build(
        self, role: str, recipe: Recipe, resume_from: Path | None, *, ranks: Ranks = None
    ) -> list[dict[str, Any]]:
        """Builds a role on its workers, or on those of `ranks`. Returns the `facts` of each."""

    async def watch(self) -> None:
        """Runs until a node or worker is lost, and raises that. Each node once; a worker unless a call has noticed it
        before."""
        await asyncio.Event().wait()

    async def find_blind(self, checkpoint: Path) -> dict[str, str]:
        """Returns the workers that cannot load the checkpoint, by name, each with what is wrong there."""
        return {}

    async def device_memory(self) -> float | None:
        """Returns the GiB that every device has free; None where it is not known, or makes no difference."""
        return None

    @property
    def lost_devices(self) -> set[int]:
        """Devices whose worker or node is lost, and was not replaced."""
        return set()

    async def replace(self, device: int) -> None:
        """Starts a lost worker's process again on its device, without roles."""
        raise AssertionError("this process cannot be lost while it calls")

    async def replace_copies(self, role: str, shape: MeshShape, copies: Sequence[int]) -> None:
        """Starts all workers again that hold these copies of the role's model, without roles: on their devices, or on a
        spare node where theirs is lost. Then connects the copies of the model. Those that are left are not touched but
        for this; they do not wait for lost ones any more (`abort_replicas`)."""
        raise AssertionError("this process cannot be lost while it calls")

    async def abort_replicas(self, devices: Sequence[int]) -> None:
        """Ends the wait of these workers for other copies of their models."""
        raise AssertionError("this process cannot be lost while it calls")

    @abstractmethod
    def hurry(self) -> None:
        """Called in any thread when the run is to stop: what hangs is not waited for as long as otherwise."""

    @abstractmethod
    def close(self) -> None: ...


class LocalRuntime(Runtime):
    """One worker without a cluster, in this process and on one device."""

    def __init__(self, recipe: Recipe, placement: Placement, logs: Path = Path(), *, builder: str = BUILDER) -> None:
        self.placement, self.builder = placement, builder
        self.services = Services(recipe.cluster.services, logs)
        self.timeout_s = recipe.cluster.call_timeout_s
        self.worker = Worker(0, 1, "127.0.0.1", timeout_s=self.timeout_s, threads=recipe.train.threads)
        # A worker of Ray prints to its own log; this one to what the user looks at.
        self.worker.context.prints = logs / PRINTS if logs.is_dir() else None
        self.groups = {}

    async def build(
        self, role: str, recipe: Recipe, resume_from: Path | None, *, ranks: Ranks = None
    ) -> list[dict[str, Any]]:
        facts = self.worker.build(self.builder, role, recipe, resume_from)
        self.groups[role] = LocalGroup(role, [self.worker.context.roles[role]], self.timeout_s)
        return [facts]

    async def wait_for_services(self) -> None:
        problems = await asyncio.to_thread(self.services.wait)
        if problems:
            raise RunError(problems[0])

    def hurry(self) -> None:
        for role in self.worker.context.roles.values():
            role.hurry()

    def close(self) -> None:
        self.worker.close()
        self.services.close()
