"""Losses per token, to be minimized: the policy's, regularizers, the critic's, the KL to a reference; and `aggregate`,
which makes one number of them.

In policy losses x = log pi - log pi_old of a token (clamped to [-20, 20]), rho = exp(x), and sg[] is "no gradient
through this". Losses of whole sequences (gspo, gmpo) are written per token such that `seq_mean_token_mean` gives the
paper's loss and gradient, and declare that they need this aggregation; so are those of pairs (`pair_losses.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from corral.algorithms import ragged
from corral.algorithms.declarations import AGGREGATIONS as AGGREGATIONS
from corral.algorithms.declarations import KL_CONTROLLERS as KL_CONTROLLERS
from corral.algorithms.declarations import KL_ESTIMATORS as KL_ESTIMATORS
from corral.algorithms.declarations import LOSSES as LOSSES
from corral.algorithms.declarations import (
    AggregationDeclaration,
    AlgorithmPart,
    Declaration,
    LossDeclaration,
    NoOptions,
    aggregation,
    default_from,
    kl_controller,
    kl_estimator,
    policy_loss,
)
from corral.algorithms.ragged import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy loss is computed of. All of it is 0 on tokens that were not generated."""

    logprobs: Tensor
    """[T] Of the policy being trained, with gradient."""
    old_logprobs: Tensor
    """[T] Of the policy the ratio is taken against."""
    advantages: Tensor
    """[T]"""
    mask: Tensor
    """[T] bool, generated tokens."""
    offsets: Tensor
    """[N + 1]"""
    reference_logprobs: Tensor | None = None
    """[T] Of the reference model. None unless the loss needs them."""
    pairs: Tensor | None = None
    """[N] int, counted from 0: the two answers of a pair have the same number. None unless pairs are trained on."""
    is_chosen: Tensor | None = None
    """[N] bool, which answer of its pair is the chosen one. None unless pairs are trained on."""

    @property
    def log_ratio(self) -> Tensor:
        """[T] x: how much more likely a token is than it was under the old policy."""
        return (self.logprobs - self.old_logprobs).clamp(-20, 20)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[T] -> [T]: every token gets the mean over its sequence's generated tokens."""
        return ragged.expand(ragged.segment_mean(values, self.mask, self.offsets), self.offsets)

    @property
    def reference_log_ratio(self) -> Tensor:
        """[T]: how much more likely a token is than under the reference, as a difference of log-probs."""
        if self.reference_logprobs is None:
            raise ValueError("this loss needs a reference's log-probs; declare it with needs_reference=True")
        return self.logprobs - self.reference_logprobs

    def margin(self, of_sequences: Tensor) -> Tensor:
        """[N] -> [N]: the value of a pair's chosen answer minus that of the other one; both get it."""
        if self.pairs is None or self.is_chosen is None:
            raise ValueError("this loss compares the answers of a pair; declare it with trains_on_pairs=True")
        signed = torch.where(self.is_chosen, of_sequences, -of_sequences)
        return torch.zeros_like(signed).index_add(0, self.pairs, signed)[self.pairs]


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, and scalars to report.

    `sums` are over generated tokens and add up over micro-batches and trainers; divide by the number of tokens in the
    end. `maxima` combine with max. Both without gradient.
    """

    loss: Tensor
    """[T], 0 on tokens that were not generated."""
    sums: dict[str, Tensor]
    """`ratio` (the one the loss uses), `clipped` (tokens whose gradient a bound changed), `approx_kl` (to old, k3)."""
    maxima: dict[str, Tensor]
    """`ratio_deviation`: |ratio - 1|."""
    pair_sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over pairs, where pairs are trained on; divide by the number of pairs in the end."""
    implicit_rewards: Tensor | None = None
    """[N], of each answer of the pairs; without gradient."""


def policy_token_loss(part: AlgorithmPart[LossDeclaration], terms: PolicyTerms) -> TokenLoss:
    """The loss that a recipe chose. One that returns a tensor alone is reported with the plain ratio."""
    terms = replace(
        terms,
        logprobs=ragged.only(terms.logprobs, terms.mask),
        old_logprobs=ragged.only(terms.old_logprobs, terms.mask),
        advantages=ragged.only(terms.advantages, terms.mask),
        reference_logprobs=None
        if terms.reference_logprobs is None or not part.declaration.needs_reference
        else ragged.only(terms.reference_logprobs, terms.mask),
    )
    found = part.declaration.function(terms, part.options)
    if (loss := ragged.shape_of(found.loss if isinstance(found, TokenLoss) else found)) != ragged.shape_of(terms.mask):
        raise TypeError(
            f"{part.name} returned {loss}; a loss is a tensor of one number for each token, shaped like `terms.mask`: "
            "`algorithm.aggregation` makes one number of them, so leave out .mean() and .sum()"
        )
    if isinstance(found, TokenLoss):
        return found
    if part.declaration.trains_on_rows:  # nobody sampled them, so there is no ratio
        return TokenLoss(ragged.only(found, terms.mask), {}, maxima={})
    return _report(ragged.only(found, terms.mask), terms.log_ratio.exp(), torch.zeros_like(terms.mask), terms)


@dataclass(frozen=True)
class ClipOptions:
    clip_low: Annotated[float, Ge(0)] = 0.2
    """How far below 1 the ratio of new to old probability counts."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """How far above 1 the ratio of new to old probability counts. More than `clip_low` is DAPO's clip-higher."""


@dataclass(frozen=True)
class PpoOptions(ClipOptions):
    dual_clip: Annotated[float, Gt(1)] | None = None
    """Upper bound of the ratio where the advantage is negative. None: no bound."""


@dataclass(frozen=True)
class GspoOptions(ClipOptions):
    """A ratio of whole sequences moves far less than one of tokens."""

    clip_low: Annotated[float, Ge(0)] = 3e-4
    clip_high: Annotated[float, Ge(0)] = 4e-4


@dataclass(frozen=True)
class CispoOptions(ClipOptions):
    """The paper leaves the lower side open: 1 - 1 = 0."""

    clip_low: Annotated[float, Ge(0)] = 1.0


@dataclass(frozen=True)
class GmpoOptions:
    clip_low: Annotated[float, Ge(0)] = 0.4
    """How far below 0 the logarithm of the ratio counts where the advantage is negative."""
    clip_high: Annotated[float, Ge(0)] = 0.4
    """How far above 0 the logarithm of the ratio counts where the advantage is positive."""


@dataclass(frozen=True)
class SapoOptions:
    tau_positive: Annotated[float, Gt(0)] = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_negative: Annotated[float, Gt(0)] = 1.05
    """Steepness of the gate where the advantage is not positive."""


@dataclass(frozen=True)
class DroOptions:
    beta: Annotated[float, Gt(0)] = 0.05
    """Weight of the quadratic penalty on leaving the old policy."""


@dataclass(frozen=True)
class DppoTvOptions:
    threshold: Annotated[float, Gt(0)] = 0.15
    """Divergence beyond which a token is dropped."""
    cap: Annotated[float, Gt(0)] = 20.0
    """Upper bound of the ratio that weighs a token."""


@dataclass(frozen=True)
class DppoKlOptions(DppoTvOptions):
    threshold: Annotated[float, Gt(0)] = 0.05


@policy_loss(
    "ppo",
    "clipped ratio of the new to the old probability, token by token",
    options=PpoOptions,
    skips_zero_advantage=True,
)
def ppo(terms: PolicyTerms, options: PpoOptions) -> TokenLoss:
    """PPO (Schulman et al., 2017, arXiv 1707.06347) with a dual clip (Ye et al., 2019, arXiv 1912.09729).

    `max(-A rho, -A clip(rho, 1 - low, 1 + high))`, and at most `-A * dual_clip` where A is negative, since there the
    first term has no bound. Different bounds on the two sides: DAPO's clip-higher (arXiv 2503.14476).
    """
    ratio = terms.log_ratio.exp()
    loss, clipped = _clipped_objective(ratio, terms.advantages, options)
    if options.dual_clip is not None:
        bound = -terms.advantages * options.dual_clip
        beyond = (terms.advantages < 0) & (loss > bound)
        loss, clipped = torch.where(beyond, bound, loss), clipped | beyond
    return _report(loss, ratio, clipped, terms)


@policy_loss(
    "gspo",
    "clipped ratio of the new to the old probability, of whole sequences",
    options=GspoOptions,
    aggregation="seq_mean_token_mean",
    skips_zero_advantage=True,
)
def gspo(terms: PolicyTerms, options: GspoOptions) -> TokenLoss:
    """GSPO (Zheng et al., 2025, arXiv 2507.18071): PPO with the sequence's ratio, `s = exp(mean x)`.

    Per token it is `sg[s] * pi / sg[pi]` (the paper's GSPO-token): the same value on all tokens of a sequence, the
    same gradient in their mean. Bounds are of a different size than PPO's; the paper has 3e-4 and 4e-4.
    """
    sequence = terms.sequence_mean(terms.log_ratio.detach())
    ratio = (sequence + (terms.logprobs - terms.logprobs.detach())).clamp(max=10).exp()
    loss, clipped = _clipped_objective(ratio, terms.advantages, options)
    return _report(loss, ratio, clipped, terms)


@policy_loss(
    "cispo",
    "log-probability weighted with the clipped ratio; no token loses its gradient",
    options=CispoOptions,
    skips_zero_advantage=True,
)
def cispo(terms: PolicyTerms, options: CispoOptions) -> TokenLoss:
    """CISPO (MiniMax-M1, 2025, arXiv 2506.13585): `-sg[clip(rho, 1 - low, 1 + high)] A log pi`.

    The weight is clipped, so no token loses its gradient. The paper leaves the lower side open: `clip_low = 1`.
    """
    ratio = terms.log_ratio.detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return _report(-weight * terms.advantages * terms.logprobs, ratio, weight != ratio, terms)


@policy_loss(
    "sapo",
    "a soft gate on the ratio in place of a clip",
    options=SapoOptions,
    aggregation="seq_mean_token_mean",
    skips_zero_advantage=True,
)
def sapo(terms: PolicyTerms, options: SapoOptions) -> TokenLoss:
    """SAPO (Gao et al., 2025, arXiv 2511.20347): `-(4 / tau) sigmoid(tau (rho - 1)) A`.

    A soft gate in place of a clip; tau is larger (the gate closes sooner) where the advantage is not positive.
    """
    ratio = terms.log_ratio.exp()
    tau = torch.full_like(ratio, options.tau_negative)
    tau = tau.masked_fill(terms.advantages > 0, options.tau_positive)
    gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
    return _report(-gate * terms.advantages, ratio, torch.zeros_like(terms.mask), terms)


@policy_loss(
    "gmpo",
    "geometric mean of a sequence's clipped ratios",
    options=GmpoOptions,
    aggregation="seq_mean_token_mean",
    skips_zero_advantage=True,
)
def gmpo(terms: PolicyTerms, options: GmpoOptions) -> TokenLoss:
    """GMPO (Zhao et al., 2025, arXiv 2507.20673): `-A s` per sequence, s the geometric mean of one-sidedly clipped rho.

    Log-ratios are clipped to at most `clip_high` where A is positive and to at least `-clip_low` where it is negative.
    A is the sequence's mean advantage. Per token it is `sg[s] * r / sg[r]`, r being the clipped ratio, which
    `seq_mean_token_mean` normalizes over the whole update (others average within the micro-batch).
    """
    log_ratio = terms.log_ratio
    advantages = terms.sequence_mean(terms.advantages)
    bounded = torch.where(
        advantages < 0, log_ratio.clamp(min=-options.clip_low), log_ratio.clamp(max=options.clip_high)
    )
    sequence = terms.sequence_mean(bounded.detach())
    ratio = (sequence + (bounded - bounded.detach())).exp()
    return _report(ragged.only(-advantages * ratio, terms.mask), ratio, bounded != log_ratio, terms)


@policy_loss(
    "gpg", "log-probability weighted with the advantage; no ratio", uses_old_policy=False, skips_zero_advantage=True
)
def gpg(terms: PolicyTerms, options: NoOptions) -> Tensor:
    """GPG (Chu et al., 2025, arXiv 2504.02546), and plain REINFORCE: `-A log pi`."""
    return -terms.advantages * terms.logprobs


@policy_loss("nll", "negative log-probability of the rows' own answers", uses_old_policy=False, trains_on_rows=True)
def nll(terms: PolicyTerms, options: NoOptions) -> TokenLoss:
    """Supervised fine-tuning: `-log pi` of every trained token. `sums`: `nll`, the same. No `maxima`."""
    loss = -terms.logprobs
    return TokenLoss(loss, {"nll": loss.detach().sum()}, maxima={})


@policy_loss(
    "dro",
    "log-probability weighted with the advantage, and a quadratic penalty on leaving the old policy",
    options=DroOptions,
)
def dro(terms: PolicyTerms, options: DroOptions) -> Tensor:
    """DRO (Richemond et al., 2024, arXiv 2405.19107): `-(A log pi - beta / 2 x^2)`.

    Here x is not clamped: the further away, the harder it should pull.
    """
    distance = (terms.logprobs - terms.old_logprobs).square()
    return options.beta / 2 * distance - terms.advantages * terms.logprobs


@policy_loss(
    "dppo_tv",
    "ratio, dropping tokens whose probability moved too far (total variation)",
    options=DppoTvOptions,
    skips_zero_advantage=True,
)
def dppo_tv(terms: PolicyTerms, options: DppoTvOptions) -> TokenLoss:
    """DPPO (Qi et al., 2026, arXiv 2602.04879) with total variation of "this token or another": `|p - p_old|`.

    `-A sg[min(rho, cap)] log pi`, dropped where the advantage pushes a token further away whose divergence exceeds the
    threshold. A ratio overstates what happens to rare tokens and understates it for frequent ones.
    """
    divergence = (terms.logprobs.detach().exp() - terms.old_logprobs.exp()).abs()
    return _dppo(terms, options, divergence)


@policy_loss(
    "dppo_kl",
    "ratio, dropping tokens whose probability moved too far (KL)",
    options=DppoKlOptions,
    skips_zero_advantage=True,
)
def dppo_kl(terms: PolicyTerms, options: DppoKlOptions) -> TokenLoss:
    """DPPO (as `dppo_tv`) with the KL divergence, old to new, of "this token or another"."""
    new, old = terms.logprobs.detach(), terms.old_logprobs
    rest_new, rest_old = ((-torch.expm1(logprob)).clamp(min=1e-8) for logprob in (new, old))
    divergence = old.exp() * (old - new) + rest_old * (rest_old / rest_new).log()
    return _dppo(terms, options, divergence)


def _clipped_objective(ratio: Tensor, advantages: Tensor, options: ClipOptions) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic choice, and where it chose the clipped side."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    clipped = bounded > free
    return torch.where(clipped, bounded, free), clipped


def _dppo(terms: PolicyTerms, options: DppoTvOptions, divergence: Tensor) -> TokenLoss:
    log_ratio = terms.log_ratio.detach()
    outward = terms.advantages * log_ratio > 0
    dropped = outward & (divergence > options.threshold)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=options.cap).masked_fill(dropped, 0)
    return _report(-terms.advantages * weight * terms.logprobs, ratio, weight != ratio, terms)


def _report(loss: Tensor, ratio: Tensor, clipped: Tensor, terms: PolicyTerms) -> TokenLoss:
    log_ratio, ratio = terms.log_ratio.detach(), ragged.only(ratio.detach(), terms.mask)
    approx_kl = log_ratio.exp() - 1 - log_ratio
    deviation = ragged.only((ratio - 1).abs(), terms.mask)
    return TokenLoss(
        loss=loss,
        sums={
            "ratio": ratio.sum(),
            "clipped": (clipped & terms.mask).sum().to(ratio.dtype),
            "approx_kl": ragged.only(approx_kl, terms.mask).sum(),
        },
        maxima={"ratio_deviation": deviation.max() if len(deviation) else ratio.sum()},
    )


# --- regularizers


def llds(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[T]: penalty on good trajectories becoming less likely (lazy likelihood displacement suppression).

    Deng et al., 2025, "On GRPO Collapse in Search-R1: The Lazy Likelihood-Displacement Death Spiral", arXiv 2512.04220.
    For trajectories with an advantage of at least 0, turn by turn: if the turn as a whole became less likely than it
    was under the old policy, `max(0, log pi_old - log pi)` on each of its tokens, else nothing. On the first update
    after sampling nothing has moved yet, and it is 0. The paper weights it with 0.2.

    To normalize as the paper does (by the trajectory's tokens and the number of trajectories with an advantage of at
    least 0), aggregate with `seq_mean_token_mean` and let `num_sequences` be `num_preserved`'s sum over the update.
    """
    fall = ragged.only(old_logprobs, mask) - ragged.only(logprobs, mask)
    turns = ragged.turn_ids(mask, offsets)[mask]
    turn_falls = fall.new_zeros(len(mask)).index_add(0, turns, fall.detach()[mask])
    fell = mask.clone()
    fell[mask] = turn_falls[turns] > 0
    preserved = ragged.expand(_preserved(advantages, mask, offsets), offsets)
    return ragged.only(fall.clamp(min=0), fell & preserved)


def num_preserved(advantages: Tensor, mask: Tensor, offsets: Tensor) -> int:
    """How many trajectories `llds` looks after."""
    return int(_preserved(advantages, mask, offsets).sum())


def _preserved(advantages: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """[N]: generated something, with a mean advantage of at least 0."""
    has_tokens = ragged.segment_count(mask, offsets) > 0
    return has_tokens & (ragged.segment_sum(advantages, mask, offsets) >= 0)


# --- the critic


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.5
) -> TokenLoss:
    """Clipped squared error per token (from OpenAI's baselines; see Engstrom et al., 2020, arXiv 2005.12729).

    `max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2`: a value that moved further than `clip` since the
    batch was sampled gets no gradient for moving further in that direction. None: no clipping.

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


# --- KL divergence to a reference policy, estimated on sampled tokens
#
# Estimators (Schulman, 2020, joschu.net/blog/kl-approx.html) are functions of x = log pi - log ref of a token. Tokens
# that were not generated are the aggregation's business, as with every per-token loss.


def kl_penalty(part: AlgorithmPart[Declaration], logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference)."""
    penalty: Tensor = part.declaration.function(logprobs - reference_logprobs)
    return penalty


@kl_estimator("k1", "x: unbiased, high variance, negative half of the time; its own gradient is 0 on average")
def k1(x: Tensor) -> Tensor:
    return x


@kl_estimator("k2", "x^2 / 2: biased a little; its gradient is that of the KL")
def k2(x: Tensor) -> Tensor:
    return x.square() / 2


@kl_estimator("k3", "exp(-x) + x - 1: unbiased, never negative; its gradient is that of the KL in the other direction")
def k3(x: Tensor) -> Tensor:
    """x is clamped to [-20, 20] and the result to at most 10."""
    x = x.clamp(-20, 20)
    return ((-x).exp() + x - 1).clamp(max=10)


@kl_estimator("abs", "|x|")
def absolute(x: Tensor) -> Tensor:
    return x.abs()


@kl_estimator("k1+", "the value of k1 with the gradient of k2")
def k1_plus(x: Tensor) -> Tensor:
    return x.detach() + _only_gradient(k2(x))


@kl_estimator("k3+", "the value of k3 with the gradient of k2")
def k3_plus(x: Tensor) -> Tensor:
    return k3(x).detach() + _only_gradient(k2(x))


def _only_gradient(values: Tensor) -> Tensor:
    """0, with the gradient of `values`."""
    return values - values.detach()


# --- the coefficient that the KL is weighted with


@kl_controller("fixed", "the coefficient stays as it is")
class KLController:
    """The coefficient of the recipe, always; it has no state, so a resumed run follows its recipe."""

    def __init__(self, coefficient: float, options: Any) -> None:
        self.coefficient = coefficient
        self.options = options

    def update(self, kl: float, num_sequences: int) -> None:
        """Chooses the next coefficient, from the KL of a step."""

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        pass


@dataclass(frozen=True)
class AdaptiveKLOptions:
    target: Annotated[float, Gt(0)] = 0.1
    """KL towards which the coefficient steers."""
    horizon: Annotated[int, Ge(1)] = 10_000
    """Trajectories over which the coefficient follows; fewer steer faster."""


@kl_controller(
    "adaptive",
    "the coefficient grows while the KL is above `target` and shrinks while it is below",
    options=AdaptiveKLOptions,
)
class AdaptiveKL(KLController):
    """Steers the KL towards a target (Ziegler et al., 2019, arXiv 1909.08593).

    `coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon`, where `kl` is the mean over
    sequences of their token mean (`seq_mean_token_mean`) and `horizon` counts sequences. A step of more sequences than
    the horizon counts as the horizon: beyond five times that, the coefficient would change its sign.
    """

    options: AdaptiveKLOptions

    def update(self, kl: float, num_sequences: int) -> None:
        if not math.isfinite(kl):
            raise ValueError(f"the KL divergence to the reference is {kl}; the coefficient cannot follow it")
        error = min(max(kl / self.options.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * min(num_sequences / self.options.horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


# --- from a loss per token to one number, normalized by counts of the whole update
#
# An update is split over micro-batches and trainers. Each part is divided by the counts of the *whole*, so the parts
# add up to what one big batch would give, and so do their gradients. (Averaging per micro-batch and then over
# micro-batches, as early verl and Search-R1 did, makes the gradient depend on the split.) A trainer whose framework
# averages gradients over its peers has to multiply by their number; that is its business.


@dataclass(frozen=True)
class GlobalCounts:
    """Counts of the whole update: all micro-batches, all trainers."""

    num_tokens: int
    """Generated tokens."""
    num_sequences: int
    """Sequences with at least one generated token."""


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
