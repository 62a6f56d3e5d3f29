"""Named tensors to and from a safetensors file, flushed to disk before they count."""

import os
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = load_file(path)
    return loaded


def fsync(path: Path) -> None:
    """Of a file or a folder: what it says has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
