"""The paged cache in Triton against plain torch in float64."""

import pytest
import torch
from compare import BOUNDS, check, random
from torch import Tensor

pytest.importorskip("triton")

from corral.kernels import paged
from corral.kernels.gpu import paged as on_gpu
from corral.kernels.paged import PAGE

POSITIONS = [0, 5, PAGE - 1, PAGE, 2 * PAGE + 7]
"""Of the new token: a first one, one that ends a page, one that begins one."""


def cache(kv_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """(keys, values, positions, table); what no sequence has written is NaN."""
    positions = torch.tensor(POSITIONS, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(15, generator=generator).view(5, 3).to(device, torch.int32)
    keys, values = torch.full((2, 15 * PAGE, kv_heads, width), torch.nan, dtype=dtype, device=device)
    for sequence, position in enumerate(POSITIONS):
        places = torch.arange(position, device=device)
        slots = table[sequence, places // PAGE].long() * PAGE + places % PAGE
        keys[slots] = random(position, kv_heads, width, seed=sequence, dtype=dtype, device=device)
        values[slots] = random(position, kv_heads, width, seed=9 + sequence, dtype=dtype, device=device)
    return keys, values, positions, table


def wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double().cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 32), (3, 3, 16)])
@pytest.mark.parametrize("parts", ["rotate", "norm and rotate", "store"])
def test_new_keys_and_values_go_to_their_pages_and_nowhere_else(
    parts: str, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    keys, values, positions, table = cache(kv_heads, width, dtype, device)
    qkv = random(5, (heads + 2 * kv_heads) * width, seed=20, dtype=dtype, device=device)
    half = random(3 * PAGE, width // 2, seed=21, dtype=dtype, device=device)
    cos, sin = (half.cos().repeat(1, 2), half.sin().repeat(1, 2)) if "rotate" in parts else (None, None)
    q_norm, k_norm = random(2, width, seed=22, dtype=dtype, device=device) if "norm" in parts else (None, None)
    expected_keys, expected_values = keys.double().cpu(), values.double().cpu()
    expected = paged.rotate_and_store(
        qkv.double().cpu(), expected_keys, expected_values, positions.cpu(), table.cpu(),
        *(wide(tensor) for tensor in (cos, sin, q_norm, k_norm)),
    )  # fmt: skip
    found = on_gpu.rotate_and_store(qkv, keys, values, positions, table, cos, sin, q_norm, k_norm, 1e-6)
    check(found.cpu(), expected, dtype, "queries")
    for name, ours, theirs in (("keys", keys, expected_keys), ("values", values, expected_values)):
        assert torch.equal(ours.cpu().isnan(), theirs.isnan()), name
        check(ours.cpu().nan_to_num(), theirs.nan_to_num(), dtype, name)


# The interpreter multiplies bfloat16 as if it were whole numbers; a GPU is asked for it as well.
DOT_DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 32), (2, 2, 16)])
def test_each_sequence_sees_its_own_pages_up_to_its_new_token(
    heads: int, kv_heads: int, width: int, splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    keys, values, positions, table = cache(kv_heads, width, dtype, device)
    query = random(5, heads, width, seed=30, dtype=dtype, device=device)
    new = table.gather(1, (positions // PAGE)[:, None].long())[:, 0].long() * PAGE + positions % PAGE
    keys[new] = random(5, kv_heads, width, seed=31, dtype=dtype, device=device)
    values[new] = random(5, kv_heads, width, seed=32, dtype=dtype, device=device)
    expected = paged.paged_attention(
        query.double().cpu(), keys.double().cpu(), values.double().cpu(), positions.cpu(), table.cpu(), 0.2
    )
    found = on_gpu.paged_attention(query, keys, values, positions, table, 0.2, splits)
    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert error < BOUNDS.get(dtype, 2e-3)
