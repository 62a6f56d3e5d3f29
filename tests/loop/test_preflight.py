"""What can be known to be wrong is known before the model is loaded."""

import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import corral
from runs import VALIDATION, train_here, write_recipe

from corral.api import checked_plan
from corral.loop.preflight import check_command, check_disk, check_here
from corral.loop.train import commands_after, train
from corral.observe.console import Console
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan

BROKEN = """\
import corral


def name_error(response):
    return len(respose)  # line 5


def wants_tags(response):
    if "<answer>" not in response:
        raise ValueError("no tag")  # line 10
    return 1.0


class Down(corral.Env):
    async def reset(self, row, seed):
        raise ConnectionError("the server is down")  # line 16

    async def step(self, reply):
        return corral.StepResult([], 0.0, done=True)


class Blocking(corral.BlockingEnv):
    def reset(self, row, seed):
        raise ConnectionError("the game is gone")  # line 24

    def step(self, reply):
        return corral.StepResult([], 0.0, done=True)


def mean_loss(terms):
    return -(terms.advantages * terms.logprobs).mean()


def loss_of_verl(terms):
    return mean_loss(terms), 0.0, 0.0


@corral.loss(trains_on_rows=False)
def unfinished(terms, options):
    return -terms.advantages * terms.logprobs.detach()


def logarithm(terms):
    return -terms.logprobs.log()


def one_advantage(batch):
    return batch.rewards.mean()
"""
NO_WEIGHTS = "model.safetensors"


def recipe_in(folder: Path, model: Path, *overrides: str) -> Sequence[str]:
    """Overrides for a model whose weights are missing, so that loading it fails; and for files that are broken."""
    (folder / "broken.py").write_text(BROKEN)
    write_recipe(folder, model)
    empty = folder / "without_weights"
    shutil.copytree(model, empty, ignore=shutil.ignore_patterns(NO_WEIGHTS))
    return [f"model.path={empty}", *(override.replace("{folder}", str(folder)) for override in overrides)]


def train_with(folder: Path, overrides: Sequence[str]) -> None:
    recipe = load_recipe(folder / "recipe.yaml", overrides)
    train(recipe, make_plan(recipe), Console(io.StringIO()))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("environment.reward.name={folder}/broken.py:name_error", r"NameError: name 'respose' .*\(broken.py:5\)"),
        ("environment.name={folder}/broken.py:Down", r"reset: ConnectionError: the server is down \(broken.py:16\)"),
        ("environment.name={folder}/broken.py:Blocking", r"ConnectionError: the game is gone \(broken.py:24\)"),
        ("data.train={path: '{folder}/rows.jsonl'}", r"rows.jsonl:2: not valid JSON"),
        ("algorithm.loss={folder}/broken.py:mean_loss", "algorithm.loss: .* returned one number; a loss is"),
        ("algorithm.loss={folder}/broken.py:loss_of_verl", "returned a tuple; a loss is a tensor of one number for"),
        ("algorithm.loss={folder}/broken.py:unfinished", "no gradient comes back to `terms.logprobs`"),
        ("algorithm.loss={folder}/broken.py:logarithm", "not all numbers are finite"),
        ("algorithm.advantage={folder}/broken.py:one_advantage", "returned one number; advantages are a tensor of"),
        ("logging.trackers=[swanlab]", r"names swanlab, which is not installed"),
    ],
)
def test_it_is_an_error_before_the_model_is_loaded_and_in_a_plan_that_checks(
    tmp_path: Path, tiny_model: Path, override: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.observe.trackers.find_spec", lambda name: None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": \n')
    overrides = recipe_in(tmp_path, tiny_model, override)
    with pytest.raises(UserError, match=expected):
        train_with(tmp_path, overrides)
    recipe = load_recipe(tmp_path / "recipe.yaml", overrides)
    with pytest.raises(UserError, match=expected):
        check_here(checked_plan(recipe), lambda warning: None)


@pytest.mark.parametrize("sources", [None, {"apps": "code"}])
def test_rows_of_a_source_without_a_scorer_are_an_error(tmp_path: Path, tiny_model: Path, sources: object) -> None:
    """Also where the first row, which is tried, has one; and in a run before the model is loaded."""
    rows = [{"prompt": "1+1", "answer": "2", "data_source": name} for name in ("openai/gsm8k", "apps", "taco", "taco")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = json.dumps({"name": "by_source", "options": {"sources": sources} if sources else {}})
    data = f"data.train={{path: {tmp_path}/rows.jsonl}}"
    overrides = recipe_in(tmp_path, tiny_model, f"environment.reward={reward}", data)
    with pytest.raises(UserError) as refused:
        train_with(tmp_path, overrides)
    found = re.findall("no scorer is known for `data_source: (.*?)`; set", str(refused.value))
    assert found == (["taco"] if sources else ["apps", "taco"])
    with pytest.raises(UserError, match="`data_source: taco`"):
        check_here(checked_plan(load_recipe(tmp_path / "recipe.yaml", overrides)), lambda warning: None)


@pytest.mark.parametrize("tag", [None, "zzz", ["sums"]])
def test_a_row_of_an_unknown_environment_is_an_error(tmp_path: Path, tiny_model: Path, tag: object) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2", "environment": tag}) + "\n")
    overrides = recipe_in(tmp_path, tiny_model, "~environment", "environments={sums: {reward: {name: math}}}")
    recipe = load_recipe(tmp_path / "recipe.yaml", [*overrides, f"data.train={{path: {tmp_path}/rows.jsonl}}"])
    with pytest.raises(UserError, match=f"the column `environment` is {re.escape(repr(tag))}; there are sums"):
        check_here(checked_plan(recipe), lambda warning: None)


def test_a_reward_that_fails_for_one_reply_is_a_warning(tmp_path: Path, tiny_model: Path) -> None:
    """A model's replies may be others."""
    overrides = recipe_in(tmp_path, tiny_model, "environment.reward.name={folder}/broken.py:wants_tags")
    warnings: list[str] = []
    checked = check_here(checked_plan(load_recipe(tmp_path / "recipe.yaml", overrides)), warnings.append)
    assert checked[-1] == "environment and reward: called once with a row"
    [warning] = warnings
    assert warning.startswith("environment: called once, with a row and its answer as the reply, it failed: ValueError")
    assert "(broken.py:10)" in warning


def test_the_command_line_checks(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    finished = corral(tmp_path, "plan", "recipe.yaml", "--check", *VALIDATION)
    assert finished.code == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert [line.strip().split(":")[0] for line in lines[lines.index("checked") + 1 :]] == [
        "trackers", "disk", "data.train", "data.validation", "environment and reward"
    ]  # fmt: skip
    (tmp_path / "vowels.py").write_text("def share_of_vowels(response):\n    return lenght(response)\n")
    broken = ("plan", "recipe.yaml", "--check", "data.validation={path: nowhere.jsonl}")
    in_json = corral(tmp_path, *broken, "--json")
    assert (in_json.code, in_json.stdout) == (2, "")
    finished = corral(tmp_path, *broken)
    assert finished.code == 2
    assert len(finished.errors) == 2
    assert "no file nowhere.jsonl" in finished.errors[0]
    assert "NameError: name 'lenght' is not defined (vowels.py:2)" in finished.errors[1]


def test_a_disk_without_room_for_a_checkpoint_is_an_error(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = checked_plan(load_recipe(write_recipe(tmp_path, tiny_model)))
    assert plan.shape is not None
    one, warnings = plan.shape.num_parameters * 12, list[str]()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    free = one - 1
    with pytest.raises(UserError, match=r"free, and a checkpoint takes .*KiB: free some space"):
        check_disk(plan, tmp_path / "runs" / "new", warnings.append)
    free = one
    check_disk(plan, tmp_path / "runs" / "new", warnings.append)
    [warning] = warnings
    assert "2 checkpoints and one that is being written take" in warning


# --- bad rows


@pytest.mark.slow
def test_bad_rows_are_skipped_counted_and_named(tmp_path: Path, tiny_model: Path) -> None:
    rows = [json.dumps({"prompt": f"{i}+1", "answer": str(i + 1)}) for i in range(8)]
    rows[2:2] = ["{", '{"question": "?"}', "[]"]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    write_recipe(tmp_path, tiny_model)
    stream = io.StringIO()
    source = f"data.train={{path: '{tmp_path}/rows.jsonl'}}"
    recipe = load_recipe(tmp_path / "recipe.yaml", [source, "data.on_bad_row=skip", "schedule.steps=1"])
    run = train(recipe, make_plan(recipe), Console(stream))
    assert "rows.jsonl: 3 of 11 rows skipped (`data.on_bad_row`): " in stream.getvalue()
    assert "rows.jsonl:3: not valid JSON" in stream.getvalue()
    log = (run / "logs" / "main.log").read_text()
    assert all(f"skipped: {tmp_path}/rows.jsonl:{line}:" in log for line in (3, 4, 5))
    with pytest.raises(UserError, match=r"rows.jsonl:3: not valid JSON"):
        train_with(tmp_path, [source, "name=other"])
    (tmp_path / "rows.jsonl").write_text("{\n{\n")
    with pytest.raises(
        UserError, match=r"no rows in it but 2 that cannot be read, the first: .*rows.jsonl:1: not valid JSON"
    ):
        train_with(tmp_path, [source, "data.on_bad_row=skip", "name=other"])


# --- what is printed at the end


def test_the_evaluate_command_is_printed_where_it_works(tmp_path: Path, tiny_model: Path) -> None:
    file = write_recipe(tmp_path, tiny_model)
    assert "evaluate" not in commands_after(load_recipe(file), tmp_path, file)
    assert "evaluate" in commands_after(load_recipe(file, VALIDATION), tmp_path, file)
    program = load_recipe(file, [*VALIDATION, "environment.reward.name=corral_objects:mine"])
    assert "evaluate" not in commands_after(program, tmp_path, file)


@pytest.mark.slow
def test_the_printed_evaluate_command_works(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, *VALIDATION)
    recipe = load_recipe(run / "recipe.yaml")
    command = commands_after(recipe, run / "checkpoints" / "step_000002", run / "recipe.yaml")["evaluate"]
    finished = corral(tmp_path, *command.split()[1:])
    assert finished.code == 0, finished.stderr
    assert "validation" in finished.stdout


def test_the_program_that_uploads_checkpoints_must_be_there() -> None:
    with pytest.raises(UserError, match=r"`checkpoint\.upload`: there is no program rclown on this machine"):
        check_command("checkpoint.upload", "rclown")
