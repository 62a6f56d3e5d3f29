"""The worker's side of an engine that runs in a process of its own (`corral/rollout/engine_process.py`)."""

import asyncio
import itertools
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import corral
from corral.child_process import describe_exit, last_lines, signal_group, start_child, terminate_group
from corral.recipe.errors import RunError, UserError
from corral.rollout.engine import NO_IMAGES, Completion, FinishReason, PrefixHandle, Sampling, WeightLayout
from corral.rollout.engine_core import GenerationRequest
from corral.rollout.engine_process import (
    CANCEL,
    Answer,
    Call,
    EngineSettings,
    Generated,
    Progress,
    Ready,
    WeightBucket,
    checksum,
)
from corral.runtime.transfer_channels import BUCKET_BYTES, IpcDeviceMemory, MemoryFile, SentBucket, pack
from corral.runtime.worker_heartbeat import HEARTBEAT_S, EngineWatch

logger = logging.getLogger(__name__)

START_S = 900.0
"""For a process to load its model: large ones come over a network."""
START_ATTEMPTS = 3
"""How often the process that takes the place of a lost one is started."""
CALL_S = 600.0
"""For calls that are no requests: weights, log-probs, memory."""
CLOSE_S = 2.0
"""For a process to end by itself. Ray ends a worker after three seconds, and one that is stopped would be left."""
HURRY_S = 10.0
"""Of silence, before a process is lost while the run is to stop."""


class EngineLost(RunError):
    """The engine's process ended while it was needed, or hung and was killed."""


class ProcessEngine:
    """Starts the process, and is the engine that the worker sees. `skeleton`: transformers' model, whose weights may be
    on the meta device. `device`: where the weights are that come here. `python`: the interpreter of the process."""

    warning: str | None = None
    wire: "Connection[Any, Any]"

    def __init__(
        self,
        settings: EngineSettings,
        tokenizer: Any,
        skeleton: Any,
        device: torch.device,
        *,
        python: str | None = None,
        log: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        silence_s: float = 300.0,
        model_of_restarts: str | None = None,
    ) -> None:
        """`silence_s`: seconds without any sign of life, after which the process is killed. `model_of_restarts`: what a
        process that takes the place of this one loads before it gets the weights. A run that was resumed begins with a
        checkpoint, which it may have removed by then. None: the same."""
        self.silence_s, self.hang = silence_s, ""
        self.model_of_restarts = model_of_restarts or settings.model
        self.settings, self.tokenizer, self.skeleton, self.device = settings, tokenizer, skeleton, device
        self.max_sequences = settings.max_sequences
        self.is_reproducible = settings.name == "native" and device.type != "cuda"
        self.version = 0
        self.num_in_flight = self.num_decode_steps = 0
        self.has_weights = asyncio.Event()
        """Cleared while weights are being replaced, and after a replacement that failed half-way."""
        self.has_weights.set()
        self.memory: MemoryFile | IpcDeviceMemory | None = None
        self.ids = itertools.count()
        self.pending: dict[int, Future[Any]] = {}
        self.lock = threading.Lock()
        self.loading = threading.Lock()
        """Held while weights are sent."""
        self.reader: threading.Thread | None = None
        self.lost: str | None = None
        """Why there is no process any more."""
        self.python, self.environment = os.path.expanduser(python or sys.executable), environment
        self.folder = Path(tempfile.mkdtemp(prefix="corral-engine-"))
        self.log = log or self.folder / "engine.log"
        # Its environment may not have Corral, and must not get our other packages: a folder with Corral alone is added.
        (self.folder / "corral").symlink_to(Path(corral.__file__).parent, target_is_directory=True)
        self.start()

    def start(self) -> None:
        """Starts the first process."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        # vLLM's sockets; what a killed process leaves there goes with the folder.
        own_variables = {"VLLM_RPC_BASE_PATH": str(self.folder), **self.environment}
        search_path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        own, other = socket.socketpair()
        with other, self.log.open("ab") as log:
            try:
                self.process = start_child(
                    [self.python, "-m", "corral.rollout.engine_process", str(other.fileno()), str(self.folder)],
                    stdout=log,
                    stderr=log,
                    env={**engine_environment(os.environ), **own_variables, "PYTHONPATH": search_path},
                    pass_fds=[other.fileno()],
                )
            except OSError as error:
                own.close()
                raise UserError(f"rollout.engine: {self.python} could not be started: {error.strerror}") from error
        if self.lost is not None:
            self.wire.close()
        self.wire, self.hang = Connection(own.detach()), ""
        try:
            self.wire.send(self.settings)
            ready = self._wait_until_ready()
        except (EOFError, OSError):
            raise EngineLost(self._why_it_ended()) from None
        if ready.error is not None:
            raise UserError(ready.error)
        self.lost = None
        self.reader = threading.Thread(target=self._read, name="corral-engine-wire", daemon=True)
        self.reader.start()

    def _wait_until_ready(self) -> Ready:
        """It says nothing until it is, so whether it hangs is known from what it computes and reads alone."""
        watch = EngineWatch(self.process.pid)
        deadline = time.monotonic() + START_S
        while not self.wire.poll(HEARTBEAT_S):
            if time.monotonic() > deadline:
                raise RunError(self._with_log(f"was not ready after {START_S:g} s"))
            self._kill_if_it_hangs(*watch.look(has_calls=False))
        ready: Ready = self.wire.recv()
        return ready

    def _why_it_ended(self) -> str:
        exit_status = describe_exit(terminate_group(self.process))
        return self._with_log(self.hang or exit_status)

    def _with_log(self, what: str) -> str:
        lines = "".join(f"\n  {line}" for line in last_lines(self.log, 5))
        return f"the engine's process ({self.settings.name}) {what}; the last lines of {self.log}:{lines}"

    # --- the wire

    def _read(self) -> None:
        """Consumes answers and reports, until the process ends, or does nothing any more."""
        watch = EngineWatch(self.process.pid)
        try:
            while True:
                if self.wire.poll(HEARTBEAT_S):
                    message: Progress | Answer = self.wire.recv()
                    watch.hear(isinstance(message, Answer) or message.num_steps != self.num_decode_steps)
                    self.num_decode_steps = message.num_steps
                    if isinstance(message, Answer) and (future := self.pending.pop(message.id, None)) is not None:
                        self._resolve(future, message)
                if time.monotonic() - watch.looked >= HEARTBEAT_S:
                    # Without weights requests wait for these, and not for the engine.
                    self._kill_if_it_hangs(*watch.look(bool(self.pending) and self.has_weights.is_set()))
        except (EOFError, OSError):
            self.lost = self._why_it_ended()
            with self.lock:
                pending, self.pending = self.pending, {}
            for future in pending.values():
                with suppress(Exception):
                    future.set_exception(EngineLost(self.lost))

    def _kill_if_it_hangs(self, silent_s: float, waited_s: float) -> None:
        if silent_s > self.silence_s:
            self.hang = f"showed no sign of life for {self.silence_s:g} s (`cluster.worker_timeout_s`)"
        elif waited_s > CALL_S:
            self.hang = f"made no progress for {CALL_S:g} s, though calls waited for it"
        if self.hang:
            self.hang += " and was killed by Corral"
            signal_group(self.process.pid)  # which the end of the wire shows

    def hurry(self) -> None:
        """The run is to stop: a process that hangs is not waited for as long as otherwise."""
        self.silence_s = min(self.silence_s, HURRY_S)

    def _resolve(self, future: "Future[Any]", answer: Answer) -> None:
        with suppress(Exception):  # nobody waits for it any more
            if answer.error is None:
                future.set_result(answer.result)
            else:
                future.set_exception((ValueError if answer.is_users else RunError)(answer.error))

    def _call(self, method: str, *arguments: Any) -> "tuple[int, Future[Any]]":
        number, future = next(self.ids), Future[Any]()
        with self.lock:
            if self.lost is not None:
                raise EngineLost(self.lost)
            self.pending[number] = future
            with suppress(OSError):  # then it has ended, which the reader sees
                self.wire.send(Call(number, method, arguments))
        return number, future

    def _call_and_wait(self, method: str, *arguments: Any) -> Any:
        answer = self._call(method, *arguments)[1]
        try:
            return answer.result(CALL_S)
        except TimeoutError:
            if answer.done():  # it is the answer
                raise
            raise RunError(self._with_log(f"did not answer `{method}` within {CALL_S:g} s")) from None

    # --- the engine seam

    @property
    def weight_layout(self) -> WeightLayout:
        return [(name, parameter.shape, parameter.dtype) for name, parameter in self.skeleton.named_parameters()]

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        seed: int,
        *,
        prefix: PrefixHandle | None = None,
        keep_prefix: bool = False,
        images: Mapping[int, bytes] = NO_IMAGES,
    ) -> Completion:
        """`prefix` and `keep_prefix` are not used: the engine finds cached prefixes by itself."""
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        if images:
            raise ValueError("an engine in a process of its own takes no images")
        limit = self.settings.max_length
        if len(tokens) + sampling.max_tokens > limit:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and up to {sampling.max_tokens} new ones pass the limit of {limit}"
            )
        request = GenerationRequest(np.array(tokens, np.int64), sampling, seed, None)
        self.num_in_flight += 1
        try:
            while request.finish_reason is None:
                await self.has_weights.wait()
                left = replace(sampling, max_tokens=sampling.max_tokens - len(request.tokens))
                generated = await self._generate([*tokens, *request.tokens], left, seed)
                self._extend(request, generated)
        finally:
            self.num_in_flight -= 1
        return request.completion()

    async def _generate(self, tokens: list[int], sampling: Sampling, seed: int) -> Generated:
        number, future = self._call("generate", tokens, sampling, seed)
        try:
            generated: Generated = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.pending.pop(number, None)  # it gets no answer
            with self.lock, suppress(OSError):
                self.wire.send(Call(number, CANCEL, ()))
            raise
        return generated

    def _extend(self, request: GenerationRequest, generated: Generated) -> None:
        """The end is found here, whichever engine it was: a stop string may begin in one part and end in the next."""
        start = 0
        for version, group in groupby(generated.versions):
            end = start + len(list(group))
            request.extend(generated.tokens[start:end], generated.logprobs[start:end], version, self.tokenizer)
            if request.finish_reason is not None:
                return
            start = end
        if not generated.interrupted:  # the engine has decoded a stop string where this side sees none
            request.finish_reason = FinishReason.STOP_STRING

    async def compute_logprobs(self, tokens: Sequence[int], temperature: float) -> list[float]:
        _, future = self._call("compute_logprobs", list(tokens), temperature)
        logprobs: list[float] = await asyncio.wrap_future(future)
        return logprobs

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not self.num_in_flight, "requests are in flight: this is for `update`"
        self._replace_weights(weights, version)
        self.has_weights.set()  # an update may have failed before

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        return await self._while_requests_wait(self._replace_weights, weights, version)

    async def restart(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Starts a process in place of a lost one, with these weights."""
        await self._while_requests_wait(self._start_with, weights, version)

    def restart_and_load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The same where nothing is in flight."""
        self._start_with(weights, version)
        self.has_weights.set()

    def _start_with(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """A process that dies while it starts is started again, too."""
        self.settings = replace(self.settings, model=self.model_of_restarts)
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._start()
                break
            except EngineLost as lost:
                logger.warning("%s\nit died while it started (attempt %d of %d)", lost, attempt, START_ATTEMPTS)
                if attempt == START_ATTEMPTS:
                    raise
        self._replace_weights(weights, version)

    async def _while_requests_wait(self, replace: Callable[..., None], *arguments: Any) -> float:
        if self.has_weights.is_set():  # a new one, since an event belongs to the loop in which it was waited for
            self.has_weights = asyncio.Event()
        started = time.perf_counter()
        await asyncio.to_thread(replace, *arguments)
        self.has_weights.set()  # not reached after an error
        return time.perf_counter() - started

    def _replace_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sends the weights, one bucket after the other in the same memory. A transfer that was cancelled ends in its
        own thread; the next one waits for that."""
        with self.loading:
            self._send_weights(weights, version)

    def _send_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        iterator = iter(weights) if self.settings.name == "native" else as_in_checkpoints(self.skeleton, weights)
        first = next(iterator, None)
        if first is None:
            self._call_and_wait("set_version", version)
        else:
            self._call_and_wait("begin_update")
            for places, content in pack(itertools.chain([first], iterator), BUCKET_BYTES, self._allocate):
                assert self.memory is not None
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                bucket = WeightBucket(SentBucket(places, self.memory.handle()), checksum(content))
                self._call_and_wait("load", bucket)
            self._call_and_wait("finish_update", version)
        self.version = version

    def _allocate(self, size: int) -> Tensor:
        """Memory that the engine's process can map, the same for one bucket after the other."""
        if self.memory is None or len(self.memory.content) < size:
            self._free()
            on_gpu = self.device.type == "cuda"
            self.memory = IpcDeviceMemory(size, self.device) if on_gpu else MemoryFile(size)
        return self.memory.content[:size]

    def _free(self) -> None:
        if isinstance(self.memory, MemoryFile):
            os.close(self.memory.file)
        self.memory = None

    def release_cache(self) -> None:
        assert not self.num_in_flight, "requests are in flight"
        if self.device.type == "cuda":
            self._free()
            torch.cuda.ipc_collect()
        self._call_and_wait("release_memory")

    def close(self) -> None:
        if hasattr(self, "process"):
            terminate_group(self.process, CLOSE_S if self.lost is None else 0)
        if self.reader is not None:
            self.reader.join()
            self.wire.close()
        self._free()
        shutil.rmtree(self.folder, ignore_errors=True)


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment for an engine: without expandable segments, with which vLLM cannot sleep, and whose memory
    other processes cannot map in most containers."""
    kept = dict(environment)
    for name in kept.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
        options = [option for option in kept[name].split(",") if not option.strip().startswith("expandable_segments")]
        kept[name] = ",".join(options)
    return kept


def as_in_checkpoints(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields weights under the names and in the shapes that a checkpoint has, which is what other engines read:
    transformers joins the matrices of experts, for one."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in weights:
        yield from revert_weight_conversion(model, {name: tensor.detach()}).items()
