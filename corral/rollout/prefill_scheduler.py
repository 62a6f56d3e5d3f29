"""Prefill: which waiting requests are computed together, and which pages they share.

A prefill batch is one forward pass over chunks of many sequences, each behind what the cache holds of it already.
Chunks that begin their sequences form a token tree: what they have in common is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.data.batch import IntArray, TokenTree
from corral.kernels.host_to_device import on_device
from corral.kernels.paged_attention import PAGE
from corral.kernels.varlen_attention import varlen_attention
from corral.model.attention import AttentionKernel, forward_hidden
from corral.recipe.schema import KEYS_PER_TOKEN
from corral.rollout.engine_core import EngineStats, GenerationRequest, PrefixKey
from corral.rollout.paged_kv_cache import PagedCachedPrefix, PagedKVCache, PagePool, num_pages_of, slots_of


@dataclass(eq=False)
class PrefillGroup:
    """Requests that continue the same tokens, which are being prefilled once for all of them."""

    requests: list[GenerationRequest]
    tokens: IntArray
    pages: list[int]
    num_cached: int
    """How many of the tokens are in the cache."""
    version: int
    """Version of the weights that computed them."""
    hidden: Tensor | None = None
    """[width], hidden state of the last token, once all are computed."""
    partial_page: int | None = None
    """A partly filled page of the cached prefix that this group continues: to be copied before it is written to."""
    spare_pages: list[int] = field(default_factory=list)
    """A page for each request, for its copy of the last page if that is partly filled. They are allocated before the
    first chunk is computed: running sequences may have taken what was free by the time of the last one."""

    @property
    def prefix_key(self) -> PrefixKey:
        return prefix_key_of(self.requests[0])

    @property
    def num_gathered(self) -> int:
        """Number of keys that its prefill gathers from the cache in each layer."""
        return len(self.tokens) if 0 < self.num_cached < len(self.tokens) else 0


class PrefillScheduler:
    def __init__(self, model: Any, cache: PagedKVCache, max_prefill_tokens: int, stats: EngineStats) -> None:
        self.model, self.cache, self.stats = model, cache, stats
        self.max_prefill_tokens = max_prefill_tokens
        self.version = 0
        self.chunked: PrefillGroup | None = None
        """A group with more tokens than a batch may have, of which some chunks are still to be computed."""

    def next_batch(self, waiting: list[GenerationRequest], num_slots: int) -> list[PrefillGroup]:
        """Takes requests from `waiting` in order, while there are slots, pages, and tokens left in the batch, and while
        the keys that are gathered from the cache are not too many. One that is longer than a batch gets batches of its
        own, a chunk in each."""
        if self.chunked is not None and self.chunked.version == self.version:
            return [self.chunked]
        if self.chunked is not None:  # its first chunks were computed by other weights
            self.cache.pool.free(self.chunked.pages + self.chunked.spare_pages)
            waiting[:0] = self.chunked.requests
            self.chunked = None
        groups: dict[PrefixKey, PrefillGroup] = {}
        tokens_left, keys_left = self.max_prefill_tokens, KEYS_PER_TOKEN * self.max_prefill_tokens
        num_taken = 0
        for request in waiting[:num_slots]:
            key = prefix_key_of(request)
            if not self.cache.ensure_free_pages(1):
                break
            if key not in groups:
                group = self._new_group(request, tokens_left, keys_left, is_first=not groups)
                if group is None:
                    break
                groups[key] = group
                tokens_left -= len(group.tokens) - group.num_cached
                keys_left -= group.num_gathered
            groups[key].requests.append(request)
            groups[key].spare_pages += self.cache.pool.allocate(1)
            num_taken += 1
        del waiting[:num_taken]  # in place: the event loop's thread may append meanwhile
        return list(groups.values())

    def _new_group(
        self, request: GenerationRequest, tokens_left: int, keys_left: int, is_first: bool
    ) -> PrefillGroup | None:
        """The group of a request, which leaves one page free for it; or None if the request has to wait."""
        pool, tokens = self.cache.pool, tokens_so_far(request)
        prompt = self.cache.cached_prompts.get(prefix_key_of(request))
        if prompt is not None:
            pool.add_reference(prompt.pages)
            return PrefillGroup([], tokens, list(prompt.pages), len(tokens), self.version, prompt.hidden)
        pages, num_cached = self._cached_prefix(request, len(tokens))
        num_gathered = len(tokens) if num_cached else 0
        if not is_first and (len(tokens) - num_cached > tokens_left or num_gathered > keys_left):
            return None
        pool.add_reference(pages)  # before room is made: eviction must not free them
        num_full = num_cached // PAGE
        needed = num_pages_of(len(tokens)) - num_full
        if not self.cache.ensure_free_pages(needed + 1):
            pool.free(pages)
            return None
        group = PrefillGroup([], tokens, pages[:num_full] + pool.allocate(needed), num_cached, self.version)
        if num_full < len(pages):
            group.partial_page = pages[num_full]
        return group

    def _cached_prefix(self, request: GenerationRequest, length: int) -> tuple[list[int], int]:
        """(pages, number of tokens in them) of the request's tokens that need not be computed."""
        prefix = request.prefix
        if isinstance(prefix, PagedCachedPrefix) and prefix.pages and prefix.length < length:
            return (list(prefix.pages), prefix.length) if prefix.version == self.version else ([], 0)
        return [], 0

    def compute(self, groups: list[PrefillGroup]) -> None:
        """One forward pass over the tokens that are not cached, or over as many of them as a batch may have."""
        missing = [group for group in groups if group.hidden is None]
        if not missing:
            return
        self._copy_partial_pages(missing)
        ends = [len(group.tokens) for group in missing]
        if len(missing) == 1:
            ends = [min(ends[0], missing[0].num_cached + self.max_prefill_tokens)]
        chunks = [PrefillChunk(g.tokens[:end], g.num_cached, g.pages) for g, end in zip(missing, ends, strict=True)]
        context = PagedPrefillAttention(self.cache.pool, chunks)
        hidden = forward_hidden(self.model, context.tokens, context.positions, context)[context.last_nodes]
        self.stats.num_computed_tokens += len(context.tokens)
        for group, end, row in zip(missing, ends, hidden, strict=True):
            group.num_cached = end
            if end == len(group.tokens):
                group.hidden = row
        self.chunked = missing[0] if missing[0].hidden is None else None

    def _copy_partial_pages(self, groups: list[PrefillGroup]) -> None:
        copied = [(group, group.partial_page) for group in groups if group.partial_page is not None]
        sources = [page for _, page in copied]
        self.cache.pool.copy(sources, [group.pages[group.num_cached // PAGE] for group, _ in copied])
        self.cache.pool.free(sources)
        for group, _ in copied:
            group.partial_page = None

    def assign_pages(self, groups: list[PrefillGroup], still_waiting: set[PrefixKey]) -> list[list[int]]:
        """The page table of each request, in order. Requests share the full pages of their group, and each gets its own
        copy of the last one if that is partly filled. Prompts with samples `still_waiting` are cached for them; of the
        others, the last request takes over the group's own pages without a copy."""
        pool, copies = self.cache.pool, list[tuple[int, int]]()
        tables = []
        for group in groups:
            is_awaited = group.prefix_key in still_waiting
            if is_awaited:
                assert group.hidden is not None
                self.cache.keep_prompt(group.prefix_key, group.pages, group.hidden)
            else:
                self.cache.drop_prompt(group.prefix_key)
            num_full = len(group.tokens) // PAGE
            for request in group.requests:
                pages = group.pages
                if request is not group.requests[-1] or is_awaited:
                    pages = group.pages[:num_full]
                    pool.add_reference(pages)
                    for page in group.pages[num_full:]:
                        pages.append(group.spare_pages.pop())
                        copies.append((page, pages[-1]))
                tables.append(pages)
        pool.copy([source for source, _ in copies], [target for _, target in copies])
        for group in groups:
            pool.free(group.spare_pages)
            if group.prefix_key in still_waiting:
                pool.free(group.pages)
        return tables


def tokens_so_far(request: GenerationRequest) -> IntArray:
    """The prompt, and what was generated before the request was preempted."""
    return np.concatenate([request.prompt, np.array(request.tokens, np.int64)]) if request.tokens else request.prompt


def prefix_key_of(request: GenerationRequest) -> PrefixKey:
    """Requests with equal keys continue from the same tokens in the same way."""
    if not request.tokens:
        return request.prefix_key
    return tokens_so_far(request).tobytes(), request.sampling


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start <= position < len(tokens)` of a sequence are computed; those before `start` are in its pages."""

    tokens: IntArray
    start: int
    pages: list[int]


class PagedPrefillAttention:
    """Attention context of one prefill. Keys and values are written to their pages, and read from there where sequences
    have more of them than this pass computes."""

    def __init__(self, pool: PagePool, chunks: Sequence[PrefillChunk]) -> None:
        self.pool = pool
        # Nodes are the tokens of the pass: first those of the tree of all chunks that begin a sequence, then the
        # others.
        beginning = [i for i, chunk in enumerate(chunks) if chunk.start == 0]
        tree = TokenTree.build([chunks[i].tokens for i in beginning]) if beginning else None
        num_nodes = tree.num_nodes if tree is not None else 0
        nodes: list[IntArray] = [np.empty(0, np.int64)] * len(chunks)
        tokens, positions = ([tree.tokens], [tree.positions]) if tree is not None else ([], [])
        for i, path in zip(beginning, tree.paths if tree is not None else (), strict=True):
            nodes[i] = path
        for i, chunk in enumerate(chunks):
            if chunk.start > 0:
                num_new = len(chunk.tokens) - chunk.start
                nodes[i] = np.arange(num_nodes, num_nodes + num_new)
                tokens.append(chunk.tokens[chunk.start :])
                positions.append(np.arange(chunk.start, len(chunk.tokens)))
                num_nodes += num_new
        slots = [slots_of(chunk.pages, chunk.start, len(chunk.tokens)) for chunk in chunks]
        slot_of_node = np.zeros(num_nodes, np.int64)
        slot_of_node[np.concatenate(nodes)] = np.concatenate(slots)
        # (number of queries, slots of their keys) of each call of the attention kernel.
        calls = [(c.end - c.start, slot_of_node[c.path]) for c in (tree.chunks if tree is not None else ())]
        calls += [(len(c.tokens) - c.start, slots_of(c.pages, 0, len(c.tokens))) for c in chunks if c.start > 0]
        device = pool.device
        self.tokens = on_device(np.concatenate(tokens), device)
        self.positions = on_device(np.concatenate(positions), device)
        self.last_nodes = on_device([int(path[-1]) for path in nodes], device)
        """Node of each chunk's last token."""
        written_nodes = np.concatenate(nodes)
        self.written_slots = on_device(np.concatenate(slots), device)
        is_identity = len(written_nodes) == num_nodes and bool((written_nodes == np.arange(num_nodes)).all())
        self.written_nodes = None if is_identity else on_device(written_nodes, device)
        # Where every query's keys are computed in this very pass, in order, nothing has to be read from the cache.
        is_direct = all(num_queries == len(keys) for num_queries, keys in calls)
        self.key_slots = None if is_direct else on_device(np.concatenate([keys for _, keys in calls]), device)
        self.query_starts, self.max_query = _starts([num_queries for num_queries, _ in calls], device)
        self.key_starts, self.max_key = _starts([len(keys) for _, keys in calls], device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.pool.keys_and_values(layer)
        new_query, new_key, new_value = (self.pool.padded(one[0]).transpose(0, 1) for one in (query, key, value))
        output = varlen_attention(
            new_query,
            self._write_and_read(keys, new_key),
            self._write_and_read(values, new_value),
            self.query_starts,
            self.key_starts,
            self.max_query,
            self.max_key,
            kernel.scale_of(query),
            kernel.window,
            kernel.sinks,
        )
        return output[..., : value.shape[3]].transpose(0, 1)[None]

    def _write_and_read(self, cache: Tensor, new: Tensor) -> Tensor:
        """Writes what this pass computed, and returns all that its queries attend to, [keys, kv_heads, width]."""
        cache[self.written_slots] = new if self.written_nodes is None else new[self.written_nodes]
        return new if self.key_slots is None else cache[self.key_slots]


def _starts(counts: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    return on_device(np.concatenate([[0], np.cumsum(counts)]), device).to(torch.int32), max(counts)
