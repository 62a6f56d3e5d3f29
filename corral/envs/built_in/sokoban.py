"""Sokoban: push every box onto a target.

A step costs 0.1, a box on a target brings 1 and off it costs 1, and when all are there it brings 10 more. A turn
without an action is a step all the same.

How a room is made: carve one, put the boxes onto their targets, and search backwards. Backward steps pull boxes, so
whatever they reach can be solved by pushing. Of all that is reached, the room is the one in which boxes are far from
their targets and the player had to change between them often (Schrader's gym-sokoban, after Racanière et al. 2017). A
layout that comes to nothing is thrown away for the next, drawn from the same seed, so a room depends on its seed and
options alone.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from corral.envs.games import Cell, Draw, Game, GridGameEnv, Move, Prompts, require, shortest_path
from corral.recipe.errors import UserError

DIRECTIONS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
STAMPS = (
    ((1, 0), (1, 1), (1, 2)),
    ((0, 1), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 0), (2, 1)),
    ((1, 1), (1, 2), (2, 1)),
)
"""Cells that the carving walk cuts out of the 3x3 around it."""
TURN_CHANCE = 0.35
MAX_PULLED_STATES = 300_000
MAX_LAYOUTS = 1000

STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0
MAX_SEARCHED_STATES = 500_000
SokobanState = tuple[Cell, frozenset[Cell]]
"""The cells of the player and of the boxes."""


class Room(NamedTuple):
    size: tuple[int, int]
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


class Sokoban(Game):
    def __init__(self, room: Room, draw: Draw) -> None:
        self.room, self.draw, self.player, self.boxes = room, draw, room.player, room.boxes
        self._plan: dict[SokobanState, list[str]] = {}

    def text(self) -> str:
        return self.draw(*self.room.size, self._what)

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
        """Cached for the states along it, so that following it takes one search."""
        state = (self.player, self.boxes)
        if state not in self._plan:
            found = solve(self.room, state)
            if found is None:
                return None
            for done, action in enumerate(found):
                self._plan[state] = found[done:]
                state = push(state, action, self.room)
            self._plan[state] = []
        return self._plan[(self.player, self.boxes)]


@dataclass(kw_only=True)
class SokobanEnv(GridGameEnv):
    format_penalty: float = -0.15
    dim_room: Sequence[int] = (6, 6)
    """Height and width, walls included."""
    num_boxes: int = 1
    search_depth: int = 300
    """Depth of the backward search that takes the boxes off their targets. Smaller: faster to make, nearer to the
    solution."""

    ACTIONS: ClassVar = tuple(DIRECTIONS)
    SYMBOLS: ClassVar = {
        "wall": ("#", "wall"),
        "empty": ("_", "floor"),
        "target": ("O", "target"),
        "box_on_target": ("√", "box on a target"),
        "box": ("X", "box"),
        "player": ("P", "you"),
        "player_on_target": ("S", "you on a target"),
    }
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

    def new_game(self, board_seed: int, seed: int) -> Game:
        height, width = self.dim_room
        return Sokoban(new_room(board_seed, height, width, self.num_boxes, self.search_depth), self.draw)


def push(state: SokobanState, action: str, room: Room) -> SokobanState:
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


def solve(room: Room, start: SokobanState) -> list[str] | None:
    """The fewest moves that solve it; None also if that takes too many states."""
    return shortest_path(
        start,
        DIRECTIONS,
        lambda state, action: push(state, action, room),
        lambda state: state[1] == room.targets,
        lambda state: is_lost(state, room),
        MAX_SEARCHED_STATES,
    )


def is_lost(state: SokobanState, room: Room) -> bool:
    """A box in a corner that is no target stays there."""
    for box in state[1] - room.targets:
        up, down, left, right = (step(box, action) not in room.floor for action in DIRECTIONS)
        if (up or down) and (left or right):
            return True
    return False


# --- rooms


@lru_cache(maxsize=1024)
def new_room(seed: int, height: int, width: int, num_boxes: int, search_depth: int) -> Room:
    rng = random.Random(seed)
    for _ in range(MAX_LAYOUTS):
        floor = carve(height, width, rng)
        if len(floor) <= num_boxes + 1:
            continue
        player, *targets = rng.sample(sorted(floor), num_boxes + 1)
        pulled = pull_away(floor, player, tuple(targets), search_depth)
        if pulled is not None:
            player, boxes = pulled
            wanders = 0.8 if displacement(boxes, tuple(targets)) == 1 else 0.5
            if rng.random() < wanders:
                player = wander(floor - set(boxes), player, rng)
            return Room((height, width), frozenset(floor), frozenset(targets), frozenset(boxes), player)
    raise UserError(f"found no room of {height}x{width} in which {num_boxes} boxes can be pulled off their targets")


def carve(height: int, width: int, rng: random.Random) -> set[Cell]:
    """The floor, by a random walk. The outermost cells are walls."""
    directions = tuple(DIRECTIONS.values())
    row, column = rng.randrange(1, height), rng.randrange(1, width)
    direction = rng.choice(directions)
    floor: set[Cell] = set()
    for _ in range(int(1.7 * (height + width))):
        if rng.random() < TURN_CHANCE:
            direction = rng.choice(directions)
        row = min(max(row + direction[0], 1), height - 2)
        column = min(max(column + direction[1], 1), width - 2)
        floor |= {(row - 1 + down, column - 1 + right) for down, right in rng.choice(STAMPS)}
    return {(row, column) for row, column in floor if 0 < row < height - 1 and 0 < column < width - 1}


class PullState(NamedTuple):
    """A state of the backward search."""

    player: Cell
    boxes: tuple[Cell, ...]
    """Positions of the boxes, in the order of their targets."""
    last: int | None
    """Index of the box that was pulled last."""
    changes: int
    """How often another box than before was pulled."""
    depth: int


def pull_away(
    floor: set[Cell], player: Cell, targets: tuple[Cell, ...], search_depth: int
) -> tuple[Cell, tuple[Cell, ...]] | None:
    """The best state that a depth-first backward search reaches; None if it moves no box, or not all of them."""
    best, best_score = None, 0
    seen: set[tuple[Cell, frozenset[Cell]]] = set()
    open_states = [PullState(player, targets, None, 0, 1)]
    while open_states and len(seen) < MAX_PULLED_STATES:
        state = open_states.pop()
        key = (state.player, frozenset(state.boxes))
        if key in seen:
            continue
        seen.add(key)
        score = state.changes * displacement(state.boxes, targets)
        if score > best_score and key[1].isdisjoint(targets):
            best, best_score = (state.player, state.boxes), score
        if state.depth + 1 < search_depth:
            open_states += reversed(list(backward_moves(floor, state)))
    return best


def backward_moves(floor: set[Cell], state: PullState) -> Iterator[PullState]:
    """A step to a free cell takes along a box on the other side."""
    player, boxes, last, changes, depth = state
    for direction, (down, right) in DIRECTIONS.items():
        ahead = step(player, direction)
        if ahead not in floor or ahead in boxes:
            continue
        behind = (player[0] - down, player[1] - right)
        if behind not in boxes:
            yield PullState(ahead, boxes, last, changes, depth + 1)
            continue
        box = boxes.index(behind)
        moved = (*boxes[:box], player, *boxes[box + 1 :])
        yield PullState(ahead, moved, box, changes + (box != last), depth + 1)


def displacement(boxes: tuple[Cell, ...], targets: tuple[Cell, ...]) -> int:
    return sum(abs(box[0] - target[0]) + abs(box[1] - target[1]) for box, target in zip(boxes, targets, strict=True))


def wander(free: set[Cell], player: Cell, rng: random.Random) -> Cell:
    """One to three steps, so that a room does not begin right behind the box that is to be pushed."""
    for _ in range(rng.randint(1, 3)):
        neighbors = [cell for action in DIRECTIONS if (cell := step(player, action)) in free]
        if neighbors:
            player = rng.choice(neighbors)
    return player


def step(cell: Cell, direction: str) -> Cell:
    down, right = DIRECTIONS[direction]
    return (cell[0] + down, cell[1] + right)
