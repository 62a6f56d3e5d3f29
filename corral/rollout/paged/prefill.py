"""Reading prompts into the cache: pieces of many sequences in one pass, each behind what the cache holds of it already.

Pieces that begin their sequences are a token tree: what they have in common is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from corral.data.trajectory import IntArray
from corral.data.tree import TokenTree
from corral.kernels.host_to_device import on_device
from corral.kernels.varlen_attention import varlen_attention
from corral.model.attention import AttentionKernel
from corral.rollout.paged.pool import PagePool, slots_of


@dataclass(frozen=True)
class Piece:
    """Tokens `start <= position < len(tokens)` of a sequence are read; those before are in its pages."""

    tokens: IntArray
    start: int
    pages: list[int]


class Prefill:
    """Attention context of one pass. Keys and values are written to their pages, and read from there where sequences
    have more of them than this pass computes."""

    def __init__(self, pool: PagePool, pieces: Sequence[Piece], scales: dict[int, float]) -> None:
        self.pool, self.scales = pool, scales
        beginning = [i for i, piece in enumerate(pieces) if piece.start == 0]
        tree = TokenTree.build([pieces[i].tokens for i in beginning]) if beginning else None
        num_nodes = tree.num_nodes if tree is not None else 0
        nodes: list[IntArray] = [np.empty(0, np.int64)] * len(pieces)
        tokens, positions = ([tree.tokens], [tree.positions]) if tree is not None else ([], [])
        for i, path in zip(beginning, tree.paths if tree is not None else (), strict=True):
            nodes[i] = path
        for i, piece in enumerate(pieces):
            if piece.start > 0:
                new = len(piece.tokens) - piece.start
                nodes[i] = np.arange(num_nodes, num_nodes + new)
                tokens.append(piece.tokens[piece.start :])
                positions.append(np.arange(piece.start, len(piece.tokens)))
                num_nodes += new
        slots = [slots_of(piece.pages, piece.start, len(piece.tokens)) for piece in pieces]
        slot_of_node = np.zeros(num_nodes, np.int64)
        slot_of_node[np.concatenate(nodes)] = np.concatenate(slots)
        asked = [(c.end - c.start, slot_of_node[c.path]) for c in (tree.chunks if tree is not None else ())]
        asked += [(len(p.tokens) - p.start, slots_of(p.pages, 0, len(p.tokens))) for p in pieces if p.start > 0]
        device = pool.device
        self.tokens = on_device(np.concatenate(tokens), device)
        self.positions = on_device(np.concatenate(positions), device)
        self.last = on_device([int(path[-1]) for path in nodes], device)
        """Of each piece, the node of its last token."""
        self.stored = on_device(np.concatenate(slots), device)
        is_plain = num_nodes == sum(len(path) for path in nodes)
        self.stored_nodes = None if is_plain and _in_order(nodes) else on_device(np.concatenate(nodes), device)
        is_direct = all(count == len(keys) for count, keys in asked)
        self.keys = None if is_direct else on_device(np.concatenate([keys for _, keys in asked]), device)
        self.query_starts, self.max_query = _starts([count for count, _ in asked], device)
        self.key_starts, self.max_key = _starts([len(keys) for _, keys in asked], device)

    @property
    def num_computed(self) -> int:
        return len(self.tokens)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel) -> Tensor:
        keys, values = self.pool.keys_and_values(layer)
        output = varlen_attention(
            query[0].transpose(0, 1),
            self.store(keys, key[0].transpose(0, 1)),
            self.store(values, value[0].transpose(0, 1)),
            self.query_starts,
            self.key_starts,
            self.max_query,
            self.max_key,
            self.scales[layer],
        )
        return output.transpose(0, 1)[None]

    def store(self, cache: Tensor, new: Tensor) -> Tensor:
        """-> all that is asked, [keys, kv_heads, width]"""
        cache[self.stored] = new if self.stored_nodes is None else new[self.stored_nodes]
        return new if self.keys is None else cache[self.keys]


def _in_order(nodes: Sequence[IntArray]) -> bool:
    joined = np.concatenate(nodes)
    return bool((joined == np.arange(len(joined))).all())


def _starts(counts: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    return on_device(np.concatenate([[0], np.cumsum(counts)]), device).to(torch.int32), max(counts)
