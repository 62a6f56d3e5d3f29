"""How many ways a model is split: the sizes of `train.parallel` for a number of devices."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from corral.recipe.errors import RecipeError
from corral.recipe.schema import Parallel


@dataclass(frozen=True)
class MeshShape:
    """Ranks are numbered with `tensor` fastest, then context, expert, shard, replicate and pipeline: the stages of a
    pipeline exchange the least, and are the first to be on different nodes."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.pipeline * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks that have the same layers."""
        return self.replicate * self.shard * self.expert * self.context * self.tensor

    @property
    def num_data(self) -> int:
        """Number of shards of a batch. Ranks that differ only in pipeline, context and tensor work on the same one."""
        return self.replicate * self.shard * self.expert

    def data_rank(self, rank: int) -> int:
        return rank % self.stage_size // (self.context * self.tensor)

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all parameters."""
        return self.pipeline == self.shard == self.expert == self.context == self.tensor == 1

    @property
    def copy(self) -> "MeshShape":
        """Shape of the ranks that hold one copy of the model together."""
        return replace(self, replicate=1)

    @property
    def num_communicators(self) -> int:
        """Number of connections of NCCL's that a rank has: for each dimension, for sharded parameters and experts where
        these are not all of its copy, for the copy, in each direction to two neighbors, and to other copies."""
        dimensions = [self.pipeline, self.shard, self.expert, self.context, self.tensor]
        sharded = [self.shard * self.expert * self.context, self.shard * self.context * (self.expert > 1)]
        smaller = sum(1 < size < self.copy.size for size in dimensions + sharded)
        return smaller + (self.copy.size > 1) + 4 * (self.pipeline > 1) + (self.replicate > 1)

    def place_in_copies(self, rank: int) -> tuple[int, int]:
        """Returns of which copy of the model a rank holds a part, and its rank among those that hold that copy."""
        stage, in_stage = divmod(rank, self.stage_size)
        copy, rest = divmod(in_stage, self.copy.stage_size)
        return copy, stage * self.copy.stage_size + rest

    def ranks_of_copy(self, copy: int) -> list[int]:
        return [rank for rank in range(self.size) if self.place_in_copies(rank)[0] == copy]

    def bubble(self, num_micro_batches: int) -> float:
        """Part of an update's time in which a pipeline stage waits for others, (p - 1) / (m + p - 1): each of m
        micro-batches takes one of as many turns, and p - 1 more pass until it has gone through p stages."""
        return (self.pipeline - 1) / (num_micro_batches + self.pipeline - 1)


def mesh_shape(parallel: Parallel, num_devices: int, role: str = "actor") -> MeshShape:
    names = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
    sizes = {name: getattr(parallel, name) for name in names}
    fixed = math.prod(size for name, size in sizes.items() if name != "shard")
    shard = num_devices // fixed if parallel.shard is None else parallel.shard
    if fixed * shard != num_devices:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, None)) or "shard 1"
        many = math.prod(size for size in sizes.values() if size is not None)
        verb = "does not divide" if parallel.shard is None else "is not"
        devices = f"{num_devices} device{'s' * (num_devices > 1)}"
        without_shard = fixed // parallel.replicate
        remedies = [] if num_devices % fixed else [f"`shard: {num_devices // fixed}`"]
        if parallel.shard is not None and num_devices % (without_shard * parallel.shard) == 0:
            remedies.append(f"`replicate: {num_devices // (without_shard * parallel.shard)}`")
        hint = f"; {' or '.join(remedies)} would be" if remedies else ""
        raise RecipeError(f"`train.parallel`: {product} = {many} {verb} the {devices} of {role}{hint}")
    return MeshShape(**{**sizes, "shard": shard})


def deal_layers(sizes: Sequence[int], first: int, last: int, num_stages: int) -> list[range]:
    """The layers of each pipeline stage: consecutive ones, at least one, and the largest stage as small as it can be.
    `sizes`: parameters of each layer; `first`, `last`: those that the first and the last stage have besides."""
    if num_stages > len(sizes):
        raise RecipeError(
            f"`train.parallel.pipeline`: {num_stages} stages for {len(sizes)} layers; a stage has one layer at least"
        )
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    # best[end] is (largest stage, sum of squares, where each stage begins) of the first `end` layers in so many stages.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for stage in range(num_stages):
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        found: dict[int, tuple[int, int, list[int]]] = {}
        for start, (largest, squares, starts) in best.items():
            for end in range(start + 1, len(sizes) + 1):
                cost = ends[end] - ends[start] + extra
                candidate = (max(largest, cost), squares + cost**2, [*starts, start])
                found[end] = min(found.get(end, candidate), candidate)
        best = found
    starts = [*best[len(sizes)][2], len(sizes)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def other_ranks_of_token(num_experts: int, experts_per_token: int, size: int) -> float:
    """Mean number of the other ranks of an expert group that have an expert of a token, where each choice of experts is
    as likely as any other."""
    elsewhere = math.comb(num_experts - num_experts // size, experts_per_token)
    return (size - 1) * (1 - elsewhere / math.comb(num_experts, experts_per_token))


def moves_by_all_to_all(num_experts: int, experts_per_token: int, size: int) -> bool:
    """Whether tokens reach their experts by an all-to-all, and not by gathering all tokens on all ranks of the group.

    An all-to-all moves a token to `other_ranks_of_token`, a gather to all of the other ranks. But ranks first exchange
    how many rows they send, and the host waits for these counts in each layer, so an all-to-all has to save at least a
    fifth of the bytes. The rule has no number of tokens in it: all ranks have to come to the same answer.
    """
    return other_ranks_of_token(num_experts, experts_per_token, size) <= 0.8 * (size - 1)
