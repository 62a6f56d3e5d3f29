"""The connection between copies of one model, which outlives the loss of a copy.

Each copy is a world of torch.distributed of its own. A world cannot get a new member, so the copies are connected by
process groups beside it: when a rank is lost its copy is started again, the others keep their worlds and their states,
and only these groups are made anew. Copies exchange something in one place only, before the optimizer's step, and once
more around the files of a checkpoint; whatever they compute apart from that does not notice the loss of another one.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from corral.recipe.errors import RunError, first_line
from corral.recipe.mesh import MeshShape

POLL_S = 0.2
"""Seconds after which a wait for other copies looks whether it has become pointless."""
NCCL_POLL_S = 0.001
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Torch's watchdog otherwise ends a process whose collective fails because another one died, and its states with it; or
its monitor does so minutes after the loss was dealt with. Every wait of Corral's has a deadline of its own."""


class ReplicaLost(RunError):
    """Another copy of the model is gone, or stopped in the middle of an exchange. This rank's states are as before."""


class Replicas:
    """The ranks that hold the same part of the model in all copies of it, as one of them sees it."""

    def __init__(self, copy: int, num_copies: int, device: torch.device, address: str, timeout_s: float) -> None:
        """`copy`: index of this rank's own. `address`: of this node, as the others reach it."""
        self.copy, self.num_copies, self.device, self.address = copy, num_copies, device, address
        self.timeout = timedelta(seconds=timeout_s)
        self.group: Any = None
        self.is_aborted = False
        self.abandoned: list[Any] = []
        """Groups in which something may wait for ever. Their destructor would wait for it."""

    @classmethod
    def of_rank(
        cls, shape: MeshShape, rank: int, device: torch.device, address: str, timeout_s: float
    ) -> "Replicas | None":
        """Returns them without a connection; None where there is one copy only."""
        copy, _ = shape.place_in_copies(rank)
        return None if shape.replicate == 1 else cls(copy, shape.replicate, device, address, timeout_s)

    def connect(self, store: Any) -> None:
        """Connects the copies, all of which call this, in place of a connection that was aborted. `store`: where ranks
        of this position in their copy meet, and no others."""
        if self.group is not None:
            self.abandoned.append(self.group)
        self.group = make_group(store, self.copy, self.num_copies, self.device, self.address, self.timeout)
        self.is_aborted = False

    def abort(self) -> None:
        """Ends every wait for other copies, from any thread, with `ReplicaLost`."""
        self.is_aborted = True
        if self.device.type == "cuda" and self.group is not None:
            with suppress(RuntimeError):
                self.group.abort()

    def max(self, number: int) -> int:
        """The largest over all copies."""
        largest = torch.tensor([number], device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._run(lambda: self.group.allreduce([largest], options))
        return int(largest)

    def sum_(self, flat: Tensor) -> None:
        self._run(lambda: self.group.allreduce([flat]))

    def copy_from(self, flat: Tensor, copy: int) -> None:
        """The tensor becomes that of another copy."""
        self._run(lambda: self.group.broadcast(flat, copy))

    def _run(self, begin: Callable[[], Any]) -> None:
        """Waits for a collective in such a way that `abort` ends the wait. gloo notices that a process has died, but
        not that a node was cut off, nor that another rank has left the collective with an error."""
        if self.group is None or self.is_aborted:
            raise ReplicaLost("the connection to the other copies of the model was given up")
        try:
            work = begin()
            while not self._has_finished(work):
                if self.is_aborted:
                    raise ReplicaLost("another copy of the model was lost")
        except RuntimeError as error:
            raise ReplicaLost(f"another copy of the model was lost: {first_line(error)}") from error
        # What NCCL has computed is garbage where it was aborted, and nobody else says so.
        if self.is_aborted and self.device.type == "cuda":
            raise ReplicaLost("another copy of the model was lost")

    def _has_finished(self, work: Any) -> bool:
        if not work.is_completed():
            if self.device.type == "cuda":
                time.sleep(NCCL_POLL_S)
                return False
            with suppress(RuntimeError):  # it has failed, or is not done yet
                work.wait(timedelta(seconds=POLL_S))
            if not work.is_completed():
                return False
        # Without a limit NCCL's `wait` only makes the stream wait, and says nothing of an error.
        work.wait(timedelta(seconds=POLL_S))
        return True


def set_nccl_variables() -> None:
    """Sets what torch reads when it makes a group of NCCL, the first one for the whole process."""
    for name, value in NCCL_VARIABLES.items():
        os.environ.setdefault(name, value)


def make_group(store: Any, rank: int, size: int, device: torch.device, address: str, timeout: timedelta) -> Any:
    """Makes a process group that is no part of torch.distributed's world; returns when its members are connected, or
    raises a RuntimeError when they are not within `timeout`."""
    if device.type == "cuda":
        set_nccl_variables()
        with suppress(RuntimeError):  # an engine captures a graph just now
            torch.cuda.empty_cache()  # NCCL allocates past torch, which keeps what it has freed
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, size, nccl)
    else:
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        # Left to itself it takes the address that the host's name stands for, which other nodes may not reach.
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        group = dist.ProcessGroupGloo(store, rank, size, gloo)
    connect(lambda flat: group.allreduce([flat]).wait(timeout), device, timeout)
    return group


def connect(all_reduce: Callable[[Tensor], Any], device: torch.device, timeout: timedelta) -> None:
    """Lets the members of a group connect, by the sum of one number. NCCL connects in the first call, which waits for
    every member whatever limit it is given, and which nothing can interrupt: so a thread of its own makes it."""
    connected: Future[None] = Future()

    def call() -> None:
        try:
            one = torch.ones(1, device=device)
            all_reduce(one)
            one.item()  # waits for the device
            connected.set_result(None)
        except BaseException as error:
            connected.set_exception(error)

    threading.Thread(target=call, name="corral-connect", daemon=True).start()
    try:
        connected.result(timeout.total_seconds())
    except TimeoutError:
        raise RuntimeError(f"not all members of a group connected within {timeout.total_seconds():g} s") from None
