"""A worker as a Ray actor: one process on one device.

It becomes a worker in two steps, because only a process that runs knows which GPU Ray gave it, and so which device of
the recipe it is. What a role raises comes back as a value, so that it arrives as it was and not as an error of Ray's.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from corral.recipe.errors import RunError, UserError
from corral.runtime.presence import announce
from corral.runtime.remote_debugger import WorkerDebugger
from corral.runtime.worker import Worker


@dataclass(frozen=True)
class Seat:
    """What a process must know to be a worker."""

    device: int
    roles: tuple[str, ...]
    run: str
    """Its name."""
    rank: int
    """Among the workers of its set of devices."""
    size: int
    address: str
    timeout_s: float
    threads: int | None
    log: Path
    folder: Path | None
    """In which the controller was started; files that the recipe names are relative to it. None: Ray has put a copy of
    it on every node, and the process is in its own."""
    environment: dict[str, str]
    """Set where the node's own environment does not."""
    chosen: dict[str, str] = field(repr=False)
    """Set whatever the node's own environment has (`cluster.environment`). Here, and not in Ray's `runtime_env`, which
    Ray shows to whoever asks: they may be secrets."""
    debugger: WorkerDebugger


@dataclass(frozen=True)
class Raised:
    """What a role raised."""

    expected: Exception | None
    """Meant for the user as it is."""
    line: str
    """The last one of its traceback; all of it is in the worker's log."""


class DeviceProcess:
    """The actor. All methods are async, so that many calls are under way at once and one that computes blocks none."""

    worker: Worker
    debugger: WorkerDebugger

    async def start(self) -> tuple[int, list[str]]:
        """Its process id and the accelerators that it got."""
        return os.getpid(), [str(number) for number in ray.get_gpu_ids()]

    async def sit(self, seat: Seat) -> None:
        write_output_to(seat.log)
        if seat.folder is not None and seat.folder.is_dir():
            os.chdir(seat.folder)
        for name, value in seat.environment.items():
            os.environ.setdefault(name, value)
        os.environ.update(seat.chosen)
        announce("worker", seat.run, seat.device, seat.roles)
        self.debugger = seat.debugger
        self.debugger.install()
        self.worker = Worker(seat.rank, seat.size, seat.address, timeout_s=seat.timeout_s, threads=seat.threads)

    async def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Arguments one by one: Ray fetches those that are in its object store."""
        try:
            return await self.worker.call(role, method, arguments)
        except Exception as error:
            traceback.print_exc()
            if self.debugger.post_mortem and not isinstance(error, UserError):
                await asyncio.to_thread(self.debugger.open_at, error)
            expected = error if isinstance(error, UserError | RunError | OSError) else None
            return Raised(expected, traceback.format_exception_only(error)[-1].strip())


def write_output_to(log: Path) -> None:
    """All that this process says, below Python too. Straight to the file: the last words of a process that is killed
    are there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    print(f"process {os.getpid()}")  # the file may have the words of one that died before it
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
