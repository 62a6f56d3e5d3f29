"""What an environment is. A single-turn question is one with one step.

An environment lives for one trajectory: `reset` once, `step` until done, `close` always. It sees and says text; tokens,
masks and log-probabilities are the rollout driver's business, and so are its deadlines.
"""

from dataclasses import dataclass, field
from typing import Protocol

from corral.data.rows import Message, Row


@dataclass(frozen=True)
class StepResult:
    messages: list[Message]
    """What the model sees next; nothing when done."""
    reward: float
    """For this step."""
    done: bool
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """Something failed; the reward stands for it."""


class Env(Protocol):
    """A class attribute `bounds_itself = True` says that no deadline from outside is needed."""

    async def reset(self, row: Row, seed: int) -> list[Message]:
        """Begin; returns the first messages the model sees."""
        ...

    async def step(self, reply: str) -> StepResult:
        """Take the model's reply."""
        ...

    async def close(self) -> None:
        """Let go of everything; also called after a failure."""
        ...
