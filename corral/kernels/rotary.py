"""Rotary position embedding of queries and keys (Su et al. 2021), the two halves of a head as a pair's coordinates."""

from typing import Any

import torch
from torch import Tensor


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, heads, width] each; cos and sin [tokens, width], the second half equal to the first."""
    if not query.is_cuda:
        return plain_rotate(query, cos, sin), plain_rotate(key, cos, sin)
    compute: Any = Rotate.apply
    result: tuple[Tensor, Tensor] = compute(query, key, cos, sin)
    return result


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from corral.kernels.gpu.rotary import rotate_pair

        ctx.save_for_backward(cos, sin)
        return rotate_pair(query, key, cos, sin, backwards=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """A rotation's gradient is the rotation by the opposite angle."""
        from corral.kernels.gpu.rotary import rotate_pair

        (d_query, d_key), (cos, sin) = gradients, ctx.saved_tensors
        return *rotate_pair(d_query, d_key, cos, sin, backwards=True), None, None
