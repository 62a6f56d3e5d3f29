"""What every way to search has in common: passages found for queries, and the re-ranker behind a search."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from corral.recipe.errors import UserError, first_line

KINDS = ("bm25", "flat", "hnsw")
RERANK_BATCH = 32


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
        try:
            self.model = CrossEncoder(model, device=device)
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
        raise UserError(f"this needs {error.name}: pip install 'corral[retriever]'") from error
