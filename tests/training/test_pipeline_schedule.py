"""1F1B as the paper draws it: every order of turns comes to an end, and no stage holds more than it must."""

from itertools import product

import pytest

from corral.training.pipeline_schedule import schedule

SIZES = [(size, number) for size, number in product((2, 3, 4, 7), (0, 1, 2, 5, 12))]


@pytest.mark.parametrize(("size", "num_micro_batches"), SIZES)
def test_all_turns_are_made_with_as_little_in_flight_as_there_can_be(size: int, num_micro_batches: int) -> None:
    """A stage waits for the forward pass of the one before it, and for the backward pass of the one behind it."""
    left = [schedule(rank, size, num_micro_batches) for rank in range(size)]
    made: list[list[tuple[bool, int]]] = [[] for _ in range(size)]
    num_rounds = 0
    while any(left):
        before = [set(turns) for turns in made]
        for rank in range(size):
            is_forward, _ = turn = left[rank][0] if left[rank] else (True, -1)
            neighbor = rank - 1 if is_forward else rank + 1
            if left[rank] and (neighbor not in range(size) or turn in before[neighbor]):
                made[rank].append(left[rank].pop(0))
                in_flight = sum(1 if forward else -1 for forward, _ in made[rank])
                assert 0 <= in_flight <= size - rank
        num_rounds += 1
        assert num_rounds <= 2 * (num_micro_batches + size - 1), "more turns are idle than in the paper"
    for turns in made:
        for kind in (True, False):
            assert [index for is_forward, index in turns if is_forward == kind] == list(range(num_micro_batches))
