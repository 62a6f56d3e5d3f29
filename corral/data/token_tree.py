"""Sequences with common prefixes, laid out so that no token with the same prefix is computed twice.

A causal model's state at a token depends on the tokens before it and on nothing else. So the samples of a prompt can
share the prompt, prompts can share a system message, and two samples that start with the same words can share those;
the result and the gradient are the same as if each sequence were computed alone. `TokenTree` holds the distinct
tokens, in an order in which every sequence adds one contiguous chunk behind what it shares with its predecessor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from corral.data.trajectory import IntArray


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
        order = lexicographic_order(sequences)
        paths: list[IntArray] = [np.empty(0, np.int64)] * len(sequences)
        chunks, new_tokens, num_nodes = [], [], 0
        previous, previous_path = np.empty(0, np.int64), np.empty(0, np.int64)
        for i in order:
            sequence = sequences[i]
            shared = common_prefix(previous, sequence)
            end = num_nodes + len(sequence) - shared
            path = np.concatenate([previous_path[:shared], np.arange(num_nodes, end)])
            if end > num_nodes:
                chunks.append(TreeChunk(num_nodes, end, path))
            paths[i] = path
            new_tokens.append(sequence[shared:])
            num_nodes, previous, previous_path = end, sequence, path
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


def lexicographic_order(sequences: Sequence[IntArray]) -> list[int]:
    """Neighbors in this order have the longest common prefixes. Big-endian bytes compare as the numbers do, in C."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def common_prefix(a: IntArray, b: IntArray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
