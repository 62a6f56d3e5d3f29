"""One row of data: a prompt, the reference answer, and whatever else the row carries.

Reads text prompts, chat-format prompts, and verl's layout (`data_source`, `prompt`, `ability`,
`reward_model.ground_truth`, `extra_info`) as they are. Where rows come from is `sources.py`. This module is imported by
every scoring process, so it imports nothing heavy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from corral.data.images import place_images, read_image, read_parts
from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.recipe.schema import Data


class Message(TypedDict):
    role: str
    content: str
    images: NotRequired[list[str | bytes]]
    """Files of images or their contents, as many as the content has `<image>`."""


@dataclass(frozen=True)
class Row:
    prompt: list[Message]
    answer: Any
    """Usually text or a number; None if the row has none."""
    source: str
    """verl's `data_source`, or empty."""
    extra: dict[str, Any]
    """Every other column, as it is."""


def row_from_mapping(mapping: Mapping[str, Any], data: "Data", where: str = "row") -> Row:
    """The row that `mapping` describes. `where` says in errors which one it is, such as `train.jsonl:7`."""
    prompt = _prompt(_column(mapping, data.prompt_key, "data.prompt_key", where), where)
    prompt = _with_images(prompt, mapping.get(data.images_key), where)
    prompt = _with_template(_with_system(prompt, data.system, where), data.template, where)
    source = mapping.get("data_source") or ""
    if not isinstance(source, str):
        raise UserError(f"{where}: `data_source` must be text, not {_kind(source)}")
    taken = {data.prompt_key, data.answer_key or "answer", "data_source", data.images_key}
    extra = {key: value for key, value in mapping.items() if key not in taken}
    if data.answer_key is not None:
        answer = _column(mapping, data.answer_key, "data.answer_key", where)
    else:
        answer = mapping["answer"] if "answer" in mapping else _look_up(mapping, "reward_model.ground_truth")[1]
    return Row(prompt, answer, source, extra)


def _column(mapping: Mapping[str, Any], key: str, setting: str, where: str) -> Any:
    found, value = _look_up(mapping, key)
    if found:
        return value
    columns = ", ".join(f"`{name}`" for name in mapping) or "none"
    raise UserError(f"{where}: no column `{key}`; set {setting} to one of its columns: {columns}")


def _look_up(mapping: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """Whether there is such a column, and its value; a dot goes into nested columns."""
    if key in mapping:
        return True, mapping[key]
    outer, _, inner = key.partition(".")
    if inner and isinstance(mapping.get(outer), Mapping):
        return _look_up(mapping[outer], inner)
    return False, None


def _prompt(value: Any, where: str) -> list[Message]:
    if hasattr(value, "tolist"):  # what pandas makes of a list
        value = value.tolist()
    if isinstance(value, str):
        messages = [Message(role="user", content=value)]
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        messages = [_message(item, f"{where}: message {number} of the prompt") for number, item in enumerate(value)]
    else:
        raise UserError(f"{where}: the prompt must be text or a list of chat messages, not {_kind(value)}")
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where}: the prompt is empty")
    return messages


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise UserError(f"{where} must have `role` and `content`; it is {_kind(item)}")
    content = item.get("content")
    images: list[str | bytes] = []
    if isinstance(content, list):
        try:
            content, images = read_parts(content, Path(where).parent)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
    for key, value in (("role", item.get("role")), ("content", content)):
        if not isinstance(value, str):
            raise UserError(f"{where}: `{key}` must be text, not {_kind(value)}")
    others = [key for key, value in item.items() if key not in ("role", "content") and value is not None]
    if others:
        raise UserError(f"{where} has `{others[0]}`; only `role` and `content` are supported")
    message = Message(role=item["role"], content=str(content))
    return {**message, "images": images} if images else message


def _with_images(prompt: list[Message], column: Any, where: str) -> list[Message]:
    """The prompt with the images of the row's column, if it has any."""
    given = [] if column is None else column.tolist() if hasattr(column, "tolist") else column
    given = list(given) if isinstance(given, list | tuple) else [given]
    if not given:
        return prompt
    try:
        return place_images(prompt, [read_image(image, Path(where).parent) for image in given])
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def _with_system(prompt: list[Message], system: str | None, where: str) -> list[Message]:
    if system is None:
        return prompt
    if any(message["role"] == "system" for message in prompt):
        raise UserError(
            f"{where}: the prompt has a system message of its own; remove it there, or leave out data.system"
        )
    return [Message(role="system", content=system), *prompt]


def _with_template(prompt: list[Message], template: str | None, where: str) -> list[Message]:
    if template is None:
        return prompt
    if "{prompt}" not in template:
        raise UserError("data.template must contain `{prompt}`, the place where the question goes")
    for position in reversed(range(len(prompt))):
        if prompt[position]["role"] == "user":
            # Not str.format: questions and templates are full of LaTeX braces.
            content = template.replace("{prompt}", prompt[position]["content"])
            return [*prompt[:position], {**prompt[position], "content": content}, *prompt[position + 1 :]]
    raise UserError(f"{where}: the prompt has no user message to put data.template around")


def _kind(value: Any) -> str:
    return "missing" if value is None else type(value).__name__
