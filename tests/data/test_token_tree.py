"""Token trees and batches: nothing lost, nothing computed twice, caps kept."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import make_trajectory

from corral.data.batch import Batch, TokenTree, distinct_tokens
from corral.recipe.schema import KEYS_PER_TOKEN

token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sequence, np.int64) for sequence in sequences]


@given(token_lists)
def test_every_sequence_can_be_read_back_along_its_path(sequences: list[list[int]]) -> None:
    tree = TokenTree.build(arrays(sequences))
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == sequence
        assert tree.positions[path].tolist() == list(range(len(sequence)))


@given(token_lists)
def test_a_tree_has_one_node_for_every_distinct_prefix(sequences: list[list[int]]) -> None:
    histories = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
    assert TokenTree.build(arrays(sequences)).num_nodes == len(histories)
    assert distinct_tokens(arrays(sequences)) == len(histories)


@given(token_lists)
def test_chunks_cover_every_node_once_and_end_their_own_path(sequences: list[list[int]]) -> None:
    tree = TokenTree.build(arrays(sequences))
    assert [node for chunk in tree.chunks for node in range(chunk.start, chunk.end)] == list(range(tree.num_nodes))
    for chunk in tree.chunks:
        assert chunk.path[-(chunk.end - chunk.start) :].tolist() == list(range(chunk.start, chunk.end))


@given(token_lists)
def test_trees_under_different_roots_share_no_node(sequences: list[list[int]]) -> None:
    tree = TokenTree.build(arrays(sequences))
    assert len(tree.trees) == len({sequence[0] for sequence in sequences})
    for chunks in tree.trees:
        nodes = range(chunks[0].start, chunks[-1].end)
        assert all(node in nodes for chunk in chunks for node in chunk.path.tolist())


def batch_of(sequences: list[list[int]]) -> Batch:
    return Batch.of([make_trajectory([7, *s[:1]], [*s, 0], group=i // 3) for i, s in enumerate(sequences)])


@settings(deadline=None)
@given(token_lists, st.integers(12, 40))
def test_packs_hold_every_trajectory_once_and_stay_under_the_cap(sequences: list[list[int]], cap: int) -> None:
    batch = batch_of(sequences)
    packs = batch.pack(cap)
    assert sorted(row for pack in packs for row in pack.rows) == list(range(len(batch)))
    assert all(pack.tree.num_nodes <= cap for pack in packs)


def test_packs_of_short_answers_to_a_long_prompt_have_a_bounded_number_of_keys() -> None:
    batch = Batch.of([make_trajectory([7] * 90, [n, 0, 0], sample=n) for n in range(64)])
    assert distinct_tokens([batch.inputs(row) for row in range(64)]) < 240
    packs = batch.pack(240)
    assert sorted(row for pack in packs for row in pack.rows) == list(range(64))
    num_keys = [sum(len(chunk.path) for chunk in pack.tree.chunks) for pack in packs]
    assert max(num_keys) <= KEYS_PER_TOKEN * 240 < sum(num_keys)


@settings(deadline=None)
@given(token_lists, st.integers(1, 5))
def test_a_split_deals_out_every_trajectory_once(sequences: list[list[int]], parts: int) -> None:
    batch = batch_of(sequences)
    shares = batch.split(parts)
    assert sorted(row for share in shares for row in share) == list(range(len(batch)))
    assert sum(1 for share in shares if share) == min(parts, len(batch))


def pairs_of(sequences: list[list[int]]) -> Batch:
    """Two answers to each prompt; prompts may be the same."""
    answers = [
        replace(make_trajectory([7, *s[:2]], answer, group=i, sample=j), is_chosen=j == 0)
        for i, s in enumerate(sequences)
        for j, answer in enumerate(([*s, 0], [1, *s, 0]))
    ]
    return Batch.of(answers)


@settings(deadline=None)
@given(token_lists, st.integers(20, 60), st.integers(1, 5))
def test_pairs_are_neither_packed_nor_split_apart(sequences: list[list[int]], cap: int, parts: int) -> None:
    batch = pairs_of(sequences)
    packs = batch.pack(cap)
    assert all(pack.tree.num_nodes <= cap for pack in packs)
    for rows in ([pack.rows for pack in packs], batch.split(parts)):
        assert sorted(row for some in rows for row in some) == list(range(len(batch)))
        assert all(len(some) == 2 * len({row // 2 for row in some}) for some in rows)
    whole = Batch.join([batch.take([0, 1]), batch])
    assert whole.is_chosen is not None
    assert whole.is_chosen.tolist() == [True, False] * (len(sequences) + 1)


def test_the_prompt_of_a_pair_is_computed_once() -> None:
    prompt = list(range(1, 51))
    pair = [make_trajectory(prompt, answer, sample=i) for i, answer in enumerate([[60, 61, 62], [70, 71, 72, 73]])]
    [pack] = Batch.of([replace(one, is_chosen=one.sample == 0) for one in pair]).pack(100)
    assert pack.tree.num_nodes == 50 + 2 + 3  # nothing is predicted from the last token of an answer
    assert len(Batch.of([replace(one, is_chosen=one.sample == 0) for one in pair]).pack(54)) == 1


def test_a_split_balances_work() -> None:
    batch = Batch.of(
        [make_trajectory([i, 1], [i] * length, group=i) for i, length in enumerate([90, 50, 40, 10, 9, 1])]
    )
    work = [sum(len(batch.sequence(row)) for row in share) for share in batch.split(2)]
    assert max(work) - min(work) <= 4


def test_a_trajectory_larger_than_the_cap_is_alone() -> None:
    batch = Batch.of([make_trajectory([1] * 4, [2] * length) for length in (3, 10, 10, 3)])
    assert sorted(pack.rows for pack in batch.pack(10)) == [(0, 3), (1,), (2,)]


def test_a_batch_puts_each_turns_reward_on_its_last_token() -> None:
    trajectory = make_trajectory([1, 2], [3, 4, 5])
    trajectory.turn_rewards = [(2, 0.25), (4, 1.0)]
    batch = Batch.of([make_trajectory([9], [9], reward=0.5), trajectory])
    assert batch.token_rewards.tolist() == [0, 0.5, 0, 0, 0.25, 0, 1.0]


def test_chosen_trajectories_are_a_batch_as_if_there_were_no_others() -> None:
    masked = {1: "length", 2: "length"}
    trajectories = [
        replace(make_trajectory([i], [5] * (i + 1), group=i, reward=i), mask_reason=masked.get(i), is_chosen=i == 2)
        for i in range(4)
    ]
    alone = Batch.of([trajectories[2], trajectories[0]])
    np.testing.assert_equal(vars(Batch.of(trajectories).take([2, 0])), vars(alone))


def test_targets_are_the_generated_tokens_of_each_trajectory() -> None:
    batch = Batch.of([make_trajectory([1, 2], [3, 4]), make_trajectory([1, 2], [3, 5])])
    (pack,) = batch.pack(100)
    assert pack.tree.tokens.tolist() == [1, 2, 3]
    assert pack.targets.tolist() == [2, 3, 6, 7]
    assert pack.sources.tolist() == [1, 2, 1, 2]


def test_nothing_behind_the_last_generated_token_is_computed() -> None:
    trajectory = make_trajectory([1, 2], [3, 4, 5])
    trajectory.generated[4] = False
    assert Batch.of([trajectory]).inputs(0).tolist() == [1, 2, 3]
