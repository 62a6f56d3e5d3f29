"""Rows with answers become tokens, of which those are trained on that the model itself would have to say."""

import json
import re
from typing import Any

import numpy as np
import pytest
from tiny import TEMPLATE, tiny_tokenizer

from corral.data.rows import row_from_mapping
from corral.data.supervised import fit_rows, render_row
from corral.recipe.errors import UserError
from corral.recipe.schema import Data

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "4+4?"},
    {"role": "assistant", "content": "8 it is"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
WITH_CALL = [
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]
CALLING = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for call in message['tool_calls'] or [] %}{{ call.function.arguments | tojson }}"
    "{% endfor %}",
)
CLOSED_EARLY = TEMPLATE.replace(
    "{{ message['content'] }}<|end|>\n",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}<|end|>{{ '\\n' }}",
)
THINKING = TEMPLATE.replace("<|start|>assistant\n", "<|start|>assistant\n<think>")
FORGETFUL = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message['role'] == 'assistant' %}!{% endif %}{{ message['content'] }}",
)


def trained_text(mapping: dict[str, Any], template: str = TEMPLATE, chat: bool = True, **keys: Any) -> list[str]:
    """What is trained on of a row, run by run."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    data = Data.model_validate({"train": {"path": "rows.jsonl"}, "chat": chat, **keys})
    tokens, trained = render_row(tokenizer, row_from_mapping(mapping, data, "rows.jsonl:1", with_completion=True), chat)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(int), [0]])))
    return [tokenizer.decode(tokens[start:end]) for start, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("template", [TEMPLATE, CLOSED_EARLY])
def test_turns_of_the_assistant_in_a_prompt_are_trained_on_in_a_conversation_only(template: str) -> None:
    two_columns = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    assert [text.removesuffix("<|end|>") for text in trained_text(two_columns, template)] == ["8 it is"]
    one_column = {"messages": MESSAGES}
    assert [text.removesuffix("<|end|>") for text in trained_text(one_column, template)] == ["5", "8 it is"]


@pytest.mark.parametrize(
    ("mapping", "keys"),
    [
        ({"messages": MESSAGES[1:3]}, {}),
        ({"messages": json.dumps(MESSAGES[1:3]), "prompt": "another"}, {}),
        ({"prompt": "2+3?", "completion": "5"}, {}),
        ({"prompt": MESSAGES[:2], "completion": MESSAGES[2:3]}, {}),
        ({"question": "2+3?", "answer": "5"}, {}),
        ({"prompt": "2+3?", "answer": 5}, {}),
        ({"text": "2+3?", "reply": "5"}, {"prompt_key": "text", "completion_key": "reply"}),
        ({"prompt": "2+3?", "extra_info": {"answer": "5"}}, {"completion_key": "extra_info.answer"}),
    ],
    ids=["messages", "json", "completion", "messages in both", "gsm8k", "answer", "named columns", "nested"],
)
def test_every_form_of_row_trains_the_answer_and_the_end_of_the_turn(
    mapping: dict[str, Any], keys: dict[str, Any]
) -> None:
    assert trained_text(mapping, **keys) == ["5<|end|>"]


@pytest.mark.parametrize("template", [TEMPLATE, CLOSED_EARLY], ids=["turn by turn", "generation blocks"])
def test_all_turns_of_the_assistant_are_trained_on_with_their_ends(template: str) -> None:
    assert trained_text({"messages": MESSAGES}, template) == ["5<|end|>", "8 it is<|end|>"]


def test_a_reference_answer_may_be_another_than_the_answer_that_is_trained_on() -> None:
    data = Data.model_validate({"train": {"path": "x.jsonl"}, "completion_key": "solution"})
    row = row_from_mapping({"prompt": "2+3?", "solution": "2+3=5", "answer": "5"}, data, with_completion=True)
    assert (row.answer, row.completion[0]["content"]) == ("5", "2+3=5")
    row = row_from_mapping({"messages": MESSAGES}, Data(train={"path": "x.jsonl"}), with_completion=True)
    assert (row.answer, row.prompt) == ("8 it is", MESSAGES[:4])


def test_tool_calls_are_trained_on_where_the_template_renders_them() -> None:
    assert trained_text({"messages": WITH_CALL}, CALLING) == ['{"a": 2, "b": 3}<|end|>', "It is 5.<|end|>"]
    with pytest.raises(UserError, match=r"rows.jsonl:1 has tool calls, and the model's chat template does not render"):
        trained_text({"messages": WITH_CALL})


def test_text_without_a_template_ends_with_the_end_token() -> None:
    assert trained_text({"prompt": "2+3=", "completion": "5"}, chat=False) == ["5<|end|>"]
    with pytest.raises(UserError, match="needs the chat template"):
        trained_text({"messages": MESSAGES}, chat=False)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (THINKING, "message 2, a turn of the assistant, does not begin with the generation prompt"),
        (FORGETFUL, "message 2, a turn of the assistant, changes when messages follow it"),
    ],
    ids=["thinking", "forgetful"],
)
def test_a_template_whose_turns_are_not_what_it_prompts_for_is_refused(template: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        trained_text({"messages": MESSAGES}, template)


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ({"messages": MESSAGES[:2]}, "rows.jsonl:1 has nothing to train on: there is no message of the assistant"),
        ({"prompt": "2+3?", "completion": ""}, "rows.jsonl:1 has nothing to train on: the answer is empty"),
        ({"prompt": "2+3?"}, "rows.jsonl:1 has nothing to train on"),
        ({"messages": "[{"}, "rows.jsonl:1: column `messages` is text that is not valid JSON"),
        (
            {"prompt": "2+3?", "answer": "5", "tools": "[{"},
            "rows.jsonl:1: column `tools` is text that is not valid JSON",
        ),
        ({"messages": 5}, "rows.jsonl:1: column `messages` must be a list of messages, not int"),
        ({"text": "2+3?"}, "rows.jsonl:1: no column `prompt`"),
    ],
)
def test_a_row_without_anything_to_train_on_is_an_error_that_names_it(mapping: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem.replace("[", r"\[")):
        trained_text(mapping)


# --- pairs


def pair_texts(mapping: dict[str, Any], template: str = TEMPLATE, chat: bool = True, **keys: Any) -> list[str]:
    """Of the chosen and the rejected answer, what stands before what is trained on, and that."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    data = Data.model_validate({"train": {"path": "rows.jsonl"}, "chat": chat, **keys})
    row = row_from_mapping(mapping, data, "rows.jsonl:1", with_rejected=True)
    [prepared], _ = fit_rows([row], tokenizer, chat, 1000, "error")
    assert prepared.rejected is not None
    found = []
    for one in (prepared, prepared.rejected):
        assert one.trained is not None
        first = int(one.trained.argmax())
        trained = tokenizer.decode([token for token, own in zip(one.tokens, one.trained, strict=True) if own])
        found += [tokenizer.decode(one.tokens[:first]), trained]
    return found


USER, FIVE, SIX = MESSAGES[1], {"role": "assistant", "content": "5"}, {"role": "assistant", "content": "6"}


@pytest.mark.parametrize(
    ("mapping", "keys"),
    [
        ({"prompt": "2+3?", "chosen": "5", "rejected": "6"}, {}),
        ({"prompt": [USER], "chosen": [FIVE], "rejected": [SIX]}, {}),
        ({"prompt": "2+3?", "chosen": [FIVE], "rejected": [SIX]}, {}),
        ({"chosen": [USER, FIVE], "rejected": [USER, SIX]}, {}),
        ({"prompt": "repeated", "chosen": [USER, FIVE], "rejected": [USER, SIX]}, {}),
        ({"q": "2+3?", "a": {"good": "5"}, "b": "6"}, {"prompt_key": "q", "chosen_key": "a.good", "rejected_key": "b"}),
    ],
    ids=["texts", "messages", "text and messages", "conversations", "with their prompt repeated", "named columns"],
)
def test_every_form_of_pair_has_one_prompt_and_two_answers(mapping: dict[str, Any], keys: dict[str, Any]) -> None:
    prompt = "<|start|>user\n2+3?<|end|>\n<|start|>assistant\n"
    assert pair_texts(mapping, **keys) == [prompt, "5<|end|>", prompt, "6<|end|>"]


@pytest.mark.parametrize("template", [TEMPLATE, CLOSED_EARLY], ids=["turn by turn", "generation blocks"])
def test_turns_of_the_assistant_in_the_prompt_of_a_pair_are_not_trained_on(template: str) -> None:
    longer = [{"role": "assistant", "content": "5 it is."}, USER, FIVE]
    conversations = {"chosen": [*MESSAGES[:4], *longer], "rejected": [*MESSAGES[:4], SIX]}
    before, chosen, same, rejected = pair_texts(conversations, template)
    assert (chosen, rejected) == ("5 it is.<|end|>5<|end|>", "6<|end|>")
    assert before == same
    assert "2+3?<|end|>\n<|start|>assistant\n5<|end|>" in before


def test_texts_without_a_prompt_begin_with_it() -> None:
    pair = {"chosen": "2+3= 5 it is", "rejected": "2+3= 5 or 6"}
    assert pair_texts(pair, chat=False) == ["2+3= 5", " it is<|end|>", "2+3= 5", " or 6<|end|>"]


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ({"prompt": "2+3?", "chosen": "5"}, "rows.jsonl:1: no column `rejected`; set data.rejected_key to one of"),
        ({"chosen": "5", "rejected": "6"}, "rows.jsonl:1: no column `prompt`; set data.prompt_key to one of"),
        ({"chosen": [FIVE], "rejected": [SIX]}, "rows.jsonl:1: no column `prompt`"),
        ({"prompt": "2+3?", "chosen": 5, "rejected": "6"}, "rows.jsonl:1, column `chosen` must be text or a list of"),
        (
            {"prompt": "2+3?", "chosen": "5", "rejected": [SIX]},
            "rows.jsonl:1, column `chosen` and column `rejected` must",
        ),
        ({"prompt": "2+3?", "chosen": "5", "rejected": "5"}, "rows.jsonl:1, column `chosen` is the same as column"),
        ({"prompt": "2+3?", "chosen": "5", "rejected": ""}, "rows.jsonl:1, column `rejected` has nothing to train on"),
        ({"chosen": [USER, FIVE], "rejected": [USER]}, "rows.jsonl:1, column `rejected` has nothing to train on"),
        (
            {"chosen": [USER, FIVE], "rejected": [{**USER, "content": "4?"}, SIX]},
            "rows.jsonl:1, column `chosen`: message 0 is of the user, and not the same in `chosen` and `rejected`",
        ),
        (
            {"chosen": [USER, {"role": "assistant"}], "rejected": [USER, SIX]},
            "rows.jsonl:1: column `chosen`, message 1: `content` must be text, not missing",
        ),
    ],
)
def test_a_pair_that_is_none_is_an_error_that_names_row_and_column(mapping: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        pair_texts(mapping)


def test_as_much_is_cut_off_the_left_of_both_answers_of_a_pair() -> None:
    data = Data.model_validate({"train": {"path": "rows.jsonl"}, "chat": False})
    pair = {"prompt": "0123456789", "chosen": "abcd", "rejected": "ef"}
    row = row_from_mapping(pair, data, with_rejected=True)
    [cut], counts = fit_rows([row], tiny_tokenizer(), False, 10, "truncate_left")
    assert cut.rejected is not None
    texts = [tiny_tokenizer().decode(one.tokens) for one in (cut, cut.rejected)]
    assert texts == ["56789abcd<|end|>", "56789ef<|end|>"]
    assert counts.num_truncated == 1
    with pytest.raises(UserError, match=r"has no token to train on within data.max_prompt_tokens: 10"):
        fit_rows([row], tiny_tokenizer(), False, 10, "truncate_right")


@pytest.mark.parametrize(
    ("overlong", "lengths"), [("filter", [26]), ("truncate_left", [26, 40]), ("truncate_right", [26, 40])]
)
def test_rows_that_are_too_long_are_filtered_or_cut(overlong: str, lengths: list[int]) -> None:
    data = Data.model_validate({"train": {"path": "rows.jsonl"}})
    answers = ("5", "5" * 30)
    rows = [row_from_mapping({"prompt": "2+3?", "answer": text}, data, with_completion=True) for text in answers]
    fitting, counts = fit_rows(rows, tiny_tokenizer(), True, 40, overlong)
    assert [len(row.tokens) for row in fitting] == lengths
    assert (counts.num_filtered, counts.num_truncated) == ((1, 0) if overlong == "filter" else (0, 1))
    for row in fitting:
        assert row.trained is not None
        assert not row.trained[0]
        assert row.trained.sum() >= 2


def test_rows_that_are_too_long_or_cut_to_nothing_are_errors_that_name_them() -> None:
    data = Data.model_validate({"train": {"path": "rows.jsonl"}})
    row = row_from_mapping({"prompt": "2" * 50, "answer": "5"}, data, "rows.jsonl:7", with_completion=True)
    with pytest.raises(UserError, match=r"rows.jsonl:7 has \d+ tokens, more than data.max_prompt_tokens: 40"):
        fit_rows([row], tiny_tokenizer(), True, 40, "error")
    with pytest.raises(UserError, match=r"rows.jsonl:7 has no token to train on within data.max_prompt_tokens: 40"):
        fit_rows([row], tiny_tokenizer(), True, 40, "truncate_right")
