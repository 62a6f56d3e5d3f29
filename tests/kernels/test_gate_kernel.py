"""The gated activation in Triton against float64."""

import pytest
import torch
from compare import DTYPES, check_function, random

pytest.importorskip("triton")

from corral.kernels.gate import SiluMul


def plain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("units", [10, 1100])
def test_gated_activation_of_any_width(units: int, dtype: torch.dtype, device: torch.device) -> None:
    check_function(SiluMul.apply, plain, [random(3, 2 * units, seed=0, dtype=dtype, device=device)])
