"""The native engine's key-value cache: one slot of up to `max_length` tokens for each distinct history being decoded.

Bound: slots x max_length x layers x kv_heads x head_width x 2. Memory is taken as sequences grow, in steps of
`GROWTH` tokens, up to that bound. The slots in use are always the first ones, so that decoding reads a plain slice.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.data.trajectory import IntArray
from corral.data.tree import TokenTree
from corral.model.attention import AttentionKernel, TreeAttention

GROWTH = 64


class SlotCache:
    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.capacity = 0
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def reserve(self, length: int) -> None:
        """Room for sequences of `length` tokens in every slot."""
        if length > self.capacity:
            self.capacity = -(-length // GROWTH) * GROWTH
            for tensors in (self.keys, self.values):
                for layer, old in enumerate(tensors):
                    if old is not None:
                        tensors[layer] = F.pad(old, (0, 0, 0, self.capacity - old.shape[2]))

    def release(self) -> None:
        self.capacity = 0
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, values) [slots, kv_heads, capacity, width]; `like` [1, kv_heads, tokens, width] shapes a new one."""
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            shape = (self.num_slots, like.shape[1], self.capacity, like.shape[3])
            keys = self.keys[index] = like.new_zeros(shape)
            values = self.values[index] = like.new_zeros(shape)
        return keys, values

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first `length` tokens of each source slot into its target slot."""
        if sources:
            for tensor in [*self.keys, *self.values]:
                if tensor is not None:
                    tensor[targets, :, :length] = tensor[sources, :, :length]

    def read(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of one slot's keys and values, layer by layer."""
        return [
            (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for keys, values in zip(self.keys, self.values, strict=True)
            if keys is not None and values is not None
        ]

    def write(self, slot: int, stored: list[tuple[Tensor, Tensor]]) -> None:
        for index, (key, value) in enumerate(stored):
            keys, values = self.layer(index, key[None])
            keys[slot, :, : key.shape[1]] = key
            values[slot, :, : value.shape[1]] = value


class Prefill:
    """Attention context: prompts computed as a tree, each one's keys and values written to its slot."""

    def __init__(self, cache: SlotCache, tree: TokenTree, slots: Sequence[int], device: torch.device) -> None:
        self.cache, self.slots = cache, slots
        self.attention = TreeAttention(tree, device)
        self.paths: list[IntArray] = list(tree.paths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.cache.layer(layer, key)
        for slot, path in zip(self.slots, self.paths, strict=True):
            keys[slot, :, : len(path)] = key[0][:, path]
            values[slot, :, : len(path)] = value[0][:, path]
        return self.attention.attend(layer, query, key, value, kernel)


class Extend:
    """Attention context: several new tokens in each of some slots, behind what they hold already. One attention call
    for all of them, padded to the longest."""

    def __init__(self, cache: SlotCache, slots: range, pasts: Tensor, counts: Tensor) -> None:
        """`pasts`: tokens that each slot holds; `counts`: tokens that come to it."""
        self.cache, self.slots = cache, slots
        device = pasts.device
        self.rows = torch.repeat_interleave(torch.arange(len(slots), device=device), counts)
        starts = counts.cumsum(0) - counts
        self.columns = torch.arange(int(counts.sum()), device=device) - starts[self.rows]
        self.positions = pasts[self.rows] + self.columns
        self.most, self.longest = int(counts.max()), int((pasts + counts).max())
        places = pasts[:, None] + torch.arange(self.most, device=device)
        self.mask = (torch.arange(self.longest, device=device) <= places[:, :, None])[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.cache.layer(layer, key)
        used = slice(self.slots.start, self.slots.stop)
        keys[used].transpose(1, 2)[self.rows, self.positions] = key[0].transpose(0, 1)
        values[used].transpose(1, 2)[self.rows, self.positions] = value[0].transpose(0, 1)
        queries = query.new_zeros(len(self.slots), self.most, query.shape[1], query.shape[3])
        queries[self.rows, self.columns] = query[0].transpose(0, 1)
        seen_keys, seen_values = keys[used, :, : self.longest], values[used, :, : self.longest]
        output = kernel(queries.transpose(1, 2), seen_keys, seen_values, self.mask)
        return output.transpose(1, 2)[self.rows, self.columns].transpose(0, 1)[None]


class Decode:
    """Attention context: one new token in each of the first slots, each seeing its own slot's history."""

    def __init__(self, cache: SlotCache, lengths: Tensor) -> None:
        self.cache, self.lengths = cache, lengths
        self.longest = int(lengths.max()) + 1
        self.slots = torch.arange(len(lengths), device=lengths.device)
        columns = torch.arange(self.longest, device=lengths.device)
        self.mask = (columns <= lengths[:, None])[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.cache.layer(layer, key)
        keys[self.slots, :, self.lengths] = key[0].transpose(0, 1)
        values[self.slots, :, self.lengths] = value[0].transpose(0, 1)
        num_slots, kv_heads = len(self.slots), key.shape[1]
        # The query heads of one kv head become its queries: no copy of the cache for grouped-query attention.
        grouped = query[0].transpose(0, 1).reshape(num_slots, kv_heads, -1, query.shape[3])
        seen_keys, seen_values = keys[:num_slots, :, : self.longest], values[:num_slots, :, : self.longest]
        output = kernel(grouped, seen_keys, seen_values, self.mask)
        return output.reshape(num_slots, query.shape[1], -1).transpose(0, 1)[None]
