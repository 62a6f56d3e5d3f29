import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from ragged_lists import Ragged, assert_rows, mean, numbers, quick, ragged

from corral.algorithms import ragged as library


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)


@quick
@given(ragged())
def test_every_token_knows_its_sequence(batch: Ragged) -> None:
    expected = [i for i, row in enumerate(batch.masks) for _ in row]
    assert library.segment_ids(batch.offsets).tolist() == expected


@quick
@given(ragged(numbers))
def test_sums_means_and_counts_of_sequences_see_generated_tokens_only(batch: Ragged) -> None:
    (values,) = batch.poisoned()
    rows = batch.generated(batch.columns[0])
    close(library.segment_sum(values, batch.mask, batch.offsets), [sum(row) for row in rows])
    close(library.segment_mean(values, batch.mask, batch.offsets), [mean(row) for row in rows])
    assert library.segment_count(batch.mask, batch.offsets).tolist() == [len(row) for row in rows]


@quick
@given(ragged(numbers))
def test_a_sum_passes_its_gradient_to_generated_tokens_only(batch: Ragged) -> None:
    (values,) = batch.poisoned()
    values.requires_grad_()
    library.segment_sum(values, batch.mask, batch.offsets).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == batch.mask.double().tolist()


@quick
@given(ragged(numbers), st.sampled_from([0.0, 0.5, 1.0]))
def test_suffix_sums_follow_their_recursion(batch: Ragged, discount: float) -> None:
    index, offsets = library.compact(batch.mask, batch.offsets)
    (values,) = batch.tensors()
    expected = []
    for row in batch.generated(batch.columns[0]):
        sums: list[float] = []
        for value in reversed(row):
            sums.insert(0, value + discount * (sums[0] if sums else 0.0))
        expected.append(sums)
    assert_rows(library.discounted_suffix_sums(values[index], offsets, discount), expected)


@quick
@given(ragged(numbers))
def test_a_shifted_row_ends_with_zero(batch: Ragged) -> None:
    (values,) = batch.tensors()
    assert_rows(library.shift_left(values, batch.offsets), [[*row[1:], 0.0][: len(row)] for row in batch.columns[0]])


@quick
@given(ragged())
def test_a_turn_is_an_unbroken_run_of_one_sequence(batch: Ragged) -> None:
    expected, turn = [], -1
    for row in batch.masks:
        previous = False
        for generated in row:
            turn += generated and not previous
            expected.append(turn if generated else -1)
            previous = generated
    assert library.turn_ids(batch.mask, batch.offsets).tolist() == expected


@quick
@given(st.lists(st.tuples(st.floats(-3, 3), st.booleans(), st.integers(-2, 2)), min_size=1, max_size=10))
def test_group_statistics_match_lists(samples: list[tuple[float, bool, int]]) -> None:
    members = {group: [v for v, present, g in samples if present and g == group] for _, _, group in samples}
    values = torch.tensor([v if present else torch.nan for v, present, _ in samples], dtype=torch.float64)
    present, groups = (torch.tensor(column) for column in list(zip(*samples, strict=True))[1:])

    def std(values: list[float]) -> float:
        squares = sum((x - mean(values)) ** 2 for x in values)
        return math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0

    for function, reference in [
        (library.group_sum, sum),
        (library.group_mean, mean),
        (library.group_std, std),
        (library.group_range, lambda x: max(x) - min(x) if x else 0.0),
    ]:
        close(function(values, present, groups), [reference(members[g]) for _, _, g in samples])
    close(library.group_count(present, groups), [len(members[g]) for _, _, g in samples])


@quick
@given(ragged(numbers))
def test_whitening_uses_the_statistics_of_generated_tokens(batch: Ragged) -> None:
    assume(batch.num_generated >= 2)
    rows = batch.generated(batch.columns[0])
    chosen = [x for row in rows for x in row]
    variance = sum((x - mean(chosen)) ** 2 for x in chosen) / (len(chosen) - 1)
    expected = [[(x - mean(chosen)) / math.sqrt(variance + 1e-8) for x in row] for row in rows]
    assert_rows(library.whiten(batch.poisoned()[0], batch.mask), batch.spread(expected))


def test_parts_are_whitened_by_themselves_and_a_token_alone_is_zero() -> None:
    values, mask = torch.tensor([1.0, 2.0, 10.0, 40.0, 7.0, 5.0]), torch.tensor([True, True, True, True, True, False])
    parts = torch.tensor([0, 0, 3, 3, 5, 0])
    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0, 0.0]) / 2**0.5
    torch.testing.assert_close(library.whiten_parts(values, mask, parts), expected)


def test_whitening_one_token_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="at least 2 generated tokens"):
        library.whiten(torch.ones(3), torch.tensor([True, False, False]))


def test_equal_float32_rewards_have_a_spread_of_exactly_zero() -> None:
    rewards, groups = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long)
    assert library.group_std(rewards, torch.ones(7, dtype=torch.bool), groups).max() == 0
