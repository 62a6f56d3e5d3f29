"""BM25 against a brute-force reference, and against bm25s's own indexing, to the last bit."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import bm25s
import numpy as np
import pytest
import Stemmer
from docstrings import QUERIES, contents

from corral.retrieval import bm25
from corral.retrieval.bm25 import Bm25Searcher, Bm25Settings
from corral.retrieval.index import build, open_index


def reference(texts: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> dict[int, float]:
    """Lucene's BM25, as it stands in a textbook; passages with a score."""
    documents = [Counter(words(text)) for text in texts]
    lengths = [sum(counts.values()) for counts in documents]
    average = sum(lengths) / len(lengths)
    scores: dict[int, float] = {}
    for word in words(query):
        containing = sum(word in counts for counts in documents)
        idf = math.log(1 + (len(texts) - containing + 0.5) / (containing + 0.5))
        for row, counts in enumerate(documents):
            if counts[word]:
                gain = idf * counts[word] / (counts[word] + k1 * (1 - b + b * lengths[row] / average))
                scores[row] = scores.get(row, 0.0) + gain
    return scores


def words(text: str) -> list[str]:
    kept = [word for word in re.findall(r"\w\w+", text.lower()) if word not in bm25s.stopwords.STOPWORDS_EN]
    return list(Stemmer.Stemmer("english").stemWords(kept))


@pytest.mark.parametrize("query", [*QUERIES, "return return the the median", "", "xyzzy", "the of"])
def test_what_is_found_is_what_brute_force_finds(bm25_index: Path, corpus_file: Path, query: str) -> None:
    expected = reference(contents(corpus_file), query)
    [found] = open_index(bm25_index).search([query], 10)
    best = sorted(expected.values(), reverse=True)[:10]
    np.testing.assert_allclose([one.score for one in found], best, rtol=1e-5)
    for one in found:
        assert one.score == pytest.approx(expected[int(one.passage.id.removeprefix("doc"))], rel=1e-5)


def test_the_best_three_are_the_first_three_of_the_best_ten(bm25_index: Path) -> None:
    searcher = open_index(bm25_index)
    for few, many in zip(searcher.search(QUERIES, 3), searcher.search(QUERIES, 10), strict=True):
        assert few == many[:3]


@pytest.mark.parametrize("language", ["english", "none"])
@pytest.mark.parametrize("block", [6_000_000, 500])
def test_the_files_are_those_of_bm25s(
    corpus_file: Path, tmp_path: Path, language: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bm25, "BLOCK", block)
    monkeypatch.setattr(bm25, "BATCH", 37)
    build(corpus_file, tmp_path / "index", bm25=Bm25Settings(language=language))
    stems = {"stopwords": "en", "stemmer": Stemmer.Stemmer("english")} if language == "english" else {"stopwords": []}
    tokens = bm25s.tokenize(contents(corpus_file), return_ids=False, show_progress=False, **stems)
    theirs = bm25s.BM25()
    theirs.index(tokens, show_progress=False)
    loaded = bm25s.BM25.load(tmp_path / "index", mmap=True)
    assert loaded.vocab_dict.keys() == theirs.vocab_dict.keys()
    for word, column in theirs.vocab_dict.items():
        if word:
            assert_same_column(loaded.scores, loaded.vocab_dict[word], theirs.scores, column)
    assert sorted(path.suffix for path in (tmp_path / "index").iterdir()) == [".json"] * 3 + [".npy"] * 4


def assert_same_column(
    mine: dict[str, np.ndarray], my_column: int, its: dict[str, np.ndarray], its_column: int
) -> None:
    for name in ("indices", "data"):
        np.testing.assert_array_equal(
            mine[name][mine["indptr"][my_column] : mine["indptr"][my_column + 1]],
            its[name][its["indptr"][its_column] : its["indptr"][its_column + 1]],
        )


def test_scores_are_those_of_bm25s(bm25_index: Path) -> None:
    searcher = open_index(bm25_index)
    assert isinstance(searcher, Bm25Searcher)
    theirs = bm25s.BM25.load(bm25_index, mmap=True)
    for query in QUERIES:
        rows, scores = searcher.best(query, 20)
        assert scores == theirs.get_scores(words(query))[rows].tolist()


def test_a_corpus_in_another_script_is_searched_too(tmp_path: Path) -> None:
    lines = [{"id": "a", "text": "Столица Франции: Париж"}, {"id": "b", "text": "Столица Италии: Рим"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    build(tmp_path / "c.jsonl", tmp_path / "index", bm25=Bm25Settings(language="russian"))
    [found] = open_index(tmp_path / "index").search(["столица италия"], 2)
    assert [one.passage.id for one in found] == ["b", "a"]
