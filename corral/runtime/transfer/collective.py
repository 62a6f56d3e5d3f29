"""Weights by broadcast, over a process group that is no part of torch.distributed's world."""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from corral.recipe.errors import RunError, first_line
from corral.runtime.transfer.base import BUCKET_BYTES, Bucket, Layout, Place, TransferHandle, pack, reused, unpack


class CollectiveChannel:
    """First `open` on the sender, then `join` on all ends at once; rank 0 sends. `send` and `receive` run together.

    A receiver waits for a bucket at the store, and joins the broadcast when the bucket is there: waiting in a broadcast
    would keep its GPU busy while the trainers put tensors together. When something fails the channel closes, which
    makes the other ends fail as well; then new ones have to be made, among those that are left.
    """

    def __init__(
        self, address: str, device: torch.device, *, timeout_s: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`address`: of this node, as the others reach it. `timeout_s`: for all to join, and for each bucket."""
        self.address, self.device = address, device
        self.timeout, self.bucket_bytes = timedelta(seconds=timeout_s), bucket_bytes
        self.store: Any = None
        self.group: Any = None
        self.num_transfers = 0
        self.announced: list[str] = []
        """Keys in the store."""

    def open(self) -> str:
        """Where to join."""
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            self.address, 0, is_master=True, wait_for_workers=False, timeout=self.timeout
        )
        return f"{self.address}:{self.store.port}"

    def join(self, meeting: str, rank: int, size: int) -> None:
        """Returns when all are there."""
        try:
            if rank > 0:
                host, port = meeting.rsplit(":", 1)
                self.store = dist.TCPStore(  # type: ignore[attr-defined]
                    host, int(port), is_master=False, timeout=self.timeout
                )
            self.group = self._make_group(dist.PrefixStore("group", self.store), rank, size)  # type: ignore[attr-defined]
        except RuntimeError as error:
            self.close()
            raise self._failure(
                f"not all of {size} processes joined the weight transfer at {meeting}", error
            ) from error

    def _make_group(self, store: Any, rank: int, size: int) -> Any:
        if self.device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = self.timeout
            return dist.ProcessGroupNCCL(store, rank, size, nccl)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = self.timeout
        # Left to itself it takes the address that the host's name stands for, which other nodes may not reach.
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        return dist.ProcessGroupGloo(store, rank, size, gloo)

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> TransferHandle:
        self._begin()
        try:
            index = 0
            for places, content in pack(weights, self.bucket_bytes, reused(self.device)):
                self._announce(index, places)
                self._broadcast(content, f"bucket {index} of the weights did not reach all receivers")
                index += 1
            self._announce(index, ())
        except BaseException:
            self.close()
            raise
        return None

    def receive(self, parcel: TransferHandle, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        self._begin()
        return unpack(self._arriving(), layout)

    def _arriving(self) -> Generator[Bucket]:
        index, allocate, complete = 0, reused(self.device), False
        try:
            while places := self._await_bucket(index):
                content = allocate(places[-1].end)
                self._broadcast(content, f"bucket {index} of the weights did not arrive")
                yield Bucket(places, content)
                index += 1
            complete = True
        finally:
            if not complete:
                self.close()

    def _begin(self) -> None:
        if self.group is None:
            raise RunError("this end of the weight transfer has not joined, or was closed by an earlier failure")
        self.num_transfers += 1

    def _announce(self, index: int, places: tuple[Place, ...]) -> None:
        """Tells the receivers what is in a bucket; in the one behind the last there is nothing."""
        key = f"{self.num_transfers}/{index}"
        rows = [(name, list(shape), str(dtype).removeprefix("torch."), start) for name, shape, dtype, start in places]
        self.store.set(key, json.dumps(rows))
        self.announced.append(key)

    def _await_bucket(self, index: int) -> tuple[Place, ...]:
        try:
            rows = json.loads(self.store.get(f"{self.num_transfers}/{index}"))
        except RuntimeError as error:
            raise self._failure(f"bucket {index} of the weights did not arrive", error) from error
        return tuple(Place(name, torch.Size(shape), getattr(torch, dtype), start) for name, shape, dtype, start in rows)

    def _broadcast(self, content: Tensor, failed: str) -> None:
        try:
            self.group.broadcast(content, 0).wait(self.timeout)
        except RuntimeError as error:
            raise self._failure(failed, error) from error

    def _failure(self, what: str, error: RuntimeError) -> RunError:
        limit = self.timeout.total_seconds()
        return RunError(f"{what} within {limit:g} s; a process of the transfer died or hangs: {first_line(error)}")

    def release(self) -> None:
        for key in self.announced:
            self.store.delete_key(key)
        self.announced.clear()

    def close(self) -> None:
        if self.group is not None:
            with suppress(RuntimeError):  # what has failed may fail to end as well
                self.group.abort()
        self.group = self.store = None
        self.announced.clear()
