import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.data.sampler import Sampler
from corral.recipe.errors import UserError

sizes = st.integers(1, 20)
seeds = st.integers(0, 2**32)
chunks = st.lists(st.integers(0, 15), max_size=8)


@given(sizes, seeds, st.booleans())
def test_each_epoch_is_a_permutation_of_all_rows(num_rows: int, seed: int, shuffle: bool) -> None:
    draws = Sampler(num_rows, seed, shuffle).draw(3 * num_rows)
    for epoch in range(3):
        assert sorted(draw.index for draw in draws if draw.epoch == epoch) == list(range(num_rows))


@given(sizes, seeds, st.booleans(), chunks)
def test_drawing_in_any_chunks_gives_the_same_sequence(
    num_rows: int, seed: int, shuffle: bool, chunks: list[int]
) -> None:
    in_chunks = Sampler(num_rows, seed, shuffle)
    drawn = [draw for chunk in chunks for draw in in_chunks.draw(chunk)]
    assert drawn == Sampler(num_rows, seed, shuffle).draw(sum(chunks))


@given(sizes, seeds, st.booleans(), st.integers(0, 60), st.integers(0, 60))
def test_a_resumed_sampler_goes_on_like_an_uninterrupted_one(
    num_rows: int, seed: int, shuffle: bool, before: int, after: int
) -> None:
    first = Sampler(num_rows, seed, shuffle)
    first.draw(before)
    resumed = Sampler(num_rows, seed, shuffle)
    resumed.load_state(first.state())
    assert resumed.draw(after) == first.draw(after)


def test_ordinals_count_up_from_zero_over_epochs() -> None:
    sampler = Sampler(3, seed=0, shuffle=True)
    assert [draw.prompt_id for draw in sampler.draw(2) + sampler.draw(5)] == [0, 1, 2, 3, 4, 5, 6]


def test_epochs_are_shuffled_differently() -> None:
    draws = Sampler(100, seed=0, shuffle=True).draw(200)
    assert [draw.index for draw in draws[:100]] != [draw.index for draw in draws[100:]]


def test_seeds_shuffle_differently() -> None:
    assert Sampler(100, seed=0, shuffle=True).draw(100) != Sampler(100, seed=1, shuffle=True).draw(100)


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    assert [draw.index for draw in Sampler(8, seed=7, shuffle=True).draw(8)] == [6, 3, 4, 0, 2, 7, 5, 1]


def test_without_shuffling_rows_come_in_their_order() -> None:
    assert [draw.index for draw in Sampler(3, seed=0, shuffle=False).draw(5)] == [0, 1, 2, 0, 1]


def test_the_state_is_three_integers() -> None:
    sampler = Sampler(10, seed=4, shuffle=True)
    sampler.draw(13)
    assert sampler.state() == {"seed": 4, "num_rows": 10, "next_prompt_id": 13}


def test_a_state_for_another_number_of_rows_is_refused() -> None:
    with pytest.raises(UserError, match="10 rows of data, now there are 11"):
        Sampler(11, seed=0, shuffle=True).load_state(Sampler(10, seed=0, shuffle=True).state())


def test_a_state_with_another_seed_is_refused() -> None:
    with pytest.raises(UserError, match="seed 1, now it is 2"):
        Sampler(10, seed=2, shuffle=True).load_state(Sampler(10, seed=1, shuffle=True).state())


def test_no_rows_is_an_error() -> None:
    with pytest.raises(UserError, match="no rows"):
        Sampler(0, seed=0, shuffle=True)
