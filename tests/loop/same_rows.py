"""Whether two runs have measured the same."""

from collections.abc import Sequence
from typing import Any

import pytest

MEASURED = ("reward/mean", "policy/loss", "policy/gradient_norm", "policy/entropy", "length/mean")


def assert_same(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    assert len(rows) == len(others) > 0
    for row, other in zip(rows, others, strict=True):
        for name in MEASURED:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (row["step"], name)
