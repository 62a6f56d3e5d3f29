"""The tokens of a tree dealt over the ranks of a group, in contiguous slices of equal length.

Each rank computes its own tokens. Attention is the one place where they meet: keys and values are gathered, and every
rank's queries attend to those of their history, exactly as in one process. Positions travel with the tokens.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from corral.data.token_tree import TokenTree, TreeChunk
from corral.model.attention import Kernel, TreeAttention
from corral.model.collectives import gathered


def padded_tree(tree: TokenTree, multiple: int) -> TokenTree:
    """With tokens at the end that see only themselves, until their number can be divided."""
    added = np.arange(tree.num_nodes, -(-tree.num_nodes // multiple) * multiple)
    zeros = np.zeros(len(added), np.int64)
    return replace(
        tree,
        tokens=np.concatenate([tree.tokens, zeros]),
        positions=np.concatenate([tree.positions, zeros]),
        chunks=(*tree.chunks, *(TreeChunk(node, node + 1, np.array([node])) for node in added.tolist())),
    )


def slice_of(tree: TokenTree, group: dist.ProcessGroup) -> slice:
    """This rank's nodes of a padded tree."""
    length = tree.num_nodes // group.size()
    return slice(group.rank() * length, (group.rank() + 1) * length)


class SlicedTreeAttention:
    """`TreeAttention` of a rank that has only its own slice of queries, keys and values."""

    def __init__(self, tree: TokenTree, device: torch.device, group: dist.ProcessGroup) -> None:
        self.own, self.group = TreeAttention(tree, device, slice_of(tree, group)), group

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> Tensor:
        everyones = gathered(torch.cat([key, value], dim=-1), self.group, dim=2)
        key, value = everyones.split([key.shape[-1], value.shape[-1]], dim=-1)
        return self.own.attend(layer, query, key, value, kernel)
