"""The native engine: continuous batching over any transformers causal model, on the trainer's own weights.

This file is the engine's outside: requests, weights, and who runs when. Inside is an engine core: `SlotCore`, one
decode step at a time (on a CPU, and the reference), `PagedCore`, many decode steps at a time in CUDA graphs, or for
models that only transformers' own forward pass computes, `GeneralCore`.

New weights may arrive while requests are in flight, between two steps of the core. A step ends when its tokens are
sampled, before their keys and values are computed, so that every token is computed by one version as a whole, the one
recorded for it; what came before it stays in the cache as the earlier versions left it. The recorded log-prob is that
of the distribution from which the token was sampled, so that an importance correction is exact. A request that starts
after an update has nothing of the old weights: prompts that were cached for samples still waiting are dropped and
prefilled again.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.data.batch import TokenTree
from corral.model.attention import TreeAttention, forward_hidden
from corral.model.general_forward import is_general, logprobs_of_logits, sequence_logits
from corral.model.logprobs import OutputHead
from corral.model.model_check import difference, plain_logprobs, probe_sequences, raise_if_large
from corral.rollout.engine import Completion, PrefixHandle, Sampling, WeightLayout
from corral.rollout.engine_core import EngineCore, EngineStats, GenerationRequest
from corral.rollout.general_core import GeneralCore
from corral.rollout.paged_core import PagedCore, supports_paging
from corral.rollout.slot_core import SlotCore


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
        """`paged`: which core of the fast path. None: the paged one on a GPU, if its kernels support the model."""
        self.model, self.tokenizer = model, tokenizer
        self.max_sequences, self.max_length = max_sequences, max_length
        self.core: EngineCore = core_class(model, paged)(
            model, tokenizer, max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens, max_length=max_length
        )
        self.is_reproducible = not is_general(model)
        """On the general path the size of a batch is part of how its kernels round."""
        self.version = 0
        self.has_weights = asyncio.Event()
        """Cleared while weights are being replaced, and after a replacement that failed half-way: then the weights are
        of no version, and nothing is decoded until an update has succeeded."""
        self.has_weights.set()
        self.in_flight: set[GenerationRequest] = set()
        self.waiting: list[GenerationRequest] = []
        self.decode_loop: asyncio.Task[None] | None = None
        # One thread for everything that touches the model or the cache. It keeps the event loop free for environments
        # while the model computes, and its queue is the lock: an update of the weights runs between two steps.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="corral-engine")

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    @torch.no_grad()
    def check(self, path: str) -> None:
        """Decodes two unrelated sequences together and compares with the model's plain forward pass; raises if the
        log-probs are others. Nothing may be in flight."""
        if self.max_length < 9:  # nothing to compare: no run has so little room
            return
        greedy = Sampling(max_tokens=4, temperature=0.0)
        prompts = [sequence[:length] for sequence, length in zip(probe_sequences(self.model), (5, 3), strict=False)]
        requests = [GenerationRequest(np.array(prompt, np.int64), greedy, 0, None) for prompt in prompts]
        self.thread.submit(self._run, list(requests)).result()
        expected = [
            plain_logprobs(self.model, [*prompt, *request.tokens])[len(prompt) - 1 :]
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        found = difference([torch.tensor(request.logprobs) for request in requests], [one.cpu() for one in expected])
        problem = "decoding two sequences together gives other log-probs than transformers' own forward pass"
        raise_if_large(found, self.model, f"model.path: {path}: {problem}; please report the model")

    @torch.inference_mode()
    def _run(self, waiting: list[GenerationRequest]) -> None:
        while waiting or self.core.is_busy:
            self.core.step(waiting)
        self.core.release_cache()

    # --- the engine seam

    @property
    def weight_layout(self) -> WeightLayout:
        return [(name, parameter.shape, parameter.dtype) for name, parameter in self.model.named_parameters()]

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    @property
    def num_decode_steps(self) -> int:
        return self.stats.num_decode_steps

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        seed: int,
        *,
        prefix: PrefixHandle | None = None,
        keep_prefix: bool = False,
    ) -> Completion:
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        if len(tokens) + sampling.max_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and up to {sampling.max_tokens} new ones "
                f"pass the limit of {self.max_length}"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        request = GenerationRequest(
            np.array(tokens, np.int64), sampling, seed, future, prefix=prefix, keep_prefix=keep_prefix
        )
        del prefix  # the core frees the handle as soon as its content is in the cache; this frame must not hold it
        self.in_flight.add(request)
        self.waiting.append(request)
        if self.decode_loop is None or self.decode_loop.done():
            self.decode_loop = loop.create_task(self._decode_until_idle())
        return await future

    async def compute_logprobs(self, tokens: Sequence[int], temperature: float) -> list[float]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, model_logprobs, self.model, tokens, temperature)

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not self.in_flight, "requests are in flight: this is for `update`"
        self._replace_weights(weights, version)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        self.has_weights.clear()
        pause_s = await asyncio.get_running_loop().run_in_executor(self.thread, self._replace_weights, weights, version)
        self.has_weights.set()  # not reached after an error
        return pause_s

    def release_cache(self) -> None:
        assert not self.in_flight, "requests are in flight"
        self.thread.submit(self.core.release_cache).result()

    def close(self) -> None:
        self.thread.shutdown(wait=True)

    # --- on the engine's thread

    def acquire_cache(self) -> None:
        """Allocates the cache's memory now instead of with the next request."""
        self.thread.submit(self.core.acquire_cache).result()

    def _replace_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        started = time.perf_counter()
        copy_weights(self.model, weights)
        self.version = version
        self.core.use_version(version)
        return time.perf_counter() - started

    async def _decode_until_idle(self) -> None:
        """Consumes waiting requests and produces completions; ends when no request is left. Waits for the core's steps,
        and for weights that are being replaced."""
        loop = asyncio.get_running_loop()
        try:
            while self.waiting or self.core.is_busy:
                await self.has_weights.wait()
                for request in await loop.run_in_executor(self.thread, self.step):
                    self.in_flight.discard(request)
                    if request.future is not None and not request.future.done():
                        request.future.set_result(request.completion())
        except Exception as error:
            for request in self.in_flight:
                if request.future is not None and not request.future.done():
                    request.future.set_exception(error)
            self.in_flight, self.waiting = set(), []
            self.core.abort_all()

    @torch.inference_mode()
    def step(self) -> list[GenerationRequest]:
        """One step of the core: the requests that finished in it."""
        return self.core.step(self.waiting)


def core_class(model: Any, paged: bool | None) -> type[PagedCore] | type[SlotCore] | type[GeneralCore]:
    if is_general(model):
        return GeneralCore
    if paged is None:
        paged = next(model.parameters()).is_cuda and supports_paging(model)
    return PagedCore if paged else SlotCore


def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies weights into the model's own parameters in place: CUDA graphs hold their addresses."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            own[name].copy_(tensor)


@torch.inference_mode()
def model_logprobs(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-prob of each token after the first, in one forward pass without the KV cache."""
    device = next(model.parameters()).device
    targets = torch.tensor(tokens[1:], device=device)
    rows = torch.arange(len(targets), device=device)
    if is_general(model):
        logits = sequence_logits(model, torch.tensor([tokens[:-1]], device=device))
        logprobs, _ = logprobs_of_logits(logits, rows, targets, temperature)
        return logprobs.tolist()
    tree = TokenTree.build([np.array(tokens[:-1], np.int64)])
    hidden = forward_hidden(
        model,
        torch.from_numpy(tree.tokens).to(device),
        torch.from_numpy(tree.positions).to(device),
        TreeAttention(tree, device),
    )
    logprobs, _ = OutputHead.of_model(model).logprobs(hidden, rows, targets, temperature=temperature, chunk=64)
    return logprobs.tolist()
