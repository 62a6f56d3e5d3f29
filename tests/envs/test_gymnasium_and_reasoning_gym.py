import asyncio
import io
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from deadlines import within
from env_helpers import board, boards, opened
from PIL import Image

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
@pytest.mark.slow
def test_the_best_play_comes_from_the_table_of_transitions(name: str, moves: int | None, reward: float | None) -> None:
    options = {"id": name, "kwargs": {"is_slippery": False} if name == "FrozenLake-v1" else {}}
    with opened("gymnasium", 20, options=options, processes=1) as make:
        played = asyncio.run(run_episode(make, board(2), 0, 20, "best_reply"))
    assert played is not None
    assert played.success == 1.0
    assert moves in (None, played.turns)
    assert reward in (None, played.reward)


class Lights(gymnasium.Env):
    """Four lights that are switched on one after the other, drawn in text and as a picture."""

    metadata = {"render_modes": ["ansi", "rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.num_on = render_mode, 0
        self.action_space, self.observation_space = gymnasium.spaces.Discrete(1), gymnasium.spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.num_on = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.num_on += 1
        return self.num_on, 1.0, self.num_on == 4, False, {}

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return "*" * self.num_on + "." * (4 - self.num_on)
        return np.repeat(np.uint8([[255 * (place < self.num_on) for place in range(4)]])[..., None], 3, axis=2)


@pytest.fixture
def lights() -> Iterator[str]:
    gymnasium.register("Lights-v0", entry_point=Lights)
    yield "Lights-v0"
    del gymnasium.registry["Lights-v0"]


def test_a_state_is_drawn_in_text_or_as_a_picture(lights: str) -> None:
    for pictures in (False, True):
        env = GymnasiumEnv(id=lights, pictures=pictures)
        assert env.reset(board(1), 0)[1]["content"].endswith("....")
        assert env.step("<answer>0</answer>").messages[0]["content"].endswith("*...")
        frame = env.draw_frame()
        if not pictures:
            assert frame == "*..."
            continue
        assert isinstance(frame, bytes)
        assert np.asarray(Image.open(io.BytesIO(frame)))[0, :, 0].tolist() == [255, 0, 0, 0]
    assert GymnasiumEnv(id=lights, observe="value").reset(board(1), 0)[1]["content"].endswith("\n0")


def test_gymnasiums_own_pictures_are_frames() -> None:
    pytest.importorskip("pygame")
    env = GymnasiumEnv(id="FrozenLake-v1", pictures=True, kwargs={"is_slippery": False})
    env.reset(board(1), 0)
    first = env.draw_frame()
    assert env.step("<answer>Down</answer>").messages[0]["content"].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert isinstance(first, bytes)
    assert env.draw_frame() not in (first, None)
    env.close()


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
    assert env.draw_frame() is None


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
        floor = asyncio.run(baseline_of(make, reasoning_gym_rows(2), 1, seed=0, timeout_s=within(10)))
    assert (floor.random_reward, floor.best_reward, floor.best_success) == (None, 1.0, 1.0)


def test_boards_are_enough_for_gymnasium() -> None:
    with opened("gymnasium", options={"id": "CliffWalking-v1"}, processes=1) as make:
        floor = asyncio.run(baseline_of(make, boards(2), 5, seed=0, timeout_s=within(10)))
    assert floor.random_success == 0.0


@pytest.mark.parametrize(
    "options",
    [{"id": "CliffWalking-v1"}, {"id": "FrozenLake-v1", "kwargs": {"map_name": "8x8"}}],
    ids=["cliff", "lake"],
)
def test_a_game_with_one_fixed_board_is_for_training_and_for_validation(options: dict[str, Any]) -> None:
    first = [
        GymnasiumEnv(**options).reset(Row([], None, "", {"seed": 3, "part": part}), 0)
        for part in ("train", "validation")
    ]
    assert first[0] == first[1]
