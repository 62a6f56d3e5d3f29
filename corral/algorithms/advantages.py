"""Advantage estimators: from rewards on tokens to how much better than expected each generated token was.

They compute in float64 whatever came in. What they agree on:

- Advantages and returns are 0 on tokens that the model did not generate, and rewards and values there are not read.
  Discounting counts generated tokens only: an observation between two turns, however long, costs nothing.
- A trajectory without a generated token is no sample: it does not enter its group's statistics.
- Estimators that compare the samples of a prompt give a group of one an advantage of 0 (before whitening, where there
  is any): alone, it says nothing about better or worse. Some implementations let it keep its raw reward instead,
  which trains a lone failure not at all and a lone success at full strength (`with_lone_rewards`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from corral.algorithms import ragged
from corral.algorithms.declarations import ADVANTAGES as ADVANTAGES
from corral.algorithms.declarations import SHAPINGS as SHAPINGS
from corral.algorithms.declarations import (
    AdvantageDeclaration,
    AlgorithmPart,
    Needs,
    NoOptions,
    advantage,
    reward_shaping,
)
from corral.algorithms.ragged import torch

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6
"""Added to a group's standard deviation, as in verl and TRL."""
BY_GROUP = Needs(groups=True, whole_batch=False)


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
    """What an estimator sees: what it declared that it needs (`Needs`), and nothing else."""

    token_rewards: Tensor
    """[T] A turn's reward sits on the turn's last generated token. A KL penalty, where used, is already subtracted."""
    mask: Tensor
    """[T] bool, generated tokens."""
    offsets: Tensor
    """[N + 1]"""
    groups: Tensor
    """[N] int, the samples of one prompt have the same number."""
    values: Tensor | None = None
    """[T] The critic's. None unless the estimator needs a critic."""
    baselines: Tensor | None = None
    """[N] Reward of the prompt's greedy answer. None unless the estimator needs it."""
    teacher_lead: Tensor | None = None
    """[T] Log-prob of the token under the teacher minus that under the policy that sampled it. None unless the
    estimator needs a teacher."""
    turns: Turns | None = None
    """None unless the estimator needs turns; then None means that every trajectory is one turn."""
    domains: Tensor | None = None
    """[N] int, trajectories that are whitened together have the same number. None: all are."""
    is_whole: bool = True
    """Whether statistics over all of it may be taken: it is the whole batch of a step."""

    @property
    def rewards(self) -> Tensor:
        """[N] float64: each trajectory's reward."""
        return ragged.segment_sum(self.token_rewards.double(), self.mask, self.offsets)

    @property
    def has_tokens(self) -> Tensor:
        """[N] bool: which trajectories have a generated token."""
        return ragged.segment_count(self.mask, self.offsets) > 0

    @property
    def centered_rewards(self) -> Tensor:
        """[N]: rewards minus their group's mean."""
        return self.rewards - ragged.group_mean(self.rewards, self.has_tokens, self.groups)

    @property
    def normalized_rewards(self) -> Tensor:
        """[N]: rewards minus their group's mean, divided by its standard deviation."""
        return self.centered_rewards / (self.reward_std + EPSILON)

    @property
    def reward_std(self) -> Tensor:
        """[N]: the standard deviation of the rewards of each trajectory's group."""
        return ragged.group_std(self.rewards, self.has_tokens, self.groups)

    @property
    def whole(self) -> RewardedBatch:
        """This batch, for statistics over all of it."""
        if not self.is_whole:
            raise ValueError(
                "this advantage takes a statistic over the whole batch, but is declared with "
                "Needs(whole_batch=False); declare it with Needs(whole_batch=True)"
            )
        return self

    def whiten(self, values: Tensor) -> Tensor:
        """[T]: `values` with mean 0 and deviation 1 over the generated tokens of the whole batch, or of each domain."""
        if self.domains is None:
            return ragged.whiten(values, self.whole.mask)
        return ragged.whiten_parts(values, self.whole.mask, ragged.expand(self.domains, self.offsets))

    def rows_of(self, group: Tensor) -> RewardedBatch:
        """The samples of one group alone."""
        rows = (self.groups == group).nonzero().squeeze(1)
        tokens = torch.cat([torch.arange(int(self.offsets[row]), int(self.offsets[row + 1])) for row in rows])
        turns = self.turns
        if turns is not None:
            kept = torch.isin(turns.rows, rows)
            ends, places = (
                torch.searchsorted(*pair) for pair in ((tokens, turns.ends[kept]), (rows, turns.rows[kept]))
            )
            turns = Turns(ends, places, turns.states[kept])
        lengths = self.offsets.diff()[rows]
        return RewardedBatch(
            self.token_rewards[tokens],
            self.mask[tokens],
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            self.groups[rows],
            None if self.values is None else self.values[tokens],
            None if self.baselines is None else self.baselines[rows],
            None if self.teacher_lead is None else self.teacher_lead[tokens],
            turns,
            None if self.domains is None else self.domains[rows],
            self.is_whole,
        )


@dataclass(frozen=True)
class Advantages:
    advantages: Tensor
    """[T]"""
    returns: Tensor
    """[T] What a critic should have predicted. Only `gae` has one; for the others it is for the record."""


def compute_advantages(part: AlgorithmPart[AdvantageDeclaration], batch: RewardedBatch) -> Advantages:
    """An estimator is handed what it declared, so that a wrong declaration cannot make a pipelined run differ.

    One that is not built in and does not need the whole batch is handed one group at a time. (Those that are built in
    compute all groups in one go; tests compare that with group after group.)
    """
    needs = part.declaration.needs
    batch = replace(
        batch,
        values=batch.values if needs.critic else None,
        baselines=batch.baselines if needs.greedy_baseline else None,
        teacher_lead=batch.teacher_lead if needs.teacher else None,
        turns=batch.turns if needs.turns else None,
        is_whole=needs.whole_batch,
    )
    if needs.whole_batch or part.declaration.name in ADVANTAGES:
        return _advantages_of(part, batch)
    advantages, returns = torch.zeros_like(batch.token_rewards), torch.zeros_like(batch.token_rewards)
    for group in batch.groups.unique():
        found = _advantages_of(part, batch.rows_of(group))
        tokens = ragged.expand(batch.groups == group, batch.offsets)
        advantages[tokens], returns[tokens] = found.advantages, found.returns
    return Advantages(advantages, returns)


def _advantages_of(part: AlgorithmPart[AdvantageDeclaration], batch: RewardedBatch) -> Advantages:
    """A function of a user may return the advantages alone, per token or per trajectory."""
    found = part.declaration.function(batch, part.options)
    if isinstance(found, Advantages):
        return found
    if part.declaration.needs.critic:
        raise TypeError(f"{part.name} needs a critic, so it must return Advantages, with the returns to train it on")
    if (shape := ragged.shape_of(found)) == ragged.shape_of(batch.mask):
        return _result(batch, found, found)
    if shape == ragged.shape_of(batch.groups):
        return _per_sequence(batch, found)
    raise TypeError(
        f"{part.name} returned {shape}; advantages are a tensor of one number for each token, shaped like "
        "`batch.mask`, or for each trajectory, shaped like `batch.groups`"
    )


@dataclass(frozen=True)
class DiscountOptions:
    gamma: Annotated[float, Gt(0), Le(1)] = 1.0
    """Discount of a reward for every generated token that it comes later."""


@dataclass(frozen=True)
class GaeOptions(DiscountOptions):
    gae_lambda: Annotated[float, Gt(0), Le(1)] = 1.0
    """Lambda of generalized advantage estimation: 1 trusts the rewards, smaller values trust the critic more."""
    whiten: bool = True
    """Whether advantages are brought to mean 0 and deviation 1 over the batch."""


@dataclass(frozen=True)
class TurnOptions:
    turn_gamma: Annotated[float, Gt(0), Le(1)] = 0.95
    """Discount of a reward for every turn that it comes later."""


@dataclass(frozen=True)
class GigpoOptions(TurnOptions):
    turn_weight: Annotated[float, Gt(0)] = 1.0
    """Weight of the comparison of single turns, beside the comparison of whole trajectories."""


@advantage("none", "1 for every trained token: rows are trained on as they are", needs=Needs(whole_batch=False))
def none(batch: RewardedBatch, options: NoOptions) -> Tensor:
    return batch.mask.double()


@advantage(
    "gae",
    "generalized advantage estimation with a critic's values, whitened unless `whiten` is false",
    options=GaeOptions,
    needs=Needs(critic=True),
    whitened=True,
)
def gae(batch: RewardedBatch, options: GaeOptions) -> Advantages:
    """Generalized advantage estimation (Schulman et al., 2015, arXiv 1506.02438), whitened over the batch by default.

    `delta_t = r_t + gamma * V_next - V_t`, `A_t = delta_t + gamma * gae_lambda * A_next`, where next is the next
    *generated* token of the trajectory, and 0 after the last: a truncated trajectory counts as finished.
    `returns = A + V`, with A before whitening.
    """
    if batch.values is None:
        raise ValueError("gae needs a critic's values, and this batch has none")
    index, offsets = ragged.compact(batch.mask, batch.offsets)
    rewards, values = batch.token_rewards[index].double(), batch.values[index].double()
    deltas = rewards + options.gamma * ragged.shift_left(values, offsets) - values
    advantages = ragged.discounted_suffix_sums(deltas, offsets, options.gamma * options.gae_lambda)
    raw = _scatter(advantages, index, batch)
    found = batch.whiten(raw) if options.whiten else raw
    return _result(batch, found, _scatter(advantages + values, index, batch))


@advantage("grpo", "reward minus the mean of the prompt's samples, divided by their standard deviation", needs=BY_GROUP)
def grpo(batch: RewardedBatch, options: NoOptions) -> Advantages:
    """GRPO (DeepSeekMath, Shao et al., 2024, arXiv 2402.03300): `(R - mean_g) / (std_g + 1e-6)`, std with n - 1."""
    return _per_sequence(batch, batch.normalized_rewards)


@advantage("dr_grpo", "reward minus the mean of the prompt's samples", needs=BY_GROUP)
def dr_grpo(batch: RewardedBatch, options: NoOptions) -> Advantages:
    """Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): `R - mean_g`.

    Without the division, easy and hard prompts are not weighted up. The paper aggregates with a constant as well:
    `seq_mean_token_sum_norm`.
    """
    return _per_sequence(batch, batch.centered_rewards)


@advantage("rloo", "reward minus the mean of the prompt's other samples", needs=BY_GROUP)
def rloo(batch: RewardedBatch, options: NoOptions) -> Advantages:
    """REINFORCE leave-one-out (Ahmadian et al., 2024, arXiv 2402.14740): R minus the mean of the *other* samples.

    That is `n / (n - 1) * (R - mean_g)`; a group of one gets 0.
    """
    count = ragged.group_count(batch.has_tokens, batch.groups)
    return _per_sequence(batch, count / (count - 1).clamp(min=1) * batch.centered_rewards)


@advantage("reinforce", "the sum of the rewards from here on", options=DiscountOptions, needs=Needs(whole_batch=False))
def reinforce(batch: RewardedBatch, options: DiscountOptions) -> Advantages:
    """REINFORCE (Williams, 1992): the discounted sum of the rewards from here on. No baseline, no whitening."""
    returns = _returns(batch, options.gamma)
    return _result(batch, returns, returns)


@advantage(
    "reinforce_plus_plus",
    "the sum of the rewards from here on, whitened over the batch",
    options=DiscountOptions,
    whitened=True,
)
def reinforce_plus_plus(batch: RewardedBatch, options: DiscountOptions) -> Advantages:
    """REINFORCE++ (Hu, 2025, arXiv 2501.03262): discounted returns, whitened over all generated tokens of the batch."""
    returns = _returns(batch, options.gamma)
    return _result(batch, batch.whiten(returns), returns)


@advantage(
    "reinforce_plus_plus_baseline",
    "reward minus the mean of the prompt's samples, whitened over the batch",
    needs=Needs(groups=True),
    whitened=True,
)
def reinforce_plus_plus_baseline(batch: RewardedBatch, options: NoOptions) -> Advantages:
    """REINFORCE++ with a group baseline (Hu, 2025, arXiv 2501.03262): `R - mean_g`, whitened over the batch's tokens.

    The whitening counts tokens, so long trajectories weigh more in its statistics.
    """
    advantages = batch.whiten(ragged.expand(batch.centered_rewards, batch.offsets))
    return _result(batch, advantages, advantages)


@advantage(
    "remax",
    "reward minus that of a greedy answer to the same prompt",
    needs=Needs(greedy_baseline=True, whole_batch=False),
)
def remax(batch: RewardedBatch, options: NoOptions) -> Advantages:
    """ReMax (Li et al., 2023, arXiv 2310.10505): rewards from here on, undiscounted, minus the greedy answer's."""
    if batch.baselines is None:
        raise ValueError("remax needs the rewards of greedy answers (baselines), and this batch has none")
    returns = _returns(batch, 1.0)
    return _result(batch, returns - ragged.expand(batch.baselines.double(), batch.offsets), returns)


@dataclass(frozen=True)
class DistillOptions:
    task_weight: Annotated[float, Ge(0)] = 0.0
    """Weight of the task's rewards beside the teacher: of their advantage as in grpo. 0: the teacher alone."""


@advantage(
    "distill",
    "the teacher's log-prob of the token minus the policy's own",
    options=DistillOptions,
    needs=Needs(teacher=True, whole_batch=False),
)
def distill(batch: RewardedBatch, options: DistillOptions) -> Advantages:
    """On-policy distillation (Agarwal et al., 2023, arXiv 2306.13649; Lu et al., 2025): `log p_teacher - log p`, token
    by token, without discount. Its mean over samples of the policy is minus the reverse KL to the teacher, and its
    policy gradient that KL's gradient, but for what later tokens would add.
    """
    if batch.teacher_lead is None:
        raise ValueError("distill needs a teacher's log-probs (teacher_lead), and this batch has none")
    advantages = batch.teacher_lead.double()
    if options.task_weight:
        task = batch.normalized_rewards
        advantages = advantages + options.task_weight * ragged.expand(task, batch.offsets)
    return _result(batch, advantages, advantages)


@advantage("opo", "reward minus the length-weighted mean of the prompt's samples", needs=BY_GROUP)
def opo(batch: RewardedBatch, options: NoOptions) -> Advantages:
    """OPO (Hao et al., 2025, arXiv 2505.23585): R minus the group's mean reward weighted by length.

    Lengths are in generated tokens: the variance-optimal baseline when a gradient's norm grows with its length.
    """
    lengths, present = ragged.segment_count(batch.mask, batch.offsets), batch.has_tokens
    weighted = ragged.group_sum(lengths * batch.rewards, present, batch.groups)
    return _per_sequence(
        batch, batch.rewards - weighted / ragged.group_sum(lengths, present, batch.groups).clamp(min=1)
    )


@advantage(
    "gpg",
    "reward minus the mean of the prompt's samples, scaled up to make up for zero-variance groups",
    needs=Needs(groups=True),
)
def gpg(batch: RewardedBatch, options: NoOptions) -> Advantages:
    """GPG (Chu et al., 2025, arXiv 2504.02546): `alpha * (R - mean_g)`, with F_norm = 1.

    alpha = samples / samples in groups whose rewards differ: the batch's mean is diluted by groups that have no
    gradient, and alpha undoes that. (verl counts samples with a reward other than 0 instead, which is not the paper's
    and depends on where rewards have their zero.)
    """
    present = batch.whole.has_tokens
    informative = present & (ragged.group_range(batch.rewards, present, batch.groups) > 0)
    alpha = present.sum() / informative.sum().clamp(min=1)
    return _per_sequence(batch, alpha * batch.centered_rewards)


@advantage("grpo_passk", "only the prompt's best sample counts, by its lead over the second best", needs=BY_GROUP)
def grpo_passk(batch: RewardedBatch, options: NoOptions) -> Advantages:
    """GRPO for pass@k: the group's best sample gets `(R_best - R_second) / (std_g + 1e-6)`, all others 0.

    Only what raises the best of k is reinforced, as in verl's `grpo_passk` (after Tang et al., 2025, arXiv 2503.19595).
    Two equally good best samples: 0 for both.
    """
    totals, present = batch.rewards, batch.has_tokens
    ranked = totals.masked_fill(~present, -torch.inf).argsort(descending=True, stable=True)
    ranked = ranked[batch.groups[ranked].argsort(stable=True)]  # Group after group, each from best to worst.
    groups = batch.groups[ranked]
    is_best = torch.ones_like(groups, dtype=torch.bool)
    is_best[1:] = groups[1:] != groups[:-1]
    has_second = torch.zeros_like(is_best)
    has_second[:-1] = ~is_best[1:] & present[ranked[1:]]
    best = (is_best & has_second).nonzero().squeeze(1)
    margins = torch.zeros_like(totals)
    margins[ranked[best]] = totals[ranked[best]] - totals[ranked[best + 1]]
    return _per_sequence(batch, margins / (batch.reward_std + EPSILON))


@advantage(
    "turn_grpo",
    "reward from a turn on, minus the mean of the same turn of the prompt's samples, over their deviation",
    options=TurnOptions,
    needs=Needs(groups=True, turns=True, whole_batch=False),
)
def turn_grpo(batch: RewardedBatch, options: TurnOptions) -> Advantages:
    """GRPO turn by turn: the return from a turn on, against the same turn of the prompt's other samples.

    `G_t = r_t + turn_gamma * G_(t+1)`; the advantage of every token of turn t is `(G_t - mean) / (std + 1e-6)`, with
    the mean and the deviation (n - 1) over the t-th turns of the group's samples. Credit goes to the turn that earned
    it, and with a discount the shorter of two ways is the better one.
    """
    turns = _turns(batch)
    returns = _turn_returns(batch, turns, options.turn_gamma)
    first = torch.searchsorted(turns.rows, turns.rows)  # of the same trajectory
    place = torch.arange(len(turns.rows), device=turns.rows.device) - first
    return _per_turn(batch, turns, _against(returns, batch.groups[turns.rows], place), returns)


@advantage(
    "gigpo",
    "GRPO's, plus the same for turns that the prompt's samples took in the same state",
    options=GigpoOptions,
    needs=Needs(groups=True, turns=True, whole_batch=False),
)
def gigpo(batch: RewardedBatch, options: GigpoOptions) -> Advantages:
    """GiGPO (Feng et al., 2025, arXiv 2505.10978): trajectories against each other, and turns taken in the same state.

    `A = A_trajectory + turn_weight * A_turn`. The first is GRPO's. The second compares `G_t` (as in `turn_grpo`) with
    those of all turns of the group's samples that were taken in the same state; a state met once says nothing (0).
    """
    turns = _turns(batch)
    returns = _turn_returns(batch, turns, options.turn_gamma)
    by_state = _against(returns, batch.groups[turns.rows], turns.states)
    whole = batch.normalized_rewards
    return _per_turn(batch, turns, whole[turns.rows] + options.turn_weight * by_state, returns)


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
    """Each turn's return minus the mean of those with the same group and key, over their deviation; 0 if alone."""
    _, peers = torch.unique(torch.stack([groups, keys]), dim=1, return_inverse=True)
    everyone = torch.ones_like(peers, dtype=torch.bool)
    centered = returns - ragged.group_mean(returns, everyone, peers)
    return centered / (ragged.group_std(returns, everyone, peers) + EPSILON)


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


# --- what happens to rewards before they become advantages, and to groups whose rewards have no variance


@dataclass(frozen=True)
class ShapedResponses:
    """What a shaping sees of the trajectories of a batch."""

    lengths: Tensor
    """[N] generated tokens."""
    max_tokens: int
    """The limit of a response."""


@dataclass(frozen=True)
class OverlongOptions:
    buffer_tokens: Annotated[int, Gt(0)] = 4096
    """Tokens before the limit in which the penalty grows from 0."""
    penalty: Annotated[float, Gt(0)] = 1.0
    """Penalty at the limit."""


@reward_shaping("none", "rewards as they are")
def no_shaping(responses: ShapedResponses, options: NoOptions) -> Tensor:
    return torch.zeros(len(responses.lengths))


@reward_shaping(
    "overlong",
    "up to `penalty` off the reward of a response that ends in the last `buffer_tokens` before the limit",
    options=OverlongOptions,
)
def overlong_penalty(responses: ShapedResponses, options: OverlongOptions) -> Tensor:
    """Yu et al., 2025, arXiv 2503.14476 (DAPO).

    0 up to `max_tokens - buffer_tokens` generated tokens, from there falling linearly to `-penalty` at `max_tokens`.
    """
    if options.buffer_tokens > responses.max_tokens:
        raise ValueError(
            f"the buffer of {options.buffer_tokens} tokens must be within the limit of {responses.max_tokens} tokens"
        )
    excess = responses.lengths - (responses.max_tokens - options.buffer_tokens)
    return -options.penalty * (excess / options.buffer_tokens).clamp(0, 1)


def clipped_rewards(token_rewards: Tensor, mask: Tensor, offsets: Tensor, bound: float) -> Tensor:
    """[T]: each trajectory's rewards, scaled such that their sum is within [-bound, bound].

    In float64, and a lone reward becomes the bound itself: rewards that are clipped to the same number must have no
    spread, since GRPO divides by it.
    """
    totals = ragged.segment_sum(token_rewards.double(), mask, offsets)
    is_beyond = ragged.expand(totals.abs() > bound, offsets)
    fractions = token_rewards.double() / ragged.expand(totals.abs(), offsets)
    return torch.where(is_beyond, fractions * bound, token_rewards.double())


def with_lone_rewards(advantages: Tensor, batch: RewardedBatch) -> Tensor:
    """[T]: the advantages, but a trajectory that is alone in its group has its reward, as in verl."""
    is_lone = ragged.group_count(batch.has_tokens, batch.groups) == 1
    own = ragged.expand(batch.rewards, batch.offsets).to(advantages.dtype)
    return torch.where(ragged.expand(is_lone, batch.offsets) & batch.mask, own, advantages)


def informative_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """[N] bool: whether the rewards in the trajectory's group differ. If not, every advantage is 0.

    DAPO's dynamic sampling (arXiv 2503.14476) drops the others; a group of one is among them.
    """
    return ragged.group_range(rewards, torch.ones_like(groups, dtype=torch.bool), groups) > 0
