"""Public data sets as parquet files in verl's row layout, from the hub or from a local copy.

To add one: write a function from the data set's columns to question and answer, and add it to `DATA_SETS`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from corral.data.answers import after_hashes, last_boxed
from corral.data.countries import prepare_countries
from corral.data.plugins import did_you_mean
from corral.data.sources import READERS, Located, parse_json, read_files, read_hub
from corral.recipe.errors import UserError

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Problem:
    question: str
    solution: str
    """Worked out."""
    answer: str
    """The final one, to compare with."""


@dataclass(frozen=True)
class DataSet:
    hub_name: str
    hub_subset: str | None
    instruction: str
    """Put after every question."""
    read: Callable[[Mapping[str, Any]], Problem]
    """From the columns of the data set; KeyError for a missing one, ValueError for a bad one."""


def prepare(name: str, out_dir: Path, local: Path | None = None) -> list[Path]:
    """Write `train.parquet` and `test.parquet` of the data set; `local` is a folder with a copy of it. Sets that come
    with a package have files of their own."""
    if name in PACKAGED:
        if local is not None:
            raise UserError(f"data set `{name}` comes with a package; leave out --local")
        return PACKAGED[name](out_dir)
    if name not in DATA_SETS:
        known = [*DATA_SETS, *PACKAGED]
        raise UserError(f"no data set `{name}`{did_you_mean(name, known)}; there are {', '.join(known)}")
    data_set = DATA_SETS[name]
    tables = {}
    for split in SPLITS:
        located = (
            read_hub(data_set.hub_name, data_set.hub_subset, split) if local is None else _read_local(local, split)
        )
        rows = [_verl_row(data_set, where, columns, split, index) for index, (where, columns) in enumerate(located)]
        tables[split] = pyarrow.Table.from_pylist(rows)
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = [out_dir / f"{split}.parquet" for split in SPLITS]
    for split, path in zip(SPLITS, paths, strict=True):
        pyarrow.parquet.write_table(tables[split], path)
    return paths


def _read_local(folder: Path, split: str) -> Iterator[Located]:
    """`train.jsonl` (or .json, .parquet), or a folder `train` with one problem per .json file in it, at any depth."""
    for suffix in READERS:
        if (folder / f"{split}{suffix}").is_file():
            return read_files([str(folder / f"{split}{suffix}")])
    if (folder / split).is_dir():
        return _read_problem_files(folder / split)
    expected = ", ".join(f"{split}{suffix}" for suffix in READERS)
    raise UserError(f"{folder} has none of {expected}, nor a folder {split}")


def _read_problem_files(folder: Path) -> Iterator[Located]:
    for path in sorted(folder.rglob("*.json")):
        yield str(path), parse_json(path.read_text(encoding="utf-8"), str(path))


def _verl_row(data_set: DataSet, where: str, columns: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    try:
        problem = data_set.read(columns)
    except KeyError as error:
        raise UserError(f"{where}: no column {error}; it has {', '.join(columns)}") from error
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    return {
        "data_source": data_set.hub_name,
        "prompt": [{"role": "user", "content": f"{problem.question} {data_set.instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "question": problem.question, "answer": problem.solution},
    }


def _gsm8k(columns: Mapping[str, Any]) -> Problem:
    answer = after_hashes(columns["answer"])
    if answer is None:
        raise ValueError("the answer has no `####` line")
    return Problem(columns["question"], columns["answer"], answer.replace(",", ""))


def _math(columns: Mapping[str, Any]) -> Problem:
    answer = last_boxed(columns["solution"])
    if answer is None:
        raise ValueError(r"the solution has no \boxed{} answer")
    return Problem(columns["problem"], columns["solution"], answer)


DATA_SETS = {
    "gsm8k": DataSet(
        hub_name="openai/gsm8k",
        hub_subset="main",
        instruction='Let\'s think step by step and output the final answer after "####".',
        read=_gsm8k,
    ),
    "math": DataSet(
        hub_name="DigitalLearningGmbH/MATH-lighteval",
        hub_subset=None,
        instruction=r"Let's think step by step and output the final answer within \boxed{}.",
        read=_math,
    ),
}
PACKAGED = {"countries": prepare_countries}
