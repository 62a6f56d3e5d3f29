"""Several rewards of one environment: weights, sources, and what is recorded of each."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from runs import VALIDATION, rows_of, steps_of, train_here

from corral.data.rows import Row
from corral.observe.trajectory_store import read_trajectories
from corral.recipe.errors import RecipeError
from corral.recipe.load import load_recipe
from corral.recipe.rules import check
from corral.recipe.schema import Environment
from corral.rewards.reward_function import Score
from corral.rewards.scorer_pool import RewardScorer, ScorerPools

FUNCTIONS = """
async def length(response):
    return {"score": len(response), "words": len(response.split())}

def only_even(response):
    return None if len(response) % 2 else 1.0

def fails(response):
    raise RuntimeError("no")

def longest(responses):
    return [{"score": len(one) == max(map(len, responses)), "size": len(responses)} for one in responses]
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "several.py").write_text(FUNCTIONS)
    return f"{tmp_path}/several.py"


class Scorers:
    """Makes the scorer of rewards, and closes it."""

    def __init__(self) -> None:
        self.pools: list[ScorerPools] = []

    def __call__(self, rewards: Mapping[str, Any]) -> RewardScorer:
        environment = Environment.model_validate({"rewards": rewards})
        self.pools.append(ScorerPools.start({"": environment}))
        return self.pools[-1].by_tag[""]


@pytest.fixture
def scorer() -> Iterator[Scorers]:
    scorers = Scorers()
    yield scorers
    for pools in scorers.pools:
        pools.close()


def row(source: str = "") -> Row:
    return Row([{"role": "user", "content": "?"}], "abc", source, {})


def score(scorer: RewardScorer, response: str, row: Row) -> Score:
    return asyncio.run(scorer.score(response, row))


def test_the_reward_is_the_weighted_sum_of_those_for_the_row(scorer: Scorers, functions: str) -> None:
    rewards = scorer(
        {
            "long": {"name": f"{functions}:length", "weight": 0.5},
            "right": {"name": "exact", "weight": 2.0, "sources": ["words", "names"]},
        }
    )
    assert score(rewards, "abc", row("words")) == Score(
        3.5, metrics={"long/words": 1.0}, by_name={"long": 3.0, "right": 1.0}
    )
    assert score(rewards, "abc", row("numbers")) == Score(1.5, metrics={"long/words": 1.0}, by_name={"long": 3.0})


def test_a_row_that_no_reward_is_for_has_none_and_says_so(scorer: Scorers) -> None:
    rewards = scorer({"right": {"name": "exact", "sources": ["words"]}})
    found = score(rewards, "abc", row("numbers"))
    assert found == Score(None, error="none of the rewards (right) is for `data_source: numbers`")


def test_a_sum_of_which_a_part_is_not_known_is_not_known(scorer: Scorers, functions: str) -> None:
    rewards = scorer({"right": {"name": "exact"}, "even": {"name": f"{functions}:only_even"}})
    assert score(rewards, "abc", row()) == Score(None, by_name={"right": 1.0, "even": None})
    assert score(rewards, "abcd", row()).reward == 1.0


@pytest.mark.parametrize(("on_error", "total"), [(-1.0, 0.0), ("drop", None)])
@pytest.mark.slow
def test_each_reward_has_its_own_on_error(scorer: Scorers, functions: str, on_error: Any, total: float | None) -> None:
    rewards = scorer({"right": {"name": "exact"}, "bad": {"name": f"{functions}:fails", "on_error": on_error}})
    found = score(rewards, "abc", row())
    assert found.reward == total
    assert found.error is not None
    assert found.error.startswith("bad: RuntimeError: no (several.py:")


def test_a_reward_of_the_group_is_added_to_the_others(scorer: Scorers, functions: str) -> None:
    rewards = scorer({"right": {"name": "exact"}, "longest": {"name": f"{functions}:longest", "weight": 10.0}})
    waiting = [score(rewards, response, row()) for response in ("abc", "abcd")]
    assert [(one.reward, one.by_name) for one in waiting] == [(None, {"right": 1.0}), (None, {"right": 0.0})]
    assert asyncio.run(rewards.score_group(waiting, row())) == [
        Score(1.0, metrics={"longest/size": 2.0}, by_name={"right": 1.0, "longest": 0.0}),
        Score(10.0, metrics={"longest/size": 2.0}, by_name={"right": 0.0, "longest": 1.0}),
    ]


def test_a_sum_with_the_reward_model_waits_for_its_score(scorer: Scorers, functions: str) -> None:
    rewards = scorer(
        {"liked": {"name": "reward_model"}, "right": {"name": "exact"}, "all": {"name": f"{functions}:longest"}}
    )
    [waiting] = [score(rewards, "abc", row())]
    assert waiting == Score(None, by_name={"right": 1.0}, response="abc", awaits_model=True)
    assert asyncio.run(rewards.score_group([waiting], row())) == [
        Score(None, metrics={"all/size": 1.0}, by_name={"right": 1.0, "all": 1.0}, awaits_model=True)
    ]


def several(functions: str) -> tuple[str, ...]:
    """Overrides: rewards of a sample, of a group, and of rows that there are none of."""
    return (
        "~environment.reward",
        f"environment.rewards.even.name={functions}:only_even",
        "environment.rewards.even.weight=2",
        f"environment.rewards.longest.name={functions}:longest",
        "environment.rewards.other.name=exact",
        "environment.rewards.other.sources=[other]",
    )


@pytest.mark.slow
def test_a_run_logs_and_stores_each_reward_by_its_name(tmp_path: Path, tiny_model: Path, functions: str) -> None:
    more = ("logging.trajectories=true", "schedule.steps=1", "batch.samples_per_prompt=8", *VALIDATION)
    run = train_here(tmp_path, tiny_model, *several(functions), *more)
    records = list(read_trajectories(run / "trajectories" / "step_000001.parquet"))
    [step] = steps_of(run)
    known = [record for record in records if record["reward"] is not None]
    assert len(records) == 32
    assert 0 < len(known) < 32
    for record in known:
        assert record["reward"] == 2 * record["rewards"]["even"] + record["rewards"]["longest"]
    assert all(record["rewards"]["even"] is None for record in records if record["reward"] is None)
    longest = [record["rewards"]["longest"] for record in records]
    assert step["reward/longest/mean"] == pytest.approx(sum(longest) / 32)
    assert step["reward/even/mean"] == 1.0
    assert step["samples/dropped"] == 32 - len(known)
    assert "reward/other/mean" not in step
    assert any("validation/reward/longest/mean" in row for row in rows_of(run))


RECIPE = """
name: x
model: {path: blank-1m}
data: {train: {path: "arithmetic:addition", size: 4}}
"""


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{rewards: {a: {name: exact}}, reward: {name: exact}}", "`environment.reward.name` has no effect"),
        ("{rewards: {a: {name: exact, sources: []}}}", "`environment.rewards.a.sources` is empty"),
        ("{rewards: {'a/b': {name: exact}}}", "becomes part of metrics' names"),
        ("{rewards: {a: {nam: exact}}}", "`environment.rewards.a.nam` is not a key; did you mean"),
        ("{name: sokoban, rewards: {a: {name: exact}}}", "sokoban has rewards of its own"),
        ("{reward: {on_error: skip}}", "`environment.reward.on_error: skip`"),
    ],
)
def test_rewards_that_contradict_something_are_refused(tmp_path: Path, section: str, problem: str) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{RECIPE}environment: {section}\n")
    with pytest.raises(RecipeError) as caught:
        check(load_recipe(tmp_path / "recipe.yaml", ()))
    assert problem in str(caught.value)
