"""The pool of pages, and what is kept in it for later: turns of conversations, and prompts that wait for samples."""

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corral.recipe.errors import UserError
from corral.rollout.paged.pool import CacheShape, PagePool, num_pages_of
from corral.rollout.request import Family

MEMORY_SHARE = 0.9
"""Of what is free on the device, that the cache may take."""


@dataclass(eq=False)
class StoredPrompt:
    """A prompt whose samples do not all fit yet: kept so that the later ones need no prefill."""

    pages: list[int]
    hidden: Tensor
    """[width], of its last token."""


@dataclass(eq=False)
class History:
    """The pages of a finished request, all but its last token: the next turn of its conversation reads only what is
    new. Empty when the pages were needed for something that runs."""

    pages: list[int]
    length: int
    version: int
    """Of the weights; others would not know what to do with it."""


class PagedCache:
    def __init__(self, shape: CacheShape, max_sequences: int, max_length: int, device: torch.device) -> None:
        self.shape, self.max_sequences, self.max_length, self.device = shape, max_sequences, max_length, device
        self.made: PagePool | None = None
        self.stored: dict[Family, StoredPrompt] = {}
        self.histories: weakref.WeakValueDictionary[int, History] = weakref.WeakValueDictionary()
        """Those that somebody may come back with, the oldest first."""
        self.left_pages: deque[list[int]] = deque()
        """Of those that nobody can come back with any more: known to any thread, given back by the engine's."""

    @property
    def pool(self) -> PagePool:
        assert self.made is not None, "whoever needs the pool has acquired it"
        return self.made

    def acquire(self) -> None:
        """Takes the pool's memory. Others may have come to stay since it was made, such as an optimizer's moments: then
        there is a smaller pool."""
        if self.made is None:
            self.made = PagePool(self.shape, self.num_pages(), self.device)
        try:
            self.pool.acquire()
        except torch.OutOfMemoryError:
            self.pool.close()
            self.made = PagePool(self.shape, self.num_pages(), self.device)
            self.pool.acquire()
        while self.left_pages:
            self.pool.leave(self.left_pages.popleft())

    def release(self) -> None:
        """The memory is given back: what was in the pages is lost."""
        for history in list(self.histories.values()):
            history.pages.clear()
        self.histories.clear()
        self.stored.clear()
        self.left_pages.clear()
        if self.made is not None:
            self.made.release()

    def num_pages(self) -> int:
        """For `max_sequences` of `max_length` tokens, or as many as fit. Where a sequence begins, it has one twice."""
        of_one = num_pages_of(self.max_length) + 1
        wanted = self.max_sequences * of_one
        if self.device.type != "cuda":
            return wanted
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        fitting = int((free + unused) * MEMORY_SHARE) // self.shape.page_bytes - 1
        if fitting < of_one:
            raise UserError(
                f"the KV cache of one sequence of {self.max_length} tokens needs "
                f"{of_one * self.shape.page_bytes / 2**30:.1f} GiB, and the device has "
                f"{(free + unused) / 2**30:.1f} GiB left: lower data.max_prompt_tokens or rollout.max_response_tokens"
            )
        return min(wanted, fitting)

    def release_cache(self, count: int) -> bool:
        """Whether `count` pages are free; what can be read again goes for it: histories, then stored prompts."""
        free = self.pool.free
        for key in list(self.histories):
            if len(free) >= count:
                return True
            history = self.histories.pop(key, None)
            if history is not None:
                self.pool.leave(history.pages)
                history.pages.clear()
        for family in list(self.stored):
            if len(free) >= count:
                return True
            self.drop(family)
        return len(free) >= count

    def keep(self, pages: list[int], length: int, version: int) -> History:
        """For who may come back; the pages' user is the history from here on."""
        history = History(pages, length, version)
        weakref.finalize(history, self.left_pages.append, history.pages).atexit = False
        self.histories[id(history)] = history
        return history

    def store(self, family: Family, pages: list[int], hidden: Tensor) -> None:
        if family not in self.stored:
            self.pool.share(pages)
            self.stored[family] = StoredPrompt(list(pages), hidden)

    def drop(self, family: Family) -> None:
        if family in self.stored:
            self.pool.leave(self.stored.pop(family).pages)

    def drop_stored(self) -> None:
        for family in list(self.stored):
            self.drop(family)


def cache_shape(model: Any) -> CacheShape:
    config = model.config.get_text_config()
    return CacheShape(
        num_layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=next(model.parameters()).dtype,
    )
