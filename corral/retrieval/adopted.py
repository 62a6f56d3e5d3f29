"""Indexes that somebody else has made of the same corpus, such as those that Search-R1 offers for download: a file of
faiss (`e5_Flat.index`, `e5_HNSW64.index`), or a folder that bm25s has saved.

Nothing is copied: the index names the files where they lie. What they were made of is nowhere in them, so it is tried:
the encoder must make a few of the vectors again, and the words of a few passages must be where they are found.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corral.recipe.errors import UserError, one_line
from corral.retrieval.bm25 import DATA, INDICES, INDPTR, PARAMETERS, VOCABULARY, Bm25Settings, splitter
from corral.retrieval.dense import FLAT, HNSW, Encoder, faiss, open_mapped
from corral.retrieval.searcher import Corpus

NUM_TRIED = 8
LEAST_LIKENESS = 0.98
"""Cosine of a vector and what the encoder makes of its passage; it computes in float16, and so may others have."""
LUCENE = "segments_*"


def adopt_vectors(made: Path, folder: Path, kind: str, corpus: Corpus, encoder: Encoder) -> None:
    """Makes a file of faiss that of the index in `folder`, if it has a vector of this encoder for each passage."""
    if not made.is_file():
        raise UserError(f"--from {made}: there is no such file; an index of vectors is a file of faiss")
    with one_line(f"--from {made} is no index of faiss"):
        index = open_mapped(made)
    found = "hnsw" if isinstance(index, faiss().IndexHNSW) else "flat"
    if found == "flat" and not isinstance(index, faiss().IndexFlat | faiss().IndexScalarQuantizer):
        raise UserError(f"--from {made} is an {type(index).__name__}; flat and HNSW indexes can be used, build another")
    if found != kind:
        raise UserError(f"--from {made} is of kind {found}: say --kind {found}")
    if index.metric_type != faiss().METRIC_INNER_PRODUCT:
        raise UserError(f"--from {made} compares by distance, and not by inner product as Corral does; build another")
    if index.ntotal != len(corpus):
        raise UserError(f"--from {made} has {index.ntotal:,} vectors, and {corpus.path} {len(corpus):,} passages")
    if index.d != encoder.dimension:
        raise UserError(f"--from {made} has vectors of {index.d} numbers, and the encoder makes {encoder.dimension}")
    rows = some_rows(len(corpus))
    own = encoder.passages([corpus[row].contents for row in rows])
    theirs = np.stack([index.reconstruct(row) for row in rows])
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(theirs, axis=1)
    likeness = (own * theirs).sum(axis=1) / np.maximum(lengths, 1e-12)
    if likeness[worst := int(likeness.argmin())] < LEAST_LIKENESS:
        raise UserError(
            f"--from {made}: of passage {rows[worst] + 1} the encoder makes another vector (their cosine is "
            f"{likeness[worst]:.3f}): the corpus, encoder, --passage-prefix, --pooling or --max-tokens is another one"
        )
    link(made, folder / (HNSW if kind == "hnsw" else FLAT))


def adopt_words(made: Path, folder: Path, settings: Bm25Settings, corpus: Corpus) -> Bm25Settings:
    """Makes a folder of bm25s that of the index in `folder`. Returns its settings."""
    names = (DATA, INDICES, INDPTR, VOCABULARY, PARAMETERS)
    if made.is_dir() and any(made.glob(LUCENE)):
        raise UserError(
            f"--from {made} is an index of Lucene, as pyserini makes it, which only Java reads: leave --from out, and "
            "a BM25 index is built of the corpus (`--dry-run` says how long that takes)"
        )
    if missing := [name for name in names if not (made / name).is_file()]:
        raise UserError(f"--from {made} is not a folder that bm25s has saved: there is no {missing[0]} in it")
    if any(made.glob("nonoccurrence_array*")):
        raise UserError(f"--from {made} gives points for words that a passage has not (BM25L, BM25+): build another")
    with one_line(f"--from {made} cannot be read"):
        parameters: dict[str, Any] = json.loads((made / PARAMETERS).read_text())
        vocabulary: dict[str, int] = json.loads((made / VOCABULARY).read_text(encoding="utf-8"))
        indices, ends = np.load(made / INDICES, mmap_mode="r"), np.load(made / INDPTR)
        if (number := int(parameters["num_docs"])) != len(corpus):
            raise UserError(f"--from {made} is of {number:,} passages, and {corpus.path} has {len(corpus):,}")
        split = splitter(settings.language)
        for row in some_rows(len(corpus)):
            for word in set(split(corpus[row].contents)):
                term = vocabulary.get(word)
                if term is None or row not in indices[ends[term] : ends[term + 1]]:
                    raise UserError(
                        f"--from {made}: {word!r} of passage {row + 1} is not there: the corpus or --language is "
                        "another one, or it was split into words in another way"
                    )
        adopted = Bm25Settings(float(parameters["k1"]), float(parameters["b"]), settings.language)
    for name in names:
        link(made / name, folder / name)
    return adopted


def some_rows(number: int) -> Sequence[int]:
    return sorted({number * place // NUM_TRIED for place in range(NUM_TRIED)} | {number - 1})


def link(made: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(made.resolve())
