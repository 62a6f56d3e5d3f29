"""The engine seam: tokens in, tokens out. Engines know nothing of prompts, environments or rewards.

Everything that the rollout driver and the rollout worker ask of an engine is in `Engine`, and
`tests/rollout/engine_contract.py` puts every implementation through it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

WeightLayout = Sequence[tuple[str, torch.Size, torch.dtype]]
"""(name, shape, dtype) of every weight, in the order in which a sender and an engine exchange them."""
NO_IMAGES: Mapping[int, bytes] = {}


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one completion are sampled. Requests that differ in nothing but their seed share their
    prefill."""

    max_tokens: int
    temperature: float = 1.0
    """Divides the logits; 0 is greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens from being sampled."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class FinishReason(StrEnum):
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


class PrefixHandle(Protocol):
    """A cached prefix: keys and values that an engine kept of a finished request. Passed with the next request of the
    same conversation, it saves the prefill of the tokens that both have. It means something to its engine only, and
    only until that gets other weights; dropping the handle frees the cache."""


@dataclass(frozen=True)
class Completion:
    tokens: list[int]
    """The generated tokens, including the stop token if one ended the completion."""
    logprobs: list[float]
    """Log-prob of each token under the model's distribution at the sampling temperature, before top-k, top-p, min-p.
    With one of these the token was sampled from another distribution, that of the tokens which they left."""
    finish_reason: FinishReason
    versions: list[int]
    """Version of the weights that computed each token."""
    prefix: PrefixHandle | None = None
    """Cached prefix of the prompt and these tokens, if it was requested and there was room for it."""


class Engine(Protocol):
    @property
    def max_sequences(self) -> int:
        """Number of sequences that are decoded at the same time; more requests than that wait."""
        ...

    @property
    def is_reproducible(self) -> bool:
        """Whether a token depends on the weights, its prefix and the seed alone, whatever else is in the batch."""
        ...

    @property
    def warning(self) -> str | None:
        """What a user should know of how this model is decoded, such as that it is done without a cache."""
        ...

    @property
    def weight_layout(self) -> WeightLayout:
        """The weights that `load` and `update` expect."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Number of requests that were made and are not finished."""
        ...

    @property
    def num_decode_steps(self) -> int:
        """Number of decode steps so far: an engine with requests in flight whose count stands still is stuck."""
        ...

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        seed: int,
        *,
        prefix: PrefixHandle | None = None,
        keep_prefix: bool = False,
        images: Mapping[int, bytes] = NO_IMAGES,
    ) -> Completion:
        """Continues `tokens`. Many calls are in flight at once, and are batched. `prefix`: cached prefix of an earlier
        request whose prompt and completion `tokens` begins with. `keep_prefix`: a later request will continue this
        one. `images`: those whose ids are among the tokens (`corral.data.images`)."""
        ...

    async def compute_logprobs(self, tokens: Sequence[int], temperature: float) -> list[float]:
        """Log-prob of each token after the first under the current weights, also with requests in flight. A trainer
        that computes the same numbers has the same weights."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes new weights; an empty iterable only sets the version (the tensors are shared with the trainer).
        Nothing may be in flight."""
        ...

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Takes new weights with requests in flight, which continue with them. Returns the seconds for which nothing
        was decoded: while the weights arrive, or only while they are put in place where they are collected first. If
        `weights` raises half-way, requests wait until a later update has succeeded, or continue with the old ones, but
        never with a mixture."""
        ...

    def release_cache(self) -> None:
        """Gives the KV cache's memory to whoever computes next on the device; the next request takes it again. Nothing
        may be in flight."""
        ...

    def close(self) -> None: ...
