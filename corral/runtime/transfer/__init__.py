"""How new weights travel from the trainers to engines in other processes.

The sender iterates over full tensors, one at a time, and lays them one behind the other into buckets of bytes, each
tensor in the data type that it has. What a bucket holds travels with it, and a receiver checks it against its own
model. Channels differ in how a bucket's bytes get across:

| channel | bytes go | held meanwhile |
| --- | --- | --- |
| `CollectiveChannel` | by broadcast (NCCL, gloo), while both sides run | a bucket on each side |
| `ObjectChannel` | through Ray's object store, to any node | until `release`, the model in the object store |
| `IpcChannel` | through memory that two processes of a node map | until `release` (CPU: `close`), a copy of the model |

Which version the weights are, and who may use them when, is the caller's business. Within one process nothing travels.
"""

import torch

from corral.runtime.transfer.base import BUCKET_BYTES, Channel, Layout, TransferHandle, layout_of
from corral.runtime.transfer.collective import CollectiveChannel
from corral.runtime.transfer.ipc import IpcChannel
from corral.runtime.transfer.objects import ObjectChannel

__all__ = [
    "BUCKET_BYTES",
    "Channel",
    "CollectiveChannel",
    "IpcChannel",
    "Layout",
    "ObjectChannel",
    "TransferHandle",
    "layout_of",
    "make_channel",
]


TIMEOUT_S = 120.0
"""For both sides to join, and for any one bucket."""


def make_channel(kind: str, address: str, device: torch.device) -> Channel:
    """One end. `address`: of this node, as the others reach it."""
    match kind:
        case "collective":
            return CollectiveChannel(address, device, timeout_s=TIMEOUT_S)
        case "object":
            return ObjectChannel(device, timeout_s=TIMEOUT_S)
        case "ipc":
            return IpcChannel(device)
    raise ValueError(f"there is no way {kind} for weights to travel")
