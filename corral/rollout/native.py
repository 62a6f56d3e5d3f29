"""The native engine: continuous batching over any transformers causal model, on the trainer's own weights.

Requests ride on branches. A branch is one distinct history: the samples of a prompt start on one branch, which forks
when they draw different tokens. So a prompt is computed once however many samples it has, and so is every beginning
that samples have in common; what a sample draws does not change by it, since each has its own seed.

New weights may come while requests are in flight, between two steps. A step ends when its tokens are drawn, before
they are read, so that every token is computed by one version as a whole, the one that is noted for it; what came before
it stays in the cache as the versions of its time left it. The noted log-prob is that of the distribution from which the
token was drawn, so that an importance correction is exact. A request that starts after an update has nothing of the old
weights: prompts that were stored for samples still waiting are forgotten, and computed again.
"""

import asyncio
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from corral.data.trajectory import IntArray
from corral.data.tree import TokenTree
from corral.model.attention import forward_hidden
from corral.rollout.cache import Decode, Extend, Prefill, SlotCache
from corral.rollout.engine import Completion, Finish, Memory, Sampling
from corral.rollout.sampling import draw, scale_logits, truncate, uniform

T = TypeVar("T")


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
    memory: "History | None" = None
    """Given: of the prompt's beginning. When it is finished: of all but the last token."""
    keep: bool = False

    @cached_property
    def family(self) -> tuple[bytes, Sampling]:
        """Requests of one family have the same next-token distribution at the start."""
        return self.prompt.tobytes(), self.sampling


@dataclass(eq=False)
class Branch:
    requests: list[Request]
    length: int
    """Tokens in the cache: all but the one that was drawn last."""
    hidden: Tensor
    """[width], the last token's in the cache: what the next token is drawn from, within the step."""
    slot: int


@dataclass
class StoredPrompt:
    """A prompt whose samples do not all fit yet: kept so that the later ones need no prefill."""

    cache: list[tuple[Tensor, Tensor]]
    hidden: Tensor


@dataclass(eq=False)
class History:
    """The keys and values of a finished request, all but its last token's: the next turn of its conversation needs to
    read only what is new."""

    cache: list[tuple[Tensor, Tensor]]
    length: int
    version: int
    """Of the weights; others would not know what to do with it."""


@dataclass
class EngineStats:
    """Since the engine was made. `computed` against `prompt + generated` is what sharing saves."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    decode_steps: int = 0


class NativeEngine:
    def __init__(
        self, model: Any, tokenizer: Any, *, max_sequences: int, max_prefill_tokens: int, max_length: int
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_sequences, self.max_prefill_tokens, self.max_length = max_sequences, max_prefill_tokens, max_length
        self.device = next(model.parameters()).device
        self.head = model.get_output_embeddings()
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers, max(max_sequences, 2))
        self.version = 0
        self.ready = asyncio.Event()
        """Not set while weights are being taken, and when that broke off: then they are of no version, and nothing is
        decoded until others have been taken whole."""
        self.ready.set()
        self.stats = EngineStats()
        self.in_flight: set[Request] = set()
        self.waiting: list[Request] = []
        self.branches: list[Branch] = []
        self.stored: dict[tuple[bytes, Sampling], StoredPrompt] = {}
        self.histories: weakref.WeakSet[History] = weakref.WeakSet()
        """Those that somebody may come back with. Together they have at most as many tokens as the cache."""
        self.pump: asyncio.Task[None] | None = None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="corral-engine")

    # --- the seam

    async def generate(
        self, tokens: list[int], sampling: Sampling, seed: int, *, memory: Memory | None = None, keep: bool = False
    ) -> Completion:
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        if len(tokens) + sampling.max_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and up to {sampling.max_tokens} new ones "
                f"pass the limit of {self.max_length}"
            )
        loop = asyncio.get_running_loop()
        request = Request(np.array(tokens, np.int64), sampling, seed, loop.create_future(), keep=keep)
        if isinstance(memory, History) and memory.length < len(tokens):
            request.memory = memory
        del memory  # the request lets go of it as soon as it is in the cache
        self.in_flight.add(request)
        self.waiting.append(request)
        if self.pump is None or self.pump.done():
            self.pump = loop.create_task(self._pump())
        return await request.future

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not self.in_flight, "requests are in flight: this is for `update`"
        self._take(weights, version)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        """Takes new weights with requests in flight, which go on with them. Returns the seconds for which nothing was
        decoded. If `weights` breaks off, requests wait until others have been taken whole."""
        self.ready.clear()
        pause_s = await self.between_steps(lambda: self._take(weights, version))
        self.ready.set()
        return pause_s

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Runs `work` while the model is not in use."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def pause(self) -> None:
        assert not self.in_flight, "requests are in flight"
        self.cache.release()

    def resume(self) -> None:
        """The cache is taken again as sequences need it."""

    def close(self) -> None:
        self.thread.shutdown(wait=True)

    # --- what happens between

    def _take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        started = time.perf_counter()
        self.stored.clear()
        copy_weights(self.model, weights)
        self.version = version
        return time.perf_counter() - started

    async def _pump(self) -> None:
        """Consumes waiting requests, produces completions; ends when none is left. Waits for the model, and for weights
        that are on their way."""
        loop = asyncio.get_running_loop()
        try:
            while self.waiting or self.branches:
                await self.ready.wait()
                for request in await loop.run_in_executor(self.thread, self.step):
                    assert request.finish is not None
                    self.in_flight.discard(request)
                    if not request.future.done():
                        request.future.set_result(
                            Completion(
                                request.tokens, request.logprobs, request.finish, request.versions, request.memory
                            )
                        )
        except Exception as error:
            for request in self.in_flight:
                if not request.future.done():
                    request.future.set_exception(error)
            self.in_flight, self.waiting, self.branches = set(), [], []
            self.stored.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One token for every request that runs or can start. Returns those that are finished."""
        self._decode()
        self._admit()
        return self._draw()

    def _decode(self) -> None:
        """Reads the token that each branch drew in the last step."""
        if not self.branches:
            return
        tokens = [branch.requests[0].tokens[-1] for branch in self.branches]
        lengths = [branch.length for branch in self.branches]
        self.cache.reserve(max(lengths) + 1)
        if len(tokens) == 1:
            # A single row goes through other kernels, which round differently: give it company, in a free slot.
            tokens, lengths = [*tokens, tokens[0]], [*lengths, 0]
        context = Decode(self.cache, self._tensor(lengths))
        hidden = forward_hidden(self.model, self._tensor(tokens), self._tensor(lengths), context)
        self.stats.computed_tokens += len(self.branches)
        self.stats.decode_steps += 1
        for branch, row in zip(self.branches, hidden, strict=False):
            branch.hidden = row
            branch.length += 1

    def _admit(self) -> None:
        """Moves waiting requests, in order, onto branches while there are slots and room in one prefill."""
        free = self.max_sequences - sum(len(branch.requests) for branch in self.branches)
        families: dict[tuple[bytes, Sampling], list[Request]] = {}
        prefill_tokens = 0
        for request in self.waiting[:free]:
            if request.family not in families:
                if request.family not in self.stored:
                    prefill_tokens += len(request.prompt) - self._remembered(request)
                if families and prefill_tokens > self.max_prefill_tokens:
                    break
                families[request.family] = []
            families[request.family].append(request)
        admitted = sum(len(requests) for requests in families.values())
        del self.waiting[:admitted]  # in place: others may be added meanwhile
        self.stats.prompt_tokens += sum(len(r.prompt) for requests in families.values() for r in requests)
        left = {request.family for request in self.waiting}
        fresh = [requests for family, requests in families.items() if family not in self.stored]
        for family, requests in families.items():
            if family in self.stored:
                self._start(requests, self.stored[family])
        going_on = [requests for requests in fresh if self._remembered(requests[0])]
        anew = [requests for requests in fresh if not self._remembered(requests[0])]
        for alike in self._alike(going_on):
            self._extend(alike, left)
        self._prefill(anew, left)
        self.stored = {family: stored for family, stored in self.stored.items() if family in left}

    def _prefill(self, families: list[list[Request]], left: set[tuple[bytes, Sampling]]) -> None:
        """One branch for each family. Those with members `left` to wait are stored for them."""
        if not families:
            return
        prompts = [requests[0].prompt for requests in families]
        tree = TokenTree.build(prompts)
        slots = range(len(self.branches), len(self.branches) + len(prompts))
        self.cache.reserve(max(len(prompt) for prompt in prompts))
        hidden = forward_hidden(
            self.model,
            torch.from_numpy(tree.tokens).to(self.device),
            torch.from_numpy(tree.positions).to(self.device),
            Prefill(self.cache, tree, slots, self.device),
        )
        self.stats.computed_tokens += tree.num_nodes
        for slot, requests, path in zip(slots, families, tree.paths, strict=True):
            self._begin(Branch(requests, len(path), hidden[path[-1]], slot), left)

    def _alike(self, families: list[list[Request]]) -> list[list[list[Request]]]:
        """In parts whose new tokens, padded to the longest, are at most `max_prefill_tokens`, or one family's."""

        def new(family: list[Request]) -> int:
            return len(family[0].prompt) - self._remembered(family[0])

        parts: list[list[list[Request]]] = []
        for family in sorted(families, key=new):
            if not parts or (len(parts[-1]) + 1) * new(family) > self.max_prefill_tokens:
                parts.append([])
            parts[-1].append(family)
        return parts

    def _extend(self, families: list[list[Request]], left: set[tuple[bytes, Sampling]]) -> None:
        """The same for families whose prompts go on from a history: only what is new is computed."""
        slots = range(len(self.branches), len(self.branches) + len(families))
        self.cache.reserve(max(len(requests[0].prompt) for requests in families))
        pasts = [self._remembered(requests[0]) for requests in families]
        for slot, requests in zip(slots, families, strict=True):
            assert requests[0].memory is not None
            self.cache.write(slot, requests[0].memory.cache)
        new = [requests[0].prompt[past:] for requests, past in zip(families, pasts, strict=True)]
        context = Extend(self.cache, slots, self._tensor(pasts), self._tensor([len(tokens) for tokens in new]))
        tokens = torch.from_numpy(np.concatenate(new)).to(self.device)
        hidden = forward_hidden(self.model, tokens, context.positions, context)
        self.stats.computed_tokens += len(tokens)
        ends = np.cumsum([len(tokens) for tokens in new]) - 1
        for slot, requests, end in zip(slots, families, ends.tolist(), strict=True):
            self._begin(Branch(requests, len(requests[0].prompt), hidden[end], slot), left)

    def _begin(self, branch: Branch, left: set[tuple[bytes, Sampling]]) -> None:
        self.branches.append(branch)
        for request in branch.requests:
            request.memory = None  # it is in the cache now
        family = branch.requests[0].family
        if family in left:
            self.stored[family] = StoredPrompt(self.cache.read(branch.slot, branch.length), branch.hidden)

    def _remembered(self, request: Request) -> int:
        """Tokens of its prompt that need not be computed."""
        memory = request.memory
        return memory.length if memory is not None and memory.version == self.version else 0

    def _start(self, requests: list[Request], stored: StoredPrompt) -> None:
        slot, length = len(self.branches), len(requests[0].prompt)
        self.cache.reserve(length)
        self.cache.write(slot, stored.cache)
        self._begin(Branch(requests, length, stored.hidden, slot), set())

    def _draw(self) -> list[Request]:
        """Draws a token for every request, ends those that are done, forks branches whose requests drew differently."""
        hidden = torch.stack([branch.hidden for branch in self.branches])
        if len(hidden) == 1:
            hidden = hidden.expand(2, -1)  # see _decode
        sampling = [branch.requests[0].sampling for branch in self.branches]
        logits = self.head(hidden).float()[: len(self.branches)]
        logits = scale_logits(logits, self._tensor([s.temperature for s in sampling]))
        requests = [(row, request) for row, branch in enumerate(self.branches) for request in branch.requests]
        rows = self._tensor([row for row, _ in requests])
        seeds = self._tensor([request.seed for _, request in requests])
        counters = self._tensor([len(request.tokens) for _, request in requests])
        allowed = logits
        if any(s.temperature > 0 and (s.top_k or s.top_p < 1 or s.min_p) for s in sampling):
            columns = ([s.top_k for s in sampling], [s.top_p for s in sampling], [s.min_p for s in sampling])
            allowed = truncate(logits, *(self._tensor(column) for column in columns))
        greedy = self._tensor([s.temperature == 0 for s in sampling])
        tokens = draw(allowed, rows, uniform(seeds, counters), greedy)
        logprobs = logits[rows, tokens] - logits.logsumexp(-1)[rows]
        self.stats.generated_tokens += len(requests)
        for (_, request), token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            self._append(request, token, logprob)
        self._keep()
        self._fork()
        return [request for _, request in requests if request.finish is not None]

    def _append(self, request: Request, token: int, logprob: float) -> None:
        request.tokens.append(token)
        request.logprobs.append(logprob)
        request.versions.append(self.version)
        sampling = request.sampling
        if token in sampling.stop_tokens:
            request.finish = Finish.STOP_TOKEN
        elif sampling.stop and self._ends_with_stop(request):
            request.finish = Finish.STOP_STRING
        elif len(request.tokens) >= sampling.max_tokens:
            request.finish = Finish.LENGTH

    def _ends_with_stop(self, request: Request) -> bool:
        longest = max(len(stop) for stop in request.sampling.stop)
        tail = self.tokenizer.decode(request.tokens[-(longest + 8) :], skip_special_tokens=False)
        return any(stop in tail for stop in request.sampling.stop)

    def _keep(self) -> None:
        """Histories for those of the finished requests that will be gone on from; they share their branch's."""
        room = self.max_sequences * self.max_length - sum(history.length for history in self.histories)
        for branch in self.branches:
            finished = [request for request in branch.requests if request.finish is not None]
            history = None
            if branch.length <= room and any(self._may_keep(request) for request in finished):
                history = History(self.cache.read(branch.slot, branch.length), branch.length, self.version)
                self.histories.add(history)
                room -= branch.length
            for request in finished:
                request.memory = history if request.keep else None

    def _may_keep(self, request: Request) -> bool:
        """If all of it is of the weights that are here now."""
        return request.keep and request.versions[0] == self.version

    def _fork(self) -> None:
        """Regroups the unfinished requests by what they drew, and gives every group one of the first slots."""
        groups: list[tuple[Branch, list[Request]]] = []
        for branch in self.branches:
            by_token: dict[int, list[Request]] = {}
            for request in branch.requests:
                if request.finish is None:
                    by_token.setdefault(request.tokens[-1], []).append(request)
            groups += [(branch, requests) for requests in by_token.values()]
        kept: dict[int, tuple[Branch, list[Request]]] = {}
        moved: list[tuple[Branch, list[Request]]] = []
        for branch, requests in groups:
            if branch.slot < len(groups) and branch.slot not in kept:
                kept[branch.slot] = (branch, requests)
            else:
                moved.append((branch, requests))
        free = [slot for slot in range(len(groups)) if slot not in kept]
        length = max((branch.length for branch, _ in moved), default=0)
        self.cache.copy([branch.slot for branch, _ in moved], free, length)
        placed = {**kept, **dict(zip(free, moved, strict=True))}
        self.branches = [
            Branch(requests, branch.length, branch.hidden, slot)
            for slot, (branch, requests) in sorted(placed.items(), key=lambda item: item[0])
        ]

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)


def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Into the model's own parameters, in place."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            own[name].copy_(tensor)
