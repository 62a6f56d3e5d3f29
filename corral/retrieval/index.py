"""Functions that build the index of a corpus and load it, whatever its kind.

An index is a folder. What is in it stands in `manifest.json`, which is written last: without it, the folder is the rest
of a build that did not end. Memory stays small whatever the size of the corpus, but for HNSW, whose graph faiss makes
in memory.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from corral.observe.run_files import write_atomically
from corral.recipe.errors import UserError
from corral.retrieval.adopted import adopt_vectors, adopt_words
from corral.retrieval.bm25 import Bm25Searcher, Bm25Settings, build_bm25, check_bm25
from corral.retrieval.dense import DenseSearcher, DenseSettings, Encoder, build_dense, faiss, remove_vectors_of_graph
from corral.retrieval.searcher import Corpus, CorpusFacts, Progress, Searcher, check_kind, same_file, scan, silent, stat

MANIFEST = "manifest.json"
BUILDING = "building.json"
"""The manifest of an index that is being built: so that only the same build is gone on with."""
OFFSETS = "offsets.npy"
FORMAT = 1
LOCK = "build.lock"


@dataclass(frozen=True)
class IndexManifest:
    kind: str
    corpus: CorpusFacts
    settings: dict[str, Any]
    """Settings of the kind: BM25's parameters, or the encoder's."""
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")

    def differs_from(self, other: "IndexManifest") -> list[str]:
        """What is not the same, as far as the result of a build goes."""
        names = [name for name in ("kind", "format") if getattr(self, name) != getattr(other, name)]
        names += sorted(
            key for key in {*self.settings, *other.settings} if self.settings.get(key) != other.settings.get(key)
        )
        return names + ["corpus"] * (self.corpus.sha256 != other.corpus.sha256)


def build(
    corpus: Path,
    folder: Path,
    kind: str = "bm25",
    *,
    bm25: Bm25Settings | None = None,
    dense: DenseSettings | None = None,
    device: str | None = None,
    batch: int = 64,
    made: Path | None = None,
    progress: Progress = silent,
    report: Callable[[str], None] = lambda text: None,
) -> IndexManifest:
    """Makes the index in `folder`, or goes on with making it. `made`: an index of the corpus by somebody else, which is
    used. `report` is called with how texts are encoded."""
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
        report(encoder.describe())
        dense = replace(dense, encoder=encoder.settings)
        settings = asdict(dense)
    packages = ("bm25s", "PyStemmer") if kind == "bm25" else ("faiss-cpu", "sentence-transformers", "transformers")
    is_new_folder = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with build_lock(folder):
        was_empty = check_folder(folder)
        try:
            facts = known_facts(corpus, folder) or scan(corpus, folder / OFFSETS, progress)
            manifest = IndexManifest(kind, facts, settings, installed_versions(*packages))
            if (folder / BUILDING).is_file() and (differs := manifest.differs_from(read_manifest(folder / BUILDING))):
                raise UserError(
                    f"{folder} is the beginning of an index with another {', '.join(differs)}; delete it to begin again"
                )
            manifest.write(folder / BUILDING)
            opened = Corpus(corpus, folder / OFFSETS)
            if made is not None and encoder is not None:
                adopt_vectors(made, folder, kind, opened, encoder)
            elif made is not None:
                manifest = replace(manifest, settings=asdict(adopt_words(made, folder, bm25, opened)))
            elif encoder is None:
                build_bm25(opened, folder, bm25, progress)
        except UserError:  # the corpus is wrong; nothing of it is worth keeping
            if was_empty:
                for path in folder.iterdir():
                    path.unlink()
                if is_new_folder:
                    folder.rmdir()
            raise
        if encoder is not None and dense is not None and made is None:  # from here on everything is kept
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
def build_lock(folder: Path) -> Iterator[None]:
    """Locks the folder: two builds in it would write to the same files."""
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


def known_facts(corpus: Path, folder: Path) -> CorpusFacts | None:
    """The facts of a build that was stopped after the first pass over the same corpus, which may be elsewhere now."""
    if not (folder / BUILDING).is_file():
        return None
    facts = read_manifest(folder / BUILDING).corpus
    if not same_file(corpus, facts):
        raise UserError(f"{folder} is the beginning of an index with another corpus; delete it to begin again")
    return replace(facts, path=str(corpus.resolve()), mtime_ns=stat(corpus).st_mtime_ns)


def open_index(
    folder: Path,
    corpus: Path | None = None,
    device: str | None = None,
    encoder: str | None = None,
    index_device: str = "cpu",
) -> Searcher:
    """Ready to be searched. `corpus`, `encoder`: where these are, if they were moved. `index_device`: where vectors are
    compared."""
    manifest = read_finished(folder)
    opened = Corpus(corpus_of(manifest, folder, corpus), folder / OFFSETS)
    if manifest.kind == "bm25":
        return Bm25Searcher(folder, opened, Bm25Settings(**manifest.settings))
    return DenseSearcher(
        folder, opened, manifest.kind, DenseSettings.of(manifest.settings), device, encoder, index_device
    )


def encoder_name(given: str) -> str:
    """A folder by its whole path, so that the index finds it from everywhere; other names are for the hub."""
    return str(Path(given).resolve()) if Path(given).is_dir() else given


# --- manifests


def read_manifest(path: Path) -> IndexManifest:
    try:
        fields = json.loads(path.read_text())
        if (number := fields["format"]) == FORMAT:
            return IndexManifest(**{**fields, "corpus": CorpusFacts(**fields["corpus"])})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not the manifest of an index: {error}") from error
    raise UserError(f"{path} has format {number}, this version of corral reads {FORMAT}; build the index again")


def read_finished(folder: Path) -> IndexManifest:
    """The manifest of an index that can be searched."""
    if (folder / MANIFEST).is_file():
        return read_manifest(folder / MANIFEST)
    if (folder / BUILDING).is_file():
        raise UserError(f"the index {folder} is unfinished: run the same `corral retriever build` again")
    raise UserError(f"{folder} is not an index; `corral retriever build CORPUS {folder}` makes one")


def corpus_of(manifest: IndexManifest, folder: Path, given: Path | None) -> Path:
    """Where the corpus is now. It must be the one that the index was built from, to the last byte."""
    path = given or Path(manifest.corpus.path)
    if given is None and not path.is_file():
        raise UserError(f"the corpus of {folder} is no longer at {path}; say where it is with --corpus")
    if not same_file(path, manifest.corpus):
        raise UserError(f"{path} is not what the index {folder} was built from; build it again")
    return path


def installed_versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in ("corral", *packages):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
