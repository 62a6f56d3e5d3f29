"""Indexes that others have made, as bm25s and faiss write them, of a corpus that is theirs or another one."""

import json
from pathlib import Path
from typing import Any

import bm25s
import faiss
import numpy as np
import pytest
import Stemmer
from docstrings import QUERIES, contents

from corral.recipe.errors import UserError
from corral.retrieval.bm25 import Bm25Settings
from corral.retrieval.dense import DenseSettings, EncoderSettings, open_mapped
from corral.retrieval.index import build, open_index


@pytest.fixture(scope="module")
def saved(small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What bm25s saves of the corpus, split as its users do it."""
    folder = tmp_path_factory.mktemp("bm25s")
    stemmer = Stemmer.Stemmer("english")
    index = bm25s.BM25(k1=1.2, b=0.5)
    words = bm25s.tokenize(contents(small_corpus), stopwords="en", stemmer=stemmer, show_progress=False)
    index.index(words, show_progress=False)
    index.save(folder)
    return folder


def test_a_folder_of_bm25s_is_searched_as_it_is(saved: Path, small_corpus: Path, tmp_path: Path) -> None:
    made = build(small_corpus, tmp_path / "adopted", made=saved)
    assert (made.settings["k1"], made.settings["b"]) == (1.2, 0.5)
    build(small_corpus, tmp_path / "own", bm25=Bm25Settings(1.2, 0.5))
    for mine, theirs in zip(
        *(open_index(tmp_path / name).search(QUERIES, 5) for name in ("own", "adopted")), strict=True
    ):
        assert [(hit.passage.id, pytest.approx(hit.score)) for hit in mine] == [
            (hit.passage.id, hit.score) for hit in theirs
        ]
    assert (tmp_path / "adopted" / "vocab.index.json").is_symlink()


def test_what_is_no_folder_of_bm25s_for_this_corpus_is_refused(saved: Path, small_corpus: Path, tmp_path: Path) -> None:
    lucene = tmp_path / "lucene"
    lucene.mkdir()
    (lucene / "segments_2").touch()
    shorter = tmp_path / "shorter.jsonl"
    lines = small_corpus.read_text().splitlines()
    shorter.write_text("\n".join(lines[:-1]))
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"id": i, "contents": f"xylophone {i}"}) for i in range(len(lines))))
    for corpus, folder, settings, words in [
        (small_corpus, lucene, Bm25Settings(), "only Java reads"),
        (small_corpus, tmp_path, Bm25Settings(), "there is no data.csc.index.npy"),
        (shorter, saved, Bm25Settings(), "passages, and"),
        (other, saved, Bm25Settings(), "of passage 1 is not there"),
        (small_corpus, saved, Bm25Settings(language="none"), "--language is another one"),
    ]:
        with pytest.raises(UserError, match=words):
            build(corpus, tmp_path / "index", bm25=settings, made=folder)
        assert not (tmp_path / "index").exists()


# --- vectors


@pytest.fixture(scope="module")
def vectors(small_corpus: Path, minilm: Path) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    found: np.ndarray = SentenceTransformer(str(minilm), device="cpu").encode(contents(small_corpus))
    return found


def written(index: Any, vectors: np.ndarray, path: Path) -> Path:
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.slow
@pytest.mark.xdist_group("dense")
@pytest.mark.parametrize("factory", ["Flat", "HNSW32", "SQfp16"])
def test_a_file_of_faiss_is_searched_as_it_is(
    factory: str, vectors: np.ndarray, small_corpus: Path, minilm: Path, tmp_path: Path
) -> None:
    index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    file = written(index, vectors, tmp_path / "e5_Flat.index")
    kind = "hnsw" if factory.startswith("HNSW") else "flat"
    dense = DenseSettings(EncoderSettings(str(minilm)))
    build(small_corpus, tmp_path / "index", kind, dense=dense, made=file, device="cpu")
    searcher = open_index(tmp_path / "index", device="cpu")
    queries = searcher.encoder.queries(QUERIES)
    _, rows = open_mapped(file).search(queries, 1)
    assert [hits[0].passage.id for hits in searcher.search(QUERIES, 1)] == [f"doc{row}" for row in rows[:, 0]]


@pytest.mark.slow
@pytest.mark.xdist_group("dense")
def test_a_file_of_faiss_that_is_of_something_else_is_refused(
    vectors: np.ndarray, small_corpus: Path, minilm: Path, tmp_path: Path
) -> None:
    size = vectors.shape[1]
    files = {
        "distance": written(faiss.IndexFlatL2(size), vectors, tmp_path / "l2"),
        "inverted": written(
            faiss.index_factory(size, "IVF2,Flat", faiss.METRIC_INNER_PRODUCT), vectors, tmp_path / "ivf"
        ),
        "few": written(faiss.IndexFlatIP(size), vectors[:-1], tmp_path / "few"),
        "narrow": written(faiss.IndexFlatIP(size - 1), np.ascontiguousarray(vectors[:, 1:]), tmp_path / "narrow"),
        "shuffled": written(faiss.IndexFlatIP(size), vectors[::-1].copy(), tmp_path / "shuffled"),
    }
    dense = DenseSettings(EncoderSettings(str(minilm)))
    for name, words in [
        ("distance", "by distance"),
        ("inverted", "is an IndexIVFFlat"),
        ("few", "vectors, and .* passages"),
        ("narrow", "vectors of 383 numbers"),
        ("shuffled", "the encoder makes another vector"),
    ]:
        with pytest.raises(UserError, match=words):
            build(small_corpus, tmp_path / "index", "flat", dense=dense, made=files[name], device="cpu")
    with pytest.raises(UserError, match="say --kind flat"):
        build(small_corpus, tmp_path / "index", "hnsw", dense=dense, made=files["few"], device="cpu")
    (tmp_path / "text").write_text("no index")
    with pytest.raises(UserError, match="is no index of faiss"):
        build(small_corpus, tmp_path / "index", "flat", dense=dense, made=tmp_path / "text", device="cpu")


@pytest.mark.slow
@pytest.mark.xdist_group("dense")
@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this faiss has GPUs")
def test_a_faiss_without_gpus_is_refused_in_words(flat_index: Path) -> None:
    with pytest.raises(UserError, match="put faiss-gpu-cu12 in the place of faiss-cpu"):
        open_index(flat_index, device="cpu", index_device="cuda")
    with pytest.raises(UserError, match="--index-device tpu is neither"):
        open_index(flat_index, device="cpu", index_device="tpu")
