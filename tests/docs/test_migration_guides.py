"""The pages for those who come from other systems: their commands run, and their recipes are what `migrate` prints."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from commands import corral
from guide_commands import run
from guides import ROOT, block, blocks

from corral.api import load_recipe
from corral.data.rows import Row
from corral.migrate.config_sources import migrate_file
from corral.migrate.migration import recipe_text
from corral.recipe.keys import find_key
from corral.rewards.reward_function import call_with

GOLDEN = ROOT / "tests" / "migrate" / "golden"
SOURCES = {
    "verl": ("train.sh", "verl_dstack/input.sh"),
    "search-r1": ("train.sh", "search_r1_multinode/input.sh"),
    "roll": ("frozen_lake.yaml", "roll_guide_two_nodes/input.yaml"),
    "rlinf": ("grpo.yaml", "rlinf_devices_apart/input.yaml"),
}
"""Which file a page speaks of, and what is in it."""


@pytest.mark.slow
def test_every_page_s_commands_run(tmp_path: Path) -> None:
    pages = {
        "verl": block("from-verl"),
        "search-r1": block("from-search-r1"),
        "roll": block("from-roll"),
        "rlinf": block("from-rlinf"),
    }
    for system, one in pages.items():
        file, source = SOURCES[system]
        folder = tmp_path / system
        folder.mkdir()
        (folder / file).write_text((GOLDEN / source).read_text())
        run(folder, one)


@pytest.mark.parametrize("system", SOURCES)
@pytest.mark.parametrize("suffix", [".md", ".zh.md"])
def test_a_page_shows_what_is_read_and_what_comes_out(system: str, suffix: str) -> None:
    _, source = SOURCES[system]
    shown = [one.text for one in blocks(ROOT / "docs" / f"from-{system}{suffix}") if one.language in ("text", "yaml")]
    assert shown == [(GOLDEN / source).read_text(), recipe_text(migrate_file(GOLDEN / source))]


def test_a_script_becomes_a_recipe_that_runs(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text((GOLDEN / "verl_slurm/input.sh").read_text())
    run(tmp_path, block("migrate"))


def test_commands_of_verl_run_as_they_are(tmp_path: Path, tiny_model: Path) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "1?"}],
            "reward_model": {"ground_truth": "1"},
        }
    ]
    pq.write_table(pa.Table.from_pylist(rows * 8), tmp_path / "train.parquet")
    small = ["data.train_batch_size=2", "data.max_prompt_length=48", "data.max_response_length=8"]
    small += ["trainer.total_training_steps=1", "trainer.logger=console", "algorithm.adv_estimator=grpo"]
    small += ["actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    first, second = (
        shlex.split(command.replace("MODEL", str(tiny_model))) for command in block("migrate-train").commands
    )
    trained = corral(tmp_path, *first[1:], *small)
    assert trained.code == 0, trained.stderr
    assert second[:3] == ["python", "-m", "corral.verl"]
    assert second[3:] == first[first.index("--") + 1 :]  # which is the same: see tests/cli/test_migrate.py


def test_configurations_are_named_as_over_there(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    for system in ("roll", "rlinf"):
        file, source = SOURCES[system]
        (tmp_path / "configs" / file).write_text((GOLDEN / source).read_text())
    run(tmp_path, block("migrate-config"))


def test_the_page_about_trl_names_keys_that_there_are_and_a_recipe_that_loads() -> None:
    page = ROOT / "docs" / "from-trl.md"
    cells = [line.split(" | ")[-1] for line in page.read_text().splitlines() if line.startswith("| `")]
    named = {key for cell in cells for key in re.findall(r"`([a-z_]+(?:\.[a-z_*]+)+)`", cell)}
    assert len(named) > 60
    assert not {key for key in named if find_key(tuple(key.split("."))) is None}
    script, run, recipe = blocks(page)
    assert load_recipe(yaml.safe_load(recipe.text)).algorithm.kl.coefficient == 0.001
    functions: list[Any] = [one for one in ast.parse(script.text).body if isinstance(one, ast.FunctionDef)]
    own: dict[str, Any] = {}
    exec(compile(ast.Module(functions, []), "script", "exec"), own)
    row = Row([{"role": "user", "content": "2 + 3?"}], "5", "", {})
    assert [score.reward for score in call_with(own["right"], ["It is 5", "6"], row, {})] == [1, 0]
    assert [score.reward for score in call_with(own["short"], ["12345", ""], row, {})] == [-0.005, 0]
    assert "reward=[right, (short, 0.1)]" in run.text
