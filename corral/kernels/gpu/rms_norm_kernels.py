"""RMSNorm with the residual addition before it, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BACKWARD_PROGRAMS = 528
"""Most programs of a backward pass: four for each of an H100's 132 multiprocessors."""


def norm_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., width] -> (normed, x + residual, 1 / RMS of each row in float32). Without a residual the sum is x itself.

    With three dimensions, the rows of x may lie apart in memory (heads in a wider tensor)."""
    if x.dim() != 3 or x.stride(-1) != 1:
        x = x.contiguous()
    width = x.shape[-1]
    num_rows, inner, outer_stride, inner_stride = row_layout(x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block, tile_rows, num_warps = tile_shape(width)
    _rms_norm_forward_kernel[(triton.cdiv(num_rows, tile_rows),)](
        x, x if residual is None else residual.contiguous(), weight, normed, summed, rstd,
        num_rows, inner, outer_stride, inner_stride, eps,
        WIDTH=width, BLOCK=block, ROWS=tile_rows, HAS_RESIDUAL=residual is not None, num_warps=num_warps,
    )  # fmt: skip
    return normed, summed, rstd


def norm_backward(
    d_normed: Tensor, d_summed: Tensor | None, summed: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """-> (gradient of x + residual, `d_summed` included; gradient of the weight)"""
    width = summed.shape[-1]
    num_rows, inner, outer_stride, inner_stride = row_layout(summed)
    d_normed = d_normed.contiguous()
    d_x = torch.empty_like(d_normed)
    block, tile_rows, num_warps = tile_shape(width)
    tiles = triton.cdiv(num_rows, tile_rows)
    programs = max(1, min(tiles, MAX_BACKWARD_PROGRAMS))
    partial_sums = torch.empty(programs, width, dtype=torch.float32, device=summed.device)
    _rms_norm_backward_kernel[(programs,)](
        d_normed, d_normed if d_summed is None else d_summed.contiguous(), summed, weight, rstd, d_x, partial_sums,
        num_rows, inner, outer_stride, inner_stride, triton.cdiv(tiles, programs),
        WIDTH=width, BLOCK=block, ROWS=tile_rows, HAS_SUMMED=d_summed is not None, num_warps=num_warps,
    )  # fmt: skip
    return d_x, partial_sums.sum(0).to(weight.dtype)


def tile_shape(width: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program's tile: whole rows, about 2048 elements."""
    block = triton.next_power_of_2(width)
    return block, max(1, 2048 // block), min(16, max(4, block // 512))


def row_layout(x: Tensor) -> tuple[int, int, int, int]:
    """-> (number of rows, rows in an inner group, stride between groups, stride between rows of a group)"""
    width = x.shape[-1]
    if x.dim() == 3:
        return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    return x.numel() // width, 1, width, 0


# A program normalizes ROWS whole rows, so that the mean square of a row is one reduction within the program: rows of up
# to some ten thousand elements fit into its registers. `strided` addresses x, whose rows may be heads in a wider
# tensor; everything written is `dense`.
#
# Numerics, as transformers does it: the sum with the residual is rounded to the model's dtype (the residual stream is),
# the statistics are float32, and the normalized row is rounded before the weight is applied. `rstd`, 1 / RMS, is kept
# in float32 for the backward pass, which then need not reduce again.
#
# num_rows is not specialized: a decode step has any number of sequences, and Triton would compile a variant for 1 and
# for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, summed_ptr, rstd_ptr,
    num_rows, inner, outer_stride, inner_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    dense = row[:, None] * WIDTH + column[None, :]
    strided = ((row // inner) * outer_stride + (row % inner) * inner_stride)[:, None] + column[None, :]
    x = tl.load(x_ptr + strided, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + dense, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + dense, x, mask=mask)
    x_f32 = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x_f32 * x_f32, axis=1) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    normed = (x_f32 * rstd[:, None]).to(x.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(normed_ptr + dense, normed.to(x.dtype), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)


# With x_hat = x * rstd and d_x_hat = d_normed * weight: d_x = (d_x_hat - x_hat * mean(d_x_hat * x_hat)) * rstd.
#
# The gradient of the weight is a sum over all rows. A program takes `tiles_per_program` tiles, one after the other,
# keeps its part of that sum in registers, and writes it once; torch adds the parts of at most 528 programs. One part
# for each tile would write as much as x itself where rows are wide, and atomics would add in another order in every
# run.
@triton.jit
def _rms_norm_backward_kernel(
    d_normed_ptr, d_summed_ptr, summed_ptr, weight_ptr, rstd_ptr, d_x_ptr, partial_sums_ptr,
    num_rows, inner, outer_stride, inner_stride, tiles_per_program,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_SUMMED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles_per_program * ROWS
    for n in range(tiles_per_program):
        row = first + n * ROWS + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
        dense = row[:, None] * WIDTH + column[None, :]
        strided = ((row // inner) * outer_stride + (row % inner) * inner_stride)[:, None] + column[None, :]
        d_normed = tl.load(d_normed_ptr + dense, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(summed_ptr + strided, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)[:, None]
        x_hat = x * rstd
        d_x_hat = d_normed * weight[None, :]
        projection = tl.sum(d_x_hat * x_hat, axis=1) / WIDTH
        d_x = (d_x_hat - x_hat * projection[:, None]) * rstd
        if HAS_SUMMED:
            d_x += tl.load(d_summed_ptr + dense, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + dense, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
        d_weight += tl.sum(d_normed * x_hat, axis=0)
    tl.store(partial_sums_ptr + tl.program_id(0) * WIDTH + column, d_weight, mask=column < WIDTH)
