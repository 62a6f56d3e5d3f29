import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_lists import Ragged, Rows, assert_rows, flat, logprobs, mean, numbers, quick, ragged

from corral.algorithms import pair_losses as pair_losses  # for its declarations
from corral.algorithms.declarations import with_options
from corral.algorithms.losses import (
    AGGREGATIONS,
    LOSSES,
    GlobalCounts,
    PolicyTerms,
    TokenLoss,
    aggregate,
    policy_token_loss,
)

OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "beta": 0.4, "cap": 3.0, "label_smoothing": 0.1}
"""For the losses that have them."""


def loss_of(name: str, terms: PolicyTerms, **options: float | None) -> TokenLoss:
    return policy_token_loss(with_options(LOSSES[name], **options), terms)


def loss_with_options(name: str, terms: PolicyTerms) -> TokenLoss:
    known = LOSSES[name].option_names
    return loss_of(name, terms, **{option: value for option, value in OPTIONS.items() if option in known})


def terms_of(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, *offsets: int) -> PolicyTerms:
    """Of tokens that were all generated."""
    return PolicyTerms(new, old, advantages, torch.ones(len(new), dtype=torch.bool), torch.tensor(offsets))


def slopes(slow: Callable[[Rows], float], new: Rows, step: float = 1e-6) -> Rows:
    """The gradient of a function of rows, by differences."""

    def moved(i: int, t: int, by: float) -> float:
        rows = [list(row) for row in new]
        rows[i][t] += by
        return slow(rows)

    return [
        [(moved(i, t, step) - moved(i, t, -step)) / (2 * step) for t in range(len(row))] for i, row in enumerate(new)
    ]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# Slow references. Token losses: of (log pi, log pi_old, A) -> loss, its derivative by log pi, whether it was clipped.


def slow_ppo(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    ratio = math.exp(new - old)
    if advantage < 0 and ratio > 3.0:
        return -advantage * 3.0, 0.0, True
    if (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.8):
        return -advantage * clip(ratio, 0.8, 1.3), 0.0, True
    return -advantage * ratio, -advantage * ratio, False


def slow_cispo(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    ratio = math.exp(new - old)
    weight = clip(ratio, 0.8, 1.3)
    return -weight * advantage * new, -weight * advantage, weight != ratio


def slow_sapo(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    ratio, tau = math.exp(new - old), 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage, False


def slow_gpg(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    return -advantage * new, -advantage, False


def slow_dro(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    return -(advantage * new - 0.2 * (new - old) ** 2), -advantage + 0.4 * (new - old), False


def slow_dppo(divergence: Callable[[float, float], float], threshold: float):  # type: ignore[no-untyped-def]
    def slow(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
        away = (advantage > 0 and new > old) or (advantage < 0 and new < old)
        ratio = math.exp(new - old)
        weight = 0.0 if away and divergence(math.exp(new), math.exp(old)) > threshold else min(ratio, 3.0)
        return -advantage * weight * new, -advantage * weight, weight != ratio

    return slow


def total_variation(p: float, p_old: float) -> float:
    """Of two distributions over "this token, another"."""
    return (abs(p - p_old) + abs((1 - p) - (1 - p_old))) / 2


def binary_kl(p: float, p_old: float) -> float:
    return p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))


TOKEN_LOSSES = {
    "ppo": slow_ppo,
    "cispo": slow_cispo,
    "sapo": slow_sapo,
    "gpg": slow_gpg,
    "dro": slow_dro,
    "dppo_tv": slow_dppo(total_variation, 0.15),
    "dppo_kl": slow_dppo(binary_kl, 0.05),
}


# Sequence losses: of the generated tokens' x and the sequence's A -> the sequence's loss, as in the papers.


def slow_gspo(x: list[float], advantage: float) -> float:
    ratio = math.exp(mean(x))
    return max(-advantage * ratio, -advantage * clip(ratio, 0.8, 1.3))


def slow_gmpo(x: list[float], advantage: float) -> float:
    product = math.prod(math.exp(max(d, -0.2) if advantage < 0 else min(d, 0.3)) for d in x)
    return -advantage * product ** (1 / len(x))


SEQUENCE_LOSSES = {"gspo": slow_gspo, "gmpo": slow_gmpo}

policy_batches = ragged(logprobs, logprobs, numbers)


def run(name: str, batch: Ragged, columns: list[torch.Tensor]) -> tuple[TokenLoss, torch.Tensor]:
    """The loss, and the gradient of its plain sum."""
    new, old, advantages = columns
    new = new.clone().requires_grad_()
    terms = PolicyTerms(new, old, advantages, batch.mask, batch.offsets)
    result = loss_with_options(name, in_pairs(terms) if LOSSES[name].trains_on_pairs else terms)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    return result, gradient


def in_pairs(terms: PolicyTerms) -> PolicyTerms:
    """Trajectories two by two, of which the first and the second are preferred in turn; the reference is the old
    policy."""
    rows = torch.arange(len(terms.offsets) - 1)
    is_chosen = (rows + rows // 2) % 2 == 0
    return replace(terms, reference_logprobs=terms.old_logprobs, pairs=rows // 2, is_chosen=is_chosen)


def per_sequence(batch: Ragged) -> Ragged:
    """The same batch with one advantage per trajectory, as group baselines give."""
    advantages = [[0.5 * (i % 4) - 0.75] * len(row) for i, row in enumerate(batch.masks)]
    return replace(batch, columns=[*batch.columns[:2], advantages])


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@quick
@given(batch=policy_batches)
def test_token_losses_and_gradients_match_lists(name: str, batch: Ragged) -> None:
    result, gradient = run(name, batch, batch.tensors())
    terms = zip(*(batch.generated(rows) for rows in batch.columns), strict=True)
    expected = [[TOKEN_LOSSES[name](*token) for token in zip(*rows, strict=True)] for rows in terms]
    assert_rows(result.loss, batch.spread([[loss for loss, _, _ in row] for row in expected]))
    assert_rows(gradient, batch.spread([[slope for _, slope, _ in row] for row in expected]))
    assert result.sums["clipped"] == sum(clipped for row in expected for _, _, clipped in row)


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
@quick
@given(batch=policy_batches.map(per_sequence))
def test_sequence_losses_and_gradients_match_the_papers_formula(name: str, batch: Ragged) -> None:
    new, old, advantages = (batch.generated(rows) for rows in batch.columns)

    def slow(new: Rows) -> float:
        losses = [
            SEQUENCE_LOSSES[name]([a - b for a, b in zip(row, old_row, strict=True)], row_advantages[0])
            for row, old_row, row_advantages in zip(new, old, advantages, strict=True)
            if row
        ]
        return mean(losses)

    tensors = batch.tensors()
    tensors[0].requires_grad_()
    terms = PolicyTerms(*tensors, batch.mask, batch.offsets)
    loss = aggregate(
        loss_with_options(name, terms).loss,
        batch.mask,
        batch.offsets,
        with_options(AGGREGATIONS[str(LOSSES[name].aggregation)]),
        batch.counts,
    )
    assert float(loss.detach()) == pytest.approx(slow(new), abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, tensors[0])
    assert_rows(gradient, batch.spread(slopes(slow, new)), 1e-6)


# Losses of pairs: of the log-probs of both answers' tokens, new and of the reference -> the pair's loss.


def slow_dpo(chosen: list[float], chosen_ref: list[float], rejected: list[float], rejected_ref: list[float]) -> float:
    margin = 0.4 * ((sum(chosen) - sum(rejected)) - (sum(chosen_ref) - sum(rejected_ref)))
    p = 1 / (1 + math.exp(-margin))
    return -0.9 * math.log(p) - 0.1 * math.log(1 - p)


def slow_ipo(chosen: list[float], chosen_ref: list[float], rejected: list[float], rejected_ref: list[float]) -> float:
    lead, other = (
        mean(own) - mean(of_reference) for own, of_reference in ((chosen, chosen_ref), (rejected, rejected_ref))
    )
    return (lead - other - 1 / 0.8) ** 2


def slow_simpo(chosen: list[float], chosen_ref: list[float], rejected: list[float], rejected_ref: list[float]) -> float:
    return math.log(1 + math.exp(-(0.4 * mean(chosen) - 0.4 * mean(rejected) - 1.0)))


PAIR_LOSSES = {"dpo": slow_dpo, "ipo": slow_ipo, "simpo": slow_simpo}


def as_pairs(batch: Ragged) -> Ragged:
    """Twice as many trajectories, each with something to train on."""
    masks, random = [[*row, True] for row in [*batch.masks, *batch.masks[::-1]]], Random(len(batch.masks))
    return Ragged(masks, [0] * len(masks), [[[logprobs(random) for _ in row] for row in masks] for _ in range(3)])


@pytest.mark.parametrize("name", PAIR_LOSSES)
@quick
@given(batch=policy_batches.map(as_pairs))
def test_losses_of_pairs_and_their_gradients_match_the_papers_formula(name: str, batch: Ragged) -> None:
    new, reference, _ = (batch.generated(rows) for rows in batch.columns)

    def slow(new: Rows) -> list[float]:
        found = []
        for first in range(0, len(new), 2):
            chosen, rejected = (first, first + 1) if first % 4 == 0 else (first + 1, first)
            found.append(PAIR_LOSSES[name](new[chosen], reference[chosen], new[rejected], reference[rejected]))
        return found

    tensors = batch.tensors()
    tensors[0].requires_grad_()
    result = loss_with_options(name, in_pairs(PolicyTerms(*tensors, batch.mask, batch.offsets)))
    by_pair = with_options(AGGREGATIONS[str(LOSSES[name].aggregation)])
    loss = aggregate(result.loss, batch.mask, batch.offsets, by_pair, batch.counts)
    assert float(loss.detach()) == pytest.approx(mean(slow(new)), abs=1e-9)
    assert float(result.pair_sums["loss"]) == pytest.approx(sum(slow(new)), abs=1e-9)
    (gradient,) = torch.autograd.grad(loss, tensors[0])
    assert_rows(gradient, batch.spread(slopes(lambda rows: mean(slow(rows)), new)), 1e-6)


def test_what_is_reported_of_pairs_are_implicit_rewards_and_who_is_ahead() -> None:
    """Three pairs of answers of one token: one is ahead by 2 nats, one behind by 1, one a tie."""
    new, reference = torch.tensor([-1.0, -3, -2, -1, -1, -1]), torch.tensor([-2.0, -2, -2, -2, -1, -1])
    terms = terms_of(new, reference, new, *range(7))
    found = loss_of("dpo", in_pairs(replace(terms, logprobs=new[[0, 1, 3, 2, 4, 5]])), beta=0.5).pair_sums
    assert {name: float(value) for name, value in found.items() if name != "loss"} == pytest.approx(
        {
            "accuracy": 1.5,
            "margin": 0.5 * (2 - 1),
            "chosen_reward": 0.5 * 1,
            "rejected_reward": 0.5 * (-1 + 1),
            "chosen_logprob": -1 - 2 - 1,
            "rejected_logprob": -3 - 1 - 1,
        }
    )


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(batch=policy_batches)
def test_nothing_on_other_tokens_changes_loss_gradient_or_metrics(name: str, batch: Ragged) -> None:
    clean, clean_gradient = run(name, batch, batch.tensors())
    poisoned, gradient = run(name, batch, batch.poisoned())
    assert torch.equal(poisoned.loss, clean.loss)
    assert torch.equal(gradient, clean_gradient)
    assert poisoned.sums == clean.sums
    assert poisoned.maxima == clean.maxima
    assert poisoned.pair_sums == clean.pair_sums
    assert poisoned.loss[~batch.mask].abs().sum() == 0
    assert gradient[~batch.mask].abs().sum() == 0


@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo"])
@quick
@given(batch=policy_batches, cut=st.integers(0, 6))
def test_splitting_between_sequences_changes_neither_loss_nor_metrics(name: str, batch: Ragged, cut: int) -> None:
    whole, _ = run(name, batch, batch.tensors())
    parts = [
        Ragged(batch.masks[s], batch.groups[s], [rows[s] for rows in batch.columns])
        for s in (slice(None, cut), slice(cut, None))
    ]
    results = [run(name, part, part.tensors())[0] for part in parts]
    torch.testing.assert_close(torch.cat([result.loss for result in results]), whole.loss)
    for key, value in whole.sums.items():
        torch.testing.assert_close(results[0].sums[key] + results[1].sums[key], value)
    for key, value in whole.maxima.items():
        torch.testing.assert_close(torch.maximum(results[0].maxima[key], results[1].maxima[key]), value)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gpg", "dppo_kl"])
@quick
@given(batch=policy_batches)
def test_ratio_and_kl_metrics_match_lists(name: str, batch: Ragged) -> None:
    result, _ = run(name, batch, batch.tensors())
    new, old = (flat(batch.generated(rows)).tolist() for rows in batch.columns[:2])
    ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
    assert float(result.sums["ratio"]) == pytest.approx(sum(ratios))
    assert float(result.sums["approx_kl"]) == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))
    assert float(result.maxima["ratio_deviation"]) == pytest.approx(max((abs(r - 1) for r in ratios), default=0.0))


@pytest.mark.parametrize("name", [name for name, declared in LOSSES.items() if not declared.trains_on_rows])
def test_before_the_first_update_every_gradient_is_the_policy_gradient(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.1], requires_grad=True)
    advantages = torch.tensor([2.0, 2.0, -1.0, -1.0])
    result = loss_of(name, terms_of(logprobs, logprobs.detach(), advantages, 0, 2, 4))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages)
    assert result.maxima["ratio_deviation"] == 0
    assert result.sums["approx_kl"] == 0
    assert result.sums["clipped"] == 0


def test_the_loss_of_rows_is_the_negative_log_prob_whatever_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -0.1], requires_grad=True)
    mask = torch.tensor([False, True, True, False])
    terms = PolicyTerms(logprobs, torch.zeros(4), torch.zeros(4), mask, torch.tensor([0, 4]))
    result = loss_of("nll", terms)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert result.loss.tolist() == [0, 2, 0.5, 0]
    assert gradient.tolist() == [0, -1, -1, 0]
    assert result.sums["nll"] == 2.5


def one_token(log_ratio: float, advantage: float, dual_clip: float | None) -> float:
    terms = terms_of(torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), 0, 1)
    return float(loss_of("ppo", terms, dual_clip=dual_clip).loss)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    assert one_token(math.log(5), -1.0, 3.0) == pytest.approx(3.0)
    assert one_token(math.log(5), -1.0, None) == pytest.approx(5.0)


def test_extreme_log_ratios_stay_finite() -> None:
    for name in LOSSES:
        new = torch.tensor([-1e-9, -500.0], requires_grad=True)
        terms = terms_of(new, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]), 0, 1, 2)
        result = loss_of(name, in_pairs(terms))
        (gradient,) = torch.autograd.grad(result.loss.sum(), new)
        assert torch.isfinite(result.loss).all(), name
        assert torch.isfinite(gradient).all(), name


def test_gmpo_is_normalised_by_the_whole_update() -> None:
    terms = terms_of(torch.tensor([0.1, 0.1]), torch.zeros(2), torch.ones(2), 0, 2)
    loss = loss_of("gmpo", terms).loss
    share = aggregate(
        loss, terms.mask, terms.offsets, with_options(AGGREGATIONS["seq_mean_token_mean"]), GlobalCounts(10, 4)
    )
    assert float(share) == pytest.approx(-math.exp(0.1) / 4)


def test_gspo_bounds_the_ratio_of_a_sequence_that_became_far_too_likely() -> None:
    columns = torch.tensor([0.0, 0.0]), torch.tensor([-15.0, -15.0]), torch.tensor([-1.0, -1.0])
    result = loss_of("gspo", terms_of(*columns, 0, 2))
    assert result.loss.tolist() == pytest.approx([math.exp(10), math.exp(10)])


def test_dppo_kl_drops_a_token_that_was_certain_and_no_longer_is() -> None:
    columns = torch.tensor([-3.0]), torch.tensor([0.0]), torch.tensor([-1.0])
    result = loss_of("dppo_kl", terms_of(*columns, 0, 1))
    assert result.sums["clipped"] == 1
    assert result.loss.abs().sum() == 0


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_tokens_of_a_sequence_share_one_ratio_to_the_last_bit(name: str) -> None:
    """GSPO's bounds are of the order of 1e-4: rounding next to log-probabilities of -10 would be seen."""
    old = -torch.linspace(0.1, 12.0, 64)
    new = old + torch.linspace(-1e-3, 2e-3, 64)
    assert len(loss_of(name, terms_of(new, old, torch.ones(64), 0, 64)).loss.unique()) == 1
