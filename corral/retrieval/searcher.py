r"""What every way to search has in common: the corpus, passages found for queries, and the re-ranker behind a search.

A corpus is a file with one JSON object per line, read where it lies. A line is
`{"id": ..., "contents": "\"Title\"\ntext"}`, as Search-R1 has it, or `{"id": ..., "title": ..., "text": ...}`. One pass
over the file checks every line and writes down where it begins; from then on any passage is one look into a mapped
file, and memory does not grow with the number of passages.
"""

import hashlib
import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from corral.hub import model_files
from corral.recipe.errors import UserError, first_line, install_command

KINDS = ("bm25", "flat", "hnsw")
RERANK_BATCH = 32
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, out of how much."""
REPORT_EVERY = 20_000
"""Lines between two reports, and lines whose offsets are written at once."""


@dataclass(frozen=True)
class Passage:
    id: str
    contents: str
    """The passage as `"Title"`, a newline, the text."""


@dataclass(frozen=True)
class Hit:
    """A passage that was found for a query."""

    passage: Passage
    score: float


@dataclass(frozen=True)
class SearchRequest:
    """The queries of one client's request."""

    queries: Sequence[str]
    topk: int
    num_candidates: int | None = None
    """Number of passages that the re-ranker looks at, if there is one. None: as many as it usually does."""


class Searcher(Protocol):
    kind: str
    num_passages: int | None
    """Number of passages in the index. None: nobody knows."""
    num_threads: int
    """Number of threads that may search at once."""
    merges: bool
    """Whether queries are better searched in one call, also those of several requests, or each in a thread."""
    about: str
    """A further description for the console. Empty: there is none."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """For each query up to `k` passages, the best first. The best 3 are the first 3 of the best 10."""
        ...


class Reranker:
    """A cross-encoder that reads each query together with each of its own candidates, and orders those."""

    def __init__(self, model: str, device: str | None = None) -> None:
        with retriever_extra():
            from sentence_transformers import CrossEncoder
            from transformers.utils.logging import disable_progress_bar
        disable_progress_bar()
        check_device(device)
        source = model_files(model, "--reranker")
        try:
            self.model = CrossEncoder(source, device=device)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"the re-ranker {model} cannot be loaded: {first_line(error)}") from error
        if self.model.num_labels != 1:
            raise UserError(f"the re-ranker {model} gives {self.model.num_labels} scores where one is wanted")

    def order(self, queries: Sequence[str], candidates: Sequence[Sequence[Hit]]) -> list[list[Hit]]:
        """The candidates of each query, the best first, with the cross-encoder's scores."""
        pairs = [(query, hit.passage.contents) for query, own in zip(queries, candidates, strict=True) for hit in own]
        if not pairs:
            return [[] for _ in queries]
        scores = iter(self.model.predict(pairs, batch_size=RERANK_BATCH, show_progress_bar=False).tolist())
        ordered = []
        for own in candidates:
            scored = [Hit(hit.passage, score) for hit, score in zip(own, islice(scores, len(own)), strict=True)]
            ordered.append(sorted(scored, key=lambda hit: -hit.score))
        return ordered


class Retriever:
    """From requests to passages: the search, and the re-ranker behind it where there is one."""

    def __init__(self, searcher: Searcher, reranker: Reranker | None = None, num_candidates: int = 10) -> None:
        self.searcher, self.reranker, self.num_candidates = searcher, reranker, num_candidates

    def retrieve(self, requests: Sequence[SearchRequest]) -> list[list[list[Hit]]]:
        """All queries of all requests in one search. What a request gets does not depend on the others."""
        queries = [query for request in requests for query in request.queries]
        widths = [
            # the re-ranker looks at more than it returns
            request.topk if self.reranker is None else max(request.topk, request.num_candidates or self.num_candidates)
            for request in requests
            for _ in request.queries
        ]
        hits = self.searcher.search(queries, max(widths, default=1))
        hits = [own[:width] for own, width in zip(hits, widths, strict=True)]
        if self.reranker is not None:
            hits = self.reranker.order(queries, hits)
        rest = iter(hits)
        return [[own[: request.topk] for own in islice(rest, len(request.queries))] for request in requests]


def check_kind(kind: str, has_encoder: bool) -> None:
    if kind not in KINDS:
        raise UserError(f"`{kind}` is not a kind of index; there are: {', '.join(KINDS)}")
    if kind != "bm25" and not has_encoder:
        raise UserError(f"a {kind} index needs --encoder, a sentence-transformers model")


def check_device(device: str | None) -> None:
    import torch

    try:
        found = torch.device(device or "cpu")
    except RuntimeError as error:
        raise UserError(f"--device {device} is not a device; there are cpu, cuda, cuda:1 and so on") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices")


@contextmanager
def retriever_extra() -> Iterator[None]:
    """To be used around imports of packages that are not always installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"this needs {error.name}: {install_command('retriever')}") from error


# --- the corpus


def silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class CorpusFacts:
    """The identity of the file that an index was made from."""

    path: str
    size: int
    mtime_ns: int
    sha256: str
    num_passages: int


class Corpus:
    def __init__(self, path: Path, offsets: Path) -> None:
        self.path = path
        self.offsets: npt.NDArray[np.int64] = np.load(offsets, mmap_mode="r")
        """Offsets at which each line begins, and where the last one ends."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Passage:
        line = self._bytes[int(self.offsets[row]) : int(self.offsets[row + 1])]
        return parse_line(line, self.path, row + 1)

    def contents(self, start: int, stop: int) -> list[str]:
        return [self[row].contents for row in range(start, stop)]


def scan(path: Path, offsets: Path, progress: Progress = silent) -> CorpusFacts:
    """Checks every line, and writes the offsets at which they begin."""
    status = stat(path)
    digest, row = hashlib.sha256(), 0
    with path.open("rb") as file, offsets.open("wb") as out:
        length = write_header(out, 0)
        position, starts = 0, [0]
        for row, line in whole_lines(file, path):
            parse_line(line, path, row)
            digest.update(line)
            position += len(line)
            starts.append(position)
            if len(starts) >= REPORT_EVERY:
                out.write(np.array(starts, np.int64).tobytes())
                starts = []
                progress("reading the corpus", position, status.st_size)
        out.write(np.array(starts, np.int64).tobytes())
        if row == 0:
            raise UserError(f"{path} has no passages")
        out.seek(0)
        assert write_header(out, row + 1) == length  # numpy leaves room for a longer number
    return CorpusFacts(str(path.resolve()), status.st_size, status.st_mtime_ns, digest.hexdigest(), row)


def whole_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. Empty ones are allowed at the end only, so that a line's number is its passage's."""
    empty = 0
    for number, line in enumerate(file, 1):
        if not line.strip():
            empty = empty or number
            continue
        if empty:
            raise UserError(f"{path}:{empty}: the line is empty; each line is one passage")
        yield number, line


def parse_line(line: bytes, path: Path, number: int) -> Passage:
    where = f"{path}:{number}"
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not a line of JSON: {first_line(error)}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object but {type(record).__name__}")
    contents = record.get("contents")
    if contents is None:
        title, text = record.get("title"), record.get("text")
        if text is None:
            raise UserError(f'{where}: has neither "contents" nor "text" (with "title"); it has: {", ".join(record)}')
        contents = text if title is None or not isinstance(text, str) else f'"{title}"\n{text}'
    if not isinstance(contents, str):
        raise UserError(f"{where}: the passage is not a text but {type(contents).__name__}")
    name = record.get("id")
    return Passage(str(number if name is None else name), contents)


def same_file(path: Path, facts: CorpusFacts) -> bool:
    """Whether the corpus is still what it was. Its bytes are read again only if its time has changed, its size not."""
    status = stat(path)
    if status.st_size != facts.size:
        return False
    if status.st_mtime_ns == facts.mtime_ns:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == facts.sha256


def stat(path: Path) -> Any:
    if path.suffix in (".gz", ".zst", ".bz2", ".xz"):
        raise UserError(f"{path} is compressed; unpack it first: passages are read from where they lie")
    if not path.is_file():
        raise UserError(f"the corpus {path} is not a file")
    return path.stat()


def write_header(file: BinaryIO, num_offsets: int) -> int:
    """Writes the header of a .npy file; returns its length."""
    description = {"descr": "<i8", "fortran_order": False, "shape": (num_offsets,)}
    np.lib.format.write_array_header_1_0(file, description)
    return file.tell()
