"""Rooms for Sokoban: carve one, put the boxes onto their targets, and play backwards.

Backward play pulls boxes, so whatever it reaches can be solved by pushing. Of all that it reaches, the room is the one
in which boxes are far from their targets and the player had to change between them often (Schrader's gym-sokoban, after
Racanière et al. 2017). A layout that comes to nothing is thrown away for the next, drawn from the same seed, so a
room depends on its seed and options alone.
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from corral.recipe.errors import UserError

Cell = tuple[int, int]
DIRECTIONS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
STAMPS = (
    ((1, 0), (1, 1), (1, 2)),
    ((0, 1), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 1)),
    ((1, 0), (1, 1), (2, 0), (2, 1)),
    ((1, 1), (1, 2), (2, 1)),
)
"""What a carver cuts out of the 3x3 cells around it."""
TURN_CHANCE = 0.35
MAX_PULLED_STATES = 300_000
MAX_LAYOUTS = 1000


class Room(NamedTuple):
    size: tuple[int, int]
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


@lru_cache(maxsize=1024)
def release_cache(seed: int, height: int, width: int, num_boxes: int, search_depth: int) -> Room:
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


class Pulled(NamedTuple):
    """A state of backward play."""

    player: Cell
    boxes: tuple[Cell, ...]
    """Each in the place of its own target."""
    last: int | None
    """Which box was pulled last."""
    changes: int
    """How often it was another one than before."""
    depth: int


def pull_away(
    floor: set[Cell], player: Cell, targets: tuple[Cell, ...], search_depth: int
) -> tuple[Cell, tuple[Cell, ...]] | None:
    """The best state that depth-first backward play reaches; None if it moves no box, or not all of them."""
    best, best_score = None, 0
    seen: set[tuple[Cell, frozenset[Cell]]] = set()
    open_states = [Pulled(player, targets, None, 0, 1)]
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


def backward_moves(floor: set[Cell], state: Pulled) -> Iterator[Pulled]:
    """A step to a free cell takes along a box on the other side."""
    player, boxes, last, changes, depth = state
    for down, right in DIRECTIONS.values():
        ahead = (player[0] + down, player[1] + right)
        if ahead not in floor or ahead in boxes:
            continue
        behind = (player[0] - down, player[1] - right)
        if behind not in boxes:
            yield Pulled(ahead, boxes, last, changes, depth + 1)
            continue
        box = boxes.index(behind)
        moved = (*boxes[:box], player, *boxes[box + 1 :])
        yield Pulled(ahead, moved, box, changes + (box != last), depth + 1)


def displacement(boxes: tuple[Cell, ...], targets: tuple[Cell, ...]) -> int:
    return sum(abs(box[0] - target[0]) + abs(box[1] - target[1]) for box, target in zip(boxes, targets, strict=True))


def wander(free: set[Cell], player: Cell, rng: random.Random) -> Cell:
    """One to three steps, so that a room does not begin right behind the box that is to be pushed."""
    for _ in range(rng.randint(1, 3)):
        neighbours = [cell for action in DIRECTIONS if (cell := step(player, action)) in free]
        if neighbours:
            player = rng.choice(neighbours)
    return player


def step(cell: Cell, direction: str) -> Cell:
    down, right = DIRECTIONS[direction]
    return (cell[0] + down, cell[1] + right)
