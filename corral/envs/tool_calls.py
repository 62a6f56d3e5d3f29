"""Tool calls: the JSON schema of a Python function, finding calls in what a model wrote, and what is wrong with one.

- hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around them.
- openai: `{"tool_calls": [...]}`, behind text or not, or a reply that is nothing but one call or a list of calls,
  `{"name": ..., "arguments": {...}}` (also `parameters`, as some templates have it).

A call that cannot be read is a call all the same: the model gets to know what is wrong with it.
"""

import enum
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from corral.recipe.errors import UserError

Style = Literal["hermes", "openai"]
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
OPENAI = re.compile(r'\{\s*"tool_calls"\s*:')
FENCE = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?\s*```\Z", re.DOTALL)
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
SUPPORTED = "str, int, float, bool, None, list, dict, Literal, unions of these, or Any"
MAX_QUOTED_CHARACTERS = 60
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters):\s*$")
ARGUMENT = re.compile(r"^(?P<name>\*{0,2}\w+)\s*(\([^)]*\))?\s*:\s*(?P<text>.*)$")


@dataclass(frozen=True)
class ToolCall:
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why it cannot be read, if so."""


@dataclass(frozen=True)
class ParsedReply:
    text: str
    """The text beside the calls."""
    calls: list[ToolCall]


def parse_reply(reply: str, style: Style) -> ParsedReply:
    if style == "openai":
        return _parse_openai(reply)
    calls = []
    for match in HERMES.finditer(reply):
        try:
            calls.append(_read(json.loads(match[1])))
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall(problem=_not_json(error)))
    return ParsedReply(HERMES.sub("", reply).strip(), calls)


def _parse_openai(reply: str) -> ParsedReply:
    whole = reply.strip()
    fenced = FENCE.match(whole)
    whole = fenced[1].strip() if fenced else whole
    begun = OPENAI.search(whole)
    if begun is not None:
        try:
            value, _ = json.JSONDecoder().raw_decode(whole, begun.start())
        except (ValueError, RecursionError) as error:
            return ParsedReply(whole[: begun.start()].strip(), [ToolCall(problem=_not_json(error))])
        calls = value["tool_calls"]
        is_list = isinstance(calls, list) and calls
        read = [_read(one) for one in calls] if is_list else [ToolCall(problem="no list of calls")]
        return ParsedReply(whole[: begun.start()].strip(), read)
    try:
        value = json.loads(whole)
    except (ValueError, RecursionError) as error:
        if re.match(r'\[?\s*\{\s*"name"\s*:', whole):
            return ParsedReply("", [ToolCall(problem=_not_json(error))])
        return ParsedReply(reply.strip(), [])
    several = value if isinstance(value, list) else [value]
    if several and all(_looks_like_a_call(one) for one in several):
        return ParsedReply("", [_read(one) for one in several])
    return ParsedReply(reply.strip(), [])  # an answer that happens to be JSON


def _looks_like_a_call(value: Any) -> bool:
    return isinstance(value, dict) and (
        ("name" in value and ("arguments" in value or "parameters" in value)) or "function" in value
    )


def _read(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return ToolCall(problem='a call is an object, {"name": ..., "arguments": {...}}')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall(problem="the call has no name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON, as the OpenAI API has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f"its arguments: {_not_json(error)}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(name, problem="its arguments must be an object")
    return ToolCall(name, arguments)


def _not_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos}"
    return f"not valid JSON: {error}"


# --- schemas


def function_schema(function: Callable[..., Any], name: str, is_method: bool = False) -> dict[str, Any]:
    """`{"type": "function", "function": {...}}`, as chat templates and the OpenAI API write it.

    The docstring's first paragraph is the description; lines under `Args:` describe the parameters.
    """
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise UserError(f"tool `{name}`: its type hints can't be read: {error}") from error
    parameters = list(inspect.signature(function).parameters.values())[is_method:]
    description, described = read_docstring(inspect.getdoc(function) or "")
    properties, required = {}, []
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tool `{name}`: the model can't name its parameter `{parameter}`; give it plain ones")
        where = f"tool `{name}`: its parameter `{parameter.name}`"
        schema = type_schema(hints.get(parameter.name, Any), where)
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif is_json(parameter.default):
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    arguments = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": arguments}}


def type_schema(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    if origin is typing.Annotated:
        return type_schema(inner[0], where)
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    if origin is Literal:
        for one in inner:
            if type(one) not in PLAIN:
                raise UserError(f"{where} may be `{one!r}`, which a model cannot write; it can write {SUPPORTED}")
        kinds = {PLAIN[type(one)] for one in inner}
        return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(one, where) for one in inner]}
    if hint is list or origin is list:
        return {"type": "array", "items": type_schema(inner[0], where) if inner else {}}
    if hint is dict or (origin is dict and inner[0] is str):
        return {"type": "object", "additionalProperties": type_schema(inner[1], where) if inner else {}}
    name = "an Enum" if isinstance(hint, type) and issubclass(hint, enum.Enum) else f"`{hint!r}`"
    raise UserError(f"{where} is {name}, which a model cannot write; it can write {SUPPORTED}")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph on one line, and the description of each parameter."""
    lines = text.splitlines()
    paragraph = itertools.takewhile(lambda line: line.strip() and not SECTION.match(line), lines)
    return " ".join(line.strip() for line in paragraph), _read_arguments(lines)


def _read_arguments(lines: list[str]) -> dict[str, str]:
    described: dict[str, str] = {}
    start = next((number for number, line in enumerate(lines) if SECTION.match(line)), None)
    if start is None:
        return described
    outer, first, name = _indent(lines[start]), None, None
    for line in lines[start + 1 :]:
        if not line.strip():
            continue
        if _indent(line) <= outer:
            break
        first = _indent(line) if first is None else first
        match = ARGUMENT.match(line.strip()) if _indent(line) <= first else None
        if match is not None:
            name = match["name"]
            described[name] = match["text"]
        elif name is not None:  # a description that goes over several lines
            described[name] = f"{described[name]} {line.strip()}".strip()
    return described


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def problem_with(value: Any, schema: Mapping[str, Any], where: str = "") -> str | None:
    """What is wrong with `value`, as text for the model; None if nothing is. Knows the keywords of `type_schema`."""
    if "enum" in schema:
        allowed = schema["enum"]
        same = any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in allowed)
        return None if same else f"{where} must be one of {', '.join(map(json.dumps, allowed))}, not {_quote(value)}"
    if "anyOf" in schema:
        problems = [problem_with(value, one, where) for one in schema["anyOf"]]
        return None if None in problems else " or ".join(str(problem) for problem in problems)
    kind = schema.get("type")
    if kind is not None and not _is_a(value, kind):
        article = "an" if kind[0] in "aio" else "a"
        return f"{where or 'arguments'} must be {article} {kind}, not {_quote(value)}"
    if kind == "array":
        items = (problem_with(item, schema["items"], f"{where}[{index}]") for index, item in enumerate(value))
        return next((problem for problem in items if problem), None)
    if kind == "object":
        return _problem_in_object(value, schema, where)
    return None


def _problem_in_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> str | None:
    known = schema.get("properties", {})
    inside = f"{where}." if where else ""
    for name in schema.get("required", ()):
        if name not in value:
            return f"{inside}{name} is missing"
    for name, item in value.items():
        others = schema.get("additionalProperties", {})
        if name not in known and others is False:
            takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
            return f"there is no argument {inside}{name}; {takes}"
        problem = problem_with(item, known.get(name, others), f"{inside}{name}")
        if problem:
            return problem
    return None


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # an int to Python, but not to JSON
        return kind == "boolean"
    classes: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "null": (type(None),),
        "array": (list,),
        "object": (dict,),
    }
    return isinstance(value, classes.get(kind, ()))


def _quote(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]}..."
