"""Public data sets as files that a recipe reads: from the hub or a local copy, in verl's row layout, or from a package.

To add one: add to `DATA_SETS` which columns it has, and how the final answer is found in a solution.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from corral.data.answers import after_hashes, last_boxed
from corral.data.plugins import did_you_mean
from corral.data.sources import READERS, Located, columns_of, parse_json, read_files, read_hub
from corral.recipe.errors import UserError, install_command

SPLITS = ("train", "test")
HELD_OUT_FRACTION = 0.2
"""Fraction of the countries whose questions are for validation."""
SEED = 0
PASSAGES = {
    "Geography": ("capital", "area"),
    "Telephone and internet": ("calling code", "internet domain"),
    "Money and people": ("currency code", "demonym"),
    "Country codes": ("three-letter code", "numeric code"),
}
"""Topics of the facts in each passage about a country, by its title."""
DISSOLVED = ("Serbia and Montenegro", "Antilles néerlandaises")


@dataclass(frozen=True)
class DataSet:
    hub_name: str
    hub_subset: str | None
    question: str
    """Column of the question."""
    solution: str
    """Column of the worked-out solution."""
    find_answer: Callable[[str], str | None]
    """Finds in the solution the final answer, to compare with."""
    answer_mark: str
    """What marks it, for errors."""
    instruction: str
    """Text after every question."""


DATA_SETS = {
    "gsm8k": DataSet(
        hub_name="openai/gsm8k",
        hub_subset="main",
        question="question",
        solution="answer",
        find_answer=lambda solution: (after_hashes(solution) or "").replace(",", "") or None,
        answer_mark="`####` line",
        instruction='Let\'s think step by step and output the final answer after "####".',
    ),
    "math": DataSet(
        hub_name="DigitalLearningGmbH/MATH-lighteval",
        hub_subset=None,
        question="problem",
        solution="solution",
        find_answer=last_boxed,
        answer_mark=r"\boxed{} answer",
        instruction=r"Let's think step by step and output the final answer within \boxed{}.",
    ),
}


def prepare(name: str, out_dir: Path, local: Path | None = None) -> list[Path]:
    """Writes `train.parquet` and `test.parquet` of the data set; `local` is a folder with a copy of it. Sets that come
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
        rows = [_verl_row(data_set, where, columns_of(row), split, index) for index, (where, row) in enumerate(located)]
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
        paths = sorted((folder / split).rglob("*.json"))
        return ((str(path), parse_json(path.read_text(encoding="utf-8"), str(path))) for path in paths)
    expected = ", ".join(f"{split}{suffix}" for suffix in READERS)
    raise UserError(f"{folder} has none of {expected}, nor a folder {split}")


def _verl_row(data_set: DataSet, where: str, columns: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    try:
        question, solution = columns[data_set.question], columns[data_set.solution]
    except KeyError as error:
        raise UserError(f"{where}: no column {error}; it has {', '.join(columns)}") from error
    answer = data_set.find_answer(solution)
    if answer is None:
        raise UserError(f"{where}: the {data_set.solution} has no {data_set.answer_mark}")
    return {
        "data_source": data_set.hub_name,
        "prompt": [{"role": "user", "content": f"{question} {data_set.instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution},
    }


@dataclass(frozen=True)
class Country:
    name: str
    region: str
    facts: dict[str, list[str]]
    """Answers by topic, any of which is right."""


def prepare_countries(out_dir: Path) -> list[Path]:
    """A small real corpus with questions, for learning to search on a laptop: countries of the world.

    Writes `corpus.jsonl` (`id` and `contents`, a title in quotes and a text), `train.jsonl`, `validation.jsonl`. The
    facts come with the package `countryinfo`. Each country has four short passages, each about other things, and each
    question is answered by a few characters of one of them. So a query must name the country and the topic, and the
    right one of two or three facts must be copied. Countries of the validation set are not in the training set.
    """
    countries = read_countries()
    shuffled = random.Random(SEED).sample(countries, len(countries))
    num_validation = round(HELD_OUT_FRACTION * len(countries))
    files = {
        "corpus": [passage for country in countries for passage in passages(country)],
        "train": [row for country in shuffled[num_validation:] for row in questions(country)],
        "validation": [row for country in shuffled[:num_validation] for row in questions(country)],
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, rows in files.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        paths.append(out_dir / f"{name}.jsonl")
        paths[-1].write_text("".join(lines), encoding="utf-8")
    return paths


def read_countries() -> list[Country]:
    """Countries of which everything is known, by name."""
    try:
        from countryinfo import CountryInfo
    except ImportError as error:
        raise UserError(f"the data set `countries` comes with a package: {install_command('countries')}") from error
    complete = {
        columns["name"]: country
        for columns in CountryInfo.all().values()
        if columns["name"] not in DISSOLVED and (country := read_country(columns)) is not None
    }
    return [complete[name] for name in sorted(complete)]


def read_country(columns: Mapping[str, Any]) -> Country | None:
    """None if anything about it is unknown."""
    codes = columns.get("ISO") or {}
    region = columns.get("intermediateregion") or columns.get("subregion")
    facts = {
        "capital": [columns.get("capital")],
        "area": [str(int(columns.get("area") or 0) or "")],
        "calling code": columns.get("callingCodes") or [],
        "internet domain": [domain for domain in columns.get("tld") or () if domain and domain.isascii()],
        "currency code": columns.get("currencies") or [],
        "demonym": [columns.get("demonym")],
        "three-letter code": [codes.get("alpha3")],
        "numeric code": [codes.get("numeric")],
    }
    known = {topic: [answer for answer in answers if answer] for topic, answers in facts.items()}
    if not region or not all(known.values()) or not isinstance(known["capital"][0], str):
        return None
    return Country(columns["name"], region, known)


def passages(country: Country) -> Iterator[dict[str, str]]:
    name, facts = country.name, dict(country.facts)
    facts["area"] = [f"{int(facts['area'][0]):,} square kilometres"]
    for title, topics in PASSAGES.items():
        sentences = [f"{name} is in {country.region}."] if title == "Geography" else []
        sentences += [f"The {topic} of {name} is {' or '.join(facts[topic])}." for topic in topics]
        key = f"{facts['three-letter code'][0].lower()}-{title.split()[0].lower()}"
        yield {"id": key, "contents": f'"{title} of {name}"\n{" ".join(sentences)}'}


def questions(country: Country) -> Iterator[dict[str, Any]]:
    for topic, answers in country.facts.items():
        yield {"prompt": f"What is the {topic} of {country.name}?", "answer": answers, "topic": topic}


PACKAGED = {"countries": prepare_countries}
