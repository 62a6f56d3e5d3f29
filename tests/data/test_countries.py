import json
import re
from pathlib import Path
from typing import Any

import pytest

from corral.data.prepare import prepare, read_country
from corral.data.sources import load_rows
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Source
from corral.rewards.question_answering import is_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("countries")
    assert [path.name for path in prepare("countries", out)] == ["corpus.jsonl", "train.jsonl", "validation.jsonl"]
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_corpus_has_passages_with_titles_and_ids_of_their_own(folder: Path) -> None:
    corpus = lines(folder / "corpus.jsonl")
    assert len(corpus) > 800
    assert len({passage["id"] for passage in corpus}) == len(corpus)
    assert all(re.fullmatch(r'"[^"\n]+"\n[^\n]+\.', passage["contents"]) for passage in corpus)
    [benin] = [passage["contents"] for passage in corpus if passage["id"] == "ben-telephone"]
    assert benin == (
        '"Telephone and internet of Benin"\nThe calling code of Benin is 229. The internet domain of Benin is .bj.'
    )


def test_every_question_is_answered_by_a_passage_about_its_country(folder: Path) -> None:
    corpus = [passage["contents"] for passage in lines(folder / "corpus.jsonl")]
    for row in lines(folder / "train.jsonl") + lines(folder / "validation.jsonl"):
        asked = row["prompt"].removeprefix("What is ").removesuffix("?")
        [passage] = [text for text in corpus if f"{asked} is ".lower() in text.lower()]
        assert is_in(passage, row["answer"])


def test_no_country_is_asked_about_in_training_and_in_validation(folder: Path) -> None:
    asked = [
        {row["prompt"].partition(" of ")[2] for row in lines(folder / f"{part}.jsonl")}
        for part in ("train", "validation")
    ]
    assert min(map(len, asked)) > 40
    assert not asked[0] & asked[1]


def test_what_is_written_is_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    for path in prepare("countries", tmp_path):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_recipe_can_name_it(folder: Path) -> None:
    source = Source(path=str(folder / "train.jsonl"))
    row = load_rows(source, Data(train=source))[0]
    assert isinstance(row.answer, list)
    assert row.extra["topic"] == "capital"


def test_a_country_of_which_something_is_unknown_is_left_out() -> None:
    assert read_country({"name": "Atlantis", "ISO": {"alpha3": "ATL"}, "capital": "Poseidonis"}) is None


def test_there_is_no_local_copy_of_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`countries` comes with a package; leave out --local"):
        prepare("countries", tmp_path, tmp_path)
