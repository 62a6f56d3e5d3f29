"""What guides of other systems say, shrunk, on two hosts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import bring_up, corral
from hosts import Lab

from corral.loop.shrink import shrink
from corral.recipe.dialects.sources import migrate_file
from corral.recipe.dialects.written import recipe_text

WRITTEN = Path(__file__).parent.parent / "dialects" / "written"
RUN = ("verl_dstack.sh", "search_r1.sh", "roll_two_nodes.yaml", "rlinf_shared.yaml", "rlinf_apart.yaml")
ALIKE = {
    "verl_slurm.sh": "verl_dstack.sh",
    "verl_submit.sh": "verl_dstack.sh",
    "roll_one_gpu.yaml": "roll_two_nodes.yaml",
}
"""Shrunk, the first of them is the second."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2) as lab:
        bring_up(lab, devices=1)
        yield lab


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("foreign")
@pytest.mark.parametrize("name", RUN)
def test_shrunk_it_trains_a_step_on_two_hosts(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe_text(migrate_file(WRITTEN / name)))
    trained = corral(lab, 0, "train", "recipe.yaml", "--shrink", "2", timeout_s=240)
    assert trained.returncode == 0, trained.stderr
    assert "step 1/1" in trained.stdout


def test_all_of_them_are_run() -> None:
    assert {*RUN, *ALIKE} == {path.name for path in WRITTEN.iterdir()}
    for name, other in ALIKE.items():
        one, two = (shrink(migrate_file(WRITTEN / file).recipe, 2) for file in (name, other))
        without_validation = one.data.validation is None
        left_out = {"name": True} | ({"validation": True, "data": {"validation"}} if without_validation else {})
        assert one.model_dump(exclude=left_out) == two.model_dump(exclude=left_out)
