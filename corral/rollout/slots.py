"""The reference core: a step at a time over a slotted cache. It decodes on a CPU, and what the paged core cannot.

Requests ride on branches. A branch is one distinct history: the samples of a prompt start on one branch, which forks
when they draw different tokens. So a prompt is computed once however many samples it has, and so is every beginning
that samples have in common; what a sample draws does not change by it, since each has its own seed.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.data.tree import TokenTree
from corral.kernels.sampling import Truncation, sample_tokens
from corral.model.attention import forward_hidden
from corral.rollout.engine import Sampling
from corral.rollout.request import EngineStats, Family, Request
from corral.rollout.slot_cache import Decode, Extend, Prefill, SlotCache


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


class SlotCore:
    def __init__(
        self, model: Any, tokenizer: Any, *, max_sequences: int, max_prefill_tokens: int, max_length: int
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_sequences, self.max_prefill_tokens, self.max_length = max_sequences, max_prefill_tokens, max_length
        self.device = next(model.parameters()).device
        self.head = model.get_output_embeddings()
        self.cache = SlotCache(model.config.get_text_config().num_hidden_layers, max(max_sequences, 2))
        self.version = 0
        self.stats = EngineStats()
        self.branches: list[Branch] = []
        self.stored: dict[Family, StoredPrompt] = {}
        self.histories: weakref.WeakSet[History] = weakref.WeakSet()
        """Those that somebody may come back with. Together they have at most as many tokens as the cache."""

    @property
    def is_busy(self) -> bool:
        return bool(self.branches)

    def step(self, waiting: list[Request]) -> list[Request]:
        """One token for every request that runs or can start; those are taken out of `waiting`."""
        self._decode()
        self._admit(waiting)
        return self._draw()

    def use_version(self, version: int) -> None:
        self.stored.clear()
        self.version = version

    def drop(self) -> None:
        self.branches = []
        self.stored.clear()

    def release(self) -> None:
        self.cache.release()

    def acquire(self) -> None:
        """It is taken as sequences grow."""

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

    def _admit(self, waiting: list[Request]) -> None:
        """Moves waiting requests, in order, onto branches while there are slots and room in one prefill."""
        free = self.max_sequences - sum(len(branch.requests) for branch in self.branches)
        families: dict[Family, list[Request]] = {}
        prefill_tokens = 0
        for request in waiting[:free]:
            if request.family not in families:
                if request.family not in self.stored:
                    prefill_tokens += len(request.prompt) - self._remembered(request)
                if families and prefill_tokens > self.max_prefill_tokens:
                    break
                families[request.family] = []
            families[request.family].append(request)
        admitted = sum(len(requests) for requests in families.values())
        del waiting[:admitted]  # in place: others may be added meanwhile
        self.stats.prompt_tokens += sum(len(r.prompt) for requests in families.values() for r in requests)
        left = {request.family for request in waiting}
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

    def _prefill(self, families: list[list[Request]], left: set[Family]) -> None:
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

    def _extend(self, families: list[list[Request]], left: set[Family]) -> None:
        """The same for families whose prompts go on from a history: only what is new is computed."""
        slots = range(len(self.branches), len(self.branches) + len(families))
        self.cache.reserve(max(len(requests[0].prompt) for requests in families))
        pasts = [self._remembered(requests[0]) for requests in families]
        for slot, requests in zip(slots, families, strict=True):
            memory = requests[0].memory
            assert isinstance(memory, History)
            self.cache.write(slot, memory.cache)
        new = [requests[0].prompt[past:] for requests, past in zip(families, pasts, strict=True)]
        context = Extend(self.cache, slots, self._tensor(pasts), self._tensor([len(tokens) for tokens in new]))
        tokens = torch.from_numpy(np.concatenate(new)).to(self.device)
        hidden = forward_hidden(self.model, tokens, context.positions, context)
        self.stats.computed_tokens += len(tokens)
        ends = np.cumsum([len(tokens) for tokens in new]) - 1
        for slot, requests, end in zip(slots, families, ends.tolist(), strict=True):
            self._begin(Branch(requests, len(requests[0].prompt), hidden[end], slot), left)

    def _begin(self, branch: Branch, left: set[Family]) -> None:
        self.branches.append(branch)
        for request in branch.requests:
            request.memory = None  # it is in the cache now
        family = branch.requests[0].family
        if family in left:
            self.stored[family] = StoredPrompt(self.cache.read(branch.slot, branch.length), branch.hidden)

    def _remembered(self, request: Request) -> int:
        """Tokens of its prompt that need not be computed."""
        memory = request.memory
        if isinstance(memory, History) and memory.length < len(request.prompt) and memory.version == self.version:
            return memory.length
        return 0

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
        logits = self.head(hidden)[: len(self.branches)]
        requests = [(row, request) for row, branch in enumerate(self.branches) for request in branch.requests]
        tokens, logprobs = sample_tokens(
            logits,
            rows=self._tensor([row for row, _ in requests]),
            temperatures=self._tensor([s.temperature for s in sampling]),
            seeds=self._tensor([request.seed for _, request in requests]),
            counters=self._tensor([len(request.tokens) for _, request in requests]),
            truncation=self._truncation(sampling) if any(s.truncates for s in sampling) else None,
        )
        self.stats.generated_tokens += len(requests)
        for (_, request), token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            request.extend([token], [logprob], self.version, self.tokenizer)
        self._keep()
        self._fork()
        return [request for _, request in requests if request.finish is not None]

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

    def _truncation(self, sampling: list[Sampling]) -> Truncation:
        columns = ([s.top_k for s in sampling], [s.top_p for s in sampling], [s.min_p for s in sampling])
        return Truncation(*(self._tensor(column) for column in columns))

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)
