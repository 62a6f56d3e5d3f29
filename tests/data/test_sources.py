import csv
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from corral.data.rows import Row
from corral.data.sources import OverlongCounts, fit_prompts, load_rows, render_prompt
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Source

ROWS = [{"prompt": f"question {number}", "answer": str(number)} for number in range(5)]


def load(path: object, source: dict[str, Any] | None = None, **data: Any) -> list[Row]:
    described = Source(path=path if isinstance(path, list) else str(path), **(source or {}))
    return load_rows(described, Data(train=described, **data))


def questions(rows: list[Row]) -> list[str]:
    return [row.prompt[-1]["content"] for row in rows]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_is_read(tmp_path: Path) -> None:
    rows = load(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    assert [(row.prompt[0]["content"], row.answer) for row in rows] == [(row["prompt"], row["answer"]) for row in ROWS]


def test_rows_of_several_sources_have_their_names(tmp_path: Path) -> None:
    own = write_jsonl(tmp_path / "own.jsonl", [ROWS[0], {**ROWS[1], "data_source": "openai/gsm8k"}])
    others = write_jsonl(tmp_path / "others.jsonl", ROWS[2:])
    source = Source.model_validate(
        {"sources": {"mine": {"path": str(own)}, "others": {"path": str(others), "max_rows": 2}}}
    )
    rows = load_rows(source, Data(train=source))
    assert questions(rows) == [f"question {number}" for number in range(4)]
    assert [row.source for row in rows] == ["mine", "openai/gsm8k", "others", "others"]
    assert [row.source_name for row in rows] == ["mine", "mine", "others", "others"]


def test_filters_leave_out_rows_outside_of_a_range_and_count_them(tmp_path: Path) -> None:
    rows = [{**row, "stats": {"rate": i / 4}, "level": i} for i, row in enumerate(ROWS)]
    source = Source.model_validate(
        {
            "path": str(write_jsonl(tmp_path / "rows.jsonl", rows)),
            "filters": {"stats.rate": [0.25, None], "level": [None, 3]},
        }
    )
    lines: list[str] = []
    assert questions(load_rows(source, Data(train=source), report=lines.append)) == [f"question {i}" for i in (1, 2, 3)]
    assert lines == [f"{source.path}: 2 of 5 rows left out by `filters` (1 by `stats.rate`, 1 by `level`)"]
    first = source.first_rows(1)
    assert questions(load_rows(first, Data(train=first))) == ["question 1"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, r"rows.jsonl:1: no column `rate`; set `filters` to one of its columns"),
        ({"rate": "high"}, r"rows.jsonl:1: column `rate` must be a number for `filters`, not 'high'"),
        ({"rate": None}, r"rows.jsonl:1: column `rate` must be a number for `filters`, not None"),
        ({"rate": 0.5}, r"there are no rows in it but those that `filters` leave out"),
    ],
)
def test_a_filter_on_something_else_than_a_number_is_an_error_with_its_place(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{**ROWS[0], **row}])
    with pytest.raises(UserError, match=problem):
        load(path, {"filters": {"rate": (0.6, None)}})


def test_a_json_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert questions(load(tmp_path / "rows.json")) == [row["prompt"] for row in ROWS]


def test_parquet_is_read_with_nested_columns(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "How many?"}], "reward_model": {"ground_truth": "72", "style": "rule"}}
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    [row] = load(tmp_path / "rows.parquet")
    assert (row.prompt, row.answer) == ([{"role": "user", "content": "How many?"}], "72")


def test_globs_are_read_in_alphabetical_order_and_lists_in_theirs(tmp_path: Path) -> None:
    for name, row in zip("bac", ROWS, strict=False):
        write_jsonl(tmp_path / f"{name}.jsonl", [row])
    assert questions(load(tmp_path / "*.jsonl")) == ["question 1", "question 0", "question 2"]
    listed = [str(tmp_path / "c.jsonl"), str(tmp_path / "b.jsonl")]
    assert questions(load(listed)) == ["question 2", "question 0"]


def test_max_rows_takes_the_first_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    assert questions(load(path, {"max_rows": 2})) == ["question 0", "question 1"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("trian.jsonl", None, r"no file .*trian\.jsonl; did you mean `train\.jsonl`\?"),
        ("*.parquet", None, r"no file matches .*\*\.parquet"),
        ("", None, r"is a folder; name its files, such as .*\*\.parquet"),
        ("a.xlsx", "x", r"unknown extension `\.xlsx`; Corral reads \.parquet, \.jsonl, \.json, \.csv"),
        ("a.parquet.gz", "x", r"unknown extension `\.parquet\.gz`; Corral reads \.parquet, \.jsonl, \.json, \.csv"),
        ("a.jsonl", "", "there are no rows"),
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": \n', r"a\.jsonl:3: not valid JSON"),
        ("a.json", '[\n{"prompt": "x"},\nnonsense]', r"a\.json:3: not valid JSON"),
        ("a.json", '{"prompt": "x"}', r"must be a list of objects; .* is named \.jsonl"),
        ("a.jsonl", "3\n", r"a\.jsonl:1: a row must be an object with columns, not int"),
        ("a.parquet", "not parquet at all", r"a\.parquet can't be read as parquet"),
        ("a.csv", "prompt,answer\nx\n", r"a\.csv:2: the row has more or fewer values; 2 columns"),
        ("a.csv", "prompt,answer\nx,1,2\n", r"a\.csv:2: the row has more or fewer values"),
        ("a.csv", 'prompt,answer\n"x,1\n', r"a\.csv:2: not valid CSV"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_with_the_reason_and_the_line(
    tmp_path: Path, name: str, content: str | None, problem: str
) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=problem):
        load(tmp_path / name)


def test_a_damaged_page_of_parquet_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS * 100), path, compression="snappy")
    content = bytearray(path.read_bytes())
    content[4:100] = bytes(96)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet can't be read as parquet"):
        load(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_a_line_has_a_largest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("corral.data.sources.MAX_LINE", 1000)
    with gzip.open(tmp_path / name, "wt") as file:
        file.write('{"prompt": "x"}\n' + "x" * 2000)
    with pytest.raises(UserError, match=rf"{name}:2: the line has more than 1000 characters"):
        load(tmp_path / name)


def test_a_bad_row_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "x"}, {"prompt": ""}]), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet\[1\]: the prompt is empty"):
        load(tmp_path / "rows.parquet")


def test_a_key_that_would_do_nothing_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    for key, value in {"split": "train", "size": 3, "options": {"a": 1}, "seed": 5}.items():
        with pytest.raises(UserError, match=f"`{key}` would do nothing, because the source is files"):
            load(path, {key: value})


def test_a_function_in_a_file_gives_rows(tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text(
        "def squares(n):\n    for i in range(n):\n        yield {'prompt': f'{i} squared?', 'answer': i * i}\n"
    )
    rows = load(f"{tmp_path}/my_rows.py:squares", {"options": {"n": 3}})
    assert [(row.prompt[0]["content"], row.answer) for row in rows][-1] == ("2 squared?", 4)


def test_a_function_in_a_module_gives_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_with_rows.py").write_text("def rows():\n    return [{'prompt': 'hello'}]\n")
    monkeypatch.chdir(tmp_path)
    assert questions(load("module_with_rows:rows")) == ["hello"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_here:rows", "there is no module `no_such_module_here`"),
        ("json:lods", "`json` has no `lods`; did you mean `loads`?"),
        ("json:__name__", "json:__name__ is not a function"),
        ("no_such_file.py:rows", "no file .*no_such_file.py"),
        ("json:not a name", "is neither `module:name` nor `file.py:name`"),
    ],
)
def test_a_function_that_can_not_be_found_is_an_error(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def rows():\n    raise ValueError('no disk')\n", r"failed: ValueError: no disk \(my\.py:2\)"),
        ("def rows():\n    return [3]\n", r"my\.py:rows\[0\]: a row must be an object"),
        ("def rows(:\n", "importing .* failed: .*SyntaxError"),
        ("import not_there_at_all\n", "importing .* failed: ModuleNotFoundError: .*not_there_at_all"),
    ],
)
def test_a_function_that_fails_is_an_error_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "my.py").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load(f"{tmp_path}/my.py:rows")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_local_folder_is_read_through_the_hub_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS)
    write_jsonl(folder / "test.jsonl", ROWS[:2])
    assert questions(load(f"hf:{folder}", {"split": "test"})) == ["question 0", "question 1"]
    with pytest.raises(UserError, match="set `split`; it has train, test"):
        load(f"hf:{folder}")
    datasets.Dataset.from_list(ROWS[:3]).save_to_disk(tmp_path / "saved")
    assert len(load(f"hf:{tmp_path}/saved")) == 3
    with pytest.raises(UserError, match="`split` has no effect"):
        load(f"hf:{tmp_path}/saved", {"split": "test"})


def test_without_the_hub_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=re.escape("pip install 'corral[hub]'")):
        load("hf:someone/something")


# Prompts


def tokenizer(chat_template: str | None = None, closes_texts: bool = False) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "[", "]", "\n"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if closes_texts else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = chat_template
    return made


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
PROMPT = Row([{"role": "s", "content": "be"}, {"role": "u", "content": "hi"}], None, "", {})


def spell(tokens: list[int]) -> str:
    return "".join(tokenizer().convert_ids_to_tokens(tokens))


def test_a_chat_prompt_is_rendered_up_to_the_assistants_turn() -> None:
    assert spell(render_prompt(tokenizer(TEMPLATE), PROMPT, chat=True)) == "[s]be[u]hi[a]"


@pytest.mark.parametrize("closes_texts", [False, True])
def test_without_chat_the_text_is_tokenised_as_it_is_behind_the_first_token(closes_texts: bool) -> None:
    """And no end of text is put behind it."""
    assert spell(render_prompt(tokenizer(closes_texts=closes_texts), PROMPT, chat=False)) == "<s>be\nhi"


def test_a_tokenizer_without_a_chat_template_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(UserError, match=r"`data\.chat: false`, or give `model\.chat_template`"):
        render_prompt(tokenizer(), PROMPT, chat=True)


def test_a_template_that_refuses_a_prompt_is_an_error_with_its_words() -> None:
    with pytest.raises(UserError, match="no system role"):
        render_prompt(tokenizer("{{ raise_exception('no system role') }}"), PROMPT, chat=True)


def test_tools_and_tool_calls_of_a_row_reach_the_template_or_are_an_error() -> None:
    calls = "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}"
    listed = "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}"
    template = listed + TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}" + calls)
    call = {"role": "c", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with_tools = replace(PROMPT, where="x.jsonl:3", tools=[{"function": {"name": "plus"}}])
    with_call = replace(PROMPT, where="x.jsonl:4", prompt=[*PROMPT.prompt, call])
    assert spell(render_prompt(tokenizer(template), with_tools, chat=True, needs_tools=True)) == "plus[s]be[u]hi[a]"
    assert spell(render_prompt(tokenizer(template), with_call, chat=True, needs_tools=True)) == "[s]be[u]hi[c]f[a]"
    for row, what in ((with_tools, "x.jsonl:3 has tools"), (with_call, "x.jsonl:4 has tool calls")):
        with pytest.raises(UserError, match=f"{what}, and the model's chat template does not render"):
            render_prompt(tokenizer(TEMPLATE), row, chat=True, needs_tools=True)
        with pytest.raises(UserError, match="which need the chat template"):
            render_prompt(tokenizer(template), row, chat=False, needs_tools=True)


def test_a_template_may_refuse_the_conversation_without_its_calls_or_tools() -> None:
    refused = "not tools or (m['role'] == 't' and not messages[loop.index0 - 1]['tool_calls'])"
    template = (
        f"{{% for m in messages %}}{{% if {refused} %}}{{{{ raise_exception('no call') }}}}{{% endif %}}{{% endfor %}}"
    )
    messages = [
        {"role": "u", "content": "1 + 1?"},
        {"role": "a", "content": "", "tool_calls": [{"function": {"name": "plus", "arguments": {}}}]},
        {"role": "t", "content": "2"},
    ]
    row = replace(PROMPT, prompt=messages, tools=[{"function": {"name": "plus"}}])
    assert spell(render_prompt(tokenizer(template + TEMPLATE), row, chat=True, needs_tools=True))


def rows_of_lengths(*lengths: int) -> list[Row]:
    return [
        Row([{"role": "user", "content": "x" * length}], None, "", {}, where=f"train.jsonl:{number}")
        for number, length in enumerate(lengths, 1)
    ]


def render(row: Row) -> list[int]:
    return list(range(len(row.prompt[0]["content"])))


def test_prompts_that_fit_are_left_alone() -> None:
    prompts, counts = fit_prompts(rows_of_lengths(1, 3), render, 3, "error")
    assert [prompt.tokens for prompt in prompts] == [[0], [0, 1, 2]]
    assert (counts.num_rows, counts.num_filtered, counts.num_truncated) == (2, 0, 0)


def test_an_overlong_prompt_is_an_error_that_names_the_first_and_their_number() -> None:
    with pytest.raises(UserError, match=r"2 of 4 prompts .*max_prompt_tokens: 3; the first is train.jsonl:2 with 5"):
        fit_prompts(rows_of_lengths(3, 5, 1, 4), render, 3, "error")


def test_overlong_prompts_are_filtered_and_counted() -> None:
    prompts, counts = fit_prompts(rows_of_lengths(3, 5, 1, 4), render, 3, "filter")
    assert [len(prompt.tokens) for prompt in prompts] == [3, 1]
    assert (counts.num_rows, counts.num_filtered, counts.num_truncated) == (4, 2, 0)


@pytest.mark.parametrize(("overlong", "kept"), [("truncate_left", [2, 3, 4]), ("truncate_right", [0, 1, 2])])
def test_overlong_prompts_are_truncated_and_counted(overlong: str, kept: list[int]) -> None:
    prompts, counts = fit_prompts(rows_of_lengths(1, 5), render, 3, overlong)
    assert [prompt.tokens for prompt in prompts] == [[0], kept]
    assert (counts.num_filtered, counts.num_truncated) == (0, 1)


def test_filtering_everything_away_is_an_error() -> None:
    with pytest.raises(UserError, match="no prompt is left: all 2"):
        fit_prompts(rows_of_lengths(5, 6), render, 3, "filter")


# --- files as people have them


def test_csv_is_read_as_text_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    rows = [{"prompt": 'Say "a, b"\nand more', "answer": "007"}, {"prompt": "x" * 200_000, "answer": ""}]
    with (tmp_path / "rows.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    found = load(tmp_path / "rows.csv")
    assert [(row.prompt[0]["content"], row.answer) for row in found] == [(row["prompt"], row["answer"]) for row in rows]
    assert found[0].where == f"{tmp_path}/rows.csv:3"


def test_zipped_texts_are_read_and_broken_ones_named(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    rows = load(tmp_path / "*.jsonl.gz")
    assert questions(rows) == [row["prompt"] for row in ROWS]
    assert rows[1].where == f"{tmp_path}/rows.jsonl.gz:2"
    wrong_bits = b"\x1f\x8b\x08\x00%x\xfcj\x02\x06\xff\xabVJ\xce\xcf+K-*N,\xc9\xcc\xcf+V\xb2RP2"
    for content in (gzip.compress(lines)[:-20], lines, wrong_bits):
        (tmp_path / "rows.jsonl.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"rows\.jsonl\.gz can't be read as gzip"):
            load(tmp_path / "rows.jsonl.gz")


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": ' + "9" * 5000 + "}"])
def test_nestings_and_numbers_without_end_are_errors_with_their_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(UserError, match=r"rows\.jsonl:1: not valid JSON: (it is nested too deeply|Exceeds the limit)"):
        load(tmp_path / "rows.jsonl")
    call = {"function": {"name": "a", "arguments": line}}
    row = {"prompt": [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "a"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="the arguments of a tool call are not valid JSON"):
        load(tmp_path / "rows.jsonl")


def test_the_mark_of_windows_at_the_beginning_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]), encoding="utf-8-sig")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS[:1]), encoding="utf-8-sig")
    for name in ("rows.jsonl", "rows.json"):
        assert questions(load(tmp_path / name)) == ["question 0"]


def test_parts_and_calls_without_content_survive_parquet(tmp_path: Path) -> None:
    """Which fills every key that another message has with null."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "and three?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "5"}]},
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages}]), path)
    [row] = load(path)
    assert [message["content"] for message in row.prompt] == ["Two\nand three?", "", "5"]
    assert row.prompt[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert "tool_calls" not in row.prompt[0]


# --- rows that cannot be read


def test_bad_rows_are_errors_or_skipped_counted_and_named(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    lines[1:1] = ['{"prompt": ', "3", json.dumps({"prompt": ""}), json.dumps({"question": "x"})]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not valid JSON"):
        load(path)
    source, said = Source(path=str(path)), list[str]()
    rows = load_rows(source, Data(train=source, on_bad_row="skip"), warn=said.append)
    assert questions(rows) == [row["prompt"] for row in ROWS]
    [line] = said
    assert line.startswith(f"{path}: 4 of 9 rows skipped (`data.on_bad_row`): {path}:2: not valid JSON")
    assert f"{path}:3: a row must be an object" in line
    assert f"{path}:4: the prompt is empty" in line
    assert line.endswith("; and 1 more")


def test_skipping_does_not_hide_that_every_row_is_bad(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "x"}] * 3)
    with pytest.raises(
        UserError, match=r"no rows in it but 3 that cannot be read, the first: .*:1: no column `prompt`"
    ):
        load(path, on_bad_row="skip")


def test_a_row_that_cannot_be_rendered_is_skipped_unless_all_are() -> None:
    def render(row: Row) -> list[int]:
        if row.answer == "3":
            raise UserError(f"{row.where}: the chat template refuses the prompt")
        return [1, 2]

    rows = [Row([{"role": "user", "content": "x"}], str(n), "", {}, where=f"rows[{n}]") for n in range(5)]
    with pytest.raises(UserError, match=r"rows\[3\]: the chat template"):
        fit_prompts(rows, render, 8, "error")
    prompts, counts = fit_prompts(rows, render, 8, "error", skip_bad=True)
    assert [prompt.row.answer for prompt in prompts] == ["0", "1", "2", "4"]
    assert counts == OverlongCounts(5, 0, 0, ["rows[3]: the chat template refuses the prompt"])
    with pytest.raises(UserError, match=r"rows\[3\]"):
        fit_prompts(rows[3:4], render, 8, "error", skip_bad=True)


# --- names on a hub


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hf:openai/gsm8k", "openai/gsm8k"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("me/data-v1.5", "me/data-v1.5"),
        ("hf:folder", "folder"),
        ("data/rows.jsonl", None),
        ("data/rows", None),
        ("./data/gsm8k", None),
        ("a/b/c", None),
        ("gsm8k", None),
        ("arithmetic:addition", None),
        ("my/rows.py:rows", None),
    ],
)
def test_a_name_on_the_hub_needs_no_prefix_where_no_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "rows").mkdir(parents=True)
    assert Source(path=path).hub_name == name


def test_what_is_neither_a_file_nor_on_the_hub_is_an_error_that_says_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    # The variable is read once, when these are imported; without it they try again for 20 s where there is no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hf:no/such could not be loaded: .*there is no such file here, either"):
        load("no/such")
