"""What guides of other systems say, shrunk, on two hosts: one for each way of being placed. (In one process
`tests/cli/test_migrate.py` runs all of them.)"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import bring_up, corral
from hosts import Lab

from corral.migrate.config_sources import migrate_file
from corral.migrate.migration import recipe_text

GOLDEN = Path(__file__).parent.parent / "migrate" / "golden"
TOGETHER = "search_r1_multinode/input.sh"
"""With a service beside it."""
APART = "rlinf_devices_apart/input.yaml"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2) as lab:
        bring_up(lab, devices=1)
        yield lab


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("foreign")
@pytest.mark.parametrize("name", [pytest.param(TOGETHER, marks=pytest.mark.core), APART])
def test_shrunk_it_trains_a_step_on_two_hosts(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe_text(migrate_file(GOLDEN / name)))
    trained = corral(lab, 0, "train", "recipe.yaml", "--shrink", "2", timeout_s=240)
    assert trained.returncode == 0, trained.stderr
    assert "step 1/1" in trained.stdout
