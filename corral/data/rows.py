"""One row of data: a prompt, the reference answer, and whatever else the row carries.

Reads text prompts, chat-format prompts, and verl's layout (`data_source`, `prompt`, `ability`,
`reward_model.ground_truth`, `extra_info`) as they are. Where rows come from is `sources.py`. This module is imported by
every scoring process, so it imports nothing heavy.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
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
    tool_calls: NotRequired[list[Any]]
    """Calls of the assistant, as the OpenAI API has them, their arguments as objects."""


CONVERSATIONS = ("messages", "conversations")
"""Columns that hold whole conversations, the second as ShareGPT has them."""
SHAREGPT_ROLES = {
    **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"chatgpt": "assistant", "tool": "tool", "observation": "tool"},
}
MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""What a message of a prompt may have besides `role` and `content`, for chat templates that read it."""


@dataclass(frozen=True)
class Conversation:
    """A whole conversation, its last reply included."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Functions, as JSON schemas, that the chat template describes."""


@dataclass(frozen=True)
class Row:
    prompt: list[Message]
    answer: Any
    """Usually text or a number; None if the row has none."""
    source: str
    """What is in the column `data.source_key` (verl's `data_source`), else the name of the row's source, or empty."""
    extra: dict[str, Any]
    """Every other column, as it is."""
    completion: list[Message] = field(default_factory=list)
    """The answer to train on, of a row that has one: the last turn of the assistant, and what follows it. Of a pair,
    the chosen answer."""
    where: str = "row"
    """Where the row is, for errors: `train.jsonl:7`."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Functions that the model may call, as the OpenAI API has them: for the chat template."""
    origin: str = ""
    """The name that the recipe gives to its source (`data.train.sources`), or empty."""
    rejected: list[Message] = field(default_factory=list)
    """The other answer, of a row that is a pair."""
    is_conversation: bool = False
    """Whether turns of the assistant before the last one are trained on, too."""
    text: str | None = None
    """The prompt as it is in the data set, where that is a text and no messages."""

    @property
    def source_name(self) -> str:
        """What metrics call its source."""
        return self.origin or self.source


def row_from_mapping(
    mapping: Mapping[str, Any],
    data: "Data",
    where: str = "row",
    *,
    with_completion: bool = False,
    with_rejected: bool = False,
    origin: str = "",
) -> Row:
    """The row that `mapping` describes. `where` says in errors which one it is, such as `train.jsonl:7`.
    `with_completion`: it has an answer to train on; `with_rejected`: a pair of them. `origin`: the name of its source
    in the recipe."""
    completion: list[Message] = []
    rejected: list[Message] = []
    if with_rejected:
        prompt, completion, rejected = _prompt_and_pair(mapping, data, where)
    elif with_completion:
        prompt, completion = _prompt_and_completion(mapping, data, where)
    else:
        prompt = _prompt(mapping, data.prompt_key, where)
        if prompt[-1]["role"] == "assistant":
            raise UserError(
                f"{where}: column `{data.prompt_key}` ends with a message of the assistant, and the model would be "
                "shown the answer that it is to give: leave that message out (`algorithm.name: sft` trains on it)"
            )
    text = look_up(mapping, data.prompt_key)[1]
    text = text if prompt == [Message(role="user", content=text)] else None
    prompt = _with_system(prompt, _sharegpt_system(mapping, data, with_completion), where)
    prompt = _with_images(prompt, mapping.get(data.images_key), where)
    prompt = _with_template(_with_system(prompt, data.system, where), data.template, where)
    source = mapping.get(data.source_key) or origin
    if not isinstance(source, str):
        raise UserError(f"{where}: `{data.source_key}` must be text, not {_kind(source)}")
    taken = {data.prompt_key, data.source_key, data.images_key}
    taken |= {"answer"} if data.answer_key in (None, "answer") else set()
    taken |= {*CONVERSATIONS} if with_completion else set()
    taken |= {data.chosen_key, data.rejected_key} if with_rejected else set()
    extra = {key: value for key, value in mapping.items() if key not in taken}
    answer = _answer(mapping, data, where)
    if answer is None and completion:
        answer = completion[0]["content"]
    tools = _tools(mapping, data.tools_key, where)
    _check_text([prompt, completion, rejected, answer, tools, extra], where)
    is_conversation = with_completion and _conversation_column(mapping, data) is not None
    return Row(prompt, answer, source, extra, completion, where, tools, origin, rejected, is_conversation, text)


def _check_text(value: Any, where: str) -> None:
    """Raises where some text is no Unicode: JSON can have half of a surrogate pair, which no tokenizer takes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: {ascii(value)[:60]} is not text: it has half of a surrogate pair") from None
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_text(item, where)


def _answer(mapping: Mapping[str, Any], data: "Data", where: str) -> Any:
    if data.answer_key is not None:
        return _column(mapping, data.answer_key, "data.answer_key", where)
    return mapping["answer"] if "answer" in mapping else look_up(mapping, "reward_model.ground_truth")[1]


def _prompt_and_completion(mapping: Mapping[str, Any], data: "Data", where: str) -> tuple[list[Message], list[Message]]:
    """A conversation in a column of `CONVERSATIONS`, or a prompt (`data.prompt_key`, else `question`) and a completion
    (`data.completion_key`, else `completion`, else the reference answer)."""
    column = _conversation_column(mapping, data)
    if column is not None:
        messages = _conversation(mapping[column], column, where)
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None:
            raise UserError(f"{where} has nothing to train on: there is no message of the assistant in `{column}`")
        return messages[:last], messages[last:]
    has_question = "question" in mapping and "prompt_key" not in data.model_fields_set
    prompt_key = "question" if has_question and data.prompt_key not in mapping else data.prompt_key
    prompt = _prompt(mapping, prompt_key, where)
    completion_key = data.completion_key or "completion"
    if data.completion_key is not None or "completion" in mapping:
        value = _column(mapping, completion_key, "data.completion_key", where)
    else:
        value = _answer(mapping, data, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is None or isinstance(value, str):
        completion = [Message(role="assistant", content=value or "")]
    else:
        completion = _conversation(value, completion_key, where)
    if not any(one["role"] == "assistant" and (one["content"] or one.get("tool_calls")) for one in completion):
        columns = ", ".join(f"`{name}`" for name in mapping)
        raise UserError(
            f"{where} has nothing to train on: the answer is empty, or data.completion_key names another column than "
            f"that of the answer; there are {columns}"
        )
    return prompt, completion


def _prompt_and_pair(
    mapping: Mapping[str, Any], data: "Data", where: str
) -> tuple[list[Message], list[Message], list[Message]]:
    """Two answers to a prompt, the chosen one first. They are texts or chat messages; where the prompt is not a
    column of its own, both begin with it."""
    keys = {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
    places = [f"{where}, column `{key}`" for key in keys.values()]
    values = [_column(mapping, key, setting, where) for setting, key in keys.items()]
    values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    for value, place in zip(values, places, strict=True):
        if not isinstance(value, str | list | tuple):
            raise UserError(f"{place} must be text or a list of chat messages, not {_kind(value)}")
    if values[0] == values[1]:
        raise UserError(f"{places[0]} is the same as column `{data.rejected_key}`, so there is nothing to prefer")
    if isinstance(values[0], str) != isinstance(values[1], str):
        raise UserError(f"{places[0]} and column `{data.rejected_key}` must both be text, or both chat messages")
    if isinstance(values[0], str):
        prompt, texts = _prompt_and_texts(mapping, data, values, where)
        answers = [[Message(role="assistant", content=text)] for text in texts]
    else:
        conversations = [_conversation(value, key, where) for value, key in zip(values, keys.values(), strict=True)]
        prompt, answers = _prompt_and_turns(mapping, data, conversations, where)
    for answer, place in zip(answers, places, strict=True):
        if not any(one["role"] == "assistant" and (one["content"] or one.get("tool_calls")) for one in answer):
            raise UserError(f"{place} has nothing to train on: the assistant says nothing behind the prompt")
    return prompt, answers[0], answers[1]


def _prompt_and_texts(
    mapping: Mapping[str, Any], data: "Data", texts: Sequence[str], where: str
) -> tuple[list[Message], list[str]]:
    """The prompt's column and the texts; without one, what both begin with, up to a space, which is where TRL cuts."""
    if look_up(mapping, data.prompt_key)[0] or data.chat:  # a chat template needs to know where the answer begins
        return _prompt(mapping, data.prompt_key, where), list(texts)
    common = _common_length(*texts)
    common -= common > 0 and texts[0][common - 1] == " "
    return _prompt({data.prompt_key: texts[0][:common]}, data.prompt_key, where), [text[common:] for text in texts]


def _prompt_and_turns(
    mapping: Mapping[str, Any], data: "Data", conversations: list[list[Message]], where: str
) -> tuple[list[Message], list[list[Message]]]:
    """Conversations that begin with the assistant are answers to the prompt's column. Others begin with their prompt,
    which is what both have in common, whatever column repeats it."""
    if all(one and one[0]["role"] == "assistant" for one in conversations):
        return _prompt(mapping, data.prompt_key, where), conversations
    common = _common_length(*conversations)
    for one, key in zip(conversations, (data.chosen_key, data.rejected_key), strict=True):
        if len(one) > common and one[common]["role"] != "assistant":
            raise UserError(
                f"{where}, column `{key}`: message {common} is of the {one[common]['role']}, and not the same in "
                f"`{data.chosen_key}` and `{data.rejected_key}`: they would answer different prompts"
            )
    return conversations[0][:common], [one[common:] for one in conversations]


def _common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (own, others) in pairs if own != others), min(len(one), len(other)))


def _conversation_column(mapping: Mapping[str, Any], data: "Data") -> str | None:
    """The column with the whole conversation of a row that is trained on."""
    found = next((name for name in CONVERSATIONS if mapping.get(name) is not None), None)
    return found if data.completion_key is None else None


def _sharegpt_system(mapping: Mapping[str, Any], data: "Data", with_completion: bool) -> str | None:
    """The system message that rows of this kind may have in a column of its own."""
    column = _conversation_column(mapping, data) if with_completion else data.prompt_key
    system = mapping.get("system") if column == CONVERSATIONS[1] else None
    return system if isinstance(system, str) and system.strip() else None


def _conversation(value: Any, column: str, where: str) -> list[Message]:
    """Messages as they are, or as JSON text; with tool calls and whatever else a chat template may read of them."""
    value = _parsed(value, column, where) if isinstance(value, str) else value
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UserError(f"{where}: column `{column}` must be a list of messages, not {_kind(value)}")
    where = f"{where}: column `{column}`"
    return [_message(item, f"{where}, message {number}", any_keys=True) for number, item in enumerate(value)]


def _parsed(text: str, column: str, where: str) -> Any:
    try:
        return json_value(text)
    except ValueError as error:
        raise UserError(f"{where}: column `{column}` is text that is not valid JSON: {error}") from error


def json_value(text: str) -> Any:
    """What is in a JSON text. Raises a ValueError, which is a JSONDecodeError where the text is none at some place;
    a number may also have too many digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _tools(mapping: Mapping[str, Any], column: str | None, where: str) -> list[dict[str, Any]]:
    """The row's tools: a list, or JSON text, as data sets have it whose tools have different parameters."""
    given = None if column is None else look_up(mapping, column)[1]
    if column is None or given is None or (isinstance(given, str) and not given.strip()):
        return []
    given = _parsed(given, column, where) if isinstance(given, str) else given
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, list):
        raise UserError(f"{where}: column `{column}` must be a list of tools, not {_kind(given)}")
    tools = [_parsed(tool, column, where) if isinstance(tool, str) else tool for tool in given]
    for number, tool in enumerate(tools):
        if _called_name(tool) is None:
            raise UserError(
                f"{where}: column `{column}`, tool {number} has no name; a tool is "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}. If the column is something else, '
                "name another with `data.tools_key`, or set it to null"
            )
    return tools


def _called_name(call: Any) -> str | None:
    """The name in a tool or in a call of one, with or without `function` around it."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and name else None


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """Tool calls whose arguments are objects, as chat templates want them; many data sets have them as JSON text."""
    calls = calls.tolist() if hasattr(calls, "tolist") else calls
    if not isinstance(calls, list) or any(_called_name(call) is None for call in calls):
        raise UserError(
            f'{where}: `tool_calls` must be a list of {{"type": "function", "function": {{"name": ..., "arguments": '
            "...}}, one for each call"
        )
    return [_with_parsed_arguments(call, where) for call in calls]


def _with_parsed_arguments(call: Any, where: str) -> Any:
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = {**function, "arguments": json_value(function["arguments"])}
    except ValueError as error:
        raise UserError(f"{where}: the arguments of a tool call are not valid JSON: {error}") from error
    return {**call, "function": parsed} if "function" in call else parsed


def _column(mapping: Mapping[str, Any], key: str, setting: str, where: str) -> Any:
    found, value = look_up(mapping, key)
    if found:
        return value
    columns = ", ".join(f"`{name}`" for name in mapping) or "none"
    raise UserError(f"{where}: no column `{key}`; set {setting} to one of its columns: {columns}")


def look_up(mapping: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """Whether there is such a column, and its value; a dot goes into nested columns."""
    if key in mapping:
        return True, mapping[key]
    outer, _, inner = key.partition(".")
    if inner and isinstance(mapping.get(outer), Mapping):
        return look_up(mapping[outer], inner)
    return False, None


def number_in(mapping: Mapping[str, Any], column: str, setting: str, where: str) -> float:
    """The number in a column that `setting` names."""
    value = _column(mapping, column, setting, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise UserError(f"{where}: column `{column}` must be a number for {setting}, not {value!r:.40}")
    return float(value)


def _prompt(mapping: Mapping[str, Any], column: str, where: str) -> list[Message]:
    value = _column(mapping, column, "data.prompt_key", where)
    if hasattr(value, "tolist"):  # what pandas makes of a list
        value = value.tolist()
    if isinstance(value, str):
        value = _messages_in(value, column, where)
    if isinstance(value, str):
        messages = [Message(role="user", content=value)]
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        messages = [
            _message(item, f"{where}: column `{column}`, message {number} of the prompt")
            for number, item in enumerate(value)
        ]
    else:
        raise UserError(f"{where}: the prompt must be text or a list of chat messages, not {_kind(value)}")
    if not any(message["content"].strip() for message in messages):
        raise UserError(f"{where}: the prompt is empty")
    return messages


def _messages_in(text: str, column: str, where: str) -> Any:
    """What is in a column of text: the text, or the messages that it is in JSON. A column called `messages` is never
    the question itself, and a list of objects with roles is nothing that is asked as it stands."""
    is_named = column.rpartition(".")[2] in CONVERSATIONS
    if is_named or text.lstrip().startswith("["):
        with nullcontext() if is_named else suppress(UserError):
            found = _parsed(text, column, where)
            is_conversation = isinstance(found, list) and all(isinstance(one, Mapping) for one in found)
            if is_conversation and found and (is_named or all("role" in one or "from" in one for one in found)):
                return found
            if is_named:
                raise UserError(f"{where}: column `{column}` must be a list of messages, also as JSON text")
    return text


def _message(item: Any, where: str, any_keys: bool = False) -> Message:
    if not isinstance(item, Mapping):
        raise UserError(f"{where} must have `role` and `content`; it is {_kind(item)}")
    if "from" in item and "role" not in item:
        item = _from_sharegpt(item, where)
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        content = ""
    images: list[str | bytes] = []
    if isinstance(content, list):
        try:
            content, images = read_parts(content, Path(where).parent)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
    for key, value in (("role", item.get("role")), ("content", content)):
        if not isinstance(value, str):
            raise UserError(f"{where}: `{key}` must be text, not {_kind(value)}")
    others = {key: value for key, value in item.items() if key not in ("role", "content") and value is not None}
    unknown = [] if any_keys else [key for key in others if key not in MESSAGE_KEYS]
    if unknown:
        known = ", ".join(f"`{key}`" for key in ("role", "content", *MESSAGE_KEYS))
        raise UserError(f"{where} has `{unknown[0]}`; what is supported is {known}")
    if "tool_calls" in others:
        others["tool_calls"] = _tool_calls(others["tool_calls"], where)
    message: Message = {"role": item["role"], "content": str(content), **others}  # type: ignore[typeddict-item]
    return {**message, "images": images} if images else message


def _from_sharegpt(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    speaker, text = item["from"], item.get("value")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise UserError(f"{where}: `from: {speaker!r:.40}` is not known as a role; what is known is {known}")
    return {"role": SHAREGPT_ROLES[speaker], "content": text}


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
