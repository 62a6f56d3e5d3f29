import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from corral.data.prepare import prepare
from corral.data.sources import load_rows
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Source

GSM8K = {"question": "How many clips?", "answer": "She sold 1,000+200 = <<1000+200=1200>>1200.\n#### 1,200"}
MATH = {
    "problem": "What is a half?",
    "solution": r"First \boxed{1}, or rather $\boxed{\frac{1}{2}}$.",
    "level": "Level 1",
    "type": "Algebra",
}


def write_splits(folder: Path, row: dict[str, Any]) -> Path:
    for split, num_rows in (("train", 3), ("test", 1)):
        (folder / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * num_rows)
    return folder


def test_gsm8k_is_written_in_verls_layout(tmp_path: Path) -> None:
    paths = prepare("gsm8k", tmp_path / "out", write_splits(tmp_path, GSM8K))
    assert paths == [tmp_path / "out" / "train.parquet", tmp_path / "out" / "test.parquet"]
    rows = pyarrow.parquet.read_table(paths[0]).to_pylist()
    assert len(rows) == 3
    assert rows[2] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'How many clips? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {"split": "train", "index": 2, "question": GSM8K["question"], "answer": GSM8K["answer"]},
    }


def test_what_is_written_can_be_trained_on(tmp_path: Path) -> None:
    source = Source(path=str(prepare("gsm8k", tmp_path / "out", write_splits(tmp_path, GSM8K))[1]))
    [row] = load_rows(source, Data(train=source))
    assert (row.source, row.answer) == ("openai/gsm8k", "1200")


def test_the_answer_of_math_is_what_the_last_box_holds(tmp_path: Path) -> None:
    paths = prepare("math", tmp_path / "out", write_splits(tmp_path, MATH))
    [row] = pyarrow.parquet.read_table(paths[1]).to_pylist()
    assert row["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert row["prompt"][0]["content"].startswith("What is a half? Let's think")


def test_math_can_be_a_folder_of_problems(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "algebra").mkdir(parents=True)
        (tmp_path / split / "algebra" / "1.json").write_text(json.dumps(MATH))
    paths = prepare("math", tmp_path / "out", tmp_path)
    assert [pyarrow.parquet.read_table(path).num_rows for path in paths] == [1, 1]


def test_an_unknown_data_set_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data set `gsm8`; did you mean `gsm8k`\\?; there are gsm8k, math"):
        prepare("gsm8", tmp_path, None)


def test_a_missing_split_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    write_splits(tmp_path, GSM8K)
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(
        UserError, match=r"has none of test\.parquet, test\.jsonl, test\.json, test\.csv, nor a folder test"
    ):
        prepare("gsm8k", tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, r"train\.jsonl:1: no column 'answer'; it has question"),
        ({"question": "?", "answer": "no idea"}, r"train\.jsonl:1: the answer has no `####` line"),
    ],
)
def test_a_row_that_does_not_fit_is_an_error_with_its_place(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare("gsm8k", tmp_path / "out", write_splits(tmp_path, row))
