"""Losses of migrated recipes against the other systems' own formulas, restated here in plain Python.

Sources: verl 1dda039 (`verl/trainer/ppo/core_algos.py`, `rollout_corr_helper.py`), ROLL 8eb27cc
(`roll/utils/functionals.py`).
"""

import math
import random

import numpy as np
import pytest
import torch
from foreign import read

from corral.algorithms.advantages import RewardedBatch, compute_advantages
from corral.algorithms.corrections import correction_weights
from corral.algorithms.losses import GlobalCounts
from corral.data.batch import Batch, Pack
from corral.migrate.config_sources import table_of
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.runtime.model_workers import LossStats, UpdateTerms, policy_loss_of

LENGTHS = (3, 5, 1, 4)
"""Generated tokens of each trajectory, behind a prompt of one token."""
VERL = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "data.train_batch_size=4")
CORRECTION = "algorithm.rollout_correction"


class Numbers:
    """Log-probs of the policy, of the old policy and of the engine, and advantages, by trajectory and token."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.engine = [[-chance.uniform(0.1, 3) for _ in range(length)] for length in LENGTHS]
        self.old = [[one + chance.gauss(0, 0.5) for one in row] for row in self.engine]
        self.new = [[min(one + chance.gauss(0, 0.7), -0.01) for one in row] for row in self.old]
        self.old = [[min(one, -0.01) for one in row] for row in self.old]
        self.advantages = [[chance.gauss(0, 1)] * length for length in LENGTHS]

    def tokens(self) -> list[tuple[int, float, float, float, float]]:
        """Each token's trajectory, and its log-probs and advantage."""
        rows = zip(self.new, self.old, self.engine, self.advantages, strict=True)
        return [(row, *token) for row, columns in enumerate(rows) for token in zip(*columns, strict=True)]


def flat(rows: list[list[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in (0.0, *row)], np.float32)


def our_loss(algorithm: ResolvedAlgorithm, numbers: Numbers) -> float:
    """The loss of one update, as the workers compute it."""
    offsets = np.cumsum([0, *(length + 1 for length in LENGTHS)])
    generated = np.ones(offsets[-1], bool)
    generated[offsets[:-1]] = False
    engine, size = flat(numbers.engine), offsets[-1]
    batch = Batch(
        tokens=np.arange(size),
        generated=generated,
        logprobs=engine,
        versions=np.zeros(size, int),
        token_rewards=np.zeros(size, np.float32),
        offsets=offsets,
        groups=np.zeros(len(LENGTHS), int),
        is_masked=np.zeros(len(LENGTHS), bool),
    )
    old = engine if algorithm.old_logprobs == "engine" else flat(numbers.old)
    batch.columns = {"old_logprobs": old, "advantages": flat(numbers.advantages)}
    mask, ends = torch.from_numpy(generated), torch.from_numpy(offsets)
    if algorithm.correction.name != "none":
        found = correction_weights(algorithm.correction, torch.from_numpy(old), torch.from_numpy(engine), mask, ends)
        batch.columns["correction"] = found.weights.numpy()
        batch.columns["counted"] = found.counted.numpy().astype(np.float32)
    counts = GlobalCounts(int(batch.counted.sum()), len(LENGTHS))
    pack, new = Pack(batch, tuple(range(len(LENGTHS)))), torch.from_numpy(flat(numbers.new))
    terms = UpdateTerms(counts, preserved=0, kl_coefficient=0.0)
    return float(policy_loss_of(algorithm, pack, terms, LossStats(), new, torch.zeros_like(new)))


def algorithm_of(system: str, *overrides: str) -> ResolvedAlgorithm:
    return resolve_algorithm(read(table_of(system), *overrides).recipe)


def clipped(new: float, old: float, advantage: float, low: float = 0.2, high: float = 0.2, dual: float = 3.0) -> float:
    ratio = math.exp(new - old)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * dual) if advantage < 0 else loss


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("option", "aggregation"), [("token_k1", "token-mean"), ("seq_sum_k1", "seq-mean-token-mean")])
def test_verl_rejects_by_the_inverse_ratio_and_does_not_count_what_it_rejects(
    seed: int, option: str, aggregation: str
) -> None:
    numbers = Numbers(seed)
    words = [f"{CORRECTION}.rollout_rs={option}", f"{CORRECTION}.rollout_rs_threshold=0.6_1.4"]
    ours = our_loss(
        algorithm_of("verl", *VERL, *words, f"actor_rollout_ref.actor.loss_agg_mode={aggregation}"), numbers
    )
    k1 = [
        [engine - old for engine, old in zip(*row, strict=True)]
        for row in zip(numbers.engine, numbers.old, strict=True)
    ]
    judged = k1 if option == "token_k1" else [[sum(row)] * len(row) for row in k1]
    keep = [[math.log(0.6) <= one <= math.log(1.4) for one in row] for row in judged]
    losses = [
        [clipped(*token) for token, kept in zip(zip(*columns, strict=True), kept_row, strict=True) if kept]
        for *columns, kept_row in zip(numbers.new, numbers.old, numbers.advantages, keep, strict=True)
    ]
    assert any(len(row) < length for row, length in zip(losses, LENGTHS, strict=True))
    if aggregation == "token-mean":
        theirs = sum(map(sum, losses)) / max(sum(map(len, losses)), 1)
    else:
        theirs = sum(sum(row) / max(len(row), 1) for row in losses) / len(losses)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_ratio_of_dppo_is_capped_at_three_as_verl_does(kind: str) -> None:
    numbers, total = Numbers(2), 0.0
    words = (
        f"actor_rollout_ref.actor.policy_loss.loss_mode=dppo_{kind}",
        "actor_rollout_ref.actor.clip_ratio_low=0.15",
    )
    ours = our_loss(algorithm_of("verl", *VERL, *words, "actor_rollout_ref.actor.clip_ratio_high=0.15"), numbers)
    ratios = [math.exp(new - old) for _, new, old, *_ in numbers.tokens()]
    assert any(3 < ratio < 20 for ratio in ratios)
    for _, new, old, _, advantage in numbers.tokens():
        p, q = math.exp(new), math.exp(old)
        moved = abs(p - q) if kind == "tv" else q * (old - new) + (1 - q) * math.log((1 - q) / (1 - p))
        is_valid = moved <= 0.15 or (p <= q if advantage > 0 else p >= q)
        total += -advantage * min(math.exp(new - old), 3.0) * new * is_valid
    assert ours == pytest.approx(total / sum(LENGTHS), rel=1e-4)


def test_reinforce_in_bypass_mode_weighs_with_the_ratio_to_the_engine() -> None:
    numbers = Numbers(2)
    words = [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=token"]
    ours = our_loss(algorithm_of("verl", *VERL, *words, f"{CORRECTION}.rollout_is_threshold=1.5"), numbers)
    terms = [-min(math.exp(new - engine), 1.5) * a * new for _, new, _, engine, a in numbers.tokens()]
    assert ours == pytest.approx(sum(terms) / sum(LENGTHS), rel=1e-5)


def test_old_log_probs_are_computed_again_where_the_other_system_does() -> None:
    assert algorithm_of("verl", *VERL).old_logprobs == "recompute"
    assert algorithm_of("search_r1", "algorithm.adv_estimator=gae").old_logprobs == "recompute"
    one, several = "actor_train.training_args.gradient_accumulation_steps=128", "rollout_batch_size=128"
    assert algorithm_of("roll", several).old_logprobs == "recompute"
    written = ("actor_infer.strategy_args.strategy_name=hf", one, several)
    assert algorithm_of("roll", *written).old_logprobs == "engine"


def test_rolls_norm_is_a_sum_over_trajectories() -> None:
    numbers, batch = Numbers(3), "actor_train.training_args.per_device_train_batch_size=2"
    words = ("rollout_batch_size=4", "num_return_sequences_in_group=2", "loss_agg_mode=seq-mean-token-sum-norm")
    times = "actor_train.training_args.gradient_accumulation_steps=2"  # 4 of the step's 8 trajectories in an update
    lengths = ("sequence_length=100", "prompt_length=50", "adv_estimator=grpo")
    files = ("actor_train.data_args.file_name=a.jsonl", "actor_train.data_args.dataset_type=json")
    ours = our_loss(algorithm_of("roll", *words, *lengths, *files, batch, times), numbers)
    terms = [clipped(new, old, advantage, dual=math.inf) for _, new, old, _, advantage in numbers.tokens()]
    assert ours == pytest.approx(sum(terms) / 100, rel=1e-5)


@pytest.mark.parametrize("whitens", [True, False])
def test_roll_whitens_advantages_of_a_critic_only_where_it_is_told(whitens: bool) -> None:
    algorithm = algorithm_of("roll", "adv_estimator=gae", f"whiten_advantages={whitens}", "lambd=0.9", "gamma=1")
    values, rewards = [0.5, 0.4, 0.3, 0.1], [0.0, 0.0, 1.0, -1.0]
    offsets, mask = torch.tensor([0, 3, 4]), torch.ones(4, dtype=torch.bool)
    found = compute_advantages(
        algorithm.advantage,
        RewardedBatch(torch.tensor(rewards), mask, offsets, torch.arange(2), values=torch.tensor(values)),
    ).advantages
    third = 1 - 0.3
    second = 0.3 - 0.4 + 0.9 * third
    theirs = torch.tensor([0.4 - 0.5 + 0.9 * second, second, third, -1.1], dtype=torch.float64)
    if whitens:
        theirs = (theirs - theirs.mean()) / theirs.std()
    assert torch.allclose(found.double(), theirs, atol=1e-5)
