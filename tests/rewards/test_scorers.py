from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.data.answers import after_hashes, as_number, last_boxed, numbers
from corral.rewards.scorers import exact, gsm8k, number, regex


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5-3", [5, 3]),
        ("5 - 3 = 2.", [5, 3, 2]),
        ("x=-3", [-3]),
        ("−7 degrees", [-7]),
        ("it costs $1,234.50.", ["1234.50"]),
        ("-$5 or $-5", [-5, -5]),
        ("1,2,3", [1, 2, 3]),
        ("so...12", [12]),
        (".5 and 1e6", ["0.5", "1e6"]),
        ("gpt4 v1.5 H2O", []),
        (r"\boxed{12}", [12]),
        ("答案是-５，共１，２３４．５元。", [-5, "1234.5"]),
        ("คำตอบคือ ๗๒", [72]),
        ("", []),
    ],
)
def test_numbers_are_found_in_text(text: str, expected: list[int | str]) -> None:
    assert numbers(text) == [Decimal(value) for value in expected]


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_any_number_that_is_written_out_is_read_back(value: Decimal) -> None:
    assert numbers(f"The answer is {value:f}.") == [value]
    assert as_number(f"{value:,f}") == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{3} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{4} and \boxed{5", "4"),
        (r"\fbox{3} \fboxed{ 6 }", "6"),
        ("none", None),
    ],
)
def test_the_last_complete_box_is_found(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def test_what_follows_the_last_hashes_is_found() -> None:
    assert after_hashes("a #### 1\nb #### 2,000 \nend") == "2,000"
    assert after_hashes("no answer") is None
    assert after_hashes("#### ") is None


def test_exact_ignores_spaces_around_and_case_when_asked() -> None:
    assert exact(" Paris\n", "Paris") == 1
    assert exact("paris", "Paris") == 0
    assert exact("paris", "Paris", ignore_case=True) == 1
    assert exact("12", 12) == 1


def test_exact_compares_the_last_thing_extracted() -> None:
    tag = r"<answer>(.*?)</answer>"
    assert exact("<answer>no</answer> wait <answer> yes </answer>", "yes", extract=tag) == 1
    assert exact("yes", "yes", extract=tag) == 0
    assert exact("it is 42", "42", extract=r"\d+") == 1


def test_exact_without_an_answer_raises() -> None:
    with pytest.raises(ValueError, match="no answer to compare with"):
        exact("yes", None)


def test_regex_asks_for_a_match_only() -> None:
    assert regex("<think>hm</think> 3", pattern=r"^<think>.*</think>") == 1
    assert regex("3", pattern=r"^<think>.*</think>") == 0


def test_regex_compares_a_group_with_the_answer() -> None:
    pattern = r"answer: (?P<value>\w+)"
    assert regex("answer: a, no, answer: b", "b", pattern=pattern, group=1) == 1
    assert regex("answer: B", "b", pattern=pattern, group="value", ignore_case=True) == 1
    assert regex("answer: c", "b", pattern=pattern, group=1) == 0
    assert regex("b", "b", pattern=pattern, group=1) == 0


def test_regex_ignores_case_in_its_search_too() -> None:
    assert regex("ANSWER: 3", pattern="answer") == 0
    assert regex("ANSWER: 3", pattern="answer", ignore_case=True) == 1
    assert regex("ANSWER: B", "b", pattern=r"answer: (\w)", group=1, ignore_case=True) == 1


@pytest.mark.parametrize("group", [2, -1, "word", 1.0])
def test_regex_refuses_a_group_that_its_pattern_does_not_have(group: Any) -> None:
    with pytest.raises(ValueError, match=f"has no group {group!r}"):
        regex("no match", "b", pattern=r"answer: (?P<value>\w)", group=group)


def test_number_compares_the_last_or_first_number() -> None:
    assert number("3 + 4 = 7", "7") == 1
    assert number("3 + 4 = 7", 3, which="first") == 1
    assert number("It is 1,200.00 dollars", "1200") == 1
    assert number("no idea", "7") == 0
    assert number("3.14", 3.14159, tolerance=0.01) == 1


def test_number_raises_for_an_answer_that_is_none() -> None:
    with pytest.raises(ValueError, match="'blue' is not a number"):
        number("7", "blue")


def test_strict_gsm8k_wants_the_hashes() -> None:
    assert gsm8k("So #### 1,200", "1200") == 1
    assert gsm8k("So 1200", "1200") == 0
    assert gsm8k("#### 3", "1200", format_score=0.1) == 0.1
    assert gsm8k("#### many", "1200", format_score=0.1) == 0


def test_flexible_gsm8k_takes_the_last_number() -> None:
    assert gsm8k("So it is $1,200.", "1200", method="flexible") == 1
    assert gsm8k("1200 or 3", "1200", method="flexible") == 0


def test_gsm8ks_worked_solution_can_be_the_answer() -> None:
    assert gsm8k("#### 72", "48 + 24 = <<48+24=72>>72\n#### 72") == 1
