"""One retrieval server as its clients see it: what it is sent, what it answers, and when it is better left alone."""

import http.client
import json
import random
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from corral.recipe.errors import UserError, first_line

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""For which a server that failed is left alone; each failure in a row doubles it."""
BUSY = (408, 429, 502, 503, 504)
"""Answers after which the same request may have better luck."""


@dataclass(frozen=True)
class Document:
    id: str
    """Empty: the server has not said."""
    title: str
    text: str
    score: float | None


class Unavailable(Exception):
    """The server can't be reached, or can't answer now."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Endpoint:
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
        self.failures, self.failed_at, self.again_at = 0, 0.0, 0.0

    def left_alone_s(self) -> float:
        return max(0.0, self.again_at - time.monotonic())

    def worked(self) -> None:
        self.failures = 0

    def failed(self, started: float, retry_after_s: float | None) -> None:
        """Requests that were sent before the last failure was seen say nothing new. The server may ask for a longer
        pause, not for a shorter one."""
        if started < self.failed_at:
            return
        self.failures += 1
        pause = min(FIRST_PAUSE_S * 2 ** min(self.failures - 1, 10), LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)
        self.failed_at = time.monotonic()
        self.again_at = self.failed_at + max(pause, retry_after_s or 0.0)


@dataclass
class Asked:
    """A thread's connections, kept open between requests."""

    connections: dict[str, http.client.HTTPConnection] = field(default_factory=dict)

    def ask(self, endpoint: Endpoint, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """Unavailable if it may be better later, ValueError if not."""
        body = json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()
        status, headers, content = self.post(endpoint, body)
        said = content[:200].decode(errors="replace")
        if status in BUSY:
            message = f"{endpoint.url} answered {status}: {said}"
            raise Unavailable(message, retry_after_s(headers.get("Retry-After")))
        if status != 200:
            raise ValueError(f"{endpoint.url} answered {status}: {said}")
        try:
            return read_result(json.loads(content), len(queries))
        except (ValueError, TypeError, KeyError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else first_line(error)
            raise ValueError(f"{endpoint.url} answered what is not a result ({why}): {said}") from error

    def post(self, endpoint: Endpoint, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        """A connection that was kept may have been closed by the server meanwhile: then a new one is tried at once."""
        for kept in (True, False):
            connection = self.connections.pop(endpoint.url, None) if kept else connect(endpoint)
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
                raise Unavailable(f"{endpoint.url}: {why}") from error
            if response.will_close:
                connection.close()
            else:
                self.connections[endpoint.url] = connection
            return response.status, response.headers, content
        raise AssertionError("unreachable")

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


def connect(endpoint: Endpoint) -> http.client.HTTPConnection:
    """Directly: proxies that the environment names are for the world outside."""
    if endpoint.secure:
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=endpoint.timeout_s, context=context)
    return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=endpoint.timeout_s)


def retry_after_s(header: str | None) -> float | None:
    """Seconds; the other form of the header, a date, is not understood."""
    try:
        return min(float(header or ""), 60.0)
    except ValueError:
        return None


def read_result(answer: Any, num_queries: int) -> list[list[Document]]:
    if not isinstance(answer, dict) or not isinstance(answer.get("result"), list):
        raise ValueError("no `result`")
    if len(answer["result"]) != num_queries:
        raise ValueError(f"{len(answer['result'])} results for {num_queries} queries")
    return [[read_document(item) for item in items] for items in answer["result"]]


def read_document(item: Any) -> Document:
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
    return Document("" if name is None else str(name), title, text.strip(), None if score is None else float(score))
