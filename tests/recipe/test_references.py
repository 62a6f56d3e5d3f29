from pathlib import Path

import pytest
from recipe_texts import MINIMAL

from corral.recipe.errors import RecipeError
from corral.recipe.load import load_recipe


def test_a_reference_alone_keeps_the_type_of_its_value(load):
    recipe = load("batch.updates_per_step=${batch.ppo_epochs}", "batch.ppo_epochs=4", "rollout.stop=['${name}', x]")
    assert recipe.batch.updates_per_step == 4
    assert recipe.rollout.stop == ["test", "x"]


def test_a_reference_inside_a_text_is_text(load):
    recipe = load("name=run-${schedule.steps}-${data.shuffle}-${optimizer.learning_rate}", "data.shuffle=true")
    assert recipe.name == "run-10-true-1e-06"


def test_a_reference_to_a_section_copies_it(load):
    recipe = load("data.validation=${data.train}")
    assert recipe.data.validation == recipe.data.train


def test_a_reference_through_a_referred_section_is_followed(load):
    recipe = load("data.validation=${data.train}", "data.system=${data.validation.path}")
    assert recipe.data.system == "rows.jsonl"


def test_references_are_followed_through_others(load):
    recipe = load("data.system=${data.template}", "data.template=${name} {prompt}")
    assert recipe.data.system == "test {prompt}"


def test_a_reference_sees_overrides(load):
    text = MINIMAL + "batch: {ppo_epochs: 1}\nbatch.updates_per_step: ${batch.ppo_epochs}\n"
    assert load("batch.ppo_epochs=5", text=text).batch.updates_per_step == 5


def test_a_reference_to_a_key_that_is_not_set_gives_its_default(load):
    assert load("batch.ppo_epochs=${batch.samples_per_prompt}").batch.ppo_epochs == 8
    assert (
        load("batch.ppo_epochs=${critic.optimizer.warmup_steps}", "critic.optimizer.warmup_steps=2").batch.ppo_epochs
        == 2
    )


def test_options_may_hold_references_and_be_referred_to(load):
    recipe = load("environment.options.limit=${rollout.max_response_tokens}", "seed=${environment.options.limit}")
    assert recipe.seed == 256


def test_two_dollars_stand_for_one(load):
    assert load("data.system=cost: $${name} and $5").data.system == "cost: ${name} and $5"


def test_a_reference_to_nothing_is_an_error_with_its_line_and_a_suggestion(problems):
    assert problems(text=MINIMAL + "data.system: ${nme}\n") == [
        "recipe.yaml:9: `${nme}` refers to a key that does not exist; did you mean `name`?"
    ]


def test_a_reference_that_was_none_is_told_how_to_write_a_plain_one(problems):
    (problem,) = problems("data.system=${2+2}")
    assert problem.endswith("refers to a key that does not exist; write `$${` for a plain `${`")


def test_a_reference_to_a_required_key_without_a_value_is_an_error(problems):
    found = problems("~name", "data.system=${name}")
    assert "override data.system=${name}: `${name}` refers to a key that has no value" in found


def test_a_list_or_nothing_cannot_be_put_into_a_text(problems):
    (problem,) = problems("data.system=stop at ${rollout.stop}")
    assert problem.endswith("`${rollout.stop}` cannot be put into a text: its value is []")
    (problem,) = problems("data.system=at ${schedule.epochs}")
    assert problem.endswith("its value is null")


def test_a_value_that_refers_to_itself_is_an_error(problems):
    found = problems(text=MINIMAL + "data.system: x ${data.system}\n")
    assert found == ["recipe.yaml:9: values refer to each other in a circle: data.system -> data.system"]


def test_a_circle_of_references_is_reported_once_at_its_first_line(problems):
    text = (
        MINIMAL + "data.system: ${data.template}\ndata.template: ${data.answer_key}\ndata.answer_key: ${data.system}\n"
    )
    assert problems(text=text) == [
        "recipe.yaml:9: values refer to each other in a circle: "
        "data.system -> data.template -> data.answer_key -> data.system"
    ]


def test_a_section_that_contains_itself_is_a_circle(problems):
    (problem,) = problems("data.validation.options.x=${data.validation}", "data.validation.path=x")
    assert "in a circle: data.validation.options.x -> data.validation.options.x" in problem


def test_an_unresolved_reference_to_a_required_key_is_reported_once(problems):
    (problem,) = problems("model.path=${nowhere}")
    assert "does not exist" in problem


def test_references_that_double_with_each_key_end_at_a_bound(problems):
    twice = [f"  a{i}: '{f'${{environment.options.a{i - 1}}}' * 2}'\n" for i in range(1, 40)]
    lines = "".join(twice)
    found = problems(text=f"{MINIMAL}environment.options:\n  a0: aaaaaaaaaa\n{lines}")
    assert found
    assert "the recipe's references lead to more than 10000 others" in found[0]


def test_a_text_that_references_make_too_long_is_refused(problems):
    (problem,) = problems(f"data.system={'x' * 1000}", f"data.template={'${data.system}' * 2000}")
    assert problem.endswith("with its references it has more than 1048576 characters")


def test_what_has_no_end_is_no_recipe():
    with pytest.raises(RecipeError, match="/dev/zero: does not end after"):
        load_recipe(Path("/dev/zero"))
