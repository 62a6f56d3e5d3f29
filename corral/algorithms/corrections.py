"""Importance weights for tokens that another policy sampled than the one the loss takes as old.

The other policy is an engine with its own kernels and precision, or older weights. With x = log pi_train - log
pi_engine of a token (clamped to [-20, 20]), every bound here is on `pi_train / pi_engine = exp(x)`, never on its
inverse. A sequence's ratio is the product of its tokens', `exp(sum x)`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from corral.algorithms import ragged

DEFAULT_BOUNDS: dict[str, tuple[float, float]] = {
    "none": (0.0, torch.inf),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "rejection": (0.5, 2.0),
}
"""Floor and cap where none are given; TIS has no floor."""


@dataclass(frozen=True)
class Correction:
    weights: Tensor
    """[T] To multiply the per-token loss with. No gradient; 0 on dropped tokens and on those not generated."""
    keep: Tensor
    """[T] bool, generated tokens that were not dropped."""
    metrics: dict[str, Tensor]
    """Over generated tokens: `ratio_mean`, `kl_k1` and `kl_k3` (of engine || train), `dropped_fraction`, and `ess`, the
    effective sample size of the weights as a fraction of the tokens: `(sum w)^2 / (n sum w^2)`."""


def correction_weights(
    train_logprobs: Tensor,
    engine_logprobs: Tensor,
    mask: Tensor,
    offsets: Tensor,
    name: str,
    cap: float | None = None,
    floor: float | None = None,
    level: str | None = None,
) -> Correction:
    """Weights for a batch, by name; None for a bound takes `DEFAULT_BOUNDS`.

    - `none`: weight 1, for the metrics alone.
    - `token_tis`: `min(ratio, cap)` per token; `sequence_tis`: the same with the sequence's ratio on all its tokens
      (truncated importance sampling, Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
      Training").
    - `icepop`: the token's ratio where `floor <= ratio <= cap`, else dropped (Ling Team, 2025, arXiv 2510.18855).
    - `rejection`: weight 1 where `floor <= ratio <= cap`, else dropped; `level` says whose ratio, the `token`'s (the
      default) or the `sequence`'s, which drops whole sequences.

    Dropped tokens have a loss of 0 and still count in the aggregation, as in the papers.
    """
    if name not in DEFAULT_BOUNDS:
        raise ValueError(f"`{name}` is not a correction; choose one of {', '.join(DEFAULT_BOUNDS)}")
    if level not in (None, "token", "sequence"):
        raise ValueError(f"`{level}` is not a level of rejection; choose token or sequence")
    default_floor, default_cap = DEFAULT_BOUNDS[name]
    floor, cap = default_floor if floor is None else floor, default_cap if cap is None else cap

    log_ratio = ragged.only((train_logprobs - engine_logprobs).detach(), mask).clamp(-20, 20)
    ratio = log_ratio.exp()
    keep = mask
    match name:
        case "none":
            weights = torch.ones_like(ratio)
        case "token_tis":
            weights = ratio.clamp(max=cap)
        case "sequence_tis":
            weights = _sequence_ratio(log_ratio, mask, offsets).clamp(max=cap)
        case "icepop":
            weights, keep = ratio, mask & (ratio >= floor) & (ratio <= cap)
        case "rejection":
            judged = _sequence_ratio(log_ratio, mask, offsets) if level == "sequence" else ratio
            weights, keep = torch.ones_like(ratio), mask & (judged >= floor) & (judged <= cap)
    weights = ragged.only(weights, keep)
    return Correction(weights, keep, _metrics(log_ratio, weights, keep, mask))


def _sequence_ratio(log_ratio: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[T]: the ratio of the token's whole sequence."""
    return ragged.expand(ragged.segment_sum(log_ratio, mask, offsets).clamp(-20, 20).exp(), offsets)


def _metrics(log_ratio: Tensor, weights: Tensor, keep: Tensor, mask: Tensor) -> dict[str, Tensor]:
    num_tokens = mask.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return ragged.only(values, mask).sum() / num_tokens

    second_moment = mean(weights.square())
    return {
        "ratio_mean": mean(log_ratio.exp()),
        "kl_k1": mean(-log_ratio),
        "kl_k3": mean(log_ratio.exp() - 1 - log_ratio),
        "ess": torch.where(second_moment > 0, mean(weights).square() / second_moment, 0.0),
        "dropped_fraction": (mask & ~keep).sum() / num_tokens,
    }
