"""`corral train --shrink 1` runs a step of any recipe, whatever large parts it names."""

from pathlib import Path

import pytest
from commands import corral
from runs import write_recipe

from corral.loop.shrink import shrink
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan


@pytest.mark.parametrize(
    "teacher", ["reference.path=large/teacher", "reference.endpoint={url: 'http://127.0.0.1:1/v1', model: large}"]
)
def test_a_teacher_is_as_small_as_the_model(tmp_path: Path, tiny_model: Path, teacher: str) -> None:
    shrunk = shrink(load_recipe(write_recipe(tmp_path, tiny_model), ["algorithm.name=distill", teacher]))
    assert make_plan(shrunk).recipe.reference.path == "blank-1m"


def test_a_sharded_reward_model_is_whole_in_one_process(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ["environment.reward={name: reward_model}", "reward_model={path: classifier, shard: 2}"]
    shrunk = shrink(load_recipe(write_recipe(tmp_path, tiny_model), overrides))
    assert make_plan(shrunk).recipe.reward_model.shard == 1


@pytest.mark.slow
def test_rows_belong_to_the_environments_of_the_recipe(tmp_path: Path, tiny_model: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model)
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith("environment:")]
    environment = f"{{reward: {{name: '{tmp_path}/vowels.py:share_of_vowels', workers: 1}}}}"
    recipe.write_text("\n".join([*lines, f"environments: {{one: {environment}, two: {environment}}}"]))
    ended = corral(tmp_path, "train", str(recipe), "--shrink", "1")
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "step 1/1" in ended.stdout
