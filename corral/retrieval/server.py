r"""The HTTP server in front of a search: `POST /retrieve`, `GET /health`, `GET /metrics`.

It listens at once and loads meanwhile; until it is ready it answers 503. Every answer is JSON (but the metrics), errors
are one line of it. Searches are made in a thread (`batching.py`), so that the event loop has time to refuse.

The wire format is Search-R1's:

    {"queries": [...], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\"Title\"\ntext"}, "score": 11.5}, ...], ...]}

Without scores, an item is the document itself. Its re-ranking server takes `topk_retrieval` and `topk_rerank` instead
of `topk`; documents are objects there too.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from corral.recipe.errors import RunError, UserError, first_line
from corral.retrieval.batching import QueryBatcher, QueueFull, ServerMetrics
from corral.retrieval.searcher import Hit, Retriever, SearchRequest, retriever_extra

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BATCH = 256
"""Queries in one search, at most."""
RETRY_AFTER_S = 1
CLOSING_S = 5
"""Time for requests that are being answered when the server ends."""

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


class RequestRefused(Exception):
    """A request that is not answered, with the status and the reason."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class RetrieveBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    queries: list[str]
    topk: int | None = Field(None, ge=1)
    return_scores: bool = False
    topk_retrieval: int | None = Field(None, ge=1)
    topk_rerank: int | None = Field(None, ge=1)


class RetrieverService:
    """What the endpoints share. Without a retriever it is still loading."""

    def __init__(self, topk: int, limits: ServerLimits) -> None:
        self.topk, self.limits, self.metrics = topk, limits, ServerMetrics()
        self.retriever: Retriever | None = None
        self.batcher: QueryBatcher | None = None

    def open(self, retriever: Retriever) -> None:
        searcher = retriever.searcher
        self.batcher = QueryBatcher(
            retriever.retrieve,
            max_waiting=self.limits.waiting,
            max_batch=MAX_BATCH if searcher.merges else 1,
            num_threads=searcher.num_threads,
            on_search=self.metrics.search,
        )
        self.retriever = retriever

    def close(self) -> None:
        if self.batcher is not None:
            self.batcher.close()

    async def retrieve(self, request: "Request") -> bytes:
        if self.retriever is None or self.batcher is None:
            raise RequestRefused(503, "loading", "the index is being loaded")
        if self.batcher.is_full():  # before the body takes memory
            raise overloaded(self.batcher)
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                content = await read_body(request, self.limits.body_bytes)
        except TimeoutError:
            raise RequestRefused(408, "timeout", f"the request did not arrive in {self.limits.timeout_s:g} s") from None
        began = time.perf_counter()
        search, return_scores = parse_body(content, self.limits, self.topk, self.retriever.reranker is not None)
        searches = (
            [search] if self.retriever.searcher.merges else [replace(search, queries=[one]) for one in search.queries]
        )
        found = await self.answer(self.batcher, searches, request) if search.queries else []
        self.metrics.answered(len(search.queries), time.perf_counter() - began)
        return json.dumps(format_result(found, return_scores), ensure_ascii=False).encode("utf-8", "replace")

    async def answer(self, batcher: QueryBatcher, searches: list[SearchRequest], request: "Request") -> list[list[Hit]]:
        """The hits for one request. However it ends, nothing of it waits to be searched any more."""
        try:
            futures = batcher.submit(searches)
        except QueueFull:
            raise overloaded(batcher) from None
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
        if self.retriever is None:
            return {"ready": False, "state": "loading"}
        searcher = self.retriever.searcher
        return {
            "ready": True,
            "state": "ready",
            "kind": searcher.kind,
            "passages": searcher.num_passages,
            "topk": self.topk,
            "reranker": self.retriever.reranker is not None,
        }


async def client_disconnected(request: "Request") -> None:
    """Returns when the client is gone. Only after the whole body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def overloaded(batcher: QueryBatcher) -> RequestRefused:
    return RequestRefused(503, "overloaded", f"{batcher.num_waiting} queries are waiting; try again")


async def read_body(request: "Request", limit: int) -> bytes:
    """The body, and no more of it than is allowed, whatever its header has."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise RequestRefused(413, "limit", f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def make_app(service: RetrieverService, token: str | None) -> "FastAPI":
    with retriever_extra():
        from fastapi import FastAPI, Request, Response
        from starlette.exceptions import HTTPException

    app = FastAPI(title="corral retriever", docs_url=None, redoc_url=None, openapi_url=None)
    if token is not None:
        app.add_middleware(TokenMiddleware, token=token)

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
        text = service.metrics.text(waiting, service.retriever is not None)
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        answer = f"{request.method} {request.url.path}: {error.detail}"
        return reply(error.status_code, {"error": f"{answer}; there are POST /retrieve, GET /health, GET /metrics"})

    return app


class TokenMiddleware:
    """Refuses requests without the token before everything else: they learn nothing, not even whether it is loaded."""

    def __init__(self, app: "ASGIApp", token: str) -> None:
        self.app, self.expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        else:
            refusal = reply(401, {"error": "the token is missing or wrong (Authorization: Bearer TOKEN)"})
            await refusal(scope, receive, send)


def reply(status: int, answer: dict[str, object]) -> "Response":
    from fastapi import Response

    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(json.dumps(answer), status, headers, "application/json")


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
    with retriever_extra():
        import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Like uvicorn's own, but a signal that ended it well does not kill the process afterwards."""
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    limits = limits or ServerLimits()
    service = RetrieverService(topk, limits)
    failures: list[BaseException] = []
    listening = listen(host, port)
    config = uvicorn.Config(
        make_app(service, token),
        log_config=None,
        access_log=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=CLOSING_S,
    )
    server = Server(config)

    def open_service() -> None:
        began = time.monotonic()
        try:
            retriever = load()
            service.open(retriever)
        except BaseException as error:
            failures.append(error)
            server.should_exit = True
            return
        searcher = retriever.searcher
        passages = "" if searcher.num_passages is None else f", {searcher.num_passages:,} passages"
        about = f"; {searcher.about}" if searcher.about else ""
        report(f"ready after {time.monotonic() - began:.1f} s: {searcher.kind}{passages}{about}")

    address = f"[{host}]" if ":" in host else host
    report(f"listening on http://{address}:{listening.getsockname()[1]}; loading")
    threading.Thread(target=open_service, daemon=True).start()
    try:
        server.run(sockets=[listening])
    finally:
        service.close()
        listening.close()
    if failures:
        raise failures[0]
    report("ended")


def listen(host: str, port: int) -> socket.socket:
    """Its protocol is named, because asyncio looks at that before it turns Nagle's algorithm off: with it, an answer
    that is written in two pieces waits 40 ms."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror}; see --host, --port") from error
    return listening


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def format_validation_error(error: ValidationError) -> str:
    problems = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
    answer = "; ".join(f"{where}: {what}" if where else what for where, what in problems[:3])
    return answer if len(problems) <= 3 else f"{answer}; and {len(problems) - 3} more"


def format_result(hits: Sequence[Sequence[Hit]], return_scores: bool) -> dict[str, Any]:
    def item(hit: Hit) -> dict[str, Any]:
        document = {"id": hit.passage.id, "contents": hit.passage.contents}
        return {"document": document, "score": hit.score} if return_scores else document

    return {"result": [[item(hit) for hit in own] for own in hits]}
