"""Sampling in tiles against sampling from the whole distribution."""

import pytest
import torch
from compare import random

pytest.importorskip("triton")

from corral.kernels.gpu import sampling_kernels
from corral.kernels.sampling import sample_tokens, uniform

pytestmark = pytest.mark.slow

TEMPERATURES = [1.0, 0.5, 0.0, 2.0, 1.0]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_kernels, "TILE_SIZE", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "length"), [(64, 1), (150, 1), (1000, 1), (150, 3)])
def test_tokens_and_log_probs_are_those_of_the_whole_distribution(
    vocabulary: int, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """`length`: of sequences, whose last logits are sampled from."""
    logits = (3 * random(5, length, vocabulary, seed=1, dtype=dtype, device=device))[:, -1]
    rows = torch.arange(60, device=device) % 5
    generator = torch.Generator().manual_seed(2)
    seeds = torch.randint(-(2**62), 2**62, (60,), generator=generator).to(device)
    counters = (torch.arange(60, device=device) * 7).int()
    temperatures = torch.tensor(TEMPERATURES, device=device)
    on_host = [tensor.cpu() for tensor in (logits, rows, temperatures, seeds, counters)]
    tokens, logprobs = sampling_kernels.sample_in_tiles(logits, rows, temperatures, seeds, counters)
    expected_tokens, expected_logprobs = sample_tokens(*on_host)
    same = tokens.cpu() == expected_tokens
    assert same.sum() >= 59  # a point on the edge between two tokens may be rounded to the other one
    torch.testing.assert_close(logprobs.cpu()[same], expected_logprobs[same], atol=1e-5, rtol=1e-5)


def test_tokens_of_probability_zero_are_never_sampled(device: torch.device) -> None:
    logits = torch.full((1, 300), -torch.inf, device=device)
    logits[0, [3, 130, 131]] = torch.tensor([0.0, 1.0, 2.0], device=device)
    count = 400 if device.type == "cuda" else 60
    seeds = torch.arange(count, device=device)
    rows, counters = torch.zeros_like(seeds), torch.zeros_like(seeds).int()
    tokens, logprobs = sampling_kernels.sample_in_tiles(logits, rows, torch.ones(1, device=device), seeds, counters)
    assert set(tokens.tolist()) == {3, 130, 131}
    expected = logits.log_softmax(-1)[0, tokens]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_the_smallest_random_number_is_no_reason_to_sample_an_impossible_first_token(device: torch.device) -> None:
    logits = torch.tensor([[-40.0, 0.0, 1.0]], device=device)
    seeds = torch.tensor([7_226_366], device=device)  # the bits of its first random number are zeros
    rows, counters = torch.zeros_like(seeds), torch.zeros_like(seeds).int()
    tokens, _ = sampling_kernels.sample_in_tiles(logits, rows, torch.ones(1, device=device), seeds, counters)
    assert tokens.tolist() == [1]


def test_a_point_behind_the_sum_of_its_tile_is_no_reason_to_sample_an_impossible_last_token(
    device: torch.device,
) -> None:
    """The first kernel's sums say that the point is in the tile; the second one's are smaller."""
    logits = torch.full((1, 64), -40.0, device=device)
    logits[0, 20] = 0.0
    of_tile = torch.zeros(1, 1, device=device), torch.full((1, 1), 2.0, device=device)  # m and l
    argmax = torch.full((1, 1), 20, dtype=torch.int32, device=device)
    seeds = torch.arange(8, device=device)
    rows, counters = torch.zeros_like(seeds), torch.zeros_like(seeds).int()
    tokens, logprobs = torch.zeros_like(seeds), torch.zeros(8, device=device)
    sampling_kernels._sample_kernel[(8,)](
        logits, rows, torch.ones(1, device=device), seeds, counters, *of_tile, argmax, tokens, logprobs, 64, 64, 1,
        TILE=64, NUM_TILES=1,
    )  # fmt: skip
    assert (uniform(seeds, counters) * 2 > 1.01).any()
    assert set(tokens.tolist()) == {20}


def test_random_numbers_are_those_of_the_host(device: torch.device) -> None:
    """Of 1,024 equally likely tokens, the sampled one shows which random number it was."""
    logits = torch.zeros(1, 1024, device=device)
    seeds = torch.arange(40, device=device) * 977 - 20_000
    counters = torch.arange(40, device=device).int()
    tokens, _ = sampling_kernels.sample_in_tiles(
        logits, torch.zeros_like(seeds), torch.ones(1, device=device), seeds, counters
    )
    assert tokens.tolist() == (uniform(seeds, counters) * 1024).long().tolist()
