"""Advantage estimators: from rewards on tokens to how much better than expected each generated token was.

All take the whole batch of a step, since baselines and whitening are statistics over it, and compute in float64
whatever came in. What they agree on:

- Advantages and returns are 0 on tokens that the model did not generate, and rewards and values there are not read.
  Discounting counts generated tokens only: an observation between two turns, however long, costs nothing.
- A trajectory without a generated token is no sample: it does not enter its group's statistics.
- Estimators that compare the samples of a prompt give a group of one an advantage of 0 (before whitening, where there
  is any): alone, it says nothing about better or worse. Some implementations let it keep its raw reward instead,
  which trains a lone failure not at all and a lone success at full strength.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from corral.algorithms import ragged

EPSILON = 1e-6
"""Added to a group's standard deviation, as in verl and TRL."""


@dataclass(frozen=True)
class Turns:
    """The turns of all trajectories, in order: runs of generated tokens, each ending where its reward sits."""

    ends: Tensor
    """[M] The flat index of a turn's last token."""
    rows: Tensor
    """[M] Its trajectory."""
    states: Tensor
    """[M] int, the state in which it was taken: within a group, equal numbers are equal states."""


@dataclass(frozen=True)
class RewardedBatch:
    token_rewards: Tensor
    """[T] A turn's reward sits on the turn's last generated token. A KL penalty, where used, is already subtracted."""
    mask: Tensor
    """[T] bool, generated tokens."""
    offsets: Tensor
    """[N + 1]"""
    groups: Tensor
    """[N] int, the samples of one prompt share a number."""
    values: Tensor | None = None
    """[T] The critic's, for `gae`."""
    baselines: Tensor | None = None
    """[N] Reward of the prompt's greedy answer, for `remax`."""
    turns: Turns | None = None
    """For `turn_grpo` and `gigpo`. None: every trajectory is one turn."""


@dataclass(frozen=True)
class Advantages:
    advantages: Tensor
    """[T]"""
    returns: Tensor
    """[T] What a critic should have predicted. Only `gae` has one; for the others it is for the record."""


def gae(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """Generalised advantage estimation (Schulman et al., 2015, arXiv 1506.02438), whitened over the batch.

    `delta_t = r_t + gamma * V_next - V_t`, `A_t = delta_t + gamma * gae_lambda * A_next`, where next is the next
    *generated* token of the trajectory, and 0 after the last: a truncated trajectory counts as finished. `returns = A + V`, with
    A before whitening.
    """
    if batch.values is None:
        raise ValueError("gae needs a critic's values, and this batch has none")
    index, offsets = ragged.compact(batch.mask, batch.offsets)
    rewards, values = batch.token_rewards[index].double(), batch.values[index].double()
    deltas = rewards + gamma * ragged.shift_left(values, offsets) - values
    advantages = ragged.discounted_suffix_sums(deltas, offsets, gamma * gae_lambda)
    raw = _scatter(advantages, index, batch)
    return _result(batch, ragged.whiten(raw, batch.mask), _scatter(advantages + values, index, batch))


def grpo(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """GRPO (DeepSeekMath, Shao et al., 2024, arXiv 2402.03300): `(R - mean_g) / (std_g + 1e-6)`, std with n - 1."""
    return _per_sequence(batch, _centred(batch) / (_spread(batch) + EPSILON))


def dr_grpo(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): `R - mean_g`.

    Without the division, easy and hard prompts are not weighted up. The paper aggregates with a constant as well:
    `seq_mean_token_sum_norm`.
    """
    return _per_sequence(batch, _centred(batch))


def rloo(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """REINFORCE leave-one-out (Ahmadian et al., 2024, arXiv 2402.14740): R minus the mean of the *other* samples.

    That is `n / (n - 1) * (R - mean_g)`; a group of one gets 0.
    """
    count = ragged.group_count(_played(batch), batch.groups)
    return _per_sequence(batch, count / (count - 1).clamp(min=1) * _centred(batch))


def reinforce(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """REINFORCE (Williams, 1992): the discounted sum of the rewards from here on. No baseline, no whitening."""
    returns = _returns(batch, gamma)
    return _result(batch, returns, returns)


def reinforce_plus_plus(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """REINFORCE++ (Hu, 2025, arXiv 2501.03262): discounted returns, whitened over all generated tokens of the batch."""
    returns = _returns(batch, gamma)
    return _result(batch, ragged.whiten(returns, batch.mask), returns)


def reinforce_plus_plus_baseline(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """REINFORCE++ with a group baseline (Hu, 2025, arXiv 2501.03262): `R - mean_g`, whitened over the batch's tokens.

    The whitening counts tokens, so long trajectories weigh more in its statistics.
    """
    advantages = ragged.whiten(ragged.expand(_centred(batch), batch.offsets), batch.mask)
    return _result(batch, advantages, advantages)


def remax(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """ReMax (Li et al., 2023, arXiv 2310.10505): rewards from here on, undiscounted, minus the greedy answer's."""
    if batch.baselines is None:
        raise ValueError("remax needs the rewards of greedy answers (baselines), and this batch has none")
    returns = _returns(batch, 1.0)
    return _result(batch, returns - ragged.expand(batch.baselines.double(), batch.offsets), returns)


def opo(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """OPO (Hao et al., 2025, arXiv 2505.23585): R minus the group's mean reward weighted by length.

    Lengths are in generated tokens: the variance-optimal baseline when a gradient's norm grows with its length.
    """
    lengths, played = ragged.segment_count(batch.mask, batch.offsets), _played(batch)
    weighted = ragged.group_sum(lengths * _totals(batch), played, batch.groups)
    return _per_sequence(
        batch, _totals(batch) - weighted / ragged.group_sum(lengths, played, batch.groups).clamp(min=1)
    )


def gpg(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """GPG (Chu et al., 2025, arXiv 2504.02546): `alpha * (R - mean_g)`, with F_norm = 1.

    alpha = samples / samples in groups whose rewards differ: the batch's mean is diluted by groups that have no
    gradient, and alpha undoes that. (verl counts samples with a reward other than 0 instead, which is not the paper's
    and depends on where rewards have their zero.)
    """
    played = _played(batch)
    informative = played & (ragged.group_range(_totals(batch), played, batch.groups) > 0)
    alpha = played.sum() / informative.sum().clamp(min=1)
    return _per_sequence(batch, alpha * _centred(batch))


def grpo_passk(batch: RewardedBatch, *, gamma: float = 1.0, gae_lambda: float = 1.0) -> Advantages:
    """GRPO for pass@k: the group's best sample gets `(R_best - R_second) / (std_g + 1e-6)`, all others 0.

    Only what raises the best of k is reinforced, as in verl's `grpo_passk` (after Tang et al., 2025, arXiv 2503.19595).
    Two equally good best samples: 0 for both.
    """
    totals, played = _totals(batch), _played(batch)
    ranked = totals.masked_fill(~played, -torch.inf).argsort(descending=True, stable=True)
    ranked = ranked[batch.groups[ranked].argsort(stable=True)]  # Group after group, each from best to worst.
    groups = batch.groups[ranked]
    is_best = torch.ones_like(groups, dtype=torch.bool)
    is_best[1:] = groups[1:] != groups[:-1]
    has_second = torch.zeros_like(is_best)
    has_second[:-1] = ~is_best[1:] & played[ranked[1:]]
    best = (is_best & has_second).nonzero().squeeze(1)
    margins = torch.zeros_like(totals)
    margins[ranked[best]] = totals[ranked[best]] - totals[ranked[best + 1]]
    return _per_sequence(batch, margins / (_spread(batch) + EPSILON))


def turn_grpo(batch: RewardedBatch, *, turn_gamma: float = 1.0) -> Advantages:
    """GRPO turn by turn: what is still to come from a turn on, against the same turn of the prompt's other samples.

    `G_t = r_t + turn_gamma * G_(t+1)`; the advantage of every token of turn t is `(G_t - mean) / (std + 1e-6)`, with
    the mean and the deviation (n - 1) over the t-th turns of the group's samples. Credit goes to the turn that earned
    it, and with a discount the shorter of two ways is the better one.
    """
    turns = _turns(batch)
    returns = _turn_returns(batch, turns, turn_gamma)
    first = torch.searchsorted(turns.rows, turns.rows)  # of the same trajectory
    place = torch.arange(len(turns.rows), device=turns.rows.device) - first
    return _per_turn(batch, turns, _against(returns, batch.groups[turns.rows], place), returns)


def gigpo(batch: RewardedBatch, *, turn_gamma: float = 0.95, turn_weight: float = 1.0) -> Advantages:
    """GiGPO (Feng et al., 2025, arXiv 2505.10978): trajectories against each other, and turns taken in the same state.

    `A = A_trajectory + turn_weight * A_turn`. The first is GRPO's. The second compares `G_t` (as in `turn_grpo`) with
    those of all turns of the group's samples that were taken in the same state; a state met once says nothing (0).
    """
    turns = _turns(batch)
    returns = _turn_returns(batch, turns, turn_gamma)
    by_state = _against(returns, batch.groups[turns.rows], turns.states)
    whole = _centred(batch) / (_spread(batch) + EPSILON)
    return _per_turn(batch, turns, whole[turns.rows] + turn_weight * by_state, returns)


ADVANTAGES: dict[str, Callable[..., Advantages]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "turn_grpo": turn_grpo,
    "gigpo": gigpo,
}

NEEDS_GROUPS = frozenset(
    {"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "turn_grpo", "gigpo"}
)
"""Those that learn nothing from one sample per prompt."""

NEEDS_CRITIC = frozenset({"gae"})

NEEDS_GREEDY_BASELINE = frozenset({"remax"})


def _totals(batch: RewardedBatch) -> Tensor:
    """[N]: each trajectory's reward."""
    return ragged.segment_sum(batch.token_rewards.double(), batch.mask, batch.offsets)


def _played(batch: RewardedBatch) -> Tensor:
    """[N]: which trajectories have a generated token."""
    return ragged.segment_count(batch.mask, batch.offsets) > 0


def _centred(batch: RewardedBatch) -> Tensor:
    """[N]: rewards minus their group's mean."""
    totals = _totals(batch)
    return totals - ragged.group_mean(totals, _played(batch), batch.groups)


def _spread(batch: RewardedBatch) -> Tensor:
    """[N]: the standard deviation of each trajectory's group."""
    return ragged.group_std(_totals(batch), _played(batch), batch.groups)


def _turns(batch: RewardedBatch) -> Turns:
    """One for each trajectory, where the batch does not say."""
    if batch.turns is not None:
        return batch.turns
    index = batch.mask.nonzero().squeeze(1)
    rows = ragged.segment_ids(batch.offsets)[index]
    is_last = torch.ones_like(rows, dtype=torch.bool)
    is_last[:-1] = rows[1:] != rows[:-1]
    return Turns(index[is_last], rows[is_last], torch.zeros_like(rows[is_last]))


def _turn_of(batch: RewardedBatch, turns: Turns) -> tuple[Tensor, Tensor]:
    """The generated tokens' flat indices, and the turn of each. Turns are in order, so that a token's is the first that
    does not end before it."""
    index = batch.mask.nonzero().squeeze(1)
    return index, torch.searchsorted(turns.ends, index)


def _turn_returns(batch: RewardedBatch, turns: Turns, gamma: float) -> Tensor:
    """[M]: each turn's reward and the discounted ones of the trajectory's later turns."""
    index, turn = _turn_of(batch, turns)
    rewards = batch.token_rewards.new_zeros(len(turns.ends), dtype=torch.float64)
    rewards = rewards.index_add(0, turn, batch.token_rewards[index].double())
    counts = torch.bincount(turns.rows, minlength=len(batch.groups))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return ragged.discounted_suffix_sums(rewards, offsets, gamma)


def _against(returns: Tensor, groups: Tensor, keys: Tensor) -> Tensor:
    """Each turn's minus the mean of those with the same group and key, over their deviation; 0 for who is alone."""
    _, peers = torch.unique(torch.stack([groups, keys]), dim=1, return_inverse=True)
    everyone = torch.ones_like(peers, dtype=torch.bool)
    centred = returns - ragged.group_mean(returns, everyone, peers)
    return centred / (ragged.group_std(returns, everyone, peers) + EPSILON)


def _per_turn(batch: RewardedBatch, turns: Turns, advantages: Tensor, returns: Tensor) -> Advantages:
    """The same advantage for all generated tokens of a turn."""
    index, turn = _turn_of(batch, turns)
    return _result(batch, _scatter(advantages[turn], index, batch), _scatter(returns[turn], index, batch))


def _returns(batch: RewardedBatch, gamma: float) -> Tensor:
    """[T]: discounted sum of the rewards on this and the later generated tokens."""
    index, offsets = ragged.compact(batch.mask, batch.offsets)
    rewards = batch.token_rewards[index].double()
    return _scatter(ragged.discounted_suffix_sums(rewards, offsets, gamma), index, batch)


def _scatter(generated: Tensor, index: Tensor, batch: RewardedBatch) -> Tensor:
    """Values of the generated tokens -> [T], 0 elsewhere."""
    return generated.new_zeros(len(batch.mask)).index_copy(0, index, generated)


def _per_sequence(batch: RewardedBatch, advantages: Tensor) -> Advantages:
    """The same advantage for all generated tokens of a trajectory."""
    per_token = ragged.expand(advantages, batch.offsets)
    return _result(batch, per_token, per_token)


def _result(batch: RewardedBatch, advantages: Tensor, returns: Tensor) -> Advantages:
    dtype = batch.token_rewards.dtype
    return Advantages(ragged.only(advantages, batch.mask).to(dtype), ragged.only(returns, batch.mask).to(dtype))
