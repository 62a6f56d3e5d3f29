"""Rotary position embedding: a program takes all heads of one token, those of queries and of keys."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate_pair(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backwards: bool) -> tuple[Tensor, Tensor]:
    """[tokens, heads, width]; heads may lie in a wider tensor, their numbers next to each other."""
    query, key = dense_heads(query), dense_heads(key)
    rotated = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)]
    tokens, heads, width = query.shape
    most_heads = triton.next_power_of_2(max(heads, key.shape[1]))
    half = triton.next_power_of_2(width // 2)
    _rotate[(tokens, 2)](
        query, key, *rotated, cos.contiguous(), sin.contiguous(),
        heads, key.shape[1], query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        WIDTH=width, HALF=half, HEADS=most_heads, BACKWARDS=backwards,
        num_warps=min(8, max(1, most_heads * half // 256)),
    )  # fmt: skip
    return rotated[0], rotated[1]


def dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _rotate(
    query_at, key_at, rotated_query_at, rotated_key_at, cos_at, sin_at,
    query_heads, key_heads, query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    is_pair = pair < WIDTH // 2
    cos = tl.load(cos_at + token * WIDTH + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_at + token * WIDTH + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    if BACKWARDS:
        sin = -sin
    if tl.program_id(1) == 0:
        _rotate_heads(
            query_at + token * query_token_stride, rotated_query_at + token * query_heads * WIDTH,
            query_heads, query_head_stride, cos, sin, pair, is_pair, WIDTH, HEADS,
        )  # fmt: skip
    else:
        _rotate_heads(
            key_at + token * key_token_stride, rotated_key_at + token * key_heads * WIDTH,
            key_heads, key_head_stride, cos, sin, pair, is_pair, WIDTH, HEADS,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    x_at, rotated_at, heads, head_stride, cos, sin, pair, is_pair, WIDTH: tl.constexpr, HEADS: tl.constexpr
):
    head = tl.arange(0, HEADS)
    mask = (head < heads)[:, None] & is_pair[None, :]
    read = x_at + head[:, None] * head_stride + pair[None, :]
    write = rotated_at + head[:, None] * WIDTH + pair[None, :]
    first = tl.load(read, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(read + WIDTH // 2, mask=mask, other=0.0).to(tl.float32)
    kind = rotated_at.dtype.element_ty
    tl.store(write, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(write + WIDTH // 2, (second * cos + first * sin).to(kind), mask=mask)
