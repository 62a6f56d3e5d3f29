from typing import get_args

import pytest

from corral.recipe.presets import PRESETS, resolve_algorithm
from corral.recipe.schema import AlgorithmName


def test_every_algorithm_has_a_preset():
    assert set(PRESETS) == set(get_args(AlgorithmName))


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_every_algorithm_resolves(load, name):
    assert resolve_algorithm(load(f"algorithm.name={name}")).loss


def test_grpo_is_a_clipped_loss_on_group_advantages_without_kl(load):
    grpo = resolve_algorithm(load())
    assert (grpo.advantage, grpo.loss, grpo.aggregation) == ("grpo", "ppo", "token_mean")
    assert (grpo.clip_low, grpo.clip_high, grpo.dual_clip) == (0.2, 0.2, None)
    assert not any([grpo.needs_critic, grpo.needs_reference, grpo.needs_greedy_baseline, grpo.dynamic_sampling])


def test_ppo_has_a_critic_and_a_kl_in_the_reward(load):
    ppo = resolve_algorithm(load("algorithm.name=ppo"))
    assert ppo.needs_critic
    assert ppo.needs_reference
    assert (ppo.kl_where, ppo.kl_estimator, ppo.kl_coefficient, ppo.kl_controller) == ("reward", "k1", 0.001, "fixed")
    assert (ppo.gamma, ppo.gae_lambda) == (1.0, 1.0)


def test_dr_grpo_divides_by_a_constant_the_longest_response(load):
    dr_grpo = resolve_algorithm(load("algorithm.name=dr_grpo", "rollout.max_response_tokens=300"))
    assert dr_grpo.advantage == "dr_grpo"
    assert (dr_grpo.aggregation, dr_grpo.aggregation_norm) == ("seq_mean_token_sum_norm", 300)


def test_dapo_clips_higher_and_samples_dynamically(load):
    dapo = resolve_algorithm(load("algorithm.name=dapo"))
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)
    assert dapo.dynamic_sampling
    assert dapo.overlong_buffer is None


def test_gspo_clips_far_closer_and_means_over_sequences(load):
    gspo = resolve_algorithm(load("algorithm.name=gspo"))
    assert (gspo.clip_low, gspo.clip_high, gspo.aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")


def test_remax_needs_a_greedy_baseline(load):
    assert resolve_algorithm(load("algorithm.name=remax")).needs_greedy_baseline


def test_the_users_values_win_over_the_presets(load):
    dapo = resolve_algorithm(
        load("algorithm.name=dapo", "algorithm.clip_high=0.3", "algorithm.dynamic_sampling.enabled=false")
    )
    assert dapo.clip_high == 0.3
    assert not dapo.dynamic_sampling


def test_a_chosen_loss_brings_its_own_bounds_and_aggregation(load):
    mixed = resolve_algorithm(load("algorithm.name=dapo", "algorithm.loss=gspo"))
    assert (mixed.clip_low, mixed.clip_high, mixed.aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")


def test_writing_null_turns_the_presets_kl_off(load):
    assert not resolve_algorithm(load("algorithm.name=ppo", "algorithm.kl.where=null")).needs_reference


def test_a_kl_in_the_loss_is_estimated_with_k3_unless_said_otherwise(load):
    assert resolve_algorithm(load("algorithm.kl.where=loss")).kl_estimator == "k3"


@pytest.mark.parametrize(("name", "threshold"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo_has_a_threshold_for_each_divergence(load, name, threshold):
    assert resolve_algorithm(load(f"algorithm.name={name}")).dppo_threshold == threshold


@pytest.mark.parametrize(
    ("name", "cap"), [("token_tis", 2.0), ("sequence_tis", 2.0), ("icepop", 5.0), ("rejection", 2.0)]
)
def test_every_correction_has_bounds(load, name, cap):
    algorithm = resolve_algorithm(load(f"algorithm.correction.name={name}"))
    assert (algorithm.correction_name, algorithm.correction_cap, algorithm.correction_floor) == (name, cap, 0.5)
