"""Causal attention over packed sequences of different lengths (varlen)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.kernels.gather_kv import GatherIndex


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    gather: GatherIndex | None = None,
) -> Tensor:
    """[tokens, heads, width] each, keys and values with as many heads or fewer -> like `query`.

    Sequence n has the queries `query_starts[n] : query_starts[n + 1]` (int32) and the keys `key_starts[n] : ...`. Its
    queries are the last of its tokens: query i of q attends to the keys 0 to i + k - q of k, or with a `window` to so
    many last ones of them. `sinks` [heads] are one more logit of each head's softmax, without a value. `gather`: the
    rows of `key` and `value` that are these keys.
    """
    if not has_flash(query):
        if gather is not None:
            key, value = key[gather.index], value[gather.index]
        return attention_by_sequence(query, key, value, query_starts, key_starts, scale, window, sinks)
    compute: Any = FlashAttention.apply
    lengths = (query_starts, key_starts, max_query, max_key)
    result: Tensor = compute(query, key, value, *lengths, scale, window, sinks, gather)
    return result


def has_flash(query: Tensor) -> bool:
    """Whether torch's FlashAttention-2 kernels take this dtype, head width and device."""
    width, dtype = query.shape[-1], query.dtype
    fits = dtype in (torch.bfloat16, torch.float16) and width <= 256 and width % 8 == 0
    return query.is_cuda and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def attention_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same, one sequence after the other, for all dtypes and devices."""
    outputs = []
    of_queries, of_keys = query_starts.tolist(), key_starts.tolist()
    for n in range(len(of_queries) - 1):
        queries, keys = slice(of_queries[n], of_queries[n + 1]), slice(of_keys[n], of_keys[n + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        if window is not None:
            mask = mask.triu(num_keys - num_queries - window + 1)
        q, k, v = query[queries].transpose(0, 1), key[keys].transpose(0, 1), value[keys].transpose(0, 1)
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
        if sinks is not None:  # a key of zeros whose score is the sink, and whose value is zero
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            of_sink = sinks.to(q.dtype)[:, None, None].expand(-1, num_queries, 1)
            bias = torch.cat([bias.expand(len(sinks), -1, -1), of_sink], -1)
        is_grouped = query.shape[1] != key.shape[1]
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=is_grouped)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


class FlashAttention(torch.autograd.Function):
    """FlashAttention-2 (Dao 2023) as torch ships it.

    The operators are called directly: torch's public function for varlen attention differs between its versions, these
    do not. The backward pass gathers keys again: kept for it, those of a shared prefix would be in memory once for each
    branch and layer. That is 31 GB for 16 answers of 1k tokens to a prompt of 32k with a model of 7B.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor,
        max_query: int, max_key: int, scale: float, window: int | None, sinks: Tensor | None,
        gather: GatherIndex | None,
    ) -> Tensor:  # fmt: skip
        ctx.arguments = (max_query, max_key, 0.0, True)
        ctx.options = {"scale": scale}
        if window is not None:
            ctx.options |= {"window_size_left": window - 1, "window_size_right": 0}
        lengths = (query_starts, key_starts)
        output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            query, *gathered(key, value, gather), *lengths, *ctx.arguments, False, **ctx.options
        )
        of_sinks = None
        if sinks is not None:
            # The sink takes its part of every row's weight: the others shrink by exp(logsumexp) over the new sum. With
            # that sum and the output of it the kernel's own backward pass is right as it is.
            before, of_sinks = logsumexp, sinks.float()[:, None]
            logsumexp = torch.logaddexp(before, of_sinks)
            output = output * (before - logsumexp).exp().T[..., None].to(output.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp, *lengths, of_sinks)
        ctx.sinks_dtype, ctx.gather = None if sinks is None else sinks.dtype, gather
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        query, key, value, output, logsumexp, *lengths, of_sinks = ctx.saved_tensors
        rng_state = gradient.new_empty(2, dtype=torch.uint64), gradient.new_empty(0)  # of dropout, which is off
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            gradient, query, *gathered(key, value, ctx.gather), output, logsumexp, *lengths, *ctx.arguments, *rng_state,
            **ctx.options,
        )  # fmt: skip
        if ctx.gather is not None:
            from corral.kernels.gpu.gather_kv_kernels import scatter_add_rows

            d_key, d_value = scatter_add_rows(d_key, d_value, *ctx.gather.inverse)
        d_sinks = None
        if of_sinks is not None:
            weight = (of_sinks - logsumexp).exp()  # [heads, tokens], that of the sink in each row
            d_sinks = -(weight * (gradient.float() * output.float()).sum(-1).T).sum(-1).to(ctx.sinks_dtype)
        return d_query, d_key, d_value, *[None] * 6, d_sinks, None


def gathered(key: Tensor, value: Tensor, gather: GatherIndex | None) -> tuple[Tensor, Tensor]:
    if gather is None:
        return key, value
    from corral.kernels.gpu.gather_kv_kernels import gather_rows

    return gather_rows(key, value, gather.index)
