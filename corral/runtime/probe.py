"""Log-probs of a few tokens under the weights that an engine decodes with: what a probe compares."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from corral.data.tree import TokenTree
from corral.model.attention import TreeAttention, forward_hidden
from corral.model.logprobs import head_logprobs


@torch.inference_mode()
def engine_logprobs(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Returns those of all tokens behind the first."""
    head = model.get_output_embeddings()
    device = head.weight.device
    tree = TokenTree.build([np.array(tokens[:-1], np.int64)])
    hidden = forward_hidden(
        model,
        torch.from_numpy(tree.tokens).to(device),
        torch.from_numpy(tree.positions).to(device),
        TreeAttention(tree, device),
    )
    rows = torch.arange(len(hidden), device=device)
    targets = torch.tensor(tokens[1:], device=device)
    bias = getattr(head, "bias", None)
    logprobs, _ = head_logprobs(hidden, head.weight, bias, rows, targets, temperature=temperature, chunk=64)
    return logprobs.tolist()
