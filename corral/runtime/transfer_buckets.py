"""The buckets of bytes in which weights travel, whatever the channel: tensors laid one behind the other."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corral.recipe.errors import RunError
from corral.rollout.engine import WeightLayout

BUCKET_BYTES = 256 * 2**20
"""Size of a bucket: large enough that it costs what its bytes cost, small beside a model."""
ALIGNMENT = 16
"""Bytes to a multiple of which a tensor starts in its bucket, so that it can be used in place."""

Allocate = Callable[[int], Tensor]
"""Function that returns memory for so many bytes."""


class TensorPlace(NamedTuple):
    """A tensor in a bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    """Offset of its first byte in the bucket."""

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, content: Tensor) -> Tensor:
        return content[self.start : self.end].view(self.dtype).view(self.shape)


class Bucket(NamedTuple):
    """Tensors and their bytes."""

    places: tuple[TensorPlace, ...]
    content: Tensor
    """[bytes]. Valid until the next bucket is asked for."""


@dataclass(frozen=True)
class SentBucket:
    """A bucket on its way."""

    places: tuple[TensorPlace, ...]
    reference: Any
    """Where receivers find the content."""


TransferHandle = tuple[SentBucket, ...] | None
"""What the sender hands to the receivers, by way of the controller: small, none of the weights' bytes. None: those come
by themselves."""


def pack(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, allocate: Allocate) -> Iterator[Bucket]:
    """Fills buckets, each with what fits into `bucket_bytes`, or with a single tensor that does not. A tensor is copied
    as it comes, so that only one is alive beside the bucket."""
    places: list[TensorPlace] = []
    content, used = torch.empty(0), 0
    for name, tensor in weights:
        if places and used + tensor.nbytes > bucket_bytes:
            yield Bucket(tuple(places), content[: places[-1].end])
            places, used = [], 0
        if not places:
            content = allocate(max(bucket_bytes, tensor.nbytes))
        places.append(TensorPlace(name, tensor.shape, tensor.dtype, used))
        places[-1].view(content).copy_(tensor.detach())
        used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if places:
        yield Bucket(tuple(places), content[: places[-1].end])


def unpack(buckets: Generator[Bucket], layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, so long as they are those of `layout`."""
    expected = iter(layout)
    with closing(buckets):
        for places, content in buckets:
            for place in places:
                check_tensor(place, next(expected, None))
                yield place.name, place.view(content)
        check_tensor(None, next(expected, None))


def check_tensor(sent: TensorPlace | None, own: tuple[str, torch.Size, torch.dtype] | None) -> None:
    if (None if sent is None else sent[:3]) != own:
        raise RunError(
            f"the trainer sends {describe_tensor(sent)} where the engine's model has {describe_tensor(own)}: "
            "they do not have the same model"
        )


def describe_tensor(tensor: Sequence[Any] | None) -> str:
    if tensor is None:
        return "nothing more"
    name, shape, dtype = tensor[:3]
    return f"{name} [{', '.join(map(str, shape))}] in {str(dtype).removeprefix('torch.')}"


def reused_memory(device: torch.device, *, pinned: bool = False) -> Allocate:
    """Returns the same memory for bucket after bucket. A GPU copies from and to `pinned` memory without a detour."""
    memory = torch.empty(0, dtype=torch.uint8)

    def allocate(size: int) -> Tensor:
        nonlocal memory
        if len(memory) < size:
            memory = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        return memory[:size]

    return allocate
