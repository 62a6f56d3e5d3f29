import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from ragged_lists import Ragged, Rows, assert_rows, mean, numbers, quick, ragged

from corral.algorithms.advantages import ADVANTAGES, Advantages, RewardedBatch, Turns, compute_advantages
from corral.algorithms.declarations import AdvantageDeclaration, AlgorithmPart, Needs, NoOptions, with_options

COMPARING = [name for name, declared in ADVANTAGES.items() if declared.needs.groups and not declared.whitened]


def estimate(name: str, batch: RewardedBatch, **options: float) -> Advantages:
    known = ADVANTAGES[name].option_names
    part = with_options(ADVANTAGES[name], **{key: value for key, value in options.items() if key in known})
    return compute_advantages(part, batch)


Reference = Callable[[Ragged, float, float], tuple[Rows, Rows]]


def group_baseline(advantage: Callable[[list[float], list[int], int], float]) -> Reference:
    """From "the group's rewards, their lengths and my place among them" to rows of advantages."""

    def reference(batch: Ragged, gamma: float, gae_lambda: float) -> tuple[Rows, Rows]:
        rewards = batch.generated(batch.columns[0])
        rows = []
        for i, row in enumerate(rewards):
            members = [j for j, group in enumerate(batch.groups) if group == batch.groups[i] and rewards[j]]
            if i in members:
                totals, lengths = [sum(rewards[j]) for j in members], [len(rewards[j]) for j in members]
                rows.append([advantage(totals, lengths, members.index(i))] * len(row))
            else:
                rows.append([])
        return rows, rows

    return reference


def std(values: Sequence[float]) -> float:
    return math.sqrt(sum((x - mean(values)) ** 2 for x in values) / max(len(values) - 1, 1))


def best_only(totals: list[float], lengths: list[int], i: int) -> float:
    if len(totals) < 2 or totals.index(max(totals)) != i:
        return 0.0
    best, second = sorted(totals, reverse=True)[:2]
    return (best - second) / (std(totals) + 1e-6)


def leave_one_out(totals: list[float], lengths: list[int], i: int) -> float:
    return totals[i] - mean(totals[:i] + totals[i + 1 :]) if len(totals) > 1 else 0.0


def returns_to_go(rewards: Rows, gamma: float) -> Rows:
    return [[sum(gamma**k * r for k, r in enumerate(row[t:])) for t in range(len(row))] for row in rewards]


def whitened(rows: Rows) -> Rows:
    tokens = [x for row in rows for x in row]
    variance = sum((x - mean(tokens)) ** 2 for x in tokens) / (len(tokens) - 1)
    return [[(x - mean(tokens)) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def slow_gae(batch: Ragged, gamma: float, gae_lambda: float) -> tuple[Rows, Rows]:
    """The recursion as it is written down: over all tokens, carrying everything where a token was not generated."""
    advantages, returns = [], []
    for rewards, values, mask in zip(batch.columns[0], batch.columns[1], batch.masks, strict=True):
        advantage, next_value, row = 0.0, 0.0, []
        for t in reversed(range(len(mask))):
            if mask[t]:
                advantage = rewards[t] + gamma * next_value - values[t] + gamma * gae_lambda * advantage
                next_value = values[t]
                row.insert(0, (advantage, advantage + values[t]))
        advantages.append([a for a, _ in row])
        returns.append([r for _, r in row])
    return whitened(advantages), returns


def slow_reinforce(batch: Ragged, gamma: float, gae_lambda: float) -> tuple[Rows, Rows]:
    returns = returns_to_go(batch.generated(batch.columns[0]), gamma)
    return returns, returns


def slow_reinforce_plus_plus(batch: Ragged, gamma: float, gae_lambda: float) -> tuple[Rows, Rows]:
    returns = returns_to_go(batch.generated(batch.columns[0]), gamma)
    return whitened(returns), returns


def slow_reinforce_plus_plus_baseline(batch: Ragged, gamma: float, gae_lambda: float) -> tuple[Rows, Rows]:
    rows = whitened(REFERENCES["dr_grpo"](batch, gamma, gae_lambda)[0])
    return rows, rows


def slow_remax(batch: Ragged, gamma: float, gae_lambda: float) -> tuple[Rows, Rows]:
    returns = returns_to_go(batch.generated(batch.columns[0]), 1.0)
    return [[x - greedy_reward(i) for x in row] for i, row in enumerate(returns)], returns


def slow_gpg(batch: Ragged, gamma: float, gae_lambda: float) -> tuple[Rows, Rows]:
    rewards = batch.generated(batch.columns[0])
    totals = {i: sum(row) for i, row in enumerate(rewards) if row}
    useful = [i for i in totals if any(totals[i] != totals[j] for j in totals if batch.groups[j] == batch.groups[i])]
    alpha = len(totals) / max(len(useful), 1)
    rows = [[alpha * x for x in row] for row in REFERENCES["dr_grpo"](batch, gamma, gae_lambda)[0]]
    return rows, rows


def greedy_reward(i: int) -> float:
    return 0.25 * i


REFERENCES: dict[str, Reference] = {
    "gae": slow_gae,
    "grpo": group_baseline(lambda totals, lengths, i: (totals[i] - mean(totals)) / (std(totals) + 1e-6)),
    "dr_grpo": group_baseline(lambda totals, lengths, i: totals[i] - mean(totals)),
    "rloo": group_baseline(leave_one_out),
    "reinforce": slow_reinforce,
    "reinforce_plus_plus": slow_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": slow_reinforce_plus_plus_baseline,
    "remax": slow_remax,
    "opo": group_baseline(
        lambda totals, lengths, i: totals[i] - sum(map(float.__mul__, totals, map(float, lengths))) / sum(lengths)
    ),
    "gpg": slow_gpg,
    "grpo_passk": group_baseline(best_only),
}

rewarded = ragged(lambda random: random.choice([0.0, 0.0, 0.5, 1.0, -0.25]), numbers)
"""Rewards that are often equal, and values."""


def rewarded_batch(batch: Ragged, columns: list[torch.Tensor]) -> RewardedBatch:
    rewards, values = columns
    baselines = torch.tensor([greedy_reward(i) for i in range(len(batch.masks))], dtype=torch.float64)
    return RewardedBatch(rewards, batch.mask, batch.offsets, torch.tensor(batch.groups), values, baselines)


def outcome_batch(rewards: list[float], groups: list[int] | None = None) -> RewardedBatch:
    """One token per trajectory."""
    num = len(rewards)
    return RewardedBatch(
        token_rewards=torch.tensor(rewards, dtype=torch.float64),
        mask=torch.ones(num, dtype=torch.bool),
        offsets=torch.arange(num + 1),
        groups=torch.tensor(groups or [0] * num),
    )


@pytest.mark.parametrize("name", REFERENCES)
@quick
@given(batch=rewarded, gamma=st.sampled_from([1.0, 0.9]), gae_lambda=st.sampled_from([1.0, 0.95]))
def test_estimators_match_lists_whatever_stands_on_other_tokens(
    name: str, batch: Ragged, gamma: float, gae_lambda: float
) -> None:
    assume(not ADVANTAGES[name].whitened or batch.num_generated >= 2)
    result = estimate(name, rewarded_batch(batch, batch.poisoned()), gamma=gamma, gae_lambda=gae_lambda)
    advantages, returns = REFERENCES[name](batch, gamma, gae_lambda)
    assert_rows(result.advantages, batch.spread(advantages), 1e-7)
    assert_rows(result.returns, batch.spread(returns), 1e-7)


Turn = tuple[int, list[int], int]
"""Trajectory, places of its generated tokens, state."""


def turns_of(batch: Ragged, random: Random) -> list[Turn]:
    """Runs of generated tokens, in states of which there are three."""
    turns: list[Turn] = []
    for row, mask in enumerate(batch.masks):
        for place, generated in enumerate(mask):
            if generated and (place == 0 or not mask[place - 1]):
                turns.append((row, [], random.randrange(3)))
            if generated:
                turns[-1][1].append(place)
    return turns


def turn_reference(batch: Ragged, turns: list[Turn], gamma: float, by: Callable[[int], object]) -> tuple[Rows, Rows]:
    """Advantages and returns of each turn against those of its group's for which `by` is the same."""
    rewards = [sum(batch.columns[0][row][place] for place in places) for row, places, _ in turns]
    returns = [
        sum(
            gamma**later * r
            for later, r in enumerate(r for r, t in zip(rewards[i:], turns[i:], strict=True) if t[0] == turns[i][0])
        )
        for i in range(len(turns))
    ]
    advantages = []
    for i, (row, _, _) in enumerate(turns):
        peers = [
            returns[j]
            for j, (other, _, _) in enumerate(turns)
            if batch.groups[other] == batch.groups[row] and by(j) == by(i)
        ]
        advantages.append((returns[i] - mean(peers)) / (std(peers) + 1e-6))
    return per_token(batch, turns, advantages), per_token(batch, turns, returns)


def per_token(batch: Ragged, turns: list[Turn], numbers: list[float]) -> Rows:
    rows = [[0.0] * len(mask) for mask in batch.masks]
    for (row, places, _), number in zip(turns, numbers, strict=True):
        for place in places:
            rows[row][place] = number
    return rows


def with_turns(batch: Ragged, random: Random) -> RewardedBatch:
    starts = batch.offsets.tolist()
    turns = [(starts[row] + places[-1], row, state) for row, places, state in turns_of(batch, random)]
    columns = torch.tensor(turns, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return replace(rewarded_batch(batch, batch.poisoned()), turns=Turns(*(column.contiguous() for column in columns)))


@pytest.mark.parametrize("name", ["turn_grpo", "gigpo"])
@quick
@given(batch=rewarded, gamma=st.sampled_from([1.0, 0.9]), seed=st.integers(0, 2**32))
def test_turns_are_compared_with_their_peers(name: str, batch: Ragged, gamma: float, seed: int) -> None:
    turns, tensors = turns_of(batch, Random(seed)), with_turns(batch, Random(seed))
    rows = [row for row, _, _ in turns]
    place = [sum(1 for earlier in rows[:i] if earlier == row) for i, row in enumerate(rows)]
    if name == "turn_grpo":
        result = estimate(name, tensors, turn_gamma=gamma)
        advantages, returns = turn_reference(batch, turns, gamma, lambda i: place[i])
    else:
        result = estimate(name, tensors, turn_gamma=gamma, turn_weight=0.5)
        by_state, returns = turn_reference(batch, turns, gamma, lambda i: turns[i][2])
        whole = batch.spread(REFERENCES["grpo"](batch, 1.0, 1.0)[0])
        advantages = [[a + 0.5 * s for a, s in zip(*pair, strict=True)] for pair in zip(whole, by_state, strict=True)]
    assert_rows(result.advantages, advantages, 1e-7)
    assert_rows(result.returns, returns, 1e-7)


def test_gigpo_prefers_the_action_that_paid_where_two_trajectories_met() -> None:
    """Both win; one of them loses a turn by walking into a wall, and is in the first state twice."""
    batch = RewardedBatch(
        token_rewards=torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0]),
        mask=torch.ones(5, dtype=torch.bool),
        offsets=torch.tensor([0, 2, 5]),
        groups=torch.tensor([0, 0]),
        turns=Turns(torch.arange(5), torch.tensor([0, 0, 1, 1, 1]), torch.tensor([7, 8, 7, 7, 8])),
    )
    direct, last, wall, again, last_too = estimate("gigpo", batch, turn_gamma=0.5).advantages.tolist()
    assert direct == again > 0 > wall
    assert last == last_too == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5 / (1 + 2e-6), -0.5 / (1 + 2e-6), -0.5 / (1 + 2e-6), -0.5 / (1 + 2e-6)]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("grpo_passk", [2 / (1 + 2e-6), 0.0, 0.0, 0.0]),
        ("opo", [0.75, -0.25, -0.25, -0.25]),
        ("gpg", [0.75, -0.25, -0.25, -0.25]),
        ("reinforce", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_one_success_in_four(name: str, expected: list[float]) -> None:
    assert estimate(name, outcome_batch([1, 0, 0, 0])).advantages.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", COMPARING)
def test_a_sample_alone_in_its_group_teaches_nothing(name: str) -> None:
    advantages = estimate(name, outcome_batch([1.0, 1.0, 0.0], [5, 7, 7])).advantages
    assert advantages[0] == 0
    assert advantages[1] > 0


@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_teach_exactly_nothing(name: str) -> None:
    batch = outcome_batch([0.1] * 7)
    batch = replace(batch, token_rewards=batch.token_rewards.float())
    assert estimate(name, batch).advantages.abs().max() == 0


def test_what_an_estimator_needs_is_asked_for() -> None:
    batch = outcome_batch([1.0, 0.0])
    with pytest.raises(ValueError, match="critic"):
        estimate("gae", batch)
    with pytest.raises(ValueError, match="greedy"):
        estimate("remax", batch)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_results_have_the_dtype_of_the_rewards(name: str) -> None:
    batch = outcome_batch([1.0, 0.0, 0.5])
    rewards = batch.token_rewards.float()
    batch = replace(batch, token_rewards=rewards, values=rewards, baselines=rewards, teacher_lead=rewards)
    assert estimate(name, batch).advantages.dtype == torch.float32


def test_gae_is_fast_on_a_large_batch() -> None:
    lengths = torch.randint(512, 1025, (512,), generator=torch.Generator().manual_seed(0))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    tokens = torch.rand(int(offsets[-1]), generator=torch.Generator().manual_seed(1))
    batch = RewardedBatch(tokens, tokens > 0.2, offsets, torch.arange(512) // 8, values=tokens)
    start = time.process_time()
    estimate("gae", batch, gamma=0.99, gae_lambda=0.95)
    assert time.process_time() - start < 2  # takes 0.05 s


# --- an estimator sees what it declared


@pytest.mark.parametrize("name", [name for name, declared in ADVANTAGES.items() if not declared.needs.whole_batch])
@quick
@given(batch=rewarded, seed=st.integers(0, 2**32))
def test_an_estimator_declared_to_work_group_by_group_gives_the_same_bits_for_a_group_alone(
    name: str, batch: Ragged, seed: int
) -> None:
    tensors = with_turns(batch, Random(seed))
    tensors = replace(tensors, teacher_lead=tensors.token_rewards)
    together = estimate(name, tensors)
    own = replace(ADVANTAGES[name], name=f"file.py:{name}")  # one that is not built in is handed group after group
    alone = compute_advantages(AlgorithmPart(own, own.options()), tensors)
    assert torch.equal(together.advantages, alone.advantages)
    assert torch.equal(together.returns, alone.returns)


@pytest.mark.parametrize("name", [name for name, declared in ADVANTAGES.items() if declared.needs.whole_batch])
@pytest.mark.parametrize("origin", ["", "file.py:"])
def test_a_statistic_over_the_batch_is_refused_where_it_was_not_declared(name: str, origin: str) -> None:
    """Of the user's own estimators too, which are handed one group at a time."""
    batch = outcome_batch([1.0, 0.0, 0.5, 1.0], [0, 0, 1, 1])
    batch = replace(batch, values=batch.token_rewards)
    declared = ADVANTAGES[name]
    wrong = replace(declared, name=origin + name, needs=replace(declared.needs, whole_batch=False))
    with pytest.raises(ValueError, match=r"declare it with Needs\(whole_batch=True\)"):
        compute_advantages(AlgorithmPart(wrong, wrong.options()), batch)


def seen_by(needs: Needs) -> RewardedBatch:
    seen: list[RewardedBatch] = []

    def function(batch: RewardedBatch, options: NoOptions) -> Advantages:
        seen.append(batch)
        return Advantages(batch.token_rewards, batch.token_rewards)

    batch = outcome_batch([1.0, 0.0])
    given = batch.token_rewards
    full = replace(batch, values=given, baselines=given, teacher_lead=given)
    compute_advantages(with_options(AdvantageDeclaration("advantage", "", "", function, needs=needs)), full)
    return seen[0]


def test_what_was_not_declared_is_not_handed_over() -> None:
    assert seen_by(Needs()).values is seen_by(Needs()).baselines is None
    assert seen_by(Needs(critic=True)).values is not None
    assert seen_by(Needs(greedy_baseline=True)).baselines is not None


def test_an_estimator_may_return_one_number_for_each_trajectory() -> None:
    declared = AdvantageDeclaration("advantage", "", "", lambda batch, options: batch.rewards)
    batch = RewardedBatch(
        token_rewards=torch.tensor([0.0, 2.0, 0.0, 1.0]),
        mask=torch.tensor([True, True, False, True]),
        offsets=torch.tensor([0, 2, 4]),
        groups=torch.tensor([0, 1]),
    )
    assert compute_advantages(with_options(declared), batch).advantages.tolist() == [2.0, 2.0, 0.0, 1.0]


def test_an_estimator_with_a_critic_says_what_to_train_it_on() -> None:
    declared = AdvantageDeclaration("advantage", "", "", lambda batch, options: batch.rewards, needs=Needs(critic=True))
    with pytest.raises(TypeError, match="must return Advantages"):
        compute_advantages(with_options(declared), outcome_batch([1.0, 0.0]))
