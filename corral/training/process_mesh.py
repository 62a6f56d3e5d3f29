"""The processes that train one model together, and their process groups.

A mesh of one process has no groups and never touches `torch.distributed`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from corral.recipe.mesh import MeshShape
from corral.training.replicas import ReplicaLost, Replicas

DIMENSIONS = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
Result = TypeVar("Result")
BUCKET = 2**25
"""Number of elements that are reduced in one collective call: few large ones are faster than many small ones."""


class ProcessMesh:
    """This process' position in the mesh. `torch.distributed` is initialized by the caller, with the processes of one
    copy of the model (or of all, which has no use but to build meshes of several shapes in one world)."""

    def __init__(self, shape: MeshShape, device: torch.device, rank: int, replicas: Replicas | None = None) -> None:
        self.shape, self.device, self.rank, self.replicas = shape, device, rank, replicas
        self.gradient_dtype = torch.float32
        """In which gradients are summed over devices."""
        self.groups: dict[str, dist.ProcessGroup] = {}
        """Groups by dimension, of those with more than one rank. Besides, where the model is sharded, `copy`: all ranks
        that hold one copy; `sharded`: those of them that hold the parts of one parameter; and with experts
        `expert_sharded`: those that hold the parts of the same experts."""
        self.gradients: dist.ProcessGroup | None = None
        """The group `pipeline` once more, for what goes from its end to its beginning."""
        self.dense: Any = None
        """DeviceMesh over which a parameter is sharded. Replicas are not in it: FSDP would sum gradients over them in
        every micro-batch, and `sum_gradients` does it once for an update."""
        self.by_expert: Any = None
        """The same for the parameters of experts, which are distributed over the expert group already."""

    @classmethod
    def build(
        cls,
        shape: MeshShape,
        device: torch.device,
        timeout_s: float | None = None,
        replicas: Replicas | None = None,
    ) -> "ProcessMesh":
        """`timeout_s`: limit of its collectives; None: torch's own. `replicas`: the connection to the other copies."""
        assert shape.replicate == (1 if replicas is None else replicas.num_copies), "the copies are connected"
        own_copy = 0 if replicas is None else replicas.copy
        position = 0
        if shape.copy.size > 1:
            assert dist.get_world_size() in (shape.size, shape.copy.size), "one process for each position in the mesh"
            position = dist.get_rank()
            if dist.get_world_size() == shape.size:
                own_copy, position = shape.place_in_copies(position)
        mesh = cls(shape, device, shape.ranks_of_copy(own_copy)[position], replicas)
        if shape.copy.size > 1:
            mesh._connect(None if timeout_s is None else timedelta(seconds=timeout_s))
        return mesh

    def _connect(self, timeout: timedelta | None) -> None:
        """Creates the groups, in the same order on all ranks, as `torch.distributed` demands, and connects them: NCCL
        would do it in the first call, when engines and caching allocators have the memory that it takes."""
        for name in DIMENSIONS:
            if name != "replicate" and getattr(self.shape, name) > 1:
                self.groups[name] = self._group([name], timeout)
        if self.is_sharded:
            self.groups["copy"] = self._group([name for name in DIMENSIONS if name != "replicate"], timeout)
            self.groups["sharded"] = self._group(["shard", "expert", "context"], timeout)
            self.dense = self._device_mesh("sharded")
        if "expert" in self.groups:
            self.groups["expert_sharded"] = self._group(["shard", "context"], timeout)
            self.by_expert = self._device_mesh("expert_sharded")
        if "pipeline" in self.groups:
            self.gradients = self._new_group(["pipeline"], timeout)
        for name in self.groups:
            self.max(0, name)

    def _ranks(self, dimensions: Sequence[str]) -> Tensor:
        """[all else, these dimensions], ranks of the world"""
        world = self.shape if dist.get_world_size() == self.shape.size else self.shape.copy
        ranks = torch.arange(world.size).reshape([getattr(world, name) for name in DIMENSIONS])
        moved = ranks.movedim([DIMENSIONS.index(name) for name in dimensions], list(range(-len(dimensions), 0)))
        return moved.reshape(-1, math.prod(getattr(self.shape, name) for name in dimensions))

    def _group(self, dimensions: Sequence[str], timeout: timedelta | None) -> dist.ProcessGroup:
        """The group of this rank and those that differ from it in these dimensions only."""
        if len(self._ranks(dimensions)) == 1 and dist.group.WORLD is not None:
            return dist.group.WORLD
        return self._new_group(dimensions, timeout)

    def _new_group(self, dimensions: Sequence[str], timeout: timedelta | None) -> dist.ProcessGroup:
        ranks: list[list[int]] = self._ranks(dimensions).tolist()
        group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(ranks, timeout)[0]
        return group

    def _device_mesh(self, group: str) -> Any:
        """A DeviceMesh for FSDP over a group that exists: one made anew would open more connections."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.groups[group], self.device.type, mesh_dim_names=(group,))

    @property
    def is_sharded(self) -> bool:
        """Whether a device holds less than all parameters, so that a forward pass needs the other ranks."""
        return not self.shape.is_whole

    def size_of(self, dimension: str) -> int:
        return self.groups[dimension].size() if dimension in self.groups else 1

    def rank_in(self, dimension: str) -> int:
        return self.groups[dimension].rank() if dimension in self.groups else 0

    def max(self, number: int, dimension: str = "copy") -> int:
        """The largest over the ranks that differ in one dimension only, or over all that hold one copy."""
        if dimension not in self.groups:
            return number
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.groups[dimension])
        return int(largest)

    def any(self, happened: bool) -> bool:
        """Whether it happened on any rank of any copy."""
        in_copy, replicas = self.max(int(happened)), self.replicas
        return bool(in_copy if replicas is None else self.agree(lambda: replicas.max(in_copy)))

    def agree(self, exchange: Callable[[], Result]) -> Result:
        """Returns what an exchange with the other copies returns, or raises `ReplicaLost` on all ranks of this copy:
        one that went on alone would wait for the others in the next collective, or update weights that they do not."""
        error: ReplicaLost | None = None
        try:
            result = exchange()
        except ReplicaLost as lost:
            error = lost
        if self.max(int(error is not None)):
            raise error or ReplicaLost("another rank of this copy of the model has lost its replica")
        return result

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the end of the model, and with it log-probs, values and losses."""
        return self.rank_in("pipeline") == self.size_of("pipeline") - 1

    def sum_numbers(self, numbers: Tensor, dimension: str) -> Tensor:
        """[numbers] in float64, summed over the ranks of a dimension."""
        if dimension in self.groups:
            numbers = numbers.to(self.device)
            dist.all_reduce(numbers, group=self.groups[dimension])
        return numbers.cpu()

    def sum_(self, tensors: Iterable[Tensor], dimension: str) -> None:
        """Each tensor becomes its sum over the ranks of a dimension."""
        self._in_buckets(tensors, dimension, lambda flat, group: dist.all_reduce(flat, group=group))

    def sum_over_copies_(self, tensors: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> None:
        """Each tensor becomes its sum over all copies of the model. `dtype`: in which they travel and are summed."""
        if (replicas := self.replicas) is not None:
            self._reduce(tensors, replicas.sum_, dtype)

    def copy_from_(self, tensors: Iterable[Tensor], copy: int) -> None:
        """Each tensor becomes that of another copy of the model."""
        if (replicas := self.replicas) is not None:
            self._reduce(tensors, lambda flat: replicas.copy_from(flat, copy))

    def sum_ends_(self, tensors: Iterable[Tensor], dimension: str) -> None:
        """Each tensor becomes the sum of those of the dimension's first and last rank, which are the ones to call it:
        a + b and b + a are the same to the last bit."""
        other = self.size_of(dimension) - 1 - self.rank_in(dimension)

        def add_other(flat: Tensor, group: dist.ProcessGroup) -> None:
            received = torch.empty_like(flat)
            # In one call: one after the other, two ranks that send to each other would wait forever.
            ends = [(dist.isend, flat), (dist.irecv, received)]
            for work in dist.batch_isend_irecv([dist.P2POp(*end, group=group, group_peer=other) for end in ends]):
                work.wait()
            flat += received

        self._in_buckets(tensors, dimension, add_other)

    def copy_first_(self, tensors: Iterable[Tensor], dimension: str) -> None:
        """Each tensor becomes that of the dimension's first rank."""
        self._in_buckets(tensors, dimension, lambda flat, group: dist.broadcast(flat, group=group, group_src=0))

    def merged(self, own: dict[str, Any], dimension: str) -> dict[str, Any]:
        """The entries of all ranks of a dimension."""
        if dimension not in self.groups:
            return own
        gathered: list[Any] = [None] * self.size_of(dimension)
        dist.all_gather_object(gathered, own, group=self.groups[dimension])
        return {name: value for entries in gathered for name, value in entries.items()}

    def _in_buckets(
        self, tensors: Iterable[Tensor], dimension: str, collective: Callable[[Tensor, dist.ProcessGroup], Any]
    ) -> None:
        if dimension in self.groups:
            self._reduce(tensors, lambda flat: collective(flat, self.groups[dimension]))

    def _reduce(
        self, tensors: Iterable[Tensor], collective: Callable[[Tensor], Any], dtype: torch.dtype | None = None
    ) -> None:
        """Runs a collective on many small tensors, joined into few large ones on the mesh's device, in place."""
        remaining = deque(tensors)
        while remaining:
            bucket = [remaining.popleft()]
            while remaining and sum(tensor.numel() for tensor in bucket) < BUCKET:
                bucket.append(remaining.popleft())
            flat = torch.cat([tensor.reshape(-1).to(self.device, dtype) for tensor in bucket])
            collective(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))
