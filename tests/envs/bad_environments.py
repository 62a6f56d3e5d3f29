"""Each breaks one of the rules that `corral env test` checks."""

import asyncio
import os
import random
import time
from typing import Any

from corral.data.rows import Message, Row
from corral.envs.base import StepResult


class Good:
    def __init__(self) -> None:
        self.turns, self.valid, self.total = 0, 0, 0

    def first(self, row: Row, seed: int) -> str:
        return f"add up, {seed}"

    async def reset(self, row: Row, seed: int) -> list[Message]:
        row.extra["seed"]
        return [{"role": "user", "content": self.first(row, seed)}]

    async def step(self, reply: str) -> StepResult:
        self.turns += 1
        if reply in ("1", "2", "3"):
            self.valid += 1
            self.total += int(reply)
        return self.result(reply)

    def result(self, reply: str) -> StepResult:
        return StepResult([{"role": "user", "content": "and?"}], 0.1, self.turns == 5, state=str(self.total))

    async def close(self) -> None:
        pass

    def summary(self) -> dict[str, float]:
        return {"valid_actions": self.valid / max(self.turns, 1), "turns": float(self.turns)}

    def random_reply(self, rng: random.Random) -> str:
        return rng.choice("123")


class Chance(Good):
    def first(self, row: Row, seed: int) -> str:
        return f"add up, {random.random()}"


class Salted(Good):
    """Another one in every process."""

    def first(self, row: Row, seed: int) -> str:
        return f"add up, {hash(str(seed))}"


class Raises(Good):
    def result(self, reply: str) -> StepResult:
        int(reply)
        return super().result(reply)


class Changes(Good):
    """Its state, by a reply that it says was none."""

    def result(self, reply: str) -> StepResult:
        self.total += reply not in ("1", "2", "3")
        return super().result(reply)


class Infinite(Good):
    def result(self, reply: str) -> StepResult:
        return StepResult([{"role": "user", "content": "and?"}], float("inf"), False)


class Untyped(Good):
    def result(self, reply: str) -> Any:
        return "and?", 0.1, False


class Waits(Good):
    async def step(self, reply: str) -> StepResult:
        await asyncio.sleep(1000)
        return await super().step(reply)


class Blocks(Good):
    async def step(self, reply: str) -> StepResult:
        time.sleep(1000)
        return await super().step(reply)


class Leaves(Good):
    """Something open, which it can only close after a reset."""

    async def close(self) -> None:
        os.close(self.descriptor)  # type: ignore[attr-defined]
