from typing import Any

import pytest

from corral.data.rows import row_from_mapping
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Source


def data(**settings: Any) -> Data:
    return Data(train=Source(path="rows.jsonl"), **settings)


def test_a_text_prompt_becomes_one_user_message() -> None:
    row = row_from_mapping({"prompt": "What is 2 + 2?", "answer": "4"}, data())
    assert row.prompt == [{"role": "user", "content": "What is 2 + 2?"}]
    assert row.answer == "4"


def test_a_chat_prompt_is_taken_as_it_is() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert row_from_mapping({"prompt": messages}, data()).prompt == messages


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


def test_columns_can_have_other_names() -> None:
    row = row_from_mapping(
        {"question": "Why?", "solution": 42, "level": 1}, data(prompt_key="question", answer_key="solution")
    )
    assert (row.prompt[0]["content"], row.answer, row.extra) == ("Why?", 42, {"level": 1})


def test_a_dot_goes_into_nested_columns() -> None:
    row = row_from_mapping({"prompt": "?", "meta": {"gold": {"value": 7}}}, data(answer_key="meta.gold.value"))
    assert row.answer == 7


def test_a_row_without_an_answer_has_none() -> None:
    assert row_from_mapping({"prompt": "Write a poem."}, data()).answer is None


def test_an_array_of_messages_is_read_as_a_list() -> None:
    numpy = pytest.importorskip("numpy")
    prompt = numpy.array([{"role": "user", "content": "Hello"}], dtype=object)
    assert row_from_mapping({"prompt": prompt}, data()).prompt == [{"role": "user", "content": "Hello"}]


def test_the_system_message_comes_first() -> None:
    row = row_from_mapping({"prompt": "Hello"}, data(system="Be brief."))
    assert row.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


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
        ({"prompt": [{"role": "user", "content": "x", "tool_calls": [1]}]}, {}, "has `tool_calls`"),
        ({"prompt": [{"role": "system", "content": "x"}]}, {"system": "y"}, "has a system message of its own"),
        ({"prompt": [{"role": "system", "content": "x"}]}, {"template": "{prompt}"}, "no user message"),
        ({"prompt": "x", "data_source": 3}, {}, "`data_source` must be text"),
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
