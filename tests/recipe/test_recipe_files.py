"""Reading a recipe file: what is accepted, and what is said about what is not."""

import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from recipe_texts import MINIMAL

from corral.recipe.errors import RecipeError, UserError
from corral.recipe.load import load_recipe


def test_a_minimal_recipe_gets_every_default(load):
    recipe = load()
    assert recipe.name == "test"
    assert recipe.batch.prompts_per_step == 8
    assert recipe.critic.optimizer.learning_rate == 1e-5


def test_a_critic_optimizer_keeps_its_own_learning_rate_when_another_key_is_set(load):
    assert load("critic.optimizer.weight_decay=0.1").critic.optimizer.learning_rate == 1e-5


def test_a_path_object_is_accepted(load):
    load()
    assert load_recipe(Path("recipe.yaml")).name == "test"


def test_importing_the_recipe_package_imports_neither_torch_nor_transformers():
    """They take seconds, and processes that run rewards do without."""
    code = (
        "import sys; from corral.recipe import load, plan, rules, presets, placement; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- values


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "1E-6", "0.000001", ".000001", "1e-06"])
def test_small_numbers_are_numbers_however_they_are_written(load, text):
    recipe = load(text=MINIMAL + f"optimizer:\n  learning_rate: {text}\n")
    assert recipe.optimizer.learning_rate == 1e-6


@pytest.mark.parametrize("word", ["no", "on", "2024-01-01", "1:30", "off"])
def test_words_that_older_yaml_took_for_something_else_are_words(load, word):
    assert load(text=MINIMAL.replace("name: test", f"name: {word}")).name == word


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("batch: {max_tokens_per_micro_batch: 16_384}\n", "batch.max_tokens_per_micro_batch", 16384),
        ("batch: {prompts_per_step: 1e3}\n", "batch.prompts_per_step", 1000),
        ("logging.project: '1e-6'\n", "logging.project", "1e-6"),
        ("batch:\n", "batch.prompts_per_step", 8),
        ("data.validation: null\n", "data.validation", None),
        ("environment:\n  options: {}\n", "environment.options", {}),
        (
            "data.validation: &source\n  path: x.jsonl\nenvironment.options:\n  source: *source\n",
            "environment.options", {"source": {"path": "x.jsonl"}},
        ),
        # dotted keys, at the top, in a section, and beside the section
        ("batch.prompts_per_step: 3\n", "batch.prompts_per_step", 3),
        ("algorithm:\n  kl.where: loss\n", "algorithm.kl.where", "loss"),
        ("batch.ppo_epochs: 2\nbatch:\n  updates_per_step: 3\n", "batch.ppo_epochs", 2),
        ("batch.ppo_epochs: 2\nbatch:\n  updates_per_step: 3\n", "batch.updates_per_step", 3),
    ],
)  # fmt: skip
def test_what_is_written_is_what_is_meant(load, text, key, value):
    assert attrgetter(key)(load(text=MINIMAL + text)) == value


def test_keys_inside_options_are_the_users_own_and_are_not_split(load):
    recipe = load(text=MINIMAL + "environment:\n  options:\n    a.b: 1\n    c: {d: [1, {e: null}]}\n")
    assert recipe.environment.options == {"a.b": 1, "c": {"d": [1, {"e": None}]}}


def test_a_dotted_key_in_the_placement_is_not_split(load):
    recipe = load(text=MINIMAL + "cluster:\n  placement:\n    actor.x: 0\n")
    assert recipe.cluster.placement == {"actor.x": 0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: 1\nseed: 2\n", "10: `seed` is given twice (first at recipe.yaml:9)"),
        (
            "batch.ppo_epochs: 1\nbatch:\n  ppo_epochs: 2\n",
            "11: `batch.ppo_epochs` is given twice (first at recipe.yaml:9)",
        ),
        ("environment.options:\n  list:\n    - {a: 1, a: 2}\n", "11: a key is given twice in this mapping"),
    ],
)
def test_a_key_given_twice_is_an_error_with_both_lines(problems, text, problem):
    assert problems(text=MINIMAL + text) == [f"recipe.yaml:{problem}"]


@pytest.mark.parametrize("lines", ["batch: 5\nbatch.ppo_epochs: 1\n", "batch.ppo_epochs: 1\nbatch: 5\n"])
def test_a_section_that_is_also_a_value_is_a_contradiction(problems, lines):
    found = problems(text=MINIMAL + lines)
    assert "recipe.yaml:10: " in found[-1]
    assert "recipe.yaml:9 gives `batch" in found[-1]


# --- files that are no recipe


def test_a_missing_file_is_one_line_with_the_nearest_name(load):
    load()
    with pytest.raises(UserError, match=r"^recipes.yaml: no such file; did you mean recipe.yaml\?$"):
        load_recipe("recipes.yaml")


def test_a_missing_folder_is_one_line(load):
    with pytest.raises(RecipeError, match=r"^nowhere/recipe.yaml: no such file$"):
        load_recipe("nowhere/recipe.yaml")


@pytest.mark.parametrize("name", ["a\ud800b.yaml", "a\0b.yaml"])
def test_a_name_that_no_file_can_have(name: str) -> None:
    with pytest.raises(RecipeError, match="no file can have this name"):
        load_recipe(Path(name))


def test_a_folder_is_not_a_recipe(tmp_path):
    with pytest.raises(RecipeError, match="is a folder, not a recipe file"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_an_empty_file_is_one_line(problems, text):
    assert problems(text=text) == ["recipe.yaml: the file is empty"]


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "42"])
def test_a_file_that_is_not_a_mapping_is_one_line(problems, text):
    (problem,) = problems(text=text)
    assert problem.startswith("recipe.yaml:1: a recipe is a mapping")


@pytest.mark.parametrize(
    ("text", "line", "cause"),
    [
        ("name: test\nmodel: [1, 2\n", 3, ": expected ',' or ']'"),
        ("name: test\nmodel:\n\tpath: x\n", 3, "spaces, not tabs"),
        ("name: test\nmodel: {path: ${name}}\n", 2, "put `${...}` in quotes"),
        (MINIMAL + "---\nname: other\n", 9, ""),
    ],
    ids=["an open bracket", "a tab", "an unquoted reference in braces", "two documents"],
)
def test_a_syntax_error_is_one_line_with_its_place_and_likely_cause(problems, text, line, cause):
    (problem,) = problems(text=text)
    assert problem.startswith(f"recipe.yaml:{line}: is not valid YAML")
    assert cause in problem


def test_a_binary_file_is_one_line(load):
    Path("recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"^recipe.yaml: is not a text file in UTF-8$"):
        load_recipe("recipe.yaml")


def test_control_characters_are_one_line(problems):
    (problem,) = problems(text="name: \x01\n")
    assert problem.startswith("recipe.yaml: is not valid YAML")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: !!python/object:os.system x\n", "recipe.yaml:1: YAML tags are not used in recipes"),
        ("model: &a\n  path: *a\n", "recipe.yaml:1: an anchor contains an alias to itself"),
        ("model: &a {path: x}\ndata:\n  <<: *a\n", "recipe.yaml:3: merge keys (`<<`) are not used in recipes"),
        ("? [a, b]\n: c\n", "recipe.yaml:1: a key must be text"),
    ],
)
def test_yaml_that_a_recipe_has_no_use_for_is_refused(problems, text, message):
    (problem,) = problems(text=text)
    assert problem.startswith(message)
