"""The paged cache: keys and values of many sequences in pages of `PAGE` tokens, each sequence with a list of its pages.

keys, values   [pages x PAGE, kv_heads, width], of one layer
table          [sequences, pages of the longest], int32: which pages hold a sequence, in order
positions      [sequences], int32: where its new token goes
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = 64


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """qkv [tokens, (heads + 2 kv_heads) x width], of one new token of each sequence -> query [tokens, heads, width].

    Queries and keys are normalised by head (with `q_norm`, `k_norm` [width]) and rotated (with `cos`, `sin`
    [positions, width]); keys and values go into the cache.
    """
    if qkv.is_cuda:
        from corral.kernels.gpu import paged

        return paged.rotate_and_store(qkv, keys, values, positions, table, cos, sin, q_norm, k_norm, eps)
    kv_heads, width = keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query, key, value = qkv.view(len(qkv), -1, width).split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = q_norm * _normal(query, eps), k_norm * _normal(key, eps)
    if cos is not None and sin is not None:
        c, s = cos[positions.long(), None], sin[positions.long(), None]
        query, key = _rotated(query, c, s), _rotated(key, c, s)
    slots = slots_of(table, positions)
    keys[slots], values[slots] = key, value
    stored: Tensor = query.contiguous()
    return stored


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, table: Tensor, scale: float, splits: int = 1
) -> Tensor:
    """One query of each sequence [sequences, heads, width] over the first `positions` + 1 tokens of its pages.

    `splits`: parts of a sequence that are read at the same time. -> [sequences, heads, width]
    """
    if query.is_cuda:
        from corral.kernels.gpu import paged

        return paged.paged_attention(query, keys, values, positions, table, scale, splits)
    longest = int(positions.max()) + 1
    places = torch.arange(longest, device=query.device)
    slots = table[:, places // PAGE].long() * PAGE + places % PAGE
    seen = places <= positions[:, None]
    grouped = query.view(len(query), keys.shape[1], -1, query.shape[2])
    # A page may hold anything behind the sequence's end, and 0 x NaN is NaN.
    key, value = (torch.where(seen[:, :, None, None], tensor[slots], 0).transpose(1, 2) for tensor in (keys, values))
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=seen[:, None, None], scale=scale)
    return output.reshape(query.shape)


def slots_of(table: Tensor, positions: Tensor) -> Tensor:
    """Where the token at `positions[i]` of sequence i lies in the cache."""
    pages = table.gather(1, (positions // PAGE)[:, None].long())[:, 0]
    return (pages * PAGE + positions % PAGE).long()


def _normal(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
