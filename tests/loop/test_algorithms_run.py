"""Every algorithm, and every option of one, goes through the same loop."""

import re
from pathlib import Path
from typing import get_args

import pytest
from runs import steps_here, train_here

from corral.observe.trajectories import read_trajectories
from corral.recipe.errors import RunError
from corral.recipe.schema import AlgorithmName

RARE = ("environment.reward.name=regex", "environment.reward.options.pattern=a|e|i|o|u", "batch.samples_per_prompt=2")
"""A reward that the random model earns about every other time: many groups of two have equal rewards."""
NEVER = ("environment.reward.name=regex", "environment.reward.options.pattern=nothing like it")


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_algorithm_trains(tmp_path: Path, tiny_model: Path, name: str) -> None:
    steps = steps_here(tmp_path, tiny_model, f"algorithm.name={name}")
    assert [row["updates/made"] for row in steps] == [1, 1]
    assert all(row["policy/gradient_norm"] > 0 for row in steps)


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo"])
def test_several_updates_and_passes(tmp_path: Path, tiny_model: Path, name: str) -> None:
    overrides = ("batch.updates_per_step=3", "batch.passes=2", "optimiser.learning_rate=0.003")
    steps = steps_here(tmp_path, tiny_model, f"algorithm.name={name}", *overrides)
    assert [row["updates/made"] + row["updates/empty"] for row in steps] == [6, 6]
    assert all(row["policy/ratio_deviation"] > 1e-3 for row in steps)  # the later updates are off-policy


def test_dynamic_sampling_plays_other_prompts_for_those_that_teach_nothing(tmp_path: Path, tiny_model: Path) -> None:
    steps = steps_here(tmp_path, tiny_model, "algorithm.name=dapo", *RARE, "schedule.steps=4")
    assert any(row.get("samples/dropped_groups", 0) > 0 for row in steps)
    assert any(row.get("samples/rounds", 1) > 1 for row in steps)
    assert [row["samples/trajectories"] for row in steps] == [8] * 4
    assert [row["samples/equal_groups"] for row in steps] == [0] * 4


def test_dynamic_sampling_goes_on_with_what_it_has_after_max_rounds(tmp_path: Path, tiny_model: Path) -> None:
    limit = "algorithm.dynamic_sampling.max_rounds=1"
    steps = steps_here(tmp_path, tiny_model, "algorithm.name=dapo", *RARE, limit)
    assert 0 < min(row["samples/trajectories"] for row in steps) < 8


def test_dynamic_sampling_says_so_when_nothing_teaches(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(RunError, match=re.escape("found no group with different rewards in 3 rounds")):
        steps_here(tmp_path, tiny_model, "algorithm.name=dapo", *NEVER, "algorithm.dynamic_sampling.max_rounds=3")


def test_a_step_that_teaches_nothing_changes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    steps = steps_here(tmp_path, tiny_model, *NEVER)
    assert [(row["updates/made"], row["updates/empty"]) for row in steps] == [(0, 1), (0, 1)]
    assert [row["samples/equal_groups"] for row in steps] == [1, 1]


def test_remax_compares_with_the_greedy_answer(tmp_path: Path, tiny_model: Path) -> None:
    """Of the random model that is a line break eight times, worth nothing: the advantage is the reward itself."""
    run = train_here(tmp_path, tiny_model, "algorithm.name=remax", "logging.trajectories=true", "schedule.steps=1")
    for record in read_trajectories(run / "trajectories" / "step_000001.jsonl.gz"):
        assert record["advantages"] == pytest.approx([record["reward"]] * len(record["advantages"]))


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_adaptive_kl_moves_its_coefficient(tmp_path: Path, tiny_model: Path, where: str) -> None:
    kl = (f"algorithm.kl.where={where}", "algorithm.kl.controller=adaptive", "algorithm.kl.horizon=20")
    target = ("algorithm.kl.target=1e-6", "algorithm.kl.estimator=k3")
    steps = steps_here(tmp_path, tiny_model, *kl, *target, "schedule.steps=4")
    coefficients = [row["kl/coefficient"] for row in steps]
    assert coefficients[0] == 0.001
    assert coefficients[1] < coefficients[0]  # at first the policy is the reference
    assert coefficients[3] > coefficients[2] > coefficients[1]  # and then farther from it than the target


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "icepop", "rejection"])
def test_correction_of_recomputed_log_probs(tmp_path: Path, tiny_model: Path, name: str) -> None:
    overrides = (f"algorithm.correction.name={name}", "algorithm.old_logprobs=recompute")
    for row in steps_here(tmp_path, tiny_model, *overrides):
        assert row["correction/ratio_mean"] == pytest.approx(1, abs=1e-5)  # the engine computes what the trainer does
        assert row["correction/dropped_fraction"] == 0
        assert row["updates/made"] == 1


def test_overlong_answers_are_penalised(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("algorithm.overlong.buffer_tokens=4", "algorithm.overlong.penalty=0.5")
    for row in steps_here(tmp_path, tiny_model, *overrides):
        assert -0.5 <= row["reward/overlong_penalty"] < -0.3  # nearly all answers of a random model are cut off
        assert row["reward/mean"] >= 0  # what is reported is what was earned


def test_entropy_bonus_keeps_the_policy_more_random(tmp_path: Path, tiny_model: Path) -> None:
    plain = steps_here(tmp_path, tiny_model, "schedule.steps=8")
    bonus = steps_here(tmp_path, tiny_model, "schedule.steps=8", "algorithm.entropy_coefficient=1")
    assert bonus[-1]["policy/entropy"] > plain[-1]["policy/entropy"]


def test_llds_is_felt_once_a_likelihood_falls(tmp_path: Path, tiny_model: Path) -> None:
    updates = ("batch.updates_per_step=2", "batch.passes=2", "schedule.steps=1")
    [plain] = steps_here(tmp_path, tiny_model, *updates)
    [llds] = steps_here(tmp_path, tiny_model, *updates, "algorithm.llds_coefficient=10")
    assert llds["reward/mean"] == plain["reward/mean"]
    assert llds["policy/loss"] > plain["policy/loss"]
