"""Processes for the tests of sharded training: started when they are first needed, and kept for all of them."""

from collections.abc import Callable, Iterator

import pytest
from team import Team

pytest.register_assert_rewrite("trainer_contract")


@pytest.fixture(scope="session")
def team() -> Iterator[Callable[[int], Team]]:
    teams: dict[int, Team] = {}

    def of_size(size: int) -> Team:
        if size not in teams or not teams[size].is_alive:
            teams[size] = Team(size)
        return teams[size]

    yield of_size
    for started in teams.values():
        started.close()
