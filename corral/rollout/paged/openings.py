"""From waiting requests to pages that hold all they go on from: which are read together, and who shares what."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from corral.data.trajectory import IntArray
from corral.kernels.paged import PAGE
from corral.model.attention import forward_hidden
from corral.rollout.paged.cache import History, PagedCache
from corral.rollout.paged.pool import num_pages_of
from corral.rollout.paged.prefill import Piece, Prefill
from corral.rollout.request import EngineStats, Family, Request


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

    @property
    def family(self) -> Family:
        return family_of(self.requests[0])


class Openings:
    def __init__(
        self, model: Any, cache: PagedCache, scales: dict[int, float], max_prefill_tokens: int, stats: EngineStats
    ) -> None:
        self.model, self.cache, self.scales, self.stats = model, cache, scales, stats
        self.max_prefill_tokens = max_prefill_tokens
        self.version = 0
        self.unfinished: Opening | None = None
        """One that is longer than a pass, and not read to its end."""

    def choose(self, waiting: list[Request], num_slots: int) -> list[Opening]:
        """What the next pass reads. In order, while there are slots, pages, and room in a pass; one that is longer than
        a pass has it alone."""
        if self.unfinished is not None and self.unfinished.version == self.version:
            return [self.unfinished]
        if self.unfinished is not None:  # half of it was read by other weights
            self.cache.pool.leave(self.unfinished.pages)
            waiting[:0] = self.unfinished.requests
            self.unfinished = None
        openings: dict[Family, Opening] = {}
        room = self.max_prefill_tokens
        taken = 0
        for request in waiting[:num_slots]:
            family = family_of(request)
            # Each sequence may need a page of its own, where it goes on from those that it shares.
            if not self.cache.release_cache(taken + 1):
                break
            if family not in openings:
                opening = self.open(request, room, own=taken + 1, is_first=not openings)
                if opening is None:
                    break
                openings[family] = opening
                room -= len(opening.tokens) - opening.known
            openings[family].requests.append(request)
            taken += 1
        del waiting[:taken]  # in place: others may be added meanwhile
        return list(openings.values())

    def open(self, request: Request, room: int, own: int, is_first: bool) -> Opening | None:
        """None: it has to wait. `own`: pages that must be left for those who begin."""
        pool, tokens = self.cache.pool, tokens_of(request)
        stored = self.cache.stored.get(family_of(request))
        if stored is not None:
            pool.share(stored.pages)
            return Opening([], tokens, list(stored.pages), len(tokens), self.version, stored.hidden)
        pages, known = self.remembered(request, len(tokens))
        if not is_first and len(tokens) - known > room:
            return None
        pool.share(pages)
        whole = known // PAGE
        needed = num_pages_of(len(tokens)) - whole
        if not self.cache.release_cache(needed + own):
            pool.leave(pages)
            return None
        opening = Opening([], tokens, pages[:whole] + pool.take(needed), known, self.version)
        if whole < len(pages):
            opening.begun_in = pages[whole]
        return opening

    def remembered(self, request: Request, length: int) -> tuple[list[int], int]:
        """(pages, tokens in them) that need not be computed."""
        memory = request.memory
        if isinstance(memory, History) and memory.pages and memory.length < length and memory.version == self.version:
            return list(memory.pages), memory.length
        return [], 0

    def read(self, openings: list[Opening]) -> None:
        """One pass of the model over what is not known yet, or over as much of it as a pass may have."""
        unread = [opening for opening in openings if opening.hidden is None]
        if not unread:
            return
        self.copy_beginnings(unread)
        ends = [len(opening.tokens) for opening in unread]
        if len(unread) == 1:
            ends = [min(ends[0], unread[0].known + self.max_prefill_tokens)]
        pieces = [Piece(o.tokens[:end], o.known, o.pages) for o, end in zip(unread, ends, strict=True)]
        context = Prefill(self.cache.pool, pieces, self.scales)
        hidden = forward_hidden(self.model, context.tokens, context.positions, context)[context.last]
        self.stats.computed_tokens += context.num_computed
        for opening, end, row in zip(unread, ends, hidden, strict=True):
            opening.known = end
            if end == len(opening.tokens):
                opening.hidden = row
        self.unfinished = unread[0] if unread[0].hidden is None else None

    def copy_beginnings(self, openings: list[Opening]) -> None:
        """Of pages that are half full: others go on in them too."""
        begun = [(opening, opening.begun_in) for opening in openings if opening.begun_in is not None]
        sources = [page for _, page in begun]
        self.cache.pool.copy(sources, [opening.pages[opening.known // PAGE] for opening, _ in begun])
        self.cache.pool.leave(sources)
        for opening, _ in begun:
            opening.begun_in = None

    def part(self, openings: list[Opening], left: set[Family]) -> list[list[int]]:
        """The pages of each request, in order: the last one is its own where it is not full. Prompts with samples
        `left` to wait are stored for them; of the others, the last request takes over what was read."""
        pool, copies = self.cache.pool, list[tuple[int, int]]()
        parted = []
        for opening in openings:
            if opening.family in left:
                assert opening.hidden is not None
                self.cache.store(opening.family, opening.pages, opening.hidden)
            else:
                self.cache.drop(opening.family)
            whole = len(opening.tokens) // PAGE
            for request in opening.requests:
                pages = opening.pages
                if request is not opening.requests[-1] or opening.family in left:
                    pages = opening.pages[:whole]
                    pool.share(pages)
                    for page in opening.pages[whole:]:
                        pages += pool.take(1)
                        copies.append((page, pages[-1]))
                parted.append(pages)
        pool.copy([source for source, _ in copies], [target for _, target in copies])
        for opening in openings:
            if opening.family in left:
                pool.leave(opening.pages)
        return parted


def tokens_of(request: Request) -> IntArray:
    """All that it has: the prompt, and what was drawn before it was set aside."""
    return np.concatenate([request.prompt, np.array(request.tokens, np.int64)]) if request.tokens else request.prompt


def family_of(request: Request) -> Family:
    """Requests of one family go on from the same tokens in the same way."""
    return request.family if not request.tokens else (tokens_of(request).tobytes(), request.sampling)
