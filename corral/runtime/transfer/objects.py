"""Weights through Ray's object store: to any node, without any connection of our own."""

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from corral.recipe.errors import RunError, UserError, first_line
from corral.runtime.transfer.base import (
    BUCKET_BYTES,
    Bucket,
    Layout,
    SentBucket,
    TransferHandle,
    pack,
    reused,
    unpack,
)


class ObjectChannel:
    def __init__(self, device: torch.device, *, timeout_s: float, bucket_bytes: int = BUCKET_BYTES) -> None:
        """`timeout_s`: for each bucket."""
        self.pinned, self.timeout_s, self.bucket_bytes = device.type == "cuda", timeout_s, bucket_bytes
        self.sent: tuple[SentBucket, ...] = ()
        """An object is there for as long as somebody refers to it."""

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> TransferHandle:
        ray = import_ray()
        buckets = pack(weights, self.bucket_bytes, reused(torch.device("cpu"), pinned=self.pinned))
        self.sent = tuple(SentBucket(places, ray.put(content.numpy())) for places, content in buckets)
        return self.sent

    def receive(self, parcel: TransferHandle, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        assert parcel is not None
        return unpack(self._arriving(parcel), layout)

    def _arriving(self, parcel: tuple[SentBucket, ...]) -> Generator[Bucket]:
        ray, allocate = import_ray(), reused(torch.device("cpu"), pinned=self.pinned)
        for index, bucket in enumerate(parcel):
            try:
                stored = ray.get(bucket.handle, timeout=self.timeout_s)
            except ray.exceptions.RayError as error:
                raise RunError(
                    f"bucket {index} of the weights did not come from Ray's object store within {self.timeout_s:g} s; "
                    f"its sender died, or the store is full: {first_line(error)}"
                ) from error
            content = allocate(len(stored))
            content.numpy()[:] = stored  # the store's own memory is read-only, which a tensor's is not
            yield Bucket(bucket.places, content)

    def release(self) -> None:
        self.sent = ()

    def close(self) -> None:
        self.release()


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError("cluster.transfer: `object` needs an extra: pip install 'corral[cluster]'") from error
    return ray
