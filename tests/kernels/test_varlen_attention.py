"""Attention of ragged sequences against the formula, one sequence at a time."""

import numpy as np
import pytest
import torch
from compare import check_function, random
from flash_on_cpu import flash_on_cpu

from corral.kernels.gather_kv import GatherIndex
from corral.kernels.varlen_attention import varlen_attention

LENGTHS = [(3, 3), (1, 5), (4, 9), (2, 2)]
"""(queries, keys) of each sequence"""


def starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    outputs, q, k = [], 0, 0
    for queries, keys in LENGTHS:
        for i in range(queries):
            end = k + keys - queries + i + 1
            seen = slice(k if window is None else max(k, end - window), end)
            of_head = key[seen].repeat_interleave(groups, dim=1)
            scores = torch.einsum("hw,khw->hk", query[q + i], of_head) * 0.3
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None]], 1)
            weights = scores.softmax(-1)[:, : end - seen.start]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "has_sinks"), [(3, False), (None, True), (4, True)])
def test_windows_and_sinks(window: int | None, has_sinks: bool, dtype: torch.dtype, device: torch.device) -> None:
    queries, keys = (sum(lengths) for lengths in zip(*LENGTHS, strict=True))
    query = random(queries, 4, 16, seed=0, dtype=dtype, device=device)
    key, value = (random(keys, 2, 16, seed=n, dtype=dtype, device=device) for n in (1, 2))
    sinks = [random(4, seed=3, dtype=dtype, device=device)] if has_sinks else []
    of_queries, of_keys = (starts(list(lengths), device) for lengths in zip(*LENGTHS, strict=True))
    check_function(
        lambda query, key, value, *sinks: varlen_attention(
            query, key, value, of_queries, of_keys, 4, 9, 0.3, window, *sinks
        ),
        lambda query, key, value, *sinks: plain(query, key, value, *(sinks or (None,)), window=window),
        [query, key, value, *sinks],
    )


SHARED = np.array([0, 1, 2, 0, 1, 3, 4, 5, 0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 0])
"""Of thirteen rows the keys of each sequence: the first two rows begin three of them."""


@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (3, True)])
def test_keys_that_sequences_share_are_gathered_and_not_kept(
    window: int | None, has_sinks: bool, device: torch.device
) -> None:
    pytest.importorskip("triton")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = random(10, 4, 16, seed=0, dtype=dtype, device=device)
    key, value = (random(13, 2, 16, seed=n, dtype=dtype, device=device) for n in (1, 2))
    sinks = [random(4, seed=3, dtype=dtype, device=device)] if has_sinks else []
    of_queries, of_keys = (starts(list(lengths), device) for lengths in zip(*LENGTHS, strict=True))
    gather, index = GatherIndex(SHARED, 13, device), torch.from_numpy(SHARED).to(device)

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        of_sinks = sinks[0] if sinks else None
        output = varlen_attention(query, key, value, of_queries, of_keys, 4, 9, 0.3, window, of_sinks, gather)
        assert max(len(saved) for saved in output.grad_fn.saved_tensors[:4]) == 13
        return output

    with flash_on_cpu():
        check_function(
            ours,
            lambda query, key, value, *sinks: plain(
                query, key[index], value[index], *(sinks or (None,)), window=window
            ),
            [query, key, value, *sinks],
        )
