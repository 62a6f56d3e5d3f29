"""Gathering rows of keys and values, and adding the gradients of the gathered rows up again.

Index_add with atomics would add in whatever order programs arrive, and in bfloat16: another result in every run, and
stuck at 256 equal terms. Here each row is summed by one program, use after use, in float32: the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def gather_rows(key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, heads, width] each -> [gathered, heads, width] each.

    Heads may lie apart in memory (a view of the merged projection); the numbers of a head lie next to each other.
    """
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    num_gathered, num_columns = len(index), key.shape[1] * key.shape[2]
    results = [torch.empty(num_gathered, *key.shape[1:], dtype=x.dtype, device=x.device) for x in (key, value)]
    block, tile_rows = tile_shape(num_columns)
    _gather_kernel[(triton.cdiv(num_gathered, tile_rows), triton.cdiv(num_columns, block))](
        key, value, *results, index, num_gathered, *key.stride()[:2], *value.stride()[:2],
        WIDTH=key.shape[2], COLUMNS=num_columns, BLOCK=block, ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    return results[0], results[1]


def scatter_add_rows(d_key: Tensor, d_value: Tensor, starts: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the gathered rows -> gradients of the rows, in the same dtype. See `GatherIndex.inverse`."""
    d_key, d_value = d_key.contiguous(), d_value.contiguous()
    num_rows, num_columns = len(starts) - 1, d_key.shape[1] * d_key.shape[2]
    results = [torch.empty(num_rows, *d_key.shape[1:], dtype=x.dtype, device=x.device) for x in (d_key, d_value)]
    block, tile_rows = tile_shape(num_columns)
    _scatter_add_kernel[(triton.cdiv(num_rows, tile_rows), triton.cdiv(num_columns, block))](
        d_key, d_value, *results, starts, places, num_rows,
        COLUMNS=num_columns, BLOCK=block, ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    return results[0], results[1]


def tile_shape(num_columns: int) -> tuple[int, int]:
    """Columns and rows of a program's tile: about 1024 elements, several rows where they are narrow."""
    block = min(1024, triton.next_power_of_2(num_columns))
    return block, max(1, 1024 // block)


# A program copies ROWS gathered rows, BLOCK columns of each, of keys and values alike: they have the same index, so it
# is read once for both, and the two copies overlap. A column is (head, element), because heads may lie apart in the
# source.
@triton.jit
def _gather_kernel(
    key_ptr, value_ptr, gathered_key_ptr, gathered_value_ptr, index_ptr,
    num_gathered, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (place < num_gathered)[:, None] & (column < COLUMNS)[None, :]
    row = tl.load(index_ptr + place, mask=place < num_gathered, other=0).to(tl.int64)[:, None]
    head, element = (column // WIDTH)[None, :], (column % WIDTH)[None, :]
    key = tl.load(key_ptr + row * key_row_stride + head * key_head_stride + element, mask=mask)
    value = tl.load(value_ptr + row * value_row_stride + head * value_head_stride + element, mask=mask)
    offsets = place[:, None] * COLUMNS + column[None, :]
    tl.store(gathered_key_ptr + offsets, key, mask=mask)
    tl.store(gathered_value_ptr + offsets, value, mask=mask)


# A program owns ROWS source rows and walks over the places that each was gathered to. Rows of one tile are used
# unequally often, so the loop runs as often as the most used of them, and the others are masked: shared prefixes lie
# next to each other in a token tree, and have about the same number of uses. Accumulated in float32, rounded once.
@triton.jit
def _scatter_add_kernel(
    d_key_ptr, d_value_ptr, key_sum_ptr, value_sum_ptr, starts_ptr, places_ptr, num_rows,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    start = tl.load(starts_ptr + row, mask=row < num_rows, other=0)
    num_uses = tl.load(starts_ptr + row + 1, mask=row < num_rows, other=0) - start
    key_acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    value_acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for n in range(tl.max(num_uses, axis=0)):
        place = tl.load(places_ptr + start + n, mask=n < num_uses, other=0).to(tl.int64)
        offsets = place[:, None] * COLUMNS + column
        mask = (n < num_uses)[:, None] & (column < COLUMNS)
        key_acc += tl.load(d_key_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        value_acc += tl.load(d_value_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    offsets = row[:, None] * COLUMNS + column
    mask = (row < num_rows)[:, None] & (column < COLUMNS)
    tl.store(key_sum_ptr + offsets, key_acc.to(key_sum_ptr.dtype.element_ty), mask=mask)
    tl.store(value_sum_ptr + offsets, value_acc.to(value_sum_ptr.dtype.element_ty), mask=mask)
