"""Dense search: passages and queries as vectors of an encoder, found by inner product with faiss.

`flat` compares a query with every vector and is exact. `hnsw` walks a graph, is much faster on millions of passages,
and misses a few. A stopped build goes on with the passages that are not encoded yet; the graph, which faiss can only
make in memory, is begun again.

A flat index of faiss is a short header and then the vectors, one after the other. So the file of the vectors, which is
written batch by batch, is the index from the first byte on: nothing is copied, nothing must fit in memory, and a build
that was stopped goes on where the file ends. The header is faiss's own, of an empty index, with the number put in.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.observe.run_files import replacing
from corral.recipe.errors import RunError, UserError
from corral.retrieval.corpus import Corpus, Progress, silent
from corral.retrieval.encoder import Encoder, EncoderSettings
from corral.retrieval.searcher import Hit, retriever_extra

FLAT, HNSW = "flat.faiss", "hnsw.faiss"
BATCHES_PER_WRITE = 16
"""Batches of the encoder that are written at once; it sorts the texts in them by length."""
ADDED_AT_ONCE = 20_000
NUMBER_BYTES = slice(8, 16)
"""Where faiss's header has the number of vectors: behind four letters and the dimension."""


@dataclass(frozen=True)
class DenseSettings:
    encoder: EncoderSettings
    half: bool = False
    """Vectors in 16 bits: half of the disk and memory, and scores to three digits."""
    num_links: int = 64
    """Links of a node of the HNSW graph (M)."""
    ef_construction: int = 200
    ef_search: int = 128
    """How many candidates a walk keeps: more finds more and takes longer."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "DenseSettings":
        return cls(**{**settings, "encoder": EncoderSettings(**settings["encoder"])})


def build_dense(
    corpus: Corpus, folder: Path, kind: str, settings: DenseSettings, encoder: Encoder, progress: Progress = silent
) -> None:
    vectors = VectorFile(folder / FLAT, len(corpus), encoder.dimension, settings.half)
    try:
        while vectors.done < len(corpus):
            stop = min(len(corpus), vectors.done + BATCHES_PER_WRITE * encoder.batch)
            vectors.append(encoder.passages(corpus.contents(vectors.done, stop)))
            progress("encoding passages", vectors.done, len(corpus))
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


def build_graph(vectors: "VectorFile", path: Path, settings: DenseSettings, progress: Progress) -> None:
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
    """Deletes the flat file of an HNSW index, which has a copy of the vectors."""
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
        """`encoder`: the path of the queries' encoder, if it was moved."""
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
        self.about = self.encoder.describe()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if not queries:
            return []
        scores, rows = self.index.search(self.encoder.queries(queries), min(k, len(self.corpus)))
        return [
            [Hit(self.corpus[row], score) for row, score in zip(*both, strict=True) if row >= 0]
            for both in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


# --- vectors in files that faiss maps into memory


class VectorFile:
    """The vectors of `total` passages, of which `done` are there."""

    def __init__(self, path: Path, total: int, dimension: int, half: bool) -> None:
        self.path, self.total, self.dimension = path, total, dimension
        self.dtype = np.dtype(np.float16 if half else np.float32)
        self.header = faiss_header(total, dimension, half)
        if not path.exists():
            path.write_bytes(self.header)
        with path.open("rb") as file:
            if file.read(len(self.header)) != self.header:
                raise UserError(f"{path} is not of this build; delete {path.parent} and build it again")
        self.done = min(total, (path.stat().st_size - len(self.header)) // self.row_bytes)
        os.truncate(path, len(self.header) + self.done * self.row_bytes)

    @property
    def row_bytes(self) -> int:
        return self.dimension * self.dtype.itemsize

    def append(self, vectors: npt.NDArray[np.float32]) -> None:
        with self.path.open("ab") as file:
            file.write(vectors.astype(self.dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.done += len(vectors)

    def check_whole(self) -> None:
        """Somebody else may have written to the file too."""
        size, wanted = self.path.stat().st_size, len(self.header) + self.total * self.row_bytes
        if size != wanted:
            raise RunError(f"{self.path} has {size} bytes where it should have {wanted}; delete {self.path.parent}")

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        offset = len(self.header) + start * self.row_bytes
        number = (stop - start) * self.dimension
        return np.fromfile(self.path, self.dtype, number, offset=offset).reshape(-1, self.dimension).astype(np.float32)


def faiss_header(total: int, dimension: int, half: bool) -> bytes:
    if half:
        index = faiss().IndexScalarQuantizer(dimension, faiss().ScalarQuantizer.QT_fp16, faiss().METRIC_INNER_PRODUCT)
    else:
        index = faiss().IndexFlatIP(dimension)
    empty = bytes(faiss().serialize_index(index))
    items = total * dimension * (2 if half else 1)  # counted in bytes in the one, in numbers in the other
    return (
        empty[: NUMBER_BYTES.start]
        + struct.pack("<q", total)
        + empty[NUMBER_BYTES.stop : -8]
        + struct.pack("<Q", items)
    )


def empty_hnsw(dimension: int, half: bool, num_links: int) -> Any:
    metric = faiss().METRIC_INNER_PRODUCT
    if half:
        return faiss().IndexHNSWSQ(dimension, faiss().ScalarQuantizer.QT_fp16, num_links, metric)
    return faiss().IndexHNSWFlat(dimension, num_links, metric)


def open_mapped(path: Path) -> Any:
    """IO_FLAG_MMAP alone maps inverted lists only, and reads the vectors of a flat index into memory."""
    return faiss().read_index(str(path), faiss().IO_FLAG_MMAP_IFC)


def faiss() -> Any:
    with retriever_extra():
        import faiss
    return faiss
