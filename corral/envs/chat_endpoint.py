"""An HTTP endpoint that looks like the OpenAI API to an agent, and like a queue of pending requests to an environment.

Serves `POST /v1/chat/completions` and `GET /v1/models` on this machine only. Each trajectory has a session with a
random key of its own; without one of these keys nothing is answered. Plain asyncio, in a thread with its own event
loop, so that requests are taken also while the model computes.

How the next token is sampled is the recipe's business, so sampling parameters of a request are ignored; what would make
the answer another kind of thing is refused.

What waits for what: a connection waits for its next request (unblocked by the client or `ChatEndpoint.close`), and with
a request for the answer to it, which comes from the session's owner, or from `ChatSession.close` at the latest.
"""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from corral.data.images import read_parts
from corral.data.plugins import error_line
from corral.data.rows import Message
from corral.envs.tool_calls import Style, parse_reply

HOST = "127.0.0.1"
START_TIMEOUT_S, CLOSE_TIMEOUT_S = 10.0, 5.0
REQUEST_S, KEEP_ALIVE_S = 20.0, 300.0
"""Time for the first request of a connection, and between an answer and the whole of the next request."""
MAX_SILENT = 1024
"""Connections without a key. The oldest of more than these is closed, so that no user of the machine uses them up."""
MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
NO_KEY = "no trajectory runs under this key: there was none, or it is over"
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
REFUSED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "n": ("one answer to a request", lambda value: value == 1),
    "stop": ("the recipe says where a turn stops, `rollout.stop`", lambda value: value == []),
    "logprobs": ("log-probabilities are not given", lambda value: value is False),
    "top_logprobs": ("log-probabilities are not given", lambda value: value == 0),
    "response_format": ("answers are free text", lambda value: _field(value, "type") == "text"),
    "tool_choice": ("the model chooses whether to call a tool", lambda value: value in ("auto", "none")),
    "functions": ("functions are given as `tools`", lambda value: value == []),
    "function_call": ("functions are given as `tools`", lambda value: value == "none"),
    "modalities": ("answers are text", lambda value: value == ["text"]),
}
"""Fields that cannot be honored: the reason for the client, and which values want nothing."""
EXCERPT = 60
Answer = TypeVar("Answer")


class BadRequest(Exception):
    """Answered with status 400; the agent reads the text."""


class ChangedHistory(Exception):
    """The request does not go on where the last one ended."""


@dataclass(frozen=True)
class ChatRequest:
    messages: list[Message]
    """Messages with text as content and, where there were any, `tool_calls`, `tool_call_id` and `name`."""
    tools: list[dict[str, Any]]
    model: str
    parse_calls: bool
    """Whether calls of tools in the reply are wanted as such."""
    stream: bool
    stream_usage: bool


@dataclass(frozen=True)
class ChatReply:
    message: Message
    finish_reason: str
    num_prompt_tokens: int
    num_reply_tokens: int


@dataclass(eq=False)
class PendingRequest:
    """A request, and the answer to come."""

    request: ChatRequest
    reader: asyncio.StreamReader
    """The reader of the connection that waits for the answer."""
    answer: "Future[ChatReply]" = field(default_factory=Future)
    was_sent: bool = False

    def refuse(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(BadRequest(why))


class ChatSession:
    """One trajectory's conversation. `deliver` is called with each new pending, from the endpoint's thread."""

    def __init__(self, endpoint: "ChatEndpoint", deliver: Callable[[PendingRequest], None]) -> None:
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self._endpoint, self._deliver = endpoint, deliver
        self._last: PendingRequest | None = None
        self._is_open = True
        self._lock = threading.Lock()
        endpoint.sessions[self.key] = self

    def arrive(self, request: ChatRequest, reader: asyncio.StreamReader) -> PendingRequest:
        with self._lock:
            if not self._is_open:
                raise BadRequest(NO_KEY)
            last = self._last
            if (
                last is not None
                and (last.request.messages, last.request.tools) == (request.messages, request.tools)
                and not last.was_sent
                and has_hung_up(last.reader)
            ):
                last.reader = reader  # the client hung up before it had the answer, and now tries again
                return last
            if last is not None and not last.answer.done():
                raise BadRequest("another request is still being answered: a trajectory is one conversation")
            self._last = PendingRequest(request, reader)
        self._deliver(self._last)
        return self._last

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            if self._last is not None:
                self._last.refuse("the trajectory is over")
        self._endpoint.sessions.pop(self.key, None)


class ChatEndpoint:
    def __init__(self, model: str, ignored: Collection[str] = ()) -> None:
        self._model, self._ignored = model, frozenset(ignored)
        self.sessions: dict[str, ChatSession] = {}
        self._silent: dict[asyncio.StreamWriter, None] = {}
        """Connections that have sent no request with a key yet, oldest first."""
        self._loop = LoopThread("agents' endpoint")
        listen = asyncio.start_server(self._serve, HOST, 0, limit=MAX_HEAD_BYTES, backlog=1024)
        self._server = self._loop.submit(listen).result(START_TIMEOUT_S)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://{HOST}:{self.port}/v1"

    def close(self) -> None:
        for session in list(self.sessions.values()):
            session.close()
        self._loop.submit(self._stop_listening()).result(START_TIMEOUT_S)
        self._loop.close()

    async def _stop_listening(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection's life: one request after the other. Clients come and go as they like, and what is no HTTP is
        not worth an answer."""
        self._silent[writer] = None
        if len(self._silent) > MAX_SILENT:
            next(iter(self._silent)).transport.abort()
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, TimeoutError):
            pass
        except asyncio.CancelledError:
            pass  # by `close`
        finally:
            self._silent.pop(writer, None)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection is to stay."""
        deadline = asyncio.get_running_loop().time() + (REQUEST_S if writer in self._silent else KEEP_ALIVE_S)
        async with asyncio.timeout_at(deadline):
            method, path, headers = await read_head(reader)
        session = self.sessions.get(headers.get("authorization", "").removeprefix("Bearer ").strip())
        if session is None:  # not even its body is read
            await send_error(writer, 401, NO_KEY)
            return False
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._silent.pop(writer, None)
        async with asyncio.timeout_at(deadline):
            body = await read_body(reader, headers)
        expected = {CHAT: "POST", MODELS: "GET"}.get(path)
        if expected is None:
            await send_error(writer, 404, f"there is no {path}; there are {CHAT} and {MODELS}")
        elif method != expected:
            await send_error(writer, 405, f"{path} takes {expected}")
        elif path == MODELS:
            model = {"id": self._model, "object": "model", "created": 0, "owned_by": "corral"}
            await send(writer, 200, {"object": "list", "data": [model]})
        else:
            await self._complete(session, body, reader, writer)
        return headers.get("connection", "").lower() != "close"

    async def _complete(
        self, session: ChatSession, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            request = read_request(body, self._ignored)
            pending = session.arrive(request, reader)
            reply = await asyncio.shield(asyncio.wrap_future(pending.answer))  # a retry may want it
        except BadRequest as error:
            await send_error(writer, 400, str(error))
            return
        if has_hung_up(reader):
            raise ConnectionError("the client hung up")
        key = f"chatcmpl-{secrets.token_hex(8)}"
        if request.stream:
            events = [*(json.dumps(chunk) for chunk in chunks(reply, request, key)), "[DONE]"]
            await send(writer, 200, "".join(f"data: {event}\n\n" for event in events))
        else:
            await send(writer, 200, completion(reply, request, key))
        pending.was_sent = True


def has_hung_up(reader: asyncio.StreamReader) -> bool:
    """Whether the client is gone: it closed the connection, or the connection broke."""
    return reader.at_eof() or reader.exception() is not None


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Coroutine[Any, Any, Answer]) -> "Future[Answer]":
        """Run a call from any other thread. Cancelling the future cancels the call."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """Cancels whatever still runs."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S / 2))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


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
    await send(writer, status, {"error": {"message": message, "type": kind, "param": None, "code": None}})


async def send(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any] | str) -> None:
    """Sends an object as JSON; a text is a stream of events."""
    kind, text = ("text/event-stream", answer) if isinstance(answer, str) else ("application/json", json.dumps(answer))
    body = text.encode()
    closing = "Connection: close\r\n" if status == 401 else ""
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{closing}\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()


# --- chat completions as the OpenAI API has them


def read_request(body: bytes, ignored: frozenset[str]) -> ChatRequest:
    """`ignored` are fields that are not refused, though they cannot be honored. Raises nothing but BadRequest."""
    try:
        return _read_fields(json.loads(body), ignored)
    except BadRequest:
        raise
    except Exception as error:  # no JSON, or types that nobody thought of
        raise BadRequest(f"the body cannot be read: {error_line(error)}") from error


def _read_fields(fields: Any, ignored: frozenset[str]) -> ChatRequest:
    if not isinstance(fields, dict):
        raise BadRequest("the body must be an object")
    for name, (why, asks_nothing) in REFUSED.items():
        value = fields.get(name)
        if value is not None and name not in ignored and not asks_nothing(value):
            raise BadRequest(f"`{name}: {json.dumps(value)[:EXCERPT]}` cannot be honored: {why}")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("`messages` must be a list of messages")
    read = [read_message(message, number) for number, message in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's: an answer cannot be begun by the request")
    tools = read_tools(fields.get("tools"))
    return ChatRequest(
        messages=read,
        tools=tools,
        model=str(fields.get("model") or ""),
        parse_calls=bool(tools) and fields.get("tool_choice") != "none",
        stream=bool(fields.get("stream")),
        stream_usage=bool(_field(fields.get("stream_options"), "include_usage")),
    )


def read_tools(tools: Any) -> list[dict[str, Any]]:
    tools = tools or []
    if not isinstance(tools, list) or not all(_field(_field(tool, "function"), "name") for tool in tools):
        raise BadRequest('`tools` must be a list of {"type": "function", "function": {...}}')
    return tools


def read_message(message: Any, number: int) -> Message:
    """The fields that mean something, in the form in which chat templates want them."""
    role = _field(message, "role")
    if not isinstance(role, str):
        raise BadRequest(f"message {number} has no `role`")
    content, images = read_content(message.get("content"), number)
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    if images:
        read["images"] = images
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRequest(f"message {number}: `tool_calls` must be a list")
        read["tool_calls"] = [read_tool_call(call, number) for call in calls]
    read |= {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
    return cast(Message, read)


def read_content(content: Any, number: int) -> tuple[str, list[bytes]]:
    """Text, and the images in it, which come as data: URLs: an agent does not choose files to be read here."""
    if content is None:
        return "", []
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise BadRequest(f"message {number}: `content` must be text or a list of parts")
    for part in content:
        url = _field(_field(part, "image_url"), "url")
        if _field(part, "type") != "text" and not (isinstance(url, str) and url.startswith("data:image/")):
            raise BadRequest(f"message {number}: only text and images as data: URLs can be read, no sound or files")
    try:
        text, images = read_parts(content)
    except ValueError as error:
        raise BadRequest(f"message {number}: {error}") from error
    return text, [image for image in images if isinstance(image, bytes)]


def read_tool_call(call: Any, number: int) -> dict[str, Any]:
    name, arguments = (_field(_field(call, "function"), key) for key in ("name", "arguments"))
    if not isinstance(name, str):
        raise BadRequest(f"message {number}: a call in `tool_calls` has no function's name")
    if isinstance(arguments, str):  # templates write arguments as JSON themselves
        with suppress(ValueError):
            arguments = json.loads(arguments or "{}")
    read = {"type": "function", "function": {"name": name, "arguments": {} if arguments is None else arguments}}
    return {**read, "id": call["id"]} if isinstance(call.get("id"), str) else read


def assistant_message(reply: str, request: ChatRequest, style: Style, reply_id: int | str) -> Message:
    """The reply as a message. Where one call of a tool cannot be read, all of it stays text. `reply_id` tells the ids
    of its calls from those of other replies in the conversation."""
    parsed = parse_reply(reply, style)
    if not request.parse_calls or not parsed.calls or any(call.problem for call in parsed.calls):
        return Message(role="assistant", content=reply)
    functions = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
    calls = [{"type": "function", "function": one, "id": f"call_{reply_id}_{i}"} for i, one in enumerate(functions)]
    return cast(Message, {"role": "assistant", "content": parsed.text, "tool_calls": calls})


def new_messages(before: Sequence[Message], request: ChatRequest) -> list[Message]:
    """The messages that the request adds to all those before."""
    for number, old in enumerate(before):
        if number == len(request.messages):
            raise ChangedHistory(
                f"the request has {number} messages, and there were {len(before)} before, the model's reply included; "
                "each request must repeat them all and add to them"
            )
        difference = difference_between(old, request.messages[number])
        if difference is not None:
            raise ChangedHistory(f"message {number} of the request was changed: {difference}")
    added = request.messages[len(before) :]
    if not added:
        raise ChangedHistory("the request adds no message to those before")
    return added


def difference_between(old: Message, new: Message) -> str | None:
    if old["role"] != new["role"]:
        return f"its role was {old['role']} and is {new['role']}"
    if calls_of(old) != calls_of(new):
        return f"its tool calls were {excerpt(calls_of(old))} and are {excerpt(calls_of(new))}"
    if old.get("images") != new.get("images"):
        return "its images were others"
    was, now = old["content"].strip(), new["content"].strip()
    if was == now or (calls_of(new) and not now):  # some agents keep the calls and not the text before them
        return None
    same = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    start = max(0, same - EXCERPT // 3)
    return f"from character {start} on it was {was[start : start + EXCERPT]!r} and is {now[start : start + EXCERPT]!r}"


def calls_of(message: Message) -> list[tuple[str, Any]]:
    calls = cast(Mapping[str, Any], message).get("tool_calls", ())
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def excerpt(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."


def completion(reply: ChatReply, request: ChatRequest, key: str) -> dict[str, Any]:
    """The answer in one piece."""
    choice = {"index": 0, "message": as_sent(reply.message), "logprobs": None, "finish_reason": reply.finish_reason}
    return {**_head(request, key, "chat.completion"), "choices": [choice], "usage": usage(reply)}


def chunks(reply: ChatReply, request: ChatRequest, key: str) -> list[dict[str, Any]]:
    """The same answer as the parts of a stream: all of the message, its end, the usage if that was asked for."""
    delta = as_sent(reply.message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    head = _head(request, key, "chat.completion.chunk")
    parts = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]},
    ]
    if request.stream_usage:
        parts.append({**head, "choices": [], "usage": usage(reply)})
    return parts


def as_sent(message: Message) -> dict[str, Any]:
    """Arguments of calls are text in the API."""
    sent = dict(cast(Mapping[str, Any], message))
    if "tool_calls" in sent:
        sent["content"] = sent["content"] or None
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_reply_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_reply_tokens,
    }


def _head(request: ChatRequest, key: str, kind: str) -> dict[str, Any]:
    return {"id": key, "object": kind, "created": int(time.time()), "model": request.model}


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None
