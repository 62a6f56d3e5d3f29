"""How many ways a model is split: the sizes of `train.parallel` for a number of devices."""

import math
from dataclasses import dataclass

from corral.recipe.errors import RecipeError
from corral.recipe.schema import Parallel


@dataclass(frozen=True)
class MeshShape:
    """Ranks are numbered with `tensor` fastest, then context, expert, shard and replicate."""

    replicate: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.expert * self.context * self.tensor

    @property
    def num_data(self) -> int:
        """Number of shards of a batch. Ranks that differ only in context and tensor work on the same one."""
        return self.replicate * self.shard * self.expert

    def data_rank(self, rank: int) -> int:
        return rank // (self.context * self.tensor)

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all parameters."""
        return self.shard == self.expert == self.context == self.tensor == 1


def mesh_shape(parallel: Parallel, num_devices: int, role: str = "actor") -> MeshShape:
    fixed = parallel.replicate * parallel.expert * parallel.context * parallel.tensor
    shard = num_devices // fixed if parallel.shard is None else parallel.shard
    if fixed * shard != num_devices:
        sizes = {name: getattr(parallel, name) for name in ("replicate", "shard", "expert", "context", "tensor")}
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, None)) or "shard 1"
        many = math.prod(size for size in sizes.values() if size is not None)
        verb = "does not divide" if parallel.shard is None else "is not"
        devices = f"{num_devices} device{'s' * (num_devices > 1)}"
        raise RecipeError(f"`train.parallel`: {product} = {many} {verb} the {devices} of {role}")
    return MeshShape(parallel.replicate, shard, parallel.expert, parallel.context, parallel.tensor)


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
