"""Building an index of a corpus, and opening it: the one place that knows all kinds.

Memory stays small whatever the size of the corpus, but for HNSW, whose graph faiss makes in memory.
"""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

from corral.recipe.errors import UserError
from corral.retrieval.base import KINDS, Searcher
from corral.retrieval.bm25 import Bm25Searcher, Bm25Settings, build_bm25
from corral.retrieval.corpus import Corpus, CorpusFacts, Progress, same_file, scan, silent
from corral.retrieval.dense import DenseBuild, DenseSearcher, DenseSettings, build_dense, remove_vectors_of_graph
from corral.retrieval.encoder import resolved
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
) -> Manifest:
    """Makes the index in `folder`, or goes on with making it."""
    if kind not in KINDS:
        raise UserError(f"`{kind}` is not a kind of index; there are: {', '.join(KINDS)}")
    if kind != "bm25" and dense is None:
        raise UserError(f"a {kind} index needs --encoder, a sentence-transformers model")
    if dense is not None:
        dense = replace(dense, encoder=resolved(dense.encoder))
    settings = asdict(bm25 or Bm25Settings()) if dense is None or kind == "bm25" else dense.as_dict()
    packages = ("bm25s", "PyStemmer") if kind == "bm25" else ("faiss-cpu", "sentence-transformers", "transformers")
    is_new = prepare(folder)
    try:
        facts = known_facts(corpus, folder) or scan(corpus, folder / OFFSETS, progress)
        manifest = Manifest(kind, facts, settings, installed_versions(*packages))
        refuse_other_build(folder, manifest)
        manifest.write(folder / BUILDING)
        opened = Corpus(corpus, folder / OFFSETS)
        if kind == "bm25":
            build_bm25(opened, folder, bm25 or Bm25Settings(), progress)
        else:
            assert dense is not None
            build_dense(opened, folder, kind, dense, DenseBuild(device, batch, progress))
    except UserError:  # what was asked for was wrong; nothing of it is worth keeping
        if is_new:
            shutil.rmtree(folder)
        raise
    manifest.write(folder / MANIFEST)
    (folder / BUILDING).unlink()
    remove_vectors_of_graph(folder)
    return manifest


def prepare(folder: Path) -> bool:
    """Whether the folder is new. Refuses one that holds something else."""
    if (folder / MANIFEST).is_file():
        raise UserError(f"{folder} is already an index; delete it to build another one there")
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        return True
    if not (folder / BUILDING).is_file() and {path.name for path in folder.iterdir()} != {OFFSETS}:
        raise UserError(f"{folder} is not empty, and not an unfinished index either")
    return False


def known_facts(corpus: Path, folder: Path) -> CorpusFacts | None:
    """Of a build that was stopped behind the first pass over the same file."""
    if not (folder / BUILDING).is_file():
        return None
    facts = read(folder / BUILDING).corpus
    return facts if same_file(corpus, facts) else None


def refuse_other_build(folder: Path, manifest: Manifest) -> None:
    if (folder / BUILDING).is_file() and (differs := manifest.differs_from(read(folder / BUILDING))):
        raise UserError(
            f"{folder} is the beginning of an index with another {', '.join(differs)}; delete it to begin again"
        )


def open_index(folder: Path, corpus: Path | None = None, device: str | None = None) -> Searcher:
    """Ready to be searched. `corpus`: where the corpus is, if it was moved."""
    manifest = read_finished(folder)
    opened = Corpus(corpus_of(manifest, folder, corpus), folder / OFFSETS)
    if manifest.kind == "bm25":
        return Bm25Searcher(folder, opened, Bm25Settings(**manifest.settings))
    return DenseSearcher(folder, opened, manifest.kind, DenseSettings.of(manifest.settings), device)


def encoder_name(given: str) -> str:
    """A folder by its whole path, so that the index finds it from everywhere; other names are for the hub."""
    return str(Path(given).resolve()) if Path(given).is_dir() else given
