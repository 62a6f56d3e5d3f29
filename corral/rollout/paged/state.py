"""What the device knows of the sequences it decodes: a row of numbers for each slot. The host writes a row when a
sequence gets the slot; from then on the device counts by itself, and the host reads only what was drawn."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from corral.kernels.sampling import Truncation


@dataclass(frozen=True)
class SlotState:
    tokens: Tensor
    """int64: drawn last, and not read yet."""
    positions: Tensor
    """int32: where that token goes."""
    seeds: Tensor
    counters: Tensor
    """int32: tokens drawn so far."""
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    table: Tensor
    """[slots, pages], int32; 0 behind a sequence's pages, and in slots that nobody has."""

    @classmethod
    def empty(cls, num_slots: int, num_pages: int, device: torch.device) -> "SlotState":
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        whole, real = torch.int64, torch.float32
        return cls(
            tokens=zeros(whole),
            positions=zeros(torch.int32),
            seeds=zeros(whole),
            counters=zeros(torch.int32),
            temperatures=zeros(real) + 1,
            top_k=zeros(whole),
            top_p=zeros(real) + 1,
            min_p=zeros(real),
            table=zeros(torch.int32, num_pages),
        )

    def first(self, count: int) -> "SlotState":
        """The same memory."""
        return SlotState(*(getattr(self, f.name)[:count] for f in fields(self)))

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.top_k, self.top_p, self.min_p)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Rows into other slots; the table is the host's business."""
        for f in fields(self):
            if f.name != "table":
                tensor = getattr(self, f.name)
                tensor[targets] = tensor[sources]
