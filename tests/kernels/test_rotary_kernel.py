"""Rotary position embedding in Triton against float64."""

import pytest
import torch
from compare import DTYPES, check_function, random

pytest.importorskip("triton")

from corral.kernels.rotary import Rotate, plain_rotate


def angles(tokens: int, width: int, device: torch.device) -> torch.Tensor:
    return random(tokens, width // 2, seed=5, dtype=torch.float32, device=device).repeat(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(3, 1, 24), (4, 2, 16)])
def test_rotation_of_queries_and_keys(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Queries and keys lie in one tensor, as the merged projection leaves them."""
    angle = angles(5, width, device)
    merged = random(5, (heads + kv_heads) * width, seed=0, dtype=dtype, device=device)

    def of_both(rotate):  # type: ignore[no-untyped-def]
        def compute(merged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts = merged.split([heads * width, kv_heads * width], dim=-1)
            query, key = (part.unflatten(-1, (-1, width)) for part in parts)
            cos, sin = (table.to(dtype).to(merged.dtype) for table in (angle.cos(), angle.sin()))
            return rotate(query, key, cos, sin)

        return compute

    plain = of_both(lambda query, key, cos, sin: (plain_rotate(query, cos, sin), plain_rotate(key, cos, sin)))
    check_function(of_both(Rotate.apply), plain, [merged])
