"""What is and what is not an index; estimates; and the command line."""

import json
import os
from pathlib import Path

import pytest
from commands import corral
from deadlines import within
from docstrings import write_corpus

from corral.recipe.errors import UserError
from corral.retrieval.bm25 import Bm25Settings
from corral.retrieval.dense import DenseSettings, EncoderSettings
from corral.retrieval.estimate import estimate, of_index
from corral.retrieval.index import BUILDING, MANIFEST, build, open_index, read_finished

pytestmark = pytest.mark.xdist_group("retriever")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", number=50)
    return tmp_path


@pytest.mark.slow
def test_a_changed_corpus_is_refused(folder: Path) -> None:
    build(folder / "corpus.jsonl", folder / "index")
    text = (folder / "corpus.jsonl").read_text()
    (folder / "corpus.jsonl").write_text(text.replace("Return", "Retorn", 1))
    with pytest.raises(UserError, match=r"is not what the index .* was built from"):
        open_index(folder / "index")
    result = corral(folder, "retriever", "serve", "index", "--port", "0")
    assert result.code == 2
    assert "was built from; build it again" in result.errors[0]


def test_a_corpus_that_was_moved_is_found_when_told(folder: Path) -> None:
    build(folder / "corpus.jsonl", folder / "index")
    os.rename(folder / "corpus.jsonl", folder / "moved.jsonl")
    with pytest.raises(UserError, match="say where it is with --corpus"):
        open_index(folder / "index")
    assert open_index(folder / "index", folder / "moved.jsonl").num_passages == 50


def test_an_unfinished_index_is_said_to_be_one_and_can_be_finished(folder: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "writing the index":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder / "corpus.jsonl", folder / "index", progress=stop)
    with pytest.raises(UserError, match=r"unfinished: run the same `corral retriever build` again"):
        read_finished(folder / "index")
    build(folder / "corpus.jsonl", folder / "index")
    assert open_index(folder / "index").search(["sorted list"], 3)[0]
    assert not list((folder / "index").glob("*.tmp"))
    assert not (folder / "index" / BUILDING).exists()


def test_a_folder_with_something_else_in_it_is_left_alone(folder: Path) -> None:
    with pytest.raises(UserError, match="not empty"):
        build(folder / "corpus.jsonl", folder)
    build(folder / "corpus.jsonl", folder / "index")
    with pytest.raises(UserError, match="already an index"):
        build(folder / "corpus.jsonl", folder / "index")
    with pytest.raises(UserError, match="is not an index"):
        open_index(folder)
    (folder / "index" / MANIFEST).write_text("{}")
    with pytest.raises(UserError, match="not the manifest of an index"):
        open_index(folder / "index")


@pytest.mark.slow
def test_a_bad_corpus_leaves_no_folder(folder: Path) -> None:
    with (folder / "corpus.jsonl").open("a") as file:
        file.write("{\n")
    result = corral(folder, "retriever", "build", "corpus.jsonl", "index")
    assert result.code == 2
    assert result.errors[0].startswith("error: corpus.jsonl:51: not a line of JSON")
    assert not (folder / "index").exists()


def test_a_folder_that_was_there_stays_if_the_corpus_is_bad(folder: Path) -> None:
    (folder / "corpus.jsonl").write_text("{\n")
    (folder / "index").mkdir()
    with pytest.raises(UserError, match="not a line of JSON"):
        build(folder / "corpus.jsonl", folder / "index")
    assert list((folder / "index").iterdir()) == []


def test_one_folder_is_built_by_one_process_at_a_time(folder: Path) -> None:
    refused = []

    def build_too(what: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(UserError, match="is being built by another process") as raised:
                build(folder / "corpus.jsonl", folder / "index")
            refused.append(raised)

    build(folder / "corpus.jsonl", folder / "index", progress=build_too)
    assert refused
    assert open_index(folder / "index").search(["sorted list"], 3)[0]


def test_a_language_is_checked_before_the_corpus_is_read(folder: Path) -> None:
    seen: list[str] = []
    with pytest.raises(UserError, match="not a language"):
        build(
            folder / "corpus.jsonl",
            folder / "index",
            bm25=Bm25Settings(language="klingon"),
            progress=lambda what, done, total: seen.append(what),
        )
    assert not seen
    assert not (folder / "index").exists()


def test_an_index_of_a_later_version_is_said_to_be_one(folder: Path) -> None:
    build(folder / "corpus.jsonl", folder / "index")
    fields = json.loads((folder / "index" / MANIFEST).read_text())
    (folder / "index" / MANIFEST).write_text(json.dumps(fields | {"format": 2, "shards": 3}))
    with pytest.raises(UserError, match="has format 2, this version of corral reads 1"):
        open_index(folder / "index")


@pytest.mark.parametrize("number", [100, 4000])
def test_a_bad_line_of_a_sample_is_named(tmp_path: Path, number: int) -> None:
    """In a file that is read whole, and in one that is not."""
    good = json.dumps({"contents": "word " * 100}) + "\n"
    bad = number // 2
    (tmp_path / "corpus.jsonl").write_text(good * bad + "{" * 500 * 4 + "\n" + good * bad)
    with pytest.raises(UserError, match=rf"corpus.jsonl:{bad + 1}: not a line of JSON"):
        estimate(tmp_path / "corpus.jsonl")


def test_the_estimate_is_near_what_is_built(corpus_file: Path, bm25_index: Path) -> None:
    said, made = estimate(corpus_file), of_index(bm25_index)
    assert said.num_passages == made.num_passages == 400
    assert said.disk_bytes == pytest.approx(made.disk_bytes, rel=0.1)
    assert said.build_s is not None
    assert 0 < said.build_s < within(10)


def test_sizes_of_a_large_dense_index_are_known_without_an_encoder(tmp_path: Path, minilm: Path) -> None:
    """21 million passages of 700 bytes, by a file that is mostly holes would not do: its lines are looked at."""
    line = json.dumps({"id": 0, "contents": "word " * 40}) + "\n"
    (tmp_path / "corpus.jsonl").write_text(line * 20_000)
    settings = DenseSettings(EncoderSettings(str(minilm)), half=True)
    flat = estimate(tmp_path / "corpus.jsonl", "flat", dense=settings, measure=False)
    graph = estimate(tmp_path / "corpus.jsonl", "hnsw", dense=settings, measure=False)
    assert flat.num_passages == pytest.approx(20_000, rel=0.01)
    assert flat.disk_bytes == pytest.approx(20_000 * (384 * 2 + 8), rel=0.01)
    assert flat.build_s is None
    assert graph.disk_bytes - flat.disk_bytes == pytest.approx(20_000 * 64 * 2 * 4, rel=0.1)
    assert graph.serve_memory_bytes > flat.serve_memory_bytes


@pytest.mark.slow
def test_an_index_is_estimated_built_and_searched_from_the_command_line(folder: Path) -> None:
    said = corral(folder, "retriever", "build", "corpus.jsonl", "index", "--dry-run", "--json")
    assert json.loads(said.stdout)["num_passages"] == 50
    assert not (folder / "index").exists()
    built = corral(folder, "retriever", "build", "corpus.jsonl", "index", "--k1", "0.9", "--b", "0.4")
    assert built.code == 0, built.stderr
    assert built.stdout.startswith("bm25 index of 50 passages in index")
    assert json.loads((folder / "index" / MANIFEST).read_text())["settings"]["k1"] == 0.9
    found = corral(folder, "retriever", "search", "index", "sorted list", "--topk", "2", "--json")
    assert len(json.loads(found.stdout)) == 2
    assert corral(folder, "retriever", "search", "index", "xyzzy").stdout == "nothing found\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["build", "corpus.jsonl", "i", "--kind", "annoy"], "`annoy` is not a kind of index"),
        (["build", "corpus.jsonl", "i", "--kind", "flat"], "needs --encoder"),
        (["build", "corpus.jsonl", "i", "--encoder", "x"], "--encoder has no effect"),
        (["build", "corpus.jsonl", "i", "--language", "klingon"], "`klingon` is not a language"),
        (["build", "corpus.jsonl", "i", "--kind", "ivf", "--dry-run"], "`ivf` is not a kind of index"),
        (["build", "corpus.jsonl", "i", "--half"], "--half has no effect on a bm25 index"),
        (["build", "corpus.jsonl", "i", "--query-prefix", "q"], "--query-prefix has no effect on a bm25 index"),
        (
            ["build", "corpus.jsonl", "i", "--kind", "flat", "--encoder", "x", "--k1", "1.5"],
            "--k1 has no effect on a f",
        ),
        (["build", "corpus.jsonl", "i", "--json"], "--json has no effect without --dry-run"),
        (["serve", "nothing", "--candidates", "5"], "--candidates has no effect without --reranker"),
        (["serve", "--online", "x", "--encoder", "y"], "--encoder has no effect on a search service"),
        (["build", "nothing.jsonl", "i"], "nothing.jsonl is not a file"),
        (["serve"], "say what to search"),
        (["serve", "nothing"], "nothing is not an index"),
        (["serve", "nothing", "--topk", "200"], "--topk 200 is more than --max-topk 100"),
        (["serve", "--online", "nothing.yaml"], "nothing.yaml cannot be read"),
    ],
)
def test_mistakes_are_one_line(folder: Path, options: list[str], said: str) -> None:
    result = corral(folder, "retriever", *options)
    assert result.code == 2
    assert len(result.errors) == 1
    assert said in result.errors[0]
    assert not (folder / "i").exists()
