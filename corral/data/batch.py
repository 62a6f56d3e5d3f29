"""Trajectories, and batches of them as a handful of flat arrays plus offsets: ragged, never padded.

A `Trajectory` is the record of one rollout. Stages add to a `Batch` what they compute (`old_logprobs`, `values`,
`reference_logprobs`, `advantages`, `returns`), one number per token, aligned with `tokens`. `Batch.pack` fills
micro-batches up to a hard cap of distinct tokens; no size has to divide another.

A `Pack` is laid out as a `TokenTree`, so that no token with the same prefix is computed twice. A causal model's state
at a token depends on the tokens before it and on nothing else. So the samples of a prompt can share the prompt, prompts
can share a system message, and two samples that start with the same words can share those; the result and the gradient
are the same as if each sequence were computed alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.data.rows import Conversation
from corral.recipe.schema import KEYS_PER_TOKEN

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

TOKEN_ARRAYS = ("tokens", "generated", "logprobs", "versions", "token_rewards")
"""Fields of a batch with one element for each token, besides `columns`."""


class StopReason(StrEnum):
    """Why a trajectory ended."""

    END_OF_TURN = "end_of_turn"
    """The model generated its end-of-turn token and the environment had nothing to add."""
    STOP_STRING = "stop_string"
    """The model generated one of the recipe's stop strings."""
    LENGTH = "length"
    """The response reached `max_response_tokens`; what it says may be cut off."""
    ENVIRONMENT = "environment"
    """The environment was done, after a turn that ended at its own limit, `max_turn_tokens`."""
    TURNS = "turns"
    """The conversation reached `max_turns` before the environment was done."""
    ERROR = "error"
    """The environment or the reward failed; `Trajectory.error` says how."""


@dataclass
class Trajectory:
    """One growing list of token ids. What is not `generated` (prompt, observations) is never trained on."""

    tokens: IntArray
    generated: BoolArray
    logprobs: FloatArray
    """Log-prob of each generated token when it was sampled; 0 elsewhere."""
    versions: IntArray
    """Version of the weights that generated each token; -1 elsewhere."""
    turn_rewards: list[tuple[int, float]]
    """(index of the turn's last generated token, its reward)."""
    stop: StopReason
    prompt_id: int
    """Id of the prompt, counted over the whole run. Samples of one prompt have the same: it is also the group."""
    sample: int
    """Index within the group, 0 .. samples_per_prompt - 1."""
    row: int
    """Index of the prompt in its data set."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    tool_errors: list[str] = field(default_factory=list)
    """What its tools raised. The model is shown it, and the trajectory goes on."""
    tag: str = ""
    """Tag of its environment, where the recipe has several."""
    turn_states: list[int] = field(default_factory=list)
    """For each turn, a number for the state in which it was taken: equal states have equal numbers."""
    frames: list[str | bytes | None] = field(default_factory=list)
    """What its environment drew after `reset` and after each turn: text, a PNG file, or nothing."""
    turn_times: list[tuple[float, float]] = field(default_factory=list)
    """For each turn, the seconds that generating it took (waiting included), and then the environment's step."""
    images: dict[int, bytes] = field(default_factory=dict)
    """The images whose ids are among the tokens (`corral.data.images`)."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """What each of several rewards gave (`environment.rewards`), before its weight; None: nothing."""
    is_dropped: bool = False
    """Whether a turn has no reward: the trajectory is counted and recorded, and is in no batch."""
    conversation: Conversation | None = None
    """What the reward model has yet to score; None: nothing."""
    mask_reason: str | None = None
    """Why the trajectory is in no loss, though its reward is in the statistics of its group and batch."""
    is_chosen: bool | None = None
    """Whether it is the chosen answer of its pair; None: it is in none."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        assert len(self.generated) == len(self.logprobs) == len(self.versions) == length

    @property
    def is_masked(self) -> bool:
        return self.mask_reason is not None

    def __getstate__(self) -> dict[str, Any]:
        """What travels between processes, in 8 bytes for a token instead of 21: then eight samples of a thousand tokens
        are within what Ray sends along with an answer, and do not go through its object store."""
        is_short = not len(self.tokens) or (self.tokens.min() >= -(2**31) and self.tokens.max() < 2**31)
        integer = "i4" if is_short else "i8"
        return self.__dict__ | {
            "tokens": self.tokens.astype(integer).tobytes(),
            "generated": runs_of(self.generated),
            "logprobs": self.logprobs.tobytes(),
            "versions": runs_of(self.versions),
            "kinds": (integer, self.logprobs.dtype.str),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        integer, real = state.pop("kinds")
        state["tokens"] = np.frombuffer(state["tokens"], integer).astype(np.int64)
        state["logprobs"] = np.frombuffer(state["logprobs"], real).copy()
        for name, dtype in (("generated", np.bool_), ("versions", np.int64)):
            values, lengths = state[name]
            state[name] = np.repeat(np.array(values, dtype), lengths)
        self.__dict__.update(state)

    @classmethod
    def from_tokens(cls, tokens: Sequence[int], prompt_length: int = 1) -> "Trajectory":
        """Tokens that count as generated behind the prompt, without log-probs and rewards: for probes and
        placeholders."""
        generated = np.arange(len(tokens)) >= prompt_length
        return cls(
            tokens=np.array(tokens, np.int64),
            generated=generated,
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.where(generated, 0, -1),
            turn_rewards=[],
            stop=StopReason.LENGTH,
            prompt_id=0,
            sample=0,
            row=0,
        )

    @property
    def reward(self) -> float:
        return float(sum(reward for _, reward in self.turn_rewards))

    @property
    def prompt_length(self) -> int:
        """Tokens before the first generated one."""
        return int(self.generated.argmax()) if self.generated.any() else len(self.tokens)

    @property
    def num_generated(self) -> int:
        return int(self.generated.sum())


@dataclass
class Batch:
    tokens: IntArray
    generated: BoolArray
    logprobs: FloatArray
    """Log-probs of the engine that sampled the tokens."""
    versions: IntArray
    token_rewards: FloatArray
    """A turn's reward, on the turn's last generated token."""
    offsets: IntArray
    """[trajectories + 1]"""
    groups: IntArray
    """[trajectories], the id of each one's prompt."""
    is_masked: BoolArray
    """[trajectories], whether each one is left out of the loss and of the counts that losses are divided by."""
    columns: dict[str, FloatArray] = field(default_factory=dict)
    """What later stages computed, [tokens] each."""
    images: dict[int, bytes] = field(default_factory=dict)
    """By their ids among the tokens."""
    is_chosen: BoolArray | None = None
    """[trajectories], which answer of its pair is the chosen one. None: a group is no pair. A loss compares the two of
    a pair, so they stay in one update, one shard and one micro-batch."""
    details: dict[str, FloatArray] = field(default_factory=dict)
    """[tokens] each: `entropies`, `trained_logprobs` and, of pairs, `implicit_rewards`, as the policy had them when it
    was trained on them first; NaN in trajectories that were not. For the files of trajectories: no part of the batch
    that trainers get has them."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> "Batch":
        assert trajectories, "a batch needs a trajectory"
        offsets = np.cumsum([0, *(len(t.tokens) for t in trajectories)])
        token_rewards = np.zeros(offsets[-1], np.float32)
        for start, trajectory in zip(offsets, trajectories, strict=False):
            for index, reward in trajectory.turn_rewards:
                token_rewards[start + index] += reward
        return cls(
            np.concatenate([t.tokens for t in trajectories]),
            np.concatenate([t.generated for t in trajectories]),
            np.concatenate([t.logprobs for t in trajectories]),
            np.concatenate([t.versions for t in trajectories]),
            token_rewards,
            offsets,
            groups=np.array([t.prompt_id for t in trajectories]),
            is_masked=np.array([t.is_masked for t in trajectories]),
            images={id: data for t in trajectories for id, data in t.images.items()},
            is_chosen=None if trajectories[0].is_chosen is None else np.array([t.is_chosen for t in trajectories]),
        )

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def num_generated(self) -> int:
        return int(self.generated.sum())

    @property
    def counted(self) -> BoolArray:
        """[tokens], generated tokens that are in the loss: all, but those that a correction takes out."""
        return self.generated & (self.columns["counted"] > 0) if "counted" in self.columns else self.generated

    def sequence(self, row: int) -> IntArray:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def inputs(self, row: int) -> IntArray:
        """The tokens that the model computes: all before the last generated one, which nothing is predicted from."""
        start, end = self.offsets[row], self.offsets[row + 1]
        generated = np.flatnonzero(self.generated[start:end])
        return self.tokens[start : start + (generated[-1] if len(generated) else 0)]

    def positions_of(self, rows: Sequence[int]) -> IntArray:
        """Indices into the flat arrays of the tokens of these trajectories."""
        return np.concatenate([np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows])

    def take(self, rows: Sequence[int]) -> "Batch":
        """A batch of these trajectories, with all columns."""
        flat = self.positions_of(rows)
        ids = set(np.unique(self.tokens[flat]).tolist()) if self.images else ()
        return Batch(
            **{name: getattr(self, name)[flat] for name in TOKEN_ARRAYS},
            images={id: self.images[id] for id in self.images if id in ids},
            offsets=np.cumsum([0, *np.diff(self.offsets)[list(rows)]]),
            groups=self.groups[list(rows)],
            is_masked=self.is_masked[list(rows)],
            columns={name: column[flat] for name, column in self.columns.items()},
            is_chosen=None if self.is_chosen is None else self.is_chosen[list(rows)],
        )

    def set_details(self, rows: Sequence[int], columns: dict[str, FloatArray]) -> None:
        """Notes numbers of these trajectories, one after the other."""
        for name, numbers in columns.items():
            column = self.details.setdefault(name, np.full(len(self.tokens), np.nan, np.float32))
            column[self.positions_of(rows)] = numbers

    @classmethod
    def join(cls, batches: Sequence["Batch"]) -> "Batch":
        """Concatenates batches with the same columns."""
        starts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])
        return cls(
            **{name: np.concatenate([getattr(batch, name) for batch in batches]) for name in TOKEN_ARRAYS},
            offsets=np.concatenate([[0], *(b.offsets[1:] + start for b, start in zip(batches, starts, strict=False))]),
            groups=np.concatenate([batch.groups for batch in batches]),
            is_masked=np.concatenate([batch.is_masked for batch in batches]),
            images={id: data for batch in batches for id, data in batch.images.items()},
            columns={name: np.concatenate([b.columns[name] for b in batches]) for name in batches[0].columns},
            is_chosen=None if batches[0].is_chosen is None else np.concatenate([b.is_chosen for b in batches]),
            details={
                name: np.concatenate([b.details.get(name, np.full(len(b.tokens), np.nan, np.float32)) for b in batches])
                for name in {name: None for batch in batches for name in batch.details}
            },
        )

    def units(self, rows: Iterable[int] | None = None) -> list[list[int]]:
        """Trajectories that have to stay together: the two of a pair, or each one alone."""
        chosen = range(len(self)) if rows is None else rows
        if self.is_chosen is None:
            return [[row] for row in chosen]
        return list(self.by_group(chosen).values())

    def by_group(self, rows: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(int(self.groups[row]), []).append(row)
        return found

    def split(self, parts: int, rows: Sequence[int] | None = None) -> list[list[int]]:
        """Shards of about equal work, groups kept together where that is possible.

        Work is counted in distinct tokens. Longest first onto the lightest shard; a shard is empty only when there are
        fewer trajectories than shards.
        """
        chosen = list(range(len(self))) if rows is None else list(rows)
        if parts == 1:
            return [chosen]
        units = list(self.by_group(chosen).values())
        if len(units) < parts:
            units = self.units(chosen)
        work = [distinct_tokens([self.inputs(row) for row in unit]) for unit in units]
        shards: list[list[int]] = [[] for _ in range(parts)]
        load = [0] * parts
        for i in sorted(range(len(units)), key=lambda i: -work[i]):
            lightest = load.index(min(load))
            shards[lightest] += units[i]
            load[lightest] += work[i]
        return [sorted(shard) for shard in shards]

    def pack(self, max_tokens: int, rows: Sequence[int] | None = None) -> list["Pack"]:
        """Micro-batches of whole trajectories, each with at most `max_tokens` distinct tokens to compute, which attend
        to `KEYS_PER_TOKEN` times as many at most, those of shared prefixes counted for each trajectory; a trajectory
        with more tokens is one by itself, which the trainer computes in parts.

        Trajectories are taken in lexicographic order, so that the next one shares most with the one before it, and
        what it adds to the micro-batch is its length without that common prefix. The two of a pair are taken together,
        in the order of the first of them.
        """
        units = self.units(rows)
        packed: list[list[int]] = []
        used = num_keys = 0
        for i, num_shared in in_prefix_order([self.inputs(unit[0]) for unit in units]):
            inputs = [self.inputs(row) for row in units[i]]
            length, own_keys = distinct_tokens(inputs), sum(map(len, inputs))
            used, num_keys = used + length - num_shared, num_keys + own_keys
            if not packed or used > max_tokens or num_keys > KEYS_PER_TOKEN * max_tokens:
                packed.append([])
                used, num_keys = length, own_keys
            packed[-1] += units[i]
        return [Pack(self, tuple(rows)) for rows in packed]


@dataclass(frozen=True)
class Pack:
    """Some trajectories of a batch, laid out for one forward and backward pass."""

    batch: Batch
    rows: tuple[int, ...]

    @cached_property
    def tree(self) -> "TokenTree":
        return TokenTree.build([self.batch.inputs(row) for row in self.rows])

    @cached_property
    def flat(self) -> IntArray:
        """Indices into the batch's flat arrays, trajectory by trajectory."""
        return self.batch.positions_of(self.rows)

    @cached_property
    def offsets(self) -> IntArray:
        return np.cumsum([0, *np.diff(self.batch.offsets)[list(self.rows)]])

    @cached_property
    def generated(self) -> BoolArray:
        return self.batch.generated[self.flat]

    @cached_property
    def counted(self) -> BoolArray:
        return self.batch.counted[self.flat]

    @cached_property
    def targets(self) -> IntArray:
        """Indices into this pack's tokens of those to predict: generated, and not the first of a trajectory."""
        wanted = self.generated.copy()
        wanted[self.offsets[:-1]] = False
        return np.flatnonzero(wanted)

    @cached_property
    def sources(self) -> IntArray:
        """[targets]: the tree's node from which each of them is predicted, that of the token before it."""
        nodes = np.full(len(self.flat), -1)
        for start, path in zip(self.offsets[:-1], self.tree.paths, strict=True):
            nodes[start : start + len(path)] = path
        return nodes[self.targets - 1]

    def column(self, name: str) -> FloatArray:
        return self.batch.columns[name][self.flat]

    @property
    def pairs(self) -> IntArray:
        """[rows]: the pair of each trajectory, counted from 0."""
        return np.unique(self.batch.groups[list(self.rows)], return_inverse=True)[1]

    @property
    def is_chosen(self) -> BoolArray | None:
        return None if self.batch.is_chosen is None else self.batch.is_chosen[list(self.rows)]


@dataclass(frozen=True)
class TreeChunk:
    """The tokens that one sequence adds: `start <= node < end`. Its last query attends to the whole `path`."""

    start: int
    end: int
    path: IntArray
    """Nodes of the sequence from its root up to and including the chunk's own."""


@dataclass(frozen=True)
class TokenTree:
    tokens: IntArray
    """[nodes]"""
    positions: IntArray
    """[nodes], distance from the root: the token's position in every sequence that runs through it."""
    paths: tuple[IntArray, ...]
    """For each sequence, in the order given to `build`, the nodes of its tokens."""
    chunks: tuple[TreeChunk, ...]
    """In order of `start`, without empty ones (of a sequence that is a prefix of another, or equal to it)."""

    @classmethod
    def build(cls, sequences: Sequence[IntArray]) -> "TokenTree":
        paths: list[IntArray] = [np.empty(0, np.int64)] * len(sequences)
        chunks, new_tokens, num_nodes, path = [], [], 0, np.empty(0, np.int64)
        for i, num_shared in in_prefix_order(sequences):
            end = num_nodes + len(sequences[i]) - num_shared
            path = paths[i] = np.concatenate([path[:num_shared], np.arange(num_nodes, end)])
            if end > num_nodes:
                chunks.append(TreeChunk(num_nodes, end, path))
            new_tokens.append(sequences[i][num_shared:])
            num_nodes = end
        positions = np.empty(num_nodes, np.int64)
        for chunk in chunks:
            positions[chunk.start : chunk.end] = np.arange(len(chunk.path) - (chunk.end - chunk.start), len(chunk.path))
        return cls(np.concatenate(new_tokens), positions, tuple(paths), tuple(chunks))

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @cached_property
    def trees(self) -> tuple[tuple[TreeChunk, ...], ...]:
        """Chunks by root. Chunks under different roots share nothing; each root's nodes are contiguous."""
        trees: list[list[TreeChunk]] = []
        for chunk in self.chunks:
            if chunk.path[0] == chunk.start:
                trees.append([])
            trees[-1].append(chunk)
        return tuple(tuple(tree) for tree in trees)


def runs_of(array: BoolArray | IntArray) -> tuple[list[int], list[int]]:
    """(values, lengths) of the runs of equal elements."""
    if not len(array):
        return [], []
    last = [*np.flatnonzero(array[1:] != array[:-1]).tolist(), len(array) - 1]
    return array[last].tolist(), [end - begin for begin, end in zip([-1, *last], last, strict=False)]


def distinct_tokens(sequences: Sequence[IntArray]) -> int:
    """Number of tokens that have to be computed when common prefixes are computed once."""
    return sum(len(sequences[i]) - num_shared for i, num_shared in in_prefix_order(sequences))


def in_prefix_order(sequences: Sequence[IntArray]) -> Iterator[tuple[int, int]]:
    """Indices in lexicographic order, in which neighbors have the longest common prefixes, each with the number of
    tokens that it shares with the one before it. Big-endian bytes compare as the numbers do, in C."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    previous: IntArray = np.empty(0, np.int64)
    for i in sorted(range(len(sequences)), key=keys.__getitem__):
        length = min(len(previous), len(sequences[i]))
        differs = previous[:length] != sequences[i][:length]
        yield i, int(differs.argmax()) if differs.any() else length
        previous = sequences[i]
