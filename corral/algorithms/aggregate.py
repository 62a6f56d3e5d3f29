"""From a loss per token to one number, normalised by counts of the whole update.

An update is split over micro-batches and trainers. Each part is divided by the counts of the *whole*, so the parts
add up to what one big batch would give, and so do their gradients. (Averaging per micro-batch and then over
micro-batches, as early verl and Search-R1 did, makes the gradient depend on the split.) A trainer whose framework
averages gradients over its peers has to multiply by their number; that is its business.
"""

from dataclasses import dataclass

from torch import Tensor

from corral.algorithms import ragged

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


@dataclass(frozen=True)
class GlobalCounts:
    """Of the whole update: all micro-batches, all trainers."""

    num_tokens: int
    """Generated ones."""
    num_sequences: int
    """With at least one generated token."""

    def __add__(self, other: "GlobalCounts") -> "GlobalCounts":
        return GlobalCounts(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences)


def count(mask: Tensor, offsets: Tensor) -> GlobalCounts:
    """The counts of one part; add them up over all parts."""
    num_tokens = ragged.segment_count(mask, offsets)
    return GlobalCounts(int(num_tokens.sum()), int((num_tokens > 0).sum()))


def aggregate(
    token_loss: Tensor, mask: Tensor, offsets: Tensor, mode: str, counts: GlobalCounts, norm: float | None = None
) -> Tensor:
    """One part's share of the loss. Parts consist of whole sequences.

    - `token_mean`: mean over the update's tokens (DAPO, Yu et al., 2025, arXiv 2503.14476).
    - `token_sum`: plain sum.
    - `seq_mean_token_sum`: sum over a sequence's tokens, mean over sequences.
    - `seq_mean_token_mean`: mean over a sequence's tokens, mean over sequences (GRPO's paper).
    - `seq_mean_token_sum_norm`: as `seq_mean_token_sum`, divided by the constant `norm` (Dr. GRPO, arXiv 2503.20783).
    """
    num_tokens, num_sequences = max(counts.num_tokens, 1), max(counts.num_sequences, 1)
    total = ragged.only(token_loss, mask).sum()
    match mode:
        case "token_mean":
            return total / num_tokens
        case "token_sum":
            return total
        case "seq_mean_token_sum":
            return total / num_sequences
        case "seq_mean_token_mean":
            return ragged.segment_mean(token_loss, mask, offsets).sum() / num_sequences
        case "seq_mean_token_sum_norm":
            if norm is None:
                raise ValueError("seq_mean_token_sum_norm needs its constant, norm (Dr. GRPO: the response budget)")
            return total / (num_sequences * norm)
    raise ValueError(f"`{mode}` is not an aggregation; choose one of {', '.join(AGGREGATIONS)}")
