r"""The HTTP server in front of a search: `POST /retrieve`, `GET /health`, `GET /metrics`.

It listens at once and loads meanwhile; until it is ready it answers 503. Every answer is JSON (but the metrics), errors
are one line of it. Searches are made in a thread, so that the event loop has time to refuse: the thread takes whatever
is waiting, up to a number of queries, and searches it in one call; nobody waits for others to come. What waits is
bounded: a request that would go beyond the bound is refused at once, and one whose client has given up is not searched.

The wire format is Search-R1's:

    {"queries": [...], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\"Title\"\ntext"}, "score": 11.5}, ...], ...]}

Without scores, an item is the document itself. Its re-ranking server takes `topk_retrieval` and `topk_rerank` instead
of `topk`; documents are objects there too.
"""

import asyncio
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from corral.http_server import (
    Histogram,
    PrometheusText,
    RequestRefused,
    client_disconnected,
    format_validation_error,
    listen,
    make_server,
    protect,
    read_body,
    reply,
    url_of,
)
from corral.recipe.errors import RunError, first_line
from corral.retrieval.searcher import Hit, Retriever, SearchRequest, retriever_extra

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

MAX_BATCH = 256
"""Queries in one search, at most."""
PREFIX = "corral_retriever"

QueryHits = list[list[Hit]]
QueuedRequest = tuple[SearchRequest, "Future[QueryHits]"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one request, and of the queue."""

    body_bytes: int = 16 * 2**20
    queries: int = 4096
    topk: int = 100
    passages: int = 20_480
    """Passages in one answer: queries times `topk`."""
    query_chars: int = 8192
    waiting: int = 8192
    """Queries of all clients that may wait."""
    timeout_s: float = 25.0
    """Time for a request to arrive, and to be answered; below the 30 s of `RetrievalClient`, so that it learns why."""
    connections: int = 1000


class RetrieveBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    queries: list[str]
    topk: int | None = Field(None, ge=1)
    return_scores: bool = False
    topk_retrieval: int | None = Field(None, ge=1)
    topk_rerank: int | None = Field(None, ge=1)


class RetrieverService:
    """What the endpoints share. Without a batcher it is still loading."""

    def __init__(self, topk: int, limits: ServerLimits) -> None:
        self.topk, self.limits, self.metrics = topk, limits, ServerMetrics()
        self.batcher: QueryBatcher | None = None

    async def retrieve(self, request: "Request") -> bytes:
        if self.batcher is None:
            raise RequestRefused(503, "loading", "the index is being loaded")
        if self.batcher.is_full():  # before the body takes memory
            raise self.batcher.overloaded()
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                content = await read_body(request, self.limits.body_bytes)
        except TimeoutError:
            raise RequestRefused(408, "timeout", f"the request did not arrive in {self.limits.timeout_s:g} s") from None
        began = time.perf_counter()
        retriever = self.batcher.retriever
        search, return_scores = parse_body(content, self.limits, self.topk, retriever.reranker is not None)
        searches = [search] if retriever.searcher.merges else [replace(search, queries=[one]) for one in search.queries]
        found = await self.answer(self.batcher, searches, request) if search.queries else []
        self.metrics.answered(len(search.queries), time.perf_counter() - began)
        return json.dumps(format_result(found, return_scores), ensure_ascii=False).encode("utf-8", "replace")

    async def answer(
        self, batcher: "QueryBatcher", searches: list[SearchRequest], request: "Request"
    ) -> list[list[Hit]]:
        """The hits for one request. However it ends, nothing of it waits to be searched any more."""
        futures = batcher.submit(searches)
        searched = asyncio.gather(*map(asyncio.wrap_future, futures))
        gone = asyncio.ensure_future(client_disconnected(request))
        try:
            either: set[asyncio.Future[Any]] = {searched, gone}
            await asyncio.wait(either, timeout=self.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if searched.done():
                return [own for answer in searched.result() for own in answer]
            if gone.done():
                raise RequestRefused(499, "gone", "the client has hung up")
            raise RequestRefused(503, "timeout", f"not answered in {self.limits.timeout_s:g} s; try again")
        except asyncio.CancelledError:
            raise RequestRefused(503, "closing", "the server is ending") from None
        except RunError as error:  # of a service elsewhere
            raise RequestRefused(502, "upstream", str(error)) from error
        finally:
            gone.cancel()
            searched.cancel()
            for future in futures:
                future.cancel()

    def health(self) -> dict[str, object]:
        if self.batcher is None:
            return {"ready": False, "state": "loading"}
        searcher, reranker = self.batcher.retriever.searcher, self.batcher.retriever.reranker
        about = {
            "kind": searcher.kind,
            "passages": searcher.num_passages,
            "topk": self.topk,
            "reranker": bool(reranker),
        }
        return {"ready": True, "state": "ready", **about}


def make_app(service: RetrieverService, token: str | None) -> "FastAPI":
    with retriever_extra():
        from fastapi import FastAPI, Request, Response
        from starlette.exceptions import HTTPException

    app = FastAPI(title="corral retriever", docs_url=None, redoc_url=None, openapi_url=None)
    protect(app, token)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        try:
            response = Response(await service.retrieve(request), media_type="application/json")
        except RequestRefused as refused:
            service.metrics.refused[refused.reason] += 1
            response = reply(refused.status, {"error": str(refused)})
        except Exception as error:
            log.exception("a search failed")
            response = reply(500, {"error": f"the search failed: {type(error).__name__}: {first_line(error)}"})
        service.metrics.requests[response.status_code] += 1
        return response

    @app.get("/health")
    async def health() -> Response:
        answer = service.health()
        return reply(200 if answer["ready"] else 503, answer)

    @app.get("/metrics")
    async def metrics() -> Response:
        waiting = 0 if service.batcher is None else service.batcher.num_waiting
        text = service.metrics.text(waiting, service.batcher is not None)
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        answer = f"{request.method} {request.url.path}: {error.detail}"
        return reply(error.status_code, {"error": f"{answer}; there are POST /retrieve, GET /health, GET /metrics"})

    return app


def serve(
    load: Callable[[], Retriever],
    host: str,
    port: int,
    *,
    token: str | None = None,
    topk: int = 3,
    limits: ServerLimits | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises what `load` raises."""
    limits = limits or ServerLimits()
    service = RetrieverService(topk, limits)
    failures: list[BaseException] = []
    listening = listen(host, port)
    with retriever_extra():
        server = make_server(make_app(service, token), limits.connections)

    def open_service() -> None:
        began = time.monotonic()
        try:
            service.batcher = QueryBatcher(load(), limits.waiting, service.metrics)
        except BaseException as error:
            failures.append(error)
            server.should_exit = True
            return
        searcher = service.batcher.retriever.searcher
        passages = "" if searcher.num_passages is None else f", {searcher.num_passages:,} passages"
        about = f"; {searcher.about}" if searcher.about else ""
        report(f"ready after {time.monotonic() - began:.1f} s: {searcher.kind}{passages}{about}")

    report(f"listening on {url_of(host, listening)}; loading")
    threading.Thread(target=open_service, daemon=True).start()
    try:
        server.run(sockets=[listening])
    finally:
        if service.batcher is not None:
            service.batcher.close()
        listening.close()
    if failures:
        raise failures[0]
    report("ended")


# --- requests of many clients become few searches


class QueryBatcher:
    def __init__(self, retriever: Retriever, max_waiting: int, metrics: "ServerMetrics") -> None:
        self.retriever, self.max_waiting, self.metrics = retriever, max_waiting, metrics
        self.max_batch = MAX_BATCH if retriever.searcher.merges else 1
        self.waiting: deque[QueuedRequest] = deque()
        self.num_waiting = 0
        """Queries, not requests."""
        self.changed = threading.Condition()
        self.closed = False
        for _ in range(retriever.searcher.num_threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, requests: Sequence[SearchRequest]) -> "list[Future[QueryHits]]":
        """All of them or none: RequestRefused if too many queries are waiting."""
        futures: list[Future[QueryHits]] = [Future() for _ in requests]
        number = sum(len(request.queries) for request in requests)
        with self.changed:
            if self.is_full(number) or self.closed:
                raise self.overloaded()
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

    def overloaded(self) -> RequestRefused:
        return RequestRefused(503, "overloaded", f"{self.num_waiting} queries are waiting; try again")

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
            self.metrics.searches += 1
            self.metrics.searched += sum(len(request.queries) for request in requests)
            try:
                answers = self.retriever.retrieve(requests)
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
    latency: Histogram = field(default_factory=Histogram)

    def answered(self, num_queries: int, seconds: float) -> None:
        self.queries += num_queries
        self.latency.add(seconds)

    def text(self, queue_depth: int, ready: bool) -> str:
        page = PrometheusText(PREFIX)
        page.add("requests_total", "counter", "Requests to /retrieve, by status.", page.by("code", self.requests))
        page.add("refused_total", "counter", "Requests not searched, by reason.", page.by("reason", self.refused))
        page.add("queries_total", "counter", "Queries answered.", self.queries)
        page.add("searches_total", "counter", "Calls of the index.", self.searches)
        page.add("searched_queries_total", "counter", "Queries in these calls.", self.searched)
        page.add("queue_depth", "gauge", "Queries that wait.", queue_depth)
        page.add("ready", "gauge", "1 when the index is loaded.", int(ready))
        latency = "From a request's last byte to its answer."
        page.add("latency_seconds", "histogram", latency, self.latency.values())
        return page.text


# --- the wire format


def parse_body(content: bytes, limits: ServerLimits, default_topk: int, reranks: bool) -> tuple[SearchRequest, bool]:
    """The request, and whether scores are wanted."""
    try:
        body = RetrieveBody.model_validate_json(content)
    except ValidationError as error:
        raise RequestRefused(422, "invalid", format_validation_error(error)) from error
    if len(body.queries) > limits.queries:
        raise RequestRefused(413, "limit", f"{len(body.queries)} queries; at most {limits.queries} in one request")
    for number, query in enumerate(body.queries):
        if len(query) > limits.query_chars:
            raise RequestRefused(
                413, "limit", f"queries.{number} has {len(query)} characters, at most {limits.query_chars}"
            )
    for name in ("topk", "topk_retrieval", "topk_rerank"):
        if (getattr(body, name) or 0) > limits.topk:
            raise RequestRefused(413, "limit", f"{name} is {getattr(body, name)}, at most {limits.topk}")
    topk = body.topk or body.topk_rerank or default_topk
    if (number := len(body.queries) * max(topk, body.topk_retrieval or 0)) > limits.passages:
        raise RequestRefused(
            413, "limit", f"{number} passages (queries x topk); at most {limits.passages} in one request"
        )
    if (body.topk_retrieval or body.topk_rerank) and not reranks:
        raise RequestRefused(
            422, "invalid", "topk_retrieval and topk_rerank: this server has no re-ranker (--reranker)"
        )
    if body.topk and body.topk_rerank:
        raise RequestRefused(422, "invalid", "topk and topk_rerank are two names of one thing; send one of them")
    return SearchRequest(body.queries, topk, body.topk_retrieval), body.return_scores


def format_result(hits: Sequence[Sequence[Hit]], return_scores: bool) -> dict[str, Any]:
    def item(hit: Hit) -> dict[str, Any]:
        document = {"id": hit.passage.id, "contents": hit.passage.contents}
        return {"document": document, "score": hit.score} if return_scores else document

    return {"result": [[item(hit) for hit in own] for own in hits]}
