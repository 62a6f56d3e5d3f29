"""The commands of the other guides, in a folder such as they speak of: with a recipe, which here is small."""

import shlex
from pathlib import Path

import pytest
from commands import corral
from guides import Block, block
from runs import VALIDATION, write_recipe


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    write_recipe(tmp_path, tiny_model)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text((tmp_path / "recipe.yaml").read_text())
    return tmp_path


def run(folder: Path, one: Block, *more: str, **replaced: str) -> list[str]:
    """Every command of a block. What each said."""
    said = []
    for command in one.commands:
        for text, other in replaced.items():
            command = command.replace(text, other)
        words = shlex.split(command)
        assert words[0] == "corral"
        result = corral(folder, *words[1:], *more)
        assert result.code == 0, result.stderr
        said.append(result.stdout)
    return said


def test_a_key_is_changed_from_the_command_line(folder: Path) -> None:
    [said] = run(folder, block("override"))
    assert "32 prompts x 4 samples" in said


def test_algorithms_are_chosen_from_the_command_line(folder: Path) -> None:
    plan, _ = run(folder, block("algorithms"))
    assert "dapo" in plan


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


@pytest.mark.slow
def test_a_recipe_for_several_devices_is_planned_and_trained(folder: Path) -> None:
    with (folder / "recipe.yaml").open("a") as recipe:
        recipe.write("cluster: {devices_per_node: 2, placement: {rollout: 0, actor: 1}}\n")
    plan, _ = run(folder, block("cluster-recipe"))
    assert "rollout" in plan
