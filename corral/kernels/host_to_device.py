"""Copies between the host and the device that nobody waits for."""

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)


def on_device(values: Tensor | NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """The values as a tensor on the device.

    From pageable memory a copy to a GPU would make the caller wait until the GPU has come to it, and with it for all
    that was launched before. From pinned memory it is only queued.
    """
    host = torch.as_tensor(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def pinned_buffer(num_bytes: int, pin: bool = True) -> Tensor:
    """Memory of the host that a GPU copies from and to by itself.

    torch's own pinned memory comes in powers of two, which for the optimizer's states of a large model would be nearly
    twice as much as they need. Where the system does not allow so much to be pinned, copies are slower, and no less
    right.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if pin and num_bytes:
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)) == 0:
            weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
        else:
            logger.warning("%.0f GiB of memory cannot be pinned: optimizer states come slowly", num_bytes / 2**30)
            with suppress(RuntimeError):  # the error would be reported by whatever is launched next
                torch.zeros(1, device="cuda")
    return memory
