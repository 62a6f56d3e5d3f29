"""Building an index of a corpus, and opening it: the one place that knows all kinds.

Memory stays small whatever the size of the corpus, but for HNSW, whose graph faiss makes in memory.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from corral.recipe.errors import UserError
from corral.retrieval.base import Searcher, check_kind
from corral.retrieval.bm25 import Bm25Searcher, Bm25Settings, build_bm25, check_bm25
from corral.retrieval.corpus import Corpus, CorpusFacts, Progress, same_file, scan, silent, stat
from corral.retrieval.dense import DenseSearcher, DenseSettings, build_dense, remove_vectors_of_graph
from corral.retrieval.encoder import Encoder
from corral.retrieval.manifest import (
    BUILDING,
    MANIFEST,
    OFFSETS,
    Manifest,
    corpus_of,
    installed_versions,
    read,
    read_finished,
)
from corral.retrieval.vectors import faiss

LOCK = "build.lock"


def build(
    corpus: Path,
    folder: Path,
    kind: str = "bm25",
    *,
    bm25: Bm25Settings | None = None,
    dense: DenseSettings | None = None,
    device: str | None = None,
    batch: int = 64,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda text: None,
) -> Manifest:
    """Makes the index in `folder`, or goes on with making it. `say`: is told how texts are encoded."""
    check_kind(kind, dense is not None)
    check_folder(folder)
    stat(corpus)
    bm25, encoder = bm25 or Bm25Settings(), None
    if kind == "bm25":
        check_bm25(bm25)
        settings = asdict(bm25)
    else:
        assert dense is not None
        faiss()
        encoder = Encoder(dense.encoder, device, batch)
        say(encoder.in_words())
        dense = replace(dense, encoder=encoder.settings)
        settings = dense.as_dict()
    packages = ("bm25s", "PyStemmer") if kind == "bm25" else ("faiss-cpu", "sentence-transformers", "transformers")
    is_new_folder = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        was_empty = check_folder(folder)
        try:
            facts = known_facts(corpus, folder) or scan(corpus, folder / OFFSETS, progress)
            manifest = Manifest(kind, facts, settings, installed_versions(*packages))
            refuse_other_build(folder, manifest)
            manifest.write(folder / BUILDING)
            opened = Corpus(corpus, folder / OFFSETS)
            if encoder is None:
                build_bm25(opened, folder, bm25, progress)
        except UserError:  # the corpus is wrong; nothing of it is worth keeping
            if was_empty:
                remove_content(folder, is_new_folder)
            raise
        if encoder is not None and dense is not None:  # from here on everything is kept
            build_dense(opened, folder, kind, dense, encoder, progress)
        manifest.write(folder / MANIFEST)
        (folder / BUILDING).unlink()
        remove_vectors_of_graph(folder)
    return manifest


def check_folder(folder: Path) -> bool:
    """Whether it is empty, or not there. Refuses one that holds something else."""
    if (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is already an index; delete it to build another one there")
    names = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set()
    if names and BUILDING not in names and names != {OFFSETS}:
        raise UserError(f"{folder} is not empty, and not an unfinished index either")
    return not names


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two builds in one folder would write to the same files."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = os.fstat(file.fileno()).st_nlink > 0  # else it was deleted by who had it before
        except BlockingIOError:
            is_mine = False
        except OSError:  # a file system without locks
            is_mine = True
        if not is_mine:
            raise UserError(f"{folder} is being built by another process; wait for it, or end it")
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def remove_content(folder: Path, also_folder: bool) -> None:
    for path in folder.iterdir():
        path.unlink()
    if also_folder:
        folder.rmdir()


def known_facts(corpus: Path, folder: Path) -> CorpusFacts | None:
    """Of a build that was stopped behind the first pass over the same file, which may be elsewhere now."""
    if not (folder / BUILDING).is_file():
        return None
    facts = read(folder / BUILDING).corpus
    if not same_file(corpus, facts):
        raise UserError(f"{folder} is the beginning of an index with another corpus; delete it to begin again")
    return replace(facts, path=str(corpus.resolve()), mtime_ns=stat(corpus).st_mtime_ns)


def refuse_other_build(folder: Path, manifest: Manifest) -> None:
    if (folder / BUILDING).is_file() and (differs := manifest.differs_from(read(folder / BUILDING))):
        raise UserError(
            f"{folder} is the beginning of an index with another {', '.join(differs)}; delete it to begin again"
        )


def open_index(
    folder: Path, corpus: Path | None = None, device: str | None = None, encoder: str | None = None
) -> Searcher:
    """Ready to be searched. `corpus`, `encoder`: where these are, if they were moved."""
    manifest = read_finished(folder)
    opened = Corpus(corpus_of(manifest, folder, corpus), folder / OFFSETS)
    if manifest.kind == "bm25":
        return Bm25Searcher(folder, opened, Bm25Settings(**manifest.settings))
    return DenseSearcher(folder, opened, manifest.kind, DenseSettings.of(manifest.settings), device, encoder)


def encoder_name(given: str) -> str:
    """A folder by its whole path, so that the index finds it from everywhere; other names are for the hub."""
    return str(Path(given).resolve()) if Path(given).is_dir() else given
