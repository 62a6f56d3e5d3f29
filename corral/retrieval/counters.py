"""What the server counts, in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PREFIX = "corral_retriever"


@dataclass
class Counters:
    requests: "Counter[int]" = field(default_factory=Counter)
    """Of `/retrieve`, by status."""
    refused: "Counter[str]" = field(default_factory=Counter)
    """By reason; part of the requests."""
    queries: int = 0
    """Answered."""
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
