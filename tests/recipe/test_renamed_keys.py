"""Keys of earlier releases: each is an error that names the new key, at the place where the old one was written."""

import pytest
from recipe_texts import MINIMAL

from corral.recipe.keys import find_key
from corral.recipe.renamed_keys import RENAMED, new_path


@pytest.mark.parametrize("new", RENAMED.values())
def test_every_new_key_exists(new):
    assert find_key(tuple(new.split("."))) is not None


def test_no_old_key_exists():
    assert not [old for old in RENAMED if find_key(tuple(old.split("."))) is not None]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("optimiser.learning_rate", "`optimizer.learning_rate`"),
        ("critic.optimiser.betas", "`critic.optimizer.betas`"),
        ("algorithm.lam", "`algorithm.advantage.gae_lambda`"),
        ("algorithm.gamma", "`algorithm.advantage.gamma`"),
        ("algorithm.clip_low", "`algorithm.loss.clip_low`"),
        ("algorithm.clip_high", "`algorithm.loss.clip_high`"),
        ("algorithm.dual_clip", "`algorithm.loss.dual_clip`"),
        ("algorithm.sapo_tau_positive", "`algorithm.loss.tau_positive`"),
        ("algorithm.dro_beta", "`algorithm.loss.beta`"),
        ("algorithm.dppo_threshold", "`algorithm.loss.threshold`"),
        ("algorithm.turn_gamma", "`algorithm.advantage.turn_gamma`"),
        ("algorithm.turn_weight", "`algorithm.advantage.turn_weight`"),
        ("algorithm.aggregation_norm", "`algorithm.aggregation.norm`"),
        ("algorithm.kl.target", "`algorithm.kl.controller.target`"),
        ("batch.passes", "`batch.ppo_epochs`"),
        ("train.recompute", "`train.gradient_checkpointing`, which is true or false (full is now true)"),
        ("environments.lake.share", "`environments.lake.weight`"),
        ("environments.lake.validation_share", "`environments.lake.validation_weight`"),
    ],
)
def test_an_old_key_is_an_error_that_names_the_new_one(problems, old, new):
    assert problems(f"{old}=1") == [f"override {old}=1: `{old}` is now {new}"]
    assert problems(text=MINIMAL + f"{old}: 1\n") == [f"recipe.yaml:9: `{old}` is now {new}"]


def test_keys_below_an_old_section_are_each_led_to_the_new_one(problems):
    assert problems(text=MINIMAL + "optimiser:\n  learning_rate: 1e-6\n  schedule: linear\n") == [
        "recipe.yaml:10: `optimiser.learning_rate` is now `optimizer.learning_rate`",
        "recipe.yaml:11: `optimiser.schedule` is now `optimizer.schedule`",
    ]


def test_a_name_below_an_old_section_that_is_no_key_leads_to_one(problems):
    [problem] = problems("optimiser.lr=1")
    where = "is now below `optimizer`, which has no `lr`; did you mean `optimizer.learning_rate`?"
    assert problem == f"override optimiser.lr=1: `optimiser.lr` {where}"


def test_a_key_that_was_not_renamed_has_no_new_path():
    assert new_path(("batch", "prompts_per_step")) is None
