"""Gymnasium's toy-text environments, and any other with a few numbered actions, as text.

What the model sees is what the environment renders as text, or its observation as it is. The board's seed goes to the
environment's own `reset`; chance after that comes from the trajectory's seed. Where the environment has a table of its
transitions, the optimal policy is known. Its methods block, so it runs in processes.
"""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from corral.data.plugins import error_line
from corral.envs.base import BlockingEnv
from corral.envs.games import Game, GameBase, Move
from corral.recipe.errors import UserError, install_command

try:
    import gymnasium
    from gymnasium.utils import seeding
except ImportError as error:
    raise UserError(f"the environment `gymnasium` needs gymnasium: {install_command('gymnasium')}") from error


class ToyTextGame(NamedTuple):
    actions: tuple[str, ...] = ()
    success_reward: float = 1.0
    instruction: str = "Play this game."


TOY_TEXT = {
    "FrozenLake": ToyTextGame(
        ("Left", "Down", "Right", "Up"), 1, "Walk from S to the goal G over frozen cells F. In a hole H you have lost."
    ),
    "CliffWalking": ToyTextGame(
        ("Up", "Right", "Down", "Left"), -1, "Walk from x to T. Every step costs 1; a step onto the cliff C costs 100."
    ),
    "Taxi": ToyTextGame(
        ("South", "North", "East", "West", "Pickup", "Dropoff"),
        20,
        "Drive the taxi to the passenger, pick them up, and drop them off at their destination, which are two of the "
        "places R, G, Y and B. You can't drive through |.",
    ),
    "Blackjack": ToyTextGame(
        ("Stick", "Hit"),
        1,
        "You play Blackjack. You see the sum of your cards, the dealer's card, and whether you have a usable ace.",
    ),
}
HIGHLIGHTED = re.compile(r"\x1b\[[\d;]*m(.)\x1b\[0m")
ESCAPES = re.compile(r"\x1b\[[\d;]*m")

DISCOUNT = 1 - 1e-6
"""Discount, so that of two ways that earn the same the optimal policy takes the shorter one."""

Outcomes = list[tuple[float, int, float, bool]]
"""Probability, next state, reward, whether it ends."""


class GymnasiumGame(Game):
    def __init__(self, env: Any, actions: tuple[str, ...], drawn: bool, pictures: bool, success_reward: float) -> None:
        self.env, self.actions, self.success_reward = env, actions, success_reward
        self.drawn, self.pictures = drawn, pictures
        self.observation: Any = None
        self._solved = False
        self._values: list[dict[int, float]] = []

    def begin(self, board_seed: int, seed: int) -> None:
        self.observation, _ = self.env.reset(seed=board_seed)
        self.env.unwrapped.np_random = seeding.np_random(seed)[0]

    def text(self) -> str:
        if not self.drawn:
            return str(self.observation)
        # A color marks where the player is; in plain text it needs a sign.
        return ESCAPES.sub("", HIGHLIGHTED.sub(r"[\1]", self._render("ansi"))).strip("\n")

    def frame(self) -> str | bytes | None:
        if not self.pictures:
            return self.text() if self.drawn else None
        from PIL import Image

        picture = io.BytesIO()
        Image.fromarray(self._render("rgb_array")).save(picture, "PNG")
        return picture.getvalue()

    def _render(self, mode: str) -> Any:
        """An environment is made for one mode; those that have both look at this attribute when they render."""
        self.env.unwrapped.render_mode = mode
        return self.env.render()

    def state(self) -> str:
        return str(self.observation)

    def act(self, action: str) -> Move:
        before = str(self.observation)
        self.observation, reward, terminated, truncated, _ = self.env.step(self.actions.index(action))
        self._solved = bool(terminated) and float(reward) >= self.success_reward
        return Move(float(reward), bool(terminated or truncated), str(self.observation) != before)

    @property
    def solved(self) -> bool:
        return self._solved

    def best_action(self, actions_left: int) -> str | None:
        """The optimal action by value iteration over the table of transitions, where there is one."""
        table: dict[int, dict[int, Outcomes]] | None = getattr(self.env.unwrapped, "P", None)
        if table is None:
            return None
        if not self._values:
            self._values.append(dict.fromkeys(table, 0.0))
        while len(self._values) < actions_left:
            after = self._values[-1]
            self._values.append(
                {state: max(expected_return(to, after) for to in table[state].values()) for state in table}
            )
        choices, after = table[int(self.observation)], self._values[actions_left - 1]
        return self.actions[max(choices, key=lambda action: expected_return(choices[action], after))]


@dataclass(kw_only=True)
class GymnasiumEnv(GameBase, BlockingEnv):
    id: str
    """Gymnasium's id, such as FrozenLake-v1."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `gymnasium.make`."""
    action_names: list[str] | None = None
    """Names of the actions, in the order of their numbers. None: known ones for toy-text environments, the numbers for
    others."""
    observe: Literal["drawing", "value"] | None = None
    """What the model sees. None: the drawing, where there is one in text."""
    success_reward: float | None = None
    """An episode that ends with a step of at least this reward is a success. None: known, or 1."""

    pictures: bool = False
    """Record a picture of each state for `corral view`, where the environment renders as rgb_array."""

    reset, step = GameBase.reset_game, GameBase.step_game

    def __post_init__(self) -> None:
        known = TOY_TEXT.get(self.id.rpartition("/")[2].partition("-v")[0], ToyTextGame())
        self.prompts = {"instruction": known.instruction, **self.prompts}
        env = make(self.id, self.kwargs)
        draws = "ansi" in env.metadata.get("render_modes", ())
        if self.observe == "drawing" and not draws:
            raise UserError(f"gymnasium: {self.id} can't draw itself in text; set observe: value")
        drawn = draws and self.observe != "value"
        if self.pictures and "rgb_array" not in env.metadata.get("render_modes", ()):
            raise UserError(f"gymnasium: {self.id} can't render pictures (rgb_array); leave out pictures")
        if self.pictures or drawn:
            env = make(self.id, {**self.kwargs, "render_mode": "rgb_array" if self.pictures else "ansi"})
        names = tuple(self.action_names or known.actions or map(str, range(num_actions(env, self.id))))
        if len(names) != num_actions(env, self.id):
            raise UserError(f"gymnasium: {self.id} has {num_actions(env, self.id)} actions, not {len(names)}")
        success = known.success_reward if self.success_reward is None else self.success_reward
        self._gymnasium = GymnasiumGame(env, names, drawn, self.pictures, success)
        super().__post_init__()

    def all_actions(self) -> tuple[str, ...]:
        return self._gymnasium.actions

    def new_game(self, board_seed: int, seed: int) -> Game:
        self._gymnasium.begin(board_seed, seed)
        return self._gymnasium

    def close(self) -> None:
        self._gymnasium.env.close()


def make(name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        return gymnasium.make(name, **arguments)
    except Exception as error:  # gymnasium's own, and whatever the environment raises
        raise UserError(f"gymnasium: {name} can't be made: {error_line(error)}") from error


def num_actions(env: Any, name: str) -> int:
    if not isinstance(env.action_space, gymnasium.spaces.Discrete) or env.action_space.start != 0:
        raise UserError(f"gymnasium: {name} has {env.action_space} as actions; only Discrete from 0 on is supported")
    return int(env.action_space.n)


def expected_return(outcomes: Outcomes, after: Mapping[int, float]) -> float:
    """The expected sum of rewards of an action, and of the optimal ones after it."""
    return sum(
        chance * (reward + (0.0 if ends else DISCOUNT * after[state])) for chance, state, reward, ends in outcomes
    )
