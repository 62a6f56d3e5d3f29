"""Passages are found where they lie in the file, and a bad line is named."""

import json
import os
from pathlib import Path

import pytest
from docstrings import contents

from corral.recipe.errors import UserError
from corral.retrieval.searcher import Corpus, same_file, scan


def test_every_passage_is_read_from_its_place(corpus_file: Path, tmp_path: Path) -> None:
    facts = scan(corpus_file, tmp_path / "offsets.npy")
    corpus = Corpus(corpus_file, tmp_path / "offsets.npy")
    assert corpus.contents(0, len(corpus)) == contents(corpus_file)
    assert facts.num_passages == len(corpus) == 400
    assert corpus[17].id == "doc17"


def test_a_passage_without_an_id_is_called_by_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, b'{"id": 7, "contents": "a"}', b'{"contents": "b"}', b'{"id": 0, "text": "c"}', b"", b"")
    scan(file, tmp_path / "offsets.npy")
    corpus = Corpus(file, tmp_path / "offsets.npy")
    assert [corpus[row].id for row in range(len(corpus))] == ["7", "2", "0"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{oops", "not a line of JSON"),
        (b'["a"]', "not a JSON object but list"),
        (b'{"id": 1, "body": "x"}', 'neither "contents" nor "text"'),
        (b'{"contents": 3}', "not a text but int"),
        (b'{"contents": "\xff"}', "not a line of JSON"),
        (b"", "the line is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    file = write(tmp_path, b'{"contents": "a"}', line, b'{"contents": "b"}')
    with pytest.raises(UserError, match=problem) as raised:
        scan(file, tmp_path / "offsets.npy")
    assert f"{file}:2: " in str(raised.value)


def test_a_file_without_passages_or_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no passages"):
        scan(write(tmp_path), tmp_path / "offsets.npy")
    with pytest.raises(UserError, match="compressed"):
        scan(tmp_path / "wiki.jsonl.gz", tmp_path / "offsets.npy")


def test_a_changed_file_is_noticed_and_a_touched_one_is_not(tmp_path: Path) -> None:
    file = write(tmp_path, b'{"contents": "abc"}')
    facts = scan(file, tmp_path / "offsets.npy")
    os.utime(file, ns=(1, 1))
    assert same_file(file, facts)
    file.write_text(json.dumps({"contents": "abd"}) + "\n")
    assert not same_file(file, facts)


def write(folder: Path, *lines: bytes) -> Path:
    (folder / "corpus.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder / "corpus.jsonl"
