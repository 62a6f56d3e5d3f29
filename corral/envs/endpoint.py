"""An HTTP endpoint that looks like the OpenAI API to an agent, and like a list of pending questions to an environment.

Serves `POST /v1/chat/completions` and `GET /v1/models` on this machine only. Each trajectory has a session with a
random key of its own; without one of these keys nothing is answered. Plain asyncio, in a thread with its own event
loop, so that requests are taken also while the model computes.

What waits for what: a connection waits for its next request (unblocked by the client or `Endpoint.close`), and with a
request for the answer to it, which comes from the session's owner, or from `Session.close` at the latest.
"""

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from corral.envs.chat_api import BadRequest, ChatReply, ChatRequest, chunks, completion, read_request
from corral.envs.threads import LoopThread

HOST = "127.0.0.1"
START_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
NO_KEY = "no trajectory is being played under this key: there was none, or it is over"
CHAT, MODELS = "/v1/chat/completions", "/v1/models"


@dataclass(eq=False)
class Exchange:
    """A request, and the answer to come."""

    request: ChatRequest
    reader: asyncio.StreamReader
    """Of the connection that waits for the answer."""
    answer: "Future[ChatReply]" = field(default_factory=Future)
    was_sent: bool = False

    def refuse(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(BadRequest(why))


class Session:
    """One trajectory's conversation. `deliver` is called with each new exchange, from the endpoint's thread."""

    def __init__(self, endpoint: "Endpoint", deliver: Callable[[Exchange], None]) -> None:
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self._endpoint, self._deliver = endpoint, deliver
        self._last: Exchange | None = None
        self._is_open = True
        self._lock = threading.Lock()

    def arrive(self, request: ChatRequest, reader: asyncio.StreamReader) -> Exchange:
        with self._lock:
            if not self._is_open:
                raise BadRequest(NO_KEY)
            last = self._last
            if last is not None and self._is_asked_again(last, request):
                last.reader = reader
                return last
            if last is not None and not last.answer.done():
                raise BadRequest("another request is still being answered: a trajectory is one conversation")
            self._last = Exchange(request, reader)
        self._deliver(self._last)
        return self._last

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            if self._last is not None:
                self._last.refuse("the trajectory is over")
        self._endpoint.forget(self)

    def _is_asked_again(self, last: Exchange, request: ChatRequest) -> bool:
        """Whether the client hung up before it had the answer, and now tries again."""
        same = (last.request.messages, last.request.tools) == (request.messages, request.tools)
        return same and not last.was_sent and has_hung_up(last.reader)


class Endpoint:
    def __init__(self, model: str, ignored: Collection[str] = ()) -> None:
        self._model, self._ignored = model, frozenset(ignored)
        self._sessions: dict[str, Session] = {}
        self._loop = LoopThread("agents' endpoint")
        self._server = self._loop.submit(self._listen()).result(START_TIMEOUT_S)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://{HOST}:{self.port}/v1"

    def open_session(self, deliver: Callable[[Exchange], None]) -> Session:
        session = Session(self, deliver)
        self._sessions[session.key] = session
        return session

    def forget(self, session: Session) -> None:
        self._sessions.pop(session.key, None)

    def close(self) -> None:
        for session in list(self._sessions.values()):
            session.close()
        self._loop.submit(self._stop_listening()).result(START_TIMEOUT_S)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, HOST, 0, limit=MAX_HEAD_BYTES, backlog=1024)

    async def _stop_listening(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection's life: one request after the other."""
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # clients come and go as they like
        except (asyncio.LimitOverrunError, ValueError):
            pass  # what is no HTTP is not worth an answer
        except asyncio.CancelledError:
            pass  # by `close`
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is to stay."""
        method, path, headers = await read_head(reader)
        session = self._sessions.get(headers.get("authorization", "").removeprefix("Bearer ").strip())
        if session is None:  # not even its body is read
            await send_error(writer, 401, NO_KEY)
            return False
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await read_body(reader, headers)
        expected = {CHAT: "POST", MODELS: "GET"}.get(path)
        if expected is None:
            await send_error(writer, 404, f"there is no {path}; there are {CHAT} and {MODELS}")
        elif method != expected:
            await send_error(writer, 405, f"{path} takes {expected}")
        elif path == MODELS:
            model = {"id": self._model, "object": "model", "created": 0, "owned_by": "corral"}
            await send_json(writer, 200, {"object": "list", "data": [model]})
        else:
            await self._complete(session, body, reader, writer)
        return headers.get("connection", "").lower() != "close"

    async def _complete(
        self, session: Session, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            request = read_request(body, self._ignored)
            exchange = session.arrive(request, reader)
            reply = await asyncio.shield(asyncio.wrap_future(exchange.answer))  # it may be asked for again
        except BadRequest as error:
            await send_error(writer, 400, str(error))
            return
        if has_hung_up(reader):
            raise ConnectionError("the client hung up")
        key = f"chatcmpl-{secrets.token_hex(8)}"
        if request.stream:
            events = [*(json.dumps(chunk) for chunk in chunks(reply, request, key)), "[DONE]"]
            await send(writer, 200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events))
        else:
            await send_json(writer, 200, completion(reply, request, key))
        exchange.was_sent = True


def has_hung_up(reader: asyncio.StreamReader) -> bool:
    """Whether the client is gone: it closed the connection, or the connection broke."""
    return reader.at_eof() or reader.exception() is not None


async def read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Method, path without its query, and headers by their names in small letters."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (line.partition(":") for line in lines if line)
    return method, target.partition("?")[0].rstrip("/"), {name.lower(): value.strip() for name, _, value in pairs}


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(_bounded(int(headers.get("content-length", "0"))))
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        body += await reader.readexactly(_bounded(len(body) + size) - len(body))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
        pass
    return body


def _bounded(num_bytes: int) -> int:
    if not 0 <= num_bytes <= MAX_BODY_BYTES:
        raise ValueError(f"a body of {num_bytes} bytes")
    return num_bytes


async def send_error(writer: asyncio.StreamWriter, status: int, message: str) -> None:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    await send_json(writer, status, {"error": error})


async def send_json(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> None:
    await send(writer, status, "application/json", json.dumps(answer))


async def send(writer: asyncio.StreamWriter, status: int, kind: str, text: str) -> None:
    body = text.encode()
    closing = "Connection: close\r\n" if status == 401 else ""
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{closing}\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
