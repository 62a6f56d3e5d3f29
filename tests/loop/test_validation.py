"""Validation: the same questions every time, greedy unless asked otherwise."""

import io
from dataclasses import replace
from pathlib import Path
from statistics import stdev

import pytest
from runs import VALIDATION, rows_of, train_here, write_recipe
from trajectories import make_trajectory

from corral.data.batch import StopReason
from corral.data.rows import Row
from corral.loop.components import several_names
from corral.loop.train import train
from corral.loop.validation import summarize
from corral.model.families import checked_plan
from corral.observe.console import Console, validation_line
from corral.observe.trajectory_store import read_trajectories
from corral.recipe.load import load_recipe

FOUR = ("validation.samples_per_prompt=4", "validation.temperature=1.0", "validation.pass_threshold=0.125")


def records(run: Path, step: int) -> list[dict[str, object]]:
    return list(read_trajectories(run / "trajectories" / f"step_{step:06d}.validation.parquet"))


@pytest.mark.slow
def test_the_questions_are_always_the_same(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(
        tmp_path, tiny_model, *VALIDATION, "validation.every=1", "logging.trajectories=true", "schedule.steps=3"
    )
    questions = [[record["prompt"] for record in records(run, step)] for step in range(4)]
    assert len(questions[0]) == 6
    assert questions == [questions[0]] * 4
    assert [row["step"] for row in rows_of(run)] == [0, 1, 1, 2, 2, 3, 3]


def test_answers_are_printed_after_the_first_validation_and_the_last(tmp_path: Path, tiny_model: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), [*VALIDATION, "validation.every=1", "schedule.steps=3"])
    stream = io.StringIO()
    train(recipe, checked_plan(recipe), Console(stream))
    lines = stream.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("validation ")][:4] == [
        "validation before training",
        "validation after step 1",
        "validation after step 2",
        "validation after training",
    ]
    assert sum(line.split() == ["prompt", "response", "answer", "reward"] for line in lines) == 2


@pytest.mark.slow
def test_greedy_answers_do_not_depend_on_the_seed(tmp_path: Path, tiny_model: Path) -> None:
    answers = []
    for seed in (0, 1):
        overrides = (f"name=seed{seed}", f"seed={seed}", "schedule.steps=1", "logging.trajectories=true")
        run = train_here(tmp_path, tiny_model, *VALIDATION, *overrides)
        answers.append([record["response"] for record in records(run, 0)])
    assert answers[0] == answers[1]


def test_sampled_answers_are_the_same_as_long_as_the_model_is(tmp_path: Path, tiny_model: Path) -> None:
    """Two validations of an unchanged model, four steps apart."""
    unchanged = ("environment.reward.name=regex", "environment.reward.options.pattern=nothing like it")
    run = train_here(tmp_path, tiny_model, *VALIDATION, *FOUR, *unchanged, "logging.trajectories=true")
    before, after = records(run, 0), records(run, 2)
    assert [record["response"] for record in before] == [record["response"] for record in after]
    assert len({str(record["response"]) for record in before}) > 6


def test_mean_and_pass_of_four_samples(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, *VALIDATION, *FOUR, "logging.trajectories=true", "schedule.steps=1")
    rewards = [float(str(record["reward"])) for record in records(run, 0)]
    groups = [rewards[i : i + 4] for i in range(0, 24, 4)]
    row = rows_of(run)[0]
    assert row["validation/mean@4"] == pytest.approx(sum(rewards) / 24)
    assert row["validation/pass@4"] == pytest.approx(sum(max(group) >= 0.125 for group in groups) / 6)
    assert 0 < row["validation/mean@4"] < row["validation/pass@4"]


SEVERAL = (
    "data.validation.sources.sums.path=arithmetic:addition",
    "data.validation.sources.sums.size=4",
    "data.validation.sources.products.path=arithmetic:multiplication",
    "data.validation.sources.products.size=2",
)


def test_every_source_has_its_own_score_with_its_interval(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, *SEVERAL, *FOUR, "logging.trajectories=true", "schedule.steps=1")
    row = rows_of(run)[0]
    for name, first, last in (("sums", 0, 4), ("products", 4, 6)):
        own = [float(str(record["reward"])) for record in records(run, 0) if first <= int(str(record["row"])) < last]
        groups = [own[i : i + 4] for i in range(0, len(own), 4)]
        assert row[f"validation/{name}/mean@4"] == pytest.approx(sum(own) / len(own))
        assert row[f"validation/{name}/pass@4"] == pytest.approx(
            sum(max(group) >= 0.125 for group in groups) / len(groups)
        )
        interval = 1.96 * stdev(sum(group) / 4 for group in groups) / len(groups) ** 0.5
        assert row[f"validation/{name}/ci95"] == pytest.approx(interval)
    weighted = (4 * row["validation/sums/mean@4"] + 2 * row["validation/products/mean@4"]) / 6
    assert row["validation/mean@4"] == pytest.approx(weighted)


def test_sources_are_those_of_a_column_where_the_recipe_names_none() -> None:
    def row(source: str, origin: str = "") -> Row:
        return Row([], None, source, {}, origin=origin)

    assert several_names([row("openai/gsm8k"), row("math"), row("math")]) == ["math", "openai/gsm8k"]
    assert several_names([row("math"), row("")]) == ["math"]
    assert several_names([row("math"), row("math")]) == several_names([row(""), row("")]) == []
    assert several_names([row("math", "easy"), row("math", "hard")]) == ["easy", "hard"]


def test_the_scores_of_sources_do_not_lengthen_the_console_line() -> None:
    total = {"validation/mean@1": 0.5, "validation/ci95": 0.1}
    several = {**total, "validation/a/mean@1": 0.9, "validation/a/ci95": 0.1, "validation/a/pass@8": 1.0}
    assert validation_line("after step 2", several, 10) == validation_line("after step 2", total, 10)


def test_max_prompts_takes_the_first(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("validation.max_prompts=2", "logging.trajectories=true", "schedule.steps=1")
    assert len(records(train_here(tmp_path, tiny_model, *VALIDATION, *overrides), 0)) == 2


def test_validations_can_be_left_out(tmp_path: Path, tiny_model: Path) -> None:
    off = ("validation.before_training=false", "validation.after_training=false")
    assert [row["step"] for row in rows_of(train_here(tmp_path, tiny_model, *VALIDATION, *off))] == [1, 2]


def test_the_summary_of_known_rewards() -> None:
    rewards = {0: [1.0, 0.0], 1: [0.5, 0.5], 2: [0.0, 0.0]}
    trajectories = [
        make_trajectory([1, 2], [3] * (2 + sample), group=group, sample=sample, reward=reward)
        for group, samples in rewards.items()
        for sample, reward in enumerate(samples)
    ]
    trajectories[0].stop = StopReason.END_OF_TURN
    trajectories[1].error = "broken"
    metrics = summarize(trajectories, pass_threshold=1.0)
    assert metrics["validation/mean@2"] == pytest.approx(1 / 3)
    assert metrics["validation/pass@2"] == pytest.approx(1 / 3)
    assert metrics["validation/length"] == 2.5
    assert metrics["validation/cut_off"] == pytest.approx(5 / 6)
    assert metrics["validation/errors"] == 1
    assert metrics["validation/ci95"] == pytest.approx(1.96 * (1 / 12) ** 0.5 / 3**0.5)
    dropped = [replace(one, is_dropped=one.sample == 1) for one in trajectories]
    assert summarize(dropped, pass_threshold=1.0)["validation/mean@2"] == pytest.approx(1 / 2)  # by its usual name
