"""The page that says what always holds names tests that are there."""

import re

from guides import ROOT

PAGE = ROOT / "docs" / "invariants.md"


def test_every_test_that_the_page_names_exists() -> None:
    for row in PAGE.read_text().splitlines():
        files = re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)`", row)
        sources = [path.read_text() for name in files for path in (ROOT / "tests").rglob(name.rpartition("/")[2])]
        for name in re.findall(r"`(test_\w+?)(?:_?\.\.\.)?`", row):
            if not name.endswith(".py"):
                assert any(f"def {name}" in source for source in sources), name


def test_every_row_names_something_to_run() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ") and "test" in row][1:]
    assert len(rows) > 15
    for row in rows:
        places = re.findall(r"`(tests/[\w/]+(?:\.py)?)/?`", row)
        assert places, row
        for place in places:
            assert (ROOT / place).exists(), place
