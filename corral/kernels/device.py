"""From the host to the device."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: Tensor | NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """A copy to a GPU does not wait for what the GPU still computes, and nor does the caller."""
    host = torch.as_tensor(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
