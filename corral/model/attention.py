"""The one attention function behind everything Corral computes, registered with transformers under the name `corral`.

A model loaded with `attn_implementation="corral"` hands its queries, keys and values to the `AttentionContext` that the
caller passes along with the tokens (`forward_hidden`): a `TreeAttention` for training, log-probs and prefill, or the
engine's KV cache for decoding. The model's own code is the same in all cases, and it is transformers'.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corral.data.batch import IntArray, TokenTree, TreeChunk
from corral.kernels.gather_kv import GatherIndex
from corral.kernels.host_to_device import on_device
from corral.kernels.varlen_attention import has_flash, varlen_attention

ATTENTION_NAME = "corral"
EXACT = "corral_exact"
"""Name of the attribute that marks attention modules which compute in float64 (`model.exact`)."""


class AttentionContext(Protocol):
    """Decides which keys each query attends to (the attention mask); the kernel does the arithmetic."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: "AttentionKernel") -> Tensor:
        """query [1, heads, tokens, width], key and value [1, kv_heads, tokens, width] -> [1, heads, tokens, width]"""
        ...


@dataclass(frozen=True)
class AttentionKernel:
    """How a layer weighs keys, which differs between families; which of them a query sees is the context's matter."""

    scale: float | None = None
    """Factor of queries times keys; None: one over the root of their width."""
    window: int | None = None
    """A query attends to so many last positions, its own included (sliding-window attention). None: to all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap), as in Gemma 2."""
    sinks: Tensor | None = None
    """[heads], one more logit for each head's softmax, which takes weight and gives no value, as in gpt-oss."""
    exact: bool = False
    """Compute in float64, and round once at the end.

    Engine and trainer sum the same keys in different orders (decode step by step, prefill in chunks, training over a
    tree), and in float32 every order rounds differently. float64 has 29 bits more, so that the difference disappears
    when the result is rounded. With matrix products whose inner order does not depend on the number of rows (OpenBLAS
    has it) a token's log-prob is then the same number in engine and trainer, whatever it is batched with."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """query [batch, heads, tokens, width], key and value with as many heads or fewer -> like query, as wide as the
        values. Without a mask: causal. The window is part of the mask already."""
        dtype = query.dtype
        if self.exact:
            query, key, value = query.double(), key.double(), value.double()
        if self.softcap is None and self.sinks is None:
            is_grouped = query.shape[1] != key.shape[1]
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=is_grouped
            )
        else:
            output = self._by_scores(query, key, value, mask)
        return output.to(dtype)

    def scale_of(self, query: Tensor) -> float:
        return float(query.shape[-1] ** -0.5) if self.scale is None else self.scale

    def _by_scores(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """With the scores as a tensor, for what torch's attention does not have."""
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.transpose(-1, -2) * self.scale_of(query)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            # In decoding the heads of one key-value head are its queries, so a sink belongs to a row.
            rows = scores.shape[2] if len(self.sinks) != scores.shape[1] else 1
            sinks = self.sinks.to(scores.dtype).view(1, scores.shape[1], rows, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
        return weights[..., : key.shape[2]] @ value


def corral_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    corral: AttentionContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function of every model, with the signature that transformers calls."""
    kernel = AttentionKernel(scaling, sliding_window or None, softcap or None, s_aux, getattr(module, EXACT, False))
    output = corral.attend(int(module.layer_idx), query, key, value, kernel)  # type: ignore[arg-type]
    # Some models view the result in another shape, which only contiguous tensors allow.
    return output.transpose(1, 2).contiguous(), None


def make_exact(model: nn.Module) -> None:
    """Marks all attention modules of the model, which have `layer_idx`, to compute in float64."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, EXACT, True)


def register() -> None:
    """Makes `attn_implementation="corral"` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, corral_attention)


def forward_hidden(model: Any, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
    """Last hidden states [tokens, width] of a flat list of tokens, with the context's attention mask."""
    output = model.get_decoder()(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        corral=context,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@dataclass(frozen=True)
class LayerAttention:
    """What a layer asks of its attention: how keys are weighed, and the shape of what a cache holds of them."""

    kernel: AttentionKernel
    kv_heads: int
    key_width: int
    value_width: int


class _AttentionProbe:
    """Attention context that records its layers, and computes nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAttention] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        self.layers[layer] = LayerAttention(kernel, key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(*query.shape[:3], value.shape[3])


@torch.no_grad()
def attention_layers(
    model: Any, run: Callable[[Callable[[], Tensor]], object] = lambda compute: compute()
) -> dict[int, LayerAttention]:
    """What the model's layers ask of attention, by index. Seen and not read from the configuration, in which every
    family has other names for it. `run`: runs the forward pass of one token; a stage of a pipeline needs others for
    it."""
    probe, token = _AttentionProbe(), torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
    run(lambda: forward_hidden(model, token, token, probe))
    return probe.layers


MASK_PROBE = "corral_mask_probe"


@dataclass(frozen=True)
class _MaskRule:
    """What a mask of transformers' would be made by: whether a query (third) sees a key (fourth), by positions."""

    sees: Callable[..., Tensor]

    @property
    def window(self) -> int | None:
        """Number of last positions that a query far from the beginning sees; None: all."""
        hidden, seen = -1, FAR
        while seen - hidden > 1:
            middle = (hidden + seen) // 2
            if bool(self.sees(*(torch.tensor(index) for index in (0, 0, FAR, middle)))):
                seen = middle
            else:
                hidden = middle
        return FAR - seen + 1 if seen else None


FAR = 2**40


@torch.no_grad()
def window_problem(model: Any, run: Callable[[Callable[[], Tensor]], object] = lambda compute: compute()) -> str | None:
    """Says where a layer's mask, as transformers would make it, has another window than the one that the layer asks its
    attention for, which gets no mask. Some families hand on one of the two only. `run`: as for `attention_layers`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    by_mask: dict[int, int | None] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        if isinstance(attention_mask, _MaskRule):
            by_mask[int(module.layer_idx)] = attention_mask.window
        return corral_attention(module, query, key, value, None, **options)

    AttentionInterface.register(MASK_PROBE, attend)
    AttentionMaskInterface.register(MASK_PROBE, lambda *_, mask_function, **__: _MaskRule(mask_function))
    model.set_attn_implementation(MASK_PROBE)
    try:
        layers = attention_layers(model, run)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    for layer, window in by_mask.items():
        if (asked := layers[layer].kernel.window) != window:
            return (
                f"by its mask, layer {layer} attends to {describe_window(window)}, and asks attention for "
                f"{describe_window(asked)}"
            )
    return None


def describe_window(window: int | None) -> str:
    return "all tokens before" if window is None else f"the last {window} tokens"


class TreeAttention:
    """Every token of a `TokenTree` attends to the tokens on its path from the root, and to itself.

    Sequences with a common prefix share its nodes, so the prefix is computed once; a chunk is a run of nodes without a
    branch. On a GPU with bfloat16 or float16 all chunks are one varlen call, each chunk with the keys of its path.
    Elsewhere a small tree is one attention call with a mask. A large one is a call for each chunk, for the mask would
    make the work quadratic in the size of the tree, and that of the sequences is much less. Which is cheaper is
    estimated tree by tree.
    """

    CALL_COST = 2200
    """Overhead of one more attention call, in query-key pairs: 0.5 ms against 0.23 us a pair, on two CPU cores."""

    def __init__(self, tree: TokenTree, device: torch.device, queries: Sequence[slice] | None = None) -> None:
        """With `queries`, only these runs of nodes, in their order, are queries; keys and values are still those of the
        whole tree."""
        self.tree, self.device, self.queries = tree, device, queries

    @cached_property
    def blocks(self) -> "list[_AttentionBlock]":
        blocks: list[_AttentionBlock] = []
        for chunks in self.tree.trees:
            size = chunks[-1].end - chunks[0].start
            by_chunk = sum(self.CALL_COST + (chunk.end - chunk.start) * len(chunk.path) for chunk in chunks)
            if self.CALL_COST + size * size <= by_chunk:
                blocks.append(_dense_block(chunks, self.tree.positions, self.device))
            else:
                blocks += [_chunk_block(chunk, self.device) for chunk in chunks]
        if self.queries is None:
            return blocks
        parts, num_before = [], 0
        for run in self.queries:
            for block in blocks:
                start, end = max(block.start, run.start), min(block.end, run.stop)
                if start < end:
                    parts.append(block.part(start, end, shift=num_before - run.start))
            num_before += run.stop - run.start
        return parts

    @cached_property
    def varlen(self) -> "_VarlenTree":
        return _VarlenTree(self.tree, self.device, self.queries or [slice(0, self.tree.num_nodes)])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        if not kernel.exact and kernel.softcap is None and has_flash(query):
            return self.varlen.attend(query, key, value, kernel)
        outputs = [block.attend(query, key, value, kernel) for block in self.blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


class _VarlenTree:
    """All chunks as sequences of one varlen call: a chunk's queries against the keys along its path, gathered."""

    def __init__(self, tree: TokenTree, device: torch.device, queries: Sequence[slice]) -> None:
        paths, num_queries = [], []
        for run in queries:
            first = bisect_right(tree.chunks, run.start, key=lambda chunk: chunk.end)
            last = bisect_left(tree.chunks, run.stop, key=lambda chunk: chunk.start)
            for chunk in tree.chunks[first:last]:
                end = min(chunk.end, run.stop)
                num_queries.append(end - max(chunk.start, run.start))
                paths.append(chunk.path[: len(chunk.path) - (chunk.end - end)])
        num_keys = [len(path) for path in paths]
        path = np.concatenate(paths)
        self.keys = None
        """The nodes whose keys are gathered; None: nothing is shared, and every chunk's keys are its own nodes."""
        if num_keys != num_queries or len(path) != tree.num_nodes:
            self.keys = GatherIndex(path, tree.num_nodes, device)
        starts = np.cumsum([[0, 0], *zip(num_queries, num_keys, strict=True)], axis=0).astype(np.int32)
        self.query_starts, self.key_starts = on_device(np.ascontiguousarray(starts.T), device)
        self.max_query, self.max_key = max(num_queries), max(num_keys)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        # Not `tensor[0]`: its gradient would be copied into a tensor of zeros.
        query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        width = value.shape[-1]
        if width < key.shape[-1]:  # the kernels take one width; zeros beside the values are zeros in the result
            value = F.pad(value, (0, key.shape[-1] - width))
        lengths = (self.query_starts, self.key_starts, self.max_query, self.max_key)
        how = (kernel.scale_of(query), kernel.window, kernel.sinks)
        output = varlen_attention(query, key, value, *lengths, *how, self.keys)
        return output[..., :width].transpose(0, 1)[None]


class _AttentionBlock:
    """One attention call: queries `start:end` against the keys at `path`, with a mask or (None) causal: the last keys
    are those of the queries themselves, and each query attends to all keys up to its own."""

    MIN_QUERIES = 256
    """Queries of a block at least, where a window leaves out most of the keys."""

    def __init__(
        self,
        start: int,
        end: int,
        path: Tensor | slice,
        positions: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
    ) -> None:
        """`positions`: of the queries and of the keys in their sequences."""
        self.start, self.end, self.path, self.positions, self.all_pairs = start, end, path, positions, mask
        self.masks: dict[int | None, Tensor | None] = {}
        """By the window of the layers that use it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        window = kernel.window
        if window is not None and self.all_pairs is None and self.end - self.start > max(window, self.MIN_QUERIES):
            return self._by_window(query, key, value, kernel, window)
        queries = query[:, :, self.start : self.end]
        return kernel(queries, key[:, :, self.path], value[:, :, self.path], self.mask(window))

    def _by_window(self, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel, window: int) -> Tensor:
        """Queries in blocks that are as long as the window at least, each with the keys of its own block and of the one
        before it: work and memory are linear in the length. All but the first block are one batch, with one mask."""
        size = max(window, self.MIN_QUERIES)
        start, num_queries = self.start + size, self.end - self.start - size
        first = self.part(self.start, start, window=window).attend(query, key, value, kernel)
        path = self.part(start, self.end, window=size + 1).path  # keys of the rest and of the block before it
        queries = in_blocks(query[:, :, start : self.end], size)
        keys, values = (in_blocks(tensor[:, :, path], size) for tensor in (key, value))
        keys, values = (torch.cat([tensor[:-1], tensor[1:]], dim=2) for tensor in (keys, values))
        index = torch.arange(2 * size, device=query.device)
        distance = index[size:, None] - index
        rest = kernel(queries, keys, values, (distance >= 0) & (distance < window))
        return torch.cat([first, rest.transpose(0, 1).flatten(1, 2)[None, :, :num_queries]], dim=2)

    def mask(self, window: int | None) -> Tensor | None:
        """None: causal, with a key for each query."""
        queries, keys = self.positions
        if window is None and self.all_pairs is None and len(queries) == len(keys):
            return None
        if window not in self.masks:
            distance = queries[:, None] - keys
            seen = distance >= 0 if self.all_pairs is None else self.all_pairs
            self.masks[window] = seen if window is None else seen & (distance < window)
        return self.masks[window]

    def part(self, start: int, end: int, *, window: int | None = None, shift: int = 0) -> "_AttentionBlock":
        """The block for the queries `start:end`, which are at `start + shift` in what it is given, without keys that
        none of them attends to."""
        queries, keys = self.positions
        queries = queries[start - self.start : end - self.start]
        if self.all_pairs is not None:
            mask = self.all_pairs[start - self.start : end - self.start]
            return _AttentionBlock(start + shift, end + shift, self.path, (queries, keys), mask)
        last = len(keys) - (self.end - end)
        first = 0 if window is None else max(0, last - (end - start) - window + 1)
        path = self.path
        path = slice(path.start + first, path.start + last) if isinstance(path, slice) else path[first:last]
        return _AttentionBlock(start + shift, end + shift, path, (queries, keys[first:last]))


def in_blocks(tensor: Tensor, size: int) -> Tensor:
    """[1, heads, tokens, width] -> [blocks, heads, size, width], with zeros at the end."""
    padded = F.pad(tensor.squeeze(0), (0, 0, 0, -tensor.shape[2] % size))
    return padded.view(len(padded), -1, size, padded.shape[2]).transpose(0, 1)


def _dense_block(chunks: tuple[TreeChunk, ...], positions: IntArray, device: torch.device) -> _AttentionBlock:
    """A whole tree in one call, with a mask [nodes, nodes] unless it is a single sequence."""
    start, end = chunks[0].start, chunks[-1].end
    of_nodes = torch.from_numpy(positions[start:end]).to(device)
    if len(chunks) == 1:
        return _AttentionBlock(start, end, slice(start, end), (of_nodes, of_nodes))
    mask = np.zeros((end - start, end - start), np.bool_)
    for chunk in chunks:
        size = chunk.end - chunk.start
        rows = slice(chunk.start - start, chunk.end - start)
        mask[rows, chunk.path[:-size] - start] = True
        mask[rows, rows] = np.tri(size, dtype=np.bool_)
    return _AttentionBlock(start, end, slice(start, end), (of_nodes, of_nodes), torch.from_numpy(mask).to(device))


def _chunk_block(chunk: TreeChunk, device: torch.device) -> _AttentionBlock:
    """One chunk against its path, whose last nodes are the chunk itself."""
    size, length = chunk.end - chunk.start, len(chunk.path)
    along_path = torch.arange(length, device=device)
    positions = (along_path[length - size :], along_path)
    path = slice(chunk.start, chunk.end) if size == length else torch.from_numpy(chunk.path).to(device)
    return _AttentionBlock(chunk.start, chunk.end, path, positions)
