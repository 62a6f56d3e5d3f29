"""Where the parts of each parameter are: which part this rank holds of it, and how a whole one is put together."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from corral.model.model_parallel import ShardSpec, all_gather
from corral.train.mesh import Mesh


@dataclass(frozen=True)
class Spread:
    """How one parameter is spread over a mesh."""

    shape: torch.Size
    """Of the whole parameter."""
    dtype: torch.dtype
    """In which the model computes, and in which it is saved."""
    cut: ShardSpec | None = None
    """Over the tensor group; None: each of its ranks has all of it."""
    is_partial: bool = False
    """Not cut, but each rank of the tensor group sees a part of its gradient."""
    by_expert: bool = False
    """The first dimension is dealt over the expert group."""


class Layout:
    def __init__(self, mesh: Mesh, spreads: dict[str, Spread]) -> None:
        self.mesh, self.spreads = mesh, spreads

    def whole(self, name: str, local: Tensor) -> Tensor:
        """From the parts that all ranks call this with. Where nothing is sharded, the very tensor."""
        spread, mesh = self.spreads[name], self.mesh
        if not mesh.is_sharded:
            return local
        part = self._gather_shards(spread, local.to(mesh.device))
        if spread.cut is not None:
            parts = all_gather(part[None], mesh.groups["tensor"])
            part = spread.cut.join(list(parts))
        if spread.by_expert:
            part = all_gather(part, mesh.groups["expert"])
        return part

    def weight(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The whole parameter, in the model's dtype."""
        return self.whole(name, local_tensor(parameter).to(self.spreads[name].dtype))

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        spread, mesh = self.spreads[name], self.mesh
        if not mesh.is_sharded:
            return whole
        part, group = self._block(spread, whole), self._shard_group(spread)
        rows = -(-len(part) // group.size())
        return part[group.rank() * rows : (group.rank() + 1) * rows]

    def _block(self, spread: Spread, whole: Tensor) -> Tensor:
        """What the ranks over which it is sharded hold together."""
        if spread.by_expert:
            whole = whole.chunk(self.mesh.size_of("expert"))[self.mesh.rank_in("expert")]
        if spread.cut is not None:
            whole = spread.cut.shard(whole, self.mesh.rank_in("tensor"), self.mesh.size_of("tensor"))
        return whole

    def _gather_shards(self, spread: Spread, local: Tensor) -> Tensor:
        """FSDP shards the first dimension into parts of equal length, of which the last may be shorter or empty."""
        group = self._shard_group(spread)
        block = self._block(spread, torch.empty(spread.shape, device="meta"))
        rows = -(-len(block) // group.size())
        padded = F.pad(local, [0, 0] * (local.dim() - 1) + [0, rows - len(local)])
        return all_gather(padded, group)[: len(block)]

    def _shard_group(self, spread: Spread) -> dist.ProcessGroup:
        return self.mesh.groups["expert_sharded" if spread.by_expert else "sharded"]


def local_tensor(parameter: nn.Parameter | Tensor) -> Tensor:
    """What this rank holds of a parameter, sharded or not; the memory is shared."""
    from torch.distributed.tensor import DTensor

    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
