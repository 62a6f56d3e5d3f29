"""Sokoban: push every box onto a target.

A step costs 0.1, a box on a target brings 1 and off it costs 1, and when all are there it brings 10 more. A turn
without an action is a step all the same. How rooms are made is `sokoban_rooms.py`.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from corral.envs.games.kit import Game, GameEnv, Move, draw_board, override, require
from corral.envs.games.prompts import Prompts
from corral.envs.games.sokoban_rooms import DIRECTIONS, Cell, Room, release_cache, step

STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0
MAX_SEARCHED_STATES = 500_000
SYMBOLS = {
    "wall": "#",
    "empty": "_",
    "target": "O",
    "box_on_target": "√",
    "box": "X",
    "player": "P",
    "player_on_target": "S",
}
MEANINGS = {
    "wall": "wall",
    "empty": "floor",
    "target": "target",
    "box_on_target": "box on a target",
    "box": "box",
    "player": "you",
    "player_on_target": "you on a target",
}
State = tuple[Cell, frozenset[Cell]]
"""Where the player is, and the boxes."""


class Sokoban(Game):
    def __init__(self, room: Room, signs: Mapping[str, str], separator: str) -> None:
        self.room, self.signs, self.separator = room, signs, separator
        self.player, self.boxes = room.player, room.boxes
        self._plan: dict[State, list[str]] = {}

    def text(self) -> str:
        height, width = self.room.size
        lines = [[self.signs[self._what((row, column))] for column in range(width)] for row in range(height)]
        return draw_board(lines, self.separator)

    def _what(self, cell: Cell) -> str:
        if cell not in self.room.floor:
            return "wall"
        what = "player" if cell == self.player else "box" if cell in self.boxes else ""
        if cell in self.room.targets:
            return f"{what}_on_target" if what else "target"
        return what or "empty"

    def act(self, action: str) -> Move:
        before, num_done = self.player, self._num_done()
        self.player, self.boxes = push((self.player, self.boxes), action, self.room)
        bonus = SOLVED_REWARD if self.solved else 0.0
        reward = STEP_REWARD + BOX_REWARD * (self._num_done() - num_done) + bonus
        return Move(reward, self.solved, self.player != before)

    def skip(self) -> Move:
        return Move(STEP_REWARD, done=False, effective=False)

    def _num_done(self) -> int:
        return len(self.boxes & self.room.targets)

    @property
    def solved(self) -> bool:
        return self.boxes == self.room.targets

    def solution(self) -> list[str] | None:
        """Kept for the states along it, so that who follows it makes one search."""
        state = (self.player, self.boxes)
        if state not in self._plan:
            found = search(self.room, state)
            if found is None:
                return None
            for done, action in enumerate(found):
                self._plan[state] = found[done:]
                state = push(state, action, self.room)
            self._plan[state] = []
        return self._plan[(self.player, self.boxes)]


@dataclass(kw_only=True)
class SokobanEnv(GameEnv):
    format_penalty: float = -0.15
    dim_room: Sequence[int] = (6, 6)
    """Height and width, walls included."""
    num_boxes: int = 1
    search_depth: int = 300
    """Of the backward play that takes the boxes off their targets. Smaller: faster to make, nearer to the solution."""
    grid_vocab: Mapping[str, str] = field(default_factory=dict)
    """Other signs: {wall: W}."""
    separator: str = ""
    """Between the cells of a line; a space lets most tokenizers see them one by one."""

    ACTIONS: ClassVar = tuple(DIRECTIONS)
    PROMPTS: ClassVar = Prompts(
        "Push all boxes onto the targets. You push a box by walking into it, and you can not pull one. "
        "A box against a wall may be stuck for good."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sound = len(self.dim_room) == 2 and min(self.dim_room) >= 4
        require(sound, f"dim_room must be height and width, both at least 4, not {self.dim_room}")
        require(self.num_boxes >= 1, f"num_boxes must be at least 1, not {self.num_boxes}")
        require(self.search_depth >= 2, f"search_depth must be at least 2, not {self.search_depth}")
        self._signs = override(SYMBOLS, self.grid_vocab, "grid_vocab")

    def new_game(self, board_seed: int, seed: int) -> Game:
        height, width = self.dim_room
        return Sokoban(
            release_cache(board_seed, height, width, self.num_boxes, self.search_depth), self._signs, self.separator
        )

    def symbols(self) -> dict[str, str]:
        return {self._signs[name]: meaning for name, meaning in MEANINGS.items()}


def push(state: State, action: str, room: Room) -> State:
    """The state after an action: a walk, a push, or nothing."""
    player, boxes = state
    ahead = step(player, action)
    if ahead not in room.floor:
        return state
    if ahead not in boxes:
        return ahead, boxes
    behind = step(ahead, action)
    if behind not in room.floor or behind in boxes:
        return state
    return ahead, boxes - {ahead} | {behind}


def search(room: Room, start: State) -> list[str] | None:
    """The fewest moves that solve it, by breadth-first search; None also if that takes too many states."""
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    reached = deque([start])
    while reached and len(came_from) < MAX_SEARCHED_STATES:
        state = reached.popleft()
        if state[1] == room.targets:
            moves: list[str] = []
            while (last := came_from[state]) is not None:
                state = last[0]
                moves.append(last[1])
            return moves[::-1]
        for action in DIRECTIONS:
            after = push(state, action, room)
            if after not in came_from and not is_lost(after, room):
                came_from[after] = (state, action)
                reached.append(after)
    return None


def is_lost(state: State, room: Room) -> bool:
    """A box in a corner that is no target stays there."""
    for box in state[1] - room.targets:
        up, down, left, right = (step(box, action) not in room.floor for action in DIRECTIONS)
        if (up or down) and (left or right):
            return True
    return False
