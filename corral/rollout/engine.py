"""The engine seam: tokens in, tokens out. Engines know nothing of prompts, environments or rewards."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How one sequence is drawn. Requests that are equal but for their seed share their computation."""

    max_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()

    @property
    def truncates(self) -> bool:
        """Whether some tokens may not be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class Finish(StrEnum):
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


class Memory(Protocol):
    """What an engine has kept of a request, to go on from: given back with the next one, it spares the engine to read
    the same tokens again. The engine's alone, and of no use once it has other weights."""


@dataclass(frozen=True)
class Completion:
    tokens: list[int]
    """With the stop token, where that is what ended it."""
    logprobs: list[float]
    """Of each token under the model's distribution at the sampling temperature, before top-k, top-p and min-p."""
    finish: Finish
    versions: list[int]
    """Of the weights that produced each token."""
    memory: Memory | None = None
    """Of the prompt and these tokens, where it was asked for and there was room."""


class Engine(Protocol):
    async def generate(
        self, tokens: list[int], sampling: Sampling, seed: int, *, memory: Memory | None = None, keep: bool = False
    ) -> Completion:
        """Many in flight. The draw depends on the seed and the token's index, not on what else is in the batch.
        `memory`: of an earlier request whose tokens these begin with. `keep`: there will be a later one."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes new weights; an empty iterable only notes the version (the weights are shared with the trainer).
        Nothing may be in flight."""
        ...

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Takes new weights with requests in flight, which go on with them. Returns the seconds for which nothing was
        decoded."""
        ...

    def pause(self) -> None:
        """Gives the cache's memory back. Nothing may be in flight."""
        ...

    def resume(self) -> None: ...
