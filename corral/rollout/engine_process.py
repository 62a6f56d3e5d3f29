"""An engine in a process of its own: what runs there, and the wire between it and the rollout worker that started it.

The wire is a pair of sockets of which the process inherits one: there is no port and nothing to authenticate. Messages
are pickled, since both ends are Corral's. Every call of the worker (`Call`) gets one `Answer`, in any order; besides,
the process reports how far decoding is. Weights do not travel on the wire but in memory that both processes map
(`corral/runtime/transfer_channels.py`), a bucket at a time, each with its checksum.

When either process ends, however that comes about, the other sees the end of the wire. The engine's process then kills
its whole group, so that what an engine has started itself ends too.

The file runs in the interpreter of the engine, which may be of another environment than the trainers': it imports
nothing but the standard library, torch, and modules of Corral that do the same.
"""

import asyncio
import difflib
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from torch import Tensor

from corral.recipe.errors import RunError, UserError
from corral.rollout.engine import Sampling
from corral.runtime.transfer_channels import SentBucket, TensorPlace, sum_of_bits

REPORT_EVERY_S = 0.02
BEAT_EVERY_S = 1.0
"""Without anything to report, the same is reported again: the process lives."""
CANCEL = "cancel"
"""Call that ends an earlier one with the same id; neither is answered."""


@dataclass(frozen=True)
class EngineSettings:
    """What a process needs to know to become an engine."""

    name: str
    model: str
    """A folder or a hub name that transformers understands."""
    dtype: str
    max_length: int
    max_sequences: int
    max_prefill_tokens: int
    seed: int
    truncates: bool
    """Whether log-probs are wanted of requests that exclude tokens (top-k, top-p, min-p). An engine whose log-probs are
    either those before the temperature or those after the exclusion gives the former then; the temperature is 1."""
    trust_remote_code: bool = False
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False
    implementation: str = "auto"
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own arguments, by their names there."""


@dataclass(frozen=True)
class Generated:
    """What came of a generate call."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    interrupted: bool
    """Whether it ended because the weights change: the rest has to be asked for again."""


@dataclass(frozen=True)
class WeightBucket:
    """Some weights, in memory that the receiver maps."""

    sent: SentBucket
    checksum: int

    def open(self) -> list[tuple[str, Tensor]]:
        """Maps the tensors, which are the sender's memory: to be copied before the call is answered."""
        places: Sequence[TensorPlace] = self.sent.places
        content = self.sent.reference.open()[: places[-1].end]
        if (found := checksum(content)) != self.checksum:
            raise RunError(f"a bucket of weights arrived with checksum {found} instead of {self.checksum}")
        return [(place.name, place.view(content)) for place in places]


def checksum(content: Tensor) -> int:
    return int(sum_of_bits(content))


class EngineBackend(Protocol):
    """What an engine does in its own process."""

    @property
    def num_steps(self) -> int:
        """Number of decode steps so far."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether a process that the engine has started has ended, without which it computes nothing more."""
        ...

    async def generate(self, tokens: list[int], sampling: Sampling, seed: int) -> Generated: ...

    async def compute_logprobs(self, tokens: list[int], temperature: float) -> list[float]: ...

    async def begin_update(self) -> None:
        """From here on nothing is decoded. Requests in flight are kept, or answered as interrupted."""
        ...

    async def load(self, bucket: WeightBucket) -> None: ...

    async def finish_update(self, version: int) -> None:
        """All weights are there; nothing of the old ones may be used any more, cached prefixes included."""
        ...

    async def set_version(self, version: int) -> None: ...

    async def release_memory(self) -> None:
        """Gives up the memory that a trainer on the same device may need; the next call takes it again."""
        ...


@dataclass(frozen=True)
class Call:
    id: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    id: int
    num_steps: int
    result: Any = None
    error: str | None = None
    is_users: bool = False
    """Whether the error is one that a user can do something about."""


@dataclass(frozen=True)
class Ready:
    """The engine takes calls, or could not be made, and why."""

    error: str | None = None


@dataclass(frozen=True)
class Progress:
    num_steps: int


class EngineHost:
    """Answers calls on the wire. `folder`: the worker's, to be removed when that is gone."""

    def __init__(self, wire: Connection, backend: EngineBackend, folder: str) -> None:
        self.wire, self.backend, self.folder = wire, backend, folder
        self.loop = asyncio.get_running_loop()
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        reported, beat = 0, 0.0
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            if self.backend.num_steps != reported or self.loop.time() - beat >= BEAT_EVERY_S:
                reported, beat = self.backend.num_steps, self.loop.time()
                self.wire.send(Progress(reported))

    def _read(self) -> None:
        try:
            while True:
                self.loop.call_soon_threadsafe(self._start, self.wire.recv())
        except (EOFError, OSError):
            shutil.rmtree(self.folder, ignore_errors=True)
            self._end()

    def _end(self) -> None:
        """Ends this process and all that the engine has started."""
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)

    def _start(self, call: Call) -> None:
        if call.method == CANCEL:
            if call.id in self.tasks:
                self.tasks[call.id].cancel()
            return
        self.tasks[call.id] = task = self.loop.create_task(self._answer(call))
        task.add_done_callback(lambda _: self.tasks.pop(call.id))

    async def _answer(self, call: Call) -> None:
        try:
            result = await getattr(self.backend, call.method)(*call.arguments)
            answer = Answer(call.id, self.backend.num_steps, result)
        except Exception as error:
            traceback.print_exc()
            if self.backend.is_dead:
                self._end()
            is_users = isinstance(error, UserError | ValueError)
            answer = Answer(call.id, self.backend.num_steps, error=describe(error), is_users=is_users)
        self.wire.send(answer)


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, UserError | RunError) else f"{type(error).__name__}: {error}"


def check_arguments(engine: str, arguments: Iterable[str], own: Mapping[str, str], known: Sequence[str]) -> None:
    """Raises for arguments that the installed engine does not have, and for those that are decided elsewhere, `own`."""
    for name in arguments:
        if name in own:
            raise UserError(f"rollout.engine.arguments.{name}: this is decided by {own[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise UserError(f"rollout.engine.arguments: the installed {engine} has no argument `{name}`{hint}")


async def make_backend(settings: EngineSettings) -> EngineBackend:
    if settings.name == "vllm":
        from corral.rollout.vllm_backend import VllmBackend

        return await VllmBackend.start(settings)
    if settings.name == "sglang":
        from corral.rollout.sglang_backend import SglangBackend

        return await SglangBackend.start(settings)
    from corral.rollout.native_backend import NativeBackend

    return NativeBackend(settings)


async def run(wire: Connection, folder: str) -> None:
    try:
        backend = await make_backend(wire.recv())
    except Exception as error:
        traceback.print_exc()
        wire.send(Ready(describe(error)))
        return
    host = EngineHost(wire, backend, folder)
    wire.send(Ready())
    await host.serve()


if __name__ == "__main__":
    # Under its real name, too: what is pickled here must be of the same classes as there.
    from corral.rollout import engine_process

    asyncio.run(engine_process.run(Connection(int(sys.argv[1])), sys.argv[2]))
