"""The client of retrieval servers, for many trajectories at once.

Queries that come within a few milliseconds travel in one request; equal ones are sent once, and cached. A
server that is away or has too much to do is not used for a while and then tried again, with other servers in the
meantime, until `patience_s` is over: only then a query fails.

Threads rather than asyncio, because the event loop may stand still while a model computes, and a server must not be
taken for dead by that. It also makes a client independent of event loops: it can be made before there is one, and used
from one after another.

What waits for what: `search` waits for its own future, `patience_s` and two timeouts at most. A thread waits for the
first query of a batch (unblocked by `close`), for others to join it (`batch_wait_s`), for a server (`timeout_s`), or
for the moment at which a server may be tried again (unblocked by `close`). However it leaves a batch, it resolves all
of the batch's futures.
"""

import asyncio
import http.client
import json
import queue
import random
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from corral.recipe.errors import UserError, first_line

NUM_THREADS = 4
"""Requests in flight."""
MAX_QUERY_CHARACTERS = 2000
"""What is longer is cut: one endless query must not have the server refuse the others in its request."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Pause after which a server that failed is used again; each failure in a row doubles it."""
BUSY = (408, 429, 502, 503, 504)
"""Statuses after which the same request may succeed later."""


@dataclass(frozen=True)
class RetrievedDocument:
    id: str
    """The document's id. Empty: the server has given none."""
    title: str
    text: str
    score: float | None


class ServerUnavailable(Exception):
    """The server can't be reached, or can't answer now."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RetrievalError(Exception):
    """A query that no server has answered."""


@dataclass(eq=False)
class PendingQuery:
    """A query that is under way, and the futures of those who wait for it."""

    text: str
    deadline: float
    waiting: list["Future[list[RetrievedDocument]]"] = field(default_factory=list)


class RetrievalClient:
    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        topk: int = 3,
        timeout_s: float = 30.0,
        patience_s: float = 300.0,
        batch_size: int = 64,
        batch_wait_s: float = 0.005,
        cache_size: int = 10_000,
        token_file: str | Path | None = None,
    ) -> None:
        """`endpoints` are addresses such as `http://127.0.0.1:8000`, with or without `/retrieve`. `token_file` holds
        what the servers want to see as a bearer token."""
        urls = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not urls:
            raise UserError("no address of a retriever is given; `corral retriever serve` prints it")
        token = read_token(Path(token_file).expanduser()) if token_file is not None else None
        self.endpoints = [RetrieverEndpoint(url, timeout_s, token) for url in urls]
        self.topk, self.timeout_s, self.patience_s = topk, timeout_s, patience_s
        self.batch_size, self.batch_wait_s, self.cache_size = batch_size, batch_wait_s, cache_size
        self._queue: queue.SimpleQueue[PendingQuery | None] = queue.SimpleQueue()
        self._pending: dict[str, PendingQuery] = {}
        self._cache: OrderedDict[str, list[RetrievedDocument]] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        self._closed = threading.Event()
        self._turn = 0

    async def search(self, query: str) -> list[RetrievedDocument]:
        """The best `topk` documents; RetrievalError if no server answers in time."""
        text = query.strip()[:MAX_QUERY_CHARACTERS]
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._ask(text)), self.patience_s + 2 * self.timeout_s)
        except TimeoutError:
            where = ", ".join(endpoint.url for endpoint in self.endpoints)
            raise RetrievalError(f"the search for {text!r:.80} waited too long for its turn: {where}") from None

    def close(self) -> None:
        """Searches in flight fail. Does not wait for requests that are on their way."""
        with self._lock:
            self._closed.set()
            for _ in self._threads:
                self._queue.put(None)
            left = list(self._pending.values())
        self._fail(left, RuntimeError("the retrieval client is closed"))

    def _ask(self, text: str) -> "Future[list[RetrievedDocument]]":
        future: Future[list[RetrievedDocument]] = Future()
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError("the retrieval client is closed")
            if text in self._cache:
                self._cache.move_to_end(text)
                future.set_result(self._cache[text])
                return future
            if text in self._pending:
                self._pending[text].waiting.append(future)
                return future
            query = PendingQuery(text, time.monotonic() + self.patience_s, [future])
            self._pending[text] = query
            while len(self._threads) < NUM_THREADS:
                name = f"retrieval {len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
        self._queue.put(query)
        return future

    def _serve(self) -> None:
        """A thread's loop: consumes queries, produces documents; `close` ends it."""
        connections = Connections()
        try:
            while batch := self._collect():
                try:
                    self._answer(batch, connections)
                except Exception as error:  # a fault of ours; it must not leave anybody waiting
                    self._fail(batch, error)
        finally:
            connections.close()

    def _collect(self) -> list[PendingQuery]:
        """The next query and those that come within `batch_wait_s` of it; nothing when closed."""
        with self._collecting:
            first = self._queue.get()
            if first is None:
                return []
            batch, until = [first], time.monotonic() + self.batch_wait_s
            while len(batch) < self.batch_size:
                try:
                    query = self._queue.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if query is None:
                    self._queue.put(None)
                    break
                batch.append(query)
            return batch

    def _answer(self, batch: list[PendingQuery], connections: "Connections") -> None:
        """Send the batch until a server answers it; queries whose time is over leave it."""
        attempts = 0
        while batch and not self._closed.is_set():
            endpoint = self._choose()
            if (pause := endpoint.pause_left_s()) > 0:
                latest = max(query.deadline for query in batch)
                self._closed.wait(min(pause, max(0.0, latest - time.monotonic()) + 0.01))
            attempts, started = attempts + 1, time.monotonic()
            try:
                results = connections.search(endpoint, [query.text for query in batch], self.topk)
            except ServerUnavailable as error:
                endpoint.failed(started, error.retry_after_s)
                tries = "one try" if attempts == 1 else f"{attempts} tries"
                message = f"no retriever has answered within {self.patience_s:g} s ({tries}); the last one: {error}"
                now = time.monotonic()
                self._fail([query for query in batch if query.deadline <= now], RetrievalError(message))
                batch = [query for query in batch if query.deadline > now]
            except ValueError as error:
                if len(batch) == 1:
                    return self._fail(batch, RetrievalError(str(error)))
                for query in batch:  # one of them may be the reason: each is sent alone
                    self._answer([query], connections)
                return
            else:
                endpoint.failures = 0
                return self._resolve(batch, results)

    def _choose(self) -> "RetrieverEndpoint":
        """The next server that is not paused, else the one whose pause ends first."""
        with self._lock:
            self._turn += 1
            first = self._turn % len(self.endpoints)
            order = self.endpoints[first:] + self.endpoints[:first]
            return min(order, key=RetrieverEndpoint.pause_left_s)

    def _resolve(self, batch: Sequence[PendingQuery], results: Sequence[list[RetrievedDocument]]) -> None:
        for query, documents in zip(batch, results, strict=True):
            with self._lock:
                self._cache[query.text] = documents
                while len(self._cache) > self.cache_size:
                    self._cache.popitem(last=False)
            for future in self._take(query):
                if future.set_running_or_notify_cancel():
                    future.set_result(documents)

    def _fail(self, batch: Sequence[PendingQuery], error: Exception) -> None:
        for query in batch:
            for future in self._take(query):
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)

    def _take(self, query: PendingQuery) -> "list[Future[list[RetrievedDocument]]]":
        """All who wait for it, and nobody twice: an answer may come while `close` is giving the query up."""
        with self._lock:
            if self._pending.get(query.text) is query:
                del self._pending[query.text]
            waiting, query.waiting = query.waiting, []
            return waiting


def read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise UserError(f"the retriever's token can't be read: {path}: {error.strerror}") from error
    if not token:
        raise UserError(f"the retriever's token can't be read: {path} is empty")
    return token


# --- one server as its clients see it


class RetrieverEndpoint:
    """Used by several threads; a lost update of its fields costs one request at most."""

    def __init__(self, url: str, timeout_s: float, token: str | None = None) -> None:
        example = "one is `http://127.0.0.1:8000`"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UserError(f"`{url}` is not the address of a retriever: {first_line(error)}; {example}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"`{url}` is not the address of a retriever; {example}")
        self.secure, self.host, self.port = parts.scheme == "https", parts.hostname, port
        path = parts.path.rstrip("/")
        self.path = path if path.endswith("/retrieve") else f"{path}/retrieve"
        self.url = f"{parts.scheme}://{parts.netloc}{self.path}"
        self.timeout_s = timeout_s
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"
        self.failures, self.failed_at, self.retry_at = 0, 0.0, 0.0

    def connect(self) -> http.client.HTTPConnection:
        """Directly: proxies that the environment names are for the world outside."""
        if self.secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)

    def pause_left_s(self) -> float:
        return max(0.0, self.retry_at - time.monotonic())

    def failed(self, started: float, retry_after_s: float | None) -> None:
        """Requests that were sent before the last failure was seen tell nothing new. The server may demand a longer
        pause, not for a shorter one."""
        if started < self.failed_at:
            return
        self.failures += 1
        pause = min(FIRST_PAUSE_S * 2 ** min(self.failures - 1, 10), LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)
        self.failed_at = time.monotonic()
        self.retry_at = self.failed_at + max(pause, retry_after_s or 0.0)


@dataclass
class Connections:
    """A thread's connections, kept open between requests."""

    connections: dict[str, http.client.HTTPConnection] = field(default_factory=dict)

    def search(self, endpoint: RetrieverEndpoint, queries: Sequence[str], topk: int) -> list[list[RetrievedDocument]]:
        """ServerUnavailable if it may be better later, ValueError if not."""
        body = json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()
        status, headers, content = self.post(endpoint, body)
        excerpt = content[:200].decode(errors="replace")
        if status in BUSY:
            message = f"{endpoint.url} answered {status}: {excerpt}"
            raise ServerUnavailable(message, retry_after_s(headers.get("Retry-After")))
        if status != 200:
            raise ValueError(f"{endpoint.url} answered {status}: {excerpt}")
        try:
            return read_result(json.loads(content), len(queries))
        except (ValueError, TypeError, KeyError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else first_line(error)
            raise ValueError(f"{endpoint.url} answered what is not a result ({why}): {excerpt}") from error

    def post(self, endpoint: RetrieverEndpoint, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        """A connection that was kept may have been closed by the server meanwhile: then a new one is tried at once."""
        for kept in (True, False):
            connection = self.connections.pop(endpoint.url, None) if kept else endpoint.connect()
            if connection is None:
                continue
            try:
                connection.request("POST", endpoint.path, body, endpoint.headers)
                response = connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if kept and not isinstance(error, TimeoutError):
                    continue
                late = isinstance(error, TimeoutError)
                why = f"no answer within {endpoint.timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
                raise ServerUnavailable(f"{endpoint.url}: {why}") from error
            if response.will_close:
                connection.close()
            else:
                self.connections[endpoint.url] = connection
            return response.status, response.headers, content
        raise AssertionError("unreachable")

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


def retry_after_s(header: str | None) -> float | None:
    """Seconds; the other form of the header, a date, is not understood."""
    try:
        return min(float(header or ""), 60.0)
    except ValueError:
        return None


def read_result(answer: Any, num_queries: int) -> list[list[RetrievedDocument]]:
    if not isinstance(answer, dict) or not isinstance(answer.get("result"), list):
        raise ValueError("no `result`")
    if len(answer["result"]) != num_queries:
        raise ValueError(f"{len(answer['result'])} results for {num_queries} queries")
    return [[read_document(item) for item in items] for items in answer["result"]]


def read_document(item: Any) -> RetrievedDocument:
    """`{"document": ..., "score": ...}`, or the document itself; that may be a text, or have no id."""
    document, score = item, None
    if isinstance(item, dict) and "document" in item:
        document, score = item["document"], item.get("score")
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict):
        raise ValueError("a document is neither an object nor a text")
    contents = document.get("contents")
    if contents is None:
        title, text = str(document.get("title") or ""), str(document["text"])
    else:
        first, newline, rest = str(contents).partition("\n")
        title, text = (first.strip().strip('"'), rest) if newline else ("", first)
    name = document.get("id")
    return RetrievedDocument(
        "" if name is None else str(name), title, text.strip(), None if score is None else float(score)
    )
