import asyncio

import pytest
from env_helpers import board, boards, opened

from corral.data.rows import Row
from corral.data.sources import load_rows
from corral.envs.baselines import baseline_of, run_episode
from corral.envs.built_in.gymnasium import GymnasiumEnv
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Source


def test_gymnasiums_frozen_lake_is_played_in_words() -> None:
    env = GymnasiumEnv(id="FrozenLake-v1", kwargs={"is_slippery": False})
    first = env.reset(board(1), 0)
    assert first[1]["content"].endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    step = env.step("<answer>down</answer>")
    assert step.messages[0]["content"].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert (step.reward, step.done, step.state) == (0.0, False, "4")
    assert env.step("what?").state == "4"
    assert env.step("<answer>Right</answer>").done
    assert env.summary()["success"] == 0.0


@pytest.mark.parametrize(
    ("name", "moves", "reward"), [("FrozenLake-v1", 6, 1.0), ("CliffWalking-v1", 13, -13.0), ("Taxi-v4", None, None)]
)
def test_the_best_play_comes_from_the_table_of_transitions(name: str, moves: int | None, reward: float | None) -> None:
    options = {"id": name, "kwargs": {"is_slippery": False} if name == "FrozenLake-v1" else {}}
    with opened("gymnasium", 20, options=options, processes=1) as make:
        played = asyncio.run(run_episode(make, board(2), 0, 20, "best_reply"))
    assert played is not None
    assert played.success == 1.0
    assert moves in (None, played.turns)
    assert reward in (None, played.reward)


def test_chance_comes_from_the_trajectorys_seed() -> None:
    def states(seed: int) -> list[str | None]:
        env = GymnasiumEnv(id="FrozenLake-v1", kwargs={"map_name": "8x8"})
        env.reset(board(1), seed)
        return [env.step("<answer>Down</answer>").state for _ in range(6)]

    assert states(3) == states(3)
    assert len({str(states(seed)) for seed in range(8)}) > 1


def test_what_has_no_drawing_is_told_as_its_value() -> None:
    env = GymnasiumEnv(id="Blackjack-v1")
    assert env.reset(board(1), 0)[1]["content"].splitlines()[-1].startswith("(")
    assert env.best_reply() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLak-v1 can't be made"),
        ({"id": "FrozenLake-v1", "action_names": ["a"]}, "has 4 actions, not 1"),
        ({"id": "Pendulum-v1"}, "only Discrete from 0 on is supported"),
        ({"id": "Blackjack-v1", "observe": "drawing"}, "can't draw itself in text"),
    ],
)
def test_what_can_not_be_wrapped_is_an_error(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GymnasiumEnv(**options)


def reasoning_gym_rows(size: int) -> list[Row]:
    source = Source(path="reasoning_gym:chain_sum", size=size)
    return load_rows(source, Data(train=source))


@pytest.mark.slow
def test_a_reasoning_gym_task_gives_several_attempts_and_the_best_counts() -> None:
    [row] = reasoning_gym_rows(1)
    with opened("reasoning_gym", processes=1, options={"attempts": 3}) as make:

        async def play() -> None:
            env = make()
            assert await env.reset(row, 0) == row.prompt
            wrong = await env.step("<answer>no idea</answer>")
            assert (wrong.done, wrong.messages[0]["content"]) == (False, "That is not right. Attempts left: 2.")
            right = await env.step(f"<answer>{row.answer}</answer>")
            assert (right.done, wrong.reward + right.reward) == (True, 1.0)
            await env.close()
            assert env.summary() == {"success": 1.0, "success_at_first": 0.0, "turns": 2.0}

        asyncio.run(play())


@pytest.mark.slow
def test_a_floor_needs_only_the_players_that_there_are() -> None:
    with opened("reasoning_gym", processes=1) as make:
        floor = asyncio.run(baseline_of(make, reasoning_gym_rows(2), 1, seed=0, timeout_s=10))
    assert (floor.random_reward, floor.best_reward, floor.best_success) == (None, 1.0, 1.0)


def test_boards_are_enough_for_gymnasium() -> None:
    with opened("gymnasium", options={"id": "CliffWalking-v1"}, processes=1) as make:
        floor = asyncio.run(baseline_of(make, boards(2), 5, seed=0, timeout_s=10))
    assert floor.random_success == 0.0
