"""Causal attention over packed sequences of different lengths (varlen)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    scale: float,
) -> Tensor:
    """[tokens, heads, width] each, keys and values with as many heads or fewer -> like `query`.

    Sequence n has the queries `query_starts[n] : query_starts[n + 1]` (int32) and the keys `key_starts[n] : ...`. Its
    queries are the last of its tokens: query i of q attends to the keys 0 to i + k - q of k.
    """
    if not has_flash(query):
        return attention_by_sequence(query, key, value, query_starts, key_starts, scale)
    compute: Any = FlashAttention.apply
    result: Tensor = compute(query, key, value, query_starts, key_starts, max_query, max_key, scale)
    return result


def has_flash(query: Tensor) -> bool:
    """Whether torch's FlashAttention-2 kernels take this dtype, head width and device."""
    width, dtype = query.shape[-1], query.dtype
    fits = dtype in (torch.bfloat16, torch.float16) and width <= 256 and width % 8 == 0
    return query.is_cuda and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def attention_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, scale: float
) -> Tensor:
    """The same, one sequence after the other, for all dtypes and devices."""
    outputs = []
    of_queries, of_keys = query_starts.tolist(), key_starts.tolist()
    for n in range(len(of_queries) - 1):
        queries, keys = slice(of_queries[n], of_queries[n + 1]), slice(of_keys[n], of_keys[n + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        output = F.scaled_dot_product_attention(
            query[queries].transpose(0, 1),
            key[keys].transpose(0, 1),
            value[keys].transpose(0, 1),
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


class FlashAttention(torch.autograd.Function):
    """FlashAttention-2 (Dao 2023) as torch ships it.

    The operators are called directly: torch's public function for varlen attention differs between its versions, these
    do not.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor,
        max_query: int, max_key: int, scale: float,
    ) -> Tensor:  # fmt: skip
        lengths = (query_starts, key_starts, max_query, max_key)
        output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *lengths, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(query, key, value, output, logsumexp, query_starts, key_starts)
        ctx.max_lengths, ctx.scale = (max_query, max_key), scale
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        rng_state = gradient.new_empty(2, dtype=torch.uint64), gradient.new_empty(0)  # of dropout, which is off
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            gradient, *ctx.saved_tensors, *ctx.max_lengths, 0.0, True, *rng_state, scale=ctx.scale
        )
        return d_query, d_key, d_value, *[None] * 5
