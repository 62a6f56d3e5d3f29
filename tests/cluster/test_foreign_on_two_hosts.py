"""What guides of other systems say, rehearsed on the cluster of two hosts: one for each way of being placed. (In one
process `tests/cli/test_migrate.py` runs all of them.)"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import bring_up, corral
from deadlines import within
from hosts import Lab

from corral.migrate.config_sources import migrate_file
from corral.migrate.migration import recipe_text

GOLDEN = Path(__file__).parent.parent / "migrate" / "golden"
TOGETHER = "search_r1_multinode/input.sh", "cluster={nodes: 2, devices_per_node: 1}"
"""With a service beside it."""
APART = (
    "rlinf_devices_apart/input.yaml",
    "cluster={nodes: 2, devices_per_node: 1, placement: {rollout: 0, actor: 1}}",
    "train.parallel.tensor=1",
    "train.offload=[optimizer]",
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2) as lab:
        bring_up(lab, devices=1)
        yield lab


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("foreign")
@pytest.mark.parametrize("case", [pytest.param(TOGETHER, marks=pytest.mark.core), APART], ids=["together", "apart"])
def test_it_trains_recovers_and_resumes_on_two_hosts(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *overrides = case
    (tmp_path / "recipe.yaml").write_text(recipe_text(migrate_file(GOLDEN / name)))
    command = ["rehearse", "recipe.yaml", *overrides, "--on-cluster", "--json"]
    rehearsed = corral(lab, 0, *command, timeout_s=within(500))
    assert rehearsed.returncode == 0, rehearsed.stderr + rehearsed.stdout
    report = json.loads(rehearsed.stdout)
    assert report["passed"]
    assert "2 nodes of 1 devices" in dict(report["rows"])["workers"]
    assert "resume" in dict(report["rows"])
