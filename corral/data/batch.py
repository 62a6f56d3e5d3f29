"""A batch of trajectories as a handful of flat arrays plus offsets: ragged, never padded.

Stages add what they compute (`old_logprobs`, `reference_logprobs`, `values`, `advantages`, `returns`), one number per
token, aligned with `tokens`. `pack` fills micro-batches up to a hard cap of distinct tokens; no size has to divide
another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from corral.data.trajectory import BoolArray, FloatArray, IntArray, Trajectory
from corral.data.tree import TokenTree, common_prefix, lexicographic_order


@dataclass
class Batch:
    tokens: IntArray
    generated: BoolArray
    logprobs: FloatArray
    """As sampled, by the engine."""
    versions: IntArray
    token_rewards: FloatArray
    """A turn's reward, on the turn's last generated token."""
    offsets: IntArray
    """[trajectories + 1]"""
    groups: IntArray
    """[trajectories], the prompt's prompt_id."""
    columns: dict[str, FloatArray] = field(default_factory=dict)
    """What the stages add, [tokens] each."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> "Batch":
        assert trajectories, "a batch needs a trajectory"
        offsets = np.cumsum([0, *(len(t.tokens) for t in trajectories)])
        token_rewards = np.zeros(offsets[-1], np.float32)
        for start, trajectory in zip(offsets, trajectories, strict=False):
            for index, reward in trajectory.turn_rewards:
                token_rewards[start + index] += reward
        return cls(
            tokens=np.concatenate([t.tokens for t in trajectories]),
            generated=np.concatenate([t.generated for t in trajectories]),
            logprobs=np.concatenate([t.logprobs for t in trajectories]),
            versions=np.concatenate([t.versions for t in trajectories]),
            token_rewards=token_rewards,
            offsets=offsets,
            groups=np.array([t.prompt_id for t in trajectories]),
        )

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def num_generated(self) -> int:
        return int(self.generated.sum())

    def sequence(self, row: int) -> IntArray:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def inputs(self, row: int) -> IntArray:
        """What the model has to read of a trajectory: all before the last generated token, which ends it."""
        start, end = self.offsets[row], self.offsets[row + 1]
        generated = np.flatnonzero(self.generated[start:end])
        return self.tokens[start : start + (generated[-1] if len(generated) else 0)]

    def positions_of(self, rows: Sequence[int]) -> IntArray:
        """Indices into the flat arrays of the tokens of these trajectories."""
        return np.concatenate([np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows])

    def take(self, rows: Sequence[int]) -> "Batch":
        """A batch of these trajectories, with all columns."""
        flat = self.positions_of(rows)
        lengths = [self.offsets[row + 1] - self.offsets[row] for row in rows]
        return Batch(
            tokens=self.tokens[flat],
            generated=self.generated[flat],
            logprobs=self.logprobs[flat],
            versions=self.versions[flat],
            token_rewards=self.token_rewards[flat],
            offsets=np.cumsum([0, *lengths]),
            groups=self.groups[list(rows)],
            columns={name: column[flat] for name, column in self.columns.items()},
        )

    @classmethod
    def join(cls, batches: Sequence["Batch"]) -> "Batch":
        """One after the other; they have the same columns."""

        def joined(name: str) -> Any:
            return np.concatenate([getattr(batch, name) for batch in batches])

        starts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])
        return cls(
            tokens=joined("tokens"),
            generated=joined("generated"),
            logprobs=joined("logprobs"),
            versions=joined("versions"),
            token_rewards=joined("token_rewards"),
            offsets=np.concatenate([[0], *(b.offsets[1:] + start for b, start in zip(batches, starts, strict=False))]),
            groups=joined("groups"),
            columns={name: np.concatenate([b.columns[name] for b in batches]) for name in batches[0].columns},
        )

    def split(self, parts: int, rows: Sequence[int] | None = None) -> list[list[int]]:
        """Trajectories dealt into `parts` shares of about equal work, groups kept together where that is possible.

        Work is counted in distinct tokens. Longest first onto the lightest share; a share is empty only when there are
        fewer trajectories than shares.
        """
        chosen = list(range(len(self))) if rows is None else list(rows)
        if parts == 1:
            return [chosen]
        by_group: dict[int, list[int]] = {}
        for row in chosen:
            by_group.setdefault(int(self.groups[row]), []).append(row)
        units = list(by_group.values())
        if len(units) < parts:
            units = [[row] for row in chosen]
        work = [distinct_tokens([self.inputs(row) for row in unit]) for unit in units]
        shares: list[list[int]] = [[] for _ in range(parts)]
        load = [0] * parts
        for i in sorted(range(len(units)), key=lambda i: -work[i]):
            lightest = load.index(min(load))
            shares[lightest] += units[i]
            load[lightest] += work[i]
        return [sorted(share) for share in shares]

    def pack(self, max_tokens: int, rows: Sequence[int] | None = None) -> list["Pack"]:
        """Micro-batches of whole trajectories, each with at most `max_tokens` distinct tokens to read.

        Trajectories are taken in lexicographic order, so that the next one shares most with the one before it, and
        what it adds to the micro-batch is its length without that shared beginning.
        """
        return [Pack(self, tuple(packed)) for packed in self._packed_rows(max_tokens, rows)]

    def _packed_rows(self, max_tokens: int, rows: Sequence[int] | None) -> Iterator[list[int]]:
        chosen = list(range(len(self))) if rows is None else list(rows)
        sequences = [self.inputs(row) for row in chosen]
        packed: list[int] = []
        used, previous = 0, None
        for i in lexicographic_order(sequences):
            sequence = sequences[i]
            if len(sequence) > max_tokens:
                raise ValueError(f"a trajectory with {len(sequence)} tokens to read does not fit into {max_tokens}")
            added = len(sequence) - (0 if previous is None else common_prefix(previous, sequence))
            if packed and used + added > max_tokens:
                yield packed
                packed, used, added = [], 0, len(sequence)
            packed.append(chosen[i])
            used, previous = used + added, sequence
        if packed:
            yield packed


@dataclass(frozen=True)
class Pack:
    """Some trajectories of a batch, laid out for one forward and backward pass."""

    batch: Batch
    rows: tuple[int, ...]

    @cached_property
    def tree(self) -> TokenTree:
        return TokenTree.build([self.batch.inputs(row) for row in self.rows])

    @cached_property
    def flat(self) -> IntArray:
        """Indices into the batch's flat arrays, trajectory by trajectory."""
        return self.batch.positions_of(self.rows)

    @cached_property
    def offsets(self) -> IntArray:
        lengths = [self.batch.offsets[row + 1] - self.batch.offsets[row] for row in self.rows]
        return np.cumsum([0, *lengths])

    @cached_property
    def generated(self) -> BoolArray:
        return self.batch.generated[self.flat]

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


def distinct_tokens(sequences: Sequence[IntArray]) -> int:
    """Tokens that have to be computed when beginnings are shared."""
    total, previous = 0, np.empty(0, np.int64)
    for i in lexicographic_order(sequences):
        total += len(sequences[i]) - common_prefix(previous, sequences[i])
        previous = sequences[i]
    return total
