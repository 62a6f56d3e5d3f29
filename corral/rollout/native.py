"""The native engine: continuous batching over any transformers causal model, on the trainer's own weights.

This is the engine's outside: requests, weights, and who runs when. What is inside is a core: `SlotCore`, a step at a
time (on a CPU, and the reference), or `PagedCore`, many steps at a time in captured graphs (on a GPU).

New weights may come while requests are in flight, between two steps of the core. A step ends when its tokens are drawn,
before they are read, so that every token is computed by one version as a whole, the one that is noted for it; what came
before it stays in the cache as the versions of its time left it. The noted log-prob is that of the distribution from
which the token was drawn, so that an importance correction is exact. A request that starts after an update has nothing
of the old weights: prompts that were stored for samples still waiting are forgotten, and computed again.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from corral.rollout.engine import Completion, Memory, Sampling
from corral.rollout.paged.core import PagedCore, can_be_paged
from corral.rollout.request import EngineStats, Request
from corral.rollout.slots import SlotCore

T = TypeVar("T")


class Core(Protocol):
    """Owns the cache and what is being decoded. Used by one thread at a time."""

    stats: EngineStats

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to decode besides what waits."""
        ...

    def step(self, waiting: list[Request]) -> list[Request]:
        """Goes on with what runs, starts what it can (taken out of `waiting`), returns requests that are finished."""
        ...

    def use_version(self, version: int) -> None:
        """The model has other weights from here on."""
        ...

    def drop(self) -> None:
        """Forgets what runs."""
        ...

    def release(self) -> None:
        """Gives the cache's memory back until the next step. Nothing runs."""
        ...

    def acquire(self) -> None:
        """Takes what `release` has given back."""
        ...


class NativeEngine:
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_sequences: int,
        max_prefill_tokens: int,
        max_length: int,
        paged: bool | None = None,
    ) -> None:
        """`paged`: which core. None: the paged one on a GPU, where it can decode this model."""
        self.model, self.tokenizer = model, tokenizer
        self.max_sequences, self.max_length = max_sequences, max_length
        if paged is None:
            paged = next(model.parameters()).is_cuda and can_be_paged(model)
        make_core = PagedCore if paged else SlotCore
        self.core: Core = make_core(
            model,
            tokenizer,
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
            max_length=max_length,
        )
        self.version = 0
        self.ready = asyncio.Event()
        """Not set while weights are being taken, and when that broke off: then they are of no version, and nothing is
        decoded until others have been taken whole."""
        self.ready.set()
        self.in_flight: set[Request] = set()
        self.waiting: list[Request] = []
        self.pump: asyncio.Task[None] | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="corral-engine")

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    # --- the seam

    async def generate(
        self, tokens: list[int], sampling: Sampling, seed: int, *, memory: Memory | None = None, keep: bool = False
    ) -> Completion:
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        if len(tokens) + sampling.max_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and up to {sampling.max_tokens} new ones "
                f"pass the limit of {self.max_length}"
            )
        loop = asyncio.get_running_loop()
        request = Request(np.array(tokens, np.int64), sampling, seed, loop.create_future(), keep=keep)
        request.memory = memory
        del memory  # the request lets go of it as soon as it is in the cache
        self.in_flight.add(request)
        self.waiting.append(request)
        if self.pump is None or self.pump.done():
            self.pump = loop.create_task(self._pump())
        return await request.future

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not self.in_flight, "requests are in flight: this is for `update`"
        self._take(weights, version)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Takes new weights with requests in flight, which go on with them. Returns the seconds for which nothing was
        decoded. If `weights` breaks off, requests wait until others have been taken whole."""
        self.ready.clear()
        pause_s = await self.between_steps(lambda: self._take(weights, version))
        self.ready.set()
        return pause_s

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Runs `work` while the model is not in use."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def pause(self) -> None:
        assert not self.in_flight, "requests are in flight"
        self.thread.submit(self.core.release).result()

    def resume(self) -> None:
        """Takes the cache's memory again, which the next request would do otherwise."""
        self.thread.submit(self.core.acquire).result()

    def close(self) -> None:
        self.thread.shutdown(wait=True)

    # --- what happens between

    def _take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        started = time.perf_counter()
        copy_weights(self.model, weights)
        self.version = version
        self.core.use_version(version)
        return time.perf_counter() - started

    async def _pump(self) -> None:
        """Consumes waiting requests, produces completions; ends when none is left. Waits for the model, and for weights
        that are on their way."""
        loop = asyncio.get_running_loop()
        try:
            while self.waiting or self.core.is_busy:
                await self.ready.wait()
                for request in await loop.run_in_executor(self.thread, self.step):
                    self.in_flight.discard(request)
                    if not request.future.done():
                        request.future.set_result(request.completion())
        except Exception as error:
            for request in self.in_flight:
                if not request.future.done():
                    request.future.set_exception(error)
            self.in_flight, self.waiting = set(), []
            self.core.drop()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Requests that are finished."""
        return self.core.step(self.waiting)


def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Into the model's own parameters, in place."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            own[name].copy_(tensor)
