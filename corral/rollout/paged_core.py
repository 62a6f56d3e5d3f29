"""The core for a GPU: a paged KV cache, and windows of several decode steps that run while the host reads the last one.

A window is launched before the tokens of the one before are read, so the device never waits for the host. The price: a
sequence that ends with a stop token is noticed a window later, and decodes some tokens in vain. They are cut off, and
their keys and values lie behind the sequence's end, where the page's next owner overwrites them. Everything that
touches the cache is launched in order on one stream, so a page may be reused as soon as the host knows that its owner
has finished, though kernels that write to it are still queued.
"""

import gc
import heapq
from collections import deque
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.kernels.host_to_device import on_device
from corral.kernels.sampling import Truncation, sample_tokens
from corral.model.attention import EXACT, attention_layers
from corral.model.fused_layers import fused_layers
from corral.model.logprobs import OutputHead
from corral.model.model_loading import has_bfloat16
from corral.recipe.memory import FLOAT32, max_prefill_keys, prefill_bytes, sampling_bytes
from corral.recipe.shape import ModelShape
from corral.rollout.engine_core import EngineStats, GenerationRequest, PrefixKey
from corral.rollout.paged_decoder import PagedDecoder, SlotState
from corral.rollout.paged_kv_cache import CacheShape, PagedKVCache, num_pages_of
from corral.rollout.prefill_scheduler import PrefillGroup, PrefillScheduler, prefix_key_of

WINDOW = 8
"""Decode steps that are launched at once. Launched one at a time, the device would wait while the host reads tokens,
looks for stop strings and schedules; a window of eight hides that. A longer one decodes more tokens behind stop tokens
in vain, and makes new requests wait longer for their prefill."""


@dataclass(eq=False)
class RunningSequence:
    """A request that is being decoded."""

    request: GenerationRequest
    pages: list[int]
    length: int
    """Number of tokens in the cache once everything that was launched has run."""
    last_length: int
    """The length at which its last token is sampled."""


@dataclass(eq=False)
class DecodeWindow:
    """Tokens that were sampled by one launch, [steps, columns], on their way to the host."""

    sequences: list[tuple[int, RunningSequence]]
    """(column, sequence)"""
    tokens: Tensor
    logprobs: Tensor
    version: int
    arrived: "torch.cuda.Event | None"


class PagedCore:
    def __init__(
        self, model: Any, tokenizer: Any, *, max_sequences: int, max_prefill_tokens: int, max_length: int
    ) -> None:
        self.model, self.tokenizer, self.max_sequences = model, tokenizer, max_sequences
        self.device = next(model.parameters()).device
        self.version = 0
        self.stats = EngineStats()
        needed = pass_bytes(model, max_sequences, max_prefill_tokens, max_length)
        self.cache = PagedKVCache(CacheShape.of_model(model), max_sequences, max_length, self.device, needed)
        self.prefill = PrefillScheduler(model, self.cache, max_prefill_tokens, self.stats)
        self.free_slots = list(range(max_sequences))
        self.running: dict[int, RunningSequence] = {}
        """Sequences by slot."""
        self.windows: deque[DecodeWindow] = deque()
        self.finished: list[GenerationRequest] = []
        self.state = SlotState.empty(max_sequences, num_pages_of(max_length + 2 * WINDOW) + 1, self.device)
        self.page_table = np.zeros(tuple(self.state.page_table.shape), np.int32)
        self.decoder: PagedDecoder | None = None

    # --- the core's interface

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self.windows or self.prefill.chunked)

    def step(self, waiting: list[GenerationRequest]) -> list[GenerationRequest]:
        """Launches a window, then reads the one before."""
        self.acquire_cache()
        self._admit(waiting)
        self._launch_window(waiting)
        while len(self.windows) > int(bool(self.running)):
            self._read_window(self.windows.popleft())
        finished, self.finished = self.finished, []
        return finished

    def use_version(self, version: int) -> None:
        self.cache.drop_prompts()
        self.version = self.prefill.version = version

    def abort_all(self) -> None:
        self.running, self.prefill.chunked, self.finished = {}, None, []
        self.windows.clear()
        self.free_slots = list(range(self.max_sequences))
        self.release_cache()

    def release_cache(self) -> None:
        self.cache.release()
        self.page_table[:] = 0

    def acquire_cache(self) -> None:
        self.cache.acquire()
        pool = self.cache.pool
        if self.decoder is None or (self.decoder.pool, self.decoder.address) != (pool, pool.address):
            is_first = self.decoder is None
            self.decoder = PagedDecoder(self.model, self.cache.pool, self.state, WINDOW)
            if is_first and self.device.type == "cuda":
                # A full garbage collection looks at every object of the process, which takes longer than a window.
                gc.collect()
                gc.freeze()

    # --- admitting requests

    def _admit(self, waiting: list[GenerationRequest]) -> None:
        """Runs prefill batches: one between two windows, so that running sequences are not held up; more while most
        slots are empty, since then there is little to hold up."""
        for _ in range(max(1, len(self.free_slots) // max(1, len(self.running)))):
            groups = self.prefill.next_batch(waiting, len(self.free_slots))
            if not groups:
                return
            self.prefill.compute(groups)
            ready = [group for group in groups if group.hidden is not None]
            if ready:
                self._start(ready, {prefix_key_of(request) for request in waiting})

    def _start(self, groups: list[PrefillGroup], still_waiting: set[PrefixKey]) -> None:
        """Gives every request a slot, and samples its first token."""
        requests = [(row, group, request) for row, group in enumerate(groups) for request in group.requests]
        started: list[tuple[int, RunningSequence]] = []
        for (_, group, request), pages in zip(requests, self.prefill.assign_pages(groups, still_waiting), strict=True):
            last_length = len(request.prompt) + request.sampling.max_tokens - 1
            sequence = RunningSequence(request, pages, len(group.tokens), last_length)
            started.append((heapq.heappop(self.free_slots), sequence))
            request.prefix = None  # its content is in the cache now
            if not request.tokens:
                self.stats.num_prompt_tokens += len(request.prompt)
        self._sample_first(groups, [row for row, _, _ in requests], started)
        for slot, sequence in started:
            if sequence.length < sequence.last_length:
                self.running[slot] = sequence
            else:
                heapq.heappush(self.free_slots, slot)

    def _sample_first(
        self, groups: list[PrefillGroup], rows: list[int], started: list[tuple[int, RunningSequence]]
    ) -> None:
        """Samples the first token of every started sequence from the last hidden state of its group, `rows`, and writes
        the slots' state."""
        hidden = torch.stack([group.hidden for group in groups if group.hidden is not None])
        requests = [sequence.request for _, sequence in started]
        numbers = [
            [slot for slot, _ in started],
            rows,
            [request.seed for request in requests],
            [len(request.tokens) for request in requests],
            [sequence.length for _, sequence in started],
            [request.sampling.top_k for request in requests],
        ]
        slots, of_row, seeds, counters, positions, top_k = on_device(torch.tensor(numbers), self.device)
        sampling = [group.requests[0].sampling for group in groups]
        by_row = torch.tensor([[s.temperature, s.top_p, s.min_p, s.top_k] for s in sampling], dtype=torch.float32)
        temperatures, top_p, min_p, row_top_k = on_device(by_row.T.contiguous(), self.device)
        truncation = Truncation(row_top_k.long(), top_p, min_p) if any(s.truncates for s in sampling) else None
        logits = OutputHead.of_model(self.model).logits(hidden)
        tokens, logprobs = sample_tokens(logits, of_row, temperatures, seeds, counters, truncation)
        state = self.state
        state.tokens[slots] = tokens
        state.positions[slots] = positions.int()
        state.seeds[slots] = seeds
        state.counters[slots] = counters.int() + 1
        state.temperatures[slots] = temperatures[of_row]
        state.top_k[slots] = top_k
        state.top_p[slots] = top_p[of_row]
        state.min_p[slots] = min_p[of_row]
        self._send(tokens[None], logprobs[None], [(column, sequence) for column, (_, sequence) in enumerate(started)])

    # --- decoding

    def _launch_window(self, waiting: list[GenerationRequest]) -> None:
        """Launches the next decode steps of everything that runs."""
        if not self.running:
            return
        steps = min(WINDOW, max(sequence.last_length - sequence.length for sequence in self.running.values()))
        if not self.cache.ensure_free_pages(self._num_missing_pages(steps)):
            # Sequences that have finished are only known once their window is read: that may free enough.
            while self.windows:
                self._read_window(self.windows.popleft())
            while self.running and not self.cache.ensure_free_pages(self._num_missing_pages(steps)):
                self._preempt(waiting)
        if not self.running:
            return
        assert self.decoder is not None
        self._compact_slots()
        for slot, sequence in self.running.items():
            sequence.pages += self.cache.pool.allocate(_num_pages_ahead(sequence, steps))
            self.page_table[slot, : len(sequence.pages)] = sequence.pages
        count = len(self.running)
        is_used = torch.zeros(self.max_sequences, dtype=torch.int32)
        is_used[:count] = 1
        self.state.page_table.copy_(on_device(self.page_table.copy(), self.device))
        self.state.positions.mul_(on_device(is_used, self.device))
        truncates = any(sequence.request.sampling.truncates for sequence in self.running.values())
        tokens, logprobs = self.decoder.run(count, steps, truncates)
        self._send(tokens, logprobs, list(self.running.items()))
        self.stats.num_decode_steps += steps
        self.stats.num_computed_tokens += steps * count
        for slot, sequence in list(self.running.items()):
            sequence.length += steps
            if sequence.length >= sequence.last_length:
                self._free_slot(slot)

    def _num_missing_pages(self, steps: int) -> int:
        return sum(_num_pages_ahead(sequence, steps) for sequence in self.running.values())

    def _preempt(self, waiting: list[GenerationRequest]) -> None:
        """Frees the pages of one sequence, which is prefilled again later and continues where it was. It is the one
        with the fewest generated tokens: it has the least to compute again, and the oldest ones get to their end, which
        frees pages for good."""
        slot = max(self.running, key=lambda slot: -len(self.running[slot].request.tokens))
        sequence = self.running[slot]
        self._free_slot(slot)
        self.cache.pool.free(sequence.pages)
        waiting.insert(0, sequence.request)

    def _compact_slots(self) -> None:
        """Moves running sequences into the first slots, for which the CUDA graphs are captured."""
        count = len(self.running)
        sources = [slot for slot in self.running if slot >= count]
        if not sources:
            return
        targets = [slot for slot in range(count) if slot not in self.running]
        self.state.move(on_device(sources, self.device), on_device(targets, self.device))
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running.pop(source)
            self.page_table[source] = 0
        self.free_slots = list(range(count, self.max_sequences))

    def _free_slot(self, slot: int) -> None:
        del self.running[slot]
        self.page_table[slot] = 0
        heapq.heappush(self.free_slots, slot)

    # --- reading what was sampled

    def _send(self, tokens: Tensor, logprobs: Tensor, sequences: list[tuple[int, RunningSequence]]) -> None:
        """Queues a copy to the host behind what was launched so far. The event says when it has arrived; waiting for
        the stream would wait for what is launched later, too."""
        arrived = None
        if self.device.type == "cuda":
            tokens, logprobs = _copy_to_host(tokens), _copy_to_host(logprobs)
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            tokens, logprobs = tokens.clone(), logprobs.clone()
        self.windows.append(DecodeWindow(sequences, tokens, logprobs, self.version, arrived))

    def _read_window(self, window: DecodeWindow) -> None:
        if window.arrived is not None:
            window.arrived.synchronize()
        tokens, logprobs = window.tokens.T.tolist(), window.logprobs.T.tolist()
        slots = {id(sequence): slot for slot, sequence in self.running.items()}
        for column, sequence in window.sequences:
            request = sequence.request
            if request.finish_reason is not None:  # it finished in the window before
                continue
            num_before = len(request.tokens)
            request.extend(tokens[column], logprobs[column], window.version, self.tokenizer)
            self.stats.num_generated_tokens += len(request.tokens) - num_before
            if request.finish_reason is not None:
                if id(sequence) in slots:
                    self._free_slot(slots[id(sequence)])
                self._finish(sequence)

    def _finish(self, sequence: RunningSequence) -> None:
        """Frees the sequence's pages, or keeps them as a cached prefix if all of it is of the current weights."""
        request = sequence.request
        length = len(request.prompt) + len(request.tokens) - 1
        num_kept = num_pages_of(length) if request.keep_prefix and request.versions[0] == self.version else 0
        self.cache.pool.free(sequence.pages[num_kept:])
        if num_kept:
            request.prefix = self.cache.keep_prefix(sequence.pages[:num_kept], length, self.version)
        self.finished.append(request)


def supports_paging(model: Any) -> bool:
    """Whether the paged kernels can decode the model; the slot core decodes the others."""
    if find_spec("triton") is None or any(getattr(module, EXACT, False) for module in model.modules()):
        return False
    device = next(model.parameters()).device
    if device.type == "cuda" and not has_bfloat16(device):
        return False
    layers = attention_layers(model)
    shapes = {(layer.kv_heads, layer.key_width, layer.value_width) for layer in layers.values()}
    if len(shapes) != 1 or set(layers) != set(range(len(layers))):
        return False
    [(_, *widths)] = shapes
    has_kernels = all(layer.kernel.softcap is None and layer.kernel.window != 1 for layer in layers.values())
    return has_kernels and 16 < max(widths) <= 256


def pass_bytes(model: Any, max_sequences: int, max_prefill_tokens: int, max_length: int) -> int:
    """Memory that the engine needs beside its cache on a GPU: for the largest prefill, for logits, and for rotary
    tables, which are computed in float32."""
    shape = ModelShape.from_config(model.config.to_dict())
    weight_bytes: int = next(model.parameters()).element_size()
    num_keys = max_prefill_keys(max_prefill_tokens, max_length, max_sequences)
    prefill = prefill_bytes(shape, weight_bytes, fused_layers(model) is not None, max_prefill_tokens, num_keys)
    tables = max_length * shape.head_dim * (2 * weight_bytes + 4 * FLOAT32)
    return prefill + sampling_bytes(shape, weight_bytes, max_sequences, truncates=True) + tables


def _num_pages_ahead(sequence: RunningSequence, steps: int) -> int:
    """Pages that the next `steps` tokens need beyond those it has; what is written behind its end goes to page 0."""
    return max(0, num_pages_of(min(sequence.length + steps, sequence.last_length)) - len(sequence.pages))


def _copy_to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
