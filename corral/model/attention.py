"""The one attention function behind everything Corral computes, registered with transformers under the name `corral`.

A model loaded with `attn_implementation="corral"` hands its queries, keys and values to the `AttentionContext` that the
caller passes along with the tokens (`forward_hidden`): a `TreeAttention` for training, log-probs and prefill, or the
engine's KV cache for decoding. The model's own code is the same in all cases, and it is transformers'.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corral.data.batch import TokenTree, TreeChunk
from corral.kernels.gather_kv import GatherIndex, gather_kv
from corral.kernels.host_to_device import on_device
from corral.kernels.varlen_attention import has_flash, varlen_attention

ATTENTION_NAME = "corral"
EXACT = "corral_exact"
"""Name of the attribute that marks attention modules which compute in float64 (`model.exact`)."""

AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query, key, value, mask) -> output, [batch, heads, tokens, width] each. Without a mask: causal."""


class AttentionContext(Protocol):
    """Decides which keys each query attends to (the attention mask); the kernel does the arithmetic."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        """query [1, heads, tokens, width], key and value [1, kv_heads, tokens, width] -> [1, heads, tokens, width]"""
        ...


def corral_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    corral: AttentionContext,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function of every model, with the signature that transformers calls."""
    kernel = partial(exact_attention if getattr(module, EXACT, False) else fast_attention, scale=scaling)
    output = corral.attend(int(module.layer_idx), query, key, value, kernel)  # type: ignore[arg-type]
    return output.transpose(1, 2), None


def fast_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """torch's scaled dot-product attention, in the dtype of the inputs."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def exact_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention in float64, rounded once at the end.

    Engine and trainer sum the same keys in different orders (decode step by step, prefill in chunks, training over a
    tree), and in float32 every order rounds differently. float64 has 29 bits more, so that the difference disappears
    when the result is rounded. With matrix products whose inner order does not depend on the number of rows (OpenBLAS
    has it) a token's log-prob is then the same number in engine and trainer, whatever it is batched with.
    """
    return fast_attention(query.double(), key.double(), value.double(), mask, scale).to(query.dtype)


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

    def __init__(self, tree: TokenTree, device: torch.device, queries: slice | None = None) -> None:
        """With `queries`, only these nodes are queries; keys and values are still those of the whole tree."""
        self.tree, self.device, self.queries = tree, device, queries

    @cached_property
    def blocks(self) -> "list[_AttentionBlock]":
        blocks: list[_AttentionBlock] = []
        for chunks in self.tree.trees:
            size = chunks[-1].end - chunks[0].start
            by_chunk = sum(self.CALL_COST + (chunk.end - chunk.start) * len(chunk.path) for chunk in chunks)
            if self.CALL_COST + size * size <= by_chunk:
                blocks.append(_dense_block(chunks, self.device))
            else:
                blocks += [_chunk_block(chunk, self.device) for chunk in chunks]
        if self.queries is None:
            return blocks
        return [part for block in blocks if (part := block.restricted_to(self.queries, self.device)) is not None]

    @cached_property
    def varlen(self) -> "_VarlenTree":
        return _VarlenTree(self.tree, self.device, self.queries or slice(0, self.tree.num_nodes))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        if isinstance(kernel, partial) and kernel.func is fast_attention and has_flash(query):
            return self.varlen.attend(query, key, value, kernel.keywords["scale"])
        outputs = [block.attend(query, key, value, kernel) for block in self.blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


class _VarlenTree:
    """All chunks as sequences of one varlen call: a chunk's queries against the keys along its path, gathered."""

    def __init__(self, tree: TokenTree, device: torch.device, queries: slice) -> None:
        paths, num_queries = [], []
        for chunk in tree.chunks:
            start, end = max(chunk.start, queries.start), min(chunk.end, queries.stop)
            if start < end:
                num_queries.append(end - start)
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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        # Not `tensor[0]`: its gradient would be copied into a tensor of zeros.
        query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        if self.keys is not None:
            key, value = gather_kv(key, value, self.keys)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        lengths = (self.query_starts, self.key_starts, self.max_query, self.max_key)
        output = varlen_attention(query, key, value, *lengths, scale)
        return output.transpose(0, 1)[None]


class _AttentionBlock:
    """One attention call: queries `start:end` against the keys at `path`, with a mask or (None) causal."""

    def __init__(self, start: int, end: int, path: Tensor | slice, mask: Tensor | None) -> None:
        self.start, self.end, self.path, self.mask = start, end, path, mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        queries = query[:, :, self.start : self.end]
        return kernel(queries, key[:, :, self.path], value[:, :, self.path], self.mask)

    def restricted_to(self, queries: slice, device: torch.device) -> "_AttentionBlock | None":
        """The block for those of its queries that are in `queries`, counted from their first; None if none is."""
        start, end = max(self.start, queries.start), min(self.end, queries.stop)
        if start >= end:
            return None
        path, mask = self.path, self.mask
        if mask is not None:
            mask = mask[start - self.start : end - self.start]
        elif (start, end) != (self.start, self.end):  # causal: the keys are the nodes of the block itself
            path = slice(self.start, end)
            mask = torch.ones(end - start, end - self.start, dtype=torch.bool, device=device).tril(start - self.start)
        return _AttentionBlock(start - queries.start, end - queries.start, path, mask)


def _dense_block(chunks: tuple[TreeChunk, ...], device: torch.device) -> _AttentionBlock:
    """A whole tree in one call, with a mask [nodes, nodes] unless it is a single sequence."""
    start, end = chunks[0].start, chunks[-1].end
    if len(chunks) == 1:
        return _AttentionBlock(start, end, slice(start, end), None)
    mask = np.zeros((end - start, end - start), np.bool_)
    for chunk in chunks:
        size = chunk.end - chunk.start
        rows = slice(chunk.start - start, chunk.end - start)
        mask[rows, chunk.path[:-size] - start] = True
        mask[rows, rows] = np.tri(size, dtype=np.bool_)
    return _AttentionBlock(start, end, slice(start, end), torch.from_numpy(mask).to(device))


def _chunk_block(chunk: TreeChunk, device: torch.device) -> _AttentionBlock:
    """One chunk against its path, whose last nodes are the chunk itself."""
    size, length = chunk.end - chunk.start, len(chunk.path)
    if size == length:
        return _AttentionBlock(chunk.start, chunk.end, slice(chunk.start, chunk.end), None)
    mask = torch.ones(size, length, dtype=torch.bool, device=device).tril(length - size)
    return _AttentionBlock(chunk.start, chunk.end, torch.from_numpy(chunk.path).to(device), mask)
