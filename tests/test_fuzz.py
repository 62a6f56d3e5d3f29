"""Some of the inputs of `python tests/fuzz.py --inputs 1000000`, which tries as many as you like."""

import pytest
from fuzz import KINDS, fuzz_in_processes

NUM_INPUTS = {"recipe": 150, "overrides": 250, "placement": 250, "serve": 150, "model": 100, "checkpoint": 100}
NUM_INPUTS |= dict.fromkeys((name for name in KINDS if name.startswith("migrate-")), 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_whatever_is_in_it_corral_takes_it_or_says_what_is_wrong(name: str) -> None:
    number = NUM_INPUTS.get(name, 600)
    report = fuzz_in_processes(KINDS[name], number, seed=20, tell=lambda so_far: None)
    assert not report.faults
    assert report.counts.total() == number
    assert report.counts["refused"] > number / 5
    assert report.counts["accepted"] > 0
