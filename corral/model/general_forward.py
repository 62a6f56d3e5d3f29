"""The general path: any causal model of transformers, by its own forward pass over one sequence at a time.

Nothing is packed, padded or shared, so nothing can leak from one sequence into another: a hybrid layer's state, a
convolution or a position that depends on the length is what the model's authors wrote. It is slow and right, and the
fast path (`corral.model.attention`) is compared with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.data.batch import IntArray, TokenTree
from corral.kernels.host_to_device import on_device
from corral.model.attention import ATTENTION_NAME

SequenceForward = Callable[[Tensor], Tensor]
"""tokens [1, tokens] -> [tokens, width]"""


def is_general(model: Any) -> bool:
    """Whether the model was loaded for the general path, with an attention of transformers' own."""
    return bool(model.config._attn_implementation != ATTENTION_NAME)


Images = Mapping[int, bytes]
"""By their ids among the tokens."""
NO_IMAGES: Images = {}


def model_inputs(model: Any, tokens: Tensor, images: Images) -> dict[str, Tensor]:
    """What the model's forward pass gets for tokens [rows, tokens]."""
    vision = getattr(model, "vision", None)
    return {"input_ids": tokens} if vision is None else vision.model_inputs(tokens, images)


def sequence_logits(model: Any, tokens: Tensor, images: Images = NO_IMAGES) -> Tensor:
    """Logits [tokens, vocabulary] of one sequence [1, tokens]."""
    logits: Tensor = model(**model_inputs(model, tokens, images), use_cache=False).logits[0]
    return logits


def sequence_hidden(model: Any, tokens: Tensor, images: Images = NO_IMAGES) -> Tensor:
    """Last hidden states [tokens, width] of one sequence [1, tokens]."""
    hidden: Tensor = model.base_model(**model_inputs(model, tokens, images), use_cache=False).last_hidden_state[0]
    return hidden


@dataclass(frozen=True)
class SequenceRows:
    """A sequence of a tree, up to the last of its tokens at which something is wanted."""

    nodes: IntArray
    wanted: IntArray
    """Positions in `nodes`."""


def sequences_with_rows(tree: TokenTree, rows: IntArray) -> list[SequenceRows]:
    """The sequences that have to be computed for the nodes `rows`. A node that several sequences have is taken from the
    first of them: what comes before it is the same in all."""
    is_open = np.zeros(tree.num_nodes, np.bool_)
    is_open[rows] = True
    sequences = []
    for path in tree.paths:
        wanted = np.flatnonzero(is_open[path])
        if len(wanted):
            is_open[path] = False
            sequences.append(SequenceRows(path[: wanted[-1] + 1], wanted))
    return sequences


def rows_by_sequence(
    tree: TokenTree, sequences: list[SequenceRows], forward: SequenceForward, device: torch.device, num_calls: int
) -> Tensor:
    """What `forward` computes at the wanted nodes, in the order of the nodes, [rows, width]. Ranks that hold one model
    together call its forward pass equally often, `num_calls` times; the last calls are for nothing."""
    parts = [
        forward(torch.from_numpy(tree.tokens[sequence.nodes])[None].to(device))[on_device(sequence.wanted, device)]
        for sequence in sequences
    ]
    for _ in range(len(parts), num_calls):
        parts[0] = parts[0] + 0.0 * forward(torch.zeros(1, 2, dtype=torch.int64, device=device)).sum()
    order = np.argsort(np.concatenate([sequence.nodes[sequence.wanted] for sequence in sequences]))
    return torch.cat(parts)[on_device(order, device)]


def logprobs_of_logits(logits: Tensor, rows: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """-> (log-prob of target k at row `rows[k]` [targets], entropy of each row [rows])"""
    log_p = (logits.float() / temperature).log_softmax(-1)
    return log_p[rows, targets], -(log_p.exp() * log_p).sum(-1)
