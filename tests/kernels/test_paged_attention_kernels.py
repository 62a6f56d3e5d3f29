"""Decoding over the paged cache in Triton against plain torch in float64."""

from typing import Any

import pytest
import torch
from compare import BOUNDS, check, random
from torch import Tensor

pytest.importorskip("triton")

from corral.kernels.gpu import paged_attention_kernels
from corral.kernels.paged_attention import PAGE, paged_decode

pytestmark = pytest.mark.slow

POSITIONS = [0, 5, PAGE - 1, PAGE, 2 * PAGE + 7]
"""Of the new token: a first one, one that ends a page, one that begins one."""
# The interpreter multiplies bfloat16 as if it were whole numbers; a GPU is asked for it as well.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "splits", "parts"),
    [
        (6, 2, 32, 1, "rotate"),
        (6, 2, 32, 2, "norm and rotate"),
        (2, 2, 64, 1, "norm and rotate"),
        (2, 2, 32, 8, "neither"),
        (6, 2, 32, 32, "rotate"),
        (6, 2, 32, 1, "window and sinks"),
        (6, 2, 32, 4, "rotate, window"),
        (4, 4, 32, 4, "sinks"),
    ],
)
def test_each_sequence_attends_to_its_own_pages_and_its_new_token_which_is_written_nowhere_else(
    heads: int, kv_heads: int, width: int, splits: int, parts: str, dtype: torch.dtype, device: torch.device
) -> None:
    keys, values, positions, table = cache(kv_heads, width, dtype, device)
    qkv = random(5, (heads + 2 * kv_heads) * width, seed=20, dtype=dtype, device=device)
    half = random(3 * PAGE, width // 2, seed=21, dtype=dtype, device=device)
    rotary = (half.cos().repeat(1, 2), half.sin().repeat(1, 2)) if "rotate" in parts else None
    norms = tuple(random(2, width, seed=22, dtype=dtype, device=device)) if "norm" in parts else None
    sinks = random(heads, seed=23, dtype=dtype, device=device) if "sinks" in parts else None
    window = 70 if "window" in parts else None

    def wide(tensors: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
        return None if tensors is None else tuple(tensor.double().cpu() for tensor in tensors)

    wide_keys, wide_values = keys.double().cpu(), values.double().cpu()
    expected = paged_decode(
        qkv.double().cpu(), wide_keys, wide_values, positions.cpu(), table.cpu(),
        scale=0.2, rotary=wide(rotary), norms=wide(norms), eps=1e-6,  # type: ignore[arg-type]
        window=window, sinks=None if sinks is None else sinks.double().cpu(),
    )  # fmt: skip
    arguments: Any = (qkv, keys, values, positions, table, 0.2, rotary, norms, 1e-6, splits, window, sinks)
    found = paged_attention_kernels.decode(*arguments)
    bound = BOUNDS.get(dtype, 2e-3)
    assert (found.double().cpu() - expected).norm() / expected.norm() < bound
    for name, ours, theirs in (("keys", keys, wide_keys), ("values", values, wide_values)):
        assert torch.equal(ours.cpu().isnan(), theirs.isnan()), name
        check(ours.cpu().nan_to_num().to(torch.float32), theirs.nan_to_num(), torch.bfloat16, name)
