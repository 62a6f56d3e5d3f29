"""Dense search: passages and queries as vectors of an encoder, found by inner product with faiss.

`flat` compares a query with every vector and is exact. `hnsw` walks a graph, is much faster on millions of passages,
and misses a few. A stopped build goes on with the passages that are not encoded yet; the graph, which faiss can only
make in memory, is begun again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from corral.observe.run_files import replacing
from corral.recipe.errors import RunError, UserError
from corral.retrieval.base import Found
from corral.retrieval.corpus import Corpus, Progress, silent
from corral.retrieval.encoder import Encoder, EncoderSettings
from corral.retrieval.vectors import VectorFile, empty_hnsw, faiss, open_mapped

FLAT, HNSW = "flat.faiss", "hnsw.faiss"
ROUND = 16
"""Batches of the encoder that are written at once; it sorts the texts in them by length."""
ADDED_AT_ONCE = 20_000


@dataclass(frozen=True)
class DenseSettings:
    encoder: EncoderSettings
    half: bool = False
    """Vectors in 16 bits: half of the disk and memory, and scores to three digits."""
    num_links: int = 64
    """Of a node of the HNSW graph (M)."""
    ef_construction: int = 200
    ef_search: int = 128
    """How many candidates a walk keeps: more finds more and takes longer."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "DenseSettings":
        return cls(**{**settings, "encoder": EncoderSettings(**settings["encoder"])})


def build_dense(
    corpus: Corpus, folder: Path, kind: str, settings: DenseSettings, encoder: Encoder, progress: Progress = silent
) -> None:
    vectors = VectorFile(folder / FLAT, len(corpus), encoder.dimension, settings.half)
    try:
        encode_all(corpus, vectors, encoder, progress)
    except KeyboardInterrupt:
        raise RunError(
            f"stopped; {vectors.done:,} of {len(corpus):,} passages are encoded, and the same command goes on there"
        ) from None
    vectors.check_whole()
    if kind == "hnsw":
        try:
            build_graph(vectors, folder / HNSW, settings, progress)
        except KeyboardInterrupt:
            raise RunError("stopped; all passages are encoded, and the same command begins with the graph") from None


def encode_all(corpus: Corpus, vectors: VectorFile, encoder: Encoder, progress: Progress) -> None:
    while vectors.done < len(corpus):
        stop = min(len(corpus), vectors.done + ROUND * encoder.batch)
        vectors.append(encoder.passages(corpus.contents(vectors.done, stop)))
        progress("encoding passages", vectors.done, len(corpus))


def build_graph(vectors: VectorFile, path: Path, settings: DenseSettings, progress: Progress) -> None:
    index = empty_hnsw(vectors.dimension, settings.half, settings.num_links)
    index.hnsw.efConstruction = settings.ef_construction
    for start in range(0, vectors.total, ADDED_AT_ONCE):
        stop = min(start + ADDED_AT_ONCE, vectors.total)
        rows = vectors.rows(start, stop)
        if not index.is_trained:
            index.train(rows)
        index.add(rows)
        progress("building the graph", stop, vectors.total)
    with replacing(path) as file:
        faiss().write_index(index, file.name)


def remove_vectors_of_graph(folder: Path) -> None:
    """The graph has a copy of them."""
    if (folder / HNSW).is_file():
        (folder / FLAT).unlink(missing_ok=True)


class DenseSearcher:
    num_threads, merges = 1, True

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        kind: str,
        settings: DenseSettings,
        device: str | None = None,
        encoder: str | None = None,
    ) -> None:
        """`encoder`: where that of the queries is, if it was moved."""
        self.kind, self.corpus = kind, corpus
        self.num_passages: int | None = len(corpus)
        self.index = open_mapped(folder / (HNSW if kind == "hnsw" else FLAT))
        if kind == "hnsw":
            self.index.hnsw.efSearch = settings.ef_search
        assert self.index.ntotal == len(corpus)
        model = encoder or settings.encoder.query_model or settings.encoder.model
        if Path(model).is_absolute() and not Path(model).is_dir():
            raise UserError(f"the encoder of {folder} is not at {model}; say where it is with --encoder")
        self.encoder = Encoder(replace(settings.encoder, model=model, query_model=None), device)
        if self.encoder.dimension != self.index.d:
            lengths = f"{self.encoder.dimension} numbers, those of {folder} have {self.index.d}"
            raise UserError(f"{model} is not the encoder of this index: its vectors have {lengths}")
        self.about = self.encoder.in_words()

    def search(self, queries: Sequence[str], k: int) -> list[list[Found]]:
        if not queries:
            return []
        scores, rows = self.index.search(self.encoder.queries(queries), min(k, len(self.corpus)))
        return [
            [Found(self.corpus[row], score) for row, score in zip(*both, strict=True) if row >= 0]
            for both in zip(rows.tolist(), scores.tolist(), strict=True)
        ]
