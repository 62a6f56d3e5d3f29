"""Copies from the host to the device that nobody waits for."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: Tensor | NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """The values as a tensor on the device.

    From pageable memory a copy to a GPU would make the caller wait until the GPU has come to it, and with it for all
    that was launched before. From pinned memory it is only queued.
    """
    host = torch.as_tensor(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
