"""Finding the tool calls in what a model wrote.

- hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around them.
- openai: `{"tool_calls": [...]}`, behind text or not, or a reply that is nothing but one call or a list of calls,
  `{"name": ..., "arguments": {...}}` (also `parameters`, as some templates say).

A call that cannot be read is a call all the same: the model is told what is wrong with it.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

Style = Literal["hermes", "openai"]
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
OPENAI = re.compile(r'\{\s*"tool_calls"\s*:')
FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?\s*```\Z", re.DOTALL)


@dataclass(frozen=True)
class Call:
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why it cannot be read."""


@dataclass(frozen=True)
class Parsed:
    text: str
    """What was said beside the calls."""
    calls: list[Call]


def parse_reply(reply: str, style: Style) -> Parsed:
    return _parse_hermes(reply) if style == "hermes" else _parse_openai(reply)


def _parse_hermes(reply: str) -> Parsed:
    calls = [_read_text(match[1]) for match in HERMES.finditer(reply)]
    return Parsed(HERMES.sub("", reply).strip(), calls)


def _parse_openai(reply: str) -> Parsed:
    whole = reply.strip()
    fenced = FENCE.match(whole)
    whole = fenced[1].strip() if fenced else whole
    begun = OPENAI.search(whole)
    if begun is not None:
        try:
            value, _ = json.JSONDecoder().raw_decode(whole, begun.start())
        except (ValueError, RecursionError) as error:
            return Parsed(whole[: begun.start()].strip(), [Call(problem=_not_json(error))])
        calls = value["tool_calls"]
        read = (
            [_read(one) for one in calls] if isinstance(calls, list) and calls else [Call(problem="no list of calls")]
        )
        return Parsed(whole[: begun.start()].strip(), read)
    try:
        value = json.loads(whole)
    except (ValueError, RecursionError) as error:
        if re.match(r'\[?\s*\{\s*"name"\s*:', whole):
            return Parsed("", [Call(problem=_not_json(error))])
        return Parsed(reply.strip(), [])
    several = value if isinstance(value, list) else [value]
    if several and all(_looks_like_a_call(one) for one in several):
        return Parsed("", [_read(one) for one in several])
    return Parsed(reply.strip(), [])  # an answer that happens to be JSON


def _looks_like_a_call(value: Any) -> bool:
    return isinstance(value, dict) and (
        ("name" in value and ("arguments" in value or "parameters" in value)) or "function" in value
    )


def _read_text(text: str) -> Call:
    try:
        return _read(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call(problem=_not_json(error))


def _read(value: Any) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return Call(problem='a call is an object, {"name": ..., "arguments": {...}}')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return Call(problem="the call has no name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON, as the OpenAI API has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Call(name, problem=f"its arguments: {_not_json(error)}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return Call(name, problem="its arguments must be an object")
    return Call(name, arguments)


def _not_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos}"
    return f"not valid JSON: {error}"
