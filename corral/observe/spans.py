"""Sets of whole numbers as text that is short where they follow each other: `32-39,41`."""

import re

import numpy as np
from numpy.typing import NDArray

PromptIds = NDArray[np.int64]

SPAN = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def format_span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def format_spans(prompt_ids: PromptIds) -> str:
    """Of sorted, distinct prompt_ids."""
    if not len(prompt_ids):
        return ""
    ends = np.flatnonzero(np.diff(prompt_ids) != 1)
    firsts, lasts = prompt_ids[np.r_[0, ends + 1]], prompt_ids[np.r_[ends, len(prompt_ids) - 1]]
    return ",".join(map(format_span, firsts.tolist(), lasts.tolist()))


def parse_spans(text: str) -> list[range]:
    """Raises a ValueError for what `format_spans` would not write."""
    spans: list[range] = []
    for part in text.split(","):
        match = SPAN.fullmatch(part)
        if match is None:
            raise ValueError(f"`{part}` is not a number or a span of numbers")
        span = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not span or (spans and span.start < spans[-1].stop):
            raise ValueError(f"`{text}` is not in ascending order")
        spans.append(span)
    return spans


def prompt_ids_in(spans: list[range]) -> PromptIds:
    return np.concatenate([np.arange(span.start, span.stop) for span in spans])
