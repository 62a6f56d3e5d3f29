"""Policy losses, per token and to be minimised; `aggregate` makes one number of them.

With x = log pi - log pi_old of a token (clamped to [-20, 20]), rho = exp(x), and sg[] for "no gradient through this".
Losses of whole sequences (gspo, gmpo) are written per token such that `seq_mean_token_mean` gives the paper's loss and
gradient; `FORCED_AGGREGATION` says which losses insist on an aggregation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from corral.algorithms import ragged


@dataclass(frozen=True)
class PolicyTerms:
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


@dataclass(frozen=True)
class LossOptions:
    clip_low: float = 0.2
    """How far the ratio may fall below 1 (ppo, gspo, cispo); in gmpo, the log-ratio below 0."""
    clip_high: float = 0.2
    """How far it may rise above."""
    dual_clip: float | None = 3.0
    """ppo: bound of the ratio where the advantage is negative. None: no bound."""
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    dro_beta: float = 0.05
    dppo_threshold: float | None = None
    """Divergence at which a token is dropped. None: the paper's, 0.15 for dppo_tv and 0.05 for dppo_kl."""
    dppo_cap: float = 20.0
    """Upper bound of the importance weight in dppo."""


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


def ppo(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """PPO (Schulman et al., 2017, arXiv 1707.06347) with a dual clip (Ye et al., 2019, arXiv 1912.09729).

    `max(-A rho, -A clip(rho, 1 - low, 1 + high))`, and at most `-A * dual_clip` where A is negative, since there the
    first term has no bound. Different bounds on the two sides: DAPO's clip-higher (arXiv 2503.14476).
    """
    terms = _generated(terms)
    ratio = _log_ratio(terms).exp()
    loss, clipped = _clipped_objective(ratio, terms.advantages, options)
    if options.dual_clip is not None:
        bound = -terms.advantages * options.dual_clip
        beyond = (terms.advantages < 0) & (loss > bound)
        loss, clipped = torch.where(beyond, bound, loss), clipped | beyond
    return _report(loss, ratio, clipped, terms)


def gspo(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """GSPO (Zheng et al., 2025, arXiv 2507.18071): PPO with the sequence's ratio, `s = exp(mean x)`.

    Per token it is `sg[s] * pi / sg[pi]` (the paper's GSPO-token): the same value on all tokens of a sequence, the
    same gradient in their mean. Bounds are of a different size than PPO's; the paper has 3e-4 and 4e-4.
    """
    terms = _generated(terms)
    sequence = _per_token_mean(_log_ratio(terms).detach(), terms)
    ratio = (sequence + (terms.logprobs - terms.logprobs.detach())).clamp(max=10).exp()
    loss, clipped = _clipped_objective(ratio, terms.advantages, options)
    return _report(loss, ratio, clipped, terms)


def cispo(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """CISPO (MiniMax-M1, 2025, arXiv 2506.13585): `-sg[clip(rho, 1 - low, 1 + high)] A log pi`.

    The weight is clipped, so no token loses its gradient. The paper leaves the lower side open: `clip_low = 1`.
    """
    terms = _generated(terms)
    ratio = _log_ratio(terms).detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return _report(-weight * terms.advantages * terms.logprobs, ratio, weight != ratio, terms)


def sapo(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """SAPO (Gao et al., 2025, arXiv 2511.20347): `-(4 / tau) sigmoid(tau (rho - 1)) A`.

    A soft gate in place of a clip; tau is larger (the gate closes sooner) where the advantage is not positive.
    """
    terms = _generated(terms)
    ratio = _log_ratio(terms).exp()
    tau = torch.full_like(ratio, options.sapo_tau_negative)
    tau = tau.masked_fill(terms.advantages > 0, options.sapo_tau_positive)
    gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
    return _report(-gate * terms.advantages, ratio, torch.zeros_like(terms.mask), terms)


def gmpo(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """GMPO (Zhao et al., 2025, arXiv 2507.20673): `-A s` per sequence, s the geometric mean of one-sidedly clipped rho.

    Log-ratios are clipped to at most `clip_high` where A is positive and to at least `-clip_low` where it is negative.
    A is the sequence's mean advantage. Per token it is `sg[s] * r / sg[r]`, r being the clipped ratio, which
    `seq_mean_token_mean` normalises over the whole update (others average within the micro-batch).
    """
    terms = _generated(terms)
    log_ratio = _log_ratio(terms)
    advantages = _per_token_mean(terms.advantages, terms)
    bounded = torch.where(
        advantages < 0, log_ratio.clamp(min=-options.clip_low), log_ratio.clamp(max=options.clip_high)
    )
    sequence = _per_token_mean(bounded.detach(), terms)
    ratio = (sequence + (bounded - bounded.detach())).exp()
    return _report(ragged.only(-advantages * ratio, terms.mask), ratio, bounded != log_ratio, terms)


def gpg(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """GPG (Chu et al., 2025, arXiv 2504.02546), and plain REINFORCE: `-A log pi`."""
    terms = _generated(terms)
    loss = -terms.advantages * terms.logprobs
    return _report(loss, _log_ratio(terms).exp(), torch.zeros_like(terms.mask), terms)


def dro(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """DRO (Richemond et al., 2024, arXiv 2405.19107): `-(A log pi - beta / 2 x^2)`.

    Here x is not clamped: the further away, the harder it should pull.
    """
    terms = _generated(terms)
    distance = (terms.logprobs - terms.old_logprobs).square()
    loss = options.dro_beta / 2 * distance - terms.advantages * terms.logprobs
    return _report(loss, _log_ratio(terms).exp(), torch.zeros_like(terms.mask), terms)


def dppo_tv(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """DPPO (Qi et al., 2026, arXiv 2602.04879) with total variation of "this token or another": `|p - p_old|`.

    `-A sg[min(rho, cap)] log pi`, dropped where the advantage pushes a token further away whose divergence exceeds the
    threshold. A ratio overstates what happens to rare tokens and understates it for frequent ones.
    """
    terms = _generated(terms)
    divergence = (terms.logprobs.detach().exp() - terms.old_logprobs.exp()).abs()
    return _dppo(terms, options, divergence, default_threshold=0.15)


def dppo_kl(terms: PolicyTerms, options: LossOptions) -> TokenLoss:
    """DPPO (as `dppo_tv`) with the KL divergence, old to new, of "this token or another"."""
    terms = _generated(terms)
    new, old = terms.logprobs.detach(), terms.old_logprobs
    rest_new, rest_old = ((-torch.expm1(logprob)).clamp(min=1e-8) for logprob in (new, old))
    divergence = old.exp() * (old - new) + rest_old * (rest_old / rest_new).log()
    return _dppo(terms, options, divergence, default_threshold=0.05)


LOSSES: dict[str, Callable[[PolicyTerms, LossOptions], TokenLoss]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "gpg": gpg,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}

FORCED_AGGREGATION: dict[str, str] = {
    "gspo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
    "gmpo": "seq_mean_token_mean",
}


def _generated(terms: PolicyTerms) -> PolicyTerms:
    """The terms with 0 on all other tokens: their loss is 0, their ratio 1, their gradient 0."""
    return replace(
        terms,
        logprobs=ragged.only(terms.logprobs, terms.mask),
        old_logprobs=ragged.only(terms.old_logprobs, terms.mask),
        advantages=ragged.only(terms.advantages, terms.mask),
    )


def _log_ratio(terms: PolicyTerms) -> Tensor:
    return (terms.logprobs - terms.old_logprobs).clamp(-20, 20)


def _per_token_mean(values: Tensor, terms: PolicyTerms) -> Tensor:
    """[T] -> [T]: every token gets the mean of its sequence."""
    return ragged.expand(ragged.segment_mean(values, terms.mask, terms.offsets), terms.offsets)


def _clipped_objective(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic choice, and where it chose the clipped side."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    clipped = bounded > free
    return torch.where(clipped, bounded, free), clipped


def _dppo(terms: PolicyTerms, options: LossOptions, divergence: Tensor, default_threshold: float) -> TokenLoss:
    threshold = default_threshold if options.dppo_threshold is None else options.dppo_threshold
    log_ratio = _log_ratio(terms).detach()
    outward = terms.advantages * log_ratio > 0
    dropped = outward & (divergence > threshold)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=options.dppo_cap).masked_fill(dropped, 0)
    return _report(-terms.advantages * weight * terms.logprobs, ratio, weight != ratio, terms)


def _report(loss: Tensor, ratio: Tensor, clipped: Tensor, terms: PolicyTerms) -> TokenLoss:
    log_ratio, ratio = _log_ratio(terms).detach(), ragged.only(ratio.detach(), terms.mask)
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
