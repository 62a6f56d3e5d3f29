"""The seam of a channel, and the buckets that all of them fill and empty."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from corral.recipe.errors import RunError

BUCKET_BYTES = 256 * 2**20
"""Large enough that a bucket costs what its bytes cost, small beside a model."""
ALIGNMENT = 16
"""Bytes. Where a tensor may start in its bucket, so that it can be used in place."""

Layout = Sequence[tuple[str, torch.Size, torch.dtype]]
"""What a model consists of, in the order of `named_parameters`."""


class Place(NamedTuple):
    """A tensor in a bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    """Bytes before it."""

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, content: Tensor) -> Tensor:
        return content[self.start : self.end].view(self.dtype).view(self.shape)


class Bucket(NamedTuple):
    places: tuple[Place, ...]
    content: Tensor
    """[bytes]. Valid until the next bucket is asked for."""


@dataclass(frozen=True)
class SentBucket:
    places: tuple[Place, ...]
    handle: Any
    """Where receivers find the content."""


TransferHandle = tuple[SentBucket, ...] | None
"""What the sender hands to the receivers, by way of the controller: small, none of the weights' bytes. None: those come
by themselves."""


class Channel(Protocol):
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> TransferHandle:
        """On the first trainer. The others only iterate, where it takes all of them to put a tensor together."""
        ...

    def receive(self, parcel: TransferHandle, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """A tensor is to be copied before the next one is asked for. Raises `RunError` when what arrives is not
        `layout`, or nothing does: then the receiver has a mixture of old and new."""
        ...

    def release(self) -> None:
        """On the sender: all receivers have it."""
        ...

    def close(self) -> None: ...


def layout_of(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()]


Allocate = Callable[[int], Tensor]
"""Memory for so many bytes."""


def pack(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, allocate: Allocate) -> Iterator[Bucket]:
    """A bucket is what fits into `bucket_bytes`, or a single tensor that does not. A tensor is copied as it comes, so
    that only one is alive beside the bucket."""
    places: list[Place] = []
    content, used = torch.empty(0), 0
    for name, tensor in weights:
        if places and used + tensor.nbytes > bucket_bytes:
            yield Bucket(tuple(places), content[: places[-1].end])
            places, used = [], 0
        if not places:
            content = allocate(max(bucket_bytes, tensor.nbytes))
        places.append(Place(name, tensor.shape, tensor.dtype, used))
        places[-1].view(content).copy_(tensor.detach())
        used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if places:
        yield Bucket(tuple(places), content[: places[-1].end])


def unpack(buckets: Generator[Bucket], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The tensors, so long as they are those of `layout`."""
    expected = iter(layout)
    with closing(buckets):
        for places, content in buckets:
            for place in places:
                check(place, next(expected, None))
                yield place.name, place.view(content)
        check(None, next(expected, None))


def check(sent: Place | None, own: tuple[str, torch.Size, torch.dtype] | None) -> None:
    if (None if sent is None else sent[:3]) != own:
        raise RunError(
            f"the trainer sends {describe(sent)} where the engine's model has {describe(own)}: "
            "they do not have the same model"
        )


def describe(tensor: Sequence[Any] | None) -> str:
    if tensor is None:
        return "nothing more"
    name, shape, dtype = tensor[:3]
    return f"{name} [{', '.join(map(str, shape))}] in {str(dtype).removeprefix('torch.')}"


def reused(device: torch.device, *, pinned: bool = False) -> Allocate:
    """One piece of memory for bucket after bucket. A GPU copies from and to `pinned` memory without a detour."""
    memory = torch.empty(0, dtype=torch.uint8)

    def allocate(size: int) -> Tensor:
        nonlocal memory
        if len(memory) < size:
            memory = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        return memory[:size]

    return allocate
