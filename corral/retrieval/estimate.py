"""How large an index of a corpus becomes, and how long it takes, before anything is built.

Sizes follow from the corpus' size and a sample of its lines; times from doing a little of the work on this machine.
They are estimates: of the size a tenth may be wrong, of the time a half.
"""

import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from corral.observe.console import duration
from corral.recipe.errors import UserError
from corral.recipe.memory import human_bytes
from corral.retrieval.bm25 import VOCABULARY, Bm25Settings, splitter
from corral.retrieval.dense import DenseSettings, Encoder, empty_hnsw
from corral.retrieval.index import read_finished
from corral.retrieval.searcher import check_kind, parse_line, stat

SAMPLE_LINES = 2_000
MAX_ENCODED, MAX_ENCODING_S = 512, 5.0
"""Passages that are encoded to measure the time, or until so many seconds are over."""
MAX_LINKED = 2_000
"""Vectors that are put into a graph to measure the time."""
READ_BYTES_S = 150e6
"""Speed of the first pass over the corpus, which parses JSON."""
ENTRY_S = 1.5e-7
"""Time to put one entry of the BM25 matrix in its place."""
WORD_BYTES = 180
"""Memory of a word of the vocabulary."""
BLOCK_BYTES = 400 * 2**20
LIBRARIES_BYTES = 600 * 2**20
"""Memory of Python, torch and an encoder of about 100 million parameters."""
PLAIN_BYTES = 80 * 2**20
"""Memory of Python and numpy."""


@dataclass(frozen=True)
class IndexEstimate:
    kind: str
    num_passages: int
    corpus_bytes: int
    disk_bytes: int
    """Size of the index; the corpus stays where it is, and is needed."""
    build_disk_bytes: int
    """Size while it is built, with what is deleted at the end."""
    build_memory_bytes: int
    """Memory to build it; 0: it is built already."""
    serve_memory_bytes: int
    """Memory that the server must have."""
    cache_bytes: int
    """Further memory for mapped files: with less than this the server is slower, not impossible."""
    build_s: float | None
    """Time to build it; None: not measured."""

    def lines(self) -> list[str]:
        took = "not measured" if self.build_s is None else duration(self.build_s)
        disk = human_bytes(self.disk_bytes)
        serve = f"{human_bytes(self.serve_memory_bytes)}; to be fast, {human_bytes(self.cache_bytes)} of page cache"
        if not self.build_memory_bytes:
            title = f"{self.kind} index of {self.num_passages:,} passages ({human_bytes(self.corpus_bytes)})"
            return [title, f"  disk             {disk}", f"  memory to serve  {serve}"]
        return [
            f"{self.kind} index of about {self.num_passages:,} passages ({human_bytes(self.corpus_bytes)})",
            f"  disk             {disk}, while it is built {human_bytes(self.build_disk_bytes)}",
            f"  memory to build  {human_bytes(self.build_memory_bytes)}",
            f"  memory to serve  {serve}",
            f"  time to build    {took}",
        ]


@dataclass(frozen=True)
class CorpusSample:
    contents: list[str]
    corpus_bytes: int
    num_passages: int
    """Number of passages in the whole file, by the mean length of the lines."""


def estimate(
    corpus: Path,
    kind: str = "bm25",
    *,
    bm25: Bm25Settings | None = None,
    dense: DenseSettings | None = None,
    device: str | None = None,
    batch: int = 64,
    measure: bool = True,
) -> IndexEstimate:
    """`measure=False`: without loading an encoder or timing anything; its dimension is then read from its folder."""
    check_kind(kind, dense is not None)
    sample = take_sample(corpus)
    if kind == "bm25":
        return estimate_bm25(sample, bm25 or Bm25Settings())
    assert dense is not None
    return estimate_dense(sample, kind, dense, device, batch, measure)


def estimate_bm25(sample: CorpusSample, settings: Bm25Settings) -> IndexEstimate:
    split, n = splitter(settings.language), sample.num_passages
    began = time.perf_counter()
    words = [Counter(split(text)) for text in sample.contents]
    split_s = (time.perf_counter() - began) / len(words) * 1.5  # and writing them down
    entries = round(sum(map(len, words)) / len(words) * n)
    num_words = vocabulary_size(words, n)
    matrix, vocabulary = entries * 8, num_words * 25
    disk = matrix + vocabulary + n * 8
    return IndexEstimate(
        kind="bm25",
        num_passages=n,
        corpus_bytes=sample.corpus_bytes,
        disk_bytes=disk,
        build_disk_bytes=disk + entries * 8 + n * 8,
        build_memory_bytes=PLAIN_BYTES + BLOCK_BYTES + num_words * (WORD_BYTES + 30),
        serve_memory_bytes=PLAIN_BYTES + num_words * (WORD_BYTES + 8) + n * 4,
        cache_bytes=matrix + sample.corpus_bytes,
        build_s=sample.corpus_bytes / READ_BYTES_S + n * split_s + entries * ENTRY_S,
    )


def vocabulary_size(words: "list[Counter[str]]", num_passages: int) -> int:
    """The number of different words by Heaps' law, from the growth over the second half of the sample."""
    half = len(words) // 2
    first = len(set().union(*words[:half])) if half else 0
    whole = len(set().union(*words))
    if not first or whole <= first:
        return whole
    growth = min(1.0, math.log(whole / first) / math.log(len(words) / half))
    return round(whole * math.pow(max(1.0, num_passages / len(words)), growth))


def estimate_dense(
    sample: CorpusSample, kind: str, settings: DenseSettings, device: str | None, batch: int, measure: bool
) -> IndexEstimate:
    n = sample.num_passages
    encoder = Encoder(settings.encoder, device, batch) if measure else None
    dimension = encoder.dimension if encoder is not None else dimension_in(Path(settings.encoder.model))
    vectors = n * dimension * (2 if settings.half else 4)
    graph = 0 if kind == "flat" else n * (settings.num_links * 8 + 16)
    build_s = None
    if encoder is not None:
        build_s = sample.corpus_bytes / READ_BYTES_S + n * encoding_s(encoder, sample.contents)
        if kind == "hnsw":
            build_s += n * linking_s(dimension, settings, n)
    disk = vectors + graph + n * 8
    return IndexEstimate(
        kind=kind,
        num_passages=n,
        corpus_bytes=sample.corpus_bytes,
        disk_bytes=disk,
        build_disk_bytes=disk + (vectors if kind == "hnsw" else 0),
        build_memory_bytes=LIBRARIES_BYTES + (vectors + graph if kind == "hnsw" else 0),
        serve_memory_bytes=LIBRARIES_BYTES + graph,
        cache_bytes=vectors + sample.corpus_bytes,
        build_s=build_s,
    )


def encoding_s(encoder: Encoder, contents: list[str]) -> float:
    """Time to encode one passage, measured in a few seconds. The first two warm up and are not counted."""
    texts = contents[:: max(1, len(contents) // MAX_ENCODED)][:MAX_ENCODED]
    encoder.passages(texts[:2])
    began, done = time.perf_counter(), 0
    while done < len(texts) and time.perf_counter() - began < MAX_ENCODING_S:
        part = texts[done : done + 16]
        encoder.passages(part)
        done += len(part)
    return (time.perf_counter() - began) / done


def linking_s(dimension: int, settings: DenseSettings, num_passages: int) -> float:
    """Time to put one passage into a graph of so many: walks get longer with their logarithm."""
    number = min(MAX_LINKED, num_passages)
    vectors = np.random.default_rng(0).normal(size=(number, dimension)).astype(np.float32)
    index = empty_hnsw(dimension, settings.half, settings.num_links)
    index.hnsw.efConstruction = settings.ef_construction
    if not index.is_trained:
        index.train(vectors)
    began = time.perf_counter()
    index.add(vectors)
    return (time.perf_counter() - began) / number * math.log(num_passages + 1) / math.log(number + 1)


def dimension_in(model: Path) -> int:
    """The dimension of an encoder that is not loaded; 768 is what most have."""
    config = model / "config.json"
    fields = json.loads(config.read_text()) if config.is_file() else {}
    return int(fields.get("hidden_size", 768))


def take_sample(corpus: Path) -> CorpusSample:
    """Lines at equal distances. A small file is read whole."""
    total = stat(corpus).st_size
    lines: list[tuple[int, bytes]] = []  # offset and content
    with corpus.open("rb") as file:
        head = file.readlines(SAMPLE_LINES * 400)
        if whole := file.tell() >= total:
            starts = accumulate(map(len, head), initial=0)
            lines = [(start, line) for start, line in zip(starts, head, strict=False) if line.strip()]
        else:
            for step in range(SAMPLE_LINES):
                file.seek(total * step // SAMPLE_LINES)
                if step:
                    file.readline()  # the rest of a line
                start = file.tell()
                if (line := file.readline()).strip():
                    lines.append((start, line))
    if not lines:
        raise UserError(f"{corpus} has no passages")
    number = len(lines) if whole else round(total / (sum(len(line) for _, line in lines) / len(lines)))
    contents = [contents_at(start, line, corpus) for start, line in lines[:: max(1, len(lines) // SAMPLE_LINES)]]
    return CorpusSample(contents, total, number)


def contents_at(start: int, line: bytes, corpus: Path) -> str:
    """The passage of a line. Its number is needed only if it is wrong: then those before it are counted."""
    try:
        return parse_line(line, corpus, 0).contents
    except UserError:
        number = 1
        with corpus.open("rb") as file:
            while start > 0 and (part := file.read(min(start, 2**20))):
                number += part.count(b"\n")
                start -= len(part)
        return parse_line(line, corpus, number).contents


def of_index(folder: Path) -> IndexEstimate:
    """The sizes of an index that is built."""
    manifest = read_finished(folder)
    disk = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    n = manifest.corpus.num_passages
    memory, held = LIBRARIES_BYTES, 0
    if manifest.kind == "bm25":
        held = (folder / VOCABULARY).stat().st_size
        memory = PLAIN_BYTES + held * WORD_BYTES // 25 + n * 4
    elif manifest.kind == "hnsw":
        settings = DenseSettings.of(manifest.settings)
        held = n * (settings.num_links * 8 + 16)
        memory += held
    return IndexEstimate(
        kind=manifest.kind,
        num_passages=n,
        corpus_bytes=manifest.corpus.size,
        disk_bytes=disk,
        build_disk_bytes=disk,
        build_memory_bytes=0,
        serve_memory_bytes=memory,
        cache_bytes=disk - held - n * 8 + manifest.corpus.size,
        build_s=0.0,
    )
