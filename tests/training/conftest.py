"""Processes for the tests of sharded training: started when they are first needed, and kept for a number of them."""

from collections.abc import Callable, Iterator

import pytest
from team import Team

pytest.register_assert_rewrite("trainer_contract")


MAX_RUNS = 12
"""Every mesh makes process groups, whose threads wake up all the time for as long as their process lives."""


@pytest.fixture(scope="session")
def team() -> Iterator[Callable[[int], Team]]:
    teams: dict[int, Team] = {}

    def of_size(size: int) -> Team:
        if size in teams and (not teams[size].is_alive or teams[size].num_runs >= MAX_RUNS):
            teams.pop(size).close()
        if size not in teams:
            teams[size] = Team(size)
        return teams[size]

    yield of_size
    for started in teams.values():
        started.close()
