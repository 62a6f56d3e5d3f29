"""The built-in reward functions. Each is a plain function from a response to a number, declared by `@built_in`.

In this file: comparison of texts and numbers, mathematical equality (math-verify), the tasks of reasoning-gym, and each
row's own by its `data_source`. Scorers of short answers to questions are in `question_answering.py`.
"""

import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from corral.data.answers import after_hashes, as_number, last_boxed, numbers, references
from corral.data.plugins import is_spec
from corral.data.rows import Message, Row
from corral.data.words import ascii_forms, without_characters
from corral.rewards.reward_function import arguments_for, built_in, check_name, load_function

GSM8K_LAST_CHARACTERS = 300
"""A final answer is looked for in so many characters at the end, as verl does."""
SCORER_OF_SOURCE = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "hiyouga/geometry3k": "geo3k",
    **dict.fromkeys(("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"), "em"),
}
SCORER_OF_PREFIX = {"math_dapo": "math", "aime": "math", "numina_": "math", "searchR1_": "em", "arithmetic/": "number"}
"""Scorers of sources that are not in `SCORER_OF_SOURCE`, by how their names begin."""


@built_in()
def exact(response: str, answer: Any, *, ignore_case: bool = False, extract: str | None = None) -> float:
    """1 if the response is the answer, spaces around it aside.

    `extract` is a regular expression: its last match (its first group, if it has one) is compared instead of the whole.
    """
    found: str | None = response
    if extract is not None:
        found = _last_match(extract, response, group=min(1, re.compile(extract).groups))
    return float(_same_text(found, answer, ignore_case))


@built_in()
def regex(
    response: str, answer: Any = None, *, pattern: str, group: int | str | None = None, ignore_case: bool = False
) -> float:
    """1 if the pattern is found in the response and, with `group`, if that group of the last match is the answer.

    `ignore_case` holds for the search and for the comparison.
    """
    compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    # Checked before the search: a wrong group is an error at the start of a run, not with the first match.
    known = {*compiled.groupindex, *range(compiled.groups + 1)}
    if group is not None and (isinstance(group, float) or group not in known):
        raise ValueError(f"pattern {pattern!r} has no group {group!r}")
    found = _last_match(compiled, response, group or 0)
    if group is None:
        return float(found is not None)
    return float(_same_text(found, answer, ignore_case))


@built_in()
def number(response: str, answer: Any, *, which: Literal["last", "first"] = "last", tolerance: float = 0.0) -> float:
    """1 if the last (or first) number in the response equals the answer, to an absolute tolerance."""
    if which not in ("last", "first"):
        raise ValueError(f"which must be last or first, not {which!r}")
    expected = as_number(answer)
    found = numbers(response)
    if not found:
        return 0.0
    value = found[-1 if which == "last" else 0]
    return float(value == expected or abs(float(value) - float(expected)) <= tolerance)


@built_in()
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
    found = numbers(ending if method == "flexible" else after_hashes(ending) or "")
    if not found:
        return 0.0
    return 1.0 if found[-1 if method == "flexible" else 0] == expected else format_score


@built_in(needs="math_verify", extra="math")
def math(
    response: str, answer: Any, *, right: float = 1.0, wrong: float = 0.0, format_score: float | None = None
) -> float:
    r"""`right` if the final answer (`\boxed{}`, or the last expression) equals a reference, else `wrong`; with a
    `format_score`, that for an answer that is not right but in a box."""
    import math_verify

    # It warns about every call without a timeout. It needs none, since this process is killed at its deadline; and its
    # own are signals, which only work in the main thread.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The final answer alone, where a reference is a worked solution.
    plain = [
        (last_boxed(text) or after_hashes(text) or text).strip().strip("$") for text in map(str, references(answer))
    ]
    response = ascii_forms(response)
    boxed = last_boxed(response)
    # Words, such as \text{Monday}, are no expressions: those are right when they are the same.
    if boxed is not None and any("".join(boxed.split()) == "".join(one.split()) for one in plain):
        return right
    if boxed is None:
        response = without_characters(response)  # math-verify finds what stands between spaces
    parsed = math_verify.parse(response, parsing_timeout=None)
    for reference in plain:
        expected = math_verify.parse(f"\\boxed{{{reference}}}", parsing_timeout=None)
        if math_verify.verify(expected, parsed, timeout_seconds=None):
            return right
    return wrong if boxed is None or format_score is None else format_score


@built_in(needs="math_verify", extra="math")
def geo3k(response: str, answer: Any, *, format_score: float = 0.1) -> float:
    r"""As verl scores Geometry3K: `1 - format_score` for a right `\boxed{}` answer, and `format_score` for thoughts in
    `<think>` with a box behind them."""
    boxed = last_boxed(response)
    right = 0.0 if boxed is None else math(f"\\boxed{{{boxed}}}", answer)
    has_form = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", response, re.DOTALL) is not None
    return (1 - format_score) * right + format_score * has_form


@built_in(needs="reasoning_gym", extra="reasoning-gym")
def reasoning_gym(response: str, extra: dict[str, Any], *, tag: str = "answer") -> float:
    """The task's score of what the last `<answer>...</answer>` holds, or of the whole response if there is no such tag.

    Many tasks give part of the score when the answer is there among other text.
    """
    from reasoning_gym.utils import extract_answer

    if "reasoning_gym" not in extra:
        raise ValueError("the row is not from a `reasoning_gym:` source")
    problem = extra["reasoning_gym"]
    found = extract_answer(response, tag_name=tag)
    dataset = _reasoning_gym_dataset(problem["task"], json.dumps(problem["options"], sort_keys=True))
    return float(dataset.score_answer(response.strip() if found is None else found, problem["entry"]))


@cache
def _reasoning_gym_dataset(task: str, options: str) -> Any:
    import reasoning_gym as gym

    return gym.create_dataset(task, **json.loads(options))


@built_in()
def by_source(
    response: str,
    answer: Any,
    prompt: list[Message],
    extra: dict[str, Any],
    source: str,
    *,
    sources: Mapping[str, str] | None = None,
) -> Any:
    """The score of the row's own scorer, by its `data_source`, as verl chooses. `sources` names scorers for others, or
    instead of ours. A scorer is loaded with the first row that needs it: without rows for `math` its package is not
    needed."""
    own = dict(sources or {})
    for name in own.values():
        if is_spec(name):
            _loaded_scorer(name)  # a file that is not there is reported at once
        else:
            check_name(name)
    function = _loaded_scorer(scorer_for_source(source, {**SCORER_OF_SOURCE, **own}))
    return function(**arguments_for(function, response, Row(prompt, answer, source, extra)))


def scorer_for_source(source: str, scorers: Mapping[str, str]) -> str:
    if source in scorers:
        return scorers[source]
    for prefix, name in SCORER_OF_PREFIX.items():
        if source.startswith(prefix):
            return name
    whose = f"`data_source: {source}`" if source else "a row without `data_source`"
    raise ValueError(
        f"no scorer is known for {whose}; set `environment.reward.name` to one, or name it in its `options.sources`"
    )


@cache
def _loaded_scorer(name: str) -> Any:
    return load_function(name, {})


def _last_match(pattern: str | re.Pattern[str], text: str, group: int | str) -> str | None:
    matches = list(re.finditer(pattern, text))
    return matches[-1][group] if matches else None


def _same_text(found: str | None, answer: Any, ignore_case: bool) -> bool:
    """The answer is looked at first: a row without one is an error, whatever was found."""
    if answer is None:
        raise ValueError("the row has no answer to compare with; is data.answer_key set?")
    if found is None:
        return False
    pair = found.strip(), str(answer).strip()
    return pair[0].casefold() == pair[1].casefold() if ignore_case else pair[0] == pair[1]
