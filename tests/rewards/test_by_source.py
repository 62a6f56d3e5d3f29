import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corral.data.rows import Row
from corral.data.sources import load_rows
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Reward, Source
from corral.rewards.reward_function import call_reward, load_function
from corral.rewards.scorer_pool import InProcessScorer
from corral.rewards.scorers import SCORER_OF_SOURCE, scorer_for_source


def score(response: str, answer: Any, source: str, **options: Any) -> float:
    row = Row([{"role": "user", "content": "?"}], answer, source, {})
    return call_reward(load_function("by_source", options), response, row, options).reward


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("math", "math"),
        ("hiyouga/geometry3k", "geo3k"),
        ("math_dapo", "math"),
        ("math_dapo_reasoning", "math"),
        ("aime2024", "math"),
        ("numina_olympiads", "math"),
        ("searchR1_nq", "em"),
        ("2wikimultihopqa", "em"),
        ("bamboogle", "em"),
        ("arithmetic/addition", "number"),
    ],
)
def test_a_data_source_has_its_scorer(source: str, name: str) -> None:
    assert scorer_for_source(source, SCORER_OF_SOURCE) == name


def test_each_row_is_scored_by_its_own() -> None:
    assert score("#### 72", "72", "openai/gsm8k") == 1
    assert score("72", "72", "openai/gsm8k") == 0
    assert score("<answer>The Seine</answer>", {"target": ["Seine"]}, "searchR1_nq") == 1


def test_math_rows_are_scored() -> None:
    pytest.importorskip("math_verify")
    assert score(r"\boxed{\frac{1}{2}}", "0.5", "lighteval/MATH") == 1


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"<think>30 + 2</think> It is \boxed{32}.", 1.0),
        (r"It is 32, so \boxed{\frac{64}{2}}", 0.9),
        (r"<think>30 + 3</think> It is \boxed{33}.", 0.1),
        ("<think>30 + 2</think> It is 32.", 0.0),
    ],
)
def test_geometry_is_scored_by_its_box_and_its_form(response: str, expected: float) -> None:
    """The numbers are those of verl's `geo3k.compute_score`."""
    pytest.importorskip("math_verify")
    assert score(response, "32", "hiyouga/geometry3k") == pytest.approx(expected)


def test_generated_arithmetic_has_a_scorer() -> None:
    source = Source(path="arithmetic:addition", size=1)
    [row] = load_rows(source, Data(train=source))
    assert call_reward(load_function("by_source", {}), f"it is {row.answer}", row, {}).reward == 1


def test_sources_of_the_recipe_add_to_ours_and_come_first() -> None:
    sources = {"mine": "exact", "openai/gsm8k": "number"}
    assert score("yes", "yes", "mine", sources=sources) == 1
    assert score("72", "72", "openai/gsm8k", sources=sources) == 1


def test_a_function_of_ones_own_may_be_async_and_gets_what_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def length(response, source): return len(response + source)")
    options = {"sources": {"abc": f"{tmp_path}/mine.py:length"}}
    assert score("four", None, "abc", **options) == 7
    here = InProcessScorer(Reward(name="by_source", options=options))
    assert asyncio.run(here.score("four", Row([], None, "abc", {}))).reward == 7


@pytest.mark.parametrize(
    ("source", "whose"), [("who/knows", "`data_source: who/knows`"), ("", "a row without `data_source`")]
)
def test_a_source_that_nobody_knows_is_an_error_that_says_what_to_set(source: str, whose: str) -> None:
    with pytest.raises(ValueError, match=f"no scorer is known for {whose}; set `environment.reward.name`"):
        score("72", "72", source)


@pytest.mark.parametrize(
    ("scorer", "message"), [("gms8k", "no reward `gms8k`; did you mean `gsm8k`"), ("none.py:score", "none.py")]
)
def test_a_scorer_that_is_not_there_is_said_before_any_row(scorer: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_function("by_source", {"sources": {"mine": scorer}})


def test_only_rows_for_math_need_its_package() -> None:
    program = """
import sys
sys.modules["math_verify"] = None
from corral.data.rows import Row
from corral.recipe.errors import UserError
from corral.rewards.reward_function import call_reward, load_function
function = load_function("by_source", {"sources": {"mine": "math"}})
print(call_reward(function, "#### 2", Row([], "2", "openai/gsm8k", {}), {}).reward)
try:
    call_reward(function, "2", Row([], "2", "aime24", {}), {})
except UserError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("1.0\n")
    assert "pip install 'corral[math]'" in printed
