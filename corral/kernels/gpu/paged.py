"""Decoding over the paged cache: a program takes the query heads of one kv head of one sequence, and some of its pages.

The cache is read as it lies, one page at a time. The program with the last part also has the new token: it rotates its
key, puts it into the cache with the value, and takes both from its registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.paged import PAGE

LOG2_E = 1.4426950408889634
RESERVE = 16 << 10
"""Bytes of shared memory for what is not a page."""


def decode(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    splits: int,
) -> Tensor:
    """As `corral.kernels.paged.paged_decode`."""
    sequences, (kv_heads, width) = len(qkv), keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    output = qkv.new_empty(sequences, heads * width)
    partial = weights = output
    if splits > 1:
        partial = qkv.new_empty(sequences, heads, splits, width, dtype=torch.float32)
        weights = qkv.new_empty(sequences, heads, splits, dtype=torch.float32)
    cos, sin = rotary or (qkv, qkv)
    q_norm, k_norm = norms or (qkv, qkv)
    _decode[(kv_heads, sequences, splits)](
        qkv, keys, values, cos, sin, q_norm, k_norm, output, partial, weights, table, positions,
        table.stride(0), scale * LOG2_E, eps,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), HALF=width // 2,
        PAGE=PAGE, SPLITS=splits, NORM=norms is not None, ROTATE=rotary is not None,
        num_warps=4, num_stages=num_stages(2 * PAGE * width * keys.element_size(), qkv.device),
    )  # fmt: skip
    if splits > 1:
        _combine[(sequences * heads,)](partial, weights, output, SPLITS=splits, WIDTH=width, num_warps=1)
    return output


def num_stages(page_bytes: int, device: torch.device) -> int:
    """Pages of keys and values under way while one is computed with, and this one: as many as fit, up to three, which
    was best on an H200."""
    if device.type != "cuda":
        return 3
    properties: Any = torch.cuda.get_device_properties(device)
    num_pages = int(properties.shared_memory_per_block_optin - RESERVE) // page_bytes
    return max(1, min(3, 1 + num_pages))


@triton.jit
def _prepared(low, high, cos, sin, weight_at, half, eps, NORM: tl.constexpr, ROTATE: tl.constexpr, kind: tl.constexpr):
    """Both halves [rows, half] of some heads, normalised and rotated, rounded where transformers rounds."""
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(squares / (2 * half.shape[0]) + eps)[:, None]
        low_weight = tl.load(weight_at + half)[None, :].to(tl.float32)
        high_weight = tl.load(weight_at + half.shape[0] + half)[None, :].to(tl.float32)
        low = ((low * scale).to(kind).to(tl.float32) * low_weight).to(kind).to(tl.float32)
        high = ((high * scale).to(kind).to(tl.float32) * high_weight).to(kind).to(tl.float32)
    if ROTATE:
        rotated = low * cos - high * sin
        high = high * cos + low * sin
        low = rotated
    return low.to(kind), high.to(kind)


@triton.jit
def _decode(
    qkv, keys, values, cos_at, sin_at, q_weight, k_weight, output, partial, weights, table, positions,
    table_stride, scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    heads_here: tl.constexpr = HEADS // KV_HEADS
    kind: tl.constexpr = qkv.dtype.element_ty
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    position = tl.load(positions + sequence)
    group, half, column, place = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    known = group < heads_here
    cos = tl.zeros([1, HALF], tl.float32)
    sin = cos
    if ROTATE:
        cos = tl.load(cos_at + position * WIDTH + half)[None, :].to(tl.float32)
        sin = tl.load(sin_at + position * WIDTH + half)[None, :].to(tl.float32)
    token = qkv + sequence * (HEADS + 2 * KV_HEADS) * WIDTH
    query = token + (kv_head * heads_here + group)[:, None] * WIDTH + half[None, :]
    q_low, q_high = _prepared(
        tl.load(query, mask=known[:, None], other=0.0).to(tl.float32),
        tl.load(query + HALF, mask=known[:, None], other=0.0).to(tl.float32),
        cos, sin, q_weight, half, eps, NORM, ROTATE, kind,
    )  # fmt: skip

    # The program with the last part adds this one at the end. Loaded here, for then it need not wait for it.
    new_key = token + (HEADS + kv_head) * WIDTH + half[None, :]
    new_low, new_high = _prepared(
        tl.load(new_key).to(tl.float32), tl.load(new_key + HALF).to(tl.float32),
        cos, sin, k_weight, half, eps, NORM, ROTATE, kind,
    )  # fmt: skip
    new_value = tl.load(token + (HEADS + KV_HEADS + kv_head) * WIDTH + column)
    own_table = table + sequence * table_stride
    new_page = tl.load(own_table + position // PAGE).to(tl.int64)

    highest = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    sums = tl.zeros([GROUP, WIDTH], tl.float32)
    pages = tl.cdiv(position, PAGE)
    per_split = tl.cdiv(pages, SPLITS)
    key_offsets = (place[:, None] * KV_HEADS + kv_head) * WIDTH + half[None, :]
    value_offsets = (place[:, None] * KV_HEADS + kv_head) * WIDTH + column[None, :]
    first = split * per_split
    page = tl.load(own_table + tl.minimum(first, position // PAGE)).to(tl.int64)
    for index in range(first, tl.minimum(first + per_split, pages)):
        base = page * (PAGE * KV_HEADS * WIDTH)
        # The next one, ahead: then the loads of keys and values wait for nothing, and several pages are under way.
        page = tl.load(own_table + index + 1, mask=index + 1 < pages, other=0).to(tl.int64)
        # A page may hold anything behind the sequence's end, and 0 x NaN is NaN.
        seen = (index * PAGE + place) < position
        k_low = tl.load(keys + base + key_offsets, mask=seen[:, None], other=0.0)
        k_high = tl.load(keys + base + key_offsets + HALF, mask=seen[:, None], other=0.0)
        value = tl.load(values + base + value_offsets, mask=seen[:, None], other=0.0)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - now)
        p = tl.exp2(scores - now[:, None])
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(kind), value, input_precision="ieee")
        highest = now

    if split == SPLITS - 1:
        slot = ((new_page * PAGE + position % PAGE) * KV_HEADS + kv_head) * WIDTH
        tl.store(keys + slot + half[None, :], new_low)
        tl.store(keys + slot + HALF + half[None, :], new_high)
        tl.store(values + slot + column, new_value)
        score = tl.sum(q_low.to(tl.float32) * new_low.to(tl.float32), 1)
        score = (score + tl.sum(q_high.to(tl.float32) * new_high.to(tl.float32), 1)) * scale
        now = tl.maximum(highest, score)
        shrink = tl.exp2(highest - now)
        p_new = tl.exp2(score - now)
        total = total * shrink + p_new
        sums = sums * shrink[:, None] + p_new[:, None] * new_value[None, :].to(tl.float32)
        highest = now

    rows = sequence * HEADS + kv_head * heads_here + group
    if SPLITS == 1:
        result = sums / total[:, None]
        tl.store(output + rows[:, None] * WIDTH + column[None, :], result.to(kind), mask=known[:, None])
    else:
        parts = rows * SPLITS + split
        safe = tl.where(total > 0, total, 1.0)
        tl.store(partial + parts[:, None] * WIDTH + column[None, :], sums / safe[:, None], mask=known[:, None])
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
    tl.store(output + row * WIDTH + column, result.to(output.dtype.element_ty))
