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
    prompts = Sampler(num_rows, seed, shuffle).next(3 * num_rows)
    for epoch in range(3):
        assert sorted(prompt.index for prompt in prompts if prompt.epoch == epoch) == list(range(num_rows))


@given(sizes, seeds, st.booleans(), chunks)
def test_taking_prompts_in_any_chunks_gives_the_same_sequence(
    num_rows: int, seed: int, shuffle: bool, chunks: list[int]
) -> None:
    in_chunks = Sampler(num_rows, seed, shuffle)
    taken = [prompt for chunk in chunks for prompt in in_chunks.next(chunk)]
    assert taken == Sampler(num_rows, seed, shuffle).next(sum(chunks))


@given(sizes, seeds, st.booleans(), st.integers(0, 60), st.integers(0, 60))
def test_a_resumed_sampler_goes_on_like_an_uninterrupted_one(
    num_rows: int, seed: int, shuffle: bool, before: int, after: int
) -> None:
    first = Sampler(num_rows, seed, shuffle)
    first.next(before)
    resumed = Sampler(num_rows, seed, shuffle)
    resumed.load_state(first.state())
    assert resumed.next(after) == first.next(after)


def test_prompt_ids_count_up_from_zero_over_epochs() -> None:
    sampler = Sampler(3, seed=0, shuffle=True)
    assert [prompt.prompt_id for prompt in sampler.next(2) + sampler.next(5)] == [0, 1, 2, 3, 4, 5, 6]


def test_epochs_are_shuffled_differently() -> None:
    prompts = Sampler(100, seed=0, shuffle=True).next(200)
    assert [prompt.index for prompt in prompts[:100]] != [prompt.index for prompt in prompts[100:]]


def test_seeds_shuffle_differently() -> None:
    assert Sampler(100, seed=0, shuffle=True).next(100) != Sampler(100, seed=1, shuffle=True).next(100)


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    assert [prompt.index for prompt in Sampler(8, seed=7, shuffle=True).next(8)] == [6, 3, 4, 0, 2, 7, 5, 1]


def test_without_shuffling_rows_come_in_their_order() -> None:
    assert [prompt.index for prompt in Sampler(3, seed=0, shuffle=False).next(5)] == [0, 1, 2, 0, 1]


def test_the_state_is_three_integers() -> None:
    sampler = Sampler(10, seed=4, shuffle=True)
    sampler.next(13)
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


def test_the_state_of_a_checkpoint_of_version_0_5_is_loaded() -> None:
    sampler = Sampler(3, seed=0, shuffle=True)
    sampler.load_state({"seed": 0, "num_rows": 3, "next_ordinal": 5})
    assert sampler.next(1)[0].prompt_id == 5
