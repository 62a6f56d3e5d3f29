"""Losses, advantages and the other parts that a recipe chooses by name: short and long forms, options, a user's own."""

from pathlib import Path

import pytest
import yaml
from recipe_texts import MINIMAL

from corral.recipe.load import dump_recipe
from corral.recipe.parts import KINDS, PRESETS
from corral.recipe.presets import find_declaration, resolve_algorithm

OWN = """\
from dataclasses import dataclass

from corral.algorithms.declarations import Needs, advantage, policy_loss


@dataclass(frozen=True)
class Options:
    scale: float
    power: int = 1


@policy_loss(options=Options, summary="a loss of mine", aggregation="seq_mean_token_mean")
def mine(terms, options):
    return -options.scale * terms.advantages * terms.logprobs


@advantage(needs=Needs(critic=True, greedy_baseline=True))
def my_advantage(batch, options):
    return batch.rewards


def plain(terms):
    return -terms.logprobs


def of_two(terms, options):
    return -terms.logprobs


NOT_A_FUNCTION = 3
"""


@pytest.fixture
def own(load) -> Path:
    """A file of the user's, in the folder in which recipes are loaded."""
    Path("own.py").write_text(OWN)
    Path("own_algorithm_parts.py").write_text(OWN)  # a module's name, which no other test may have imported
    return Path("own.py")


def parts_of(load, *overrides: str, algorithm: str = ""):
    return resolve_algorithm(load(*overrides, text=MINIMAL + (f"algorithm: {algorithm}\n" if algorithm else "")))


# --- forms


@pytest.mark.parametrize("form", ["{loss: sapo}", "{loss: {name: sapo}}", "{loss.name: sapo}"])
def test_a_part_is_its_name_or_a_section_with_its_name(load, form):
    assert parts_of(load, algorithm=form).loss.name == "sapo"


def test_options_stand_beside_the_name(load):
    loss = parts_of(load, algorithm="{loss: {name: sapo, tau_positive: 2, tau_negative: 3.5}}").loss
    assert (loss.options.tau_positive, loss.options.tau_negative) == (2, 3.5)


def test_options_without_a_name_are_of_the_presets_part(load):
    loss = parts_of(load, algorithm="{name: dapo, loss: {clip_low: 0.1}}").loss
    assert (loss.name, loss.options.clip_low, loss.options.clip_high) == ("ppo", 0.1, 0.28)


def test_a_presets_options_belong_to_its_own_part(load):
    assert parts_of(load, algorithm="{name: dapo, loss: gspo}").loss.options.clip_high == 4e-4
    assert parts_of(load, algorithm="{name: dapo, loss: ppo}").loss.options.clip_high == 0.28


def test_every_kind_of_part_has_options(load):
    written = """
  advantage: {name: gae, gamma: 0.99, gae_lambda: 0.95}
  aggregation: {name: seq_mean_token_sum_norm, norm: 1024}
  correction: {name: icepop, cap: 7}
  old_logprobs: recompute
  kl: {where: loss, estimator: k2, controller: {name: adaptive, target: 3, horizon: 10}}"""
    found = parts_of(load, algorithm=written)
    assert (found.advantage.options.gamma, found.advantage.options.gae_lambda) == (0.99, 0.95)
    assert (found.aggregation.options.norm, found.correction.options.cap) == (1024, 7)
    assert (found.kl.estimator.name, found.kl.controller.options.target) == ("k2", 3)


def test_what_was_written_is_dumped_and_read_back(load):
    recipe = load("algorithm.loss=sapo", "algorithm.loss.tau_positive=2", "algorithm.advantage.name=rloo")
    assert yaml.safe_load(dump_recipe(recipe))["algorithm"] == {
        "loss": {"name": "sapo", "tau_positive": 2},
        "advantage": {"name": "rloo"},
    }
    assert load(text=dump_recipe(recipe)) == recipe


def test_a_short_name_and_a_long_one_of_the_same_part_are_given_twice(problems):
    found = problems(text=MINIMAL + "algorithm:\n  loss: sapo\n  loss.name: ppo\n")
    assert found == ["recipe.yaml:11: `algorithm.loss.name` is given twice (first at recipe.yaml:10)"]


# --- overrides


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.loss=sapo algorithm.loss.tau_positive=2",
        "algorithm.loss.tau_positive=2 algorithm.loss=sapo",
        "algorithm.loss.name=sapo algorithm.loss.tau_positive=2",
        "algorithm.name=sapo algorithm.loss.tau_positive=2",
        "algorithm.loss={name:\xa0sapo,tau_positive:\xa02}",
    ],
)
@pytest.mark.parametrize("written", ["", "{loss: ppo}", "{loss: {tau_positive: 7}, name: sapo}"])
def test_names_and_options_are_overridden_in_any_order(load, overrides, written):
    if "algorithm.name" in overrides and written == "{loss: ppo}":
        pytest.skip("there the file's loss counts")
    overrides = [override.replace("\xa0", " ") for override in overrides.split(" ")]
    loss = parts_of(load, *overrides, algorithm=written).loss
    assert (loss.name, loss.options.tau_positive) == ("sapo", 2)


def test_another_part_comes_without_the_files_options_for_the_old_one(load):
    loss = parts_of(load, "algorithm.loss=gspo", algorithm="{loss: {name: ppo, clip_high: 0.5, dual_clip: 3}}").loss
    assert (loss.name, loss.options.clip_high) == ("gspo", 4e-4)


def test_only_a_name_leaves_the_options_to_be_objected_to(problems):
    text = MINIMAL + "algorithm: {loss: {name: ppo, dual_clip: 3}}\n"
    assert problems("algorithm.loss.name=gspo", text=text) == [
        "recipe.yaml:9: `algorithm.loss.dual_clip` is not an option of the loss gspo, whose options are clip_low, "
        "clip_high; it is an option of ppo"
    ]


# --- problems


@pytest.mark.parametrize(
    ("override", "part", "hint"),
    [
        ("algorithm.loss.tau_positive=1", "loss ppo", "are clip_low, clip_high, dual_clip; it is an option of sapo"),
        ("algorithm.advantage.gamma=0.9", "advantage grpo", "; it is an option of gae, reinforce, reinforce_plus_plus"),
        ("algorithm.loss.clip_lo=0.1", "loss ppo", "are clip_low, clip_high, dual_clip; did you mean `clip_low`?"),
        ("algorithm.correction.cap=2", "correction none", "an option of token_tis, sequence_tis, icepop, rejection"),
        ("algorithm.kl.controller.target=1", "KL controller fixed", "has no options; it is an option of adaptive"),
        ("algorithm.aggregation.norm=1", "aggregation token_mean", "; it is an option of seq_mean_token_sum_norm"),
    ],
)
def test_an_option_of_another_part_is_a_problem(problems, override, part, hint):
    (problem,) = problems(override)
    key = override.partition("=")[0]
    assert problem.startswith(f"override {override}: `{key}` is not an option of the {part}, ")
    assert problem.endswith(hint)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.loss.clip_low=-1", "`algorithm.loss.clip_low: -1` should be a number, at least 0"),
        ("algorithm.loss.dual_clip=true", "`algorithm.loss.dual_clip: true` should be a number, above 1 or null"),
        ("algorithm.loss.clip_low=.inf", "`algorithm.loss.clip_low: Infinity` should be a number, at least 0"),
        ("algorithm.loss=5", "`algorithm.loss.name: 5` should be text or null"),
        (
            "algorithm.correction={name: icepop, floor: 6}",
            "`algorithm.correction`: the floor 6 is not below the cap 5: every token would be dropped",
        ),
    ],
)
def test_an_option_with_a_wrong_value_is_a_problem(problems, override, message):
    assert problems(override) == [f"override {override}: {message}"]


@pytest.mark.parametrize("path", KINDS)
def test_an_unknown_name_is_a_problem_that_lists_the_known_ones(problems, path):
    kind = KINDS[path]
    (problem,) = problems(f"{'.'.join(path)}=zzz")
    assert f"`{'.'.join(path)}: zzz` is not one of {', '.join(kind.declared)}" in problem
    own = "your own is `file.py:function` or `module:function`"
    assert problem.endswith(own) == (kind.of_a_user is not None)


def test_a_misspelt_name_leads_to_the_right_one(problems):
    (problem,) = problems("algorithm.loss=sapoo")
    assert problem.endswith("; did you mean `sapo`?")


def test_problems_of_parts_come_with_all_others(problems):
    found = problems("algorithm.loss=zzz", "algorithm.advantage.x=1", "seed=-1")
    assert len(found) == 3


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_only_options_that_its_loss_has(name):
    assert set(PRESETS[name].loss_options) <= set(KINDS["algorithm", "loss"].declared[PRESETS[name].loss].option_names)


# --- a user's own


@pytest.mark.parametrize("spec", ["own.py:mine", "own_algorithm_parts:mine"])
def test_a_loss_of_the_users_has_its_declared_options_and_facts(load, own, spec):
    found = parts_of(load, f"algorithm.loss={spec}", "algorithm.loss.scale=0.5")
    assert (found.loss.name, found.loss.options.scale, found.loss.options.power) == (spec, 0.5, 1)
    assert found.aggregation.name == "seq_mean_token_mean"
    assert found.loss.describe() == f"{spec}: a loss of mine; scale 0.5, power 1"


def test_an_advantage_of_the_users_has_its_declared_needs(load, own):
    found = parts_of(load, "algorithm.advantage=own.py:my_advantage")
    assert found.needs_critic
    assert found.needs_greedy_baseline
    assert found.advantage.declaration.needs.whole_batch


def test_a_function_that_was_not_declared_is_expected_to_need_most(load, own):
    found = parts_of(load, "algorithm.loss=own.py:plain", "algorithm.advantage=own.py:plain")
    assert found.advantage.declaration.needs.whole_batch
    assert not found.skips_zero_advantage


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.loss=own.py:mine", "`algorithm.loss.scale` is missing: the loss own.py:mine has no default"),
        ("algorithm.loss={name: 'own.py:mine', scale: x}", "`algorithm.loss.scale: x` should be a number"),
        (
            "algorithm.loss={name: 'own.py:mine', scale: 1, size: 2}",
            "`algorithm.loss.size` is not an option of the loss own.py:mine, whose options are scale, power",
        ),
        ("algorithm.loss=own.py:my_advantage", "`own.py:my_advantage` is declared as an advantage, not as a loss"),
        ("algorithm.loss=own.py:NOT_A_FUNCTION", "algorithm.loss: `own.py:NOT_A_FUNCTION` is not a function"),
        ("algorithm.loss=own.py:of_two", "`own.py:of_two` needs one argument, or to be declared with @corral.loss"),
        ("algorithm.loss=own.py:mime", "algorithm.loss: `own.py` has no `mime`; did you mean `mine`?"),
        ("algorithm.loss=nowhere:mine", "algorithm.loss: there is no module `nowhere` here or among the installed"),
        ("algorithm.loss.scale=1", "`algorithm.loss.scale` is not an option of the loss ppo"),
    ],
)
def test_what_is_wrong_with_a_users_part_is_found_when_the_recipe_is_loaded(problems, own, override, message):
    (problem,) = problems(override)
    assert message in problem
    assert "algorithm.loss" in problem


def test_declaring_a_function_of_a_users_adds_no_name_for_others(load, own):
    parts_of(load, "algorithm.advantage=own.py:my_advantage")
    assert "my_advantage" not in KINDS["algorithm", "advantage"].declared
    assert find_declaration(("algorithm", "loss"), "ppo").name == "ppo"
