"""The operators of flash attention, which torch has for GPUs only, as formulas for a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def sequences(query_starts: Tensor, key_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    of_queries, of_keys = query_starts.tolist(), key_starts.tolist()
    for n in range(len(of_queries) - 1):
        yield slice(of_queries[n], of_queries[n + 1]), slice(of_keys[n], of_keys[n + 1])


def scores(query: Tensor, key: Tensor, scale: float, window_size_left: int | None = None, **unused: Any) -> Tensor:
    """[heads, queries, keys]; the queries are the last tokens of the sequence."""
    found = torch.einsum("qhw,khw->hqk", query, key) * scale
    distance = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    hidden = distance < 0 if window_size_left is None else (distance < 0) | (distance > window_size_left)
    return found.masked_fill(hidden, -torch.inf)


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, *unused: Any, **options: Any
) -> tuple[Tensor, ...]:
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    outputs, logsumexp = [], []
    for queries, keys in sequences(query_starts, key_starts):
        of_pairs = scores(query[queries], key[keys], **options)
        outputs.append(torch.einsum("hqk,khw->qhw", of_pairs.softmax(-1), value[keys]))
        logsumexp.append(of_pairs.logsumexp(-1))
    return torch.cat(outputs), torch.cat(logsumexp, 1), *(query.new_empty(0) for _ in range(3))


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor,
    query_starts: Tensor, key_starts: Tensor, *unused: Any, scale: float, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    kv_heads = key.shape[1]
    key, value = (tensor.repeat_interleave(query.shape[1] // kv_heads, 1) for tensor in (key, value))
    d_query, d_key, d_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    for queries, keys in sequences(query_starts, key_starts):
        weights = (scores(query[queries], key[keys], scale, **options) - logsumexp[:, queries, None]).exp()
        d_weights = torch.einsum("qhw,khw->hqk", gradient[queries], value[keys])
        delta = (gradient[queries] * output[queries]).sum(-1).T[..., None]
        d_scores = weights * (d_weights - delta) * scale
        d_query[queries] = torch.einsum("hqk,khw->qhw", d_scores, key[keys])
        d_key[keys] = torch.einsum("hqk,qhw->khw", d_scores, query[queries])
        d_value[keys] = torch.einsum("hqk,qhw->khw", weights, gradient[queries])
    return d_query, *(tensor.unflatten(1, (kv_heads, -1)).sum(2) for tensor in (d_key, d_value))


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Within it, attention is computed as on a GPU in bfloat16, where there is none."""
    if torch.cuda.is_available():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        with (
            patch("corral.kernels.varlen_attention.has_flash", lambda _: True),
            patch("corral.model.attention.has_flash", lambda _: True),
        ):
            yield
    finally:
        library._destroy()
