"""The core for a GPU: a paged cache, and windows of several decode steps that run while the host reads the last one's.

A window is launched without looking at what the one before drew, so the device never waits for the host. The price: a
sequence that ends with a stop token is noticed a window later, and decodes some tokens for nobody. Nothing of them is
seen: they are cut off, and their keys and values lie behind the sequence's end, where the page's next owner writes.
Everything that touches the cache is launched in order on one stream, so a page may be given on as soon as the host
knows that its owner has ended.
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

from corral.kernels.device import on_device
from corral.kernels.draw import Truncation, draw
from corral.model.attention import EXACT
from corral.rollout.paged.cache import PagedCache, cache_shape
from corral.rollout.paged.decoder import Decoder
from corral.rollout.paged.openings import Opening, Openings, family_of
from corral.rollout.paged.pool import num_pages_of
from corral.rollout.paged.state import SlotState
from corral.rollout.request import EngineStats, Family, Request

WINDOW = 8
"""Decode steps that are launched at once."""


@dataclass(eq=False)
class Sequence:
    """A request that is being decoded."""

    request: Request
    pages: list[int]
    length: int
    """In the cache, once everything that was launched has run."""
    last: int
    """The length with which its last token is drawn."""


@dataclass(eq=False)
class Window:
    """What was launched together: [steps, columns] of draws, on their way to the host."""

    sequences: list[tuple[int, Sequence]]
    """(column, whose it is)"""
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
        self.scales = attention_scales(model)
        self.version = 0
        self.stats = EngineStats()
        self.cache = PagedCache(cache_shape(model), max_sequences, max_length, self.device)
        self.openings = Openings(model, self.cache, self.scales, max_prefill_tokens, self.stats)
        self.free_slots = list(range(max_sequences))
        self.running: dict[int, Sequence] = {}
        """By slot."""
        self.windows: deque[Window] = deque()
        self.finished: list[Request] = []
        self.state = SlotState.empty(max_sequences, num_pages_of(max_length + 2 * WINDOW) + 1, self.device)
        self.table = np.zeros(tuple(self.state.table.shape), np.int32)
        self.decoder: Decoder | None = None

    # --- the core's seam

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self.windows or self.openings.unfinished)

    def step(self, waiting: list[Request]) -> list[Request]:
        """Launches a window, then reads the one before."""
        self.acquire()
        self._admit(waiting)
        self._launch(waiting)
        while len(self.windows) > int(bool(self.running)):
            self._collect(self.windows.popleft())
        finished, self.finished = self.finished, []
        return finished

    def use_version(self, version: int) -> None:
        self.cache.drop_stored()
        self.version = self.openings.version = version

    def drop(self) -> None:
        self.running, self.openings.unfinished, self.finished = {}, None, []
        self.windows.clear()
        self.free_slots = list(range(self.max_sequences))
        self.release()

    def release(self) -> None:
        self.cache.release()
        self.table[:] = 0

    def acquire(self) -> None:
        self.cache.acquire()
        if self.decoder is None or self.decoder.pool is not self.cache.pool:
            self.decoder = Decoder(self.model, self.cache.pool, self.state, self.scales, WINDOW)
            if self.device.type == "cuda":
                # A look at every object of the process takes Python longer than a window takes the device.
                gc.collect()
                gc.freeze()

    # --- starting

    def _admit(self, waiting: list[Request]) -> None:
        """Passes of prefill: one between two windows, and more while many slots are empty."""
        for _ in range(max(1, len(self.free_slots) // max(1, len(self.running)))):
            openings = self.openings.choose(waiting, len(self.free_slots))
            if not openings:
                return
            self.openings.read(openings)
            ready = [opening for opening in openings if opening.hidden is not None]
            if ready:
                self._begin(ready, {family_of(request) for request in waiting})

    def _begin(self, openings: list[Opening], left: set[Family]) -> None:
        """Draws the first token of every request, each in a slot from here on. `left`: those that still wait."""
        requests = [(row, opening, request) for row, opening in enumerate(openings) for request in opening.requests]
        begun: list[tuple[int, Sequence]] = []
        for (_, opening, request), pages in zip(requests, self.openings.part(openings, left), strict=True):
            last = len(request.prompt) + request.sampling.max_tokens - 1
            begun.append((heapq.heappop(self.free_slots), Sequence(request, pages, len(opening.tokens), last)))
            request.memory = None  # it is in the cache now
            if not request.tokens:
                self.stats.prompt_tokens += len(request.prompt)
        self._draw_first(openings, [row for row, _, _ in requests], begun)
        for slot, sequence in begun:
            if sequence.length < sequence.last:
                self.running[slot] = sequence
            else:
                heapq.heappush(self.free_slots, slot)

    def _draw_first(self, openings: list[Opening], rows: list[int], begun: list[tuple[int, Sequence]]) -> None:
        """`rows`: the opening from which each of those that begin draws."""
        hidden = torch.stack([opening.hidden for opening in openings if opening.hidden is not None])
        requests = [sequence.request for _, sequence in begun]
        numbers = [
            [slot for slot, _ in begun],
            rows,
            [request.seed for request in requests],
            [len(request.tokens) for request in requests],
            [sequence.length for _, sequence in begun],
            [request.sampling.top_k for request in requests],
        ]
        slots, of_row, seeds, counters, positions, top_k = on_device(torch.tensor(numbers), self.device)
        sampling = [opening.requests[0].sampling for opening in openings]
        by_row = torch.tensor([[s.temperature, s.top_p, s.min_p, s.top_k] for s in sampling], dtype=torch.float32)
        temperatures, top_p, min_p, row_top_k = on_device(by_row.T.contiguous(), self.device)
        truncation = Truncation(row_top_k.long(), top_p, min_p) if any(s.truncates for s in sampling) else None
        logits = self.model.get_output_embeddings()(hidden)
        tokens, logprobs = draw(logits, of_row, temperatures, seeds, counters, truncation)
        state = self.state
        state.tokens[slots] = tokens
        state.positions[slots] = positions.int()
        state.seeds[slots] = seeds
        state.counters[slots] = counters.int() + 1
        state.temperatures[slots] = temperatures[of_row]
        state.top_k[slots] = top_k
        state.top_p[slots] = top_p[of_row]
        state.min_p[slots] = min_p[of_row]
        self._send(tokens[None], logprobs[None], [(column, sequence) for column, (_, sequence) in enumerate(begun)])

    # --- going on

    def _launch(self, waiting: list[Request]) -> None:
        """The next window of everything that runs."""
        if not self.running:
            return
        steps = min(WINDOW, max(sequence.last - sequence.length for sequence in self.running.values()))
        if not self.cache.release_cache(self._lacking(steps)):
            self._collect_all()
            while self.running and not self.cache.release_cache(self._lacking(steps)):
                self._set_aside(waiting)
        if not self.running:
            return
        assert self.decoder is not None
        self._close_gaps()
        for slot, sequence in self.running.items():
            sequence.pages += self.cache.pool.take(_pages_ahead(sequence, steps))
            self.table[slot, : len(sequence.pages)] = sequence.pages
        count = len(self.running)
        is_used = torch.zeros(self.max_sequences, dtype=torch.int32)
        is_used[:count] = 1
        self.state.table.copy_(on_device(self.table.copy(), self.device))
        self.state.positions.mul_(on_device(is_used, self.device))
        truncates = any(sequence.request.sampling.truncates for sequence in self.running.values())
        tokens, logprobs = self.decoder.run(count, steps, truncates)
        self._send(tokens, logprobs, list(self.running.items()))
        self.stats.decode_steps += steps
        self.stats.computed_tokens += steps * count
        for slot, sequence in list(self.running.items()):
            sequence.length += steps
            if sequence.length >= sequence.last:
                self._free_slot(slot)

    def _lacking(self, steps: int) -> int:
        return sum(_pages_ahead(sequence, steps) for sequence in self.running.values())

    def _set_aside(self, waiting: list[Request]) -> None:
        """The sequence that has come last gives its pages up. It will be read again, as far as it is, and go on."""
        slot = max(self.running, key=lambda slot: -len(self.running[slot].request.tokens))
        sequence = self.running[slot]
        self._free_slot(slot)
        self.cache.pool.leave(sequence.pages)
        waiting.insert(0, sequence.request)

    def _close_gaps(self) -> None:
        """Those that run have the first slots."""
        count = len(self.running)
        sources = [slot for slot in self.running if slot >= count]
        if not sources:
            return
        targets = [slot for slot in range(count) if slot not in self.running]
        self.state.move(on_device(sources, self.device), on_device(targets, self.device))
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running.pop(source)
            self.table[source] = 0
        self.free_slots = list(range(count, self.max_sequences))

    def _free_slot(self, slot: int) -> None:
        del self.running[slot]
        self.table[slot] = 0
        heapq.heappush(self.free_slots, slot)

    # --- what was drawn

    def _send(self, tokens: Tensor, logprobs: Tensor, sequences: list[tuple[int, Sequence]]) -> None:
        """On its way to the host, behind what was launched so far."""
        arrived = None
        if self.device.type == "cuda":
            tokens, logprobs = _to_host(tokens), _to_host(logprobs)
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            tokens, logprobs = tokens.clone(), logprobs.clone()
        self.windows.append(Window(sequences, tokens, logprobs, self.version, arrived))

    def _collect_all(self) -> None:
        while self.windows:
            self._collect(self.windows.popleft())

    def _collect(self, window: Window) -> None:
        if window.arrived is not None:
            window.arrived.synchronize()
        tokens, logprobs = window.tokens.T.tolist(), window.logprobs.T.tolist()
        slots = {id(sequence): slot for slot, sequence in self.running.items()}
        for column, sequence in window.sequences:
            request = sequence.request
            if request.finish is not None:
                continue
            before = len(request.tokens)
            request.extend(tokens[column], logprobs[column], window.version, self.tokenizer)
            self.stats.generated_tokens += len(request.tokens) - before
            if request.finish is not None:
                if id(sequence) in slots:
                    self._free_slot(slots[id(sequence)])
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Keeps the pages for who comes back, or gives them back."""
        request = sequence.request
        length = len(request.prompt) + len(request.tokens) - 1
        kept = num_pages_of(length) if request.keep and request.versions[0] == self.version else 0
        self.cache.pool.leave(sequence.pages[kept:])
        if kept:
            request.memory = self.cache.keep(sequence.pages[:kept], length, self.version)
        self.finished.append(request)


def can_be_paged(model: Any) -> bool:
    """What the kernels have no code for is decoded by the other core."""
    if find_spec("triton") is None or any(getattr(module, EXACT, False) for module in model.modules()):
        return False
    config = model.config.get_text_config()
    shape = cache_shape(model)
    return (
        set(attention_scales(model)) == set(range(shape.num_layers))
        and not hasattr(config, "kv_lora_rank")
        and 32 <= shape.width <= 256
        and shape.width.bit_count() == 1
    )


def attention_scales(model: Any) -> dict[int, float]:
    """By layer."""
    modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]
    return {int(module.layer_idx): float(module.scaling) for module in modules}


def _pages_ahead(sequence: Sequence, steps: int) -> int:
    """That it needs for the next `steps` tokens; what it writes behind its end goes to page 0."""
    return max(0, num_pages_of(min(sequence.length + steps, sequence.last)) - len(sequence.pages))


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
