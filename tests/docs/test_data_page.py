"""The examples of the page on data: recipes that can be planned, and rows that are read."""

import json
from pathlib import Path

import pytest
import yaml
from guides import ROOT, blocks
from PIL import Image

from corral.data.rows import row_from_mapping
from corral.data.sources import load_rows
from corral.recipe.load import load_recipe
from corral.recipe.rules import check
from corral.recipe.schema import Data, Source

EXAMPLES = blocks(ROOT / "docs" / "data.md")
SECTIONS = ("data", "train", "path")
"""With which an example may begin: the section itself, or what is below it."""


@pytest.mark.parametrize("text", [one.text for one in EXAMPLES if one.language == "yaml"])
def test_a_recipe_with_the_example_is_right(tmp_path: Path, text: str) -> None:
    values = yaml.safe_load(text)
    first = next(iter(values))
    assert first in SECTIONS
    values = {"data": values} if first == "train" else {"data": {"train": values}} if first == "path" else values
    values["data"].setdefault("train", {"path": "rows.jsonl"})
    others = {"name": "x", "model": {"path": "blank-1m"}, "schedule": {"steps": 1}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**others, **values}))
    check(load_recipe(tmp_path / "recipe.yaml"))


def test_the_function_of_the_example_gives_the_rows_that_its_recipe_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [function] = [one.text for one in EXAMPLES if one.language == "python"]
    Path("rows.py").write_text(function)
    [recipe] = [yaml.safe_load(one.text) for one in EXAMPLES if "rows.py:rows" in one.text and one.language == "yaml"]
    source = Source.model_validate(recipe["train"])
    rows = load_rows(source, Data(train=source))
    assert len(rows) == 1000
    assert (rows[3].prompt[0]["content"], rows[3].answer) == ("Is 3 even?", "no")


def test_rows_with_images_are_read(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    [lines] = [one.text.splitlines() for one in EXAMPLES if one.language == "json"]
    data = Data(train=Source(path="rows.jsonl"))
    rows = [row_from_mapping(json.loads(line), data, f"{tmp_path}/rows.jsonl:1") for line in lines]
    assert [len(row.prompt[0]["images"]) for row in rows] == [1, 2]
