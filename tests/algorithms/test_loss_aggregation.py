from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_lists import Ragged, Rows, mean, numbers, quick, ragged

from corral.algorithms.declarations import AggregationDeclaration, AlgorithmPart, with_options
from corral.algorithms.losses import AGGREGATIONS, GlobalCounts, aggregate

NORM = 16.0
PARTS: dict[str, AlgorithmPart[AggregationDeclaration]] = {
    name: with_options(declared, **({"norm": NORM} if "norm" in declared.option_names else {}))
    for name, declared in AGGREGATIONS.items()
}


def slow(rows: Rows, mode: str, counts: GlobalCounts) -> float:
    num_tokens, num_sequences = max(counts.num_tokens, 1), max(counts.num_sequences, 1)
    return {
        "token_mean": sum(map(sum, rows)) / num_tokens,
        "token_sum": sum(map(sum, rows)),
        "seq_mean_token_sum": sum(map(sum, rows)) / num_sequences,
        "seq_mean_token_mean": sum(map(mean, rows)) / num_sequences,
        "seq_mean_token_sum_norm": sum(map(sum, rows)) / num_sequences / NORM,
    }[mode]


def parts(batch: Ragged, cuts: list[int]) -> list[Ragged]:
    """The batch cut into micro-batches of whole sequences, some of them empty."""
    bounds = [0, *sorted(cut % (len(batch.masks) + 1) for cut in cuts), len(batch.masks)]
    return [
        Ragged(batch.masks[a:b], batch.groups[a:b], [rows[a:b] for rows in batch.columns]) for a, b in pairwise(bounds)
    ]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@quick
@given(batch=ragged(numbers))
def test_each_mode_matches_lists(mode: str, batch: Ragged) -> None:
    counts = batch.counts
    result = aggregate(batch.poisoned()[0], batch.mask, batch.offsets, PARTS[mode], counts)
    assert float(result) == pytest.approx(slow(batch.generated(batch.columns[0]), mode, counts), abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@quick
@given(batch=ragged(numbers), cuts=st.lists(st.integers(0, 6), max_size=3))
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    mode: str, batch: Ragged, cuts: list[int]
) -> None:
    counts = batch.counts
    whole = batch.tensors()[0].requires_grad_()
    whole_loss = aggregate(whole, batch.mask, batch.offsets, PARTS[mode], counts)
    whole_loss.backward()

    micro_batches = parts(batch, cuts)
    tokens = [part.tensors()[0].requires_grad_() for part in micro_batches]
    loss = torch.zeros((), dtype=torch.float64)
    for part, part_tokens in zip(micro_batches, tokens, strict=True):
        loss = loss + aggregate(part_tokens, part.mask, part.offsets, PARTS[mode], counts)
    loss.backward()

    torch.testing.assert_close(loss, whole_loss, atol=1e-12, rtol=1e-12)
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([t.grad for t in tokens if t.grad is not None]), whole.grad)


def test_a_batch_without_generated_tokens_has_a_loss_of_zero() -> None:
    mask, offsets = torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2])
    for mode in AGGREGATIONS:
        assert aggregate(torch.ones(2), mask, offsets, PARTS[mode], GlobalCounts(0, 0)) == 0


def test_a_missing_norm_is_an_error() -> None:
    arguments = torch.ones(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="needs its constant"):
        aggregate(*arguments, with_options(AGGREGATIONS["seq_mean_token_sum_norm"]), GlobalCounts(1, 1))
