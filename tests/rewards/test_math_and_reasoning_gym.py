import threading
from typing import Any

import pytest

from corral.data.sources import load_rows
from corral.recipe.schema import Data, Source
from corral.rewards.scorers import math, reasoning_gym


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"the answer is $\frac12$", r"$\frac{1}{2}$"),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2"),
        (r"\boxed{ \text{Monday} }", r"\text{Monday}"),
        (r"\boxed{72}", "48 + 24 = 72\n#### 72"),
        (r"\boxed{3}", r"so it is \boxed{3}"),
        ("so 72", 72),
        ("答案：７２。", 72),
        ("一共有72个苹果", "#### 72"),
        ("답은 72입니다.", 72),
        (r"答案是 $\frac{1}{2}$。", "0.5"),
        (r"所以是\boxed{７２}", 72),
        (r"\boxed{0.5}", [r"\boxed{3}", r"\boxed{\frac{1}{2}}"]),
        (r"\boxed{ \text{Monday} }", ("3", r"\text{Monday}")),
    ],
)
def test_math_accepts_what_is_equal(response: str, answer: Any) -> None:
    pytest.importorskip("math_verify")
    assert math(response, answer) == 1


def test_math_gives_the_format_score_for_a_wrong_answer_in_a_box() -> None:
    pytest.importorskip("math_verify")
    assert math(r"\boxed{4}", "3") == 0
    assert math(r"共72人，答案是\boxed{北京}", "72") == 0
    assert math(r"\boxed{4}", "3", format_score=0.1) == 0.1
    assert math("4", "3", format_score=0.1) == 0


@pytest.mark.parametrize(
    ("response", "format_score", "expected"),
    [
        (r"\boxed{3}", None, 5),
        (r"\boxed{3}", -1, 5),
        (r"\boxed{4}", None, -5),
        (r"\boxed{4}", -1, -1),
        (r"\boxed{4}", 0, 0),
        ("4", -1, -5),
    ],
)
def test_math_scores_right_and_wrong_answers_as_it_is_told(
    response: str, format_score: float | None, expected: float
) -> None:
    pytest.importorskip("math_verify")
    assert math(response, ["2", "3"], right=5, wrong=-5, format_score=format_score) == expected


@pytest.mark.parametrize("answer", [None, [], [None]])
def test_math_needs_a_reference(answer: Any) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="the row has no answer to compare with"):
        math(r"\boxed{3}", answer)


def test_math_does_not_need_the_main_thread() -> None:
    pytest.importorskip("math_verify")
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math(r"\boxed{0.5}", r"\frac{1}{2}")))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize("task", ["chain_sum", "mini_sudoku", "knights_knaves", "arc_1d"])
def test_reasoning_gym_scores_its_own_answers(task: str) -> None:
    pytest.importorskip("reasoning_gym")
    source = Source(path=f"reasoning_gym:{task}", size=2)
    for row in load_rows(source, Data(train=source)):
        assert reasoning_gym(f"hm <answer>{row.answer}</answer>", row.extra) == 1
        assert reasoning_gym(f" {row.answer} ", row.extra) == 1
        assert reasoning_gym("<answer>nonsense</answer>", row.extra) < 0.1


def test_reasoning_gym_raises_for_rows_of_other_sources() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="not from a `reasoning_gym:` source"):
        reasoning_gym("3", {})
