"""Rows made on the spot: our own small arithmetic, and the tasks of reasoning-gym.

Deterministic: the same source (task, options, size, seed) always gives the same rows.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from corral.data.plugins import did_you_mean, error_line
from corral.recipe.errors import UserError
from corral.recipe.schema import NaturalInt, PositiveInt, Source

DEFAULT_SIZE = 1000
OPERATORS = {"addition": "+", "subtraction": "-", "multiplication": "*"}
VALIDATION_SHARE = 10
"""One question in so many belongs to validation."""
REASONING_GYM_SEED_STRIDE = 1_000_000


class ArithmeticOptions(BaseModel):
    """`options` of an `arithmetic:` source."""

    model_config = ConfigDict(extra="forbid")

    digits: PositiveInt | None = None
    """Terms are 0 to 9 (1), to 99 (2, the default), to 999 (3), ..."""
    min: NaturalInt | None = None
    max: NaturalInt | None = None
    """Smallest and largest term, instead of digits."""
    num_terms: int = Field(default=2, ge=2)
    question: str = "What is {expression}?"
    """How it is asked; `{expression}` becomes `12 + 7`."""
    part: Literal["train", "validation"] | None = None
    """Every question belongs to one of the two by a hash of its terms, whatever the options, size and seed are. A
    source of one part never shares a question with a source of the other. None: from both."""

    @model_validator(mode="after")
    def _check(self) -> "ArithmeticOptions":
        if self.digits is not None and (self.min is not None or self.max is not None):
            raise ValueError("give either digits, or min and max")
        if self.num_choices < 1:
            raise ValueError("min must not be larger than max")
        if "{expression}" not in self.question:
            raise ValueError("question must contain {expression}")
        return self

    @property
    def smallest(self) -> int:
        return self.min or 0

    @property
    def num_choices(self) -> int:
        """Numbers that a term can be."""
        largest = 10 ** (self.digits or 2) - 1 if self.max is None else self.max
        return largest + 1 - self.smallest


def arithmetic_rows(task: str, source: Source) -> Iterator[dict[str, Any]]:
    """Distinct questions such as `What is 12 + 7?`, in random order. `mixed` has all operations, one per question."""
    if task != "mixed" and task not in OPERATORS:
        raise UserError(f"there is no `arithmetic:{task}`; there are {', '.join(OPERATORS)} and mixed")
    try:
        options = ArithmeticOptions(**source.options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["options", *map(str, first["loc"])])
        raise UserError(f"arithmetic:{task}: {place}: {first['msg'].removeprefix('Value error, ')}") from error
    operators = list(OPERATORS.values()) if task == "mixed" else [OPERATORS[task]]
    num_found = 0
    for operator, terms in _problems(operators, options, source):
        if options.part in (None, _part(operator, terms)):
            num_found += 1
            yield _arithmetic_row(task, operator, terms, options.question)
        if num_found == (source.size or DEFAULT_SIZE):
            return
    if source.size is not None:
        raise UserError(
            f"arithmetic:{task} has only {num_found} different questions with these options, not size {source.size}"
        )


def _problems(operators: list[str], options: ArithmeticOptions, source: Source) -> Iterator[tuple[str, list[int]]]:
    """All problems once, in random order. Each is a number, whose digits are the operator and the terms."""
    num_problems = len(operators) * options.num_choices**options.num_terms
    for code in _shuffled(num_problems, random.Random(source.seed)):
        rest, which = divmod(code, len(operators))
        terms = []
        for _ in range(options.num_terms):
            rest, choice = divmod(rest, options.num_choices)
            terms.append(options.smallest + choice)
        yield operators[which], terms


def _shuffled(n: int, rng: random.Random) -> Iterator[int]:
    """0 to n-1 in random order, one at a time, however large n is (Fisher-Yates that remembers only what moved)."""
    moved: dict[int, int] = {}
    for position in range(n):
        other = rng.randrange(position, n)
        yield moved.get(other, other)
        moved[other] = moved.pop(position, position)


def _part(operator: str, terms: list[int]) -> str:
    """Where order does not matter it does not change the part: `7 + 12` is no new question to who has seen `12 + 7`."""
    canonical = terms if operator == "-" else sorted(terms)
    digest = hashlib.blake2b(f"{operator} {canonical}".encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") % VALIDATION_SHARE == 0 else "train"


def _arithmetic_row(task: str, operator: str, terms: list[int], question: str) -> dict[str, Any]:
    answer = terms[0]
    for term in terms[1:]:
        answer = {"+": answer + term, "-": answer - term, "*": answer * term}[operator]
    expression = f" {operator} ".join(map(str, terms))
    return {
        "prompt": question.replace("{expression}", expression),
        "answer": str(answer),
        "data_source": f"arithmetic/{task}",
    }


def reasoning_gym_rows(task: str, source: Source) -> Iterator[dict[str, Any]]:
    """Entries of a reasoning-gym task, with what its own scorer needs to score them."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"reasoning_gym:{task} needs reasoning-gym: pip install 'corral[reasoning-gym]'") from error
    if task not in DATASETS:
        raise UserError(f"reasoning-gym has no task `{task}`{did_you_mean(task, DATASETS)}")
    # Its tasks make entry i from seed + i, so that neighbouring seeds share nearly all entries: keep them far apart.
    seed = source.seed * REASONING_GYM_SEED_STRIDE
    try:
        dataset = reasoning_gym.create_dataset(task, size=source.size or DEFAULT_SIZE, seed=seed, **source.options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"reasoning_gym:{task}: bad options {json.dumps(source.options)}: {error_line(error)}"
        ) from error
    for entry in dataset:
        yield {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "data_source": f"reasoning_gym/{task}",
            "reasoning_gym": {"task": task, "options": source.options, "entry": entry},
        }
