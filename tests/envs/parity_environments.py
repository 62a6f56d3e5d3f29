"""One environment as a class of each kind. Processes that run them import this file, and neither pytest nor torch."""

import corral
from corral.data.rows import Message, Row


class Parity:
    """Not a subclass of anything: reward 1 for an even number of letters."""

    async def reset(self, row: Row, seed: int) -> list[Message]:
        return [{"role": "user", "content": f"say something even, {seed}"}]

    async def step(self, reply: str) -> corral.StepResult:
        return corral.StepResult([], float(len(reply) % 2 == 0), done=True)

    def best_reply(self) -> str:
        return "no"


class BlockingParity:
    def reset(self, row: Row, seed: int) -> list[Message]:
        return [{"role": "user", "content": f"say something even, {seed}"}]

    def step(self, reply: str) -> corral.StepResult:
        return corral.StepResult([], float(len(reply) % 2 == 0), done=True)

    def close(self) -> None:
        pass


class InheritingParity(corral.Env):
    async def reset(self, row: Row, seed: int) -> list[Message]:
        return [{"role": "user", "content": f"say something even, {seed}"}]

    async def step(self, reply: str) -> corral.StepResult:
        return corral.StepResult([], float(len(reply) % 2 == 0), done=True)
