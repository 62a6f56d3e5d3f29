"""Helpers for tests of environments."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from corral.data.generated import board_rows
from corral.data.rows import Message, Row
from corral.envs.base import EnvSet, StepResult
from corral.envs.games import GameEnv
from corral.recipe.schema import Environment, Rollout, Source


def board(seed: int) -> Row:
    return Row([{"role": "user", "content": "a board"}], None, "", {"seed": seed})


def boards(size: int) -> list[Row]:
    return [board(row["seed"]) for row in board_rows(Source(path="boards", size=size), {"": 1.0})]


@contextmanager
def opened(name: str, max_turns: int = 10, **settings: Any) -> Iterator[Callable[[], Any]]:
    """Something that makes environments."""
    envs = EnvSet({"": Environment(name=name, **settings)}, {}, Rollout(max_turns=max_turns))
    try:
        yield envs.factories[""].make
    finally:
        envs.close()


def share_won_at_random(env: GameEnv, num_boards: int, num_actions: int) -> float:
    """Of so many boards, by a player who names actions at random."""
    rng, num_won = random.Random(0), 0
    for seed in range(num_boards):
        game = env.new_game(seed, seed)
        for _ in range(num_actions):
            if game.act(rng.choice(env.ACTIONS)).done:
                num_won += game.solved
                break
    return num_won / num_boards


def say(env: Any, row: Row, *replies: str) -> tuple[list[Message], list[StepResult]]:
    """Begin, and say these."""

    async def talk() -> tuple[list[Message], list[StepResult]]:
        first = await env.reset(row, 0)
        return first, [await env.step(reply) for reply in replies]

    return asyncio.run(talk())
