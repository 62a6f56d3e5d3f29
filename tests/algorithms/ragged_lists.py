"""Ragged batches as lists of lists, so that the references in these tests can be checked by reading them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from hypothesis import settings
from hypothesis import strategies as st

from corral.algorithms.losses import GlobalCounts

quick = settings(max_examples=40, deadline=None)

Rows = list[list[float]]
Element = Callable[[Random], float]


@dataclass
class Ragged:
    """Per trajectory: which tokens were generated, its group, and any number of columns with a number per token."""

    masks: list[list[bool]]
    groups: list[int]
    columns: list[Rows]

    @property
    def mask(self) -> torch.Tensor:
        return torch.tensor([m for row in self.masks for m in row], dtype=torch.bool)

    @property
    def offsets(self) -> torch.Tensor:
        return torch.tensor([0, *(len(row) for row in self.masks)]).cumsum(0)

    @property
    def num_generated(self) -> int:
        return sum(map(sum, self.masks))

    @property
    def counts(self) -> GlobalCounts:
        return GlobalCounts(self.num_generated, sum(any(row) for row in self.masks))

    def tensors(self) -> list[torch.Tensor]:
        return [flat(rows) for rows in self.columns]

    def poisoned(self) -> list[torch.Tensor]:
        """The columns with NaN on every token that was not generated."""
        return [column.masked_fill(~self.mask, torch.nan) for column in self.tensors()]

    def generated(self, rows: Rows) -> Rows:
        """The numbers of generated tokens only."""
        return [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(rows, self.masks, strict=True)]

    def spread(self, per_generated: Sequence[Sequence[float]]) -> Rows:
        """The inverse of `generated`: 0 on all other tokens."""
        rows = []
        for numbers, mask in zip(per_generated, self.masks, strict=True):
            remaining = iter(numbers)
            rows.append([next(remaining) if m else 0.0 for m in mask])
        return rows


@st.composite
def ragged(draw: st.DrawFn, *elements: Element) -> Ragged:
    """Several turns, nothing generated, nothing at all: everything that may come, in small.

    Hypothesis chooses the shape and one seed for all numbers: much faster than choosing every number.
    """
    masks = draw(st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=6))
    groups = draw(st.lists(st.integers(-1, 2), min_size=len(masks), max_size=len(masks)))
    random = Random(draw(st.integers(0, 2**32)))
    return Ragged(masks, groups, [[[element(random) for _ in row] for row in masks] for element in elements])


def numbers(random: Random) -> float:
    """Round ones often, so that ties and zeros are common."""
    return random.choice([0.0, 1.0, -1.0, random.uniform(-3, 3), random.uniform(-3, 3)])


def eighths(random: Random) -> float:
    """Their sums are exact, so that equal means equal."""
    return random.randint(-24, 24) / 8


def logprobs(random: Random) -> float:
    return random.uniform(-4.0, -0.01)


def flat(rows: Rows) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def assert_rows(actual: torch.Tensor, expected: Rows, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, flat(expected), atol=tolerance, rtol=tolerance)
