from operator import attrgetter

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


@pytest.mark.parametrize(
    "text", ["Answer: {prompt}", "{prompt} Think.", "{prompt}", "[x]", "12", "true", "a # b", "- x", "'"]
)
def test_a_key_that_takes_text_takes_any_text(load, text):
    assert load(f"data.template={text}").data.template == text


@pytest.mark.parametrize(
    ("overrides", "text", "key", "value"),
    [
        pytest.param(["schedule.steps=3"], "", "schedule.steps", 3, id="replaces what the file says"),
        pytest.param(["seed=1", "seed=2"], "", "seed", 2, id="the last of two wins"),
        pytest.param(["+batch.ppo_epochs=2"], "", "batch.ppo_epochs", 2, id="a leading plus as in hydra"),
        pytest.param(["++batch.ppo_epochs=2"], "", "batch.ppo_epochs", 2, id="two of them"),
        pytest.param(["~schedule.steps", "schedule.epochs=1"], "", "schedule.steps", None, id="a tilde deletes a key"),
        pytest.param(["~batch"], "batch: {ppo_epochs: 3}\n", "batch.ppo_epochs", 1, id="a tilde deletes a section"),
        pytest.param(["data.template='a # b'"], "", "data.template", "a # b", id="a quoted text loses its quotes"),
        pytest.param(["data.system=answer # 5"], "", "data.system", "answer # 5", id="a hash is no comment"),
        pytest.param(["data.system=null"], "data.system: x\n", "data.system", None, id="null unsets"),
        pytest.param(["data.system=a=b"], "", "data.system", "a=b", id="an equals sign belongs to the value"),
        pytest.param(["algorithm={kl.coefficient: 0.5}"], "", "algorithm.kl.coefficient", 0.5, id="a whole section"),
    ],
)
def test_an_override_means_what_it_says(load, overrides, text, key, value):
    assert attrgetter(key)(load(*overrides, text=MINIMAL + text)) == value


def test_options_take_any_key(load):
    recipe = load("environment.options.size=4", "environment.options.board.kind=random")
    assert recipe.environment.options == {"size": 4, "board": {"kind": "random"}}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("+batch.ppo_epoch=2", "`batch.ppo_epoch` is not a key; did you mean `batch.ppo_epochs`?"),
        ("~batch.ppo_epochs", "`batch.ppo_epochs` is not set in recipe.yaml, so it cannot be deleted"),
        ("rollout.stop=[a", "the value is not valid YAML; put it in quotes if it is text"),
        *(
            (text, "is not an override; write `key=value`, or `~key` to delete")
            for text in ("batch.ppo_epochs", "=3", "batch.ppo_epochs:3", "")
        ),
    ],
)
def test_a_malformed_override_is_one_clear_line(problems, override, problem):
    assert problems(override) == [f"override {override}: {problem}"]


@pytest.mark.parametrize("devices", ["0-3", "0,2", "list(range(0, 4))", "all"])
def test_a_placement_line_can_be_set(load, devices):
    assert load(f"cluster.placement.actor,rollout={devices}").cluster.placement == {"actor,rollout": devices}


def test_a_key_below_a_value_is_an_error(problems):
    (problem,) = problems("data.train.path.x=1")
    assert problem.startswith("override data.train.path.x=1: `data.train.path.x` cannot be set: recipe.yaml:6 gives")


def test_a_wrong_override_of_a_key_is_the_only_problem_reported_for_it(problems):
    (problem,) = problems("schedule.steps=0", text=MINIMAL.replace("steps: 10", "steps: -3"))
    assert problem.startswith("override schedule.steps=0: ")
