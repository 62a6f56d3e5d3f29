"""Rotary position embedding: a program takes all heads of one token, those of queries, of keys and, if they are to be
copied along, of values."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotated_pair(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> tuple[Tensor, Tensor]:
    rotated_query, rotated_key = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    rotate_into((rotated_query, rotated_key), (query, key), cos, sin, backwards)
    return rotated_query, rotated_key


def rotate_into(results: Sequence[Tensor], parts: Sequence[Tensor], cos: Tensor, sin: Tensor, backwards: bool) -> None:
    """Queries and keys, [tokens, heads, width] each, are rotated; values are copied if there are any.

    Parts may lie anyhow. The heads of a token lie behind each other in the results, which may lie in a wider tensor.
    """
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    (query, key), has_value = parts[:2], len(parts) == 3
    (to_query, to_key), value, to_value = results[:2], parts[-1], results[-1]
    tokens, heads, width = query.shape
    kv_heads, half = key.shape[1], triton.next_power_of_2(width // 2)
    most_heads = triton.next_power_of_2(heads)
    _rotate[(tokens,)](
        query, key, value, to_query, to_key, to_value, cos.contiguous(), sin.contiguous(),
        heads, kv_heads, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        to_query.stride(0), to_key.stride(0), to_value.stride(0),
        WIDTH=width, HALF=half, HEADS=most_heads, KV_HEADS=triton.next_power_of_2(kv_heads),
        HAS_VALUE=has_value, BACKWARDS=backwards, num_warps=min(8, max(1, most_heads * half // 256)),
    )  # fmt: skip


@triton.jit
def _rotate(
    query_at, key_at, value_at, to_query_at, to_key_at, to_value_at, cos_at, sin_at,
    heads, kv_heads, query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, to_query_stride, to_key_stride, to_value_stride,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HAS_VALUE: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_at + token * WIDTH + pair, mask=pair < WIDTH // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_at + token * WIDTH + pair, mask=pair < WIDTH // 2, other=0.0).to(tl.float32)
    if BACKWARDS:
        sin = -sin
    query_at += token * query_token_stride
    _rotate_heads(query_at, to_query_at + token * to_query_stride, heads, query_head_stride, cos, sin, WIDTH, HEADS)
    key_at += token * key_token_stride
    _rotate_heads(key_at, to_key_at + token * to_key_stride, kv_heads, key_head_stride, cos, sin, WIDTH, KV_HEADS)
    if HAS_VALUE:
        head, column = tl.arange(0, KV_HEADS)[:, None], tl.arange(0, 2 * HALF)[None, :]
        mask = (head < kv_heads) & (column < WIDTH)
        value = tl.load(value_at + token * value_token_stride + head * value_head_stride + column, mask=mask)
        tl.store(to_value_at + token * to_value_stride + head * WIDTH + column, value, mask=mask)


@triton.jit
def _rotate_heads(x_at, to_at, heads, head_stride, cos, sin, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, cos.shape[1])[None, :]
    mask = (head < heads) & (pair < WIDTH // 2)
    read, write = x_at + head * head_stride + pair, to_at + head * WIDTH + pair
    first = tl.load(read, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(read + WIDTH // 2, mask=mask, other=0.0).to(tl.float32)
    kind = to_at.dtype.element_ty
    tl.store(write, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(write + WIDTH // 2, (second * cos + first * sin).to(kind), mask=mask)
