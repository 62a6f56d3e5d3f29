"""What an environment is. A single-turn question is one with one step.

An environment lives for one trajectory: `reset` once, `step` until done, `close` always. It sees and says text; tokens,
masks and log-probabilities are the rollout driver's business, and so are deadlines and budgets.

Beside its three methods an environment may have any of these:

- `bounds_itself = True`: it needs no deadline from outside.
- `inline = True`: what it says continues the model's own turn as text, instead of being new messages of a chat. Where
  the model has closed its turn, it comes as a user's message all the same.
- `last_turns = 1`: turns beyond `rollout.max_turns` in which it wants nothing but a final answer.
- `tools`: functions, as JSON schemas, that the chat template is to tell the model of.
- `count_turn(num_before, num_generated, is_cut)`: told before each step how many tokens were there, how many the model
  generated, and whether they were cut off at a limit.
- `was_shown(messages)`: told what the model gets to see of an observation that is longer than
  `rollout.max_observation_tokens` and was cut.
- `state()`: where the model is after `reset`; equal texts are equal states, as in `StepResult.state`.
- `summary()`: metrics of the whole trajectory, asked once at its end, whoever ended it.
- `random_reply(rng)` and `best_reply()`: what a random player and an optimal one would say now. They are the floor and
  the ceiling that a score is compared with.
- `open_shared(...)`, a class method: what all trajectories of a worker share (a client, a server); each environment
  gets it as its argument `shared`, and it is closed at the end.

A class whose methods are plain functions, because they block, is played in processes of its own (`processes.py`), and
is not told of `count_turn` and `was_shown`.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.data.rows import Message, Row


@dataclass(frozen=True)
class StepResult:
    messages: list[Message]
    """What the model sees next; nothing when done."""
    reward: float
    """For this step."""
    done: bool
    metrics: dict[str, float] = field(default_factory=dict)
    """Summed over the steps of a trajectory."""
    error: str | None = None
    """Something failed; the reward stands for it."""
    closing: str = ""
    """The end of the last message, which stays when the rest is cut to `rollout.max_observation_tokens`."""
    state: str | None = None
    """Where the model is now: equal texts are equal states. None: the messages say it."""


class Env(Protocol):
    async def reset(self, row: Row, seed: int) -> list[Message]:
        """Begin; returns the first messages the model sees. The row is the same for all samples of a prompt, the seed
        is the trajectory's own."""
        ...

    async def step(self, reply: str) -> StepResult:
        """Take the model's reply."""
        ...

    async def close(self) -> None:
        """Let go of everything; also called after a failure."""
        ...


class Shared(Protocol):
    def close(self) -> None: ...


def bounds_itself(env: Any) -> bool:
    return bool(getattr(env, "bounds_itself", False))


def is_inline(env: Any) -> bool:
    return bool(getattr(env, "inline", False))


def num_last_turns(env: Any) -> int:
    return int(getattr(env, "last_turns", 0))


def first_state(env: Any) -> str:
    """All samples of a prompt begin in the same, whatever it is called."""
    state = getattr(env, "state", None)
    return str(state()) if callable(state) else ""


def summary_of(env: Any) -> dict[str, float]:
    summary: dict[str, float] = env.summary() if hasattr(env, "summary") else {}
    return summary


def tools_of(env: Any) -> list[dict[str, Any]]:
    return list(getattr(env, "tools", ()))
