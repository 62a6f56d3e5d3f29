"""Dense search: passages and queries as vectors of an encoder, found by inner product with faiss.

`flat` compares a query with every vector and is exact. `hnsw` walks a graph, is much faster on millions of passages,
and misses a few. A stopped build goes on with the passages that are not encoded yet; the graph, which faiss can only
make in memory, is begun again.

A flat index of faiss is a short header and then the vectors, one after the other. So the file of the vectors, which is
written batch by batch, is the index from the first byte on: nothing is copied, nothing must fit in memory, and a build
that was stopped goes on where the file ends. The header is faiss's own, of an empty index, with the number put in.

Families of encoders want their own format: e5 prefixes, bge an instruction before the query, DPR no normalization and
two models. What the model's configuration has goes before what is known of its family by its name; the user's settings
go before both. What was used for the passages is written in the index, so that queries are always treated the same.
"""

import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from corral.hub import model_files
from corral.observe.run_files import replacing
from corral.recipe.errors import RunError, UserError, first_line
from corral.retrieval.searcher import Corpus, Hit, Progress, check_device, retriever_extra, silent

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

FLAT, HNSW = "flat.faiss", "hnsw.faiss"
BATCHES_PER_WRITE = 16
"""Batches of the encoder that are written at once; it sorts the texts in them by length."""
ADDED_AT_ONCE = 20_000
NUMBER_BYTES = slice(8, 16)
"""Where faiss's header has the number of vectors: behind four letters and the dimension."""
MAX_TOKENS = 256
BGE = "Represent this sentence for searching relevant passages: "
BGE_CHINESE = "为这个句子生成表示以用于检索相关文章："

Vectors = npt.NDArray[np.float32]
ModelPrompts = Mapping[str, str]
"""The prompts of a sentence-transformers model, by name."""


@dataclass(frozen=True)
class EncoderSettings:
    model: str
    query_model: str | None = None
    """The model of queries, if they have one of their own, as in DPR."""
    query_prefix: str | None = None
    """None: that of the model's configuration, else of its family."""
    passage_prefix: str | None = None
    pooling: str | None = None
    """mean or cls. None: that of the model's configuration, else of its family."""
    normalise: bool | None = None
    """Whether vectors are normalized. None: as the family has it, else yes."""
    max_tokens: int = MAX_TOKENS
    """Texts are cut to this many tokens."""


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
    corpus: Corpus, folder: Path, kind: str, settings: DenseSettings, encoder: "Encoder", progress: Progress = silent
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
        index_device: str = "cpu",
    ) -> None:
        """`encoder`: the path of the queries' encoder, if it was moved. `index_device`: where vectors are compared."""
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
        if index_device != "cpu":
            self.index = on_gpu(self.index, index_device)

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
        self.row_bytes = dimension * self.dtype.itemsize
        self.header = faiss_header(total, dimension, half)
        if not path.exists():
            path.write_bytes(self.header)
        with path.open("rb") as file:
            if file.read(len(self.header)) != self.header:
                raise UserError(f"{path} is not of this build; delete {path.parent} and build it again")
        self.done = min(total, (path.stat().st_size - len(self.header)) // self.row_bytes)
        os.truncate(path, len(self.header) + self.done * self.row_bytes)

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
    counted = empty[: NUMBER_BYTES.start] + struct.pack("<q", total) + empty[NUMBER_BYTES.stop : -8]
    return counted + struct.pack("<Q", items)


def empty_hnsw(dimension: int, half: bool, num_links: int) -> Any:
    metric = faiss().METRIC_INNER_PRODUCT
    if half:
        return faiss().IndexHNSWSQ(dimension, faiss().ScalarQuantizer.QT_fp16, num_links, metric)
    return faiss().IndexHNSWFlat(dimension, num_links, metric)


def open_mapped(path: Path) -> Any:
    # IO_FLAG_MMAP alone maps inverted lists only, and reads the vectors of a flat index into memory.
    return faiss().read_index(str(path), faiss().IO_FLAG_MMAP_IFC)


def on_gpu(index: Any, device: str) -> Any:
    """A flat index with its vectors in a GPU's memory, in 16 bits if they are so in the file. Read in pieces: they may
    not fit the host's."""
    found = re.fullmatch(r"cuda(?::(\d+))?", device)
    if found is None:
        raise UserError(f"--index-device {device} is neither cpu nor cuda, cuda:1 and so on")
    number, library = int(found[1] or 0), faiss()
    if not hasattr(library, "StandardGpuResources"):
        raise UserError(
            f"--index-device {device}: the faiss that is installed has no GPU in it; put faiss-gpu-cu12 in the place "
            "of faiss-cpu, or leave it out: vectors are compared on the CPU then"
        )
    if number >= library.get_num_gpus():
        raise UserError(f"--index-device {device}: faiss finds {library.get_num_gpus()} GPUs on this machine")
    if isinstance(index, library.IndexHNSW):
        raise UserError(
            f"--index-device {device}: faiss walks the graph of an HNSW index on the CPU only; take --kind flat"
        )
    settings = library.GpuIndexFlatConfig()
    settings.device, settings.useFloat16 = number, not isinstance(index, library.IndexFlat)
    resources = library.StandardGpuResources()
    moved = library.GpuIndexFlatIP(resources, index.d, settings)
    moved.resources = resources  # as long as the index
    for start in range(0, index.ntotal, ADDED_AT_ONCE):
        moved.add(index.reconstruct_n(start, min(ADDED_AT_ONCE, index.ntotal - start)))
    return moved


def faiss() -> Any:
    with retriever_extra():
        import faiss
    return faiss


# --- texts to vectors, by a sentence-transformers model


@dataclass(frozen=True)
class EncoderFamily:
    name: str
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: str = "mean"
    normalise: bool = True


FAMILIES: tuple[tuple[str, EncoderFamily], ...] = (
    (r"\be5\b", EncoderFamily("e5", "query: ", "passage: ")),
    (r"\bbge\b.*\bm3\b", EncoderFamily("bge-m3", pooling="cls")),
    (r"\bbge\b.*\bzh\b", EncoderFamily("bge", BGE_CHINESE, pooling="cls")),
    (r"\bbge\b", EncoderFamily("bge", BGE, pooling="cls")),
    (r"\bdpr\b", EncoderFamily("dpr", pooling="cls", normalise=False)),
)


OTHER_FORMATS = re.compile(r"\b(instruct|icl|gemma\d*)\b")
"""Words in the name of a model whose format is another than that of the family whose name it has."""
SNAPSHOT = re.compile(r"models--(?:[^/]*--)?([^/]+)/snapshots/[^/]+/?$")
"""How the hub's cache names a model's folder."""


def family_of(model: str) -> EncoderFamily | None:
    """The family by the last part of the name: `intfloat/e5-base-v2` is an e5."""
    snapshot = SNAPSHOT.search(model)
    name = (snapshot[1] if snapshot else Path(model).name).lower().replace("_", "-")
    if OTHER_FORMATS.search(name):
        return None
    return next((family for pattern, family in FAMILIES if re.search(pattern, name)), None)


class Encoder:
    def __init__(self, settings: EncoderSettings, device: str | None = None, batch: int = 64) -> None:
        check_device(device)
        self.batch = batch
        self.passage_model = self.query_model = load(settings.model, settings, device)
        if settings.query_model is not None:
            self.query_model = load(settings.query_model, settings, device)
        self.settings = resolved(settings, self.query_model.prompts, self.passage_model.prompts)
        self.dimension = dimension_of(self.passage_model)
        if dimension_of(self.query_model) != self.dimension:
            raise UserError(f"{settings.query_model} and {settings.model} have vectors of different lengths")

    def describe(self) -> str:
        used = self.settings
        return (
            f"encoder {used.model}: query prefix {used.query_prefix!r}, passage prefix {used.passage_prefix!r}, "
            f"pooling {pooling_in(self.query_model)}, {'' if used.normalise else 'not '}normalized, "
            f"{self.dimension} numbers"
        )

    def passages(self, texts: Sequence[str]) -> Vectors:
        return self._encode(self.passage_model, texts, self.settings.passage_prefix or "")

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode(self.query_model, texts, self.settings.query_prefix or "")

    def _encode(self, model: "SentenceTransformer", texts: Sequence[str], prefix: str) -> Vectors:
        encoded = model.encode(
            [prefix + text for text in texts],
            prompt="",  # the prefix is there already; a default prompt of the model must not come on top
            batch_size=self.batch,
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=bool(self.settings.normalise),
        )
        return np.asarray(encoded, np.float32)


def load(name: str, settings: EncoderSettings, device: str | None) -> "SentenceTransformer":
    with retriever_extra():
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
        from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    source = model_files(name, "encoder")
    try:
        pooling = pooling_for(name, settings)
        if pooling is None:
            model = SentenceTransformer(source, device=device)
        else:
            words = Transformer(source)
            model = SentenceTransformer(
                modules=[words, Pooling(words.get_embedding_dimension(), pooling)], device=device
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the encoder {name} cannot be loaded: {first_line(error)}") from error
    longest = model.max_seq_length
    model.max_seq_length = settings.max_tokens if longest is None else min(longest, settings.max_tokens)
    if model.device.type == "cuda":
        model = model.half()
    return model.eval()


def resolved(settings: EncoderSettings, query_prompts: ModelPrompts, passage_prompts: ModelPrompts) -> EncoderSettings:
    """Settings without anything left open, so that a model that is moved is still used in the same way."""
    family = family_of(settings.model) or EncoderFamily("")
    query = own_prompt(query_prompts, family.query_prefix, "query", "web_search_query")
    passage = own_prompt(passage_prompts, family.passage_prefix, "passage", "document")
    poolings = {pooling_for(name, settings) for name in (settings.model, settings.query_model) if name}
    return replace(
        settings,
        query_prefix=query if settings.query_prefix is None else settings.query_prefix,
        passage_prefix=passage if settings.passage_prefix is None else settings.passage_prefix,
        normalise=family.normalise if settings.normalise is None else settings.normalise,
        pooling=poolings.pop() if len(poolings) == 1 else settings.pooling,
    )


def own_prompt(prompts: ModelPrompts, of_family: str, *names: str) -> str:
    """The model's prompt of one of these names. A model that has prompts at all wants none where it has none."""
    if not any(prompts.values()):
        return of_family
    return next(filter(None, map(prompts.get, names)), "")


def pooling_for(name: str, settings: EncoderSettings) -> str | None:
    """The pooling to set up. None: the model has its own."""
    with retriever_extra():
        from sentence_transformers.util import is_sentence_transformer_model
    if settings.pooling is not None or is_sentence_transformer_model(model_files(name, "encoder")):
        return settings.pooling
    return (family_of(name) or EncoderFamily("")).pooling


def pooling_in(model: "SentenceTransformer") -> str:
    modes = (getattr(module, "pooling_mode", None) for module in model)
    mode = next(filter(None, modes), "of its own")
    return mode if isinstance(mode, str) else " and ".join(mode)


def dimension_of(model: "SentenceTransformer") -> int:
    dimension = model.get_embedding_dimension()
    assert dimension is not None
    return int(dimension)
