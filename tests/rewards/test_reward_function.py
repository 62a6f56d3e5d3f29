import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.data.rows import Row
from corral.recipe.errors import UserError
from corral.rewards.reward_function import (
    built_in_rewards,
    call_reward,
    call_with,
    is_group_function,
    load_function,
)

ROW = Row([{"role": "user", "content": "2 + 2?"}], "4", "sums", {"level": 1, "extra_info": {"index": 3}})


def test_a_function_gets_what_its_signature_asks_for() -> None:
    seen: dict[str, Any] = {}

    def function(response: str, extra: dict[str, Any], source: str, bonus: float) -> float:
        seen.update(locals())
        return bonus

    assert call_reward(function, "four", ROW, {"bonus": 0.5}).reward == 0.5
    assert {key: seen[key] for key in ("response", "extra", "source")} == {
        "response": "four",
        "extra": ROW.extra,
        "source": "sums",
    }


def test_a_function_that_takes_anything_gets_everything() -> None:
    def function(response: str, **others: Any) -> float:
        assert sorted(others) == ["answer", "extra", "prompt", "source"]
        return 1.0

    assert call_reward(function, "four", ROW, {}).reward == 1.0


def test_a_function_written_for_verl_works_as_it_is() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float((data_source, solution_str, ground_truth, extra_info) == ("sums", "4", "4", {"index": 3}))

    assert call_reward(compute_score, "4", ROW, {}).reward == 1.0


def test_an_async_function_is_awaited() -> None:
    async def function(response: str) -> float:
        return 0.25

    assert call_reward(function, "four", ROW, {}).reward == 0.25


def test_a_dict_gives_score_and_metrics() -> None:
    def function(response: str) -> dict[str, Any]:
        return {"score": True, "length": 4, "said": "four"}

    result = call_reward(function, "four", ROW, {})
    assert (result.reward, result.metrics) == (1.0, {"length": 4.0})


@pytest.mark.parametrize(("text", "of"), [("2 + 2?", str), (None, lambda one: one[0]["content"])])
def test_a_function_written_for_trl_gets_lists_of_completions_and_columns(text: str | None, of: Any) -> None:
    def right(prompts: list[Any], completions: list[Any], answer: list[str], level: list[int], **others: Any) -> Any:
        assert prompts == [text or ROW.prompt] * 3
        assert (level, others) == ([1] * 3, {"data_source": ["sums"] * 3, "extra_info": [{"index": 3}] * 3, "most": 2})
        return [None if not of(one) else of(one) == own for one, own in zip(completions, answer, strict=True)]

    assert is_group_function(right)
    scores = call_with(right, ["4", "5", ""], replace(ROW, text=text), {"most": 2})
    assert [score.reward for score in scores] == [1.0, 0.0, None]
    counted = call_with(lambda completions: list(map(len, completions)), ["4"], replace(ROW, text="?"), {})
    assert counted[0].reward == 1


@pytest.mark.parametrize("returned", [None, {"score": None, "length": 4}])
def test_none_is_no_reward(returned: Any) -> None:
    result = call_reward(lambda response: returned, "", ROW, {})
    assert result.reward is None
    assert result.error is None
    assert result.metrics == ({} if returned is None else {"length": 4.0})


def test_a_function_of_a_group_gives_one_score_for_each_response() -> None:
    def longest(responses: list[str], answer: str, bonus: float = 1.0) -> list[Any]:
        assert answer == "4"
        scores = [bonus * (len(one) == max(map(len, responses))) for one in responses]
        return [None if not one else {"score": s, "n": len(one)} for one, s in zip(responses, scores, strict=True)]

    assert is_group_function(longest)
    scores = call_with(longest, ["a", "bbb", ""], ROW, {"bonus": 2.0})
    assert [(score.reward, score.metrics) for score in scores] == [(0.0, {"n": 1.0}), (2.0, {"n": 3.0}), (None, {})]


@pytest.mark.parametrize("returned", [0.5, [1.0], "ab", {"score": 1}])
def test_a_function_of_a_group_must_return_as_many_results(returned: Any) -> None:
    with pytest.raises(ValueError, match="must return a list of 2, one for each response"):
        call_with(lambda responses: returned, ["a", "b"], ROW, {})


def test_scalars_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert call_reward(lambda response: numpy.float32(0.5), "", ROW, {}).reward == 0.5
    assert call_reward(lambda response: numpy.bool_(True), "", ROW, {}).reward == 1.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("1.0", "must be a number; the function returned '1.0'"),
        (float("nan"), "must be finite; the function returned nan"),
        ({"reward": 1}, "a dict without `score`: reward"),
        ({"score": "high"}, "`score` must be a number"),
        ({"score": 1, "loss": float("inf")}, "`loss` must be finite"),
    ],
)
def test_a_result_that_is_no_finite_number_raises(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call_reward(lambda response: returned, "", ROW, {})


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write_file(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return f"{tmp_path}/mine.py:score"

    return write_file


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("def score(text): return 1", {}, r"must take a parameter named `response`; it takes \(text\)"),
        ("def score(response, bonus): return 1", {}, r"needs `bonus`; give it in reward\.options"),
        ("def score(response, bonus=1): return 1", {"bonsu": 2}, "no option `bonsu`; did you mean `bonus`?"),
        ("def score(response, /): return 1", {}, "`response` can't be given by name"),
        (
            "def score(completions, log_metric): return [1]",
            {},
            "needs `log_metric` of TRL's trainer",
        ),
        ("score = 3", {}, "is not a function"),
        ("def scores(response): return 1", {}, "has no `score`; did you mean `scores`?"),
        ("import nothing_like_this", {}, "failed: ModuleNotFoundError"),
        ("raise SystemExit('bye')", {}, "failed: SystemExit: bye"),
    ],
)
def test_a_function_that_can_not_be_used_is_an_error(
    write: Callable[[str], str], text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_function(write(text), options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exat", {}, "no reward `exat`; did you mean `exact`?; there are by_source, code, em, exact"),
        ("regex", {}, "`regex` needs `pattern`"),
        ("regex", {"pattern": "("}, "bad options: missing"),
        ("exact", {"extract": "("}, "bad options: missing"),
        ("number", {"which": "lats"}, "bad options: which must be last or first"),
        ("gsm8k", {"method": "lax"}, "bad options: method must be strict or flexible"),
    ],
)
def test_a_built_in_function_with_bad_options_is_an_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        load_function(name, options)


@pytest.mark.parametrize("name", sorted({*built_in_rewards()} - {"regex", "math", "reasoning_gym", "judge", "code"}))
def test_built_in_functions_need_no_options(name: str) -> None:
    assert callable(load_function(name, {}))


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("math", "math_verify", "math"), ("reasoning_gym", "reasoning_gym", "reasoning-gym")]
)
def test_a_missing_package_is_an_error_that_names_the_extra(name: str, package: str, extra: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
from corral.recipe.errors import UserError
from corral.rewards.reward_function import load_function
try:
    load_function({name!r}, {{}})
except UserError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert f"pip install 'corral[{extra}]'" in printed
