"""Losses of pairs: two answers to a prompt, of which one was preferred.

Each is a function of the margin: a number of the chosen answer (its implicit reward) minus that of the other one. Every
token has its pair's loss, so `seq_mean_token_mean` gives the mean over pairs, and its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Lt

from corral.algorithms import ragged
from corral.algorithms.declarations import policy_loss
from corral.algorithms.losses import PolicyTerms, TokenLoss
from corral.algorithms.ragged import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DpoOptions:
    beta: Annotated[float, Gt(0)] = 0.1
    """Weight of the KL to the reference in what DPO maximizes: the higher, the nearer the model stays."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Fraction of pairs that are taken to be labeled the wrong way round (conservative DPO)."""


@dataclass(frozen=True)
class IpoOptions:
    beta: Annotated[float, Gt(0)] = 0.1
    """The paper's tau: the margin is drawn to `1 / (2 beta)` nats per token."""


@dataclass(frozen=True)
class SimpoOptions:
    beta: Annotated[float, Gt(0)] = 2.0
    """Scale of the mean log-prob of an answer's tokens, which is its reward."""
    gamma: Annotated[float, Ge(0)] = 1.0
    """Margin by which the reward of the chosen answer should be above the other one's."""


@policy_loss(
    "dpo",
    "log-sigmoid of the margin between the two answers' log-ratios to the reference",
    options=DpoOptions,
    aggregation="seq_mean_token_mean",
    uses_old_policy=False,
    trains_on_rows=True,
    trains_on_pairs=True,
    needs_reference=True,
)
def dpo(terms: PolicyTerms, options: DpoOptions) -> TokenLoss:
    """DPO (Rafailov et al., 2023, arXiv 2305.18290): `-log sigmoid(m)`, where m is the margin of the implicit rewards
    `beta (log pi(y) - log ref(y))`, sums over an answer's tokens.

    With label smoothing e (Mitchell, 2023) `-(1 - e) log sigmoid(m) - e log sigmoid(-m)`.
    """
    rewards = options.beta * ragged.segment_sum(terms.reference_log_ratio, terms.mask, terms.offsets)
    margin, smoothing = terms.margin(rewards), options.label_smoothing
    loss = (smoothing - 1) * _log_sigmoid(margin) - smoothing * _log_sigmoid(-margin)
    return _report_pairs(loss, rewards, margin, terms)


@policy_loss(
    "ipo",
    "squared distance from `1 / (2 beta)` of the margin between the answers' log-ratios per token to the reference",
    options=IpoOptions,
    aggregation="seq_mean_token_mean",
    uses_old_policy=False,
    trains_on_rows=True,
    trains_on_pairs=True,
    needs_reference=True,
)
def ipo(terms: PolicyTerms, options: IpoOptions) -> TokenLoss:
    """IPO (Azar et al., 2023, arXiv 2310.12036): `(h - 1 / (2 beta))^2`, where h is the margin of
    `log pi(y) - log ref(y)`, means over an answer's tokens.

    The paper writes sums. Means are what TRL computes, by its account the form that the paper's results were made with.
    Implicit rewards that are reported are sums, as those of dpo.
    """
    log_ratio = terms.reference_log_ratio
    margin = terms.margin(ragged.segment_mean(log_ratio, terms.mask, terms.offsets))
    rewards = options.beta * ragged.segment_sum(log_ratio.detach(), terms.mask, terms.offsets)
    return _report_pairs((margin - 1 / (2 * options.beta)).square(), rewards, terms.margin(rewards), terms)


@policy_loss(
    "simpo",
    "log-sigmoid of the margin between the two answers' log-probs per token, less `gamma`; no reference",
    options=SimpoOptions,
    aggregation="seq_mean_token_mean",
    uses_old_policy=False,
    trains_on_rows=True,
    trains_on_pairs=True,
)
def simpo(terms: PolicyTerms, options: SimpoOptions) -> TokenLoss:
    """SimPO (Meng et al., 2024, arXiv 2405.14734): `-log sigmoid(m - gamma)`, where m is the margin of the rewards
    `beta log pi(y) / |y|`, means over an answer's tokens. Defaults are those that the authors recommend to begin with:
    beta 2 and gamma half of it.
    """
    rewards = options.beta * ragged.segment_mean(terms.logprobs, terms.mask, terms.offsets)
    margin = terms.margin(rewards)
    return _report_pairs(-_log_sigmoid(margin - options.gamma), rewards, margin, terms)


def _log_sigmoid(values: Tensor) -> Tensor:
    found: Tensor = torch.nn.functional.logsigmoid(values)
    return found


def _report_pairs(loss: Tensor, rewards: Tensor, margin: Tensor, terms: PolicyTerms) -> TokenLoss:
    """`loss`, `rewards` and `margin` are [N]: of a pair, both answers have the same loss and margin."""
    assert terms.is_chosen is not None
    chosen, rejected = terms.is_chosen, ~terms.is_chosen
    logprobs = ragged.segment_sum(terms.logprobs, terms.mask, terms.offsets)
    sums = {
        "loss": loss[chosen].sum(),
        "accuracy": ((margin[chosen].sign() + 1) / 2).sum(),  # a tie, as before the first update, counts half
        "margin": margin[chosen].sum(),
        "chosen_reward": rewards[chosen].sum(),
        "rejected_reward": rewards[rejected].sum(),
        "chosen_logprob": logprobs[chosen].sum(),
        "rejected_logprob": logprobs[rejected].sum(),
    }
    pair_sums = {name: value.detach() for name, value in sums.items()}
    per_token = ragged.only(ragged.expand(loss, terms.offsets), terms.mask)
    return TokenLoss(per_token, {}, {}, pair_sums, rewards.detach())
