"""Sums over tokens in Triton, which are biases' gradients, against float64."""

import pytest
import torch
from compare import BOUNDS, check, random
from torch import nn

pytest.importorskip("triton")

from corral.kernels import merged_linear
from corral.kernels.gpu.column_sum_kernel import column_sums


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 7), (300, 24), (513, 130)])
def test_sums_of_columns(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = random(*shape, seed=0, dtype=dtype, device=device)
    found = column_sums(x)
    assert found.dtype == dtype
    check(found, x.double().sum(0), dtype, "sums")


def test_sums_of_columns_that_lie_apart(device: torch.device) -> None:
    x = random(40, 300, seed=0, dtype=torch.float32, device=device)
    check(column_sums(x.T), x.double().sum(1), torch.float32, "sums of a transposed matrix")
    check(column_sums(x[:, 7:90]), x[:, 7:90].double().sum(0), torch.float32, "sums of a part")


def test_sums_are_rounded_once(device: torch.device) -> None:
    ones = torch.ones(600, 3, dtype=torch.bfloat16, device=device)
    assert column_sums(ones).tolist() == [600.0] * 3  # bfloat16 alone gets stuck at 256


def test_biases_get_them_as_their_gradients(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_linear, "column_sums", column_sums)
    x = random(5, 4, seed=0, dtype=torch.float32, device=device)
    weights, biases = (
        [nn.Parameter(part) for part in random(*shape, seed=1, dtype=torch.float32, device=device).split([3, 1, 2])]
        for shape in ((6, 4), (6,))
    )
    upstream = random(5, 6, seed=3, dtype=torch.float32, device=device)
    gradients = torch.autograd.grad(merged_linear.merged_linear(x, weights, biases), biases, upstream)
    torch.testing.assert_close(torch.cat(gradients), upstream.sum(0))
