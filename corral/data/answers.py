r"""Finding the final answer in a text: after `####`, in `\boxed{}`, or as a number. For preparing data and scoring."""

import re
from decimal import Decimal
from typing import Any

from corral.data.words import ascii_forms, without_characters

_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w)\]]) [-+−] )?            # a sign, but not the minus of `5-3`
    \$?
    (?<![A-Za-z_\d]) (?<!\d\.)                 # not the end of a name or of another number
    (?P<digits>
        (?: \d{1,3} (?:,\d{3})+ (?!\d) | \d+ ) (?:\.\d+)? (?:[eE][-+]?\d{1,4}(?![\w]))?
        | (?<!\.) \.\d+
    )
    """,
    re.VERBOSE,
)
_BOXED = re.compile(r"\\f?boxed\s*(?=\{)")


def references(answer: Any) -> list[Any]:
    """What a row has to compare with: one answer, or several any of which is right. ValueError if it has none."""
    if hasattr(answer, "tolist"):  # an array, or one of its numbers
        answer = answer.tolist()
    several = list(answer) if isinstance(answer, list | tuple | set) else [answer]
    if not several or several == [None]:
        raise ValueError("the row has no answer to compare with; is data.answer_key set?")
    return several


def numbers(text: str) -> list[Decimal]:
    """Every number in `text`, in order: `1,234`, `$5`, `-0.5`, `1e6`, `７２`."""
    return [_decimal(match) for match in _NUMBER.finditer(without_characters(ascii_forms(text)))]


def as_number(answer: object) -> Decimal:
    """The number that a reference answer is; raises ValueError if it is something else."""
    match = _NUMBER.fullmatch(ascii_forms(str(answer)).strip())
    if match is None or isinstance(answer, bool):
        raise ValueError(f"the answer {answer!r} is not a number")
    return _decimal(match)


def after_hashes(text: str) -> str | None:
    """What follows the last `####`, to the end of its line (the final answer in GSM8K's format)."""
    _, hashes, rest = ascii_forms(text).rpartition("####")
    return rest.strip().partition("\n")[0].strip() if hashes and rest.strip() else None


def last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 0
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() + 1 : position].strip()
    return None


def _decimal(match: re.Match[str]) -> Decimal:
    sign = "-" if match["sign"] in ("-", "−") else ""
    return Decimal(sign + match["digits"].replace(",", ""))
