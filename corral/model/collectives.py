"""Sums and gathers over a group of processes that autograd sees through.

`copied` and `summed` are the pair of tensor parallelism: what goes into a layer that is cut over the group, and what
comes out of it (Megatron-LM, Shoeybi et al. 2019, calls them f and g). `gathered` and `scattered` are the pair for
tokens that are dealt over the group. Each function is called by all ranks of its group, in the same order.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The new name and the one until torch 2.12."""


def copied(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor, which every rank has. Backward: each rank used it for a part of the result; the parts are summed."""
    compute: Any = _Copied.apply
    result: Tensor = compute(tensor, group)
    return result


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks. Backward: every rank has the whole gradient of the sum already."""
    compute: Any = _Summed.apply
    result: Tensor = compute(tensor, group)
    return result


def gathered(tensor: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """The ranks' tensors, of equal shapes, one behind the other. Backward: gradients of a rank's part are summed."""
    compute: Any = _Gathered.apply
    result: Tensor = compute(tensor.movedim(dim, 0), group)
    return result.movedim(0, dim)


def scattered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rank's own part, along the first dimension, of the sum over ranks. Backward: gradients are gathered."""
    compute: Any = _Scattered.apply
    result: Tensor = compute(tensor, group)
    return result


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Along the first dimension, without gradient."""
    result = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    ALL_GATHER(result, tensor.contiguous(), group=group)
    return result


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    REDUCE_SCATTER(result, tensor.contiguous(), group=group)
    return result


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], ctx.group), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradients[0], ctx.group), None


class _Scattered(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], ctx.group), None
