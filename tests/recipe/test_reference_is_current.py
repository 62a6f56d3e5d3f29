"""The tables in `docs/` that follow from the code are what the code says today."""

import runpy
from pathlib import Path
from typing import Any

import pytest

GENERATOR = Path(__file__).parents[2] / "docs" / "generate_recipe_reference.py"


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(GENERATOR))


def test_the_tables_are_what_the_generator_writes(generator: dict[str, Any]) -> None:
    stale = [path.name for path, text in generator["generated"]().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `make reference`"


def test_every_key_is_in_the_reference(generator: dict[str, Any]) -> None:
    text = (GENERATOR.parent / "recipe.md").read_text(encoding="utf-8")
    missing = [path for path in generator["all_keys"]() if f"`{'.'.join(path)}`" not in text]
    assert not missing
