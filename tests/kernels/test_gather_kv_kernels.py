"""Gathered keys and values in Triton against float64, and the inverse of the index."""

import numpy as np
import pytest
import torch
from compare import BOUNDS, check_function, random
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from corral.kernels.gather_kv import GatherIndex, GatherKV, plain_gather_kv

INDEX = np.array([0, 1, 2, 5, 0, 1, 3, 0, 1, 2, 4, 8, 8])
"""Of nine rows: some gathered several times, some once, and 6 and 7 not at all."""


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "width"), [(1, 24), (2, 16), (3, 8)])
def test_rows_and_the_sums_of_their_gradients(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    gather = GatherIndex(INDEX, 9, device)
    inputs = [random(9, heads, width, seed=n, dtype=dtype, device=device) for n in (0, 1)]
    index = torch.from_numpy(INDEX).to(device)
    check_function(
        lambda key, value: GatherKV.apply(key, value, gather), lambda key, value: (key[index], value[index]), inputs
    )


def test_more_rows_and_columns_than_one_program_takes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.kernels.gpu import gather_kv_kernels

    monkeypatch.setattr(gather_kv_kernels, "tile_shape", lambda columns: (16, 2))
    gather, index = GatherIndex(INDEX, 9, device), torch.from_numpy(INDEX).to(device)
    inputs = [random(9, 3, 12, seed=n, dtype=torch.float32, device=device) for n in (0, 1)]
    check_function(
        lambda key, value: GatherKV.apply(key, value, gather), lambda key, value: (key[index], value[index]), inputs
    )


def test_rows_that_lie_apart(device: torch.device) -> None:
    """Keys head by head, as a group of ranks gathers them; values in a wider tensor, as the merged projection does."""
    gather, index = GatherIndex(INDEX, 9, device), torch.from_numpy(INDEX).to(device)
    keys = random(2, 9, 32, seed=0, dtype=torch.float32, device=device)
    wide = random(9, 80, seed=1, dtype=torch.float32, device=device)

    def apart(keys: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys.transpose(0, 1)[..., :16], wide[:, 48:].unflatten(-1, (2, 16))

    def plain(keys: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(rows[index] for rows in apart(keys, wide))

    check_function(lambda keys, wide: GatherKV.apply(*apart(keys, wide), gather), plain, [keys, wide])


def test_gradients_that_lie_apart_or_are_missing(device: torch.device) -> None:
    gather = GatherIndex(INDEX, 9, device)
    key, value = (random(9, 2, 8, seed=n, dtype=torch.float32, device=device).requires_grad_() for n in (0, 1))
    upstream = random(2, len(INDEX), 8, seed=2, dtype=torch.float32, device=device).transpose(0, 1)
    gathered = GatherKV.apply(key, value, gather)[1]
    d_key, d_value = torch.autograd.grad(gathered, [key, value], upstream, materialize_grads=True)
    expected = torch.autograd.grad(value[torch.from_numpy(INDEX).to(device)], value, upstream)[0]
    assert not d_key.any()
    torch.testing.assert_close(d_value, expected)


@pytest.mark.parametrize("gather_kv", [plain_gather_kv, GatherKV.apply], ids=["plain", "kernel"])
@pytest.mark.slow
def test_gradients_are_rounded_once(gather_kv, device: torch.device) -> None:  # type: ignore[no-untyped-def]
    gather = GatherIndex(np.array([1] * 300 + [0]), 2, device)
    rows = [random(2, 1, 8, seed=n, dtype=torch.bfloat16, device=device).requires_grad_() for n in (0, 1)]
    outputs = gather_kv(*rows, gather)
    gradients = torch.autograd.grad(outputs, rows, [torch.ones_like(output) for output in outputs])
    for gradient in gradients:
        assert gradient[:, 0, 0].tolist() == [1.0, 300.0]  # bfloat16 alone gets stuck at 256


def test_gradients_are_summed_in_order(device: torch.device) -> None:
    gather = GatherIndex(np.array([1] * 50 + [0]), 2, device)
    rows = [torch.zeros(2, 1, 8, device=device, requires_grad=True) for _ in range(2)]
    upstream = [random(51, 1, 8, seed=n, dtype=torch.float32, device=device) for n in (2, 3)]
    gradients = torch.autograd.grad(GatherKV.apply(*rows, gather), rows, upstream)
    for found, each in zip(gradients, upstream, strict=True):
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
