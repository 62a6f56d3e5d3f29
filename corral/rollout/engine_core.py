"""What the native engine and its three cores have in common: requests, statistics, and the core's interface."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from corral.data.batch import IntArray
from corral.rollout.engine import Completion, FinishReason, PrefixHandle, Sampling

PrefixKey = tuple[bytes, Sampling]


@dataclass(eq=False)
class GenerationRequest:
    """A call of `Engine.generate`, and how far it is."""

    prompt: IntArray
    sampling: Sampling
    seed: int
    future: "asyncio.Future[Completion] | None"
    """What the caller waits for; None where nobody does."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefix: PrefixHandle | None = None
    """Before the prefill: the cached prefix that the caller passed. When finished: that of all but the last token."""
    keep_prefix: bool = False
    images: Mapping[int, bytes] = field(default_factory=dict)
    """The images whose ids are in the prompt."""
    on_tokens: Callable[[list[int]], None] | None = None
    """Called in the event loop with tokens that are new since the last call."""
    num_reported: int = 0
    is_cancelled: bool = False
    """Whether nobody waits for it any more: it ends with its next token."""

    @cached_property
    def prefix_key(self) -> PrefixKey:
        """Requests with equal keys have the same next-token distribution at the start, and share one prefill."""
        return self.prompt.tobytes(), self.sampling

    def extend(self, tokens: list[int], logprobs: list[float], version: int, tokenizer: Any) -> None:
        """Appends sampled tokens, up to the one that finishes the request if one of them does."""
        num_tokens, self.finish_reason = self._find_end(tokens, tokenizer)
        self.tokens += tokens[:num_tokens]
        self.logprobs += logprobs[:num_tokens]
        self.versions += [version] * num_tokens

    def _find_end(self, tokens: list[int], tokenizer: Any) -> tuple[int, FinishReason | None]:
        """(how many of `tokens` belong to the completion, why the last of them finishes it)"""
        sampling, left = self.sampling, 1 if self.is_cancelled else self.sampling.max_tokens - len(self.tokens)
        if sampling.stop or not sampling.stop_tokens.isdisjoint(tokens):
            for num_tokens, token in enumerate(tokens[:left], start=1):
                if token in sampling.stop_tokens:
                    return num_tokens, FinishReason.STOP_TOKEN
                if sampling.stop and self._ends_with_stop_string(tokens[:num_tokens], tokenizer):
                    return num_tokens, FinishReason.STOP_STRING
        return (left, FinishReason.LENGTH) if len(tokens) >= left else (len(tokens), None)

    def _ends_with_stop_string(self, tokens: list[int], tokenizer: Any) -> bool:
        # Decoding the whole completion for each token would be quadratic. A token is at least one byte, of which a
        # character may have several; the first ones decoded may begin in the middle of a character.
        num_decoded = max(len(stop.encode()) for stop in self.sampling.stop) + 8
        last = [*self.tokens[-num_decoded:], *tokens][-num_decoded:]
        tail = tokenizer.decode(last, skip_special_tokens=False)
        return any(stop in tail for stop in self.sampling.stop)

    def report_tokens(self) -> None:
        """Passes new tokens to who listens."""
        if self.on_tokens is not None and len(self.tokens) > self.num_reported:
            new, self.num_reported = self.tokens[self.num_reported :], len(self.tokens)
            self.on_tokens(new)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(self.tokens, self.logprobs, self.finish_reason, self.versions, self.prefix)


@dataclass
class EngineStats:
    """Counts since the engine was made. Computed tokens against prompt plus generated tokens is what sharing prefixes
    saves."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    num_decode_steps: int = 0


class EngineCore(Protocol):
    """Owns the KV cache and the sequences that are being decoded. Used by one thread at a time."""

    stats: EngineStats

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to decode besides the waiting requests."""
        ...

    def step(self, waiting: list[GenerationRequest]) -> list[GenerationRequest]:
        """Decodes what is running, admits what it can (removed from `waiting`), returns the requests that finished."""
        ...

    def use_version(self, version: int) -> None:
        """Tells the core that the model has other weights from here on."""
        ...

    def abort_all(self) -> None:
        """Drops all running sequences."""
        ...

    def release_cache(self) -> None:
        """Frees the cache's memory until the next step. Nothing is running."""
        ...

    def acquire_cache(self) -> None:
        """Allocates what `release_cache` freed."""
        ...
