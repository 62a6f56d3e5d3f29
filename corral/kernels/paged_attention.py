"""Decode attention over a paged KV cache: pages of `PAGE` tokens, and for each sequence a table of its pages.

keys, values   [pages x PAGE, kv_heads, width], of one layer
table          [sequences, most pages], int32: the pages of each sequence, in order
positions      [sequences], int32: the position of each sequence's new token
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from corral.kernels.rms_norm import plain_rms_norm
from corral.kernels.rotary import plain_rotate

PAGE = 64
"""Tokens of a page."""


def paged_decode(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor,
    *,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    splits: int = 1,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one new token of each sequence, after its key and value were written into the cache.

    qkv [sequences, (heads + 2 kv_heads) x width] -> [sequences, heads x width]. Queries and keys are normalized by head
    (with `norms`, the weights [width] of either) and rotated (with `rotary`, cos and sin [positions, width]) first.
    `splits` is the number of parts of a sequence that are read at the same time (flash-decoding). With a `window` of at
    least two, a query attends to so many last positions, its own included; `sinks` [heads] are one more logit of each
    head's softmax, without a value.
    """
    if qkv.is_cuda:
        from corral.kernels.gpu.paged_attention_kernels import decode

        return decode(qkv, keys, values, positions, table, scale, rotary, norms, eps, splits, window, sinks)
    kv_heads, width = keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    query, key, value = qkv.view(len(qkv), -1, width).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query, key = plain_rms_norm(query, norms[0], eps), plain_rms_norm(key, norms[1], eps)
    if rotary is not None:
        cos, sin = (part[positions.long()] for part in rotary)
        query, key = plain_rotate(query, cos, sin), plain_rotate(key, cos, sin)
    new = table.gather(1, (positions // PAGE)[:, None].long())[:, 0].long() * PAGE + positions % PAGE
    keys[new], values[new] = key, value
    places = torch.arange(int(positions.max()) + 1, device=qkv.device)
    slots = table[:, places // PAGE].long() * PAGE + places % PAGE
    mask = places <= positions[:, None]
    if window is not None:
        mask &= places > positions[:, None] - window
    # A page may hold anything behind the sequence's end, and 0 x NaN is NaN.
    key, value = (torch.where(mask[:, :, None, None], tensor[slots], 0).transpose(1, 2) for tensor in (keys, values))
    grouped = query.reshape(len(query), kv_heads, -1, width)
    bias = torch.zeros(mask.shape, dtype=qkv.dtype, device=qkv.device).masked_fill(~mask, -torch.inf)[:, None, None]
    if sinks is not None:  # a key of zeros whose score is the sink, and whose value is zero
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        of_sink = sinks.to(qkv.dtype).view(1, kv_heads, -1, 1).expand(len(query), -1, -1, -1)
        bias = torch.cat([bias.expand(-1, kv_heads, grouped.shape[2], -1), of_sink], -1)
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias, scale=scale)
    return output.reshape(len(qkv), -1)
