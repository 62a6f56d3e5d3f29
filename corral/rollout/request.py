"""What the engine is asked for, and how far it is."""

import asyncio
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from corral.data.trajectory import IntArray
from corral.rollout.engine import Completion, Finish, Memory, Sampling

Family = tuple[bytes, Sampling]


@dataclass(eq=False)
class Request:
    prompt: IntArray
    sampling: Sampling
    seed: int
    future: "asyncio.Future[Completion]"
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    memory: Memory | None = None
    """Given: of the prompt's beginning. When it is finished: of all but the last token."""
    keep: bool = False

    @cached_property
    def family(self) -> Family:
        """Requests of one family have the same next-token distribution at the start."""
        return self.prompt.tobytes(), self.sampling

    def append(self, token: int, logprob: float, version: int, tokenizer: Any) -> None:
        """Takes a token that was drawn, and ends with it if that is what it means."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        sampling = self.sampling
        if token in sampling.stop_tokens:
            self.finish = Finish.STOP_TOKEN
        elif sampling.stop and self._ends_with_stop(tokenizer):
            self.finish = Finish.STOP_STRING
        elif len(self.tokens) >= sampling.max_tokens:
            self.finish = Finish.LENGTH

    def _ends_with_stop(self, tokenizer: Any) -> bool:
        longest = max(len(stop) for stop in self.sampling.stop)
        tail = tokenizer.decode(self.tokens[-(longest + 8) :], skip_special_tokens=False)
        return any(stop in tail for stop in self.sampling.stop)

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(self.tokens, self.logprobs, self.finish, self.versions, self.memory)


@dataclass
class EngineStats:
    """Since the engine was made. `computed` against `prompt + generated` is what sharing saves."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    decode_steps: int = 0
