from operator import attrgetter
from pathlib import Path

import pytest

from corral.algorithms.advantages import GaeOptions
from corral.algorithms.losses import GspoOptions, PpoOptions
from corral.recipe.errors import RecipeError
from corral.recipe.parts import PRESETS
from corral.recipe.presets import resolve_algorithm

GSPO = GspoOptions(clip_low=3e-4, clip_high=4e-4)


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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "algorithm.name=ppo",
            {"needs_critic": True, "needs_reference": True, "kl.where": "reward", "kl.estimator.name": "k1"}
            | {"kl.coefficient": 0.001, "kl.controller.name": "fixed", "advantage.options": GaeOptions(1.0, 1.0)},
        ),
        ("algorithm.name=ppo algorithm.kl.where=null", {"needs_reference": False}),
        ("algorithm.kl.where=loss", {"kl.estimator.name": "k3"}),
        (
            "algorithm.name=dr_grpo rollout.max_response_tokens=300",
            {
                "advantage.name": "dr_grpo",
                "aggregation.name": "seq_mean_token_sum_norm",
                "aggregation.options.norm": 300,
            },
        ),
        (
            "algorithm.name=dapo",
            {"loss.options.clip_low": 0.2, "loss.options.clip_high": 0.28, "dynamic_sampling": True}
            | {"shaping.name": "none"},
        ),
        (
            "algorithm.name=dapo algorithm.loss.clip_high=0.3 algorithm.dynamic_sampling.enabled=false",
            {"loss.options.clip_high": 0.3, "dynamic_sampling": False},
        ),
        ("algorithm.name=gspo", {"loss.options": GSPO, "aggregation.name": "seq_mean_token_mean"}),
        # a chosen loss brings its own bounds and aggregation
        ("algorithm.name=dapo algorithm.loss=gspo", {"loss.options": GSPO, "aggregation.name": "seq_mean_token_mean"}),
        ("algorithm.name=remax", {"needs_greedy_baseline": True}),
        ("algorithm.name=dppo_tv", {"loss.options.threshold": 0.15}),
        ("algorithm.name=dppo_kl", {"loss.options.threshold": 0.05}),
        *(
            (f"algorithm.correction.name={name}", {"correction.name": name, "correction.options.cap": cap})
            for name, cap in {"token_tis": 2.0, "sequence_tis": 2.0, "icepop": 5.0, "rejection": 2.0}.items()
        ),
    ],
)
def test_a_preset_is_what_its_paper_says_and_what_is_written_wins(load, overrides, expected):
    found = resolve_algorithm(load(*overrides.split()))
    assert {name: attrgetter(name)(found) for name in expected} == expected


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
