"""Board games in text: write a game as plain Python, and `GameEnv` makes an environment of it.

A `Game` knows its rules and nothing of language models. `GameEnv` renders the prompts, reads the action out of a reply,
counts, and has the policies of the random and optimal baselines. A game's own environment is a dataclass whose fields
are its options and whose `new_game` makes the board.

A board depends on its seed (the column `seed` of a row of the source `boards`) and on the options, on nothing else: all
samples of a prompt have the same one, in whichever process. Chance during the game comes from the trajectory's seed.
"""

import math
import random
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, NamedTuple, TypeVar

from corral.data.generated import part_of
from corral.data.plugins import did_you_mean
from corral.data.rows import Message, Row
from corral.envs.base import Env, EnvDefaults, StepResult
from corral.recipe.errors import UserError

State = TypeVar("State", bound=Hashable)
Cell = tuple[int, int]
"""Row and column."""
Draw = Callable[[int, int, Callable[[Cell], str]], str]
"""Draws a board, see `GridGameEnv.draw`."""

MAX_ATTEMPTS = 1000
ALIKE_ATTEMPTS = 100
"""Boards that are tried where all of them look alike."""
ANSWER_PATTERN = "<answer>(.*?)</answer>"
ANSWER_FORMAT = "<answer>{action}</answer>"
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
PLACEHOLDERS = (
    *("instruction", "symbols", "actions", "format"),
    *("turn", "observation", "actions_left", "max_response_tokens"),
)


class Move(NamedTuple):
    """The outcome of an action."""

    reward: float
    done: bool
    effective: bool
    """Whether it changed something."""


class Game(ABC):
    """One game, from its first board to its end."""

    @abstractmethod
    def text(self) -> str:
        """The board as the model sees it."""

    @abstractmethod
    def act(self, action: str) -> Move:
        """Carry out one of the environment's `ACTIONS`."""

    def state(self) -> str:
        """The state as text: equal texts are equal states."""
        return self.text()

    def frame(self) -> str | bytes | None:
        """The board as people see it, as in `EnvDefaults.draw_frame`."""
        return self.text()

    def skip(self) -> Move:
        """The outcome of a turn without an action, because the reply had none."""
        return Move(0.0, done=False, effective=False)

    @property
    @abstractmethod
    def solved(self) -> bool: ...

    def solution(self) -> list[str] | None:
        """The shortest way to win from here. None: there is none, or nobody knows."""
        return None

    def best_action(self, actions_left: int) -> str | None:
        """The optimal policy's next action. To be overridden in games of chance, where a list of actions is no plan."""
        solution = self.solution()
        return solution[0] if solution else None


@dataclass(frozen=True)
class Prompts:
    """Templates of all messages to the model; a recipe replaces any of them by `options.prompts`. Each may have any of
    the placeholders; `{format}` is an example of a reply. A line with `{symbols}` is left out where a game has none."""

    instruction: str = "Play this game."
    """What the game is, and what to do in it; each game has its own."""
    system: str | None = "You play games. Choose every action so that the sum of your rewards is as large as possible."
    """None: there is no system message."""
    opening: str = (
        "{instruction}\n"
        "Symbols: {symbols}\n"
        "Actions: {actions}\n"
        "Reply with one action, like this: {format}\n"
        "\n"
        "Turn {turn}, actions left: {actions_left}\n"
        "{observation}"
    )
    """The first message, with the first observation."""
    turn: str = "Turn {turn}, actions left: {actions_left}\n{observation}"
    """Every later message."""

    def __post_init__(self) -> None:
        for name, template in vars(self).items():
            for word in PLACEHOLDER.findall(template or ""):
                if word not in PLACEHOLDERS:
                    raise UserError(
                        f"prompts.{name}: there is no placeholder {{{word}}}{did_you_mean(word, PLACEHOLDERS)}; "
                        f"there are {', '.join(PLACEHOLDERS)}"
                    )

    def changed(self, texts: Mapping[str, str | None]) -> "Prompts":
        """These templates with some of them replaced."""
        known = [field.name for field in fields(self)]
        for name, text in texts.items():
            if name not in known:
                raise UserError(f"prompts: no text is called `{name}`{did_you_mean(name, known)}")
            if not isinstance(text, str) and not (name == "system" and text is None):
                raise UserError(f"prompts.{name} must be text, not {text!r}")
        return replace(self, **texts)  # type: ignore[arg-type]


@dataclass(kw_only=True)
class GameBase(EnvDefaults, ABC):
    """All of an environment around a game but for `reset`, `step` and `close`. Its fields are options of the recipe."""

    action_pattern: str | None = ANSWER_PATTERN
    """The last group of its first match in a reply is the action. None: the whole reply is."""
    answer_format: str | None = None
    """A reply that `action_pattern` understands, shown to the model and used by the baselines. None: the action in
    answer tags, or alone where there is no pattern."""
    format_penalty: float = 0.0
    """Reward of a reply without a known action, besides what the game makes of a turn without one."""
    prompts: Mapping[str, str | None] = field(default_factory=dict)
    """Texts that replace those of `PROMPTS`."""
    actions: Mapping[str, str] = field(default_factory=dict)
    """Other names for `ACTIONS`: {Left: west}."""
    special_tokens: Sequence[str] = SPECIAL_TOKENS
    """Tokens that are removed from a reply before it is read."""
    max_turns: int = 10
    max_response_tokens: int = 256

    ACTIONS: ClassVar[tuple[str, ...]] = ()
    PROMPTS: ClassVar[Prompts] = Prompts()

    @abstractmethod
    def new_game(self, board_seed: int, seed: int) -> Game:
        """The board of that seed; `seed` is for chance during the game."""

    def all_actions(self) -> tuple[str, ...]:
        return self.ACTIONS

    def symbols(self) -> Mapping[str, str]:
        """The meaning of each sign on the board."""
        return {}

    def __post_init__(self) -> None:
        require(
            isinstance(self.format_penalty, int | float),
            f"format_penalty must be a number, not {self.format_penalty!r}",
        )
        self._texts = self.PROMPTS.changed(self.prompts)
        self._names = override({name: name for name in self.all_actions()}, self.actions, "actions")
        self._action_of = {name.strip().lower(): action for action, name in self._names.items()}
        if len(self._action_of) < len(self._names):
            raise UserError("actions: two of them have the same name")
        try:
            self._pattern = None if self.action_pattern is None else re.compile(self.action_pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"action_pattern: {self.action_pattern!r} is no regular expression: {error}") from error
        if self.answer_format is None:
            self.answer_format = "{action}" if self._pattern is None else ANSWER_FORMAT
        for action in self._names:
            if self.read_action(self.reply(action)) != action:
                raise UserError(
                    f"answer_format: {self.reply(action)!r} is not understood by action_pattern: "
                    f"{self.action_pattern!r}; give an answer_format, with {{action}} in it, that is"
                )
        self._game: Game | None = None
        self._valid: list[bool] = []
        self._effective: list[bool] = []

    def _board(self, row: Row, seed: int) -> Game:
        """The row's board: that of its seed, or the first of those after it that belongs to the row's part. Boards that
        all look alike, since there is only one or what differs is hidden, belong to both parts, with other seeds."""
        first, part = row.extra.get("seed"), row.extra.get("part")
        if not isinstance(first, int):
            raise UserError("a game's row needs a column `seed`, a whole number; set `path: boards` for the data")
        seen = set()
        for attempt in range(MAX_ATTEMPTS):
            game = self.new_game(first + attempt, seed)
            if part is None or part_of(text := game.text()) == part:
                return game
            seen.add(text)
            if len(seen) == 1 and attempt + 1 == ALIKE_ATTEMPTS:
                return game  # not that of the first seed, which the other part has
        raise UserError(
            f"none of {MAX_ATTEMPTS} boards with these options is for {part}; they are too few to be parted"
        )

    def reset_game(self, row: Row, seed: int) -> list[Message]:
        self._game = self._board(row, seed)
        self._valid, self._effective = [], []
        opening = Message(role="user", content=self._render(self._texts.opening))
        if self._texts.system is None:
            return [opening]
        return [Message(role="system", content=self._render(self._texts.system)), opening]

    def step_game(self, reply: str) -> StepResult:
        action = self.read_action(reply)
        move = self.game.skip() if action is None else self.game.act(action)
        self._valid.append(action is not None)
        self._effective.append(move.effective)
        reward = move.reward + (self.format_penalty if action is None else 0.0)
        messages = [] if move.done else [Message(role="user", content=self._render(self._texts.turn))]
        return StepResult(messages, reward, move.done, state=self.game.state())

    @property
    def game(self) -> Game:
        assert self._game is not None, "before reset"
        return self._game

    def summary(self) -> dict[str, float]:
        turns = len(self._valid)
        return {
            "success": float(self._game is not None and self._game.solved),
            "valid_actions": sum(self._valid) / max(turns, 1),
            "effective_actions": sum(self._effective) / max(turns, 1),
            "turns": float(turns),
            "format_penalty": self.format_penalty * self._valid.count(False),
        }

    def draw_frame(self) -> str | bytes | None:
        return self.game.frame()

    def random_reply(self, rng: random.Random) -> str:
        return self.reply(rng.choice(list(self._names)))

    def best_reply(self) -> str | None:
        action = self.game.best_action(max(self.max_turns - len(self._valid), 1))
        return None if action is None else self.reply(action)

    def reply(self, action: str) -> str:
        """The reply that names this action."""
        assert self.answer_format is not None
        return self.answer_format.replace("{action}", self._names[action])

    def read_action(self, reply: str) -> str | None:
        """The action that a reply names: exactly, but for case and spaces around it.

        The first match counts. What follows an answer is often a hallucination of the turns to come.
        """
        for token in self.special_tokens:
            reply = reply.replace(token, "")
        if self._pattern is not None:
            found = self._pattern.search(reply)
            if found is None:
                return None
            reply = found[self._pattern.groups] or ""
        return self._action_of.get(reply.strip().lower())

    def _render(self, template: str) -> str:
        turns, symbols = len(self._valid), self.symbols()
        if not symbols:
            template = "\n".join(line for line in template.split("\n") if "{symbols}" not in line)
        values = {
            "instruction": self._texts.instruction,
            "symbols": ", ".join(f"{sign} {meaning}" for sign, meaning in symbols.items()),
            "actions": ", ".join(self._names.values()),
            "format": self.reply(list(self._names)[-1]),
            "turn": turns + 1,
            "observation": self.game.text(),
            "actions_left": max(self.max_turns - turns, 0),
            "max_response_tokens": self.max_response_tokens,
        }
        # Not str.format: templates may be full of other braces. Values are not looked into.
        return PLACEHOLDER.sub(lambda found: str(values[found[1]]), template)


@dataclass(kw_only=True)
class GameEnv(GameBase, Env):
    """Environments of games that take no time; one that does has plain methods instead, and so a process
    (`built_in/gymnasium.py`)."""

    async def reset(self, row: Row, seed: int) -> list[Message]:
        return self.reset_game(row, seed)

    async def step(self, reply: str) -> StepResult:
        return self.step_game(reply)


@dataclass(kw_only=True)
class GridGameEnv(GameEnv):
    """Environments of games on a grid of cells, each drawn as a sign."""

    grid_vocab: Mapping[str, str] = field(default_factory=dict)
    """Signs that replace those of `SYMBOLS`: {hole: H}."""
    separator: str = ""
    """Text between the cells of a line; a space lets most tokenizers see them one by one."""

    SYMBOLS: ClassVar[Mapping[str, tuple[str, str]]]
    """The sign and the meaning of everything that may be in a cell."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._signs = override({name: sign for name, (sign, _) in self.SYMBOLS.items()}, self.grid_vocab, "grid_vocab")

    def symbols(self) -> dict[str, str]:
        return {self._signs[name]: meaning for name, (_, meaning) in self.SYMBOLS.items()}

    def draw(self, height: int, width: int, what: Callable[[Cell], str]) -> str:
        """The board; `what` says what is in a cell."""
        rows = ([self._signs[what((row, column))] for column in range(width)] for row in range(height))
        return "\n".join(map(self.separator.join, rows))


def shortest_path(
    start: State,
    actions: Iterable[str],
    act: Callable[[State, str], State],
    is_goal: Callable[[State], bool],
    is_lost: Callable[[State], bool],
    max_states: float = math.inf,
) -> list[str] | None:
    """The fewest actions from a state to a goal, by breadth-first search around states that are lost. None: there is
    no way, or it takes too many states."""
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    reached = deque([start])
    while reached and len(came_from) < max_states:
        state = reached.popleft()
        if is_goal(state):
            path: list[str] = []
            while (last := came_from[state]) is not None:
                state = last[0]
                path.append(last[1])
            return path[::-1]
        for action in actions:
            after = act(state, action)
            if after not in came_from and not is_lost(after):
                came_from[after] = (state, action)
                reached.append(after)
    return None


def override(standard: Mapping[str, str], changes: Mapping[str, str], option: str) -> dict[str, str]:
    """`standard` with some of its values replaced, none added."""
    for name, value in changes.items():
        if name not in standard:
            known = ", ".join(standard)
            raise UserError(f"{option}: there is no `{name}`{did_you_mean(name, standard)}; there are {known}")
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{option}.{name} must be text, not {value!r}")
    return {**standard, **changes}


def require(condition: bool, message: str) -> None:
    """UserError about an option, unless the condition holds."""
    if not condition:
        raise UserError(message)
