"""Taking rows and summing them back: a program has some rows of keys and the same of values, or columns of wide ones.

Every row is summed by one program, use by use: the result is the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def take_rows(key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, heads, width] each; heads may lie apart, their numbers next to each other."""
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    taken, columns = len(index), key.shape[1] * key.shape[2]
    results = [torch.empty(taken, *key.shape[1:], dtype=x.dtype, device=x.device) for x in (key, value)]
    block, tile_rows = tile(columns)
    _take[(triton.cdiv(taken, tile_rows), triton.cdiv(columns, block))](
        key, value, *results, index, taken, *key.stride()[:2], *value.stride()[:2],
        WIDTH=key.shape[2], COLUMNS=columns, BLOCK=block, ROWS=tile_rows, num_warps=4,
    )  # fmt: skip
    return results[0], results[1]


def sum_rows(d_key: Tensor, d_value: Tensor, starts: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of what was taken -> of the rows, in the gradients' dtype."""
    d_key, d_value = d_key.contiguous(), d_value.contiguous()
    rows, columns = len(starts) - 1, d_key.shape[1] * d_key.shape[2]
    totals = [torch.empty(rows, *d_key.shape[1:], dtype=x.dtype, device=x.device) for x in (d_key, d_value)]
    block, tile_rows = tile(columns)
    _sum[(triton.cdiv(rows, tile_rows), triton.cdiv(columns, block))](
        d_key, d_value, *totals, starts, places, rows, COLUMNS=columns, BLOCK=block, ROWS=tile_rows, num_warps=4
    )
    return totals[0], totals[1]


def tile(columns: int) -> tuple[int, int]:
    """(columns of a tile, rows of a tile)"""
    block = min(1024, triton.next_power_of_2(columns))
    return block, max(1, 1024 // block)


@triton.jit
def _take(
    key_at, value_at, taken_key_at, taken_value_at, index_at,
    taken, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (place < taken)[:, None] & (column < COLUMNS)[None, :]
    row = tl.load(index_at + place, mask=place < taken, other=0).to(tl.int64)[:, None]
    head, within = (column // WIDTH)[None, :], (column % WIDTH)[None, :]
    key = tl.load(key_at + row * key_row_stride + head * key_head_stride + within, mask=mask)
    value = tl.load(value_at + row * value_row_stride + head * value_head_stride + within, mask=mask)
    write = place[:, None] * COLUMNS + column[None, :]
    tl.store(taken_key_at + write, key, mask=mask)
    tl.store(taken_value_at + write, value, mask=mask)


@triton.jit
def _sum(
    d_key_at, d_value_at, key_total_at, value_total_at, starts_at, places_at, rows,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    start = tl.load(starts_at + row, mask=row < rows, other=0)
    uses = tl.load(starts_at + row + 1, mask=row < rows, other=0) - start
    key_total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    value_total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for n in range(tl.max(uses, axis=0)):
        place = tl.load(places_at + start + n, mask=n < uses, other=0).to(tl.int64)
        read = place[:, None] * COLUMNS + column
        mask = (n < uses)[:, None] & (column < COLUMNS)
        key_total += tl.load(d_key_at + read, mask=mask, other=0.0).to(tl.float32)
        value_total += tl.load(d_value_at + read, mask=mask, other=0.0).to(tl.float32)
    write = row[:, None] * COLUMNS + column
    mask = (row < rows)[:, None] & (column < COLUMNS)
    tl.store(key_total_at + write, key_total.to(key_total_at.dtype.element_ty), mask=mask)
    tl.store(value_total_at + write, value_total.to(value_total_at.dtype.element_ty), mask=mask)
