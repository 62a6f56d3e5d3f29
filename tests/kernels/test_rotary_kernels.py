"""Rotary position embedding in Triton against float64."""

from collections.abc import Callable

import pytest
import torch
from compare import BOUNDS, check_function, random

pytest.importorskip("triton")

from corral.kernels.rotary import Rotate, RotateMerged, plain_rotate, split_heads

SIZES = [(3, 1, 24), (4, 2, 16), (2, 2, 6)]
"""(heads, kv_heads, width)"""


def rotations(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], ...]:
    """Functions of the merged tensor of five tokens, to query, key and value: merged, in parts, plain."""
    angle = random(5, width // 2, seed=5, dtype=torch.float32, device=device).repeat(1, 2)

    def tables(merged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (table.to(dtype).to(merged.dtype) for table in (angle.cos(), angle.sin()))
        return cos, sin

    def merged_rotation(merged: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return RotateMerged.apply(merged, *tables(merged), heads, kv_heads)

    def rotation_in_parts(merged: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = split_heads(merged, heads, kv_heads)
        return *Rotate.apply(query, key, *tables(merged)), value

    def plain(merged: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = merged.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, width)) for part in parts)
        return *(plain_rotate(part, *tables(merged)) for part in (query, key)), value

    return merged_rotation, rotation_in_parts, plain


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), SIZES)
def test_rotation_of_queries_and_keys(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    merged = random(5, (heads + 2 * kv_heads) * width, seed=0, dtype=dtype, device=device)
    whole, in_parts, plain = rotations(heads, kv_heads, width, dtype, device)
    check_function(whole, plain, [merged])
    check_function(in_parts, plain, [merged])


def test_values_stay_where_the_product_left_them(device: torch.device) -> None:
    merged = random(5, 8 * 16, seed=0, dtype=torch.float32, device=device)
    value = rotations(4, 2, 16, torch.float32, device)[0](merged)[2]
    assert value.data_ptr() == merged[:, 6 * 16 :].data_ptr()


def test_gradients_that_lie_apart(device: torch.device) -> None:
    """Head by head, as one number for all, and with a width that is not the innermost dimension."""
    merged = random(5, 8 * 16, seed=0, dtype=torch.float32, device=device).requires_grad_()
    upstream = [
        random(4, 5, 16, seed=1, dtype=torch.float32, device=device).transpose(0, 1),
        torch.tensor(0.5, device=device).expand(5, 2, 16),
        random(16, 2, 5, seed=2, dtype=torch.float32, device=device).permute(2, 1, 0),
    ]
    whole, _, plain = rotations(4, 2, 16, torch.float32, device)
    found, expected = (torch.autograd.grad(compute(merged), merged, upstream)[0] for compute in (whole, plain))
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()


@pytest.mark.parametrize("only", [0, 1, 2])
def test_gradients_that_are_missing_are_zeros(only: int, device: torch.device) -> None:
    merged = random(5, 8 * 16, seed=0, dtype=torch.float32, device=device).requires_grad_()
    whole, _, plain = rotations(4, 2, 16, torch.float32, device)
    found, expected = (
        torch.autograd.grad(compute(merged)[only].square().sum(), merged)[0] for compute in (whole, plain)
    )
    torch.testing.assert_close(found, expected)
