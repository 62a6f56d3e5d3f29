"""Rotary position embedding of queries and keys, and its gradient, in one launch for both."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotated_pair(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    rotated_query, rotated_key = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    rotate_into((rotated_query, rotated_key), (query, key), cos, sin, backward)
    return rotated_query, rotated_key


def rotate_into(results: Sequence[Tensor], parts: Sequence[Tensor], cos: Tensor, sin: Tensor, backward: bool) -> None:
    """Rotates queries and keys, [tokens, heads, width] each, and copies values if there are any.

    Parts may have any strides. The heads of a token lie behind each other in the results, which may be views of a wider
    tensor.
    """
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    (query, key), has_value = parts[:2], len(parts) == 3
    (to_query, to_key), value, to_value = results[:2], parts[-1], results[-1]
    num_tokens, num_heads, width = query.shape
    num_kv_heads, half = key.shape[1], triton.next_power_of_2(width // 2)
    heads_tile = triton.next_power_of_2(num_heads)
    _rotary_kernel[(num_tokens,)](
        query, key, value, to_query, to_key, to_value, cos.contiguous(), sin.contiguous(),
        num_heads, num_kv_heads, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        to_query.stride(0), to_key.stride(0), to_value.stride(0),
        WIDTH=width, HALF=half, HEADS=heads_tile, KV_HEADS=triton.next_power_of_2(num_kv_heads),
        HAS_VALUE=has_value, BACKWARD=backward, num_warps=min(8, max(1, heads_tile * half // 256)),
    )  # fmt: skip


# A program rotates all heads of one token: cos and sin are the same for every head of it, and are read once. The tile
# is [heads, width / 2] for each half, padded to powers of two (HEADS, HALF), so element i and its partner i + width / 2
# are in the same place of two tiles, and no shuffle is needed. One program for each head would read cos and sin again
# for every one.
#
# The backward pass is the rotation by the opposite angle. There values' gradients are copied along (HAS_VALUE), so that
# one launch fills the gradient of the merged projection, and autograd adds nothing up.
#
# In float32, rounded once. The plain version rounds both products before it adds them, so the two differ by a rounding.
@triton.jit
def _rotary_kernel(
    query_ptr, key_ptr, value_ptr, to_query_ptr, to_key_ptr, to_value_ptr, cos_ptr, sin_ptr,
    num_heads, num_kv_heads, query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    value_token_stride, value_head_stride, to_query_stride, to_key_stride, to_value_stride,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HAS_VALUE: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + token * WIDTH + pair, mask=pair < WIDTH // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * WIDTH + pair, mask=pair < WIDTH // 2, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    query_ptr += token * query_token_stride
    to_query_ptr += token * to_query_stride
    _rotate_heads(query_ptr, to_query_ptr, num_heads, query_head_stride, cos, sin, WIDTH, HEADS)
    key_ptr += token * key_token_stride
    to_key_ptr += token * to_key_stride
    _rotate_heads(key_ptr, to_key_ptr, num_kv_heads, key_head_stride, cos, sin, WIDTH, KV_HEADS)
    if HAS_VALUE:
        head, column = tl.arange(0, KV_HEADS)[:, None], tl.arange(0, 2 * HALF)[None, :]
        mask = (head < num_kv_heads) & (column < WIDTH)
        value = tl.load(value_ptr + token * value_token_stride + head * value_head_stride + column, mask=mask)
        tl.store(to_value_ptr + token * to_value_stride + head * WIDTH + column, value, mask=mask)


@triton.jit
def _rotate_heads(x_ptr, to_ptr, num_heads, head_stride, cos, sin, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, cos.shape[1])[None, :]
    mask = (head < num_heads) & (pair < WIDTH // 2)
    source, target = x_ptr + head * head_stride + pair, to_ptr + head * WIDTH + pair
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + WIDTH // 2, mask=mask, other=0.0).to(tl.float32)
    dtype = to_ptr.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(target + WIDTH // 2, (second * cos + first * sin).to(dtype), mask=mask)
