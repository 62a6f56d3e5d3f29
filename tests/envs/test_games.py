import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from env_helpers import board, say

from corral.data.rows import Row
from corral.envs.built_in.frozen_lake import FrozenLakeEnv
from corral.envs.built_in.sokoban import SokobanEnv
from corral.envs.games import Game, GameEnv, Move
from corral.recipe.errors import UserError


class Counting(Game):
    """Say `more` three times."""

    count = 0

    def text(self) -> str:
        return f"count {self.count}"

    def act(self, action: str) -> Move:
        self.count += action == "more"
        return Move(0.5, self.solved, action == "more")

    @property
    def solved(self) -> bool:
        return self.count == 3


@dataclass(kw_only=True)
class CountingEnv(GameEnv):
    ACTIONS: ClassVar = ("stay", "more")

    def new_game(self, board_seed: int, seed: int) -> Game:
        return Counting()


def test_a_reply_is_an_action_and_the_answer_a_new_observation() -> None:
    first, [one, two] = say(
        CountingEnv(max_turns=5), board(1), "I think <answer> MORE </answer>", "<answer>stay</answer>"
    )
    assert [message["role"] for message in first] == ["system", "user"]
    assert first[1]["content"].endswith("Turn 1, actions left: 5\ncount 0")
    assert one.messages == [{"role": "user", "content": "Turn 2, actions left: 4\ncount 1"}]
    assert (one.reward, one.done, one.state) == (0.5, False, "count 1")
    assert two.state == "count 1"


def test_the_last_step_is_done_and_says_nothing() -> None:
    _, steps = say(CountingEnv(), board(1), *["<answer>more</answer>"] * 3)
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].messages == []


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<answer>more</answer>", "more"),
        ("<answer>\n More\n</answer><|im_end|>", "more"),
        ("<answer>more<|im_end|></answer>", "more"),
        ("<answer>more</answer> Turn 2: <answer>stay</answer>", "more"),
        ("more", None),
        ("<answer>more more</answer>", None),
        ("<answer>more", None),
        ("<answer><answer>more</answer></answer>", None),
        ("", None),
    ],
)
def test_an_action_is_read_out_of_the_first_answer_tag(reply: str, action: str | None) -> None:
    assert CountingEnv().read_action(reply) == action


def test_without_a_pattern_the_whole_reply_is_the_action() -> None:
    env = CountingEnv(action_pattern=None)
    assert [env.read_action(reply) for reply in (" More\n", "<answer>more</answer>")] == ["more", None]
    assert env.reply("more") == "more"


def test_a_pattern_of_ones_own_needs_a_format_that_fits() -> None:
    env = CountingEnv(action_pattern=r"<think>(.*?)</think>\[(.*?)\]", answer_format="<think></think>[{action}]")
    assert env.read_action("<think>hm</think>[stay]") == "stay"
    with pytest.raises(UserError, match="is not understood by action_pattern"):
        CountingEnv(action_pattern=r"\[(.*?)\]")


def test_a_reply_without_an_action_costs_the_penalty_and_changes_nothing() -> None:
    env = CountingEnv(format_penalty=-0.25)
    _, [step] = say(env, board(1), "what?")
    assert (step.reward, step.done, step.state) == (-0.25, False, "count 0")


def test_the_summary_counts_turns_and_the_penalty_of_invalid_ones_only() -> None:
    env = CountingEnv(format_penalty=-0.25)
    say(env, board(1), "what?", "<answer>stay</answer>", *["<answer>more</answer>"] * 2)
    assert env.summary() == {
        "success": 0.0,
        "valid_actions": 0.75,
        "effective_actions": 0.5,
        "turns": 4.0,
        "format_penalty": -0.25,
    }
    say(env, board(1), *["<answer>more</answer>"] * 3)
    assert env.summary()["success"] == 1.0


def test_every_prompt_can_be_replaced_and_the_system_prompt_left_out() -> None:
    prompts = {
        "system": None,
        "opening": "signs: {symbols}\n{actions}|{format} {x: 1} {turn}",
        "turn": "{turn}/{actions_left}",
    }
    env = CountingEnv(prompts=prompts, max_turns=3, actions={"more": "Plus"})
    [first], [step] = say(env, board(1), "<answer>plus</answer>")
    assert first["content"] == "stay, Plus|<answer>Plus</answer> {x: 1} 1"
    assert step.messages[0]["content"] == "2/2"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            CountingEnv,
            {"prompts": {"turn": "{observatio}"}},
            "no placeholder {observatio}; did you mean `observation`?",
        ),
        (CountingEnv, {"prompts": {"sistem": "x"}}, "no text is called `sistem`; did you mean `system`?"),
        (CountingEnv, {"prompts": {"turn": None}}, "prompts.turn must be text, not None"),
        (CountingEnv, {"actions": {"less": "x"}}, "actions: there is no `less`; there are stay, more"),
        (CountingEnv, {"actions": {"more": "Stay"}}, "two of them have the same name"),
        (CountingEnv, {"action_pattern": "("}, "is no regular expression"),
        (FrozenLakeEnv, {"size": 1}, "size must be at least 2, not 1"),
        (FrozenLakeEnv, {"grid_vocab": {"hol": "H"}}, "grid_vocab: there is no `hol`; did you mean `hole`?"),
        (SokobanEnv, {"dim_room": [3, 6]}, "dim_room must be height and width, both at least 4"),
    ],
)
def test_options_that_make_no_sense_are_errors(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        make(**options)
    assert message in str(raised.value)


def test_a_row_without_a_seed_is_an_error() -> None:
    with pytest.raises(UserError, match="needs a column `seed`, a whole number; set `path: boards`"):
        say(CountingEnv(), Row([], None, "", {}))


class Guessing(Counting):
    """Guess a number, of which the text shows nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def text(self) -> str:
        return "Which number?"


class GuessingEnv(CountingEnv):
    def new_game(self, board_seed: int, seed: int) -> Game:
        return Guessing(board_seed)


def test_where_the_board_is_hidden_those_of_training_and_validation_have_other_seeds() -> None:
    parts = "train", "validation"
    games = [GuessingEnv()._board(Row([], None, "", {"seed": 7, "part": part}), 0) for part in parts]
    assert len({game.number for game in games if isinstance(game, Guessing)}) == 2


def test_a_random_reply_is_a_valid_action() -> None:
    env, rng = CountingEnv(), random.Random(0)
    assert {env.read_action(env.random_reply(rng)) for _ in range(20)} == {"stay", "more"}


def test_a_game_that_nobody_can_solve_has_no_best_reply() -> None:
    env = CountingEnv()
    say(env, board(1))
    assert env.best_reply() is None
