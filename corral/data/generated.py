"""Generated rows: our own small arithmetic and pictures, the tasks of reasoning-gym, and seeds from which games make
their boards.

Deterministic: the same source (task, options, size, seed) always gives the same rows.
"""

import functools
import hashlib
import json
import random
import struct
import zlib
from collections.abc import Iterator, Mapping
from operator import add, mul, sub
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from corral.data.plugins import did_you_mean, error_line
from corral.recipe.errors import UserError, install_command
from corral.recipe.schema import NaturalInt, Part, PositiveInt, SourceRows

DEFAULT_SIZE = 1000
OPERATORS = {"addition": "+", "subtraction": "-", "multiplication": "*"}
VALIDATION_EVERY = 10
"""One question or board in so many belongs to validation."""
REASONING_GYM_SEED_STRIDE = 1_000_000


class ArithmeticOptions(BaseModel):
    """The `options` of an `arithmetic:` source."""

    model_config = ConfigDict(extra="forbid")

    digits: PositiveInt | None = None
    """Terms are 0 to 9 (1), to 99 (2, the default), to 999 (3), ..."""
    min: NaturalInt | None = None
    max: NaturalInt | None = None
    """Smallest and largest term, instead of digits."""
    num_terms: int = Field(default=2, ge=2)
    question: str = "What is {expression}?"
    """Text of the question; `{expression}` becomes `12 + 7`."""
    part: Literal["train", "validation"] | None = None
    """Every question belongs to one of the two by a hash of its terms, whatever the options, size and seed are. A
    source of one part never shares a question with a source of the other. None: from both."""
    pairs: bool = False
    """Rows have two answers, `chosen` and `rejected`: the right number, and one that is wrong in one digit."""
    environments: list[str] = []
    """Names of `environments` of the recipe, to which the rows belong in turn."""

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
        """How many numbers a term can be."""
        largest = 10 ** (self.digits or 2) - 1 if self.max is None else self.max
        return largest + 1 - self.smallest


def arithmetic_rows(task: str, source: SourceRows) -> Iterator[dict[str, Any]]:
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
            answer = str(functools.reduce({"+": add, "-": sub, "*": mul}[operator], terms))
            yield {
                "prompt": options.question.replace("{expression}", f" {operator} ".join(map(str, terms))),
                "answer": answer,
                "data_source": f"arithmetic/{task}",
                **({"chosen": answer, "rejected": _wrong(answer, operator, terms)} if options.pairs else {}),
                **({"environment": tags[num_found % len(tags)]} if (tags := options.environments) else {}),
            }
        if num_found == (source.size or DEFAULT_SIZE):
            return
    if source.size is not None:
        raise UserError(
            f"arithmetic:{task} has only {num_found} different questions with these options, not size {source.size}"
        )


def _wrong(answer: str, operator: str, terms: list[int]) -> str:
    """The answer with one digit changed, which one and to what by a hash of the question."""
    chosen = _hash(f"{terms} {operator}")
    places = [place for place, character in enumerate(answer) if character.isdigit()]
    place = places[chosen % len(places)]
    digit = (int(answer[place]) + 1 + chosen // len(places) % 9) % 10
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"


def _problems(operators: list[str], options: ArithmeticOptions, source: SourceRows) -> Iterator[tuple[str, list[int]]]:
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
    """0 to n-1 in random order, one at a time, however large n is (Fisher-Yates that stores only what moved)."""
    moved: dict[int, int] = {}
    for position in range(n):
        other = rng.randrange(position, n)
        yield moved.get(other, other)
        moved[other] = moved.pop(position, position)


def _part(operator: str, terms: list[int]) -> str:
    """Where the order of terms does not matter it does not change the part: `7 + 12` is not held out if `12 + 7` was
    trained on."""
    canonical = terms if operator == "-" else sorted(terms)
    return "validation" if _hash(f"{operator} {canonical}") % VALIDATION_EVERY == 0 else "train"


def reasoning_gym_rows(task: str, source: SourceRows) -> Iterator[dict[str, Any]]:
    """Entries of a reasoning-gym task, with what its own scorer needs to score them."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"reasoning_gym:{task} needs reasoning-gym: {install_command('reasoning-gym')}") from error
    if task not in DATASETS:
        raise UserError(f"reasoning-gym has no task `{task}`{did_you_mean(task, DATASETS)}")
    # Its tasks make entry i from seed + i, so that neighboring seeds share nearly all entries: keep them far apart.
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


PICTURE_SIZE, GRAY = 32, (128, 128, 128)
COLORS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 220), "y": (230, 210, 50)}
CORNERS = {"1": (0, 0), "2": (16, 0), "3": (0, 16), "4": (16, 16)}
"""Left and upper edge of the square, by the corner's name."""
PICTURE_QUESTIONS = {"colors": "Color: r, g, b or y?", "corners": "Corner: 1, 2, 3 or 4?"}


def picture_rows(task: str, source: SourceRows) -> Iterator[dict[str, Any]]:
    """Pictures of a colored square in one of four corners, with noise, and a question about its color or its corner.
    `mixed` asks for either."""
    if task != "mixed" and task not in PICTURE_QUESTIONS:
        raise UserError(f"there is no `pictures:{task}`; there are {', '.join(PICTURE_QUESTIONS)} and mixed")
    if source.options:
        raise UserError(f"pictures:{task} has no options")
    rng = random.Random(source.seed)
    for _ in range(source.size or DEFAULT_SIZE):
        asked = rng.choice(list(PICTURE_QUESTIONS)) if task == "mixed" else task
        color, corner = rng.choice(list(COLORS)), rng.choice(list(CORNERS))
        yield {
            "prompt": f"<image>{PICTURE_QUESTIONS[asked]}",
            "answer": color if asked == "colors" else corner,
            "images": [_square(COLORS[color], CORNERS[corner], rng)],
            "data_source": f"pictures/{asked}",
        }


def _square(color: tuple[int, ...], corner: tuple[int, int], rng: random.Random) -> bytes:
    """A PNG file."""
    side, (left, top) = PICTURE_SIZE // 2, corner
    lines = b""
    for y in range(PICTURE_SIZE):
        lines += b"\0"  # the line is stored as it is
        for x in range(PICTURE_SIZE):
            is_inside = left <= x < left + side and top <= y < top + side
            lines += bytes(max(0, min(255, value + rng.randint(-20, 20))) for value in (color if is_inside else GRAY))
    header = struct.pack(">IIBBBBB", PICTURE_SIZE, PICTURE_SIZE, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    packed = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"".join([b"\x89PNG\r\n\x1a\n", *packed])


def board_rows(source: SourceRows, environments: Mapping[str, float], part: Part = "train") -> Iterator[dict[str, Any]]:
    """Boards, distributed over environments (tags, with their mixing weights, which may not all be 0) so that every
    prefix of the rows is mixed by the weights.

    Board 17 of seed 0 is the same number in every run, and belongs to the same environment while the weights stay.
    """
    total = sum(environments.values())
    counts = dict.fromkeys(environments, 0)
    for index in range(source.size or DEFAULT_SIZE):
        # The one that is furthest behind its weight's part of the rows so far; the first of them, if several are.
        tag = max(environments, key=lambda tag: environments[tag] / total * (index + 1) - counts[tag])
        counts[tag] += 1
        yield {
            "prompt": f"board {index} ({tag})" if tag else f"board {index}",
            "answer": None,
            "seed": _hash(f"board {source.seed}/{index}") >> 1,
            "environment": tag,
            "part": part,
        }


def part_of(board: str) -> Part:
    """The part to which a board belongs, by what is on it: small boards repeat, and one that is trained on must not be
    one that is validated on."""
    return "validation" if (_hash(board) >> 1) % VALIDATION_EVERY == 0 else "train"


def _hash(text: str) -> int:
    """64 bits that depend on nothing but the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
