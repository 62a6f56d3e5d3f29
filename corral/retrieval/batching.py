"""Requests of many clients become few searches; and what the server counts of them.

A thread takes whatever is waiting, up to a number of queries, and searches it in one call; nobody waits for others to
come. What waits is bounded: a request that would go beyond the bound is refused at once, and one whose client has given
up is not searched.
"""

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate

from corral.retrieval.searcher import Hit, SearchRequest

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PREFIX = "corral_retriever"

QueryHits = list[list[Hit]]
QueuedRequest = tuple[SearchRequest, "Future[QueryHits]"]


class QueueFull(Exception):
    """Too many queries are waiting."""


class QueryBatcher:
    def __init__(
        self,
        search: Callable[[Sequence[SearchRequest]], list[QueryHits]],
        *,
        max_waiting: int,
        max_batch: int,
        num_threads: int = 1,
        on_search: Callable[[int], None] = lambda num_queries: None,
    ) -> None:
        self.search, self.max_waiting, self.max_batch, self.on_search = search, max_waiting, max_batch, on_search
        self.waiting: deque[QueuedRequest] = deque()
        self.num_waiting = 0
        """Queries, not requests."""
        self.changed = threading.Condition()
        self.closed = False
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self.threads:
            thread.start()

    def submit(self, requests: Sequence[SearchRequest]) -> "list[Future[QueryHits]]":
        """All of them or none."""
        futures: list[Future[QueryHits]] = [Future() for _ in requests]
        number = sum(len(request.queries) for request in requests)
        with self.changed:
            if self.is_full(number) or self.closed:
                raise QueueFull
            self.waiting.extend(zip(requests, futures, strict=True))
            self.num_waiting += number
            self.changed.notify(len(requests))
        return futures

    def is_full(self, more: int = 1) -> bool:
        """Whether so many more queries would be too many. If nothing waits, no request is."""
        with self.changed:
            if self.num_waiting + more > self.max_waiting:
                self.waiting = deque(one for one in self.waiting if not one[1].cancelled())
                self.num_waiting = sum(len(request.queries) for request, _ in self.waiting)
            return self.num_waiting > 0 and self.num_waiting + more > self.max_waiting

    def close(self) -> None:
        """What waits is not searched any more; what is being searched is finished."""
        with self.changed:
            self.closed = True
            for _, future in self.waiting:
                future.cancel()
            self.waiting.clear()
            self.num_waiting = 0
            self.changed.notify_all()

    def _work(self) -> None:
        while batch := self._next_batch():
            requests, futures = [request for request, _ in batch], [future for _, future in batch]
            self.on_search(sum(len(request.queries) for request in requests))
            try:
                answers = self.search(requests)
            except Exception as error:
                for future in futures:
                    future.set_exception(error)
            else:
                for future, answer in zip(futures, answers, strict=True):
                    future.set_result(answer)

    def _next_batch(self) -> list[QueuedRequest]:
        """Waits for one. Empty: there will be none."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closed)
                if self.closed:
                    return []
                batch: list[QueuedRequest] = []
                size = 0
                while self.waiting and (not batch or size + len(self.waiting[0][0].queries) <= self.max_batch):
                    batch.append(self.waiting.popleft())
                    size += len(batch[-1][0].queries)
                self.num_waiting -= size
            if batch := [one for one in batch if one[1].set_running_or_notify_cancel()]:
                return batch


@dataclass
class ServerMetrics:
    """Counters of the server, in the text format of Prometheus."""

    requests: "Counter[int]" = field(default_factory=Counter)
    """Requests to `/retrieve`, by status."""
    refused: "Counter[str]" = field(default_factory=Counter)
    """Requests that were refused, by reason; part of `requests`."""
    queries: int = 0
    """Queries answered."""
    searches: int = 0
    searched: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    latency_sum_s: float = 0.0

    def answered(self, num_queries: int, seconds: float) -> None:
        self.queries += num_queries
        self.latencies[bisect_left(BUCKETS_S, seconds)] += 1
        self.latency_sum_s += seconds

    def search(self, num_queries: int) -> None:
        self.searches += 1
        self.searched += num_queries

    def text(self, queue_depth: int, ready: bool) -> str:
        lines: list[str] = []

        def add(name: str, kind: str, what: str, values: dict[str, float]) -> None:
            lines.extend([f"# HELP {PREFIX}_{name} {what}", f"# TYPE {PREFIX}_{name} {kind}"])
            lines.extend(f"{PREFIX}_{name}{labels} {value:g}" for labels, value in values.items())

        statuses: dict[str, float] = {f'{{code="{code}"}}': n for code, n in sorted(self.requests.items())}
        reasons: dict[str, float] = {f'{{reason="{why}"}}': n for why, n in sorted(self.refused.items())}
        add("requests_total", "counter", "Requests to /retrieve, by status.", statuses)
        add("refused_total", "counter", "Requests that were not searched, by reason.", reasons)
        add("queries_total", "counter", "Queries answered.", {"": self.queries})
        add("searches_total", "counter", "Calls of the index.", {"": self.searches})
        add("searched_queries_total", "counter", "Queries in these calls.", {"": self.searched})
        add("queue_depth", "gauge", "Queries that wait.", {"": queue_depth})
        add("ready", "gauge", "1 when the index is loaded.", {"": int(ready)})
        bounds = [*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"]
        sums = list(accumulate(self.latencies))
        buckets: dict[str, float] = {f'_bucket{{le="{le}"}}': n for le, n in zip(bounds, sums, strict=True)}
        whole = {"_sum": self.latency_sum_s, "_count": sums[-1]}
        add("latency_seconds", "histogram", "From a request's last byte to its answer.", buckets | whole)
        return "\n".join(lines) + "\n"
