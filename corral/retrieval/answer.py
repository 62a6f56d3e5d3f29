"""From requests to passages: the search, and the re-ranker behind it where there is one."""

from collections.abc import Sequence
from dataclasses import dataclass

from corral.retrieval.base import Found, Searcher
from corral.retrieval.rerank import Reranker


@dataclass(frozen=True)
class Ask:
    """The queries of one request."""

    queries: Sequence[str]
    topk: int
    num_candidates: int | None = None
    """That the re-ranker looks at, if there is one. None: as many as it usually does."""


class Answerer:
    def __init__(self, searcher: Searcher, reranker: Reranker | None = None, num_candidates: int = 10) -> None:
        self.searcher, self.reranker, self.num_candidates = searcher, reranker, num_candidates

    def answer(self, asks: Sequence[Ask]) -> list[list[list[Found]]]:
        """All queries of all requests in one search. What a request gets does not depend on the others."""
        queries = [query for ask in asks for query in ask.queries]
        widths = [self.width(ask) for ask in asks for _ in ask.queries]
        found = self.searcher.search(queries, max(widths, default=1))
        found = [own[:width] for own, width in zip(found, widths, strict=True)]
        if self.reranker is not None:
            found = self.reranker.order(queries, found)
        answers, start = [], 0
        for ask in asks:
            stop = start + len(ask.queries)
            answers.append([own[: ask.topk] for own in found[start:stop]])
            start = stop
        return answers

    def width(self, ask: Ask) -> int:
        """How many passages the search must find for each query."""
        if self.reranker is None:
            return ask.topk
        return max(ask.topk, ask.num_candidates or self.num_candidates)
