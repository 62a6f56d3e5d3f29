"""SwiGLU in Triton against float64."""

import pytest
import torch
from compare import DTYPES, check_function, random

pytest.importorskip("triton")

from corral.kernels.swiglu import SiluMul


def plain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [10, 1100])
def test_swiglu_of_any_width(width: int, dtype: torch.dtype, device: torch.device) -> None:
    check_function(SiluMul.apply, plain, [random(3, 2 * width, seed=0, dtype=dtype, device=device)])
