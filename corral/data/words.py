"""The words of a text in any script: scorers compare them, and BM25 searches for them."""

import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise

FULL_WIDTH = {0xFF01 + number: 0x21 + number for number in range(94)} | {0x3000: " "}
MARKED = ((0x0E00, 0x0EFF), (0x0F00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF))
"""Thai and Lao, Tibetan, Burmese, Khmer, Kana: characters, and marks that belong to the one before them."""
UNMARKED = (
    *((0x3005, 0x3007), (0x31F0, 0x31FF), (0x3400, 0x9FFF), (0xAC00, 0xD7AF)),
    *((0xF900, 0xFAFF), (0x20000, 0x3FFFF)),
)
"""Han, and Hangul, which has spaces but writes particles without one."""
CHARACTERS = "".join(f"{chr(first)}-{chr(last)}" for first, last in MARKED + UNMARKED)
MARKS = "".join(
    chr(code)
    for first, last in MARKED
    for code in range(first, last + 1)
    if unicodedata.category(chr(code)).startswith("M")
)
CHARACTER = re.compile(f"[{CHARACTERS}][{MARKS}]*")
"""A character of a script that has no spaces between words."""
RUN = re.compile(f"[{CHARACTERS}]+")
OTHER_TEXT = re.compile(f"[{CHARACTERS}\u3000-\u303f“”‘’]+:?")


def ascii_forms(text: str) -> str:
    """The text with ASCII in place of full-width signs and other scripts' digits: `７２` is `72`."""
    if text.isascii():
        return text
    return re.sub(r"[^\D0-9]", lambda digit: str(unicodedata.decimal(digit[0])), text.translate(FULL_WIDTH))


def without_characters(text: str) -> str:
    """The text with a space in place of these characters and their punctuation, so that numbers stand by themselves."""
    return text if text.isascii() else OTHER_TEXT.sub(" ", text)


def words(text: str) -> list[str]:
    """What stands between spaces. A character of a script without spaces is a word."""
    return CHARACTER.sub(r" \g<0> ", text).split()


def words_and_pairs(text: str, find_words: Callable[[str], list[str]]) -> list[str]:
    """What a search looks for: words as `find_words` finds them, and the pairs of neighbours in what is written without
    spaces, as Lucene has them; a character that stands alone is itself."""
    if text.isascii():
        return find_words(text)
    text = ascii_forms(text)
    found = find_words(RUN.sub(" ", text))
    for run in RUN.findall(text):
        characters = CHARACTER.findall(run)
        found += map("".join, pairwise(characters)) if len(characters) > 1 else characters
    return found
