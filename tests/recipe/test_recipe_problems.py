"""What is said about keys that do not exist and values that do not fit."""

import pytest
from recipe_texts import MINIMAL


def test_a_misspelt_key_is_reported_with_its_line_and_the_right_spelling(problems):
    found = problems(text=MINIMAL + "batch:\n  prompts_per_stp: 8\n")
    assert found == ["recipe.yaml:10: `batch.prompts_per_stp` is not a key; did you mean `batch.prompts_per_step`?"]


def test_a_key_in_the_wrong_section_is_found_in_the_right_one(problems):
    found = problems(text=MINIMAL + "rollout:\n  prompts_per_step: 8\n")
    assert found == ["recipe.yaml:10: `rollout.prompts_per_step` is not a key; did you mean `batch.prompts_per_step`?"]


def test_keys_below_a_misspelt_section_are_each_led_to_the_right_one(problems):
    found = problems(text=MINIMAL + "optimzer:\n  learning_rate: 1e-6\n  warmup: 3\n")
    assert found == [
        "recipe.yaml:10: `optimzer.learning_rate` is not a key; did you mean `optimizer.learning_rate`?",
        "recipe.yaml:11: `optimzer.warmup` is not a key; did you mean `optimizer.warmup_steps`?",
    ]


@pytest.mark.parametrize(
    ("habit", "ours"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("rollout.n", "batch.samples_per_prompt"),
        ("temperature", "rollout.temperature"),
    ],
)
def test_names_from_other_frameworks_lead_to_ours(problems, habit, ours):
    assert problems(f"{habit}=1") == [f"override {habit}=1: `{habit}` is not a key; did you mean `{ours}`?"]


def test_a_key_like_no_other_gets_no_suggestion(problems):
    assert problems("zzz=1") == ["override zzz=1: `zzz` is not a key"]


def test_a_wrong_choice_is_reported_with_all_choices_and_the_nearest(problems):
    (problem,) = problems(text=MINIMAL + "algorithm:\n  name: grpoo\n")
    assert problem.startswith("recipe.yaml:10: `algorithm.name: grpoo` is not one of grpo, ppo, dr_grpo, ")
    assert problem.endswith("; did you mean `grpo`?")


def test_a_wrong_choice_in_a_list_is_the_one_that_is_named(problems):
    (problem,) = problems("logging.trackers=[console, wandbb]")
    assert "`logging.trackers: wandbb` is not one of console, tensorboard, wandb" in problem
    assert problem.endswith("; did you mean `wandb`?")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.prompts_per_step=0", "`batch.prompts_per_step: 0` should be a whole number, at least 1"),
        ("batch.prompts_per_step=many", "`batch.prompts_per_step: many` should be a whole number, at least 1"),
        ("batch.prompts_per_step=2.5", "`batch.prompts_per_step: 2.5` should be a whole number, at least 1"),
        ("batch.prompts_per_step='8'", '`batch.prompts_per_step: "8"` should be a whole number, at least 1'),
        ("batch.prompts_per_step=true", "`batch.prompts_per_step: true` should be a whole number, at least 1"),
        ("batch.prompts_per_step=", "`batch.prompts_per_step: null` should be a whole number, at least 1"),
        ("optimizer.learning_rate=-1", "`optimizer.learning_rate: -1` should be a number, above 0"),
        ("optimizer.learning_rate=.inf", "`optimizer.learning_rate: Infinity` should be a number, above 0"),
        ("rollout.top_p=1.5", "`rollout.top_p: 1.5` should be a number, above 0 and at most 1"),
        ("algorithm.loss.clip_low=x", "`algorithm.loss.clip_low: x` should be a number, at least 0"),
        ("data.shuffle=yes", "`data.shuffle: yes` should be true or false"),
        ("rollout.stop=[1]", "`rollout.stop: [1]` should be a list (each item text)"),
        (
            "optimizer.betas=[0.9]",
            "`optimizer.betas: [0.9]` should be a list of 2 (each a number, at least 0 and below 1)",
        ),
        ("data.train.path=5", "`data.train.path: 5` should be text or a list (each item text)"),
        ("rollout=5", "`rollout: 5` should be a section, with its keys indented below it"),
        ("schedule.max_staleness=-1", "`schedule.max_staleness: -1` should be a whole number, at least 0"),
        ("train.parallel.shard=0", "`train.parallel.shard: 0` should be a whole number, at least 1 or null"),
        (
            "train.gradient_checkpointing=yes",
            "`train.gradient_checkpointing: yes` is not one of true, false, selective",
        ),
        ("train.offload=[weights]", "`train.offload: weights` is not one of parameters, gradients, optimizer"),
        ("cluster.placement.actor=1.5", "`cluster.placement.actor: 1.5` should be text or a whole number or a list"),
    ],
)
def test_a_value_that_does_not_fit_is_told_what_would(problems, override, message):
    (problem,) = problems(override)
    assert problem.startswith(f"override {override}: {message}")


def test_a_number_where_text_is_expected_should_be_quoted(problems):
    found = problems(text=MINIMAL.replace("name: test", "name: 2024"))
    assert found == ["recipe.yaml:1: `name: 2024` should be text; put it in quotes"]


def test_missing_keys_are_named_down_to_the_last(problems):
    assert problems(text="seed: 1\n") == [
        "recipe.yaml: `name` is missing",
        "recipe.yaml: `model.path` is missing",
        "recipe.yaml: `data.train.path` is missing",
    ]


def test_a_missing_key_of_a_section_is_reported_at_the_section(problems):
    assert problems(text=MINIMAL + "data.validation:\n  split: test\n") == [
        "recipe.yaml:9: `data.validation.path` is missing"
    ]


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(problems):
    found = problems(
        "a=1", "broken", text=MINIMAL + "seed: -1\nalgorithm: {name: x, loss: y}\nbatch: {ppo_epochs: 0}\nz: 1\n"
    )
    assert [problem.split(": ")[0] for problem in found] == [
        "recipe.yaml:9",
        "recipe.yaml:10",
        "recipe.yaml:10",
        "recipe.yaml:11",
        "recipe.yaml:12",
        "override broken",
        "override a=1",
    ]


def test_a_long_value_is_shortened(problems):
    (problem,) = problems(f"seed={'long ' * 100}")
    assert len(problem) < 700
    assert "..." in problem


@pytest.mark.slow
def test_no_similar_key_is_looked_for_where_there_is_too_much_to_compare(problems):
    long = "a" * 100_000
    [found] = problems(f"schedule.{long}=1")
    assert found.endswith(f"`schedule.{long}` is not a key")
    found = problems(text=MINIMAL + "batch:\n" + "".join(f"  prompts_per_ste{i}: 1\n" for i in range(3000)))
    assert len(found) == 3000
    assert sum("did you mean" in line for line in found) == 20
