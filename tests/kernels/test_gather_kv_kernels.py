"""Gathered keys and values in Triton, the sums of their gradients against float64, and the inverse of the index."""

import numpy as np
import pytest
import torch
from compare import BOUNDS, check, random
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from corral.kernels.gather_kv import GatherIndex
from corral.kernels.gpu.gather_kv_kernels import gather_rows, scatter_add_rows

INDEX = np.array([0, 1, 2, 5, 0, 1, 3, 0, 1, 2, 4, 8, 8])
"""Of nine rows: some gathered several times, some once, and 6 and 7 not at all."""


def check_kernels(key: Tensor, value: Tensor) -> None:
    gather, index = GatherIndex(INDEX, 9, key.device), torch.from_numpy(INDEX).to(key.device)
    found = gather_rows(key, value, gather.index)
    for rows, gathered in zip((key, value), found, strict=True):
        assert torch.equal(gathered, rows[index])
    upstream = [random(*rows.shape, seed=99 + n, dtype=key.dtype, device=key.device) for n, rows in enumerate(found)]
    for rows, gradient, summed in zip(found, upstream, scatter_add_rows(*upstream, *gather.inverse), strict=True):
        expected = torch.zeros(9, *rows.shape[1:], dtype=torch.float64, device=key.device)
        check(summed, expected.index_add(0, index, gradient.double()), key.dtype, "sums of gradients")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "width"), [(1, 24), (2, 16), (3, 8)])
def test_rows_and_the_sums_of_their_gradients(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    key, value = (random(9, heads, width, seed=n, dtype=dtype, device=device) for n in (0, 1))
    check_kernels(key, value)


def test_more_rows_and_columns_than_one_program_takes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.kernels.gpu import gather_kv_kernels

    monkeypatch.setattr(gather_kv_kernels, "tile_shape", lambda columns: (16, 2))
    key, value = (random(9, 3, 12, seed=n, dtype=torch.float32, device=device) for n in (0, 1))
    check_kernels(key, value)


def test_rows_that_lie_apart(device: torch.device) -> None:
    """Keys head by head, as a group of ranks gathers them; values in a wider tensor, as the merged projection does."""
    keys = random(2, 9, 32, seed=0, dtype=torch.float32, device=device)
    wide = random(9, 80, seed=1, dtype=torch.float32, device=device)
    check_kernels(keys.transpose(0, 1)[..., :16], wide[:, 48:].unflatten(-1, (2, 16)))


def test_gradients_that_lie_apart(device: torch.device) -> None:
    gather, index = GatherIndex(INDEX, 9, device), torch.from_numpy(INDEX).to(device)
    upstream = random(2, len(INDEX), 8, seed=2, dtype=torch.float32, device=device).transpose(0, 1)
    for summed in scatter_add_rows(upstream, upstream, *gather.inverse):
        torch.testing.assert_close(summed, torch.zeros(9, 2, 8, device=device).index_add(0, index, upstream))


@pytest.mark.slow
def test_gradients_are_rounded_once(device: torch.device) -> None:
    gather = GatherIndex(np.array([1] * 300 + [0]), 2, device)
    upstream = torch.ones(301, 1, 8, dtype=torch.bfloat16, device=device)
    for gradient in scatter_add_rows(upstream, upstream, *gather.inverse):
        assert gradient[:, 0, 0].tolist() == [1.0, 300.0]  # bfloat16 alone gets stuck at 256


def test_gradients_are_summed_in_order(device: torch.device) -> None:
    gather = GatherIndex(np.array([1] * 50 + [0]), 2, device)
    upstream = [random(51, 1, 8, seed=n, dtype=torch.float32, device=device) for n in (2, 3)]
    for found, each in zip(scatter_add_rows(*upstream, *gather.inverse), upstream, strict=True):
        in_order = torch.zeros_like(each[0])
        for gradient in each[:50]:
            in_order += gradient
        assert torch.equal(found[1], in_order)


@given(index=st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_the_inverse_of_an_index_lists_the_places_of_every_row(index: list[int]) -> None:
    gather = GatherIndex(np.array(index), 7, torch.device("cpu"))
    starts, places = (tensor.tolist() for tensor in gather.inverse)
    for row in range(7):
        assert places[starts[row] : starts[row + 1]] == [place for place, of in enumerate(index) if of == row]
