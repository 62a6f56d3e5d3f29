import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from corral.data.rows import Row
from corral.data.sources import fit_prompts, load_rows, render_prompt
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


def test_a_missing_file_is_an_error_that_names_the_nearest_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(UserError, match=r"no file .*trian\.jsonl; did you mean `train\.jsonl`\?"):
        load(tmp_path / "trian.jsonl")


def test_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file matches .*\*\.parquet"):
        load(tmp_path / "*.parquet")


def test_a_folder_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder; name its files, such as .*\*\.parquet"):
        load(tmp_path)


def test_an_unknown_extension_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    with pytest.raises(UserError, match=r"unknown extension `\.csv`; Corral reads \.parquet, \.jsonl, \.json"):
        load(tmp_path / "rows.csv")


def test_an_empty_data_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no rows"):
        load(write_jsonl(tmp_path / "rows.jsonl", []))


def test_bad_json_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": \n')
    with pytest.raises(UserError, match=r"rows\.jsonl:3: not valid JSON"):
        load(tmp_path / "rows.jsonl")
    (tmp_path / "rows.json").write_text('[\n{"prompt": "x"},\nnonsense]')
    with pytest.raises(UserError, match=r"rows\.json:3: not valid JSON"):
        load(tmp_path / "rows.json")


def test_a_json_file_that_is_no_list_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"prompt": "x"}')
    with pytest.raises(UserError, match=r"must be a list of objects; .* is named \.jsonl"):
        load(tmp_path / "rows.json")


def test_a_line_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("3\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: a row must be an object with columns, not int"):
        load(tmp_path / "rows.jsonl")


def test_a_file_that_is_not_parquet_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("not parquet at all")
    with pytest.raises(UserError, match=r"rows\.parquet can't be read as parquet"):
        load(tmp_path / "rows.parquet")


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


def test_without_chat_the_text_is_tokenised_as_it_is_behind_the_first_token() -> None:
    assert spell(render_prompt(tokenizer(), PROMPT, chat=False)) == "<s>be\nhi"


def test_without_chat_no_end_of_text_is_put_behind_the_prompt() -> None:
    assert spell(render_prompt(tokenizer(closes_texts=True), PROMPT, chat=False)) == "<s>be\nhi"


def test_a_tokenizer_without_a_chat_template_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(UserError, match=r"`data\.chat: false`, or give `model\.chat_template`"):
        render_prompt(tokenizer(), PROMPT, chat=True)


def test_a_template_that_refuses_a_prompt_is_an_error_with_its_words() -> None:
    with pytest.raises(UserError, match="no system role"):
        render_prompt(tokenizer("{{ raise_exception('no system role') }}"), PROMPT, chat=True)


def rows_of_lengths(*lengths: int) -> list[Row]:
    return [Row([{"role": "user", "content": "x" * length}], None, "", {}) for length in lengths]


def render(row: Row) -> list[int]:
    return list(range(len(row.prompt[0]["content"])))


def test_prompts_that_fit_are_left_alone() -> None:
    prompts, counts = fit_prompts(rows_of_lengths(1, 3), render, 3, "error")
    assert [prompt.tokens for prompt in prompts] == [[0], [0, 1, 2]]
    assert (counts.num_rows, counts.num_filtered, counts.num_truncated) == (2, 0, 0)


def test_an_overlong_prompt_is_an_error_that_names_the_first_and_their_number() -> None:
    with pytest.raises(UserError, match=r"2 of 4 prompts .*max_prompt_tokens: 3; the first is row 1 with 5"):
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
