"""RMSNorm: a program takes some whole rows; in the backward pass it takes several such groups, and sums the weight's
gradient over them before it writes it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BACKWARD_PROGRAMS = 528
"""Four for each of an H100's multiprocessors; each writes a row of float32 that is summed afterwards."""


def norm_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., width] -> (normed, x + residual, what each row was multiplied by, float32). Without a residual the sum
    is x itself. In three dimensions, rows of x may lie apart (heads in a wider tensor)."""
    if x.dim() != 3 or x.stride(-1) != 1:
        x = x.contiguous()
    width = x.shape[-1]
    rows, inner, outer_stride, inner_stride = rows_of(x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block, tile_rows, num_warps = tile(width)
    _forward[(triton.cdiv(rows, tile_rows),)](
        x, x if residual is None else residual.contiguous(), weight, normed, summed, scale,
        rows, inner, outer_stride, inner_stride, eps,
        WIDTH=width, BLOCK=block, ROWS=tile_rows, HAS_RESIDUAL=residual is not None, num_warps=num_warps,
    )  # fmt: skip
    return normed, summed, scale


def norm_backward(
    d_normed: Tensor, d_summed: Tensor | None, summed: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """-> (gradient of the sum, including what came to it directly; gradient of the weight)"""
    width = summed.shape[-1]
    rows, inner, outer_stride, inner_stride = rows_of(summed)
    d_normed = d_normed.contiguous()
    d_x = torch.empty_like(d_normed)
    block, tile_rows, num_warps = tile(width)
    tiles = triton.cdiv(rows, tile_rows)
    programs = max(1, min(tiles, MAX_BACKWARD_PROGRAMS))
    partial = torch.empty(programs, width, dtype=torch.float32, device=summed.device)
    _backward[(programs,)](
        d_normed, d_normed if d_summed is None else d_summed.contiguous(), summed, weight, scale, d_x, partial,
        rows, inner, outer_stride, inner_stride, triton.cdiv(tiles, programs),
        WIDTH=width, BLOCK=block, ROWS=tile_rows, HAS_SUMMED=d_summed is not None, num_warps=num_warps,
    )  # fmt: skip
    return d_x, partial.sum(0).to(weight.dtype)


def tile(width: int) -> tuple[int, int, int]:
    """(columns of a tile, rows of a tile, warps)"""
    block = triton.next_power_of_2(width)
    return block, max(1, 2048 // block), min(16, max(4, block // 512))


def rows_of(x: Tensor) -> tuple[int, int, int, int]:
    """(rows, rows of an inner group, stride between groups, stride within)"""
    width = x.shape[-1]
    if x.dim() == 3:
        return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    return x.numel() // width, 1, width, 0


@triton.jit(do_not_specialize=["rows"])  # a decode step has any number
def _forward(
    x_at, residual_at, weight_at, normed_at, summed_at, scale_at,
    rows, inner, outer_stride, inner_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    dense = row[:, None] * WIDTH + column[None, :]
    apart = ((row // inner) * outer_stride + (row % inner) * inner_stride)[:, None] + column[None, :]
    x = tl.load(x_at + apart, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_at + dense, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_at + dense, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)
    weight = tl.load(weight_at + column, mask=column < WIDTH, other=0.0)
    normed = (wide * scale[:, None]).to(x.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(normed_at + dense, normed.to(x.dtype), mask=mask)
    tl.store(scale_at + row, scale, mask=row < rows)


@triton.jit
def _backward(
    d_normed_at, d_summed_at, summed_at, weight_at, scale_at, d_x_at, partial_at,
    rows, inner, outer_stride, inner_stride, tiles_of_program,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_SUMMED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles_of_program * ROWS
    for n in range(tiles_of_program):
        row = first + n * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
        dense = row[:, None] * WIDTH + column[None, :]
        apart = ((row // inner) * outer_stride + (row % inner) * inner_stride)[:, None] + column[None, :]
        d_normed = tl.load(d_normed_at + dense, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(summed_at + apart, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_at + row, mask=row < rows, other=0.0)[:, None]
        unit = x * scale
        d_unit = d_normed * weight[None, :]
        along = tl.sum(d_unit * unit, axis=1) / WIDTH
        d_x = (d_unit - unit * along[:, None]) * scale
        if HAS_SUMMED:
            d_x += tl.load(d_summed_at + dense, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_x_at + dense, d_x.to(d_x_at.dtype.element_ty), mask=mask)
        d_weight += tl.sum(d_normed * unit, axis=0)
    tl.store(partial_at + tl.program_id(0) * WIDTH + column, d_weight, mask=column < WIDTH)
