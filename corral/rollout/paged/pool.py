"""The pages of the cache: which are taken, by how many, and their memory.

Page 0 belongs to nobody: what a sequence writes behind its end goes there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from corral.data.trajectory import IntArray
from corral.kernels.host_to_device import on_device
from corral.kernels.paged_attention import PAGE


@dataclass(frozen=True)
class CacheShape:
    num_layers: int
    kv_heads: int
    width: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return 2 * self.num_layers * PAGE * self.kv_heads * self.width * self.dtype.itemsize


class PagePool:
    """A page may be used by several sequences that begin alike; who writes into one has it alone."""

    def __init__(self, shape: CacheShape, num_pages: int, device: torch.device) -> None:
        """`num_pages`, besides page 0."""
        self.shape, self.num_pages, self.device = shape, num_pages, device
        self.memory = _make_memory((num_pages + 1) * shape.page_bytes, device)
        self.users = np.zeros(num_pages + 1, np.int32)
        self.free = list(range(num_pages, 0, -1))
        self.layers: Tensor | None = None
        """[layers, 2, pages, PAGE, kv_heads, width] while the memory is here."""

    @property
    def num_bytes(self) -> int:
        return (self.num_pages + 1) * self.shape.page_bytes

    def acquire(self) -> None:
        """Takes the memory, if it is not here."""
        if self.layers is None:
            shape = self.shape
            storage = self.memory.take().view(shape.dtype)
            self.layers = storage.view(shape.num_layers, 2, self.num_pages + 1, PAGE, shape.kv_heads, shape.width)

    def release(self) -> None:
        """Gives the memory back, and with it what was in the pages."""
        if self.layers is not None:
            self.layers = None
            self.memory.give_back()
        self.users[:] = 0
        self.free = list(range(self.num_pages, 0, -1))

    def close(self) -> None:
        self.release()
        self.memory.close()

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """[pages x PAGE, kv_heads, width] each."""
        assert self.layers is not None
        keys, values = self.layers[layer].flatten(1, 2)
        return keys, values

    def take(self, count: int) -> list[int]:
        """New pages, each with one user."""
        assert count <= len(self.free), "who takes has looked whether there is enough"
        pages = [self.free.pop() for _ in range(count)]
        self.users[pages] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        self.users[pages] += 1

    def leave(self, pages: Sequence[int]) -> None:
        """One user less."""
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            assert self.layers is not None
            self.layers[:, :, on_device(targets, self.device)] = self.layers[:, :, on_device(sources, self.device)]


def slots_of(pages: Sequence[int], start: int, end: int) -> IntArray:
    """Where the tokens at `start <= position < end` of a sequence with these pages lie."""
    positions = np.arange(start, end)
    slots: IntArray = np.asarray(pages, np.int64)[positions // PAGE] * PAGE + positions % PAGE
    return slots


def num_pages_of(length: int) -> int:
    return -(-length // PAGE)


class _HostMemory:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def take(self) -> Tensor:
        return torch.zeros(self.num_bytes, dtype=torch.uint8)

    def give_back(self) -> None:
        """It goes with the last tensor."""

    def close(self) -> None:
        pass


class _DeviceMemory:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from corral.kernels.gpu.virtual_memory import VirtualBuffer

        self.held = VirtualBuffer(num_bytes, device)

    def take(self) -> Tensor:
        self.held.map()
        return self.held.tensor()

    def give_back(self) -> None:
        self.held.unmap()

    def close(self) -> None:
        self.held.close()


def _make_memory(num_bytes: int, device: torch.device) -> _HostMemory | _DeviceMemory:
    return _DeviceMemory(num_bytes, device) if device.type == "cuda" else _HostMemory(num_bytes)
