"""The memory of an engine's own copy of the weights, which a trainer on the same device may have meanwhile.

Where trainers hold shards, an engine beside them has a whole copy, which is of no use between the last token of a step
and the weights of the next one. CUDA graphs hold the addresses of the weights: on an NVIDIA GPU these stay reserved, as
those of the KV cache do; elsewhere the memory comes back at another address.
"""

from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 256
"""Bytes, as CUDA's own allocations have: kernels load whole vectors."""


class WeightMemory:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.is_released = False
        self.held: Any = None
        """The reserved addresses of all parameters, from the first release on."""
        self.flat: Tensor | None = None
        """The bytes of all parameters, from the first release on; elsewhere than on an NVIDIA GPU."""

    def release(self) -> None:
        """Frees the memory, and with it the weights. Parameters keep their shapes, and must not be read."""
        if self.is_released:
            return
        if self.held is None and self.flat is None:
            self._move()
        if self.held is not None:
            self.held.unmap()
        else:
            assert self.flat is not None
            self.flat.untyped_storage().resize_(0)
        self.is_released = True

    def acquire(self) -> None:
        """Allocates the memory, if it is not allocated. What is in it is of no meaning until all weights are loaded."""
        if not self.is_released:
            return
        if self.held is not None:
            self.held.map()
        else:
            assert self.flat is not None
            self.flat.untyped_storage().resize_(self.flat.numel())
        self.is_released = False

    def close(self) -> None:
        if self.held is not None:
            self.held.close()

    def _move(self) -> None:
        """Gives all parameters places in one allocation, without what was in them. Those that lie behind each other do
        so afterwards, too: fused layers compute them in one product."""
        parameters = sorted(self.model.parameters(), key=Tensor.data_ptr)
        device = parameters[0].device
        layout = []
        num_bytes = end_before = 0
        for parameter in parameters:
            if parameter.data_ptr() != end_before:
                num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            layout.append((num_bytes, parameter.shape, parameter.dtype, parameter.nbytes))
            num_bytes += parameter.nbytes
            end_before = parameter.data_ptr() + parameter.nbytes
        for parameter in parameters:  # all, before the new memory is taken: there may not be room for both
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=device)
        if device.type == "cuda" and torch.version.hip is None:
            from corral.kernels.gpu.virtual_memory import VirtualBuffer

            self.held = VirtualBuffer(num_bytes, device)
            self.held.map()
            flat = self.held.tensor()
        else:
            flat = self.flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        for parameter, (start, shape, dtype, size) in zip(parameters, layout, strict=True):
            parameter.data = flat[start : start + size].view(dtype).view(shape)
