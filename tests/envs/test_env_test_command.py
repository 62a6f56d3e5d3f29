import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from corral.cli.envs import app, parsed
from corral.recipe.errors import RunError, UserError

HERE = Path(__file__).parent
BAD = f"{HERE}/bad_environments.py"


def env_test(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["test", *arguments])


@pytest.mark.slow
def test_a_game_passes_and_its_floor_and_ceiling_are_told() -> None:
    said = env_test("frozen_lake", "--episodes", "50", "--options", "{separator: ' ', prompts: {system: null}}")
    assert said.exit_code == 0, said.output
    assert said.output.count("  ok  ") == 6
    assert re.search(r"[\d,]+ steps/s", said.output)
    assert re.search(r"random  reward 0\.\d+, success \d+\.\d%", said.output)
    assert "best    reward 1.000, success 100.0%" in said.output
    assert "user | Turn 1, actions left: 10\n" in said.output
    assert "system |" not in said.output


def test_a_sound_class_of_ones_own_passes_without_a_solver() -> None:
    said = env_test(f"{BAD}:Good", "--episodes", "5")
    assert said.exit_code == 0, said.output
    assert "best    it has no such policy" in said.output
    assert "  note    the same row and replies are another episode with another seed" in said.output


def test_an_environment_with_pictures_passes() -> None:
    said = env_test(f"{HERE}/blocking_environments.py:Pictured", "--episodes", "2")
    assert said.output.count("  ok  ") == 6, said.output
    assert "  note  " not in said.output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Chance", "run again with the same seed, its first messages differ"),
        ("Salted", "run in another process with the same seed, its first messages differ"),
        ("Raises", "step(''): ValueError: invalid literal for int()"),
        ("Changes", "step('') was no valid action, and changed the state"),
        ("Infinite", "the reward must be a finite number; it is inf"),
        ("Untyped", "step returned ('and?', 0.1, False), which is not a StepResult"),
        ("Waits", "step('2'): no answer within 0.3 s"),
        pytest.param("Blocks", "it did not even yield within 1.3 s", marks=pytest.mark.slow),
        ("Leaves", "close before reset: AttributeError"),
    ],
)
def test_what_is_wrong_with_an_environment_is_told(name: str, message: str) -> None:
    said = env_test(f"{BAD}:{name}", "--episodes", "3", "--timeout", "0.3")
    assert isinstance(said.exception, RunError)
    assert "checks failed" in str(said.exception)
    assert message in said.output


@pytest.mark.slow
def test_rows_of_a_file_are_played_with_a_reward_function(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "2 + 2?", "answer": "4"}) + "\n")
    said = env_test("question", "--rows", str(rows), "--episodes", "2", "--reward", "number")
    assert said.exit_code == 0, said.output
    assert "user | 2 + 2?" in said.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frozen_lak"], "did you mean `frozen_lake`?"),
        (["frozen_lake", "--options", "[1]"], "--options must be a mapping"),
        (["frozen_lake", "--options", "{size"], "--options:1: is not valid YAML"),
        (["frozen_lake", "--timeout", "inf"], "--timeout must be a finite number of seconds, not inf"),
        (["frozen_lake", "--options", "{siz: 3}"], "unexpected keyword argument 'siz'"),
        (["frozen_lake", "--options", "{size: 1}"], "size must be at least 2"),
    ],
)
def test_what_the_user_can_fix_is_one_line(arguments: list[str], message: str) -> None:
    said = env_test(*arguments)
    assert isinstance(said.exception, UserError)
    assert message in str(said.exception)


def test_options_are_read_like_those_of_a_recipe() -> None:
    assert parsed("{p: 1e-1, name: no, size: 5}") == {"p": 0.1, "name": "no", "size": 5}
