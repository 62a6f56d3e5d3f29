"""From a loss per token to one number, normalized by counts of the whole update.

An update is split over micro-batches and trainers. Each part is divided by the counts of the *whole*, so the parts
add up to what one big batch would give, and so do their gradients. (Averaging per micro-batch and then over
micro-batches, as early verl and Search-R1 did, makes the gradient depend on the split.) A trainer whose framework
averages gradients over its peers has to multiply by their number; that is its business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from corral.algorithms import ragged
from corral.algorithms.declarations import AGGREGATIONS as AGGREGATIONS
from corral.algorithms.declarations import AggregationDeclaration, AlgorithmPart, NoOptions, aggregation, default_from

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GlobalCounts:
    """Counts of the whole update: all micro-batches, all trainers."""

    num_tokens: int
    """Generated tokens."""
    num_sequences: int
    """Sequences with at least one generated token."""

    def __add__(self, other: GlobalCounts) -> GlobalCounts:
        return GlobalCounts(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences)


def count(mask: Tensor, offsets: Tensor) -> GlobalCounts:
    """The counts of one part; add them up over all parts."""
    num_tokens = ragged.segment_count(mask, offsets)
    return GlobalCounts(int(num_tokens.sum()), int((num_tokens > 0).sum()))


def divisor(part: AlgorithmPart[AggregationDeclaration], counts: GlobalCounts) -> int:
    """The count of the whole update that the aggregation divides a sum by."""
    by = {"tokens": counts.num_tokens, "sequences": counts.num_sequences, None: 1}
    return max(by[part.declaration.divided_by], 1)


def aggregate(
    token_loss: Tensor,
    mask: Tensor,
    offsets: Tensor,
    part: AlgorithmPart[AggregationDeclaration],
    counts: GlobalCounts,
) -> Tensor:
    """The contribution of some of an update's sequences, each of them whole, to the loss of the update."""
    loss: Tensor = part.declaration.function(token_loss, mask, offsets, divisor(part, counts), part.options)
    return loss


@aggregation("seq_mean_token_sum", "sum over a trajectory's tokens, mean over trajectories", divided_by="sequences")
@aggregation("token_sum", "sum over all tokens of an update", divided_by=None)
@aggregation("token_mean", "mean over all tokens of an update", divided_by="tokens")
def token_sum(token_loss: Tensor, mask: Tensor, offsets: Tensor, divisor: int, options: NoOptions) -> Tensor:
    return ragged.only(token_loss, mask).sum() / divisor


@aggregation("seq_mean_token_mean", "mean over a trajectory's tokens, mean over trajectories", divided_by="sequences")
def seq_mean_token_mean(token_loss: Tensor, mask: Tensor, offsets: Tensor, divisor: int, options: NoOptions) -> Tensor:
    return ragged.segment_mean(token_loss, mask, offsets).sum() / divisor


@dataclass(frozen=True)
class NormOptions:
    norm: Annotated[float, Gt(0)] | None = default_from("rollout.max_response_tokens")
    """The constant by which the sum over a trajectory's tokens is divided."""


@aggregation(
    "seq_mean_token_sum_norm",
    "sum over a trajectory's tokens divided by a constant, mean over trajectories",
    options=NormOptions,
    divided_by="sequences",
)
def seq_mean_token_sum_norm(
    token_loss: Tensor, mask: Tensor, offsets: Tensor, divisor: int, options: NormOptions
) -> Tensor:
    if options.norm is None:
        raise ValueError("seq_mean_token_sum_norm needs its constant, norm (Dr. GRPO: the response budget)")
    return ragged.only(token_loss, mask).sum() / (divisor * options.norm)
