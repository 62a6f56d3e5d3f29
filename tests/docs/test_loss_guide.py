"""The page about contributing a loss: its file and its commands."""

from pathlib import Path

from commands import corral
from guides import ROOT, block, blocks
from runs import write_recipe

GUIDE = ROOT / "docs" / "contributing-a-loss.md"


def test_the_loss_of_the_guide_is_planned_and_trained_with(tmp_path: Path, tiny_model: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text(recipe.read_text())
    loss, advantage = (one.text for one in blocks(GUIDE) if one.language == "python")
    (tmp_path / "my_losses.py").write_text(loss)
    (tmp_path / "my_advantages.py").write_text(advantage)
    plan, train = (command.split()[1:] for command in block("own-loss").commands)
    planned = corral(tmp_path, *plan)
    assert planned.code == 0, planned.stderr
    assert "my_losses.py:capped: the ratio, with an upper bound only; cap 1.5" in planned.stdout
    trained = corral(tmp_path, *train, "algorithm.advantage=my_advantages.py:behind_the_best")
    assert trained.code == 0, trained.stderr
    wrong = corral(tmp_path, *plan, "algorithm.loss.caps=1")
    assert wrong.code == 2
    assert (
        "is not an option of the loss my_losses.py:capped, whose options are cap; did you mean `cap`?" in wrong.stderr
    )
