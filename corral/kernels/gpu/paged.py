"""The paged cache on the device: writing new keys and values into it, and decoding over it.

A page holds `PAGE` consecutive tokens of one sequence, for all kv heads: `[pages x PAGE, kv_heads, width]` a layer. The
cache is read as it lies: a program takes one page at a time, and all query heads of a kv head share what it has read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.paged import PAGE


@triton.jit
def _weighted(normed, weight, dtype: tl.constexpr):
    """Rounded where transformers rounds."""
    return (normed.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rotate_and_store(
    qkv, query, keys, values, cos, sin, q_weight, k_weight, positions, table,
    table_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    position = tl.load(positions + token)
    head = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    known = head < HEADS + 2 * KV_HEADS
    source = qkv + token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * 2 * HALF + head * 2 * HALF + column
    low = tl.load(source, mask=known, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=known, other=0.0).to(tl.float32)
    is_value = head >= HEADS + KV_HEADS
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        is_key = head >= HEADS
        low_weight = tl.where(is_key, tl.load(k_weight + column), tl.load(q_weight + column))
        high_weight = tl.where(is_key, tl.load(k_weight + HALF + column), tl.load(q_weight + HALF + column))
        dtype = qkv.dtype.element_ty
        low = tl.where(is_value, low, _weighted(low * scale, low_weight, dtype))
        high = tl.where(is_value, high, _weighted(high * scale, high_weight, dtype))
    if ROTATE:
        c = tl.load(cos + position * 2 * HALF + column).to(tl.float32)
        s = tl.load(sin + position * 2 * HALF + column).to(tl.float32)
        rotated_low = tl.where(is_value, low, low * c - high * s)
        rotated_high = tl.where(is_value, high, high * c + low * s)
    else:
        rotated_low = low
        rotated_high = high
    target = query + token.to(tl.int64) * HEADS * 2 * HALF + head * 2 * HALF + column
    tl.store(target, rotated_low, mask=head < HEADS)
    tl.store(target + HALF, rotated_high, mask=head < HEADS)
    page = tl.load(table + token * table_stride + position // PAGE).to(tl.int64)
    slot = (page * PAGE + position % PAGE) * KV_HEADS * 2 * HALF
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    key = keys + slot + (head - HEADS) * 2 * HALF + column
    tl.store(key, rotated_low, mask=is_key)
    tl.store(key + HALF, rotated_high, mask=is_key)
    value = values + slot + (head - HEADS - KV_HEADS) * 2 * HALF + column
    tl.store(value, rotated_low, mask=is_value & known)
    tl.store(value + HALF, rotated_high, mask=is_value & known)


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    tokens, kv_heads, width = len(qkv), keys.shape[1], keys.shape[2]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query = qkv.new_empty(tokens, heads, width)
    _rotate_and_store[(tokens,)](
        qkv, query, keys, values, cos, sin, q_norm, k_norm, positions, table,
        table.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, ROWS=triton.next_power_of_2(heads + 2 * kv_heads), HALF=width // 2, PAGE=PAGE,
        NORM=q_norm is not None, ROTATE=cos is not None,
        num_warps=4,
    )  # fmt: skip
    return query


@triton.jit
def _decode(
    query, keys, values, output, partial, weights, table, positions,
    table_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """One new token of a sequence, for the query heads of one kv head, over one part of its history."""
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + sequence) + 1
    pages = tl.cdiv(length, PAGE)
    per_split = tl.cdiv(pages, SPLITS)
    first, last = split * per_split, tl.minimum((split + 1) * per_split, pages)
    group = tl.arange(0, GROUP)
    column = tl.arange(0, WIDTH)
    place = tl.arange(0, PAGE)
    heads_here: tl.constexpr = HEADS // KV_HEADS
    known = group < heads_here
    rows = (sequence * HEADS + kv_head * heads_here + group).to(tl.int64)
    q = tl.load(query + rows[:, None] * WIDTH + column[None, :], mask=known[:, None], other=0.0)
    highest = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    sums = tl.zeros([GROUP, WIDTH], tl.float32)
    offsets = (place[:, None] * KV_HEADS + kv_head) * WIDTH + column[None, :]
    for index in range(first, last):
        page = tl.load(table + sequence * table_stride + index).to(tl.int64)
        base = page * (PAGE * KV_HEADS * WIDTH)
        seen = (index * PAGE + place) < length
        # A page may hold anything behind the sequence's end, and 0 x NaN is NaN.
        key = tl.load(keys + base + offsets, mask=seen[:, None], other=0.0)
        value = tl.load(values + base + offsets, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - now)
        p = tl.exp2(scores - now[:, None])
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        highest = now
    if SPLITS == 1:
        result = sums / total[:, None]
        tl.store(output + rows[:, None] * WIDTH + column[None, :], result, mask=known[:, None])
    else:
        parts = rows * SPLITS + split
        safe = tl.where(total > 0, total, 1.0)
        result = sums / safe[:, None]
        tl.store(partial + parts[:, None] * WIDTH + column[None, :], result, mask=known[:, None])
        tl.store(weights + parts, tl.where(total > 0, highest + tl.log2(safe), -float("inf")), mask=known)


@triton.jit
def _combine(partial, weights, output, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDTH)
    weight = tl.load(weights + row * SPLITS + split)
    weight = tl.exp2(weight - tl.max(weight, 0))
    parts = tl.load(partial + (row * SPLITS + split)[:, None] * WIDTH + column[None, :])
    result = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(output + row * WIDTH + column, result)


LOG2_E = 1.4426950408889634


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, table: Tensor, scale: float, splits: int
) -> Tensor:
    sequences, heads, width = query.shape
    kv_heads = keys.shape[1]
    output = torch.empty_like(query)
    partial = weights = output
    if splits > 1:
        partial = query.new_empty(sequences, heads, splits, width, dtype=torch.float32)
        weights = query.new_empty(sequences, heads, splits, dtype=torch.float32)
    _decode[(sequences, kv_heads, splits)](
        query, keys, values, output, partial, weights, table, positions,
        table.stride(0), scale * LOG2_E,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), WIDTH=width,
        PAGE=PAGE, SPLITS=splits,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine[(sequences * heads,)](partial, weights, output, SPLITS=splits, WIDTH=width, num_warps=1)
    return output
