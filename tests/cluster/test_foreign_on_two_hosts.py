"""What guides of other systems say, shrunk, on two hosts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import bring_up, corral
from hosts import Lab

WRITTEN = Path(__file__).parent.parent / "dialects" / "written"
FILES = sorted(path.name for path in WRITTEN.iterdir())


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2) as lab:
        bring_up(lab, devices=2)
        yield lab


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.xdist_group("foreign")
@pytest.mark.parametrize("name", FILES)
def test_shrunk_it_trains_a_step_on_two_hosts(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = corral(lab, 0, "migrate", str(WRITTEN / name))
    (tmp_path / "recipe.yaml").write_text(made.stdout)
    trained = corral(lab, 0, "train", "recipe.yaml", "--shrink", "2", timeout_s=240)
    assert trained.returncode == 0, trained.stderr
    assert "step 1/1" in trained.stdout
