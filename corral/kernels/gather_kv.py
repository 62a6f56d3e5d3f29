"""Which keys and values each sequence attends to, where several sequences share tokens.

In a token tree a shared prefix is computed once. Attention kernels for sequences of different lengths want the keys of
each sequence behind each other, so prefixes are gathered once for each branch, and their gradients summed over the
branches. What is gathered may be many times what was computed, so only one layer has it at a time
(`kernels/varlen_attention.py`).
"""

from functools import cached_property

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
