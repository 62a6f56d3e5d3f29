from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.data.rows import Row
from corral.rewards.question_answering import em, f1, is_well_formed, normalized, search_r1, sub_em
from corral.rewards.reward_function import call_reward, load_function


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("Porto-Novo", "portonovo"),
        ("112,622", "112622"),
        (".bj", "bj"),
        ("theatre", "theatre"),
        ("A", "a"),
        ("!?", "!?"),
        ("", ""),
    ],
)
def test_case_punctuation_articles_and_spaces_do_not_count(text: str, expected: str) -> None:
    assert normalized(text) == expected


@given(st.text(st.characters(max_codepoint=127)))
def test_what_is_normalised_stays_as_it_is(text: str) -> None:
    assert normalized(normalized(text)) == normalized(text)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("<answer>Paris</answer>", "paris", 1.0),
        ("<answer> the Paris. </answer>", ["Lyon", "Paris"], 1.0),
        ("<answer>Paris</answer>", {"target": ["Paris"]}, 1.0),
        ("<answer>Lyon</answer> or rather <answer>Paris</answer>", "Paris", 1.0),
        ("<answer>Paris</answer> or rather <answer>Lyon</answer>", "Paris", 0.1),
        ("<answer>It is Paris</answer>", "Paris", 0.1),
        ("<answer></answer>", "Paris", 0.1),
        ("<answer></answer>", "a", 0.1),
        ("<answer>42</answer>", 42, 1.0),
        ("Paris", "Paris", 0.0),
        ("<answer>Paris", "Paris", 0.0),
        ("<information><answer>Paris</answer></information>", "Paris", 0.0),
        ("<answer>Lyon</answer><information><answer>Paris</answer></information>", "Lyon", 1.0),
    ],
)
def test_exact_match_looks_at_the_last_answer_of_the_model(response: str, answer: object, expected: float) -> None:
    assert em(response, answer, format_score=0.1) == expected


@pytest.mark.parametrize(
    ("said", "expected"), [("It is Paris, of course", 1.0), ("Parish", 0.1), ("Lyon", 0.1), (None, 0.0)]
)
def test_sub_em_wants_the_words_of_the_reference_in_the_answer(said: str | None, expected: float) -> None:
    response = "no idea" if said is None else f"<answer>{said}</answer>"
    assert sub_em(response, ["Paris", "Lutetia"], format_score=0.1) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("George Washington", 1.0),
        ("Washington", 2 / 3),  # 1 of 1 word said is right, 1 of 2 is there
        ("George Walker Bush Washington", 2 * 2 / (4 + 2)),
        ("Washington Washington", 2 * 1 / (2 + 2)),
        ("Lincoln", 0.1),
        (None, 0.0),
    ],
)
def test_f1_is_the_overlap_with_the_nearest_reference(said: str | None, expected: float) -> None:
    response = "no idea" if said is None else f"<answer>{said}</answer>"
    assert f1(response, ["the George Washington", "him"], format_score=0.1) == pytest.approx(expected)


THINK, ASK, READ = "<think>hm</think>", "<search>q</search>", "\n\n<information>Paris is it</information>\n\n"


@pytest.mark.parametrize(
    "response",
    [
        f"{THINK}<answer>x</answer>",
        f"{THINK}\n{ASK}{READ}{THINK} <answer>x</answer>\n",
        f"{THINK}{ASK}{READ}{THINK}{ASK}{READ}{THINK}<answer></answer>",
    ],
)
def test_thinking_searching_reading_and_answering_in_turn_is_well_formed(response: str) -> None:
    assert is_well_formed(response)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "<answer>x</answer>",  # no thought
        f"{THINK}{ASK}{READ}<answer>x</answer>",  # no thought after reading
        f"{THINK}{ASK}{THINK}<answer>x</answer>",  # nothing read
        f"{THINK}{READ}{THINK}<answer>x</answer>",  # nothing asked
        f"{THINK}{THINK}<answer>x</answer>",
        f"{THINK}so: <answer>x</answer>",  # words between blocks
        f"well {THINK}<answer>x</answer>",
        f"{THINK}<answer>x</answer> done",
        f"{THINK}<answer>x</answer><answer>x</answer>",
        f"{THINK}<answer>x</answer>{THINK}",
        f"{THINK}<answer>x",  # left open
        f"{THINK}{ASK}{READ}{THINK}",  # no answer
        "<think>hm<answer>x</answer></think>",  # one in another
        "<think>hm</search><answer>x</answer>",
        "</think><answer>x</answer>",
    ],
)
def test_anything_else_is_not(response: str) -> None:
    assert not is_well_formed(response)


@pytest.mark.parametrize(
    ("response", "score", "exact_match", "well_formed"),
    [
        (f"{THINK}<answer>Paris</answer>", 1.0, 1, 1),
        ("<answer>Paris</answer>", 0.8, 1, 0),
        (f"{THINK}<answer>Lyon</answer>", 0.2, 0, 1),
        (f"{THINK}{ASK}{READ}{THINK}<answer>Lyon</answer>", 0.25, 0, 1),
        (f"{THINK}{ASK}{READ}<answer>Lyon</answer>", 0.1, 0, 0),  # found, but out of shape
        ("<answer>Lyon</answer>", 0.1, 0, 0),
        (f"{THINK}{ASK}{READ}", 0.0, 0, 0),
        ("Paris", 0.0, 0, 0),
    ],
)
def test_search_r1_rewards_the_answer_the_form_and_the_search(
    response: str, score: float, exact_match: int, well_formed: int
) -> None:
    result = search_r1(response, "Paris", retrieval_score=0.05)
    assert result == pytest.approx({"score": score, "exact_match": exact_match, "well_formed": well_formed})


@pytest.mark.parametrize("scorer", [em, sub_em, f1, search_r1])
@pytest.mark.parametrize("answer", [None, [], {"targets": ["x"]}])
def test_a_row_without_an_answer_is_an_error(scorer: object, answer: object) -> None:
    with pytest.raises(ValueError, match="the row has no answer"):
        scorer("<answer>x</answer>", answer)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["em", "sub_em", "f1", "search_r1"])
def test_they_are_reward_functions_that_a_recipe_can_name(name: str) -> None:
    function = load_function(name, {})
    row = Row([], ["Paris"], "", {})
    assert call_reward(function, f"{THINK}<answer>Paris</answer>", row, {}).reward == 1.0


ANSWERS = Path(__file__).with_name("answers_without_spaces.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("line", ANSWERS)
def test_answers_in_scripts_without_spaces_are_compared_by_characters(line: str) -> None:
    reference, found, verdicts = line.split(" | ")
    response = f"<answer>{found}</answer>"
    scores = [str(int(score(response, reference))) for score in (em, sub_em)]
    overlap = f1(response, reference)
    assert [*scores, "~" if 0 < overlap < 1 else str(int(overlap))] == verdicts.split()
