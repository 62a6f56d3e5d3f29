"""What a rank computes of a pack: its nodes of the token tree, and the generated tokens predicted from them."""

from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from corral.data.batch import Batch, Pack
from corral.data.trajectory import StopReason, Trajectory
from corral.kernels.device import on_device
from corral.model.attention import AttentionContext, TreeAttention, forward_hidden
from corral.model.collectives import summed
from corral.model.context_parallel import SlicedTreeAttention, padded_tree, slice_of
from corral.train.mesh import Mesh


class Prediction:
    """Which node of a pack's tree each generated token was predicted from, ready for the device."""

    def __init__(self, pack: Pack, mesh: Mesh) -> None:
        self.device, self.group = mesh.device, mesh.groups.get("context")
        self.num_tokens = len(pack.flat)
        self.tree, self.nodes = pack.tree, slice(0, pack.tree.num_nodes)
        sources, targets = pack.sources, pack.targets
        if self.group is not None:
            self.tree = padded_tree(pack.tree, self.group.size())
            self.nodes = slice_of(self.tree, self.group)
            own = (sources >= self.nodes.start) & (sources < self.nodes.stop)
            sources, targets = sources[own] - self.nodes.start, targets[own]
        rows, row_of_target = np.unique(sources, return_inverse=True)
        if self.group is not None and not len(rows):
            rows = np.zeros(1, np.int64)  # nothing is wanted here, but every rank takes part in the backward pass
        order = np.argsort(row_of_target, kind="stable")
        self.rows = on_device(rows, self.device)
        """Nodes whose next token is wanted."""
        self.row_of_target = on_device(row_of_target[order], self.device)
        self.token_of_target = on_device(targets[order], self.device)
        self.targets = on_device(pack.batch.tokens[pack.flat[targets[order]]], self.device)

    @property
    def num_nodes(self) -> int:
        """That this rank computes."""
        return self.nodes.stop - self.nodes.start

    def hidden(self, causal: Any) -> Tensor:
        """[rows, width], the last hidden states of a transformers model."""
        tokens = on_device(self.tree.tokens[self.nodes], self.device)
        positions = on_device(self.tree.positions[self.nodes], self.device)
        attention: AttentionContext
        if self.group is None:
            attention = TreeAttention(self.tree, self.device)
        else:
            attention = SlicedTreeAttention(self.tree, self.device, self.group)
        return forward_hidden(causal, tokens, positions, attention).index_select(0, self.rows)

    def to_tokens(self, per_target: Tensor) -> Tensor:
        """[targets] -> [tokens of the pack], 0 where nothing was generated; equal on all ranks of a context group."""
        tokens = per_target.new_zeros(self.num_tokens).index_put((self.token_of_target,), per_target)
        return tokens if self.group is None else summed(tokens, self.group)


@cache
def stand_in() -> Pack:
    """The smallest pack, for a rank that has none: others need it to gather parameters and to sum gradients."""
    trajectory = Trajectory(
        tokens=np.zeros(2, np.int64),
        generated=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int64),
        turn_rewards=[],
        stop=StopReason.LENGTH,
        prompt_id=0,
        sample=0,
        row=0,
    )
    return Pack(Batch.of([trajectory]), (0,))
