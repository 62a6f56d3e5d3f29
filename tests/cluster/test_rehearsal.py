"""A whole rehearsal: the recipe's workers on nodes that are all here, a death, and a resume on another mesh."""

import json
from pathlib import Path

import pytest
from commands import Finished, start_corral
from runs import write_recipe

from corral.observe.run_files import read_metrics

ON_TWO_NODES = "cluster={nodes: 2, devices_per_node: 2, placement: {rollout: 0-1, actor: 2-3}}"
TIMEOUT_S = 500.0


def rehearse(folder: Path, model: Path, *overrides: str) -> Finished:
    recipe = write_recipe(folder, model)
    return start_corral(folder, "rehearse", str(recipe), *overrides).wait(TIMEOUT_S)


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_workers_meshes_a_death_and_a_resume(tmp_path: Path, tiny_model: Path) -> None:
    ended = rehearse(tmp_path, tiny_model, ON_TWO_NODES, "train.parallel.pipeline=2", "--json")
    assert ended.code == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    rows = dict(report["rows"])
    assert rows["workers"].startswith("2 nodes of 2 devices: rollout 2, actor 2; trainers: 2 stages")
    killed = next(how for what, how in rows.items() if what.endswith(" killed"))
    assert killed.startswith(("went on, in ", "workers started again, in "))
    assert rows["resume"].startswith("with 2 shards")
    assert report["passed"]
    assert report["problems"] == []
    run = tmp_path / report["run"]
    made = [row for row in read_metrics(run / "metrics.jsonl") if "updates/made" in row]
    assert len(made) >= 4
    assert all(row["updates/made"] > 0 for row in made)
    assert len(list((run / "checkpoints").glob("step_*"))) > 0


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_what_is_broken_says_so_in_words(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "broken.py").write_text("def reward(response):\n    raise ValueError('no column `solution`')\n")
    reward = f"environment.reward.name={tmp_path}/broken.py:reward"
    ended = rehearse(tmp_path, tiny_model, "cluster={devices_per_node: 2}", reward)
    assert ended.code == 1
    assert "samples failed, 16 of them with: ValueError: no column `solution`" in ended.errors[-1]


@pytest.mark.slow
def test_a_reward_that_cannot_be_loaded_is_known_before_workers_start(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_here\n")
    reward = f"environment.reward.name={tmp_path}/broken.py:reward"
    ended = rehearse(tmp_path, tiny_model, "cluster={devices_per_node: 2}", reward)
    assert ended.code != 0
    assert "a_package_that_is_not_here" in ended.errors[-1]
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))
    assert not any("starting workers" in line for line in ended.stderr.splitlines())
