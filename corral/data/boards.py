"""Rows for games: numbers from which their environments make boards."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from corral.recipe.schema import Part, Source

DEFAULT_SIZE = 1000
VALIDATION_SHARE = 10
"""One board in so many is for validation."""


def board_rows(source: Source, environments: Mapping[str, float], part: Part = "train") -> Iterator[dict[str, Any]]:
    """Boards, dealt to environments (tags, with their shares) so that every beginning of the rows has the shares. Not
    all of them may be 0.

    Board 17 of seed 0 is the same number in every run, and it belongs to the same environment while the shares stay.
    """
    total = sum(environments.values())
    dealt = dict.fromkeys(environments, 0)
    for index in range(source.size or DEFAULT_SIZE):
        # Whose count is furthest behind what its share of the rows so far is; the first of them, if several are.
        tag = max(environments, key=lambda tag: environments[tag] / total * (index + 1) - dealt[tag])
        dealt[tag] += 1
        yield {
            "prompt": f"board {index} ({tag})" if tag else f"board {index}",
            "answer": None,
            "seed": seed_of_board(source.seed, index),
            "environment": tag,
            "part": part,
        }


def seed_of_board(seed: int, index: int) -> int:
    """63 bits that depend on nothing but these."""
    return _bits(f"board {seed}/{index}")


def part_of(board: str) -> Part:
    """To which a board belongs, by what is on it: small boards come again and again, and one that is trained on must
    not be one that is validated on."""
    return "validation" if _bits(board) % VALIDATION_SHARE == 0 else "train"


def _bits(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
