"""What a user gets wrong is one clear line each, on stderr, with an exit code; never a traceback."""

import json
from pathlib import Path

import pytest
import torch
from commands import Finished, corral
from runs import make_manifest, train_here, write_recipe

from corral.cli.main import lacks_memory
from corral.training.checkpoint import step_folder

GENERATED = '{path: "arithmetic:addition", size: 40, options: {digits: 1}}'
"""The recipe's data."""


def train(folder: Path, model: Path, *overrides: str) -> Finished:
    if not (folder / "recipe.yaml").exists():
        write_recipe(folder, model)
    return corral(folder, "train", "recipe.yaml", *overrides)


def the_error(finished: Finished) -> str:
    """The only thing on stderr."""
    assert finished.code == 2, finished.stderr
    assert finished.errors == finished.stderr.splitlines()
    [error] = finished.errors
    return error.removeprefix("error: ")


def replace_in_recipe(folder: Path, model: Path, old: str, new: str) -> None:
    path = write_recipe(folder, model)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_unknown_key_with_its_place_and_a_suggestion(tmp_path: Path, tiny_model: Path) -> None:
    replace_in_recipe(tmp_path, tiny_model, "learning_rate", "learning_rat")
    error = the_error(train(tmp_path, tiny_model))
    assert error.startswith("recipe.yaml:9: ")
    assert "`optimizer.learning_rat` is not a key" in error
    assert "did you mean `optimizer.learning_rate`?" in error


def test_wrong_type(tmp_path: Path, tiny_model: Path) -> None:
    replace_in_recipe(tmp_path, tiny_model, "prompts_per_step: 4", "prompts_per_step: four")
    error = the_error(train(tmp_path, tiny_model))
    assert error.startswith("recipe.yaml:8: ")
    assert "`batch.prompts_per_step: four` should be" in error


def test_unknown_key_in_an_override(tmp_path: Path, tiny_model: Path) -> None:
    error = the_error(train(tmp_path, tiny_model, "schedule.stepps=3"))
    assert "did you mean `schedule.steps`?" in error


def test_several_problems_are_several_lines(tmp_path: Path, tiny_model: Path) -> None:
    finished = train(tmp_path, tiny_model, "batch.ppo_epochs=none", "schedule.stepps=3")
    assert finished.code == 2
    assert len(finished.errors) == 2
    assert finished.errors == finished.stderr.splitlines()


def test_impossible_placement(tmp_path: Path, tiny_model: Path) -> None:
    error = the_error(train(tmp_path, tiny_model, "cluster.placement={'actor,rollout': '0-3'}"))
    assert "device 1 does not exist; `cluster.nodes` x `cluster.devices_per_node` gives device 0 only" in error


def test_more_devices_than_one_process_can_use(tmp_path: Path, tiny_model: Path) -> None:
    finished = train(tmp_path, tiny_model, "cluster.runtime=local", "cluster.devices_per_node=4")
    assert finished.code == 2
    assert any("`cluster.runtime: local`" in error for error in finished.errors)


def test_missing_recipe(tmp_path: Path) -> None:
    assert "nowhere.yaml" in the_error(corral(tmp_path, "train", "nowhere.yaml"))


def test_missing_data_file(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "questions.jsonl").touch()
    replace_in_recipe(tmp_path, tiny_model, GENERATED, "{path: question.jsonl}")
    assert the_error(train(tmp_path, tiny_model)) == "no file question.jsonl; did you mean `questions.jsonl`?"


def test_empty_data_set(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "questions.jsonl").touch()
    replace_in_recipe(tmp_path, tiny_model, GENERATED, "{path: questions.jsonl}")
    assert the_error(train(tmp_path, tiny_model)) == "questions.jsonl: there are no rows in it"


def test_prompt_too_long(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": "short", "answer": ""}, {"prompt": "long " * 20, "answer": ""}]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    replace_in_recipe(tmp_path, tiny_model, GENERATED, "{path: questions.jsonl}")
    error = the_error(train(tmp_path, tiny_model))
    assert "1 of 2 prompts have more tokens than data.max_prompt_tokens: 48" in error
    assert "the first is questions.jsonl:2 with 119" in error


def test_missing_model(tmp_path: Path, tiny_model: Path) -> None:
    error = the_error(train(tmp_path, tiny_model, f"model.path={tmp_path}/models/none"))
    assert error == f"model.path: {tmp_path}/models/none is not a folder"


def test_folder_that_is_not_a_model(tmp_path: Path, tiny_model: Path) -> None:
    assert f"{tmp_path}/config.json" in the_error(train(tmp_path, tiny_model, f"model.path={tmp_path}"))


def test_folder_whose_configuration_is_no_mapping(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    expected = f"{tmp_path}/config.json: is not a model's configuration"
    assert the_error(train(tmp_path, tiny_model, f"model.path={tmp_path}")) == expected


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_model_with_a_damaged_file(tmp_path: Path, tiny_model: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[: len(content) // 2] if file.name == name else content)
    assert str(folder) in the_error(train(tmp_path, tiny_model, f"model.path={folder}"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vowels.py:share_of_vowel", "`vowels.py` has no `share_of_vowel`; did you mean `share_of_vowels`?"),
        ("vowel.py:share_of_vowels", "vowel.py; did you mean `vowels.py`?"),
        ("no_such_module:function", "there is no module `no_such_module` here or among the installed packages"),
        ("exakt", "there is no reward `exakt`; did you mean `exact`?"),
    ],
)
def test_reward_that_is_not_found(tmp_path: Path, tiny_model: Path, name: str, expected: str) -> None:
    assert expected in the_error(train(tmp_path, tiny_model, f"environment.reward.name={name}"))


def test_a_plan_knows_which_rewards_there_are(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    error = the_error(corral(tmp_path, "plan", "recipe.yaml", "environment.reward.name=exakt"))
    assert error.startswith("there is no reward `exakt`; did you mean `exact`?")


def test_reward_that_cannot_be_imported(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_like_it\ndef score(response): ...\n")
    error = the_error(train(tmp_path, tiny_model, "environment.reward.name=broken.py:score"))
    assert "importing `broken.py` failed: ModuleNotFoundError: No module named 'nothing_like_it'" in error


def test_more_tokens_than_the_model_has_positions(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("rollout.max_response_tokens=1000", "batch.max_tokens_per_micro_batch=2000")
    error = the_error(train(tmp_path, tiny_model, *overrides))
    assert error == "data.max_prompt_tokens + rollout.max_response_tokens = 1048, but the model has 512 positions"


def test_run_folder_that_cannot_be_made(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot make the run folder" in the_error(train(tmp_path, tiny_model, f"logging.runs={tmp_path}/file"))


def test_evaluating_without_questions(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    assert the_error(corral(tmp_path, "evaluate", "recipe.yaml")) == "data.validation: there is nothing to evaluate on"


def test_unknown_command_and_option(tmp_path: Path) -> None:
    for arguments in (["trian"], ["train"], ["plan", "recipe.yaml", "--jason"]):
        finished = corral(tmp_path, *arguments)
        assert finished.code == 2
        assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("given", "key"),
    [(["--steps", "3"], "schedule.steps=3"), (["--learning-rate=3e-6"], "optimizer.learning_rate=3e-6")],
)
def test_an_option_that_is_a_key_of_the_recipe_is_named_as_one(tmp_path: Path, given: list[str], key: str) -> None:
    option = given[0].partition("=")[0]
    for verb in ("train", "sft", "plan", "rehearse", "evaluate"):
        error = the_error(corral(tmp_path, verb, "recipe.yaml", *given))
        assert error == f"{option} is no option; keys of the recipe have no dashes: {key}"


def test_a_message_moves_no_cursor_and_colors_nothing(tmp_path: Path, tiny_model: Path) -> None:
    error = the_error(train(tmp_path, tiny_model, "schedule.st\x1b[2J\x1b]0;title\x07eps=3"))
    assert r"schedule.st\x1b[2J\x1b]0;title\x07eps" in error
    assert "\x1b" not in error


def test_a_file_that_is_too_large_for_a_recipe_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "recipe.yaml").open("wb") as file:
        file.truncate(1 << 40)
    error = the_error(corral(tmp_path, "train", "recipe.yaml"))
    assert error == "recipe.yaml: has 1099511627776 bytes, and a recipe has at most 1048576; is it one?"


def test_a_file_that_is_too_large_for_a_template_is_not_read(tmp_path: Path, tiny_model: Path) -> None:
    with (tmp_path / "template.jinja").open("wb") as file:
        file.truncate(1 << 40)
    error = the_error(train(tmp_path, tiny_model, f"model.chat_template={tmp_path}/template.jinja"))
    assert "template.jinja has more than 1048576 bytes; is it a template?" in error


def test_one_bad_row_of_many_ends_a_run_or_is_skipped_and_named(tmp_path: Path, tiny_model: Path) -> None:
    replace_in_recipe(tmp_path, tiny_model, GENERATED, "{path: rows.jsonl}")
    rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(8)]
    answered = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    rows[5:5] = ['{"prompt": "cut o', json.dumps({"prompt": answered})]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert the_error(train(tmp_path, tiny_model)).startswith("rows.jsonl:6: not valid JSON")
    finished = train(tmp_path, tiny_model, "data.on_bad_row=skip")
    assert finished.code == 0, finished.stderr
    assert "rows.jsonl: 2 of 10 rows skipped" in finished.stdout
    assert "rows.jsonl:7: column `prompt` ends with a message of the assistant" in finished.stdout


def test_a_checkpoint_that_no_run_has_written_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, "schedule.steps=1")
    checkpoint = step_folder(run / "checkpoints", 1)
    (checkpoint / "state.json").write_text('{"step": 1, "trained_with": 3}')
    make_manifest(checkpoint)
    error = the_error(train(tmp_path, tiny_model, f"checkpoint.resume={checkpoint}", "name=other"))
    assert error.startswith(f"checkpoint.resume: {checkpoint} is not a usable checkpoint: ")
    assert "state.json: trained_with: Input should be" in error


def test_too_little_memory_is_one_line() -> None:
    for allocate in (lambda: bytearray(2**62), lambda: torch.empty(2**60)):
        with pytest.raises((MemoryError, RuntimeError)) as raised:
            allocate()
        assert lacks_memory(raised.value)
    assert not lacks_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
