"""How new weights travel from the trainers to engines in other processes.

The sender iterates over full tensors, one at a time, and lays them one behind the other into buckets of bytes, each
tensor in the data type that it has. What a bucket holds travels with it, and a receiver checks it against its own
model. Channels differ in how a bucket's bytes get across:

| channel | bytes go | held meanwhile |
| --- | --- | --- |
| `CollectiveChannel` | by broadcast (NCCL, gloo), while both sides run | two buckets or more on each side |
| `ObjectChannel` | through Ray's object store, to any node | until `release`, the model in the object store |
| `IpcChannel` | through memory that two processes of a node map | until `release` (CPU: `close`), a copy of the model |

Which version the weights are, and who may use them when, is the caller's business. Within one process nothing travels.
"""

import json
import mmap
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from corral.recipe.errors import RunError, UserError, first_line, install_command
from corral.rollout.engine import WeightLayout
from corral.runtime.network import open_store
from corral.training.replicas import make_group

# --- the buckets of bytes in which weights travel, whatever the channel: tensors laid one behind the other


BUCKET_BYTES = 256 * 2**20
"""Size of a bucket: large enough that it costs what its bytes cost, small beside a model."""
ALIGNMENT = 16
"""Bytes to a multiple of which a tensor starts in its bucket, so that it can be used in place."""

Allocate = Callable[[int], Tensor]
"""Function that returns memory for so many bytes."""


class TensorPlace(NamedTuple):
    """A tensor in a bucket, or one of the parts of a large one."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    """Offset of its first byte in the bucket."""
    part: tuple[int, int] | None = None
    """First number and number behind the last one. None: all of them."""

    @property
    def end(self) -> int:
        first, behind = self.part or (0, self.shape.numel())
        return self.start + (behind - first) * self.dtype.itemsize

    def view(self, content: Tensor) -> Tensor:
        """The tensor; of a part, its numbers in a row."""
        numbers = content[self.start : self.end].view(self.dtype)
        return numbers.view(self.shape) if self.part is None else numbers


class Bucket(NamedTuple):
    """Tensors and their bytes."""

    places: tuple[TensorPlace, ...]
    content: Tensor
    """[bytes]. Valid until the next bucket is asked for. Nothing in it where another sender's turn it is."""


@dataclass(frozen=True)
class SentBucket:
    """A bucket on its way."""

    places: tuple[TensorPlace, ...]
    reference: Any
    """Where receivers find the content."""


TransferHandle = tuple[SentBucket, ...] | None
"""What the sender hands to the receivers, by way of the controller: small, none of the weights' bytes. None: those come
by themselves."""


def pack(
    weights: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    allocate: Allocate,
    *,
    sender: int = 0,
    num_senders: int = 1,
    splits: bool = False,
) -> Iterator[Bucket]:
    """Fills buckets, each with what fits into `bucket_bytes`, or with a single tensor that does not, unless it `splits`
    these. A tensor is copied as it comes, so that only one is alive beside the bucket. Several senders, who see the
    same tensors, fill one bucket each in turn."""
    places: list[TensorPlace] = []
    nothing = torch.empty(0, dtype=torch.uint8)
    content, used, index = nothing, 0, 0
    parts = (
        (name, tensor, part)
        for name, tensor in weights
        for part in (parts_of(tensor, bucket_bytes) if splits and tensor.nbytes > bucket_bytes else [None])
    )
    for name, tensor, part in parts:
        num_bytes = tensor.nbytes if part is None else (part[1] - part[0]) * tensor.itemsize
        if places and used + num_bytes > bucket_bytes:
            yield Bucket(tuple(places), content[: places[-1].end])
            places, used, index = [], 0, index + 1
        is_own = index % num_senders == sender
        if not places:
            content = allocate(max(bucket_bytes, num_bytes)) if is_own else nothing
        places.append(TensorPlace(name, tensor.shape, tensor.dtype, used, part))
        if is_own:
            source = tensor.detach()
            places[-1].view(content).copy_(source if part is None else source.reshape(-1)[part[0] : part[1]])
        used += aligned(num_bytes)
    if places:
        yield Bucket(tuple(places), content[: places[-1].end])


def parts_of(tensor: Tensor, num_bytes: int) -> list[tuple[int, int]]:
    starts = range(0, tensor.numel(), max(1, num_bytes // tensor.itemsize))
    return [(start, min(start + starts.step, tensor.numel())) for start in starts]


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def sum_of_bits(content: Tensor) -> Tensor:
    """Returns the sum of a bucket's words, and of the bytes behind them. Nothing waits for the device."""
    words = content[: len(content) // 4 * 4].view(torch.int32)
    return words.sum(dtype=torch.int64) + content[len(words) * 4 :].sum(dtype=torch.int64)


def unpack(buckets: Generator[Bucket], layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors, so long as they are those of `layout`."""
    expected = iter(layout)
    whole = torch.empty(0)
    with closing(buckets):
        for places, content in buckets:
            for place in places:
                first, behind = place.part or (0, place.shape.numel())
                if first == 0:
                    check_tensor(place, next(expected, None))
                if place.part is None:
                    yield place.name, place.view(content)
                    continue
                if first == 0:
                    whole = torch.empty(place.shape, dtype=place.dtype, device=content.device)
                whole.view(-1)[first:behind] = place.view(content)
                if behind == whole.numel():
                    yield place.name, whole
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


def reused_memory(device: torch.device, *, num_buckets: int = 1, pinned: bool = False) -> Allocate:
    """Returns the same memory for every bucket, or for every `num_buckets`-th. A GPU copies from and to `pinned` memory
    without a detour."""
    memory = deque([torch.empty(0, dtype=torch.uint8)] * num_buckets)

    def allocate(size: int) -> Tensor:
        memory.rotate(-1)
        if len(memory[0]) < size:
            memory[0] = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        return memory[0][:size]

    return allocate


# --- channels


CLOSE_S = 5.0
"""Seconds to wait for connections to end; after that they end in the background."""
CHANNEL_TIMEOUT_S = 120.0
"""Seconds for both sides to join, and for any one bucket."""


class Channel(ABC):
    """One end of a way for weights. First `open` on the first sender, then `join` on all ends at once, of which the
    first ones send: several only through `CollectiveChannel`. Channels that need no connection of their own have
    nothing to do for either."""

    def open(self) -> str:
        """Returns where the ends join."""
        return ""

    def join(self, rendezvous: str, rank: int, size: int, num_senders: int = 1) -> None:  # noqa: B027
        """Returns when all ends have joined."""

    @abstractmethod
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> TransferHandle:
        """Sends from the trainers that are ends of the channel. The others only iterate, where it takes all of them to
        put a tensor together."""

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
    """Weights by broadcast, over process groups that are no part of torch.distributed's world. `send` and `receive` run
    together.

    Each sender has a group with all receivers, so that several nodes of trainers send at the same time, one bucket each
    in turn. The next bucket is put together while the last one travels, and arrives while the last one is copied into
    the model.

    A receiver waits for a bucket at the store, and joins the broadcast when the bucket is there: waiting in a broadcast
    would keep its GPU busy while the trainers put tensors together. All receivers join the broadcasts in the same
    order, whichever sender they come from: NCCL's groups on one GPU could otherwise wait for each other. When something
    fails the channel closes, which makes the other ends fail as well; then new ones have to be made, among those that
    are left.
    """

    def __init__(
        self, address: str, device: torch.device, *, timeout_s: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """`address`: of this node, as the others reach it. `timeout_s`: for all to join, and for each bucket."""
        self.address, self.device = address, device
        self.timeout, self.bucket_bytes = timedelta(seconds=timeout_s), bucket_bytes
        self.store: Any = None
        self.rank, self.num_senders = 0, 1
        self.groups: list[Any] = []
        """A sender's own; a receiver has one for each sender."""
        self.num_transfers = 0
        self.announced: list[str] = []
        """Keys of the store, to be deleted when all receivers have read them."""

    def open(self) -> str:
        self.store = open_store(self.address, self.timeout)
        return f"{self.address}:{self.store.port}"

    def join(self, rendezvous: str, rank: int, size: int, num_senders: int = 1) -> None:
        self.rank, self.num_senders = rank, num_senders
        own, senders = (0, [rank]) if rank < num_senders else (rank - num_senders + 1, list(range(num_senders)))
        try:
            with self._explaining(f"not all of {size} processes joined the weight transfer at {rendezvous}"):
                if rank > 0:
                    host, port = rendezvous.rsplit(":", 1)
                    self.store = dist.TCPStore(  # type: ignore[attr-defined]
                        host, int(port), is_master=False, timeout=self.timeout
                    )
                for sender in senders:
                    store = dist.PrefixStore(f"group {sender}", self.store)  # type: ignore[attr-defined]
                    group_size = size - num_senders + 1
                    group = make_group(store, own, group_size, self.device, self.address, self.timeout)
                    self.groups.append(group)
        except BaseException:
            self.close()
            raise

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> TransferHandle:
        self._begin()
        [group], travelling, num_buckets = self.groups, deque[tuple[str, Any]](), 0
        reused, memory = reused_memory(self.device, num_buckets=2), torch.empty(0)

        def allocate(size: int) -> Tensor:
            nonlocal memory
            memory = reused(aligned(size) + SUM_BYTES)
            return memory[:size]

        shares = {"sender": self.rank, "num_senders": self.num_senders}
        try:
            for places, content in pack(weights, self.bucket_bytes, allocate, **shares, splits=True):
                if num_buckets % self.num_senders == self.rank:
                    self._announce(num_buckets, places)
                    failed = f"bucket {num_buckets} of the weights did not reach all receivers"
                    sealed = memory[: aligned(len(content)) + SUM_BYTES]
                    sum_behind(sealed).copy_(sum_of_bits(content))
                    travelling.append((failed, self._broadcast(group, sealed, failed)))
                    if len(travelling) == 2:  # the next bucket is put together in the memory of the first
                        self._wait(*travelling.popleft())
                num_buckets += 1
            while travelling:
                self._wait(*travelling.popleft())
            if self.rank == 0:
                self._announce(num_buckets, ())  # an empty bucket: that was the last one
        except BaseException:
            self._announce_failure()
            self.close()
            raise
        return None

    def arriving(self, sent: tuple[SentBucket, ...]) -> Generator[Bucket]:
        self._begin()
        index, arriving, is_last = 0, deque[tuple[Bucket, Tensor, str, Any]](), False
        allocate = reused_memory(self.device, num_buckets=self.num_senders + 1)
        try:
            while not is_last or arriving:
                # A bucket of each sender arrives while another one is copied; but what has arrived is not kept waiting
                # for a bucket that is not there yet.
                while not is_last and len(arriving) <= self.num_senders and (not arriving or self._is_announced(index)):
                    failed = f"bucket {index} of the weights did not arrive"
                    if places := self._await_bucket(index, failed):
                        sealed = allocate(aligned(places[-1].end) + SUM_BYTES)
                        work = self._broadcast(self.groups[index % self.num_senders], sealed, failed)
                        arriving.append((Bucket(places, sealed[: places[-1].end]), sealed, failed, work))
                    index, is_last = index + 1, not places
                if arriving:
                    bucket, sealed, failed, work = arriving.popleft()
                    self._wait(failed, work)
                    yield bucket
                    # Read when the bucket is copied, before another one arrives in its memory.
                    if int(sum_of_bits(bucket.content) - sum_behind(sealed)[0]):
                        raise RunError(f"{failed} as it was sent: the sums of its bits differ")
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        if not self.groups:
            raise RunError("this end of the weight transfer has not joined, or was closed by an earlier failure")
        self.num_transfers += 1

    def _key(self, index: int) -> str:
        return f"{self.num_transfers}/{index}"

    def _announce(self, index: int, places: tuple[TensorPlace, ...] | None) -> None:
        """`places`: None when nothing comes."""
        rows = [
            (name, list(shape), str(dtype).removeprefix("torch."), start, part)
            for name, shape, dtype, start, part in places or ()
        ]
        self.store.set(self._key(index), json.dumps(None if places is None else rows))
        self.announced.append(self._key(index))

    def _announce_failure(self) -> None:
        """Ends the wait for the bucket that this sender does not send. The store, and with it every wait, ends only
        with the first sender."""
        with suppress(RuntimeError):
            self._announce(self.rank + self.num_senders * len(self.announced), None)

    def _is_announced(self, index: int) -> bool:
        return bool(self.store.check([self._key(index)]))

    def _await_bucket(self, index: int, failed: str) -> tuple[TensorPlace, ...]:
        with self._explaining(failed):
            rows = json.loads(self.store.get(self._key(index)))
        if rows is None:
            raise RunError(f"{failed}: its sender failed")
        return tuple(
            TensorPlace(name, torch.Size(shape), getattr(torch, dtype), start, part and (part[0], part[1]))
            for name, shape, dtype, start, part in rows
        )

    def _broadcast(self, group: Any, content: Tensor, failed: str) -> Any:
        with self._explaining(failed):
            return group.broadcast(content, 0)

    def _wait(self, failed: str, work: Any) -> None:
        with self._explaining(failed):
            work.wait(self.timeout)

    @contextmanager
    def _explaining(self, failed: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            limit_s = self.timeout.total_seconds()
            raise RunError(
                f"{failed} within {limit_s:g} s; a process of the transfer died or hangs: {first_line(error)}"
            ) from error

    def release(self) -> None:
        for key in self.announced:
            self.store.delete_key(key)
        self.announced.clear()

    def close(self) -> None:
        # Of NCCL, ending a group in which something has failed may take a minute, and so may its destructor.
        ending = threading.Thread(target=end_groups, args=(self.groups,), name="corral-channel", daemon=True)
        self.groups, self.store = [], None
        ending.start()
        ending.join(CLOSE_S)
        self.announced.clear()


def end_groups(groups: list[Any]) -> None:
    while groups:
        with suppress(RuntimeError):  # what has failed may fail to end as well
            groups.pop().abort()


SUM_BYTES = 8
"""Bytes behind a bucket that is broadcast: the sum of its bits."""


def sum_behind(sealed: Tensor) -> Tensor:
    return sealed[-SUM_BYTES:].view(torch.int64)


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
        raise UserError(f"cluster.transfer: `object` needs an extra: {install_command('cluster')}") from error
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
