"""What has changed since a run was trained is reported, and refused where it would make the run another experiment."""

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import corral
from runs import VALIDATION, make_manifest, rows_of, train_here, write_recipe
from tiny import CHARACTERS, save_tiny_model

from corral.loop import resuming
from corral.loop.resuming import ON_RESUME, find_changes, hash_inputs, rule_for
from corral.loop.train import train
from corral.observe.console import Console
from corral.recipe.errors import UserError
from corral.recipe.keys import all_keys
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.training.checkpoint import read_state


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of a finished run and its recipe; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("two_steps")
    train_here(folder, tiny_model)
    return folder


@pytest.fixture
def folder(tmp_path: Path, two_steps: Path, tiny_model: Path) -> Iterator[Path]:
    shutil.copytree(two_steps / "runs", tmp_path / "runs")
    write_recipe(tmp_path, tiny_model)
    return tmp_path


def go_on(folder: Path, *overrides: str, anyway: bool = False) -> str:
    """What is printed when the run is started again."""
    recipe = load_recipe(folder / "recipe.yaml", overrides)
    stream = io.StringIO()
    train(recipe, make_plan(recipe), Console(stream), resume_anyway=anyway)
    return stream.getvalue()


REFUSED = {
    "seed": ("seed=1",),
    "model": ("model.lora={rank: 2}",),
    "data": ("data.train.options.digits=2",),
    "data keys": ("data.system=Be short.",),
    "reward": ("environment.reward.name=exact",),
    "options": ("environment.reward.options.calls=1",),
    "environment": ("environment.name=search",),
    "algorithm": ("algorithm.name=dr_grpo",),
    "loss": ("algorithm.loss=gspo",),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_experiment_is_refused_with_old_and_new_and_nothing_is_written(folder: Path, kind: str) -> None:
    before = sorted(path.name for path in (folder / "runs" / "tiny").iterdir())
    [override] = REFUSED[kind]
    with pytest.raises(UserError, match="was trained for 2 steps with something else: ") as raised:
        go_on(folder, override, "schedule.steps=3")
    key = override.partition("=")[0]
    assert key.split(".")[-1] in str(raised.value)
    assert " -> " in str(raised.value)
    assert "--resume-anyway" in str(raised.value)
    assert "(name=tiny-2)" in str(raised.value)
    assert sorted(path.name for path in (folder / "runs" / "tiny").iterdir()) == before


def test_an_edited_reward_is_another_reward_and_a_moved_one_is_not(folder: Path) -> None:
    """The recipe of the copied run named a file in another folder."""
    assert "changed since" not in go_on(folder)
    reward = folder / "vowels.py"
    reward.write_text(reward.read_text().replace("aeiou", "xyz"))
    with pytest.raises(UserError, match=re.escape("something else: environment.reward.name: ")):
        go_on(folder, "schedule.steps=3")
    printed = go_on(folder, "schedule.steps=3", anyway=True)
    assert "changed since: environment.reward.name: " in printed
    assert [row["step"] for row in rows_of(folder / "runs" / "tiny")] == [1, 2, 3]
    reward.write_text(reward.read_text() + "\n")
    with pytest.raises(UserError, match=re.escape("something else: environment.reward.name: the content of ")):
        go_on(folder, "schedule.steps=4")
    reward.write_text(reward.read_text()[:-1])
    assert "changed since" not in go_on(folder, "schedule.steps=3")  # it is what the run is trained with now


def test_harmless_changes_are_printed_and_taken(folder: Path) -> None:
    changes = ("schedule.steps=3", "optimizer.learning_rate=0.001", "environment.reward.workers=2")
    printed = go_on(folder, *changes)
    assert "changed since: schedule.steps: 2 -> 3" in printed
    assert "changed since: optimizer.learning_rate: 0.01 -> 0.001" in printed
    assert "changed since: environment.reward.workers: 1 -> 2" in printed
    assert [row["policy/learning_rate"] for row in rows_of(folder / "runs" / "tiny")] == [0.01, 0.01, 0.001]


def test_the_command_line_refuses_with_code_2_and_goes_on_if_it_must(folder: Path) -> None:
    command = ("train", "recipe.yaml", "schedule.steps=3", "algorithm.name=dr_grpo")
    finished = corral(folder, *command)
    assert finished.code == 2
    [error] = finished.errors
    assert "algorithm.name: grpo -> dr_grpo" in error
    finished = corral(folder, *command, "--resume-anyway")
    assert finished.code == 0, finished.stderr
    assert "resumed after step 2" in finished.stdout
    assert "changed since: algorithm.name: grpo -> dr_grpo" in finished.stdout


def test_a_model_with_other_tokens_is_refused_in_words_even_then(folder: Path, tiny_model: Path) -> None:
    other = folder / "other"
    save_tiny_model(other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = CHARACTERS[20], CHARACTERS[21]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"something else: model.path: .* -> .*other"):
        go_on(folder, f"model.path={other}", "schedule.steps=3")
    with pytest.raises(UserError, match=r"step_000002 was trained with other tokens than .*other has: '.' is number"):
        go_on(folder, f"model.path={other}", "schedule.steps=3", anyway=True)


def test_a_finished_run_says_so_without_loading_anything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.loop.train.supervise", None)
    printed = go_on(folder)
    assert (
        "tiny is finished: all 2 steps were made. `schedule.steps=4` trains it further, `name=tiny-2` begins" in printed
    )
    assert "corral export" in printed
    assert "finished" in go_on(folder, "logging.samples=0")
    with pytest.raises(UserError, match=r"finished after 2 steps, and would not train with batch.ppo_epochs: 1 -> 2"):
        go_on(folder, "batch.ppo_epochs=2")


@pytest.mark.slow
def test_a_run_of_epochs_is_known_to_be_finished(tmp_path: Path, tiny_model: Path) -> None:
    epochs = ("~schedule.steps", "schedule.epochs=0.1")
    run = train_here(tmp_path, tiny_model, *epochs)
    assert [row["step"] for row in rows_of(run)] == [1]
    assert "tiny is finished: all 1 steps were made" in go_on(tmp_path, *epochs)
    assert "finished" not in go_on(tmp_path, "~schedule.steps", "schedule.epochs=0.2").split("\n\n")[0]


def test_a_validation_that_is_missing_at_the_end_is_made(folder: Path) -> None:
    printed = go_on(folder, *VALIDATION, anyway=True)
    assert "validation after training" in printed


def test_a_run_without_a_record_of_its_files_goes_on_with_a_note(folder: Path) -> None:
    """One that an earlier release has made."""
    checkpoint = folder / "runs" / "tiny" / "checkpoints" / "step_000002"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["trained_with"]
    rewrite_state(checkpoint, state)
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "runs" / "tiny" / "recipe.yaml").write_text(recipe)  # of this folder: paths are all that is known
    printed = go_on(folder, "schedule.steps=3")
    assert "does not say what files contained: whether the recipe's were edited since is not known" in printed
    assert "trained_with" in read_state(checkpoint.with_name("step_000003"))


def rewrite_state(checkpoint: Path, state: dict[str, Any]) -> None:
    (checkpoint / "state.json").write_text(json.dumps(state))
    make_manifest(checkpoint)


def test_a_start_that_is_refused_leaves_nothing_to_compare_with(folder: Path) -> None:
    with pytest.raises(UserError, match="seed"):
        go_on(folder, "schedule.steps=3", "seed=5", anyway=True)
    with pytest.raises(UserError, match=r"something else: environment.reward.name: .* -> exact"):
        go_on(folder, "schedule.steps=3", "environment.reward.name=exact")
    assert "resumed after step 2" in go_on(folder, "schedule.steps=3")


def test_a_new_run_from_another_runs_checkpoint_may_differ(folder: Path) -> None:
    checkpoint = folder / "runs" / "tiny" / "checkpoints" / "step_000002"
    printed = go_on(
        folder, f"checkpoint.resume={checkpoint}", "name=other", "algorithm.name=dr_grpo", "schedule.steps=3"
    )
    assert "changed since: algorithm.name: grpo -> dr_grpo" in printed
    assert [row["step"] for row in rows_of(folder / "runs" / "other")] == [3]


# --- what is compared


def test_every_key_has_a_rule() -> None:
    sections = {path[0] for path in all_keys()} - {"environments"}
    assert sections == {key.split(".")[0] for key in ON_RESUME} | {"checkpoint"}
    patterns = {".".join(path) for path in all_keys()}
    assert set(ON_RESUME) <= patterns
    for path in all_keys():
        assert rule_for(path) in ("refused", "taken", "not compared")


def test_rules_of_environments_are_those_of_an_environment() -> None:
    assert rule_for(("environments", "lake", "options", "size")) == "refused"
    assert rule_for(("environments", "lake", "timeout_s")) == "taken"
    assert rule_for(("environment", "rewards", "right", "weight")) == "refused"
    assert rule_for(("environments", "lake", "rewards", "right", "workers")) == "taken"
    assert rule_for(("critic", "path")) == "refused"
    assert rule_for(("critic", "optimizer", "learning_rate")) == "taken"


def test_data_are_compared_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "HASHED_BYTES", 1 << 20)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n' * 20_000)
    values = "{name: x, model: {path: m}, schedule: {steps: 1}, data: {train: {path: %s}}}"
    recipe_file = tmp_path / "recipe.yaml"

    def hashed(path: object) -> str | None:
        recipe_file.write_text(values % path)
        return hash_inputs(load_recipe(recipe_file)).get("data.train.path")

    first = hashed(rows)
    moved = tmp_path / "moved.jsonl"
    shutil.copy(rows, moved)
    assert hashed(moved) == hashed(tmp_path / "moved*.jsonl") == first
    moved.write_text(rows.read_text()[:160_000] + "b" + rows.read_text()[160_001:])
    assert hashed(moved) not in (None, first)  # a small file is read as a whole
    rows.write_text('{"prompt": "a"}\n' * 200_000)
    large = hashed(rows)
    rows.write_text(rows.read_text() + "\n")
    assert hashed(rows) != large  # of a large one the size is seen, its ends, and blocks in between
    assert hashed("arithmetic:addition") is None
    assert hashed("hf:openai/gsm8k") is None


def test_code_is_compared_where_options_name_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def run(): ...")
    (tmp_path / "recipe.yaml").write_text(
        f"{{name: x, model: {{path: m}}, schedule: {{steps: 1}}, data: {{train: {{path: boards}}}}, environment: "
        f"{{name: agent, options: {{agent: '{tmp_path}/agent.py:run', command: [python, {tmp_path}/agent.py]}}}}}}"
    )
    before = hash_inputs(load_recipe(tmp_path / "recipe.yaml"))
    assert set(before) == {"environment.options.agent", "environment.options.command"}
    (tmp_path / "agent.py").write_text("def run(): return 1")
    after = hash_inputs(load_recipe(tmp_path / "recipe.yaml"))
    assert all(before[key] != after[key] for key in before)


def test_a_recipe_of_another_release_is_not_compared(folder: Path) -> None:
    run = folder / "runs" / "tiny"
    (run / "recipe.yaml").write_text("{name: tiny, optimiser: {learning_rate: 1}}")
    changes, note = find_changes(run / "checkpoints" / "step_000002", load_recipe(folder / "recipe.yaml"))
    assert changes == []
    assert note is not None
    assert "written for another release" in note
