"""Built-in scorers that compare texts and numbers. A scorer is a plain function from a response to a number.

`math` and `reasoning_gym`, which need other packages, are in `symbolic.py` and `procedural.py`; how a function is found
and called is `calling.py`.
"""

import re
from typing import Any, Literal

from corral.data.answers import after_hashes, as_number, numbers

GSM8K_LAST_CHARACTERS = 300
"""Where a final answer is looked for, as verl does."""


def exact(response: str, answer: Any, *, ignore_case: bool = False, extract: str | None = None) -> float:
    """1 if the response is the answer, spaces around it aside.

    `extract` is a regular expression: its last match (its first group, if it has one) is compared instead of the whole.
    """
    said: str | None = response
    if extract is not None:
        said = _last_match(extract, response, group=min(1, re.compile(extract).groups))
    return float(said is not None and _same_text(said, answer, ignore_case))


def regex(
    response: str, answer: Any = None, *, pattern: str, group: int | str | None = None, ignore_case: bool = False
) -> float:
    """1 if the pattern is found in the response and, with `group`, if that group of the last match is the answer."""
    said = _last_match(pattern, response, group or 0)
    if said is None or group is None:
        return float(said is not None)
    return float(_same_text(said, answer, ignore_case))


def number(response: str, answer: Any, *, which: Literal["last", "first"] = "last", tolerance: float = 0.0) -> float:
    """1 if the last (or first) number in the response equals the answer, to an absolute tolerance."""
    if which not in ("last", "first"):
        raise ValueError(f"which must be last or first, not {which!r}")
    expected = as_number(answer)
    found = numbers(response)
    if not found:
        return 0.0
    said = found[-1 if which == "last" else 0]
    return float(said == expected or abs(float(said) - float(expected)) <= tolerance)


def gsm8k(
    response: str, answer: Any, *, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0
) -> float:
    """1 if the final answer is right, `format_score` if there is one but wrong, else 0.

    strict: the number after `####`. flexible: the last number. The reference is a number or GSM8K's worked solution.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be strict or flexible, not {method!r}")
    expected = as_number(after_hashes(str(answer)) or answer)
    ending = response[-GSM8K_LAST_CHARACTERS:]
    said = numbers(ending if method == "flexible" else after_hashes(ending) or "")
    if not said:
        return 0.0
    return 1.0 if said[-1 if method == "flexible" else 0] == expected else format_score


def _last_match(pattern: str, text: str, group: int | str) -> str | None:
    matches = list(re.finditer(pattern, text))
    return matches[-1][group] if matches else None


def _same_text(said: str, answer: Any, ignore_case: bool) -> bool:
    if answer is None:
        raise ValueError("the row has no answer to compare with; is data.answer_key set?")
    pair = said.strip(), str(answer).strip()
    return pair[0].casefold() == pair[1].casefold() if ignore_case else pair[0] == pair[1]
