import json
from typing import Any

import numpy as np
import pytest

from corral.data.rows import row_from_mapping
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Source

CALL = {"function": {"name": "add", "arguments": '{"a": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def data(**settings: Any) -> Data:
    return Data(train=Source(path="rows.jsonl"), **settings)


USER, BRIEF = {"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("mapping", "settings", "prompt", "answer"),
    [
        ({"prompt": "Hello", "answer": "4"}, {}, [USER], "4"),
        ({"prompt": [BRIEF, USER]}, {}, [BRIEF, USER], None),
        ({"prompt": "Hello"}, {"system": "Be brief."}, [BRIEF, USER], None),
        ({"prompt": np.array([USER], dtype=object)}, {}, [USER], None),
        ({"question": "Hello", "solution": 42}, {"prompt_key": "question", "answer_key": "solution"}, [USER], 42),
        ({"prompt": "Hello", "meta": {"gold": {"value": 7}}}, {"answer_key": "meta.gold.value"}, [USER], 7),
    ],
    ids=["text", "chat", "the system message first", "an array", "columns of other names", "nested columns"],
)
def test_a_row_has_a_prompt_of_messages_and_an_answer_or_none(
    mapping: dict[str, Any], settings: dict[str, Any], prompt: list[dict[str, str]], answer: object
) -> None:
    row = row_from_mapping({**mapping, "level": 1}, data(**settings))
    assert (row.prompt, row.answer, row.extra["level"]) == (prompt, answer, 1)


def test_messages_may_be_json_text() -> None:
    """ROLL's data sets have them so, beside the plain question."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = ?"}]
    columns = {"prompt": "2 + 2 = ?", "messages": json.dumps(messages), "conversation": json.dumps(messages)}
    for key in ("messages", "conversation"):
        assert row_from_mapping(columns, data(prompt_key=key)).prompt == messages


@pytest.mark.parametrize("question", ["[1, 2] has how many items?", "[1, 2]", '[{"name": "x"}]', "[]"])
def test_a_question_that_looks_like_json_is_a_question(question: str) -> None:
    assert row_from_mapping({"prompt": question}, data()).prompt == [{"role": "user", "content": question}]


@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_and_tools_are_read_from_rows(as_text: bool) -> None:
    messages = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    columns = {"messages": json.dumps(messages) if as_text else messages, "functions": [TOOL]}
    row = row_from_mapping(columns, data(prompt_key="messages", tools_key="functions"))
    assert row.prompt[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
    }
    assert row.prompt[2] == messages[2]
    assert row.tools == [TOOL]
    assert row_from_mapping({"prompt": "x", "tools": json.dumps([TOOL])}, data()).tools == [TOOL]
    assert row_from_mapping({"prompt": "x", "tools": 5}, data(tools_key=None)).tools == []


def test_a_column_of_another_name_says_where_a_row_is_from() -> None:
    """ROLL's rows have it in `tag`."""
    row = row_from_mapping({"prompt": "x", "tag": "aime", "data_source": "y"}, data(source_key="tag"))
    assert (row.source, row.extra) == ("aime", {"data_source": "y"})


def test_verl_rows_are_read_as_they_are() -> None:
    row = row_from_mapping(
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"content": "How many?", "role": "user"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"index": 3, "split": "train"},
        },
        data(),
    )
    assert row.source == "openai/gsm8k"
    assert row.answer == "72"
    assert row.extra["ability"] == "math"
    assert row.extra["extra_info"] == {"index": 3, "split": "train"}


def test_the_template_goes_around_the_last_user_message_and_leaves_other_braces_alone() -> None:
    prompt = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": r"\frac{1}{2}"},
    ]
    row = row_from_mapping({"prompt": prompt}, data(template=r"{prompt} in \boxed{}"))
    assert [message["content"] for message in row.prompt] == ["first", "yes?", r"\frac{1}{2} in \boxed{}"]


@pytest.mark.parametrize(
    ("mapping", "settings", "message"),
    [
        ({"question": "?", "answer": "!"}, {}, "no column `prompt`; set data.prompt_key.*`question`, `answer`"),
        ({"prompt": "?"}, {"answer_key": "gold"}, "no column `gold`; set data.answer_key.*`prompt`"),
        ({"prompt": 3}, {}, "must be text or a list of chat messages, not int"),
        ({"prompt": None}, {}, "must be text or a list of chat messages, not missing"),
        ({"prompt": "  "}, {}, "the prompt is empty"),
        ({"prompt": []}, {}, "the prompt is empty"),
        ({"prompt": ["hello"]}, {}, "message 0 of the prompt must have `role` and `content`"),
        ({"prompt": [{"role": "user"}]}, {}, "message 0 of the prompt: `content` must be text, not missing"),
        ({"prompt": [{"role": "user", "content": "x", "weight": 1}]}, {}, "message 0 of the prompt has `weight`"),
        (
            {"prompt": [{"role": "assistant", "tool_calls": [1]}]},
            {},
            "column `prompt`, message 0.*`tool_calls` must be",
        ),
        ({"prompt": [{"role": "assistant", "tool_calls": CALL | {"id": 1}}]}, {}, "`tool_calls` must be a list"),
        ({"prompt": [{"role": "user", "content": None}]}, {}, "`content` must be text, not missing"),
        ({"messages": "[{"}, {"prompt_key": "messages"}, "column `messages` is text that is not valid JSON"),
        ({"messages": "hello"}, {"prompt_key": "messages"}, "column `messages` is text that is not valid JSON"),
        ({"messages": "{}"}, {"prompt_key": "messages"}, "column `messages` must be a list of messages"),
        ({"messages": '[{"role": "user"}]'}, {"prompt_key": "messages"}, "column `messages`, message 0.*`content`"),
        ({"prompt": "x", "tools": "[{"}, {}, "column `tools` is text that is not valid JSON"),
        ({"prompt": "x", "tools": {"name": "add"}}, {}, "column `tools` must be a list of tools, not dict"),
        ({"prompt": "x", "tools": ['{"type": "function"}']}, {}, "column `tools`, tool 0 has no name"),
        ({"prompt": [{"role": "system", "content": "x"}]}, {"system": "y"}, "has a system message of its own"),
        ({"prompt": [{"role": "system", "content": "x"}]}, {"template": "{prompt}"}, "no user message"),
        ({"prompt": "x", "data_source": 3}, {}, "`data_source` must be text"),
        ({"prompt": "half \ud800"}, {}, r"'half .ud800' is not text: it has half of a surrogate pair"),
        ({"prompt": "x", "reward_model": {"ground_truth": "\udfff"}}, {}, "is not text"),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, {"prompt_key": "messages"}, "is not text"),
        ({"prompt": [{"from": ["human"], "value": "x"}]}, {}, "message 0.*is not known as a role"),
        ({"prompt": "<image>", "images": ["~nobody~"]}, {}, "no image ~nobody~"),
    ],
)
def test_what_is_wrong_with_a_row_is_an_error_with_its_place(
    mapping: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=rf"^train\.jsonl:7: .*{message}"):
        row_from_mapping(mapping, data(**settings), "train.jsonl:7")


def test_a_template_without_a_place_for_the_prompt_is_an_error() -> None:
    with pytest.raises(UserError, match=r"data\.template must contain `\{prompt\}`"):
        row_from_mapping({"prompt": "x"}, data(template="Think."))


SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}, {"from": "human", "value": "+ 1?"}]


@pytest.mark.parametrize("as_text", [False, True])
def test_conversations_of_sharegpt_are_read(as_text: bool) -> None:
    answered = [*SHAREGPT, {"from": "gpt", "value": "5", "weight": 1}]
    given = json.dumps(answered) if as_text else answered
    row = row_from_mapping({"conversations": given, "system": "Be brief."}, data(), with_completion=True)
    assert [(one["role"], one["content"]) for one in row.prompt] == [
        ("system", "Be brief."),
        ("user", "2 + 2?"),
        ("assistant", "4"),
        ("user", "+ 1?"),
    ]
    assert row.completion == [{"role": "assistant", "content": "5"}]
    prompt = {"conversations": json.dumps(SHAREGPT) if as_text else SHAREGPT}
    assert row_from_mapping(prompt, data(prompt_key="conversations")).prompt[-1]["content"] == "+ 1?"


def test_a_speaker_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match=r"message 0.*`from: 'narrator'` is not known as a role"):
        row_from_mapping({"conversations": [{"from": "narrator", "value": "x"}]}, data(), with_completion=True)


@pytest.mark.parametrize("column", ["messages", "conversations", "prompt"])
def test_a_prompt_that_ends_with_the_answer_is_refused_and_trained_on_by_sft(column: str) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(UserError, match=rf"train:7: column `{column}` ends with a message of the assistant"):
        row_from_mapping({column: messages, "answer": "4"}, data(prompt_key=column), "train:7")
    if column != "prompt":
        row = row_from_mapping({column: messages}, data(), with_completion=True)
        assert (row.prompt, row.completion) == (messages[:1], messages[1:])
