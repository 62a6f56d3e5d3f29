"""Asks retrieval servers, on behalf of many trajectories at once.

Queries that are asked within a few milliseconds travel in one request; equal ones are asked once, and remembered. A
server that is away or has too much to do is left alone for a while and asked again, with the others of its kind in the
meantime, until `patience_s` is over: only then a query fails.

Threads rather than asyncio, because the event loop may stand still while a model computes, and a server must not be
taken for dead by that. It also makes a client independent of event loops: it can be made before there is one, and used
from one after another.

What waits for what: `search` waits for its own future, `patience_s` and two timeouts at most. A thread waits for the
first query of a batch (unblocked by `close`), for others to join it (`batch_wait_s`), for a server (`timeout_s`), or
for the moment at which a server may be asked again (unblocked by `close`). However it leaves a batch, it resolves all
of the batch's futures.
"""

import asyncio
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from corral.recipe.errors import UserError
from corral.retrieval.endpoint import Asked, Document, Endpoint, Unavailable

NUM_THREADS = 4
"""Requests in flight."""
MAX_QUERY_CHARACTERS = 2000
"""What is longer is cut: one endless query must not have the server refuse the others in its request."""


class RetrievalError(Exception):
    """A query that no server has answered."""


@dataclass(eq=False)
class Query:
    """That is under way."""

    text: str
    deadline: float
    waiting: list["Future[list[Document]]"] = field(default_factory=list)


@dataclass
class Counts:
    queries: int = 0
    cache_hits: int = 0
    """Queries answered from memory."""
    shared: int = 0
    """Queries that were under way already."""
    requests: int = 0
    """Sent, those that failed included."""
    retries: int = 0
    failures: int = 0
    """Queries that were given up."""
    seconds: float = 0.0
    """Spent in requests."""


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
        self.endpoints = [Endpoint(url, timeout_s, token) for url in urls]
        self.topk, self.timeout_s, self.patience_s = topk, timeout_s, patience_s
        self.batch_size, self.batch_wait_s, self.cache_size = batch_size, batch_wait_s, cache_size
        self._queue: queue.SimpleQueue[Query | None] = queue.SimpleQueue()
        self._under_way: dict[str, Query] = {}
        self._cache: OrderedDict[str, list[Document]] = OrderedDict()
        self._counts = Counts()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        self._closed = threading.Event()
        self._turn = 0

    async def search(self, query: str) -> list[Document]:
        """The best `topk` documents; RetrievalError if no server answers in time."""
        text = query.strip()[:MAX_QUERY_CHARACTERS]
        found = self._ask(text)
        if not isinstance(found, Future):
            return found
        try:
            return await asyncio.wait_for(asyncio.wrap_future(found), self.patience_s + 2 * self.timeout_s)
        except TimeoutError:
            self._count(failures=1)
            raise RetrievalError(f"the search for {text!r:.80} waited too long for its turn: {self.where()}") from None

    @property
    def counts(self) -> dict[str, float]:
        with self._lock:
            return dict(vars(self._counts))

    def where(self) -> str:
        return ", ".join(endpoint.url for endpoint in self.endpoints)

    def close(self) -> None:
        """Searches in flight fail. Does not wait for requests that are on their way."""
        with self._lock:
            self._closed.set()
            for _ in self._threads:
                self._queue.put(None)
            left = list(self._under_way.values())
        self._fail(left, RuntimeError("the retrieval client is closed"))

    def _ask(self, text: str) -> "list[Document] | Future[list[Document]]":
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError("the retrieval client is closed")
            self._counts.queries += 1
            if text in self._cache:
                self._counts.cache_hits += 1
                self._cache.move_to_end(text)
                return self._cache[text]
            future: Future[list[Document]] = Future()
            if text in self._under_way:
                self._counts.shared += 1
                self._under_way[text].waiting.append(future)
                return future
            query = Query(text, time.monotonic() + self.patience_s, [future])
            self._under_way[text] = query
            self._start()
        self._queue.put(query)
        return future

    def _start(self) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._serve, name=f"retrieval {number}", daemon=True)
                for number in range(NUM_THREADS)
            ]
            for thread in self._threads:
                thread.start()

    def _serve(self) -> None:
        """A thread's life. Consumes queries, produces documents; `close` ends it."""
        asked = Asked()
        try:
            while batch := self._collect():
                try:
                    self._answer(batch, asked)
                except Exception as error:  # a fault of ours; it must not leave anybody waiting
                    self._fail(batch, error)
        finally:
            asked.close()

    def _collect(self) -> list[Query]:
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

    def _answer(self, batch: list[Query], asked: Asked) -> None:
        """Send the batch until a server answers it; queries whose time is over leave it."""
        attempts = 0
        while batch and not self._closed.is_set():
            endpoint = self._choose()
            if (pause := endpoint.left_alone_s()) > 0:
                latest = max(query.deadline for query in batch)
                self._closed.wait(min(pause, max(0.0, latest - time.monotonic()) + 0.01))
            self._count(requests=1, retries=min(attempts, 1))
            attempts += 1
            try:
                results = self._send(batch, endpoint, asked)
            except Unavailable as error:
                batch = self._without_late(batch, error, attempts)
            except ValueError as error:
                self._refused(batch, RetrievalError(str(error)), asked)
                return
            else:
                self._resolve(batch, results)
                return

    def _send(self, batch: Sequence[Query], endpoint: Endpoint, asked: Asked) -> list[list[Document]]:
        started = time.monotonic()
        try:
            results = asked.ask(endpoint, [query.text for query in batch], self.topk)
        except Unavailable as error:
            endpoint.failed(started, error.retry_after_s)
            raise
        finally:
            self._count(seconds=time.monotonic() - started)
        endpoint.worked()
        return results

    def _refused(self, batch: list[Query], error: RetrievalError, asked: Asked) -> None:
        """The server is there and does not like the request. One query may be the reason: each is asked alone."""
        if len(batch) == 1:
            self._fail(batch, error)
            return
        for query in batch:
            self._answer([query], asked)

    def _choose(self) -> Endpoint:
        """The next one that is not left alone, else the one that will be asked again first."""
        with self._lock:
            self._turn += 1
            order = (
                self.endpoints[self._turn % len(self.endpoints) :] + self.endpoints[: self._turn % len(self.endpoints)]
            )
            return min(order, key=Endpoint.left_alone_s)

    def _without_late(self, batch: list[Query], error: Unavailable, attempts: int) -> list[Query]:
        now = time.monotonic()
        late = [query for query in batch if query.deadline <= now]
        tries = "one try" if attempts == 1 else f"{attempts} tries"
        said = f"no retriever has answered within {self.patience_s:g} s ({tries}); the last one: {error}"
        self._fail(late, RetrievalError(said))
        return [query for query in batch if query.deadline > now]

    def _resolve(self, batch: Sequence[Query], results: Sequence[list[Document]]) -> None:
        with self._lock:
            for query, documents in zip(batch, results, strict=True):
                self._cache[query.text] = documents
                while len(self._cache) > self.cache_size:
                    self._cache.popitem(last=False)
        for query, documents in zip(batch, results, strict=True):
            for future in self._take(query):
                if future.set_running_or_notify_cancel():
                    future.set_result(documents)

    def _fail(self, batch: Sequence[Query], error: Exception) -> None:
        for query in batch:
            for future in self._take(query):
                if future.set_running_or_notify_cancel():
                    self._count(failures=1)
                    future.set_exception(error)

    def _take(self, query: Query) -> "list[Future[list[Document]]]":
        """All who wait for it, and nobody twice: an answer may come while `close` is giving the query up."""
        with self._lock:
            if self._under_way.get(query.text) is query:
                del self._under_way[query.text]
            waiting, query.waiting = query.waiting, []
            return waiting

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + value)


def read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise UserError(f"the retriever's token can't be read: {path}: {error.strerror}") from error
    if not token:
        raise UserError(f"the retriever's token can't be read: {path} is empty")
    return token
