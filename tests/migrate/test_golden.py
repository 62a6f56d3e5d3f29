"""Configurations of other systems give the recipes and reports of `golden`; see `tests/golden_migrations.py`."""

import pytest
from golden_migrations import CASES, GOLDEN, OUTPUTS, outputs


@pytest.mark.parametrize("name", CASES)
def test_recipe_and_report_are_as_before(name: str) -> None:
    kept = {path.name: path.read_text() for path in (GOLDEN / name).iterdir() if path.name in OUTPUTS}
    assert outputs(GOLDEN / name) == kept
