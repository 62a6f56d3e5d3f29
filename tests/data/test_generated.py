import re
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import write_recipe

from corral.data.rows import Row
from corral.data.sources import load_rows
from corral.model.families import checked_plan
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe
from corral.recipe.schema import Data, Source


def load(path: str, seed: int = 0, size: int | None = None, **options: Any) -> list[Row]:
    source = Source(path=path, seed=seed, size=size, options=options)
    return load_rows(source, Data(train=source))


def questions(rows: list[Row]) -> list[str]:
    return [row.prompt[-1]["content"] for row in rows]


def test_arithmetic_answers_are_right() -> None:
    for row in load("arithmetic:mixed", size=300, num_terms=3):
        question = re.fullmatch(r"What is (\d+) ([-+*]) (\d+) \2 (\d+)\?", row.prompt[0]["content"])
        assert question is not None
        a, operator, b, c = question.groups()
        results = {"+": int(a) + int(b) + int(c), "-": int(a) - int(b) - int(c), "*": int(a) * int(b) * int(c)}
        assert row.answer == str(results[operator])


def test_arithmetic_questions_are_distinct_and_follow_from_the_seed() -> None:
    rows = questions(load("arithmetic:addition", size=500, seed=3))
    assert len(set(rows)) == 500
    assert rows == questions(load("arithmetic:addition", size=500, seed=3))
    assert rows != questions(load("arithmetic:addition", size=500, seed=4))


def test_all_questions_there_are_can_be_asked_for() -> None:
    assert len(set(questions(load("arithmetic:multiplication", size=100, digits=1)))) == 100


def test_terms_stay_between_min_and_max() -> None:
    asked = questions(load("arithmetic:subtraction", size=9, min=4, max=6))
    assert {int(term) for question in asked for term in re.findall(r"\d+", question)} == {4, 5, 6}


def test_terms_can_be_larger_than_any_index() -> None:
    assert len(set(questions(load("arithmetic:addition", size=50, digits=30)))) == 50


@pytest.mark.parametrize("task", ["addition", "mixed"])
def test_the_parts_never_share_a_question_and_together_are_all(task: str) -> None:
    train = set(questions(load(f"arithmetic:{task}", seed=0, digits=1, part="train")))
    validation = set(questions(load(f"arithmetic:{task}", seed=1, digits=1, part="validation")))
    assert train.isdisjoint(validation)
    assert validation
    assert train | validation == set(questions(load(f"arithmetic:{task}", digits=1)))


def test_the_parts_share_no_question_with_swapped_terms_either() -> None:
    train = set(questions(load("arithmetic:addition", digits=1, part="train")))
    for question in questions(load("arithmetic:addition", digits=1, part="validation")):
        a, b = re.findall(r"\d+", question)
        assert f"What is {b} + {a}?" not in train


def test_pairs_are_the_right_number_and_one_that_is_wrong_in_one_digit() -> None:
    source = Source(path="arithmetic:subtraction", size=300, options={"pairs": True})
    for row in load_rows(source, Data(train=source, chosen_key="good", rejected_key="bad"), with_rejected=True):
        [right], [wrong] = row.completion, row.rejected
        assert right["content"] == row.answer
        assert sum(a != b for a, b in zip(right["content"], wrong["content"], strict=True)) == 1


def test_generated_rows_need_no_column_names() -> None:
    source = Source(path="arithmetic:addition", size=1)
    [row] = load_rows(source, Data(train=source, prompt_key="question", answer_key="solution"))
    assert row.prompt[0]["content"].startswith("What is")
    assert row.answer is not None


@pytest.mark.parametrize(
    ("path", "size", "options", "message"),
    [
        ("arithmetic:division", None, {}, "no `arithmetic:division`; there are addition, .* and mixed"),
        ("arithmetic:addition", 101, {"digits": 1}, "only 100 different questions .* not size 101"),
        ("arithmetic:addition", None, {"digit": 1}, "options.digit: Extra inputs are not permitted"),
        ("arithmetic:addition", None, {"digits": 1, "max": 5}, "give either digits, or min and max"),
        ("arithmetic:addition", None, {"min": 5, "max": 4}, "min must not be larger than max"),
    ],
)
def test_what_arithmetic_can_not_do_is_an_error(
    path: str, size: int | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(path, size=size, **options)


def test_a_plan_says_which_part_has_fewer_questions_than_are_asked_for(tmp_path: Path, tiny_model: Path) -> None:
    source = "data.validation={path: 'arithmetic:addition', size: 16, options: {digits: 1, part: validation}}"
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), [source])
    with pytest.raises(UserError, match=r"data.validation: arithmetic:addition has only 8 different questions"):
        checked_plan(recipe)


def test_reasoning_gym_rows_carry_what_their_scorer_needs() -> None:
    pytest.importorskip("reasoning_gym")
    [row] = load("reasoning_gym:chain_sum", size=1, min_terms=2, max_terms=2)
    problem = row.extra["reasoning_gym"]
    assert problem["task"] == "chain_sum"
    assert problem["options"] == {"min_terms": 2, "max_terms": 2}
    assert (problem["entry"]["question"], problem["entry"]["answer"]) == (row.prompt[0]["content"], row.answer)


def test_reasoning_gym_rows_of_neighbouring_seeds_differ() -> None:
    pytest.importorskip("reasoning_gym")
    first = questions(load("reasoning_gym:chain_sum", size=50, seed=0))
    assert first == questions(load("reasoning_gym:chain_sum", size=50, seed=0))
    assert set(first).isdisjoint(questions(load("reasoning_gym:chain_sum", size=50, seed=1)))


def test_reasoning_gym_errors_name_the_nearest_task_and_the_bad_option() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=r"no task `chain_sums`; did you mean `chain_sum`\?"):
        load("reasoning_gym:chain_sums")
    with pytest.raises(UserError, match=r"chain_sum: bad options .*terms"):
        load("reasoning_gym:chain_sum", terms=3)


def test_without_reasoning_gym_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=re.escape("pip install 'corral[reasoning-gym]'")):
        load("reasoning_gym:chain_sum")
