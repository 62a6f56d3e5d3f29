import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_lists import quick

from corral.algorithms.advantages import (
    OverlongOptions,
    RewardedBatch,
    ShapedResponses,
    clipped_rewards,
    grpo,
    informative_groups,
    overlong_penalty,
)
from corral.algorithms.declarations import NoOptions


def penalties(lengths: list[int], limit: int, buffer: int, penalty: float) -> torch.Tensor:
    responses = ShapedResponses(torch.tensor(lengths, dtype=torch.long), limit)
    return overlong_penalty(responses, OverlongOptions(buffer, penalty))


@quick
@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1, 50), st.floats(0.1, 3.0))
def test_the_overlong_penalty_matches_dapos_formula(lengths: list[int], buffer: int, penalty: float) -> None:
    result = penalties(lengths, 100, buffer, penalty)
    expected = [max(min(-(n - (100 - buffer)) / buffer * penalty, 0), -penalty) for n in lengths]
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_buffer_longer_than_the_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="buffer"):
        penalties([1], 10, 11, 1.0)


TURNS = st.lists(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=4), min_size=1, max_size=5)
"""Rewards of trajectories, turn by turn."""


@quick
@given(TURNS, st.floats(0.1, 5))
def test_a_trajectorys_reward_is_clipped_and_its_turns_keep_their_shares(
    trajectories: list[list[float]], bound: float
) -> None:
    rewards = torch.tensor([reward for turns in trajectories for reward in turns])
    offsets = torch.tensor([0, *(len(turns) for turns in trajectories)]).cumsum(0)
    clipped = clipped_rewards(rewards, torch.ones_like(rewards, dtype=torch.bool), offsets, bound)
    for turns, own in zip(trajectories, clipped.tensor_split(offsets[1:-1]), strict=True):
        total = sum(turns)
        scale = 1 if abs(total) <= bound else bound / abs(total)
        assert own.tolist() == pytest.approx([reward * scale for reward in turns], abs=1e-6)


def test_what_is_not_generated_has_no_reward_to_clip() -> None:
    rewards, mask = torch.tensor([torch.nan, 4.0, 9.0, -1.0]), torch.tensor([False, True, False, True])
    clipped = clipped_rewards(rewards, mask, torch.tensor([0, 4]), 1.0)
    assert clipped[mask].tolist() == pytest.approx([4 / 3, -1 / 3])


@quick
@given(st.lists(st.floats(1.5, 1000, width=32), min_size=2, max_size=5), st.floats(0.1, 1))
def test_rewards_that_are_clipped_to_the_same_number_teach_nothing(rewards: list[float], bound: float) -> None:
    number = len(rewards)
    mask, offsets = torch.ones(number, dtype=torch.bool), torch.arange(number + 1)
    clipped = clipped_rewards(torch.tensor(rewards), mask, offsets, bound)
    assert clipped.tolist() == [bound] * number
    batch = RewardedBatch(clipped, mask, offsets, torch.zeros(number, dtype=torch.int64))
    assert grpo(batch, NoOptions()).advantages.abs().max() < 1e-9


@quick
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(-1, 2)), min_size=1, max_size=10))
def test_a_group_is_informative_if_its_rewards_differ(samples: list[tuple[float, int]]) -> None:
    rewards, groups = (torch.tensor(column) for column in zip(*samples, strict=True))
    expected = [len({r for r, g in samples if g == group}) > 1 for _, group in samples]
    assert informative_groups(rewards, groups).tolist() == expected
