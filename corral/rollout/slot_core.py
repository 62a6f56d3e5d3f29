"""The reference core: one decode step at a time over a slotted KV cache. It runs on a CPU, and whatever the paged core
does not support.

Requests are grouped into branches. A branch is one distinct sequence of tokens: the samples of a prompt start on one
branch, which forks when different tokens are sampled. So a prompt is computed once however many samples it has, and so
is every prefix that samples have in common; the sampled tokens do not change by it, since each request has its own
seed.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from corral.data.batch import TokenTree
from corral.kernels.sampling import Truncation, sample_tokens
from corral.model.attention import AttentionKernel, TreeAttention, forward_hidden
from corral.model.logprobs import OutputHead
from corral.rollout.engine_core import EngineStats, GenerationRequest, PrefixKey

GROWTH = 64
"""Tokens by which every slot of the cache grows when one of them is full."""
LayerCopies = list[tuple[Tensor, Tensor]]
"""(keys, values) [kv_heads, tokens, width] of each layer, copied out of the cache."""


@dataclass(eq=False)
class DecodeBranch:
    requests: list[GenerationRequest]
    length: int
    """Number of tokens in the cache: all but the one that was sampled last."""
    hidden: Tensor
    """[width], hidden state of the last token in the cache, from which the next token is sampled within the step."""
    slot: int


@dataclass
class SlotCachedPrompt:
    """A prompt whose samples did not all fit yet, kept so that the later ones need no prefill."""

    cache: LayerCopies
    hidden: Tensor


@dataclass(eq=False)
class SlotCachedPrefix:
    """Prefix handle: keys and values of a finished request, of all but its last token."""

    cache: LayerCopies
    length: int
    version: int
    """Version of the weights that computed it; under other weights it is useless."""


class SlotCore:
    def __init__(
        self, model: Any, tokenizer: Any, *, max_sequences: int, max_prefill_tokens: int, max_length: int
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_sequences, self.max_prefill_tokens, self.max_length = max_sequences, max_prefill_tokens, max_length
        self.device = next(model.parameters()).device
        self.head = OutputHead.of_model(model)
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers, max(max_sequences, 2))
        self.version = 0
        self.stats = EngineStats()
        self.branches: list[DecodeBranch] = []
        self.cached_prompts: dict[PrefixKey, SlotCachedPrompt] = {}
        self.cached_prefixes: weakref.WeakSet[SlotCachedPrefix] = weakref.WeakSet()
        """Prefixes whose handle somebody still holds. Together they have at most as many tokens as the cache."""

    @property
    def is_busy(self) -> bool:
        return bool(self.branches)

    def step(self, waiting: list[GenerationRequest]) -> list[GenerationRequest]:
        """Samples one token for every request that runs or can start. The new tokens' keys and values are computed by
        the next step, so that weights which are replaced between two steps compute whole tokens."""
        self._decode()
        self._admit(waiting)
        return self._sample()

    def use_version(self, version: int) -> None:
        self.cached_prompts.clear()
        self.version = version

    def abort_all(self) -> None:
        self.branches = []
        self.cached_prompts.clear()

    def release_cache(self) -> None:
        self.cache.release()

    def acquire_cache(self) -> None:
        """Nothing to do: the cache is allocated as sequences grow."""

    def _decode(self) -> None:
        """Computes the token that each branch sampled in the last step."""
        if not self.branches:
            return
        tokens = [branch.requests[0].tokens[-1] for branch in self.branches]
        lengths = [branch.length for branch in self.branches]
        self.cache.reserve(max(lengths) + 1)
        if len(tokens) == 1:
            # A single row goes through other kernels (matrix times vector), which round differently. A second row in a
            # free slot keeps a sample's bits independent of what else is in the batch.
            tokens, lengths = [*tokens, tokens[0]], [*lengths, 0]
        context = SlotDecodeAttention(self.cache, self._tensor(lengths))
        hidden = forward_hidden(self.model, self._tensor(tokens), self._tensor(lengths), context)
        self.stats.num_computed_tokens += len(self.branches)
        self.stats.num_decode_steps += 1
        for branch, row in zip(self.branches, hidden, strict=False):
            branch.hidden = row
            branch.length += 1

    def _admit(self, waiting: list[GenerationRequest]) -> None:
        """Moves waiting requests, in order, onto branches while there are free slots and room in one prefill. A prompt
        that is longer than a prefill is admitted alone."""
        num_free = self.max_sequences - sum(len(branch.requests) for branch in self.branches)
        groups: dict[PrefixKey, list[GenerationRequest]] = {}
        prefill_tokens = 0
        for request in waiting[:num_free]:
            if request.prefix_key not in groups:
                if request.prefix_key not in self.cached_prompts:
                    prefill_tokens += self._num_new(request)
                if groups and prefill_tokens > self.max_prefill_tokens:
                    break
                groups[request.prefix_key] = []
            groups[request.prefix_key].append(request)
        del waiting[: sum(map(len, groups.values()))]  # in place: the event loop's thread may append meanwhile
        self.stats.num_prompt_tokens += sum(len(r.prompt) for requests in groups.values() for r in requests)
        still_waiting = {request.prefix_key for request in waiting}
        fresh = [requests for key, requests in groups.items() if key not in self.cached_prompts]
        for key, requests in groups.items():
            if (prompt := self.cached_prompts.get(key)) is not None:
                slot, length = len(self.branches), len(requests[0].prompt)
                self.cache.reserve(length)
                self.cache.write(slot, prompt.cache)
                self._start(DecodeBranch(requests, length, prompt.hidden, slot), set())
        continued = [requests for requests in fresh if self._num_cached(requests[0])]
        from_scratch = [requests for requests in fresh if not self._num_cached(requests[0])]
        for similar in self._split_by_length(continued):
            self._prefill_behind_prefixes(similar, still_waiting)
        self._prefill(from_scratch, still_waiting)
        self.cached_prompts = {key: prompt for key, prompt in self.cached_prompts.items() if key in still_waiting}

    def _num_cached(self, request: GenerationRequest) -> int:
        """Number of the prompt's tokens that a cached prefix covers."""
        prefix = request.prefix
        if isinstance(prefix, SlotCachedPrefix) and prefix.length < len(request.prompt):
            return prefix.length if prefix.version == self.version else 0
        return 0

    def _num_new(self, request: GenerationRequest) -> int:
        return len(request.prompt) - self._num_cached(request)

    def _prefill(self, groups: list[list[GenerationRequest]], still_waiting: set[PrefixKey]) -> None:
        """Computes prompts as one token tree, one branch for each group of requests with equal prefix keys."""
        if not groups:
            return
        prompts = [requests[0].prompt for requests in groups]
        tree = TokenTree.build(prompts)
        slots = range(len(self.branches), len(self.branches) + len(prompts))
        self.cache.reserve(max(len(prompt) for prompt in prompts))
        hidden = forward_hidden(
            self.model,
            torch.from_numpy(tree.tokens).to(self.device),
            torch.from_numpy(tree.positions).to(self.device),
            SlotPrefillAttention(self.cache, tree, slots, self.device),
        )
        self.stats.num_computed_tokens += tree.num_nodes
        for slot, requests, path in zip(slots, groups, tree.paths, strict=True):
            self._start(DecodeBranch(requests, len(path), hidden[path[-1]], slot), still_waiting)

    def _split_by_length(self, groups: list[list[GenerationRequest]]) -> list[list[list[GenerationRequest]]]:
        """Splits into parts whose new tokens, padded to the longest, are at most `max_prefill_tokens`, or one group."""
        parts: list[list[list[GenerationRequest]]] = []
        for requests in sorted(groups, key=lambda requests: self._num_new(requests[0])):
            if not parts or (len(parts[-1]) + 1) * self._num_new(requests[0]) > self.max_prefill_tokens:
                parts.append([])
            parts[-1].append(requests)
        return parts

    def _prefill_behind_prefixes(self, groups: list[list[GenerationRequest]], still_waiting: set[PrefixKey]) -> None:
        """The same for prompts that continue a cached prefix: only their new tokens are computed."""
        slots = range(len(self.branches), len(self.branches) + len(groups))
        self.cache.reserve(max(len(requests[0].prompt) for requests in groups))
        pasts = [self._num_cached(requests[0]) for requests in groups]
        for slot, requests in zip(slots, groups, strict=True):
            prefix = requests[0].prefix
            assert isinstance(prefix, SlotCachedPrefix)
            self.cache.write(slot, prefix.cache)
        new = [requests[0].prompt[past:] for requests, past in zip(groups, pasts, strict=True)]
        context = SlotExtendAttention(
            self.cache, slots, self._tensor(pasts), self._tensor([len(tokens) for tokens in new])
        )
        tokens = torch.from_numpy(np.concatenate(new)).to(self.device)
        hidden = forward_hidden(self.model, tokens, context.positions, context)
        self.stats.num_computed_tokens += len(tokens)
        ends = np.cumsum([len(tokens) for tokens in new]) - 1
        for slot, requests, end in zip(slots, groups, ends.tolist(), strict=True):
            self._start(DecodeBranch(requests, len(requests[0].prompt), hidden[end], slot), still_waiting)

    def _start(self, branch: DecodeBranch, still_waiting: set[PrefixKey]) -> None:
        self.branches.append(branch)
        for request in branch.requests:
            request.prefix = None  # its content is in the cache now
        key = branch.requests[0].prefix_key
        if key in still_waiting:
            self.cached_prompts[key] = SlotCachedPrompt(self.cache.read(branch.slot, branch.length), branch.hidden)

    def _sample(self) -> list[GenerationRequest]:
        """Samples a token for every request, finishes those that are done, forks branches whose requests differ."""
        hidden = torch.stack([branch.hidden for branch in self.branches])
        if len(hidden) == 1:
            hidden = hidden.expand(2, -1)  # see _decode
        sampling = [branch.requests[0].sampling for branch in self.branches]
        truncation = None
        if any(s.truncates for s in sampling):
            columns = ([s.top_k for s in sampling], [s.top_p for s in sampling], [s.min_p for s in sampling])
            truncation = Truncation(*(self._tensor(column) for column in columns))
        logits = self.head.logits(hidden)[: len(self.branches)]
        requests = [(row, request) for row, branch in enumerate(self.branches) for request in branch.requests]
        tokens, logprobs = sample_tokens(
            logits,
            rows=self._tensor([row for row, _ in requests]),
            temperatures=self._tensor([s.temperature for s in sampling]),
            seeds=self._tensor([request.seed for _, request in requests]),
            counters=self._tensor([len(request.tokens) for _, request in requests]),
            truncation=truncation,
        )
        self.stats.num_generated_tokens += len(requests)
        for (_, request), token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.extend([token], [logprob], self.version, self.tokenizer)
        self._keep_prefixes()
        self._fork()
        return [request for _, request in requests if request.finish_reason is not None]

    def _keep_prefixes(self) -> None:
        """Copies the branches of finished requests whose conversation will be continued; requests that finish on one
        branch get the same copy."""
        room = self.max_sequences * self.max_length - sum(prefix.length for prefix in self.cached_prefixes)
        for branch in self.branches:
            finished = [request for request in branch.requests if request.finish_reason is not None]
            # A prefix that several versions computed is not what the current one would compute: it is not kept.
            wanted = any(request.keep_prefix and request.versions[0] == self.version for request in finished)
            prefix = None
            if branch.length <= room and wanted:
                prefix = SlotCachedPrefix(self.cache.read(branch.slot, branch.length), branch.length, self.version)
                self.cached_prefixes.add(prefix)
                room -= branch.length
            for request in finished:
                request.prefix = prefix if request.keep_prefix else None

    def _fork(self) -> None:
        """Regroups the unfinished requests by the token they sampled, and moves the groups into the first slots."""
        groups: list[tuple[DecodeBranch, list[GenerationRequest]]] = []
        for branch in self.branches:
            by_token: dict[int, list[GenerationRequest]] = {}
            for request in branch.requests:
                if request.finish_reason is None:
                    by_token.setdefault(request.tokens[-1], []).append(request)
            groups += [(branch, requests) for requests in by_token.values()]
        kept: dict[int, tuple[DecodeBranch, list[GenerationRequest]]] = {}
        moved: list[tuple[DecodeBranch, list[GenerationRequest]]] = []
        for branch, requests in groups:
            if branch.slot < len(groups) and branch.slot not in kept:
                kept[branch.slot] = (branch, requests)
            else:
                moved.append((branch, requests))
        free = [slot for slot in range(len(groups)) if slot not in kept]
        length = max((branch.length for branch, _ in moved), default=0)
        self.cache.copy([branch.slot for branch, _ in moved], free, length)
        by_slot = {**kept, **dict(zip(free, moved, strict=True))}
        self.branches = [
            DecodeBranch(requests, branch.length, branch.hidden, slot)
            for slot, (branch, requests) in sorted(by_slot.items(), key=lambda item: item[0])
        ]

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)


class SlotCache:
    """One slot of up to `max_length` tokens for each branch.

    Bound: slots x max_length x layers x kv_heads x width x 2. Memory is allocated as sequences grow, `GROWTH` tokens at
    a time. The slots in use are always the first ones, so that decoding reads a plain slice.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.capacity = 0
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def reserve(self, length: int) -> None:
        """Grows the cache so that every slot holds a sequence of `length` tokens."""
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

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, values) [slots, kv_heads, capacity, width]; `key` and `value` [1, kv_heads, tokens, width] shape new
        ones: their widths differ in multi-head latent attention."""
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            keys = self.keys[index] = key.new_zeros(self.num_slots, key.shape[1], self.capacity, key.shape[3])
            values = self.values[index] = value.new_zeros(self.num_slots, value.shape[1], self.capacity, value.shape[3])
        return keys, values

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copies the first `length` tokens of each source slot into its target slot."""
        if sources:
            for tensor in [*self.keys, *self.values]:
                if tensor is not None:
                    tensor[targets, :, :length] = tensor[sources, :, :length]

    def read(self, slot: int, length: int) -> LayerCopies:
        return [
            (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for keys, values in zip(self.keys, self.values, strict=True)
            if keys is not None and values is not None
        ]

    def write(self, slot: int, layers: LayerCopies) -> None:
        for index, (key, value) in enumerate(layers):
            keys, values = self.layer(index, key[None], value[None])
            keys[slot, :, : key.shape[1]] = key
            values[slot, :, : value.shape[1]] = value


class SlotPrefillAttention:
    """Attention context: prompts computed as a tree, each one's keys and values written to its slot."""

    def __init__(self, cache: SlotCache, tree: TokenTree, slots: Sequence[int], device: torch.device) -> None:
        self.cache, self.slots, self.paths = cache, slots, list(tree.paths)
        self.attention = TreeAttention(tree, device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        for slot, path in zip(self.slots, self.paths, strict=True):
            keys[slot, :, : len(path)] = key[0][:, path]
            values[slot, :, : len(path)] = value[0][:, path]
        return self.attention.attend(layer, query, key, value, kernel)


class SlotExtendAttention:
    """Attention context: several new tokens in each of some slots, behind the cached ones. One attention call for all
    of them, padded to the longest."""

    def __init__(self, cache: SlotCache, slots: range, pasts: Tensor, counts: Tensor) -> None:
        """`pasts`: number of cached tokens in each slot; `counts`: number of new ones."""
        self.cache, self.slots = cache, slots
        device = pasts.device
        self.rows = torch.repeat_interleave(torch.arange(len(slots), device=device), counts)
        starts = counts.cumsum(0) - counts
        self.columns = torch.arange(int(counts.sum()), device=device) - starts[self.rows]
        self.positions = pasts[self.rows] + self.columns
        self.max_new, self.max_length = int(counts.max()), int((pasts + counts).max())
        query_positions = pasts[:, None] + torch.arange(self.max_new, device=device)
        distance = query_positions[:, :, None] - torch.arange(self.max_length, device=device)
        self.mask = DistanceMask(distance[:, None])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        used = slice(self.slots.start, self.slots.stop)
        keys[used].transpose(1, 2)[self.rows, self.positions] = key[0].transpose(0, 1)
        values[used].transpose(1, 2)[self.rows, self.positions] = value[0].transpose(0, 1)
        queries = query.new_zeros(len(self.slots), self.max_new, query.shape[1], query.shape[3])
        queries[self.rows, self.columns] = query[0].transpose(0, 1)
        output = kernel(
            queries.transpose(1, 2),
            keys[used, :, : self.max_length],
            values[used, :, : self.max_length],
            self.mask.within(kernel.window),
        )
        return output.transpose(1, 2)[self.rows, self.columns].transpose(0, 1)[None]


class SlotDecodeAttention:
    """Attention context: one new token in each of the first slots, each attending to its own slot."""

    def __init__(self, cache: SlotCache, lengths: Tensor) -> None:
        self.cache, self.lengths = cache, lengths
        self.max_length = int(lengths.max()) + 1
        self.slots = torch.arange(len(lengths), device=lengths.device)
        distance = lengths[:, None] - torch.arange(self.max_length, device=lengths.device)
        self.mask = DistanceMask(distance[:, None, None])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.cache.layer(layer, key, value)
        keys[self.slots, :, self.lengths] = key[0].transpose(0, 1)
        values[self.slots, :, self.lengths] = value[0].transpose(0, 1)
        num_slots, kv_heads = len(self.slots), key.shape[1]
        # The query heads of one kv head become its queries: no copy of the cache for grouped-query attention.
        grouped = query[0].transpose(0, 1).reshape(num_slots, kv_heads, -1, query.shape[3])
        output = kernel(
            grouped,
            keys[:num_slots, :, : self.max_length],
            values[:num_slots, :, : self.max_length],
            self.mask.within(kernel.window),
        )
        return output.reshape(num_slots, query.shape[1], -1).transpose(0, 1)[None]


class DistanceMask:
    """Which keys a query sees, by how many positions they lie before it; for each window of the layers made once."""

    def __init__(self, distance: Tensor) -> None:
        self.distance = distance
        self.by_window: dict[int | None, Tensor] = {None: distance >= 0}

    def within(self, window: int | None) -> Tensor:
        if window is not None and window not in self.by_window:
            self.by_window[window] = self.by_window[None] & (self.distance < window)
        return self.by_window[window]
