"""Attention of ragged sequences against the formula, one sequence at a time."""

import pytest
import torch
from compare import check_function, random

from corral.kernels.varlen_attention import varlen_attention

LENGTHS = [(3, 3), (1, 5), (4, 9), (2, 2)]
"""(queries, keys) of each sequence"""


def starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    outputs, q, k = [], 0, 0
    for queries, keys in LENGTHS:
        for i in range(queries):
            seen = slice(k, k + keys - queries + i + 1)
            of_head = key[seen].repeat_interleave(groups, dim=1)
            weights = (torch.einsum("hw,khw->hk", query[q + i], of_head) * 0.3).softmax(-1)
            outputs.append(torch.einsum("hk,khw->hw", weights, value[seen].repeat_interleave(groups, dim=1)))
        q, k = q + queries, k + keys
    return torch.stack(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_query_sees_its_own_sequence_up_to_itself(
    kv_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    queries, keys = (sum(lengths) for lengths in zip(*LENGTHS, strict=True))
    query = random(queries, 4, 16, seed=0, dtype=dtype, device=device)
    key, value = (random(keys, kv_heads, 16, seed=n, dtype=dtype, device=device) for n in (1, 2))
    of_queries, of_keys = (starts(list(lengths), device) for lengths in zip(*LENGTHS, strict=True))
    check_function(
        lambda query, key, value: varlen_attention(query, key, value, of_queries, of_keys, 4, 9, 0.3),
        plain,
        [query, key, value],
    )
