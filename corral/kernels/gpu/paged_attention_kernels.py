"""Decode attention over the paged KV cache, with everything that belongs to one new token in the same launch: norm and
rotation of its query and key, the write of its key and value into the cache, and attention over all tokens up to it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.paged_attention import PAGE

LOG2_E = 1.4426950408889634
SHARED_MEMORY_RESERVE = 16 << 10
"""Bytes of shared memory left for what is not a page of keys or values."""


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
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes what `corral.kernels.paged_attention.paged_decode` does."""
    num_sequences, (kv_heads, width) = len(qkv), keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    output = qkv.new_empty(num_sequences, heads * width)
    partial = lse = output
    if splits > 1:
        partial = qkv.new_empty(num_sequences, heads, splits, width, dtype=torch.float32)
        lse = qkv.new_empty(num_sequences, heads, splits, dtype=torch.float32)
    cos, sin = rotary or (qkv, qkv)
    q_norm, k_norm = norms or (qkv, qkv)
    _decode_kernel[(kv_heads, num_sequences, splits)](
        qkv, keys, values, cos, sin, q_norm, k_norm, qkv if sinks is None else sinks, output, partial, lse, table,
        positions, table.stride(0), scale * LOG2_E, eps,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=max(16, triton.next_power_of_2(heads // kv_heads)), HALF=width // 2,
        PAGE=PAGE, SPLITS=splits, NORM=norms is not None, ROTATE=rotary is not None,
        WINDOW=window or 0, SINKS=sinks is not None,
        num_warps=4, num_stages=num_stages(2 * PAGE * width * keys.element_size(), qkv.device),
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num_sequences * heads,)](partial, lse, output, SPLITS=splits, WIDTH=width, num_warps=1)
    return output


def num_stages(page_bytes: int, device: torch.device) -> int:
    """Depth of the load pipeline: the page being computed with and those being loaded meanwhile.

    As many as fit into shared memory, up to three, which was best on an H200; deeper ones changed nothing there."""
    if device.type != "cuda":
        return 3
    properties: Any = torch.cuda.get_device_properties(device)
    num_pages = int(properties.shared_memory_per_block_optin - SHARED_MEMORY_RESERVE) // page_bytes
    return max(1, min(3, 1 + num_pages))


# RMSNorm over each head's width (where the model has it, as Qwen3 does) and the rotary embedding, of a tile of heads
# that is kept as two halves [rows, width / 2], because rotation pairs element i with i + width / 2. Float32 inside,
# rounded to the model's dtype after the norm, after its weight and after the rotation: where transformers rounds, so
# that the key in the cache is the one that the trainer computes.
@triton.jit
def _norm_and_rotate(
    low, high, cos, sin, weight_ptr, half, eps, NORM: tl.constexpr, ROTATE: tl.constexpr, dtype: tl.constexpr
):
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        rstd = tl.rsqrt(squares / (2 * half.shape[0]) + eps)[:, None]
        low_weight = tl.load(weight_ptr + half)[None, :].to(tl.float32)
        high_weight = tl.load(weight_ptr + half.shape[0] + half)[None, :].to(tl.float32)
        low = ((low * rstd).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        high = ((high * rstd).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    if ROTATE:
        rotated = low * cos - high * sin
        high = high * cos + low * sin
        low = rotated
    return low.to(dtype), high.to(dtype)


# One more score for each row of the running softmax; its value, weighted by p, is the caller's to add.
@triton.jit
def _add_score(m, l, acc, score):
    m_new = tl.maximum(m, score)
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(score - m_new)
    return m_new, l * alpha + p, acc * alpha[:, None], p


# A program computes the query heads that share one kv head, of one sequence, over one of SPLITS parts of its pages.
# Sharing the kv head is what makes decoding cheap: a page is read once for all heads of the group. GROUP is the group's
# size rounded up to 16, the least that tl.dot takes; rows beyond it are masked.
#
# Layout: the cache is read as it lies, [page, token, kv_head, width], one page of keys [PAGE, width] (as two halves,
# see above) and of values at a time. Long sequences are split over programs (flash-decoding) where there are too few
# sequences to fill the device; `_combine_kernel` joins the parts. The other layout, whole heads behind each other, made
# no difference on an H200.
#
# The running softmax is flash-attention's: m is the row maximum so far, l the sum of exp(score - m), acc the sum of
# exp(score - m) * value, and alpha = exp(m_old - m_new) rescales l and acc when m grows. Scores carry a factor log2(e),
# so that exp is exp2, which is one instruction. Scores, m, l and acc are float32; p is rounded to the model's dtype for
# the second product, as flash-attention does it.
#
# The new token's key and value are not read from the cache: the program with the last part has them in registers,
# writes them to the cache, and adds them as one more score at the end. No program may read the slot that is being
# written, and the loop's mask (`< position`) sees to that; nothing orders the programs of one launch.
@triton.jit
def _decode_kernel(
    qkv, keys, values, cos_ptr, sin_ptr, q_weight, k_weight, sinks_ptr, output, partial, lse, table, positions,
    table_stride, scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    group_size: tl.constexpr = HEADS // KV_HEADS
    dtype: tl.constexpr = qkv.dtype.element_ty
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    position = tl.load(positions + sequence)
    group, half, column, place = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    in_group = group < group_size
    cos = tl.zeros([1, HALF], tl.float32)
    sin = cos
    if ROTATE:
        cos = tl.load(cos_ptr + position * WIDTH + half)[None, :].to(tl.float32)
        sin = tl.load(sin_ptr + position * WIDTH + half)[None, :].to(tl.float32)
    token = qkv + sequence * (HEADS + 2 * KV_HEADS) * WIDTH
    query = token + (kv_head * group_size + group)[:, None] * WIDTH + half[None, :]
    q_low, q_high = _norm_and_rotate(
        tl.load(query, mask=in_group[:, None], other=0.0).to(tl.float32),
        tl.load(query + HALF, mask=in_group[:, None], other=0.0).to(tl.float32),
        cos, sin, q_weight, half, eps, NORM, ROTATE, dtype,
    )  # fmt: skip

    # Only the program with the last part needs the new token, at the end. Loaded here, it has arrived by then.
    new_key = token + (HEADS + kv_head) * WIDTH + half[None, :]
    new_low, new_high = _norm_and_rotate(
        tl.load(new_key).to(tl.float32), tl.load(new_key + HALF).to(tl.float32),
        cos, sin, k_weight, half, eps, NORM, ROTATE, dtype,
    )  # fmt: skip
    new_value = tl.load(token + (HEADS + KV_HEADS + kv_head) * WIDTH + column)
    own_table = table + sequence * table_stride
    new_page = tl.load(own_table + position // PAGE).to(tl.int64)

    m = tl.full([GROUP], -float("inf"), tl.float32)
    l = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, WIDTH], tl.float32)
    num_pages = tl.cdiv(position, PAGE)
    first_key = 0
    if WINDOW > 0:  # pages before the window are not read at all
        first_key = tl.maximum(position - WINDOW + 1, 0)
    first_page = first_key // PAGE
    pages_per_split = tl.cdiv(num_pages - first_page, SPLITS)
    key_offsets = (place[:, None] * KV_HEADS + kv_head) * WIDTH + half[None, :]
    value_offsets = (place[:, None] * KV_HEADS + kv_head) * WIDTH + column[None, :]
    first = first_page + split * pages_per_split
    page = tl.load(own_table + tl.minimum(first, position // PAGE)).to(tl.int64)
    for index in range(first, tl.minimum(first + pages_per_split, num_pages)):
        base = page * (PAGE * KV_HEADS * WIDTH)
        # The next page's number, ahead: then the loads of keys and values wait for nothing, and several pages are in
        # flight.
        page = tl.load(own_table + index + 1, mask=index + 1 < num_pages, other=0).to(tl.int64)
        # A page may hold anything behind the sequence's end, and 0 x NaN is NaN: masked when loaded, not only in the
        # scores.
        mask = (index * PAGE + place) < position
        if WINDOW > 0:
            mask = mask & (index * PAGE + place >= first_key)
        k_low = tl.load(keys + base + key_offsets, mask=mask[:, None], other=0.0)
        k_high = tl.load(keys + base + key_offsets + HALF, mask=mask[:, None], other=0.0)
        value = tl.load(values + base + value_offsets, mask=mask[:, None], other=0.0)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * scale
        scores = tl.where(mask[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(dtype), value, input_precision="ieee")
        m = m_new

    if split == SPLITS - 1:
        slot = ((new_page * PAGE + position % PAGE) * KV_HEADS + kv_head) * WIDTH
        tl.store(keys + slot + half[None, :], new_low)
        tl.store(keys + slot + HALF + half[None, :], new_high)
        tl.store(values + slot + column, new_value)
        score = tl.sum(q_low.to(tl.float32) * new_low.to(tl.float32), 1)
        score = (score + tl.sum(q_high.to(tl.float32) * new_high.to(tl.float32), 1)) * scale
        m, l, acc, p_new = _add_score(m, l, acc, score)
        acc += p_new[:, None] * new_value[None, :].to(tl.float32)
        if SINKS:  # one more score for each head, without a value; 1.44 is log2(e), as in the scale of the others
            sink = tl.load(sinks_ptr + kv_head * group_size + group, mask=in_group, other=0.0).to(tl.float32)
            m, l, acc, _ = _add_score(m, l, acc, sink * 1.4426950408889634)

    rows = sequence * HEADS + kv_head * group_size + group
    if SPLITS == 1:
        result = acc / l[:, None]
        tl.store(output + rows[:, None] * WIDTH + column[None, :], result.to(dtype), mask=in_group[:, None])
    else:
        # A short sequence has fewer pages than there are parts: an empty part gets weight exp2(-inf) = 0.
        parts = rows * SPLITS + split
        safe_l = tl.where(l > 0, l, 1.0)
        tl.store(partial + parts[:, None] * WIDTH + column[None, :], acc / safe_l[:, None], mask=in_group[:, None])
        tl.store(lse + parts, tl.where(l > 0, m + tl.log2(safe_l), -float("inf")), mask=in_group)


# A program joins the SPLITS parts of one head of one sequence: each is a softmax average over its own keys, with the
# log2 of its sum of exponentials (lse) as its weight. In float32; rounded once, to the output's dtype.
@triton.jit
def _combine_kernel(partial, lse, output, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDTH)
    part_lse = tl.load(lse + row * SPLITS + split)
    weight = tl.exp2(part_lse - tl.max(part_lse, 0))
    parts = tl.load(partial + (row * SPLITS + split)[:, None] * WIDTH + column[None, :])
    result = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(output + row * WIDTH + column, result.to(output.dtype.element_ty))
