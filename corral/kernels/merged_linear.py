"""One matrix product for projections of the same input, such as those of queries, keys and values.

One large product keeps a GPU busier than three small ones, and is one launch. The weights stay parameters of their own,
for optimizer, checkpoints and everybody who looks for them by name. They only have to lie behind each other in memory,
so that one view covers them all.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def merged_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> Tensor:
    """x [tokens, inputs], weights [outputs, inputs] each -> [tokens, all outputs].

    Weights that are not adjacent in memory cost a product each.
    """
    biases = biases or ()
    if adjacent(weights) is None or (biases and adjacent(biases) is None):
        pairs = zip_longest(weights, biases)
        return torch.cat([F.linear(x, weight, bias) for weight, bias in pairs], dim=-1)
    compute: Any = MergedLinear.apply
    result: Tensor = compute(x, len(weights), *weights, *biases)
    return result


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view over all tensors along the first dimension, or None if they do not follow each other in one storage.

    Only pointers and shapes are compared, so this is cheap enough for every call. The view has no gradient history.
    """
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return None  # such as a DTensor, which has no storage of its own
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        follows = tensor.untyped_storage().data_ptr() == storage and tensor.storage_offset() == end
        alike = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:] and tensor.is_contiguous()
        if not (follows and alike):
            return None
        end += tensor.numel()
    rows = sum(len(tensor) for tensor in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


class MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_weights: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = bool(biases)
        weight = adjacent(weights)
        assert weight is not None
        return F.linear(x, weight, adjacent(biases) if biases else None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        d_output, sizes = gradients[0], [len(weight) for weight in weights]
        wants_x, wants_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        d_weights: Sequence[Tensor | None] = [None] * len(sizes)
        d_biases: Sequence[Tensor | None] = [None] * len(sizes) if ctx.has_bias else []
        if wants_weights:
            d_weights = (d_output.T @ x).split(sizes)
            if ctx.has_bias:
                d_biases = column_sums(d_output).split(sizes)
        weight = adjacent(weights)
        assert weight is not None, "weights must stay where they are between forward and backward"
        return d_output @ weight if wants_x else None, None, *d_weights, *d_biases


def column_sums(x: Tensor) -> Tensor:
    """[rows, columns] -> [columns]."""
    if not x.is_cuda:
        return x.sum(0)
    from corral.kernels.gpu import column_sum_kernel

    return column_sum_kernel.column_sums(x)
