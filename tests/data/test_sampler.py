from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.data.sampler import FAILED, OUTSIDE, SOLVED, RewardHistory, SampledPrompt, SampledSource, Sampler
from corral.recipe.errors import UserError
from corral.recipe.schema import Curriculum

sizes = st.integers(1, 20)
seeds = st.integers(0, 2**32)
chunks = st.lists(st.integers(0, 15), max_size=8)
weighted = st.lists(st.builds(SampledSource, sizes, st.floats(0.01, 100)), min_size=2, max_size=4)


def sampler_of(num_rows: int, seed: int, shuffle: bool) -> Sampler:
    return Sampler([SampledSource(num_rows)], seed, shuffle)


@given(sizes, seeds, st.booleans())
def test_each_epoch_is_a_permutation_of_all_rows(num_rows: int, seed: int, shuffle: bool) -> None:
    prompts = sampler_of(num_rows, seed, shuffle).next(3 * num_rows)
    for epoch in range(3):
        assert sorted(prompt.index for prompt in prompts if prompt.epoch == epoch) == list(range(num_rows))


@given(sizes, seeds, st.booleans(), chunks)
def test_taking_prompts_in_any_chunks_gives_the_same_sequence(
    num_rows: int, seed: int, shuffle: bool, chunks: list[int]
) -> None:
    in_chunks = sampler_of(num_rows, seed, shuffle)
    taken = [prompt for chunk in chunks for prompt in in_chunks.next(chunk)]
    assert taken == sampler_of(num_rows, seed, shuffle).next(sum(chunks))


@given(sizes, seeds, st.booleans(), st.integers(0, 60), st.integers(0, 60))
def test_a_resumed_sampler_goes_on_like_an_uninterrupted_one(
    num_rows: int, seed: int, shuffle: bool, before: int, after: int
) -> None:
    first = sampler_of(num_rows, seed, shuffle)
    first.next(before)
    resumed = sampler_of(num_rows, seed, shuffle)
    resumed.load_state(first.state())
    assert resumed.next(after) == first.next(after)


def test_prompt_ids_count_up_from_zero_over_epochs() -> None:
    sampler = sampler_of(3, seed=0, shuffle=True)
    assert [prompt.prompt_id for prompt in sampler.next(2) + sampler.next(5)] == [0, 1, 2, 3, 4, 5, 6]


def test_epochs_and_seeds_are_shuffled_differently_and_as_on_every_machine_and_version() -> None:
    first, second = (sampler_of(100, seed=seed, shuffle=True).next(200) for seed in (0, 1))
    assert len({tuple(one.index for one in half) for half in (first[:100], first[100:], second[:100])}) == 3
    assert [prompt.index for prompt in sampler_of(8, seed=7, shuffle=True).next(8)] == [6, 3, 4, 0, 2, 7, 5, 1]


def test_without_shuffling_rows_come_in_their_order() -> None:
    assert [prompt.index for prompt in sampler_of(3, seed=0, shuffle=False).next(5)] == [0, 1, 2, 0, 1]


def test_the_state_is_three_integers() -> None:
    sampler = sampler_of(10, seed=4, shuffle=True)
    sampler.next(13)
    assert sampler.state() == {"seed": 4, "num_rows": 10, "next_prompt_id": 13}


@pytest.mark.parametrize(
    ("num_rows", "seed", "what"), [(11, 1, "10 rows of data, now there are 11"), (10, 2, "seed 1, now it is 2")]
)
def test_a_state_for_other_rows_or_another_seed_is_refused(num_rows: int, seed: int, what: str) -> None:
    with pytest.raises(UserError, match=what):
        sampler_of(num_rows, seed, shuffle=True).load_state(sampler_of(10, seed=1, shuffle=True).state())


def test_no_rows_is_an_error() -> None:
    with pytest.raises(UserError, match="no rows"):
        sampler_of(0, seed=0, shuffle=True)


def test_the_state_of_a_checkpoint_of_version_0_5_is_loaded() -> None:
    sampler = sampler_of(3, seed=0, shuffle=True)
    sampler.load_state({"seed": 0, "num_rows": 3, "next_ordinal": 5})
    assert sampler.next(1)[0].prompt_id == 5


# --- several sources with weights


@given(weighted, seeds, st.booleans(), st.integers(1, 200))
def test_shares_follow_the_weights_at_every_prompt(
    sources: list[SampledSource], seed: int, shuffle: bool, num_prompts: int
) -> None:
    starts = [sum(source.num_rows for source in sources[:i]) for i in range(len(sources) + 1)]
    prompts = Sampler(sources, seed, shuffle).next(num_prompts)
    for i, source in enumerate(sources):
        drawn = sum(starts[i] <= prompt.index < starts[i + 1] for prompt in prompts)
        share = source.weight / sum(one.weight for one in sources)
        assert abs(drawn - share * num_prompts) < len(sources)


@given(weighted, seeds, st.booleans(), st.integers(1, 200))
def test_each_epoch_of_a_source_has_each_of_its_rows_once(
    sources: list[SampledSource], seed: int, shuffle: bool, num_prompts: int
) -> None:
    prompts = Sampler(sources, seed, shuffle).next(num_prompts)
    start = 0
    for source in sources:
        own = [prompt for prompt in prompts if start <= prompt.index < start + source.num_rows]
        for first in range(0, len(own), source.num_rows):
            epoch = own[first : first + source.num_rows]
            assert {prompt.epoch for prompt in epoch} == {first // source.num_rows}
            assert len({prompt.index for prompt in epoch}) == len(epoch)
        start += source.num_rows


@given(weighted, seeds, st.booleans(), chunks, st.integers(0, 60))
def test_a_resumed_sampler_of_several_sources_loses_and_doubles_nothing(
    sources: list[SampledSource], seed: int, shuffle: bool, chunks: list[int], after: int
) -> None:
    first = Sampler(sources, seed, shuffle)
    taken = [prompt for chunk in chunks for prompt in first.next(chunk)]
    resumed = Sampler(sources, seed, shuffle)
    resumed.load_state(first.state())
    assert resumed.with_ids(range(len(taken))) == taken  # what was in flight is handed out again
    assert resumed.next(after) == first.next(after)
    whole = Sampler(sources, seed, shuffle).next(len(taken) + after)
    assert whole == resumed.with_ids(range(len(taken) + after))


def test_sources_of_equal_length_are_shuffled_differently() -> None:
    prompts = Sampler([SampledSource(100), SampledSource(100)], seed=0, shuffle=True).next(200)
    first, second = ([p.index % 100 for p in prompts if p.index // 100 == source] for source in range(2))
    assert first != second


def test_three_sources_take_turns_by_their_weights() -> None:
    sampler = Sampler([SampledSource(2, 2.0), SampledSource(9, 1.0), SampledSource(9, 1.0)], seed=0, shuffle=False)
    assert [prompt.index for prompt in sampler.next(8)] == [0, 2, 11, 1, 0, 3, 12, 1]


@pytest.mark.parametrize(
    ("before", "now", "what"),
    [
        (([SampledSource(3, 1.0), SampledSource(3, 1.0)],), ([SampledSource(6)],), "other sources or weights"),
        (
            ([SampledSource(3, 1.0), SampledSource(3, 1.0)],),
            ([SampledSource(3, 1.0), SampledSource(3, 2.0)],),
            "other sources or weights",
        ),
        (([SampledSource(2)], [1.0, 2.0]), ([SampledSource(2)], [2.0, 1.0]), "another order of rows"),
        (([SampledSource(2)],), ([SampledSource(2)], [2.0, 1.0]), "another order of rows"),
    ],
)
def test_a_state_of_other_weights_or_orders_is_refused(
    before: tuple[list[SampledSource], list[float]], now: tuple[list[SampledSource], list[float]], what: str
) -> None:
    def make(sources: list[SampledSource], difficulties: list[float] | None = None) -> Sampler:
        return Sampler(sources, 0, True, difficulties)

    with pytest.raises(UserError, match=what):
        make(*now).load_state(make(*before).state())


# --- curricula


def test_epochs_go_from_easy_to_hard_and_shuffle_equals() -> None:
    difficulties = [3.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    prompts = Sampler([SampledSource(6)], 1, True, difficulties).next(12)
    for epoch in (prompts[:6], prompts[6:]):
        assert [difficulties[prompt.index] for prompt in epoch] == [1, 1, 1, 2, 2, 3]
    assert [prompt.index for prompt in prompts[:6]] != [prompt.index for prompt in prompts[6:]]


def at(row: int, prompt_id: int = 0) -> SampledPrompt:
    return SampledPrompt(prompt_id, row, 0)


def test_rows_are_skipped_once_all_samples_were_solved_or_failed_often_enough_in_a_row() -> None:
    history = RewardHistory(Curriculum(skip_solved=2, skip_failed=1), num_rows=3, seed=0)
    history.record(0, [1.0, 1.0], has_all=True)
    assert history.reason_to_skip(at(0)) is None
    history.record(0, [1.0, 0.5], has_all=True)  # not in a row
    history.record(0, [1.0, 1.0], has_all=True)
    assert history.reason_to_skip(at(0)) is None
    history.record(0, [1.0, 2.0], has_all=True)
    history.record(1, [0.0, -1.0], has_all=True)
    assert [history.reason_to_skip(at(row)) for row in range(3)] == [SOLVED, FAILED, None]
    assert (history.num_retired, history.bring_back_if_none_is_left()) == (2, False)
    history.record(2, [0.0], has_all=True)
    assert history.bring_back_if_none_is_left()
    assert [history.reason_to_skip(at(row)) for row in range(3)] == [None, None, None]


def test_samples_that_failed_neither_retire_a_row_nor_keep_it() -> None:
    history = RewardHistory(Curriculum(skip_solved=2, skip_failed=1), num_rows=2, seed=0)
    history.record(0, [1.0, 1.0], has_all=True)
    history.record(0, [0.0], has_all=False)
    history.record(1, [0.0], has_all=False)
    assert history.num_retired == 0
    history.record(0, [1.0, 1.0], has_all=True)
    assert history.reason_to_skip(at(0)) == SOLVED


def test_rows_outside_of_the_range_are_drawn_in_a_fraction_of_the_epochs() -> None:
    history = RewardHistory(Curriculum(mean_reward=(0.25, 0.75), others=0.2), num_rows=3, seed=0)
    history.record(0, [1.0, 1.0, 0.0, 0.0], has_all=True)
    history.record(1, [1.0, 1.0, 1.0, 0.0, 1.0], has_all=True)
    for row, expected in ((0, 0.0), (1, 0.8), (2, 0.0)):  # the last is not known yet
        skipped = [history.reason_to_skip(at(row, prompt_id)) for prompt_id in range(1000)]
        assert sum(one == OUTSIDE for one in skipped) / 1000 == pytest.approx(expected, abs=0.03)
    history.record(1, [0.0] * 3, has_all=True)  # now 0.5
    assert history.reason_to_skip(at(1)) is None


def test_a_reward_history_survives_a_checkpoint(tmp_path: Path) -> None:
    first = RewardHistory(Curriculum(mean_reward=(0.2, 0.8)), num_rows=2, seed=0)
    first.record(1, [0.1, 0.2], has_all=True)
    first.save(tmp_path)
    again = RewardHistory(Curriculum(mean_reward=(0.2, 0.8)), num_rows=2, seed=0)
    again.load(tmp_path)
    assert again.rows.tolist() == first.rows.tolist() == [(0.0, 0, 0, 0), (0.1 + 0.2, 2, 0, 0)]
