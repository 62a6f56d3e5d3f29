import pytest
import torch
from hypothesis import given
from ragged_lists import Ragged, assert_rows, eighths, quick, ragged

from corral.algorithms.declarations import with_options
from corral.algorithms.losses import AGGREGATIONS, GlobalCounts, aggregate, llds, num_preserved

SEQ_MEAN_TOKEN_MEAN = with_options(AGGREGATIONS["seq_mean_token_mean"])


def slow_llds(batch: Ragged) -> tuple[list[list[float]], int]:
    """The penalty per token, and the number of trajectories with an advantage of at least 0."""
    rows, preserved = [], 0
    for new, old, advantages, mask in zip(*batch.columns, batch.masks, strict=True):
        generated = [t for t, m in enumerate(mask) if m]
        good = bool(generated) and sum(advantages[t] for t in generated) >= 0
        preserved += good
        row = [0.0] * len(mask)
        turn: list[int] = []
        for t in range(len(mask) + 1):
            if t < len(mask) and mask[t]:
                turn.append(t)
                continue
            if good and sum(old[k] - new[k] for k in turn) > 0:
                for k in turn:
                    row[k] = max(0.0, old[k] - new[k])
            turn = []
        rows.append(row)
    return rows, preserved


@quick
@given(ragged(eighths, eighths, eighths))
def test_llds_matches_lists_in_value_gradient_and_count(batch: Ragged) -> None:
    new, old, advantages = batch.poisoned()
    new.requires_grad_()
    penalty = llds(new, old, advantages, batch.mask, batch.offsets)
    expected, preserved = slow_llds(batch)
    assert_rows(penalty, expected)
    assert num_preserved(advantages, batch.mask, batch.offsets) == preserved
    (gradient,) = torch.autograd.grad(penalty.sum(), new)
    nonzero = penalty.detach() > 0
    assert gradient[nonzero].tolist() == [-1.0] * int(nonzero.sum())
    assert torch.isfinite(gradient).all()
    assert gradient[~batch.mask].abs().sum() == 0


def test_nothing_is_penalised_before_anything_moved() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    penalty = llds(logprobs, logprobs.detach(), torch.ones(2), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]))
    (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
    assert penalty.tolist() == [0.0, 0.0]
    assert gradient.abs().sum() == 0


def test_the_papers_normalisation_is_an_aggregation() -> None:
    mask, offsets = torch.ones(5, dtype=torch.bool), torch.tensor([0, 2, 4, 5])
    new, old = torch.tensor([-2.0, -2.0, -3.0, -1.0, -9.0]), -torch.ones(5)
    advantages = torch.tensor([1.0, 1.0, 0.0, 0.0, -1.0])
    counts = GlobalCounts(5, num_preserved(advantages, mask, offsets))
    penalty = aggregate(llds(new, old, advantages, mask, offsets), mask, offsets, SEQ_MEAN_TOKEN_MEAN, counts)
    assert float(penalty) == pytest.approx(((1 + 1) / 2 + (2 + 0) / 2) / 2)
