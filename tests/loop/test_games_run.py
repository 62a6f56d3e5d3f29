"""Games in a real run: boards shared by samples, several environments with tags, floors and ceilings, learning."""

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from corral.data.sources import load_rows
from corral.envs.base import EnvSet
from corral.loop.train import train
from corral.observe.console import Console
from corral.observe.run_files import read_metrics
from corral.observe.trajectory_store import read_trajectories
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.recipe.rules import check

MIXED = """\
name: mixed
model: {{path: {model}, dtype: float32}}
data:
  chat: false
  train: {{path: boards, size: 60}}
  validation: {{path: boards, size: 12, seed: 1}}
  max_prompt_tokens: 120
environments:
  lake:
    name: frozen_lake
    weight: 2
    options: {{size: 3, {short}}}
  boxes:
    name: sokoban
    options: {{format_penalty: -0.05, {short}}}
rollout: {{max_turns: 3, max_turn_tokens: 1, max_response_tokens: 200}}
batch: {{prompts_per_step: 6, samples_per_prompt: 2, max_tokens_per_micro_batch: 512}}
algorithm: {{name: gigpo}}
optimizer: {{learning_rate: 0.001}}
schedule: {{steps: 2}}
logging: {{runs: {folder}/runs, curve: false}}
"""
ONLY_TRAINING = ("validation.before_training=false", "validation.after_training=false")
SHORT = (
    "action_pattern: null, actions: {Left: L, Down: D, Right: R, Up: U}, "
    'prompts: {system: null, opening: "{observation}\\n", turn: "{observation}"}'
)


def run(folder: Path, model: Path, text: str, *overrides: str) -> tuple[Path, str]:
    path = folder / "recipe.yaml"
    path.write_text(text.format(folder=folder, model=model, short=SHORT))
    recipe, screen = load_recipe(path, overrides), io.StringIO()
    check(recipe)
    return train(recipe, make_plan(recipe), Console(screen)), screen.getvalue()


def trajectories(run_folder: Path) -> list[dict[str, Any]]:
    files = sorted((run_folder / "trajectories").glob("step_*.parquet"))
    return [record for file in files for record in read_trajectories(file)]


def test_mixed_environments_have_their_shares_and_their_own_metrics(tmp_path: Path, tiny_model: Path) -> None:
    folder, screen = run(tmp_path, tiny_model, MIXED, "data.shuffle=false")
    rows = read_metrics(folder / "metrics.jsonl")
    step = next(row for row in rows if row["step"] == 1 and "reward/mean" in row)
    for tag in ("lake", "boxes"):
        for name in ("success", "valid_actions", "effective_actions", "turns", "reward", "length"):
            assert f"environment/{tag}/{name}" in step
    before = next(row for row in rows if "validation/environment/lake/success" in row)
    assert 0 < before["validation/random/lake/success"] < before["validation/optimal/lake/success"] <= 1
    assert before["validation/optimal/boxes/success"] > before["validation/random/boxes/success"]
    assert "environment  success  random  optimal" in screen
    assert "(12 boards)" in screen
    played = trajectories(folder)
    assert sum(one["tag"] == "lake" for one in played) == 2 * sum(one["tag"] == "boxes" for one in played)


def test_boards_are_recorded_before_the_first_turn_and_after_each(tmp_path: Path, tiny_model: Path) -> None:
    folder, _ = run(tmp_path, tiny_model, MIXED, *ONLY_TRAINING, "schedule.steps=1")
    for one in trajectories(folder):
        assert len(one["frames"]) == one["num_turns"] + 1
        assert one["prompt"] == f"{one['frames'][0]}\n"
        assert all(frame in one["response"] for frame in one["frames"][1:-1])
        assert "pictures" not in one


def test_the_samples_of_a_prompt_share_a_board_and_other_prompts_have_others(tmp_path: Path, tiny_model: Path) -> None:
    folder, _ = run(tmp_path, tiny_model, MIXED, *ONLY_TRAINING)
    openings: dict[int, set[str]] = {}
    for one in trajectories(folder):
        openings.setdefault(one["prompt_id"], set()).add(one["prompt"])
    assert all(len(prompts) == 1 for prompts in openings.values())
    assert len({next(iter(prompts)) for prompts in openings.values()}) > 8


@pytest.mark.slow
def test_the_same_seed_plays_the_same_games(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "again").mkdir()
    first, again = (run(folder, tiny_model, MIXED)[0] for folder in (tmp_path, tmp_path / "again"))

    def numbers(folder: Path) -> list[dict[str, Any]]:
        rows = read_metrics(folder / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))} for row in rows]

    assert numbers(first) == numbers(again)


def test_an_environment_may_be_trained_on_or_validated_on_alone(tmp_path: Path, tiny_model: Path) -> None:
    apart = (
        "environments.lake.validation_weight=0",
        "environments.boxes.weight=0",
        "environments.boxes.validation_weight=1",
    )
    folder, _ = run(tmp_path, tiny_model, MIXED, *apart, "schedule.steps=1")
    rows = read_metrics(folder / "metrics.jsonl")
    tags = {tag for row in rows for tag in ("lake", "boxes") if f"environment/{tag}/reward" in row}
    validated = {tag for row in rows for tag in ("lake", "boxes") if f"validation/environment/{tag}/reward" in row}
    assert (tags, validated) == ({"lake"}, {"boxes"})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["environment.name=question"], "`environment` and `environments` are both set"),
        (["environments.quiz.name=question"], "`question` needs rows with a prompt"),
        (["data.train.path=rows.jsonl", "~data.validation"], "`environments.lake.weight` has no effect"),
        (["data.system=Play."], "`data.system` has no effect"),
        (["algorithm.name=grpo", "algorithm.advantage.turn_gamma=0.9"], "is not an option of the advantage grpo"),
        (["rollout.max_turn_tokens=500"], "`rollout.max_turn_tokens: 500` is more than"),
    ],
)
def test_what_would_not_work_is_refused_before_anything_is_loaded(
    tmp_path: Path, tiny_model: Path, overrides: list[str], expected: str
) -> None:
    with pytest.raises(RecipeError) as error:
        run(tmp_path, tiny_model, MIXED, *overrides)
    assert any(expected in problem for problem in error.value.problems)


def test_a_row_of_no_environment_is_said_at_the_start(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "seed": 1, "environment": "lake"}\n{"prompt": "b", "seed": 2}\n'
    )
    text = MIXED.replace("path: boards, size: 60", "path: {folder}/rows.jsonl").replace("    weight: 2\n", "")
    with pytest.raises(UserError, match=r"rows.jsonl:2: the column `environment` is None; there are lake, boxes"):
        run(tmp_path, tiny_model, text)


def test_no_board_is_trained_on_and_validated_on(tmp_path: Path, tiny_model: Path) -> None:
    folder, _ = run(
        tmp_path, tiny_model, MIXED, "environments.lake.options.size=2", "data.train.size=600", *ONLY_TRAINING
    )
    trained = {one["prompt"] for one in trajectories(folder)}
    recipe = load_recipe(folder / "recipe.yaml", [])
    source = recipe.data.validation
    assert source is not None
    env_set = EnvSet(recipe.tagged_environments, {}, recipe.rollout)
    for row in load_rows(source, recipe.data, recipe.mixing_weights("validation")):
        messages = asyncio.run(env_set.factory_for(row).make().reset(row, 0))
        assert messages[0]["content"] not in trained


def test_bad_options_of_a_game_are_said_at_the_start(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(UserError, match="size must be at least 2"):
        run(tmp_path, tiny_model, MIXED, "environments.lake.options.size=1")


EASY = """\
name: easy
model: {{path: {model}, dtype: float32}}
data:
  chat: false
  train: {{path: boards, size: 4000}}
  validation: {{path: boards, size: 100, seed: 1}}
  max_prompt_tokens: 32
environment: {{name: frozen_lake, options: {{size: 2, p: 1.0, format_penalty: -0.1, {short}}}}}
rollout: {{max_turns: 2, max_turn_tokens: 1, max_response_tokens: 32, max_sequences: 256}}
batch: {{prompts_per_step: 32, samples_per_prompt: 8, ppo_epochs: 2, max_tokens_per_micro_batch: 1024}}
algorithm: {{name: turn_grpo}}
optimizer: {{learning_rate: 0.003}}
schedule: {{steps: 40}}
validation: {{temperature: 1.0}}
logging: {{runs: {folder}/runs, trajectories: false, curve: false}}
"""


@pytest.mark.slow
def test_a_model_that_knows_nothing_learns_to_walk(tmp_path: Path) -> None:
    """Two turns on lakes of 2 x 2 cells without holes, of which there are a dozen: a random player wins nearly half."""
    folder, _ = run(tmp_path, Path("blank-1m"), EASY)
    rows = read_metrics(folder / "metrics.jsonl")
    floor = rows[0]["validation/random/success"]
    success = [row["environment/success"] for row in rows if "environment/success" in row]
    assert sum(success[:3]) / 3 < floor / 2
    assert sum(success[-3:]) / 3 > 1.5 * floor
