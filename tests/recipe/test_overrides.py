import pytest
from recipe_texts import MINIMAL


def test_an_override_sets_a_key_with_the_type_that_yaml_gives_it(load):
    recipe = load(
        "batch.prompts_per_step=64", "optimizer.learning_rate=5e-5", "data.shuffle=false", "rollout.stop=[a, b]"
    )
    assert recipe.batch.prompts_per_step == 64
    assert recipe.optimizer.learning_rate == 5e-5
    assert recipe.data.shuffle is False
    assert recipe.rollout.stop == ["a", "b"]


def test_an_override_replaces_what_the_file_says(load):
    assert load("schedule.steps=3").schedule.steps == 3


def test_the_last_of_two_overrides_wins(load):
    assert load("seed=1", "seed=2").seed == 2


@pytest.mark.parametrize("plus", ["+", "++"])
def test_a_leading_plus_is_accepted_as_in_hydra(load, plus):
    assert load(f"{plus}batch.ppo_epochs=2").batch.ppo_epochs == 2


def test_a_plus_does_not_make_an_unknown_key_known(problems):
    assert problems("+batch.ppo_epoch=2") == [
        "override +batch.ppo_epoch=2: `batch.ppo_epoch` is not a key; did you mean `batch.ppo_epochs`?"
    ]


def test_a_tilde_deletes_a_key(load):
    assert load("~schedule.steps", "schedule.epochs=1").schedule.steps is None


def test_a_tilde_deletes_a_section(load):
    assert load("~batch", text=MINIMAL + "batch: {ppo_epochs: 3}\n").batch.ppo_epochs == 1


def test_deleting_a_key_that_is_not_there_is_an_error(problems):
    assert problems("~batch.ppo_epochs") == [
        "override ~batch.ppo_epochs: `batch.ppo_epochs` is not set in recipe.yaml, so it cannot be deleted"
    ]


@pytest.mark.parametrize("text", ["batch.ppo_epochs", "=3", "batch.ppo_epochs:3", ""])
def test_a_malformed_override_is_one_clear_line(problems, text):
    assert problems(text) == [f"override {text}: is not an override; write `key=value`, or `~key` to delete"]


def test_a_value_that_is_not_yaml_is_one_clear_line(problems):
    assert problems("rollout.stop=[a") == [
        "override rollout.stop=[a: the value is not valid YAML; put it in quotes if it is text"
    ]


@pytest.mark.parametrize(
    "text", ["Answer: {prompt}", "{prompt} Think.", "{prompt}", "[x]", "12", "true", "a # b", "- x", "'"]
)
def test_a_key_that_takes_text_takes_any_text(load, text):
    assert load(f"data.template={text}").data.template == text


def test_a_quoted_text_loses_its_quotes(load):
    assert load("data.template='a # b'").data.template == "a # b"


def test_a_hash_in_a_text_is_not_a_comment(load):
    assert load("data.system=answer # 5").data.system == "answer # 5"


def test_null_unsets_an_optional_text(load):
    assert load("data.system=null", text=MINIMAL + "data.system: x\n").data.system is None


def test_an_equals_sign_in_the_value_belongs_to_the_value(load):
    assert load("data.system=a=b").data.system == "a=b"


def test_a_section_can_be_given_as_a_whole(load):
    recipe = load("algorithm={name: ppo, kl.coefficient: 0.5}")
    assert (recipe.algorithm.name, recipe.algorithm.kl.coefficient) == ("ppo", 0.5)


def test_options_take_any_key(load):
    recipe = load("environment.options.size=4", "environment.options.board.kind=random")
    assert recipe.environment.options == {"size": 4, "board": {"kind": "random"}}


@pytest.mark.parametrize("devices", ["0-3", "0,2", "list(range(0, 4))", "all"])
def test_a_placement_line_can_be_set(load, devices):
    assert load(f"cluster.placement.actor,rollout={devices}").cluster.placement == {"actor,rollout": devices}


def test_a_key_below_a_value_is_an_error(problems):
    (problem,) = problems("data.train.path.x=1")
    assert problem.startswith("override data.train.path.x=1: `data.train.path.x` cannot be set: recipe.yaml:6 gives")


def test_a_wrong_override_of_a_key_is_the_only_problem_reported_for_it(problems):
    (problem,) = problems("schedule.steps=0", text=MINIMAL.replace("steps: 10", "steps: -3"))
    assert problem.startswith("override schedule.steps=0: ")
