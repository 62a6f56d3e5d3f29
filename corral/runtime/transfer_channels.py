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

import json
import mmap
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from corral.recipe.errors import RunError, UserError, first_line
from corral.rollout.engine import WeightLayout

# --- the buckets of bytes in which weights travel, whatever the channel: tensors laid one behind the other


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


# --- channels


CHANNEL_TIMEOUT_S = 120.0
"""Seconds for both sides to join, and for any one bucket."""


class Channel(ABC):
    """One end of a way for weights. First `open` on the sender, then `join` on all ends at once, of which rank 0 sends.
    Channels that need no connection of their own have nothing to do for either."""

    def open(self) -> str:
        """Returns where the ends join."""
        return ""

    def join(self, rendezvous: str, rank: int, size: int) -> None:  # noqa: B027
        """Returns when all ends have joined."""

    @abstractmethod
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> TransferHandle:
        """Sends from the first trainer. The others only iterate, where it takes all of them to put a tensor
        together."""

    def receive(self, handle: TransferHandle, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors; each is to be copied before the next one is asked for. Raises `RunError` when what
        arrives is not `layout`, or nothing does: then the receiver has a mixture of old and new."""
        return unpack(self.arriving(handle or ()), layout)

    @abstractmethod
    def arriving(self, sent: tuple[SentBucket, ...]) -> Generator[Bucket]:
        """Yields the buckets as they arrive."""

    @abstractmethod
    def release(self) -> None:
        """Frees what the sender holds, once all receivers have it."""

    def close(self) -> None:
        self.release()


def make_channel(kind: str, address: str, device: torch.device) -> Channel:
    """Makes one end. `address`: of this node, as the others reach it."""
    match kind:
        case "collective":
            return CollectiveChannel(address, device, timeout_s=CHANNEL_TIMEOUT_S)
        case "object":
            return ObjectChannel(device, timeout_s=CHANNEL_TIMEOUT_S)
        case "ipc":
            return IpcChannel(device)
    raise ValueError(f"there is no transfer {kind}")


# --- by broadcast


class CollectiveChannel(Channel):
    """Weights by broadcast, over a process group that is no part of torch.distributed's world. `send` and `receive` run
    together.

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
        """Keys of the store, to be deleted when all receivers have read them."""

    def open(self) -> str:
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            self.address, 0, is_master=True, wait_for_workers=False, timeout=self.timeout
        )
        return f"{self.address}:{self.store.port}"

    def join(self, rendezvous: str, rank: int, size: int) -> None:
        try:
            if rank > 0:
                host, port = rendezvous.rsplit(":", 1)
                self.store = dist.TCPStore(  # type: ignore[attr-defined]
                    host, int(port), is_master=False, timeout=self.timeout
                )
            self.group = self._make_group(dist.PrefixStore("group", self.store), rank, size)  # type: ignore[attr-defined]
        except RuntimeError as error:
            self.close()
            raise self._failure(
                f"not all of {size} processes joined the weight transfer at {rendezvous}", error
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
            for places, content in pack(weights, self.bucket_bytes, reused_memory(self.device)):
                self._announce(index, places)
                self._broadcast(content, f"bucket {index} of the weights did not reach all receivers")
                index += 1
            self._announce(index, ())  # an empty bucket: that was the last one
        except BaseException:
            self.close()
            raise
        return None

    def arriving(self, sent: tuple[SentBucket, ...]) -> Generator[Bucket]:
        self._begin()
        index, allocate, complete = 0, reused_memory(self.device), False
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

    def _announce(self, index: int, places: tuple[TensorPlace, ...]) -> None:
        key = f"{self.num_transfers}/{index}"
        rows = [(name, list(shape), str(dtype).removeprefix("torch."), start) for name, shape, dtype, start in places]
        self.store.set(key, json.dumps(rows))
        self.announced.append(key)

    def _await_bucket(self, index: int) -> tuple[TensorPlace, ...]:
        try:
            rows = json.loads(self.store.get(f"{self.num_transfers}/{index}"))
        except RuntimeError as error:
            raise self._failure(f"bucket {index} of the weights did not arrive", error) from error
        return tuple(
            TensorPlace(name, torch.Size(shape), getattr(torch, dtype), start) for name, shape, dtype, start in rows
        )

    def _broadcast(self, content: Tensor, failed: str) -> None:
        try:
            self.group.broadcast(content, 0).wait(self.timeout)
        except RuntimeError as error:
            raise self._failure(failed, error) from error

    def _failure(self, what: str, error: RuntimeError) -> RunError:
        limit_s = self.timeout.total_seconds()
        return RunError(f"{what} within {limit_s:g} s; a process of the transfer died or hangs: {first_line(error)}")

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


# --- through Ray's object store


class ObjectChannel(Channel):
    """Weights through Ray's object store: to any node, without any connection of our own."""

    def __init__(self, device: torch.device, *, timeout_s: float, bucket_bytes: int = BUCKET_BYTES) -> None:
        """`timeout_s`: for each bucket."""
        self.pinned, self.timeout_s, self.bucket_bytes = device.type == "cuda", timeout_s, bucket_bytes
        self.sent: tuple[SentBucket, ...] = ()
        """What was sent: an object is in the store for as long as somebody refers to it."""

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> TransferHandle:
        ray = import_ray()
        buckets = pack(weights, self.bucket_bytes, reused_memory(torch.device("cpu"), pinned=self.pinned))
        self.sent = tuple(SentBucket(places, ray.put(content.numpy())) for places, content in buckets)
        return self.sent

    def arriving(self, sent: tuple[SentBucket, ...]) -> Generator[Bucket]:
        ray, allocate = import_ray(), reused_memory(torch.device("cpu"), pinned=self.pinned)
        for index, bucket in enumerate(sent):
            try:
                stored = ray.get(bucket.reference, timeout=self.timeout_s)
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


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError("cluster.transfer: `object` needs an extra: pip install 'corral[cluster]'") from error
    return ray


# --- through shared memory


class IpcChannel(Channel):
    """Weights within a node: the sender's memory is mapped by the receivers.

    On a GPU, buckets are allocated in its memory for each transfer. Else they are files in memory, kept from one
    transfer to the next, since to get memory from the system costs more than to fill it; they have no name in any
    folder, and so are gone with the sender's process, however it ends.
    """

    def __init__(self, device: torch.device, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.device, self.bucket_bytes = device, bucket_bytes
        self.in_use: list[IpcDeviceMemory | MemoryFile] = []
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
            self.in_use.append(IpcDeviceMemory(size, self.device))
        else:
            fitting = next((file for file in self.idle if len(file.content) == size), None)
            if fitting is not None:
                self.idle.remove(fitting)
            self.in_use.append(fitting or MemoryFile(size))
        return self.in_use[-1].content

    def arriving(self, sent: tuple[SentBucket, ...]) -> Generator[Bucket]:
        for bucket in sent:
            yield Bucket(bucket.places, bucket.reference.open())
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # copied, before the sender may use the memory again

    def release(self) -> None:
        self.idle += [memory for memory in self.in_use if isinstance(memory, MemoryFile)]
        self.in_use.clear()
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        self.release()
        for file in self.idle:
            os.close(file.file)
        self.idle.clear()


class MemoryFile:
    """A file in memory that another process of the same user can map."""

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("cluster.transfer: `ipc` between CPU processes needs Linux; set it to `collective`")
        self.file = os.memfd_create(f"corral-{uuid.uuid4().hex}")
        os.ftruncate(self.file, size)
        self.content = mapped(self.file)

    def handle(self) -> "FileHandle":
        path = f"/proc/{os.getpid()}/fd/{self.file}"
        return FileHandle(path, os.readlink(path))


@dataclass(frozen=True)
class FileHandle:
    """How another process finds a `MemoryFile`."""

    path: str
    """Path of an open file of another process, of this node and user."""
    target: str
    """What the path led to: when the sender has closed the file it may lead to another."""

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
    """Maps a file's content, which stays when the file is closed."""
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)


class IpcDeviceMemory:
    """Memory of a GPU that another process of the node can map."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.content = torch.empty(size, dtype=torch.uint8, device=device)

    def handle(self) -> "DeviceHandle":
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(self.content)
        return DeviceHandle(device_uuid(arguments[DeviceHandle.DEVICE]), arguments)


@dataclass(frozen=True)
class DeviceHandle:
    """How another process finds a `IpcDeviceMemory`."""

    device: str
    """UUID of the sender's device: processes may number the devices of a node differently."""
    arguments: tuple[Any, ...]
    """Arguments of `rebuild_cuda_tensor`."""
    DEVICE: ClassVar[int] = 6
    """Which of the arguments is the device's number."""

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
