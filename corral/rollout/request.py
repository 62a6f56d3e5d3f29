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

    def extend(self, tokens: list[int], logprobs: list[float], version: int, tokenizer: Any) -> None:
        """Takes tokens that were drawn, up to the one that ends it if one of them does."""
        num, self.finish = self._end(tokens, tokenizer)
        self.tokens += tokens[:num]
        self.logprobs += logprobs[:num]
        self.versions += [version] * num

    def _end(self, tokens: list[int], tokenizer: Any) -> tuple[int, Finish | None]:
        """How many of `tokens` belong to it, and what the last of these ends it for."""
        sampling, left = self.sampling, self.sampling.max_tokens - len(self.tokens)
        if sampling.stop or not sampling.stop_tokens.isdisjoint(tokens):
            for num, token in enumerate(tokens[:left], start=1):
                if token in sampling.stop_tokens:
                    return num, Finish.STOP_TOKEN
                if sampling.stop and self._ends_with_stop(tokens[:num], tokenizer):
                    return num, Finish.STOP_STRING
        return (left, Finish.LENGTH) if len(tokens) >= left else (len(tokens), None)

    def _ends_with_stop(self, tokens: list[int], tokenizer: Any) -> bool:
        longest = max(len(stop) for stop in self.sampling.stop)
        num_looked_at = longest + 8
        last = [*self.tokens[-num_looked_at:], *tokens][-num_looked_at:]
        tail = tokenizer.decode(last, skip_special_tokens=False)
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
