from itertools import islice

import pytest

from corral.data.generated import board_rows
from corral.recipe.schema import Source


def test_boards_are_numbers_that_depend_on_seed_and_index_alone() -> None:
    first, again, other = (
        [row["seed"] for row in board_rows(Source(path="boards", size=size, seed=seed), {"": 1.0})]
        for size, seed in ((50, 0), (10, 0), (50, 1))
    )
    assert first[:10] == again
    assert not set(first) & set(other)
    assert first[0] == 661438879171336803
    assert all(0 <= seed < 2**63 for seed in first)


def test_one_environment_needs_no_tag() -> None:
    [row] = board_rows(Source(path="boards", size=1), {"": 1.0})
    assert (row["prompt"], row["environment"]) == ("board 0", "")


def test_a_thousand_is_the_default_size() -> None:
    assert len(list(board_rows(Source(path="boards"), {"": 1.0}))) == 1000


@pytest.mark.parametrize(
    "shares",
    [{"lake": 1, "box": 1}, {"lake": 3, "box": 1, "large": 0.5}, {"a": 0.1, "b": 0.9}, {"none": 0, "all": 2, "no": 0}],
)
def test_every_prefix_of_the_rows_is_mixed_by_the_weights(shares: dict[str, float]) -> None:
    rows = list(islice(board_rows(Source(path="boards", size=300), shares), 300))
    total = sum(shares.values())
    for length in range(1, 301):
        for tag, share in shares.items():
            count = sum(row["environment"] == tag for row in rows[:length])
            assert abs(count - length * share / total) <= (1 if share else 0)
    assert rows[0]["prompt"] == f"board 0 ({rows[0]['environment']})"
