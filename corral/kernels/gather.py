"""Rows of two tensors, of which some are wanted many times: keys and values of tokens that many sequences share."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corral.kernels.device import on_device


class Taken:
    """Which of `num_rows` rows are taken, and where to."""

    def __init__(self, index: NDArray[np.int64], num_rows: int, device: torch.device) -> None:
        self.on_host, self.num_rows, self.device = index, num_rows, device

    @cached_property
    def index(self) -> Tensor:
        """[taken] int32: the row that each place holds"""
        return on_device(self.on_host.astype(np.int32), self.device)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """(starts [rows + 1], places [taken]), int32: row r went to `places[starts[r] : starts[r + 1]]`, in order."""
        starts = np.zeros(self.num_rows + 1, np.int32)
        np.cumsum(np.bincount(self.on_host, minlength=self.num_rows), out=starts[1:])
        places = np.argsort(self.on_host, kind="stable").astype(np.int32)
        return on_device(starts, self.device), on_device(places, self.device)


def gather(key: Tensor, value: Tensor, taken: Taken) -> tuple[Tensor, Tensor]:
    """[rows, heads, width] each -> [taken, heads, width] each. A row's gradients are summed in float32."""
    if not key.is_cuda:
        return plain_gather(key, value, taken)
    compute: Any = Gather.apply
    result: tuple[Tensor, Tensor] = compute(key, value, taken)
    return result


def plain_gather(key: Tensor, value: Tensor, taken: Taken) -> tuple[Tensor, Tensor]:
    key_rows, value_rows = (x.float().index_select(0, taken.index).to(x.dtype) for x in (key, value))
    return key_rows, value_rows


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, taken: Taken) -> tuple[Tensor, Tensor]:
        from corral.kernels.gpu.gather import take_rows

        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*taken.places)
        return take_rows(key, value, taken.index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        from corral.kernels.gpu.gather import sum_rows

        return *sum_rows(*gradients, *ctx.saved_tensors), None
