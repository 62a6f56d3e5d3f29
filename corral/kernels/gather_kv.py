"""Keys and values of tokens that several sequences share, copied to each of them.

In a token tree a shared prefix is computed once. Attention kernels for sequences of different lengths want the keys of
each sequence behind each other, so prefixes are gathered once for each branch, and their gradients summed over the
branches.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.kernels.host_to_device import on_device


class GatherIndex:
    """Which of `num_rows` rows are gathered, in which order; and the way back, for the gradient."""

    def __init__(self, index: NDArray[np.int64], num_rows: int, device: torch.device) -> None:
        self.host_index, self.num_rows, self.device = index, num_rows, device

    @cached_property
    def index(self) -> Tensor:
        """[gathered] int32: the row that each place of the result holds."""
        return on_device(self.host_index.astype(np.int32), self.device)

    @cached_property
    def inverse(self) -> tuple[Tensor, Tensor]:
        """(starts [rows + 1], places [gathered]), int32: row r is at `places[starts[r] : starts[r + 1]]`, in order."""
        starts = np.zeros(self.num_rows + 1, np.int32)
        np.cumsum(np.bincount(self.host_index, minlength=self.num_rows), out=starts[1:])
        places = np.argsort(self.host_index, kind="stable").astype(np.int32)
        return on_device(starts, self.device), on_device(places, self.device)


def gather_kv(key: Tensor, value: Tensor, index: GatherIndex) -> tuple[Tensor, Tensor]:
    """[rows, heads, width] each -> [gathered, heads, width] each. The gradients of a row are summed in float32."""
    if not key.is_cuda:
        return plain_gather_kv(key, value, index)
    compute: Any = GatherKV.apply
    result: tuple[Tensor, Tensor] = compute(key, value, index)
    return result


def plain_gather_kv(key: Tensor, value: Tensor, index: GatherIndex) -> tuple[Tensor, Tensor]:
    # By way of float32, because autograd sums the gradient in the dtype of what is indexed.
    key_rows, value_rows = (x.float().index_select(0, index.index).to(x.dtype) for x in (key, value))
    return key_rows, value_rows


class GatherKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, index: GatherIndex) -> tuple[Tensor, Tensor]:
        from corral.kernels.gpu.gather_kv_kernels import gather_rows

        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*index.inverse)
        return gather_rows(key, value, index.index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        from corral.kernels.gpu.gather_kv_kernels import scatter_add_rows

        return *scatter_add_rows(*gradients, *ctx.saved_tensors), None
