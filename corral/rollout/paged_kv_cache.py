"""The paged KV cache: a pool of pages with reference counts, and the two kinds of prefix that are cached in it.

A sequence's keys and values lie in pages of `PAGE` tokens anywhere in the pool; its page table says where. Sequences
with a common prefix reference the same full pages (as in PagedAttention, Kwon et al. 2023). A page that is written to
has one reference only: who continues in a partly filled page that others reference copies it first.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from corral.data.batch import IntArray
from corral.kernels.host_to_device import on_device
from corral.kernels.paged_attention import PAGE
from corral.model.attention import attention_layers
from corral.recipe.errors import UserError
from corral.rollout.engine_core import PrefixKey

CACHE_FRACTION = 0.9
"""Fraction of the device's free memory that the cache may take, unless the passes beside it need more of the rest."""
COPIED_PAGES = 16
"""Pages that are copied at once, by way of memory of their own. A page of a model of 32B has 17 MB."""


@dataclass(eq=False)
class PagedCachedPrompt:
    """A prompt whose samples did not all fit yet, kept so that the later ones need no prefill."""

    pages: list[int]
    hidden: Tensor
    """[width], hidden state of the prompt's last token."""


@dataclass(eq=False)
class PagedCachedPrefix:
    """Prefix handle: the pages of a finished request, of all but its last token. `pages` is empty once they have been
    evicted; the request that comes with the handle is then prefilled as a whole."""

    pages: list[int]
    length: int
    version: int
    """Version of the weights that computed it; under other weights it is useless."""


class PagedKVCache:
    def __init__(
        self, shape: "CacheShape", max_sequences: int, max_length: int, device: torch.device, pass_bytes: int
    ) -> None:
        """`pass_bytes`: memory that the engine's passes need beside the cache."""
        self.shape, self.max_sequences, self.max_length, self.device = shape, max_sequences, max_length, device
        self.pass_bytes = pass_bytes + COPIED_PAGES * shape.page_bytes
        self.keeps_address = keeps_address(device)
        self._pool: PagePool | None = None
        self.cached_prompts: dict[PrefixKey, PagedCachedPrompt] = {}
        self.cached_prefixes: weakref.WeakValueDictionary[int, PagedCachedPrefix] = weakref.WeakValueDictionary()
        """Prefixes whose handle somebody still holds, the oldest first."""
        self.dropped_pages: deque[list[int]] = deque()
        """Pages of prefixes whose handle was dropped. A finalizer runs in whatever thread drops the last reference, so
        it only appends here (which is atomic), and the engine's thread frees the pages."""

    @property
    def pool(self) -> "PagePool":
        assert self._pool is not None, "the pool is acquired before it is used"
        return self._pool

    def acquire(self) -> None:
        """Allocates the pool's memory. The device may have less free memory than when the pool was sized, since an
        optimizer's moments come with its first update: then a smaller pool takes its place."""
        if self._pool is None:
            self._pool = PagePool(self.shape, self._num_pages(), self.device, self.keeps_address)
        try:
            self.pool.acquire()
        except torch.OutOfMemoryError:
            self.pool.close()
            self._pool = PagePool(self.shape, self._num_pages(), self.device, self.keeps_address)
            self.pool.acquire()
        while self.dropped_pages:
            self.pool.free(self.dropped_pages.popleft())

    def release(self) -> None:
        """Frees the memory, and with it everything that was cached."""
        for prefix in list(self.cached_prefixes.values()):
            prefix.pages.clear()
        self.cached_prefixes.clear()
        self.cached_prompts.clear()
        self.dropped_pages.clear()
        if self._pool is not None:
            self._pool.release()

    def _num_pages(self) -> int:
        """Pages for `max_sequences` of `max_length` tokens, or as many as fit. One more for each sequence: its own copy
        of the partly filled page in which it continues a shared prefix."""
        per_sequence = num_pages_of(self.max_length) + 1
        wanted = self.max_sequences * per_sequence
        if self.device.type != "cuda":
            return wanted
        return min(wanted, self.num_fitting(free_memory(self.device), per_sequence))

    def num_fitting(self, free: int, least: int) -> int:
        """Pages for which there is memory, besides page 0."""
        page_bytes = self.shape.page_bytes
        fitting = min(int(free * CACHE_FRACTION), free - self.pass_bytes) // page_bytes - 1
        if fitting < least:
            raise UserError(
                f"the KV cache of one sequence of {self.max_length} tokens needs {least * page_bytes / 2**30:.1f} GiB "
                f"and the passes beside it {self.pass_bytes / 2**30:.1f}, and the device has {free / 2**30:.1f} GiB "
                "left: lower data.max_prompt_tokens, rollout.max_response_tokens or rollout.max_prefill_tokens"
            )
        return fitting

    def ensure_free_pages(self, count: int) -> bool:
        """Whether `count` pages are free, after evicting what can be computed again.

        Cached prefixes go first, the oldest first: a conversation may never be continued. Cached prompts go last: their
        samples are already waiting, and without the cache each would be prefilled again.
        """
        free_pages = self.pool.free_pages
        for key in list(self.cached_prefixes):
            if len(free_pages) >= count:
                return True
            prefix = self.cached_prefixes.pop(key, None)
            if prefix is not None:
                self.pool.free(prefix.pages)
                prefix.pages.clear()
        for prefix_key in list(self.cached_prompts):
            if len(free_pages) >= count:
                return True
            self.drop_prompt(prefix_key)
        return len(free_pages) >= count

    def keep_prefix(self, pages: list[int], length: int, version: int) -> PagedCachedPrefix:
        """The handle of a finished request; the reference to its pages goes over to it."""
        prefix = PagedCachedPrefix(pages, length, version)
        weakref.finalize(prefix, self.dropped_pages.append, prefix.pages).atexit = False
        self.cached_prefixes[id(prefix)] = prefix
        return prefix

    def keep_prompt(self, prefix_key: PrefixKey, pages: list[int], hidden: Tensor) -> None:
        if prefix_key not in self.cached_prompts:
            self.pool.add_reference(pages)
            self.cached_prompts[prefix_key] = PagedCachedPrompt(list(pages), hidden)

    def drop_prompt(self, prefix_key: PrefixKey) -> None:
        if prefix_key in self.cached_prompts:
            self.pool.free(self.cached_prompts.pop(prefix_key).pages)

    def drop_prompts(self) -> None:
        for prefix_key in list(self.cached_prompts):
            self.drop_prompt(prefix_key)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, or that torch would give back. What CUDA graphs have cached is theirs."""
    free, _ = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == (0, 0):
            free += segment["total_size"] - segment["allocated_size"]
    return free


def keeps_address(device: torch.device) -> bool:
    """Whether memory can be given back and be had again at the address that CUDA graphs know."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    from corral.kernels.gpu.virtual_memory import has_virtual_memory

    return has_virtual_memory(device)


@dataclass(frozen=True)
class CacheShape:
    num_layers: int
    kv_heads: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of_model(cls, model: Any) -> "CacheShape":
        """The width of a page's rows is a power of two, as the kernels want it: heads of 80, 96 or 192, and values that
        are narrower than keys, are filled up with zeros, which change no score."""
        layers = attention_layers(model)
        width = max(layers[0].key_width, layers[0].value_width)
        return cls(len(layers), layers[0].kv_heads, 1 << (width - 1).bit_length(), next(model.parameters()).dtype)

    @property
    def page_bytes(self) -> int:
        return 2 * self.num_layers * PAGE * self.kv_heads * self.width * self.dtype.itemsize


class PagePool:
    """Pages with reference counts. Page 0 is never allocated: what a sequence writes behind its end goes there."""

    def __init__(self, shape: CacheShape, num_pages: int, device: torch.device, keeps_address: bool = False) -> None:
        """`num_pages` does not count page 0."""
        self.shape, self.num_pages, self.device = shape, num_pages, device
        self.held: Any = None
        """With `keeps_address`, a range of addresses that stays reserved while its memory is given back and taken
        again: CUDA graphs hold the addresses of the cache. Elsewhere the memory comes back at another address."""
        if keeps_address:
            from corral.kernels.gpu.virtual_memory import VirtualBuffer

            self.held = VirtualBuffer(self.num_bytes, device)
        self.ref_counts = np.zeros(num_pages + 1, np.int32)
        self.free_pages = list(range(num_pages, 0, -1))
        self.layers: Tensor | None = None
        """[layers, 2, pages, PAGE, kv_heads, width] while the memory is allocated."""

    @property
    def num_bytes(self) -> int:
        return (self.num_pages + 1) * self.shape.page_bytes

    def acquire(self) -> None:
        """Allocates the memory, if it is not allocated."""
        if self.layers is None:
            shape = self.shape
            if self.held is None:
                storage = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)
            else:
                self.held.map()
                storage = self.held.tensor()
            layers = storage.view(shape.dtype)
            self.layers = layers.view(shape.num_layers, 2, self.num_pages + 1, PAGE, shape.kv_heads, shape.width)

    @property
    def address(self) -> int:
        """Where the memory begins, while it is allocated."""
        return 0 if self.layers is None else self.layers.data_ptr()

    def release(self) -> None:
        """Frees the memory, and with it what was in the pages."""
        if self.layers is not None:
            self.layers = None
            if self.held is not None:
                self.held.unmap()
        self.ref_counts[:] = 0
        self.free_pages = list(range(self.num_pages, 0, -1))

    def close(self) -> None:
        self.release()
        if self.held is not None:
            self.held.close()

    def padded(self, tensor: Tensor) -> Tensor:
        """Queries, keys or values [..., width] in the width of the pages."""
        missing = self.shape.width - tensor.shape[-1]
        return tensor if missing == 0 else F.pad(tensor, (0, missing))

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """[pages x PAGE, kv_heads, width] each."""
        assert self.layers is not None
        keys, values = self.layers[layer].flatten(1, 2)
        return keys, values

    def allocate(self, count: int) -> list[int]:
        """Pages with one reference each."""
        assert count <= len(self.free_pages), "`ensure_free_pages` comes before `allocate`"
        pages = [self.free_pages.pop() for _ in range(count)]
        self.ref_counts[pages] = 1
        return pages

    def add_reference(self, pages: Sequence[int]) -> None:
        self.ref_counts[pages] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drops one reference to each page; those without any are free."""
        for page in pages:
            self.ref_counts[page] -= 1
            if self.ref_counts[page] == 0:
                self.free_pages.append(page)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not sources:
            return
        assert self.layers is not None
        parts = (on_device(pages, self.device).split(COPIED_PAGES) for pages in (sources, targets))
        for some, others in zip(*parts, strict=True):
            self.layers[:, :, others] = self.layers[:, :, some]


def slots_of(pages: Sequence[int], start: int, end: int) -> IntArray:
    """Index in the pool of each token at `start <= position < end` of a sequence with these pages."""
    positions = np.arange(start, end)
    slots: IntArray = np.asarray(pages, np.int64)[positions // PAGE] * PAGE + positions % PAGE
    return slots


def num_pages_of(length: int) -> int:
    return -(-length // PAGE)
