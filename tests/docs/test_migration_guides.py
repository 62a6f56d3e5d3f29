"""The pages for those who come from other systems: their commands run, and their recipes are what `migrate` prints."""

import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import corral
from guide_commands import run
from guides import ROOT, block, blocks

from corral.migrate.config_sources import migrate_file
from corral.migrate.migration import recipe_text

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
