"""Weights within a node: the sender's memory is mapped by the receivers."""

import mmap
import os
import uuid
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from corral.recipe.errors import RunError, UserError
from corral.runtime.transfer.base import BUCKET_BYTES, Bucket, Layout, SentBucket, TransferHandle, pack, unpack


class IpcChannel:
    """On a GPU, buckets in its memory, taken for each transfer. Else files in memory, kept from one transfer to the
    next, since to take memory from the system costs more than to fill it; they have no name in any folder, and so are
    gone with the sender's process, however it ends."""

    def __init__(self, device: torch.device, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.device, self.bucket_bytes = device, bucket_bytes
        self.in_use: list[DeviceMemory | MemoryFile] = []
        self.idle: list[MemoryFile] = []

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> TransferHandle:
        self.release()
        sent = []
        for places, _ in pack(weights, self.bucket_bytes, self._allocate):
            sent.append(SentBucket(places, self.in_use[-1].handle()))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tuple(sent)

    def _allocate(self, size: int) -> Tensor:
        if self.device.type == "cuda":
            self.in_use.append(DeviceMemory(size, self.device))
        else:
            fitting = next((file for file in self.idle if len(file.content) == size), None)
            if fitting is not None:
                self.idle.remove(fitting)
            self.in_use.append(fitting or MemoryFile(size))
        return self.in_use[-1].content

    def receive(self, parcel: TransferHandle, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        assert parcel is not None
        return unpack(self._arriving(parcel), layout)

    def _arriving(self, parcel: tuple[SentBucket, ...]) -> Generator[Bucket]:
        for bucket in parcel:
            yield Bucket(bucket.places, bucket.handle.open())
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # copied, before the sender may take the memory back

    def release(self) -> None:
        self.idle += [memory for memory in self.in_use if isinstance(memory, MemoryFile)]
        self.in_use.clear()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self.release()
        for file in self.idle:
            file.close()
        self.idle.clear()


class MemoryFile:
    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("cluster.transfer: `ipc` between CPU processes needs Linux; set it to `collective`")
        self.file = os.memfd_create(f"corral-{uuid.uuid4().hex}")
        os.ftruncate(self.file, size)
        self.content = mapped(self.file)

    def handle(self) -> "FileHandle":
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        return FileHandle(path, os.readlink(path))

    def close(self) -> None:
        os.close(self.file)


@dataclass(frozen=True)
class FileHandle:
    path: str
    """Of an open file of another process, of this node and user."""
    target: str
    """What the path leads to: when the sender has closed the file it may lead to another."""

    def open(self) -> Tensor:
        try:
            file = os.open(self.path, os.O_RDWR)
        except OSError as error:
            raise RunError(f"the weights' memory is gone; their sender died, or closed it: {error}") from error
        try:
            if os.readlink(f"/proc/self/fd/{file}") != self.target:
                raise RunError("the weights' memory is gone; their sender closed it before it was read")
            return mapped(file)
        finally:
            os.close(file)


def mapped(file: int) -> Tensor:
    """A file's content. It stays when the file is closed."""
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)


class DeviceMemory:
    def __init__(self, size: int, device: torch.device) -> None:
        self.content = torch.empty(size, dtype=torch.uint8, device=device)

    def handle(self) -> "DeviceHandle":
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(self.content)
        return DeviceHandle(device_uuid(arguments[DeviceHandle.DEVICE]), arguments)


@dataclass(frozen=True)
class DeviceHandle:
    device: str
    """The sender's. Processes may number the devices of a node differently."""
    arguments: tuple[Any, ...]
    """Of `rebuild_cuda_tensor`."""
    DEVICE: ClassVar[int] = 6
    """Which of them is the device's number."""

    def open(self) -> Tensor:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        visible = [device_uuid(index) for index in range(torch.cuda.device_count())]
        if self.device not in visible:
            raise RunError(
                f"cluster.transfer: `ipc`: the engine's process does not see the trainer's device {self.device}; "
                "set it to `collective`"
            )
        arguments = list(self.arguments)
        arguments[self.DEVICE] = visible.index(self.device)
        tensor: Tensor = rebuild_cuda_tensor(*arguments)
        return tensor


def device_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
