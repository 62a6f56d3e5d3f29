"""Dense search with real embeddings, against brute force in numpy."""

import shutil
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest
from docstrings import QUERIES, contents

from corral.recipe.errors import RunError, UserError
from corral.retrieval.dense import (
    BGE,
    FLAT,
    DenseSettings,
    Encoder,
    EncoderSettings,
    VectorFile,
    build_graph,
    family_of,
    open_mapped,
    own_prompt,
)
from corral.retrieval.index import BUILDING, MANIFEST, OFFSETS, build, open_index, read_manifest
from corral.retrieval.searcher import Reranker

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dense")]


@pytest.fixture(scope="module")
def reference(small_corpus: Path, minilm: Path) -> np.ndarray:
    """Inner products of all queries with all passages, by sentence-transformers alone."""
    from sentence_transformers import SentenceTransformer  # here: seconds, which the tests of other files do not need

    model = SentenceTransformer(str(minilm), device="cpu")
    return model.encode(QUERIES) @ model.encode(contents(small_corpus)).T


def test_flat_search_finds_what_brute_force_finds(flat_index: Path, reference: np.ndarray) -> None:
    for found, scores in zip(open_index(flat_index, device="cpu").search(QUERIES, 5), reference, strict=True):
        np.testing.assert_allclose([one.score for one in found], np.sort(scores)[::-1][:5], atol=1e-4)
        rows = [int(one.passage.id.removeprefix("doc")) for one in found]
        np.testing.assert_allclose(scores[rows], [one.score for one in found], atol=1e-4)


def test_hnsw_goes_on_where_vectors_are_there_and_finds_them(
    flat_index: Path, small_corpus: Path, minilm: Path, reference: np.ndarray, tmp_path: Path
) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    for name in (FLAT, OFFSETS):
        shutil.copy(flat_index / name, folder / name)
    replace(read_manifest(flat_index / MANIFEST), kind="hnsw").write(folder / BUILDING)
    seen: set[str] = set()
    settings = DenseSettings(EncoderSettings(str(minilm)))
    build(small_corpus, folder, "hnsw", dense=settings, progress=lambda what, done, total: seen.add(what))
    assert seen == {"building the graph"}
    assert not (folder / FLAT).exists()
    for found, scores in zip(open_index(folder, device="cpu").search(QUERIES, 5), reference, strict=True):
        assert len({one.passage.id for one in found} & {f"doc{row}" for row in np.argsort(-scores)[:5]}) >= 4
    assert not (folder / BUILDING).exists()


@pytest.mark.parametrize("half", [False, True])
def test_the_graph_finds_almost_all_of_the_nearest(tmp_path: Path, half: bool) -> None:
    vectors = unit_vectors(2000, 32)
    file = VectorFile(tmp_path / "flat.faiss", len(vectors), 32, half)
    file.append(vectors)
    build_graph(file, tmp_path / "hnsw.faiss", DenseSettings(EncoderSettings("")), lambda what, done, total: None)
    index = open_mapped(tmp_path / "hnsw.faiss")
    index.hnsw.efSearch = 128
    _, rows = index.search(vectors[:50], 10)
    nearest = np.argsort(-(vectors[:50] @ vectors.T))[:, :10]
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(rows, nearest, strict=True)])
    assert recall > 0.97


@pytest.mark.parametrize("half", [False, True])
def test_the_file_of_vectors_is_what_faiss_itself_writes(tmp_path: Path, half: bool) -> None:
    vectors = unit_vectors(20, 16)
    file = VectorFile(tmp_path / "mine.faiss", 20, 16, half)
    file.append(vectors[:7])
    file.append(vectors[7:])
    kind = faiss.ScalarQuantizer.QT_fp16
    theirs = faiss.IndexScalarQuantizer(16, kind, faiss.METRIC_INNER_PRODUCT) if half else faiss.IndexFlatIP(16)
    theirs.add(vectors)
    faiss.write_index(theirs, str(tmp_path / "theirs.faiss"))
    assert (tmp_path / "mine.faiss").read_bytes() == (tmp_path / "theirs.faiss").read_bytes()
    scores, rows = open_mapped(tmp_path / "mine.faiss").search(vectors[:1], 1)
    assert rows[0, 0] == 0
    assert scores[0, 0] == pytest.approx(1.0, abs=1e-3)


def test_half_a_vector_at_the_end_is_written_again(tmp_path: Path) -> None:
    vectors = unit_vectors(4, 8)
    file = VectorFile(tmp_path / "v.faiss", 4, 8, False)
    file.append(vectors[:2])
    with file.path.open("ab") as raw:
        raw.write(vectors[2].tobytes()[:13])
    again = VectorFile(tmp_path / "v.faiss", 4, 8, False)
    assert again.done == 2
    again.append(vectors[2:])
    np.testing.assert_array_equal(again.rows(0, 4), vectors)


def test_a_stopped_build_goes_on_with_the_rest(
    small_corpus: Path, flat_index: Path, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the first passages; the second attempt encodes only the others."""
    monkeypatch.setattr("corral.retrieval.dense.BATCHES_PER_WRITE", 1)
    encoded: list[int] = []

    def stop_after_first(what: str, done: int, total: int) -> None:
        if what == "encoding passages":
            encoded.append(done)
            if len(encoded) == 1:
                raise KeyboardInterrupt

    settings = DenseSettings(EncoderSettings(str(minilm)))
    with pytest.raises(RunError, match="40 of 60 passages are encoded, and the same command goes on"):
        build(small_corpus, tmp_path / "index", "flat", dense=settings, batch=40, progress=stop_after_first)
    with pytest.raises(UserError, match="unfinished"):
        open_index(tmp_path / "index")
    with pytest.raises(UserError, match="another half"):
        build(small_corpus, tmp_path / "index", "flat", dense=replace(settings, half=True))
    build(small_corpus, tmp_path / "index", "flat", dense=settings, batch=40, progress=stop_after_first)
    assert encoded == [40, 60]
    mine, whole = (open_mapped(folder / FLAT).reconstruct_n(0, 60) for folder in (tmp_path / "index", flat_index))
    np.testing.assert_allclose(mine, whole, atol=1e-5)


def test_families_of_encoders_are_known_by_name() -> None:
    def known(name: str) -> tuple[str, str, bool] | None:
        family = family_of(name)
        return None if family is None else (family.query_prefix, family.passage_prefix, family.normalise)

    assert known("intfloat/e5-base-v2") == ("query: ", "passage: ", True)
    assert known("/models/multilingual-e5-small") == ("query: ", "passage: ", True)
    assert known("BAAI/bge-base-en-v1.5") == (BGE, "", True)
    assert known("BAAI/bge-m3") == ("", "", True)
    assert known("facebook/dpr-ctx_encoder-single-nq-base") == ("", "", False)
    assert known("/hub/models--intfloat--e5-base-v2/snapshots/f52bf8ec8c7124536f0efb74aca902b2995e5bcd") == known("e5")
    for other in ("sentence-transformers/all-MiniLM-L6-v2", "page5/model", "/models--x--bge/other"):
        assert known(other) is None


@pytest.mark.parametrize(
    "name", ["multilingual-e5-large-instruct", "e5-mistral-7b-instruct", "bge-en-icl", "bge-multilingual-gemma2"]
)
def test_models_that_are_asked_in_another_way_are_not_of_the_family(name: str) -> None:
    assert family_of(name) is None


def test_what_the_model_says_goes_before_what_its_family_has() -> None:
    assert own_prompt({"query": "", "document": ""}, "query: ", "query") == "query: "
    assert own_prompt({"query": "ask: "}, "query: ", "query") == "ask: "
    assert own_prompt({"query": "ask: "}, "passage: ", "passage", "document") == ""


def test_what_was_found_out_of_an_encoder_is_written_down_and_said(minilm: Path, tmp_path: Path) -> None:
    """A model that says nothing of itself, in a folder whose name does."""
    folder = tmp_path / "bge-small"
    shutil.copytree(minilm, folder)
    for name in ("modules.json", "config_sentence_transformers.json"):
        (folder / name).unlink(missing_ok=True)
    encoder = Encoder(EncoderSettings(str(folder), passage_prefix="p: "), "cpu")
    used = encoder.settings
    assert (used.query_prefix, used.passage_prefix, used.pooling, used.normalise) == (BGE, "p: ", "cls", True)
    said = f"query prefix {BGE!r}, passage prefix 'p: ', pooling cls, normalized, 384 numbers"
    assert encoder.describe() == f"encoder {folder}: {said}"


def test_an_encoder_that_was_moved_is_found_when_told(
    small_corpus: Path, flat_index: Path, minilm: Path, tmp_path: Path
) -> None:
    index = shutil.copytree(flat_index, tmp_path / "index")
    text = (index / MANIFEST).read_text()
    (index / MANIFEST).write_text(text.replace(str(minilm), "/nowhere/minilm"))
    with pytest.raises(UserError, match="not at /nowhere/minilm; say where it is with --encoder"):
        open_index(index, device="cpu")
    searcher = open_index(index, device="cpu", encoder=str(minilm))
    assert len(searcher.search(QUERIES[:1], 3)[0]) == 3
    assert f"encoder {minilm}: query prefix ''" in searcher.about


def test_an_encoder_with_other_vectors_is_refused(flat_index: Path, minilm: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertModel

    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"have 32 numbers, those of .* have 384"):
        open_index(flat_index, device="cpu", encoder=str(tmp_path))


@pytest.mark.parametrize(
    ("device", "said"), [("cdua", "--device cdua is not a device"), ("cuda:99", "--device cuda:99: this machine has")]
)
def test_a_device_that_is_not_there_is_one_line(minilm: Path, device: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Encoder(EncoderSettings(str(minilm)), device)
    with pytest.raises(UserError, match=said):
        Reranker(str(minilm), device)


def test_what_is_encoded_is_kept_if_the_corpus_turns_out_wrong(
    small_corpus: Path, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.retrieval.dense.BATCHES_PER_WRITE", 1)
    corpus = Path(shutil.copy(small_corpus, tmp_path / "corpus.jsonl"))

    def spoil(what: str, done: int, total: int) -> None:
        if what == "encoding passages":
            corpus.write_bytes(b"x" * corpus.stat().st_size)

    settings = DenseSettings(EncoderSettings(str(minilm)))
    with pytest.raises(UserError, match="not a line of JSON"):
        build(corpus, tmp_path / "index", "flat", dense=settings, device="cpu", batch=16, progress=spoil)
    assert (tmp_path / "index" / FLAT).stat().st_size > 16 * 384 * 4
    with pytest.raises(UserError, match="with another corpus"):
        build(corpus, tmp_path / "index", "flat", dense=settings, device="cpu")
    corpus = Path(shutil.copy(small_corpus, tmp_path / "elsewhere.jsonl"))
    made = build(corpus, tmp_path / "index", "flat", dense=settings, device="cpu")
    assert (made.corpus.path, made.corpus.mtime_ns) == (str(corpus.resolve()), corpus.stat().st_mtime_ns)


def test_a_file_of_vectors_that_somebody_else_has_written_to_is_noticed(tmp_path: Path) -> None:
    file = VectorFile(tmp_path / "v.faiss", 4, 8, False)
    file.append(unit_vectors(4, 8))
    file.check_whole()
    with file.path.open("ab") as raw:
        raw.write(b"more")
    with pytest.raises(RunError, match="bytes where it should have"):
        file.check_whole()


def test_prefixes_pooling_and_norms_reach_the_model(minilm: Path) -> None:
    """With pooling by the first token and without norms: what transformers computes."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    settings = EncoderSettings(str(minilm), query_prefix="query: ", pooling="cls", normalise=False, max_tokens=16)
    found = Encoder(settings, "cpu").queries(["what is a heap", "word " * 100])
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm)
    texts = ["query: what is a heap", "query: " + "word " * 100]
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        expected = model(**tokens).last_hidden_state[:, 0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_an_encoder_that_is_not_there_is_one_line(small_corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    settings = DenseSettings(EncoderSettings(str(tmp_path / "empty")))
    with pytest.raises(UserError, match="cannot be loaded") as raised:
        build(small_corpus, tmp_path / "index", "flat", dense=settings)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "index").exists()  # before the corpus was read


def unit_vectors(number: int, dimension: int) -> np.ndarray:
    vectors = np.random.default_rng(0).normal(size=(number, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
