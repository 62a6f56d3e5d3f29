"""FrozenLake: walk over ice to the goal, around the holes.

Start and goal are any two cells that a path around the holes connects. Reward 1 on the goal, 0 for all else; falling in
ends the game. On slippery ice a step goes where it should in one of three times, and to either side in the others.
"""

import functools
import random
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from corral.envs.games import Cell, Draw, Game, GridGameEnv, Move, Prompts, require, shortest_path

DIRECTIONS = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
"""Each one's neighbors in this circle are at right angles to it."""


class Lake(NamedTuple):
    size: int
    holes: frozenset[Cell]
    start: Cell
    goal: Cell


class FrozenLake(Game):
    def __init__(self, lake: Lake, slippery: bool, rng: random.Random, draw: Draw) -> None:
        self.lake, self.slippery, self.rng, self.draw = lake, slippery, rng, draw
        self.player = lake.start

    def text(self) -> str:
        return self.draw(self.lake.size, self.lake.size, self._what)

    def _what(self, cell: Cell) -> str:
        under = "hole" if cell in self.lake.holes else "goal" if cell == self.lake.goal else "empty"
        if cell != self.player:
            return under
        return {"hole": "player_in_hole", "goal": "player_on_goal", "empty": "player"}[under]

    def act(self, action: str) -> Move:
        before = self.player
        self.player = walk(self.lake, before, self.rng.choice(slip_directions(action)) if self.slippery else action)
        return Move(float(self.solved), self.solved or self.player in self.lake.holes, self.player != before)

    @property
    def solved(self) -> bool:
        return self.player == self.lake.goal

    def solution(self) -> list[str] | None:
        return solve(self.lake, self.player)

    def best_action(self, actions_left: int) -> str | None:
        if self.slippery:
            return max(DIRECTIONS, key=lambda action: win_probability(self.lake, self.player, action, actions_left))
        return super().best_action(actions_left)


@dataclass(kw_only=True)
class FrozenLakeEnv(GridGameEnv):
    size: int = 4
    p: float = 0.8
    """Probability that a cell is ice."""
    slippery: bool = False

    ACTIONS: ClassVar = tuple(DIRECTIONS)
    SYMBOLS: ClassVar = {
        "player": ("P", "you"),
        "empty": ("_", "ice"),
        "hole": ("O", "hole"),
        "goal": ("G", "goal"),
        "player_in_hole": ("X", "you in a hole"),
        "player_on_goal": ("√", "you on the goal"),
    }
    PROMPTS: ClassVar = Prompts("Walk over the ice to the goal. If you step into a hole, you have lost.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.size >= 2, f"size must be at least 2, not {self.size}")
        require(0 <= self.p <= 1, f"p must be from 0 to 1, not {self.p}")

    def new_game(self, board_seed: int, seed: int) -> Game:
        lake = make_lake(board_seed, self.size, self.p)
        return FrozenLake(lake, self.slippery, random.Random(seed), self.draw)


@functools.lru_cache(maxsize=1024)
def make_lake(seed: int, size: int, p: float) -> Lake:
    rng = random.Random(seed)
    cells = [(row, column) for row in range(size) for column in range(size)]
    while True:
        holes = frozenset(cell for cell in cells if rng.random() >= p)
        start, goal = rng.sample(cells, 2)
        lake = Lake(size, holes - {start, goal}, start, goal)
        if solve(lake, start) is not None:
            return lake


def walk(lake: Lake, cell: Cell, direction: str) -> Cell:
    row, column = DIRECTIONS[direction]
    last = lake.size - 1
    return (min(max(cell[0] + row, 0), last), min(max(cell[1] + column, 0), last))


def slip_directions(action: str) -> list[str]:
    """The directions in which one may move on slippery ice."""
    directions = list(DIRECTIONS)
    here = directions.index(action)
    return [directions[(here + turned) % 4] for turned in (-1, 0, 1)]


def solve(lake: Lake, start: Cell) -> list[str] | None:
    """The shortest path around the holes."""
    return shortest_path(
        start, DIRECTIONS, functools.partial(walk, lake), lambda cell: cell == lake.goal, lake.holes.__contains__
    )


def win_probability(lake: Lake, cell: Cell, action: str, actions_left: int) -> float:
    """The probability to win on slippery ice with that action and the optimal ones after it."""
    after = win_probabilities(lake, actions_left - 1)
    return sum(after[walk(lake, cell, direction)] for direction in slip_directions(action)) / 3


@functools.lru_cache(maxsize=10_000)
def win_probabilities(lake: Lake, actions_left: int) -> dict[Cell, float]:
    """The probability to win from each cell, by value iteration, one action after the other."""
    cells = [(row, column) for row in range(lake.size) for column in range(lake.size)]
    if actions_left == 0:
        return {cell: float(cell == lake.goal) for cell in cells}
    after = win_probabilities(lake, actions_left - 1)
    ends = {lake.goal, *lake.holes}
    return {
        cell: after[cell]
        if cell in ends
        else max(win_probability(lake, cell, action, actions_left) for action in DIRECTIONS)
        for cell in cells
    }
