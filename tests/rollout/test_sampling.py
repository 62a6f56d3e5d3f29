"""Randomness that depends on seed and counter alone, and draws that follow the distribution."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from corral.kernels.sampling import (
    Truncation,
    sample_by_inverse_cdf,
    sample_tokens,
    scale_logits,
    truncate_logits,
    uniform,
)


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    seeds = torch.arange(400)[:, None].expand(400, 250).reshape(-1)
    counters = torch.arange(250).repeat(400)
    values = uniform(seeds, counters).double()
    assert values.min() > 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.003
    histogram = torch.histc(values, 20, 0, 1)
    assert ((histogram - 5000).abs() < 350).all()
    by_seed = values.reshape(400, 250)
    assert torch.corrcoef(by_seed[:2]).abs()[0, 1] < 0.2
    assert torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].abs() < 0.01


def test_a_random_number_does_not_depend_on_what_else_is_sampled() -> None:
    together = uniform(torch.tensor([3, 4, 5]), torch.tensor([7, 8, 9]))
    alone = uniform(torch.tensor([4]), torch.tensor([8]))
    assert together[1] == alone[0]


FIRST_POINT = 7_226_366
"""A seed whose first random number has only zeros as its bits."""


def test_the_smallest_random_number_is_no_reason_to_sample_an_impossible_first_token() -> None:
    logits = torch.tensor([[-40.0, 0.0, 1.0]])
    tokens, _ = sample_tokens(
        logits, torch.zeros(1, dtype=torch.long), torch.ones(1), torch.tensor([FIRST_POINT]), torch.tensor([0])
    )
    assert tokens.tolist() == [1]
    assert uniform(torch.tensor([FIRST_POINT]), torch.tensor([0])).item() == 2.0**-24


@settings(deadline=None)
@given(
    st.lists(st.integers(-30, 30), min_size=2, max_size=12, unique=True),
    st.integers(0, 5),
    st.sampled_from([0.3, 0.71, 1.0]),
    st.sampled_from([0.0, 0.11, 0.5]),
)
def test_truncation_is_that_of_transformers(row: list[int], top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([row]) / 7
    expected = TopKLogitsWarper(min(top_k, len(row)))(None, logits) if top_k else logits
    for warper in (TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        expected = warper(None, expected)
    ours = truncate_logits(logits, Truncation(torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])))
    assert torch.equal(ours, expected)


def test_sampled_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf], [3.0, 0.0, 0.0, 0.0]])
    rows = torch.arange(40_000) % 2
    uniforms = uniform(torch.arange(40_000), torch.zeros(40_000, dtype=torch.long))
    tokens = sample_by_inverse_cdf(logits, rows, uniforms, torch.tensor([False, False]))
    for row in (0, 1):
        observed = torch.bincount(tokens[rows == row], minlength=4) / 20_000
        torch.testing.assert_close(observed, logits[row].softmax(-1), atol=0.012, rtol=0)
    assert not (tokens[rows == 0] == 3).any()


def test_a_greedy_row_gives_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 0.1, 0.2]])
    tokens = sample_by_inverse_cdf(
        logits, torch.tensor([1, 0, 1]), torch.tensor([0.01, 0.99, 0.01]), torch.tensor([True, True])
    )
    assert tokens.tolist() == [2, 1, 2]


def test_greedy_rows_keep_the_distribution_of_temperature_one() -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    scaled = scale_logits(logits, torch.tensor([0.0, 0.5]))
    assert scaled.tolist() == [[1.0, 2.0], [2.0, 4.0]]
