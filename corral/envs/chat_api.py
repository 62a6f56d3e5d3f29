"""Chat completions as the OpenAI API has them: what a request asks for, what an answer looks like.

Knows nothing of HTTP and nothing of environments. How the next token is drawn is the recipe's business, so sampling
parameters of a request are ignored; what would make the answer another kind of thing is refused.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from corral.data.plugins import error_line
from corral.data.rows import Message
from corral.envs.tools.calls import Style, parse_reply

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
"""Fields that cannot be honoured: what to say, and which values ask for nothing."""
EXCERPT = 60


class BadRequest(Exception):
    """Answered with status 400; the agent reads the text."""


class ChangedHistory(Exception):
    """The request does not go on where the last one ended."""


@dataclass(frozen=True)
class ChatRequest:
    messages: list[Message]
    """With text as content and, where there were any, `tool_calls`, `tool_call_id` and `name`."""
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


def read_request(body: bytes, ignored: frozenset[str]) -> ChatRequest:
    """`ignored` are fields that are not refused, though they cannot be honoured. Raises nothing but BadRequest."""
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
            raise BadRequest(f"`{name}: {json.dumps(value)[:EXCERPT]}` cannot be honoured: {why}")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("`messages` must be a list of messages")
    read = [read_message(message, number) for number, message in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's: an answer cannot be begun by the request")
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(_field(_field(tool, "function"), "name") for tool in tools):
        raise BadRequest('`tools` must be a list of {"type": "function", "function": {...}}')
    return ChatRequest(
        messages=read,
        tools=tools,
        model=str(fields.get("model") or ""),
        parse_calls=bool(tools) and fields.get("tool_choice") != "none",
        stream=bool(fields.get("stream")),
        stream_usage=bool(_field(fields.get("stream_options"), "include_usage")),
    )


def read_message(message: Any, number: int) -> Message:
    """The fields that mean something, in the form in which chat templates want them."""
    role = _field(message, "role")
    if not isinstance(role, str):
        raise BadRequest(f"message {number} has no `role`")
    read: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": read_content(message.get("content"), number),
    }
    if message.get("tool_calls"):
        read["tool_calls"] = [read_tool_call(call, number) for call in message["tool_calls"]]
    read |= {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
    return cast(Message, read)


def read_content(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"message {number}: `content` must be text or a list of parts")
    texts = [part["text"] for part in content if _field(part, "type") == "text" and isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        raise BadRequest(f"message {number}: only text can be read, no images, sound or files")
    return "\n".join(texts)


def read_tool_call(call: Any, number: int) -> dict[str, Any]:
    name, arguments = (_field(_field(call, "function"), key) for key in ("name", "arguments"))
    if not isinstance(name, str):
        raise BadRequest(f"message {number}: a call in `tool_calls` has no function's name")
    if isinstance(arguments, str):  # templates write arguments as JSON themselves
        with suppress(ValueError):
            arguments = json.loads(arguments or "{}")
    read = {"type": "function", "function": {"name": name, "arguments": {} if arguments is None else arguments}}
    return {**read, "id": call["id"]} if isinstance(call.get("id"), str) else read


def assistant_message(reply: str, request: ChatRequest, style: Style, number: int) -> Message:
    """The reply as a message. Where one call of a tool cannot be read, all of it stays text."""
    parsed = parse_reply(reply, style)
    if not request.parse_calls or not parsed.calls or any(call.problem for call in parsed.calls):
        return Message(role="assistant", content=reply)
    calls = [
        {
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
            "id": f"call_{number}_{position}",
        }
        for position, call in enumerate(parsed.calls)
    ]
    return cast(Message, {"role": "assistant", "content": parsed.text, "tool_calls": calls})


def new_messages(before: Sequence[Message], request: ChatRequest) -> list[Message]:
    """What the request adds to all that was said before."""
    for number, old in enumerate(before):
        if number == len(request.messages):
            raise ChangedHistory(
                f"the request has {number} messages, and {len(before)} had been said, the model's reply included; "
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
    was, now = old["content"].strip(), new["content"].strip()
    if was == now or (calls_of(new) and not now):  # some agents keep the calls and not the words before them
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
