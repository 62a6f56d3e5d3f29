"""The core for a GPU: a paged cache, and windows of several decode steps that run while the host reads the last one's.

A window is launched without looking at what the one before drew, so the device never waits for the host. The price: a
sequence that ends with a stop token is noticed a window later, and decodes some tokens for nobody. Nothing of them is
seen: they are cut off, and their keys and values lie behind the sequence's end, where the page's next owner writes.
Everything that touches the cache is launched in order on one stream, so a page may be given on as soon as the host
knows that its owner has ended.
"""

import gc
import heapq
import weakref
from collections import deque
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.data.trajectory import IntArray
from corral.kernels.device import on_device
from corral.kernels.draw import Truncation, draw
from corral.kernels.paged import PAGE
from corral.model.attention import EXACT, forward_hidden
from corral.recipe.errors import UserError
from corral.rollout.engine import Sampling
from corral.rollout.paged.decoder import Decoder
from corral.rollout.paged.pool import CacheShape, PagePool, num_pages_of
from corral.rollout.paged.prefill import Piece, Prefill
from corral.rollout.paged.state import SlotState
from corral.rollout.request import EngineStats, Family, Request

WINDOW = 8
"""Decode steps that are launched at once."""
MEMORY_SHARE = 0.9
"""Of what is free on the device, that the cache may take."""


@dataclass(eq=False)
class Opening:
    """Requests that go on from the same tokens, which are being read into the cache."""

    requests: list[Request]
    tokens: IntArray
    pages: list[int]
    known: int
    """How many of the tokens are in the cache."""
    version: int
    """Of the weights that read them."""
    hidden: Tensor | None = None
    """[width], of the last token, when all are read."""
    begun_in: int | None = None
    """Somebody else's page, with the beginning of the first one that is read: to be copied."""


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
class StoredPrompt:
    """A prompt whose samples do not all fit yet: kept so that the later ones need no prefill."""

    pages: list[int]
    hidden: Tensor


@dataclass(eq=False)
class History:
    """The pages of a finished request, all but its last token: the next turn of its conversation reads only what is
    new. Empty when the pages were needed for something that runs."""

    pages: list[int]
    length: int
    version: int


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
        self.model, self.tokenizer = model, tokenizer
        self.max_sequences, self.max_prefill_tokens, self.max_length = max_sequences, max_prefill_tokens, max_length
        self.device = next(model.parameters()).device
        self.scales = attention_scales(model)
        self.version = 0
        self.stats = EngineStats()
        self.free_slots = list(range(max_sequences))
        self.running: dict[int, Sequence] = {}
        """By slot."""
        self.windows: deque[Window] = deque()
        self.finished: list[Request] = []
        self.opening: Opening | None = None
        """A prompt that is longer than one pass, and not read to its end."""
        self.stored: dict[Family, StoredPrompt] = {}
        self.histories: weakref.WeakValueDictionary[int, History] = weakref.WeakValueDictionary()
        """Those that somebody may come back with, the oldest first."""
        self.left_pages: deque[list[int]] = deque()
        """Of histories that nobody can come back with any more."""
        self.pool: PagePool | None = None
        self.state = SlotState.empty(max_sequences, num_pages_of(max_length + 2 * WINDOW) + 1, self.device)
        self.table = np.zeros(tuple(self.state.table.shape), np.int32)
        self.decoder: Decoder | None = None

    # --- the core's seam

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self.windows or self.opening)

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
        self._forget_prompts()
        self.version = version

    def drop(self) -> None:
        self.running, self.opening, self.finished = {}, None, []
        self.windows.clear()
        self.stored.clear()
        self.free_slots = list(range(self.max_sequences))
        self._reset_pages()

    def release(self) -> None:
        self._forget_prompts()
        if self.pool is not None:
            self._reset_pages()

    def acquire(self) -> None:
        if self.pool is None:
            shape = cache_shape(self.model)
            pool = PagePool(shape, self._num_pages(shape), self.device)
            self.decoder = Decoder(self.model, pool, self.state, self.scales, WINDOW)
            self.pool = pool
            if self.device.type == "cuda":
                # A look at every object of the process takes Python longer than a window takes the device.
                gc.collect()
                gc.freeze()
        self.pool.acquire()
        while self.left_pages:
            self.pool.leave(self.left_pages.popleft())

    # --- memory

    def _num_pages(self, shape: CacheShape) -> int:
        """For `max_sequences` of `max_length` tokens, or as many as fit. Where a sequence begins, it has one twice."""
        of_one = num_pages_of(self.max_length) + 1
        wanted = self.max_sequences * of_one
        if self.device.type != "cuda":
            return wanted
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        fitting = int((free + unused) * MEMORY_SHARE) // shape.page_bytes - 1
        if fitting < of_one:
            raise UserError(
                f"the KV cache of one sequence of {self.max_length} tokens needs "
                f"{of_one * shape.page_bytes / 2**30:.1f} GiB, and the device has "
                f"{(free + unused) / 2**30:.1f} GiB left: lower data.max_prompt_tokens or rollout.max_response_tokens"
            )
        return min(wanted, fitting)

    def _reset_pages(self) -> None:
        """The memory is given back: what was in the pages is lost."""
        for history in list(self.histories.values()):
            history.pages.clear()
        self.histories.clear()
        self.left_pages.clear()
        if self.pool is not None:
            self.pool.release()
        self.table[:] = 0

    def _make_room(self, count: int) -> bool:
        """Whether `count` pages are free; what can be read again goes for it: histories, then prompts that wait for
        samples."""
        assert self.pool is not None
        for key in list(self.histories):
            if len(self.pool.free) >= count:
                return True
            history = self.histories.pop(key, None)
            if history is not None:
                self.pool.leave(history.pages)
                history.pages.clear()
        for family in list(self.stored):
            if len(self.pool.free) >= count:
                return True
            self.pool.leave(self.stored.pop(family).pages)
        return len(self.pool.free) >= count

    def _forget_prompts(self) -> None:
        for stored in self.stored.values():
            self.left_pages.append(stored.pages)
        self.stored.clear()

    # --- starting

    def _admit(self, waiting: list[Request]) -> None:
        """Passes of prefill: one between two windows, and more while many slots are empty."""
        for _ in range(max(1, len(self.free_slots) // max(1, len(self.running)))):
            openings = self._choose(waiting)
            if not openings:
                return
            self._read(openings)
            ready = [opening for opening in openings if opening.hidden is not None]
            if ready:
                self._begin(ready, {_key(request) for request in waiting})

    def _choose(self, waiting: list[Request]) -> list[Opening]:
        """In order, while there are slots, pages, and room in a pass. One that is longer than a pass has it alone."""
        assert self.pool is not None
        if self.opening is not None and self.opening.version == self.version:
            return [self.opening]
        if self.opening is not None:  # half of it was read by other weights
            self.pool.leave(self.opening.pages)
            waiting[:0] = self.opening.requests
            self.opening = None
        openings: dict[Family, Opening] = {}
        room = self.max_prefill_tokens
        taken = 0
        for request in waiting[: len(self.free_slots)]:
            key = _key(request)
            # Each sequence may need a page of its own, where it goes on from those that it shares.
            if not self._make_room(taken + 1):
                break
            if key not in openings:
                opening = self._open(request, key, room, own=taken + 1, is_first=not openings)
                if opening is None:
                    break
                openings[key] = opening
                room -= len(opening.tokens) - opening.known
            openings[key].requests.append(request)
            taken += 1
        del waiting[:taken]  # in place: others may be added meanwhile
        return list(openings.values())

    def _open(self, request: Request, key: Family, room: int, own: int, is_first: bool) -> Opening | None:
        """None: it has to wait. `own`: pages that must be left for those who begin."""
        assert self.pool is not None
        tokens = _tokens_of(request)
        if key in self.stored:
            stored = self.stored[key]
            self.pool.share(stored.pages)
            return Opening([], tokens, list(stored.pages), len(tokens), self.version, stored.hidden)
        pages, known = self._remembered(request, len(tokens))
        if not is_first and len(tokens) - known > room:
            return None
        self.pool.share(pages)
        whole = known // PAGE
        needed = num_pages_of(len(tokens)) - whole
        if not self._make_room(needed + own):
            self.pool.leave(pages)
            return None
        opening = Opening([], tokens, pages[:whole] + self.pool.take(needed), known, self.version)
        if whole < len(pages):
            opening.begun_in = pages[whole]
        return opening

    def _remembered(self, request: Request, length: int) -> tuple[list[int], int]:
        """(pages, tokens in them) that need not be computed."""
        memory = request.memory
        if isinstance(memory, History) and memory.pages and memory.length < length and memory.version == self.version:
            return list(memory.pages), memory.length
        return [], 0

    def _read(self, openings: list[Opening]) -> None:
        """One pass of the model over what is not known yet, or over as much of it as a pass may have."""
        assert self.pool is not None
        unread = [opening for opening in openings if opening.hidden is None]
        if not unread:
            return
        ends = [len(opening.tokens) for opening in unread]
        if len(unread) == 1:
            ends = [min(ends[0], unread[0].known + self.max_prefill_tokens)]
        begun = [opening for opening in unread if opening.begun_in is not None]
        sources = [opening.begun_in for opening in begun if opening.begun_in is not None]
        self.pool.copy(sources, [opening.pages[opening.known // PAGE] for opening in begun])
        self.pool.leave(sources)
        for opening in begun:
            opening.begun_in = None
        pieces = [Piece(o.tokens[:end], o.known, o.pages) for o, end in zip(unread, ends, strict=True)]
        context = Prefill(self.pool, pieces, self.scales)
        hidden = forward_hidden(self.model, context.tokens, context.positions, context)[context.last]
        self.stats.computed_tokens += context.num_computed
        for opening, end, row in zip(unread, ends, hidden, strict=True):
            opening.known = end
            if end == len(opening.tokens):
                opening.hidden = row
        self.opening = unread[0] if unread[0].hidden is None else None

    def _begin(self, openings: list[Opening], left: set[Family]) -> None:
        """Draws the first token of every request, each in a slot and with a last page of its own from here on. Prompts
        with samples `left` to wait are stored for them; else the last request takes over the opening's pages."""
        assert self.pool is not None
        copies: list[tuple[int, int]] = []
        begun: list[tuple[int, Sequence]] = []
        for opening in openings:
            key = _key(opening.requests[0])
            if key in left:
                if key not in self.stored:
                    assert opening.hidden is not None
                    self.pool.share(opening.pages)
                    self.stored[key] = StoredPrompt(list(opening.pages), opening.hidden)
            elif key in self.stored:
                self.pool.leave(self.stored.pop(key).pages)
            whole = len(opening.tokens) // PAGE
            for request in opening.requests:
                pages = opening.pages
                if request is not opening.requests[-1] or key in left:
                    pages = opening.pages[:whole]
                    self.pool.share(pages)
                    for page in opening.pages[whole:]:
                        pages += self.pool.take(1)
                        copies.append((page, pages[-1]))
                last = len(request.prompt) + request.sampling.max_tokens - 1
                begun.append((heapq.heappop(self.free_slots), Sequence(request, pages, len(opening.tokens), last)))
                request.memory = None  # it is in the cache now
                if not request.tokens:
                    self.stats.prompt_tokens += len(request.prompt)
        self.pool.copy([source for source, _ in copies], [target for _, target in copies])
        for opening in openings:
            if _key(opening.requests[0]) in left:
                self.pool.leave(opening.pages)
        hidden = torch.stack([opening.hidden for opening in openings if opening.hidden is not None])
        rows = [row for row, opening in enumerate(openings) for _ in opening.requests]
        self._draw_first(hidden, rows, [opening.requests[0].sampling for opening in openings], begun)
        for slot, sequence in begun:
            if sequence.length < sequence.last:
                self.running[slot] = sequence
            else:
                heapq.heappush(self.free_slots, slot)

    def _draw_first(
        self, hidden: Tensor, rows: list[int], sampling: list[Sampling], begun: list[tuple[int, Sequence]]
    ) -> None:
        """`sampling` of each row of `hidden`; `rows`: which one each of those that begin draws from."""
        requests = [sequence.request for _, sequence in begun]
        numbers = [
            [slot for slot, _ in begun],
            rows,
            [request.seed for request in requests],
            [len(request.tokens) for request in requests],
            [sequence.length for _, sequence in begun],
            [request.sampling.top_k for request in requests],
        ]
        slots, of_row, seeds, counters, positions, top_k = on_device(
            torch.tensor(numbers, dtype=torch.int64), self.device
        )
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
        if not self._make_room(self._lacking(steps)):
            self._collect_all()
            while self.running and not self._make_room(self._lacking(steps)):
                self._set_aside(waiting)
        if not self.running:
            return
        assert self.pool is not None
        assert self.decoder is not None
        self._close_gaps()
        for slot, sequence in self.running.items():
            sequence.pages += self.pool.take(_pages_ahead(sequence, steps))
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
        assert self.pool is not None
        slot = max(self.running, key=lambda slot: -len(self.running[slot].request.tokens))
        sequence = self.running[slot]
        self._free_slot(slot)
        self.pool.leave(sequence.pages)
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
            for token, logprob in zip(tokens[column], logprobs[column], strict=True):
                request.append(token, logprob, window.version, self.tokenizer)
                if request.finish is not None:
                    break
            self.stats.generated_tokens += len(request.tokens) - before
            if request.finish is not None:
                if id(sequence) in slots:
                    self._free_slot(slots[id(sequence)])
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Keeps the pages for who comes back, or gives them back."""
        assert self.pool is not None
        request = sequence.request
        length = len(request.prompt) + len(request.tokens) - 1
        kept = num_pages_of(length) if request.keep and request.versions[0] == self.version else 0
        self.pool.leave(sequence.pages[kept:])
        if kept:
            history = History(sequence.pages[:kept], length, self.version)
            weakref.finalize(history, self.left_pages.append, history.pages).atexit = False
            self.histories[id(history)] = history
            request.memory = history
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


def cache_shape(model: Any) -> CacheShape:
    config = model.config.get_text_config()
    return CacheShape(
        num_layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=next(model.parameters()).dtype,
    )


def _tokens_of(request: Request) -> IntArray:
    """All that it has: the prompt, and what was drawn before it was set aside."""
    return np.concatenate([request.prompt, np.array(request.tokens, np.int64)]) if request.tokens else request.prompt


def _key(request: Request) -> Family:
    return request.family if not request.tokens else (_tokens_of(request).tobytes(), request.sampling)


def _pages_ahead(sequence: Sequence, steps: int) -> int:
    """That it needs for the next `steps` tokens; what it writes behind its end goes to page 0."""
    return max(0, num_pages_of(min(sequence.length + steps, sequence.last)) - len(sequence.pages))


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
