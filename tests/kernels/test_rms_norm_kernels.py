"""RMSNorm in Triton against float64."""

import pytest
import torch
from compare import DTYPES, check_function, random

pytest.importorskip("triton")

from corral.kernels.rms_norm import AddRMSNorm

EPS = 1e-6


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 24), (1, 3, 100), (3, 2, 16)])
def test_norm_of_rows_of_any_width(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = random(*shape, seed=0, dtype=dtype, device=device)
    weight = random(shape[-1], seed=1, dtype=dtype, device=device)
    check_function(lambda x, w: AddRMSNorm.apply(x, None, w, EPS)[0], plain_norm, [x, weight])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_sum_and_the_sum(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (random(7, 40, seed=n, dtype=dtype, device=device) for n in (0, 1))
    weight = random(40, seed=2, dtype=dtype, device=device)
    check_function(
        lambda x, r, w: AddRMSNorm.apply(x, r, w, EPS),
        lambda x, r, w: (plain_norm(x + r, w), x + r),
        [x, residual, weight],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_its_input_handed_on(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (random(*shape, seed=0, dtype=dtype, device=device) for shape in ((6, 24), (24,)))
    check_function(
        lambda x, w: AddRMSNorm.apply(x, None, w, EPS), lambda x, w: (plain_norm(x, w), x * 1.0), [x, weight]
    )


def test_norm_of_heads_that_lie_in_a_wider_tensor(device: torch.device) -> None:
    wide = random(5, 80, seed=0, dtype=torch.float32, device=device)
    weight = random(16, seed=1, dtype=torch.float32, device=device)

    def heads(norm):  # type: ignore[no-untyped-def]
        return lambda wide, weight: norm(wide.split([48, 32], dim=-1)[0].unflatten(-1, (3, 16)), weight)

    check_function(heads(lambda x, w: AddRMSNorm.apply(x, None, w, EPS)[0]), heads(plain_norm), [wide, weight])


def test_more_rows_than_programs_in_the_backward_pass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.kernels.gpu import rms_norm_kernels

    monkeypatch.setattr(rms_norm_kernels, "MAX_BACKWARD_PROGRAMS", 3)
    monkeypatch.setattr(rms_norm_kernels, "tile_shape", lambda width: (32, 2, 4))
    x, weight = (random(*shape, seed=0, dtype=torch.float32, device=device) for shape in ((17, 24), (24,)))
    check_function(lambda x, w: AddRMSNorm.apply(x, None, w, EPS)[0], plain_norm, [x, weight])
