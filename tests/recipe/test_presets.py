from pathlib import Path

import pytest

from corral.algorithms.advantages import GaeOptions
from corral.algorithms.losses import GspoOptions, PpoOptions
from corral.recipe.errors import RecipeError
from corral.recipe.parts import PRESETS
from corral.recipe.presets import resolve_algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_made_of_declared_parts(load, name):
    found = resolve_algorithm(load(f"algorithm.name={name}"))
    assert found.advantage.name == PRESETS[name].advantage
    assert found.loss.name == PRESETS[name].loss


def test_grpo_is_a_clipped_loss_on_group_advantages_without_kl(load):
    grpo = resolve_algorithm(load())
    assert (grpo.advantage.name, grpo.loss.name, grpo.aggregation.name) == ("grpo", "ppo", "token_mean")
    assert grpo.loss.options == PpoOptions(clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert not any([grpo.needs_critic, grpo.needs_reference, grpo.needs_greedy_baseline, grpo.dynamic_sampling])


def test_ppo_has_a_critic_and_a_kl_in_the_reward(load):
    ppo = resolve_algorithm(load("algorithm.name=ppo"))
    assert ppo.needs_critic
    assert ppo.needs_reference
    assert (ppo.kl.where, ppo.kl.estimator.name, ppo.kl.coefficient) == ("reward", "k1", 0.001)
    assert ppo.kl.controller.name == "fixed"
    assert ppo.advantage.options == GaeOptions(gamma=1.0, gae_lambda=1.0)


def test_dr_grpo_divides_by_a_constant_the_longest_response(load):
    dr_grpo = resolve_algorithm(load("algorithm.name=dr_grpo", "rollout.max_response_tokens=300"))
    assert dr_grpo.advantage.name == "dr_grpo"
    assert (dr_grpo.aggregation.name, dr_grpo.aggregation.options.norm) == ("seq_mean_token_sum_norm", 300)


def test_dapo_clips_higher_and_samples_dynamically(load):
    dapo = resolve_algorithm(load("algorithm.name=dapo"))
    assert (dapo.loss.options.clip_low, dapo.loss.options.clip_high) == (0.2, 0.28)
    assert dapo.dynamic_sampling
    assert dapo.shaping.name == "none"


def test_gspo_clips_far_closer_and_means_over_sequences(load):
    gspo = resolve_algorithm(load("algorithm.name=gspo"))
    assert gspo.loss.options == GspoOptions(clip_low=3e-4, clip_high=4e-4)
    assert gspo.aggregation.name == "seq_mean_token_mean"


def test_remax_needs_a_greedy_baseline(load):
    assert resolve_algorithm(load("algorithm.name=remax")).needs_greedy_baseline


def test_the_users_values_win_over_the_presets(load):
    dapo = resolve_algorithm(
        load("algorithm.name=dapo", "algorithm.loss.clip_high=0.3", "algorithm.dynamic_sampling.enabled=false")
    )
    assert dapo.loss.options.clip_high == 0.3
    assert not dapo.dynamic_sampling


def test_a_chosen_loss_brings_its_own_bounds_and_aggregation(load):
    mixed = resolve_algorithm(load("algorithm.name=dapo", "algorithm.loss=gspo"))
    assert mixed.loss.options == GspoOptions(clip_low=3e-4, clip_high=4e-4)
    assert mixed.aggregation.name == "seq_mean_token_mean"


def declare_loss(aggregation):
    Path("own.py").write_text(
        f"import corral\n@corral.loss(summary='x', aggregation={aggregation!r})\ndef mine(terms, options): ...\n"
    )
    return "algorithm.loss=own.py:mine"


def test_a_loss_of_ones_own_brings_an_aggregation_with_its_options(load):
    own = declare_loss("seq_mean_token_sum_norm")
    assert resolve_algorithm(load(own, "rollout.max_response_tokens=300")).aggregation.options.norm == 300


def test_a_loss_of_ones_own_with_an_unknown_aggregation_is_an_error_that_names_it(load):
    recipe = load(declare_loss("token_meen"))
    with pytest.raises(RecipeError, match=r"own.py:mine.*`algorithm.aggregation: token_meen` is not one of"):
        resolve_algorithm(recipe)


def test_writing_null_turns_the_presets_kl_off(load):
    assert not resolve_algorithm(load("algorithm.name=ppo", "algorithm.kl.where=null")).needs_reference


def test_a_kl_in_the_loss_is_estimated_with_k3_unless_said_otherwise(load):
    assert resolve_algorithm(load("algorithm.kl.where=loss")).kl.estimator.name == "k3"


@pytest.mark.parametrize(("name", "threshold"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo_has_a_threshold_for_each_divergence(load, name, threshold):
    assert resolve_algorithm(load(f"algorithm.name={name}")).loss.options.threshold == threshold


@pytest.mark.parametrize(
    ("name", "cap"), [("token_tis", 2.0), ("sequence_tis", 2.0), ("icepop", 5.0), ("rejection", 2.0)]
)
def test_every_correction_has_bounds(load, name, cap):
    algorithm = resolve_algorithm(load(f"algorithm.correction.name={name}"))
    assert (algorithm.correction.name, algorithm.correction.options.cap) == (name, cap)
