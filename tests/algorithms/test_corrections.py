import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from ragged_lists import Ragged, assert_rows, logprobs, mean, quick, ragged

from corral.algorithms.corrections import CORRECTIONS, correction_weights
from corral.algorithms.declarations import AlgorithmPart, Declaration, with_options

FLOOR, CAP = 0.6, 1.7
CASES = [*((name, None) for name in CORRECTIONS), ("rejection", "token"), ("rejection", "sequence")]

scored = ragged(logprobs, logprobs)


def part(name: str, **options: float | str | None) -> AlgorithmPart[Declaration]:
    known = CORRECTIONS[name].option_names
    return with_options(CORRECTIONS[name], **{k: v for k, v in options.items() if k in known and v is not None})


def slow(x: list[float], t: int, name: str, level: str | None) -> tuple[float, bool]:
    """Weight of a sequence's t-th generated token, and whether it is kept."""
    token, sequence = math.exp(x[t]), math.exp(min(max(sum(x), -20), 20))
    judged = sequence if level == "sequence" else token
    return {
        "none": (1.0, True),
        "token_tis": (min(token, CAP), True),
        "sequence_tis": (min(sequence, CAP), True),
        "icepop": (token, True) if FLOOR <= token <= CAP else (0.0, False),
        "rejection": (1.0, True) if FLOOR <= judged <= CAP else (0.0, False),
    }[name]


@pytest.mark.parametrize(("name", "level"), CASES)
@quick
@given(batch=scored)
def test_weights_and_metrics_match_lists(name: str, level: str | None, batch: Ragged) -> None:
    chosen = part(name, cap=CAP, floor=FLOOR, level=level)
    result = correction_weights(chosen, *batch.poisoned(), batch.mask, batch.offsets)
    train, engine = (batch.generated(rows) for rows in batch.columns)
    rows = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(train, engine, strict=True)]
    expected = [[slow(x, t, name, level) for t in range(len(x))] for x in rows]
    assert_rows(result.weights, batch.spread([[weight for weight, _ in row] for row in expected]))
    assert_rows(result.keep.double(), batch.spread([[float(keep) for _, keep in row] for row in expected]))

    x = [d for row in rows for d in row]
    weights = [weight for row in expected for weight, _ in row]
    squares = mean([w * w for w in weights])
    assert {key: float(value) for key, value in result.metrics.items()} == pytest.approx(
        {
            "ratio_mean": mean([math.exp(d) for d in x]),
            "kl_k1": mean([-d for d in x]),
            "kl_k3": mean([math.exp(d) - 1 - d for d in x]),
            "ess": mean(weights) ** 2 / squares if squares else 0.0,
            "dropped_fraction": mean([float(not keep) for row in expected for _, keep in row]),
        },
        abs=1e-6,
    )


@quick
@given(ratio=st.floats(0.2, 4.0))
def test_bounds_are_on_train_over_engine(ratio: float) -> None:
    """With a band that is not symmetric, the inverse ratio would be judged differently."""
    assume(min(abs(ratio - 0.9), abs(ratio - 3.0)) > 1e-9)
    result = correction_weights(
        part("rejection", cap=3.0, floor=0.9, level="token"),
        torch.tensor([math.log(ratio)], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([True]),
        torch.tensor([0, 1]),
    )
    assert bool(result.keep) == (0.9 <= ratio <= 3.0)


def test_rejecting_a_sequence_leaves_the_others_alone() -> None:
    result = correction_weights(
        part("rejection", cap=5.0, level="sequence"),
        torch.tensor([1.0, 1.0, 0.1]),
        torch.zeros(3),
        torch.ones(3, dtype=torch.bool),
        torch.tensor([0, 2, 3]),
    )
    assert result.keep.tolist() == [False, False, True]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_policies_that_agree_need_no_correction(name: str, level: str | None) -> None:
    same = torch.tensor([-1.0, -2.0, -3.0])
    result = correction_weights(
        part(name, level=level), same, same, torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 3])
    )
    assert result.weights.tolist() == [1.0, 1.0, 1.0]
    assert result.keep.all()
    assert result.metrics["ess"] == 1


def test_weights_carry_no_gradient() -> None:
    train = torch.tensor([-1.0], requires_grad=True)
    result = correction_weights(part("token_tis"), train, torch.zeros(1), torch.tensor([True]), torch.tensor([0, 1]))
    assert not result.weights.requires_grad
    assert not any(value.requires_grad for value in result.metrics.values())


@pytest.mark.parametrize("name", ["icepop", "rejection"])
def test_a_band_that_is_empty_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="the floor 6 is not below the cap 3"):
        part(name, floor=6.0, cap=3.0)


@pytest.mark.parametrize("count_dropped", [True, False])
def test_whether_tokens_may_leave_the_loss_does_not_depend_on_the_batch(count_dropped: bool) -> None:
    """None of these does. Pieces of a step are joined, and have the same columns."""
    logprobs, mask, offsets = torch.full((3,), -1.0), torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
    chosen = with_options(CORRECTIONS["rejection"], count_dropped=count_dropped)
    correction = correction_weights(chosen, logprobs, logprobs, mask, offsets)
    assert correction.counted.all()
    assert (correction.counted is mask) == count_dropped
