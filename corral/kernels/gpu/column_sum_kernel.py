"""Sums over the rows of a tall matrix, which are the gradients of biases.

torch's own sum takes nearly twice as long in this shape (H200). A product with ones would be a matrix product with one
column, whose parts cuBLAS may round before it adds them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_PROGRAM = 256
TILE_ROWS, TILE_COLUMNS = 32, 128


def column_sums(x: Tensor) -> Tensor:
    """[rows, columns] -> [columns], summed in float32 and in the same order in every run."""
    x = x.contiguous()
    num_rows, num_columns = x.shape
    num_programs = triton.cdiv(num_rows, ROWS_PER_PROGRAM)
    partial_sums = torch.empty(num_programs, num_columns, dtype=torch.float32, device=x.device)
    _column_sum_kernel[(num_programs, triton.cdiv(num_columns, TILE_COLUMNS))](
        x, partial_sums, num_rows, num_columns,
        NUM_TILES=ROWS_PER_PROGRAM // TILE_ROWS, TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return partial_sums.sum(0).to(x.dtype)


# A program sums 256 rows of 128 columns, in tiles of 32 x 128. The tile is added up element by element, and its rows
# only once, after the loop: a reduction in every round would cost more than the loads. Neighbouring threads read
# neighboring columns, so that loads are whole cache lines. The programs' sums are added by torch, in the order of the
# programs; atomics would save that launch, and give another result in every run. float32, since bfloat16 stops counting
# ones at 256.
@triton.jit
def _column_sum_kernel(
    x_ptr, partial_sums_ptr, num_rows, num_columns,
    NUM_TILES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * NUM_TILES * TILE_ROWS
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
    for n in range(NUM_TILES):
        row = first + n * TILE_ROWS + tl.arange(0, TILE_ROWS)
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        acc += tl.load(x_ptr + row[:, None] * num_columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    offsets = tl.program_id(0).to(tl.int64) * num_columns + column
    tl.store(partial_sums_ptr + offsets, tl.sum(acc, axis=0), mask=column < num_columns)
