"""Rotary position embedding (Su et al. 2021) of queries and keys; element i of a head is paired with i + width / 2."""

from typing import Any

import torch
from torch import Tensor


def rotate_merged(
    merged: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """merged [tokens, (heads + 2 kv_heads) * width] -> rotated queries, rotated keys, and values as a view.

    cos and sin [tokens, width], the second half equal to the first.
    """
    if not merged.is_cuda:
        query, key, value = split_heads(merged, num_heads, num_kv_heads)
        return plain_rotate(query, cos, sin), plain_rotate(key, cos, sin), value
    compute: Any = RotateMerged.apply
    result: tuple[Tensor, Tensor, Tensor] = compute(merged, cos, sin, num_heads, num_kv_heads)
    return result


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys that are tensors of their own, [tokens, heads, width] each."""
    if not query.is_cuda:
        return plain_rotate(query, cos, sin), plain_rotate(key, cos, sin)
    compute: Any = Rotate.apply
    result: tuple[Tensor, Tensor] = compute(query, key, cos, sin)
    return result


def split_heads(merged: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views [tokens, heads, width] of the merged projection."""
    heads = merged.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return query, key, value


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class RotateMerged(torch.autograd.Function):
    """The backward pass writes the gradient of the merged tensor into one buffer, each element once.

    With split and rotation as functions of their own, autograd would pad three gradients with zeros and add them up.
    """

    @staticmethod
    def forward(
        ctx: Any, merged: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from corral.kernels.gpu.rotary_kernels import rotated_pair

        ctx.save_for_backward(cos, sin)
        query, key, value = split_heads(merged, num_heads, num_kv_heads)
        return *rotated_pair(query, key, cos, sin, backward=False), value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """A rotation's gradient is the rotation by the opposite angle."""
        from corral.kernels.gpu.rotary_kernels import rotate_into

        (d_query, d_key, _), (cos, sin) = gradients, ctx.saved_tensors
        (num_tokens, num_heads, width), num_kv_heads = d_query.shape, d_key.shape[1]
        d_merged = d_query.new_empty(num_tokens, (num_heads + 2 * num_kv_heads) * width)
        rotate_into(split_heads(d_merged, num_heads, num_kv_heads), gradients, cos, sin, backward=True)
        return d_merged, None, None, None, None


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from corral.kernels.gpu.rotary_kernels import rotated_pair

        ctx.save_for_backward(cos, sin)
        return rotated_pair(query, key, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from corral.kernels.gpu.rotary_kernels import rotated_pair

        (d_query, d_key), (cos, sin) = gradients, ctx.saved_tensors
        return *rotated_pair(d_query, d_key, cos, sin, backward=True), None, None
