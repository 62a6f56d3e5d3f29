"""Scorers of short answers to questions, as reading comprehension and search agents are measured.

The answer is what stands in the last `<answer>...</answer>` of the response. What stands in `<information>` is not the
model's own, and no answer is looked for in it. The reference is a text, a list of texts any of which is right, or a
dict with such a list as `target` (Search-R1's layout). In scripts without spaces each character is a word, as in
MLQA's and CMRC's evaluation of Chinese and KorQuAD's of Korean.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from corral.data.answers import references
from corral.data.words import ascii_forms, words
from corral.rewards.reward_function import built_in

TAGS = ("think", "search", "information", "answer")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
INFORMATION = re.compile(r"<information>(.*?)</information>", re.DOTALL)
TAG = re.compile(rf"(</?(?:{'|'.join(TAGS)})>)")

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")

FOLLOWS = {"start": ("think",), "think": ("search", "answer"), "search": ("information",), "information": ("think",)}
"""Which block may come after which."""


@built_in()
def em(response: str, answer: Any, *, format_score: float = 0.0) -> float:
    """1 if the answer is the reference, `format_score` if there is one but wrong, else 0."""
    accepted, found = normalized_references(answer), last_answer(response)
    if found is None:
        return 0.0
    return 1.0 if normalized(found) in accepted else format_score


@built_in()
def sub_em(response: str, answer: Any, *, format_score: float = 0.0) -> float:
    """1 if the reference is in the answer, word for word, `format_score` if there is an answer without it, else 0.

    Search-R1 takes any piece of the text, so that a model that is asked for `12` does well with `2012`.
    """
    accepted, found = normalized_references(answer), last_answer(response)
    if found is None:
        return 0.0
    return 1.0 if any(contains(normalized(found), reference) for reference in accepted) else format_score


@built_in()
def f1(response: str, answer: Any, *, format_score: float = 0.0) -> float:
    """F1 of the words of answer and reference; an answer gets `format_score` at least."""
    accepted, found = normalized_references(answer), last_answer(response)
    if found is None:
        return 0.0
    return max(format_score, *(word_overlap(normalized(found), reference) for reference in accepted))


@built_in()
def search_r1(
    response: str,
    answer: Any,
    *,
    structure_format_score: float = 0.2,
    final_format_score: float = 0.1,
    retrieval_score: float = 0.0,
) -> dict[str, float]:
    """Exact match, and whether thinking, searching and answering took turns as they should (Search-R1 v0.3).

    Right: 1, or 1 - `structure_format_score` in a response out of shape. Wrong: `structure_format_score` if the
    response is in shape, and `retrieval_score` more if a reference was in what was found; else `final_format_score` if
    there is an answer at all. Its metrics are `exact_match` and `well_formed`.
    """
    right, well_formed = em(response, answer) == 1.0, is_well_formed(response)
    if right:
        score = 1.0 if well_formed else 1.0 - structure_format_score
    elif well_formed:
        is_found = any(is_in(block, answer) for block in INFORMATION.findall(response))
        score = structure_format_score + (retrieval_score if is_found else 0.0)
    else:
        score = 0.0 if last_answer(response) is None else final_format_score
    return {"score": score, "exact_match": float(right), "well_formed": float(well_formed)}


def last_answer(response: str) -> str | None:
    answers: list[str] = ANSWER.findall(INFORMATION.sub("", response))
    return answers[-1].strip() if answers else None


def is_in(text: str, answer: Any) -> bool:
    return any(contains(normalized(text), reference) for reference in normalized_references(answer))


def is_well_formed(response: str) -> bool:
    """think, search, information, think, ..., answer: nothing between the blocks, none in another, none left open."""
    last, inside = "start", None
    for part in TAG.split(response):
        name = part.strip("</>")
        if not TAG.fullmatch(part):
            if inside is None and part.strip():
                return False
        elif part.startswith("</"):
            if inside != name:
                return False
            last, inside = name, None
        elif inside is None and name in FOLLOWS.get(last, ()):
            inside = name
        else:
            return False
    return last == "answer" and inside is None


def normalized(text: str) -> str:
    """Lower case without punctuation, articles and superfluous spaces, in Unicode's compatible forms; a text that is
    nothing else is left as it is."""
    lowered = ascii_forms(unicodedata.normalize("NFKC", text).lower())
    bare = lowered.translate(NO_PUNCTUATION)
    if not bare.isascii():
        bare = "".join(one for one in bare if unicodedata.category(one)[0] != "P")
    return " ".join(words(ARTICLES.sub(" ", bare)) or lowered.split())


def normalized_references(answer: Any) -> set[str]:
    if isinstance(answer, Mapping):
        answer = answer.get("target")
    return {normalized(str(one)) for one in references(answer)}


def contains(text: str, reference: str) -> bool:
    """Whether the words of the reference stand in the text side by side. (`12` is not in `2012`.)"""
    return f" {reference} " in f" {text} "


def word_overlap(text: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words."""
    ours, theirs = Counter(text.split()), Counter(reference.split())
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0
