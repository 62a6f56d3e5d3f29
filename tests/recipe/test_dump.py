from contextlib import suppress

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from recipe_texts import MINIMAL

from corral.recipe.errors import RecipeError
from corral.recipe.keys import all_keys
from corral.recipe.load import dump_recipe, load_recipe
from corral.recipe.schema import Data, Model, Recipe, Source

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
printable = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))
odd = st.sampled_from(
    ["1e-6", "null", "~", "true", "no", "0x1f", "${name}", "$${", "a: b", "# x", "", "1:30", "'", "a\nb\n"]
)


def test_only_the_keys_that_were_set_are_written(load):
    assert yaml.safe_load(dump_recipe(load("batch.ppo_epochs=2"))) == {
        "name": "test",
        "model": {"path": "some/model"},
        "data": {"train": {"path": "rows.jsonl"}},
        "schedule": {"steps": 10},
        "batch": {"ppo_epochs": 2},
    }


def test_the_name_comes_first(load):
    assert dump_recipe(load(text="seed: 1\n" + MINIMAL)).startswith("name: test\n")


def test_an_option_without_a_bound_stays_so(load):
    written = dump_recipe(load("environment.options.limit=.inf", "environment.options.other=[-.inf, .nan]"))
    assert load(text=written).environment.options["limit"] == float("inf")
    assert dump_recipe(load(text=written)) == written


def test_a_lone_line_break_is_written_on_one_line(load):
    assert 'stop:\n  - "\\n"\n' in dump_recipe(load(r'rollout.stop=["\n"]'))


def test_text_of_several_lines_is_written_on_several_lines(load):
    assert "template: |-\n    Question:\n    {prompt}\n" in dump_recipe(load(r'data.template="Question:\n{prompt}"'))


@quick
@given(text=printable | odd, other=printable | odd, number=st.floats(1e-12, 1e12))
def test_whatever_is_written_is_read_back(load, text, other, number):
    load()
    recipe = Recipe.model_validate(
        {
            "name": text,
            "model": Model(path=other),
            "data": Data(train=Source(path=[text, other], options={"x": other, "y": [1, 2.5, None, {"z": text}]})),
            "optimizer": {"learning_rate": number},
        }
    )
    assert load(text=dump_recipe(recipe)) == recipe
    assert load(text=dump_recipe(recipe)).model_fields_set == recipe.model_fields_set


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | printable | odd,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(printable, inner, max_size=2),
    max_leaves=4,
)
keys = st.sampled_from([".".join(path) for path in all_keys()]) | printable


@quick
@given(written=st.dictionaries(keys, values, max_size=5), overrides=st.lists(printable | odd, max_size=2))
def test_any_mapping_is_a_recipe_or_a_recipe_error(load, written, overrides):
    load()
    with open("fuzz.yaml", "w") as file:
        file.write(MINIMAL)
        yaml.safe_dump(written, file)
    with suppress(RecipeError):
        load_recipe("fuzz.yaml", overrides)


@pytest.mark.parametrize(
    "text",
    [
        "a: b: c",
        "{",
        "a:\n- b\n c",
        "&a *a",
        "!x y",
        "%",
        "@",
        "\x00",
        "? ",
        ":",
        "- - -",
        "---",
        pytest.param("[" * 9999, id="brackets"),
        r'a: "\ud800"',
    ],
)
def test_any_text_is_a_recipe_or_a_recipe_error(problems, text):
    assert problems(text=text)
