"""A small real corpus with questions, for learning to search on a laptop: countries of the world.

The facts come with the package `countryinfo`. Each country has four short passages, each about other things, and each
question is answered by a few characters of one of them. So a query must name the country and say what is asked, and the
right one of two or three facts must be copied. Countries of the validation set are not in the training set.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.recipe.errors import UserError

VALIDATION_SHARE = 0.2
"""Of the countries."""
SEED = 0
DISSOLVED = ("Serbia and Montenegro", "Antilles néerlandaises")


@dataclass(frozen=True)
class Country:
    name: str
    region: str
    capital: str
    area: int
    calling_codes: list[str]
    domains: list[str]
    currencies: list[str]
    people: str
    alpha3: str
    number: str


def prepare_countries(out_dir: Path) -> list[Path]:
    """Write `corpus.jsonl` (`id` and `contents`, a title in quotes and a text), `train.jsonl`, `validation.jsonl`."""
    countries = read_countries()
    shuffled = random.Random(SEED).sample(countries, len(countries))
    num_validation = round(VALIDATION_SHARE * len(countries))
    files = {
        "corpus": [passage for country in countries for passage in passages(country)],
        "train": [row for country in shuffled[num_validation:] for row in questions(country)],
        "validation": [row for country in shuffled[:num_validation] for row in questions(country)],
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, rows in files.items():
        paths.append(out_dir / f"{name}.jsonl")
        write_lines(paths[-1], rows)
    return paths


def read_countries() -> list[Country]:
    """Those of which everything is known, by name."""
    try:
        from countryinfo import CountryInfo
    except ImportError as error:
        raise UserError("the data set `countries` comes with a package: pip install 'corral[countries]'") from error
    complete = {
        columns["name"]: country
        for columns in CountryInfo.all().values()
        if columns["name"] not in DISSOLVED and (country := read_country(columns)) is not None
    }
    return [complete[name] for name in sorted(complete)]


def read_country(columns: Mapping[str, Any]) -> Country | None:
    codes = columns.get("ISO") or {}
    found = Country(
        name=columns["name"],
        region=columns.get("intermediateregion") or columns.get("subregion") or "",
        capital=columns.get("capital") or "",
        area=int(columns.get("area") or 0),
        calling_codes=known(columns.get("callingCodes")),
        domains=[domain for domain in known(columns.get("tld")) if domain.isascii()],
        currencies=known(columns.get("currencies")),
        people=columns.get("demonym") or "",
        alpha3=codes.get("alpha3") or "",
        number=codes.get("numeric") or "",
    )
    return found if all(vars(found).values()) and isinstance(found.capital, str) else None


def known(values: Sequence[str] | None) -> list[str]:
    return [value for value in values or () if value]


def passages(country: Country) -> Iterator[dict[str, str]]:
    name, area = country.name, f"{country.area:,}"
    texts = {
        "Geography": f"{name} is in {country.region}. The capital of {name} is {country.capital}. "
        f"The area of {name} is {area} square kilometres.",
        "Telephone and internet": f"The calling code of {name} is {either(country.calling_codes)}. "
        f"The internet domain of {name} is {either(country.domains)}.",
        "Money and people": f"The currency code of {name} is {either(country.currencies)}. "
        f"The demonym of {name} is {country.people}.",
        "Country codes": f"The three-letter code of {name} is {country.alpha3}. "
        f"The numeric code of {name} is {country.number}.",
    }
    for topic, text in texts.items():
        key = f"{country.alpha3.lower()}-{topic.split()[0].lower()}"
        yield {"id": key, "contents": f'"{topic} of {name}"\n{text}'}


def questions(country: Country) -> Iterator[dict[str, Any]]:
    asked: dict[str, list[str]] = {
        "capital": [country.capital],
        "area": [str(country.area)],
        "calling code": country.calling_codes,
        "internet domain": country.domains,
        "currency code": country.currencies,
        "demonym": [country.people],
        "three-letter code": [country.alpha3],
        "numeric code": [country.number],
    }
    for topic, answers in asked.items():
        yield {"prompt": f"What is the {topic} of {country.name}?", "answer": answers, "topic": topic}


def either(values: Sequence[str]) -> str:
    return " or ".join(values)


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
