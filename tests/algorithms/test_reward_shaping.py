import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_lists import quick

from corral.algorithms.shaping import informative_groups, overlong_penalty


@quick
@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1, 50), st.floats(0.1, 3.0))
def test_the_overlong_penalty_matches_dapos_formula(lengths: list[int], buffer: int, penalty: float) -> None:
    result = overlong_penalty(torch.tensor(lengths, dtype=torch.long), 100, buffer, penalty)
    expected = [max(min(-(n - (100 - buffer)) / buffer * penalty, 0), -penalty) for n in lengths]
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_overlong_penalty_is_full_at_the_limit_and_absent_before_the_buffer() -> None:
    assert overlong_penalty(torch.tensor([80, 90, 100]), 100, 20, 1.0).tolist() == pytest.approx([0.0, -0.5, -1.0])


def test_a_buffer_longer_than_the_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), 10, 11, 1.0)


@quick
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(-1, 2)), min_size=1, max_size=10))
def test_a_group_is_informative_if_its_rewards_differ(samples: list[tuple[float, int]]) -> None:
    rewards, groups = (torch.tensor(column) for column in zip(*samples, strict=True))
    expected = [len({r for r, g in samples if g == group}) > 1 for _, group in samples]
    assert informative_groups(rewards, groups).tolist() == expected
