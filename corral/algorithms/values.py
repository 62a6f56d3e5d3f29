"""The critic's loss."""

import torch
from torch import Tensor

from corral.algorithms import ragged
from corral.algorithms.losses import TokenLoss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.5
) -> TokenLoss:
    """Clipped squared error per token (from OpenAI's baselines; see Engstrom et al., 2020, arXiv 2005.12729).

    `max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2`: a value that moved further than `clip` since the
    batch was played gets no gradient for moving further in that direction. None: no clipping.

    `sums`: `value`, `squared_error` and `clipped` (tokens where the clipped side was the larger). No `maxima`.
    """
    values, old_values, returns = (ragged.only(x, mask) for x in (values, old_values, returns))
    error = (values - returns).square()
    loss, clipped = error, torch.zeros_like(mask)
    if clip is not None:
        bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square()
        clipped = bounded > error
        loss = torch.where(clipped, bounded, error)
    sums = {
        "value": values.detach().sum(),
        "squared_error": error.detach().sum(),
        "clipped": clipped.sum().to(error.dtype),
    }
    return TokenLoss(loss / 2, sums, maxima={})
