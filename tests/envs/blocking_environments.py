"""Environments with plain methods, some of which go wrong."""

import os
import time
from typing import Any

from corral.data.rows import Message, Row
from corral.envs.base import StepResult


class Slow:
    """Does what its reply says."""

    last_turns = 1

    def __init__(self) -> None:
        self.said: list[str] = []

    def reset(self, row: Row, seed: int) -> list[Message]:
        if row.answer == "hang":
            time.sleep(1000)
        if row.answer == "raise":
            raise ValueError("no such board")
        return [{"role": "user", "content": f"seed {seed} in {os.getpid()}"}]

    def step(self, reply: str) -> StepResult:
        self.said.append(reply)
        if reply == "hang":
            time.sleep(1000)
        if reply == "die":
            os._exit(7)
        if reply == "exit":
            raise SystemExit(3)
        if reply == "nonsense":
            return "not a result"  # type: ignore[return-value]
        done = reply == "end"
        return StepResult([{"role": "user", "content": reply}], 0.5, done, {"steps": 1.0}, state=f"{len(self.said)}")

    def close(self) -> None:
        pass

    def draw_frame(self) -> str:
        return f"{len(self.said)} said"

    def summary(self) -> dict[str, float]:
        return {"turns": float(len(self.said))}

    def random_reply(self, rng: Any) -> str:
        return f"random {rng.randrange(10)}"

    def best_reply(self) -> str | None:
        return "end"


class InPairs(Slow):
    """A step returns when another one has begun: the first with the second, the third with the fourth."""

    def __init__(self, begun: str) -> None:
        super().__init__()
        self.begun = begun

    def step(self, reply: str) -> StepResult:
        with open(self.begun, "ab", buffering=0) as file:  # whose end is the number of those that have begun
            file.write(b".")
            number = file.tell()
        while os.path.getsize(self.begun) < number + number % 2:
            time.sleep(0.01)
        return super().step(reply)


class Pictured(Slow):
    """Shows a picture in its messages and as its frame, as bytes."""

    PICTURE = b"\x89PNG\r\n\x00\xff"

    def reset(self, row: Row, seed: int) -> list[Message]:
        return [{"role": "user", "content": "<image>", "images": [self.PICTURE]}]

    def step(self, reply: str) -> StepResult:
        return StepResult([{"role": "user", "content": "<image>", "images": [self.PICTURE, "a.png"]}], 1.0, False)

    def draw_frame(self) -> bytes:  # type: ignore[override]
        return self.PICTURE


class Pooled(Slow):
    def __init__(self, pool: Any) -> None:
        super().__init__()


class Loads:
    """Not at all, in any process but that of the tests."""

    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def reset(self, row: Row, seed: int) -> list[Message]: ...

    def step(self, reply: str) -> StepResult: ...

    def close(self) -> None: ...
