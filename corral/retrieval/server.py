"""The HTTP server in front of a search: `POST /retrieve`, `GET /health`, `GET /metrics`.

It listens at once and loads meanwhile; until it is ready it says so, with 503. Every answer is JSON (but the metrics),
errors are one line of it. Searches are made in a thread (`batching.py`), so that the event loop has time to refuse.
"""

import asyncio
import hmac
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from corral.recipe.errors import RunError, UserError, first_line
from corral.retrieval.answer import Answerer, Ask
from corral.retrieval.base import Found, retriever_extra
from corral.retrieval.batching import Batcher, Overloaded
from corral.retrieval.counters import Counters
from corral.retrieval.wire import Limits, Refused, parse, result

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BATCH = 256
"""Queries in one search."""
RETRY_AFTER_S = 1
CLOSING_S = 5
"""For requests that are being answered when the server is told to end."""

log = logging.getLogger(__name__)


class Service:
    """What the endpoints share. Without an answerer it is still loading."""

    def __init__(self, topk: int, limits: Limits) -> None:
        self.topk, self.limits, self.counters = topk, limits, Counters()
        self.answerer: Answerer | None = None
        self.batcher: Batcher | None = None

    def open(self, answerer: Answerer) -> None:
        searcher = answerer.searcher
        self.batcher = Batcher(
            answerer.answer,
            max_waiting=self.limits.waiting,
            max_batch=MAX_BATCH if searcher.merges else 1,
            num_threads=searcher.num_threads,
            on_search=self.counters.search,
        )
        self.answerer = answerer

    def close(self) -> None:
        if self.batcher is not None:
            self.batcher.close()

    async def retrieve(self, request: "Request") -> bytes:
        if self.answerer is None or self.batcher is None:
            raise Refused(503, "loading", "the index is being loaded")
        if self.batcher.is_full():  # before the body takes memory
            raise overloaded(self.batcher)
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                content = await read_body(request, self.limits.body_bytes)
        except TimeoutError:
            raise Refused(408, "timeout", f"the request did not arrive in {self.limits.timeout_s:g} s") from None
        began = time.perf_counter()
        ask, return_scores = parse(content, self.limits, self.topk, self.answerer.reranker is not None)
        asks = [ask] if self.answerer.searcher.merges else [replace(ask, queries=[query]) for query in ask.queries]
        found = await self.answer(self.batcher, asks, request) if ask.queries else []
        self.counters.answered(len(ask.queries), time.perf_counter() - began)
        return json.dumps(result(found, return_scores), ensure_ascii=False).encode("utf-8", "replace")

    async def answer(self, batcher: Batcher, asks: list[Ask], request: "Request") -> list[list[Found]]:
        """Of one request. However it ends, nothing of it waits to be searched any more."""
        try:
            futures = batcher.submit(asks)
        except Overloaded:
            raise overloaded(batcher) from None
        searched = asyncio.gather(*map(asyncio.wrap_future, futures))
        gone = asyncio.ensure_future(hung_up(request))
        try:
            either: set[asyncio.Future[Any]] = {searched, gone}
            await asyncio.wait(either, timeout=self.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if searched.done():
                return [own for answer in searched.result() for own in answer]
            if gone.done():
                raise Refused(499, "gone", "the client has hung up")
            raise Refused(503, "timeout", f"not answered in {self.limits.timeout_s:g} s; try again")
        except asyncio.CancelledError:
            raise Refused(503, "closing", "the server is ending") from None
        except RunError as error:  # of a service elsewhere
            raise Refused(502, "upstream", str(error)) from error
        finally:
            gone.cancel()
            searched.cancel()
            for future in futures:
                future.cancel()

    def health(self) -> dict[str, object]:
        if self.answerer is None:
            return {"ready": False, "state": "loading"}
        searcher = self.answerer.searcher
        return {
            "ready": True,
            "state": "ready",
            "kind": searcher.kind,
            "passages": searcher.num_passages,
            "topk": self.topk,
            "reranker": self.answerer.reranker is not None,
        }


async def hung_up(request: "Request") -> None:
    """Returns when the client is gone. Only after the whole body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def overloaded(batcher: Batcher) -> Refused:
    return Refused(503, "overloaded", f"{batcher.num_waiting} queries are waiting; try again")


async def read_body(request: "Request", limit: int) -> bytes:
    """No more of it than is allowed, whatever its header says."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refused(413, "limit", f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


def make_app(service: Service, token: str | None) -> "FastAPI":
    with retriever_extra():
        from fastapi import FastAPI, Request, Response
        from starlette.exceptions import HTTPException

    app = FastAPI(title="corral retriever", docs_url=None, redoc_url=None, openapi_url=None)
    if token is not None:
        app.add_middleware(TokenNeeded, token=token)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        try:
            response = Response(await service.retrieve(request), media_type="application/json")
        except Refused as refused:
            service.counters.refused[refused.reason] += 1
            response = reply(refused.status, {"error": str(refused)})
        except Exception as error:
            log.exception("a search failed")
            response = reply(500, {"error": f"the search failed: {type(error).__name__}: {first_line(error)}"})
        service.counters.requests[response.status_code] += 1
        return response

    @app.get("/health")
    async def health() -> Response:
        said = service.health()
        return reply(200 if said["ready"] else 503, said)

    @app.get("/metrics")
    async def metrics() -> Response:
        waiting = 0 if service.batcher is None else service.batcher.num_waiting
        text = service.counters.text(waiting, service.answerer is not None)
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path}: {error.detail}"
        return reply(error.status_code, {"error": f"{said}; there are POST /retrieve, GET /health, GET /metrics"})

    return app


class TokenNeeded:
    """Before everything else: who has not the token learns nothing, not even whether the index is loaded."""

    def __init__(self, app: "ASGIApp", token: str) -> None:
        self.app, self.expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        else:
            refusal = reply(401, {"error": "the token is missing or wrong (Authorization: Bearer TOKEN)"})
            await refusal(scope, receive, send)


def reply(status: int, said: dict[str, object]) -> "Response":
    from fastapi import Response

    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(json.dumps(said), status, headers, "application/json")


def serve(
    load: Callable[[], Answerer],
    host: str,
    port: int,
    *,
    token: str | None = None,
    topk: int = 3,
    limits: Limits | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Until SIGTERM or Ctrl-C. Raises what `load` raises."""
    with retriever_extra():
        import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """As uvicorn's own, but a signal that ended it well does not kill the process afterwards."""
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    limits = limits or Limits()
    service = Service(topk, limits)
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
            answerer = load()
            service.open(answerer)
        except BaseException as error:
            failures.append(error)
            server.should_exit = True
            return
        searcher = answerer.searcher
        passages = "" if searcher.num_passages is None else f", {searcher.num_passages:,} passages"
        about = f"; {searcher.about}" if searcher.about else ""
        say(f"ready after {time.monotonic() - began:.1f} s: {searcher.kind}{passages}{about}")

    address = f"[{host}]" if ":" in host else host
    say(f"listening on http://{address}:{listening.getsockname()[1]}; loading")
    threading.Thread(target=open_service, daemon=True).start()
    try:
        server.run(sockets=[listening])
    finally:
        service.close()
        listening.close()
    if failures:
        raise failures[0]
    say("ended")


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
