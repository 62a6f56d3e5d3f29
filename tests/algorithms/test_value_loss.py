import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_lists import Ragged, assert_rows, numbers, quick, ragged

from corral.algorithms.losses import value_loss


def slow(value: float, old: float, target: float, clip: float | None) -> tuple[float, float, bool]:
    """Loss, derivative by the value, clipped or not."""
    error = (value - target) ** 2
    if clip is not None:
        bounded = (min(max(value, old - clip), old + clip) - target) ** 2
        if bounded > error:
            return bounded / 2, 0.0, True
    return error / 2, value - target, False


@quick
@given(ragged(numbers, numbers, numbers), st.sampled_from([0.5, 0.1, None]))
def test_loss_gradient_and_sums_match_lists(batch: Ragged, clip: float | None) -> None:
    values, old_values, returns = batch.poisoned()
    values.requires_grad_()
    result = value_loss(values, old_values, returns, batch.mask, clip)
    columns = [batch.generated(rows) for rows in batch.columns]
    expected = [[slow(*token, clip) for token in zip(*rows, strict=True)] for rows in zip(*columns, strict=True)]
    (gradient,) = torch.autograd.grad(result.loss.sum(), values)
    assert_rows(result.loss, batch.spread([[loss for loss, _, _ in row] for row in expected]))
    assert_rows(gradient, batch.spread([[slope for _, slope, _ in row] for row in expected]))
    assert result.sums["clipped"] == sum(clipped for row in expected for _, _, clipped in row)
    assert float(result.sums["value"]) == pytest.approx(sum(map(sum, columns[0])), abs=1e-9)
    errors = [
        (v - r) ** 2
        for row, targets in zip(columns[0], columns[2], strict=True)
        for v, r in zip(row, targets, strict=True)
    ]
    assert float(result.sums["squared_error"]) == pytest.approx(sum(errors), abs=1e-9)
