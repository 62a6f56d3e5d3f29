import asyncio
import json
import os
import random
import subprocess
import sys
from itertools import product
from statistics import fmean
from typing import Any

import pytest
from deadlines import within
from env_helpers import board, boards, opened, say, share_won_at_random

from corral.envs.baselines import baseline_of
from corral.envs.built_in.frozen_lake import (
    DIRECTIONS,
    FrozenLake,
    FrozenLakeEnv,
    Lake,
    make_lake,
    slip_directions,
    solve,
    walk,
    win_probability,
)

SMALL = Lake(3, frozenset({(0, 1), (2, 2)}), start=(0, 0), goal=(0, 2))


def game(lake: Lake = SMALL, slippery: bool = False, seed: int = 0) -> FrozenLake:
    return FrozenLake(lake, slippery, random.Random(seed), FrozenLakeEnv().draw)


def test_the_board_shows_the_player_holes_and_the_goal() -> None:
    assert game().text() == "POG\n___\n__O"


def test_the_goal_ends_the_game_with_reward_one() -> None:
    played = game()
    moves = [played.act(action) for action in ("Down", "Right", "Right", "Up")]
    assert [tuple(move) for move in moves] == [(0, False, True)] * 3 + [(1, True, True)]
    assert played.text() == "_O√\n___\n__O"
    assert played.solved


def test_a_hole_ends_the_game_with_reward_zero() -> None:
    played = game()
    assert tuple(played.act("Right")) == (0, True, True)
    assert played.text() == "_XG\n___\n__O"
    assert not played.solved


def test_a_step_off_the_board_has_no_effect() -> None:
    played = game()
    assert tuple(played.act("Up")) == (0, False, False)
    assert played.player == (0, 0)


def test_signs_separator_and_names_are_the_users() -> None:
    env = FrozenLakeEnv(separator=" ", grid_vocab={"player": "@"}, actions={"Left": "West"})
    first, [step] = say(env, board(7), "<answer>west</answer>")
    assert "@ you" in first[1]["content"]
    assert "Actions: West, Down, Right, Up" in first[1]["content"]
    assert all(len(line.split(" ")) == 4 for line in (step.state or "").splitlines())


def test_slippery_ice_goes_to_each_side_as_often_as_ahead() -> None:
    assert slip_directions("Left") == ["Up", "Left", "Down"]
    middle = Lake(3, frozenset(), start=(1, 1), goal=(2, 2))
    ends = [game(middle, slippery=True, seed=seed) for seed in range(600)]
    for played in ends:
        played.act("Left")
    cells = [played.player for played in ends]
    assert set(cells) == {(0, 1), (1, 0), (2, 1)}
    assert all(150 < cells.count(cell) < 250 for cell in set(cells))


def test_chance_comes_from_the_trajectorys_seed_and_the_board_from_the_rows() -> None:
    env = FrozenLakeEnv(slippery=True, max_turns=4)

    def states(seed: int) -> list[str | None]:
        async def play() -> list[str | None]:
            first = await env.reset(board(3), seed)
            return [first[1]["content"], *[(await env.step("<answer>Up</answer>")).state for _ in range(4)]]

        return asyncio.run(play())

    played = [states(seed) for seed in range(10)]
    assert len({first for first, *_ in played}) == 1
    assert len({str(rest) for _, *rest in played}) > 1
    assert states(4) == played[4]


def test_the_way_found_is_the_shortest() -> None:
    for seed in range(100):
        lake = make_lake(seed, 3, 0.7)
        way = solve(lake, lake.start)
        assert way is not None
        assert reaches(lake, way)
        for shorter in product(DIRECTIONS, repeat=len(way) - 1):
            assert not reaches(lake, list(shorter))


def reaches(lake: Lake, way: list[str]) -> bool:
    cell = lake.start
    for direction in way:
        cell = walk(lake, cell, direction)
        if cell in lake.holes:
            return False
    return cell == lake.goal


def test_the_best_chance_on_slippery_ice_is_that_of_trying_everything() -> None:
    def best(lake: Lake, cell: tuple[int, int], left: int) -> float:
        if cell == lake.goal or cell in lake.holes or left == 0:
            return float(cell == lake.goal)
        return max(
            fmean(best(lake, walk(lake, cell, way), left - 1) for way in slip_directions(action))
            for action in DIRECTIONS
        )

    for seed in range(5):
        lake = make_lake(seed, 3, 0.7)
        found = max(win_probability(lake, lake.start, action, 4) for action in DIRECTIONS)
        assert found == pytest.approx(best(lake, lake.start, 4))


def test_boards_are_like_those_of_the_game_that_people_compare_with() -> None:
    """4x4 with 0.8 ice: the shortest way is 2.79 moves on average, and never more than 10."""
    lakes = [make_lake(seed, 4, 0.8) for seed in range(4000)]
    lengths = [len(solve(lake, lake.start) or []) for lake in lakes]
    assert fmean(lengths) == pytest.approx(2.79, abs=0.08)
    assert max(lengths) <= 10
    assert min(lengths) == 1


@pytest.mark.parametrize(
    ("options", "num_actions", "wins"),
    [({}, 10, 0.219), ({}, 20, 0.276), ({"slippery": True}, 10, 0.216), ({"slippery": True}, 20, 0.272)],
)
@pytest.mark.slow
def test_a_random_player_wins_as_often_as_is_known(options: dict[str, Any], num_actions: int, wins: float) -> None:
    assert share_won_at_random(FrozenLakeEnv(**options), 5000, num_actions) == pytest.approx(wins, abs=0.02)


def test_the_best_player_always_wins_within_ten_moves() -> None:
    with opened("frozen_lake", max_turns=10) as make:
        floor = asyncio.run(baseline_of(make, boards(200), 10, seed=0, timeout_s=within(10)))
    assert (floor.best_success, floor.best_reward) == (1.0, 1.0)
    assert floor.random_success is not None
    assert 0.1 < floor.random_success < 0.35


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
@pytest.mark.slow
def test_boards_and_first_prompts_are_the_same_in_every_process(name: str) -> None:
    code = (
        "import asyncio, json; from env_helpers import boards, opened\n"
        f"with opened({name!r}) as make:\n"
        "    firsts = [asyncio.run(make().reset(row, seed)) for seed, row in enumerate(boards(20))]\n"
        "print(json.dumps(firsts))"
    )
    here = os.path.dirname(__file__)
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([here, *sys.path])},
            capture_output=True,
            check=True,
            timeout=within(60),
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert len({json.dumps(first) for first in json.loads(said[0])}) == 20
