"""Importance weights for tokens that another policy sampled than the one the loss takes as old.

The other policy is an engine with its own kernels and precision, or older weights. With x = log pi_train - log
pi_engine of a token (clamped to [-20, 20]), every bound here is on `pi_train / pi_engine = exp(x)`, never on its
inverse. A sequence's ratio is the product of its tokens', `exp(sum x)`. Dropped tokens have a loss of 0 and still count
in the aggregation, as in the papers, unless an option says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt

from corral.algorithms import ragged
from corral.algorithms.declarations import CORRECTIONS as CORRECTIONS
from corral.algorithms.declarations import AlgorithmPart, Declaration, NoOptions, correction
from corral.algorithms.ragged import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Correction:
    weights: Tensor
    """[T] To multiply the per-token loss with. No gradient; 0 on dropped tokens and on those not generated."""
    keep: Tensor
    """[T] bool, generated tokens that were not dropped."""
    counted: Tensor
    """[T] bool, generated tokens that the aggregation counts: the mask itself, where dropped ones count too."""
    metrics: dict[str, Tensor]
    """Over generated tokens: `ratio_mean`, `kl_k1` and `kl_k3` (of engine || train), `dropped_fraction`, and `ess`, the
    effective sample size of the weights as a fraction of the tokens: `(sum w)^2 / (n sum w^2)`."""


@dataclass(frozen=True)
class EngineRatios:
    """Ratios of the trainer's to the engine's probability, without gradient."""

    log_ratio: Tensor
    """[T] x, 0 on tokens that were not generated."""
    mask: Tensor
    offsets: Tensor

    @property
    def token(self) -> Tensor:
        return self.log_ratio.exp()

    @property
    def sequence(self) -> Tensor:
        """[T]: the ratio of the token's whole sequence."""
        sums = ragged.segment_sum(self.log_ratio, self.mask, self.offsets)
        return ragged.expand(sums.clamp(-20, 20).exp(), self.offsets)


def correction_weights(
    part: AlgorithmPart[Declaration], train_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, offsets: Tensor
) -> Correction:
    log_ratio = ragged.only((train_logprobs - engine_logprobs).detach(), mask).clamp(-20, 20)
    weights, keep = part.declaration.function(EngineRatios(log_ratio, mask, offsets), part.options)
    weights = ragged.only(weights, keep)
    leaves = isinstance(part.options, RejectionOptions) and not part.options.count_dropped
    return Correction(weights, keep, keep if leaves else mask, _metrics(log_ratio, weights, keep, mask))


@dataclass(frozen=True)
class CapOptions:
    cap: Annotated[float, Gt(0)] = 2.0
    """Upper bound of the weight."""


@dataclass(frozen=True)
class IcepopOptions:
    floor: Annotated[float, Gt(0)] = 0.5
    """Ratios of the trainer's to the engine's probability below this are dropped."""
    cap: Annotated[float, Gt(0)] = 5.0
    """Ratios of the trainer's to the engine's probability above this are dropped."""

    def __post_init__(self) -> None:
        if self.floor >= self.cap:
            raise ValueError(
                f"the floor {self.floor:g} is not below the cap {self.cap:g}: every token would be dropped"
            )


@dataclass(frozen=True)
class RejectionOptions(IcepopOptions):
    cap: Annotated[float, Gt(0)] = 2.0
    level: Literal["token", "sequence"] = "token"
    """Whether single tokens are dropped for their ratio, or whole sequences for theirs."""
    count_dropped: bool = True
    """Whether dropped tokens still count in what the loss is divided by. False: they leave the loss with all of its
    terms, as in verl; a sequence stays one where sequences are counted."""


@correction("none", "no correction")
def none(ratios: EngineRatios, options: NoOptions) -> tuple[Tensor, Tensor]:
    """Weight 1, for the metrics alone."""
    return torch.ones_like(ratios.log_ratio), ratios.mask


@correction(
    "token_tis", "each token weighs its ratio of trainer's to engine's probability, at most `cap`", options=CapOptions
)
def token_tis(ratios: EngineRatios, options: CapOptions) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling (Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training")."""
    return ratios.token.clamp(max=options.cap), ratios.mask


@correction(
    "sequence_tis",
    "each trajectory weighs its ratio of trainer's to engine's probability, at most `cap`",
    options=CapOptions,
)
def sequence_tis(ratios: EngineRatios, options: CapOptions) -> tuple[Tensor, Tensor]:
    return ratios.sequence.clamp(max=options.cap), ratios.mask


@correction(
    "icepop",
    "each token weighs its ratio of trainer's to engine's probability, and is dropped outside [`floor`, `cap`]",
    options=IcepopOptions,
)
def icepop(ratios: EngineRatios, options: IcepopOptions) -> tuple[Tensor, Tensor]:
    """IcePop (Ling Team, 2025, arXiv 2510.18855)."""
    return ratios.token, _within(ratios.token, ratios.mask, options)


@correction(
    "rejection",
    "what has a ratio of trainer's to engine's probability outside [`floor`, `cap`] is dropped",
    options=RejectionOptions,
)
def rejection(ratios: EngineRatios, options: RejectionOptions) -> tuple[Tensor, Tensor]:
    judged = ratios.sequence if options.level == "sequence" else ratios.token
    return torch.ones_like(judged), _within(judged, ratios.mask, options)


def _within(judged: Tensor, mask: Tensor, options: IcepopOptions) -> Tensor:
    return mask & (judged >= options.floor) & (judged <= options.cap)


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
