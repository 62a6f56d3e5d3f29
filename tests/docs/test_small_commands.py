"""The commands of the other guides, in a folder such as they speak of: with a recipe, which here is small."""

import json
import shlex
from pathlib import Path

import pytest
from commands import corral
from guide_commands import run
from guides import ROOT, block, blocks
from runs import VALIDATION, write_recipe


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    write_recipe(tmp_path, tiny_model)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text((tmp_path / "recipe.yaml").read_text())
    return tmp_path


def test_a_key_is_changed_from_the_command_line(folder: Path) -> None:
    [said] = run(folder, block("override"))
    assert "32 prompts x 4 samples" in said


def test_settings_that_fit_are_found(folder: Path) -> None:
    [printed] = run(folder, block("fit"))
    assert "fits 8xh100-80: 8 replicas, engine native" in printed


def test_algorithms_are_chosen_from_the_command_line(folder: Path) -> None:
    plan, _ = run(folder, block("algorithms"))
    assert "dapo" in plan


def test_the_recipe_of_supervised_fine_tuning_trains(folder: Path) -> None:
    recipe, *_ = [one.text for one in blocks(ROOT / "docs" / "sft.md") if one.language == "yaml"]
    (folder / "chat.yaml").write_text(recipe)
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}]
    for name in ("rows.jsonl", "held_out.jsonl"):
        (folder / name).write_text(20 * (json.dumps({"messages": messages}) + "\n"))
    plan, said = run(folder, block("sft"))
    assert "32 rows -> 1 update of 32" in plan
    assert "step 2/2" in said
    assert "validation after training: loss" in said


def test_the_recipe_of_preferences_trains(folder: Path) -> None:
    recipe, *_ = [one.text for one in blocks(ROOT / "docs" / "preferences.md") if one.language == "yaml"]
    (folder / "preferences.yaml").write_text(recipe)
    pair = {"prompt": "Hello!", "chosen": "Hi.", "rejected": "Go away."}
    for name in ("pairs.jsonl", "held_out.jsonl"):
        (folder / name).write_text(16 * (json.dumps(pair) + "\n"))
    plan, said, without_reference = run(folder, block("preferences"))
    assert "32 pairs -> 1 update of 32" in plan
    assert "validation before training: loss 0.6931, accuracy 50.0 % (16 pairs)" in said
    assert "step 1/1" in without_reference


def test_a_first_recipe_is_written_and_planned(folder: Path) -> None:
    written, plan = run(folder, block("init"))
    assert "wrote first.yaml" in written
    assert "16 prompts x 8 samples" in plan


def test_ppo_is_one_key(folder: Path) -> None:
    run(folder, block("ppo"))


def test_checkpoints_are_evaluated_exported_and_audited(folder: Path, tiny_model: Path) -> None:
    assert corral(folder, "train", "recipe.yaml", "name=quickstart", *VALIDATION).code == 0
    run(folder, block("export"), step_000040="step_000002")
    assert (folder / "my-model" / "model.safetensors").is_file()
    first, second = block("evaluate").commands
    checkpoint = first.replace("step_000040", "step_000002")
    assert corral(folder, *shlex.split(checkpoint)[1:]).code == 0
    other = second.replace("another/model", str(tiny_model))
    assert corral(folder, *shlex.split(other)[1:], *VALIDATION).code == 0
    audit, story = run(folder, block("ledger"), **{"my-run": "quickstart"})
    assert "trained" in audit
    assert story.startswith("prompt 0")


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
def test_a_recipe_for_several_devices_is_planned_and_trained(folder: Path) -> None:
    with (folder / "recipe.yaml").open("a") as recipe:
        recipe.write("cluster: {devices_per_node: 2, placement: {rollout: 0, actor: 1}}\n")
    plan, _ = run(folder, block("cluster-recipe"))
    assert "rollout" in plan
