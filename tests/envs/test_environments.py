import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.data.rows import Row
from corral.envs.base import EnvSet, StepResult
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Reward, Rollout
from corral.rewards.scorer_pool import ScorerPool

ROW = Row([{"role": "user", "content": "2 + 2?"}], "4", "", {})

COUNTER = """
from corral.envs.base import StepResult

class Counter:
    def __init__(self, limit, pool=None):
        self.limit, self.pool = limit, pool

    async def reset(self, row, seed):
        self.turns = 0
        return row.prompt

    async def step(self, reply):
        self.turns += 1
        return StepResult([{"role": "user", "content": "again"}], 0.5, done=self.turns == self.limit)

    async def close(self):
        pass

class Incomplete:
    async def reset(self, row, seed): ...
    async def close(self): ...

class Mixed:
    async def reset(self, row, seed): ...
    def step(self, reply): ...
    async def close(self): ...

def function(): ...
"""


@pytest.fixture
def pool() -> Iterator[ScorerPool]:
    pool = ScorerPool(Reward(name="number", on_error=-1))
    yield pool
    pool.close()


@pytest.fixture
def counter(tmp_path: Path) -> str:
    (tmp_path / "counter.py").write_text(COUNTER)
    return f"{tmp_path}/counter.py"


def open_one(environment: Environment, pool: ScorerPool) -> Callable[[], Any]:
    return EnvSet({"": environment}, {"": pool}, Rollout()).factories[""].make


def play(environment: Environment, pool: ScorerPool, reply: str, row: Row = ROW) -> tuple[Any, list[StepResult]]:
    async def until_done() -> tuple[Any, list[StepResult]]:
        env = open_one(environment, pool)()
        first, steps = await env.reset(row, seed=0), [await env.step(reply)]
        while not steps[-1].done:
            steps.append(await env.step(reply))
        await env.close()
        return first, steps

    return asyncio.run(until_done())


def test_a_question_is_one_step_scored_by_the_reward_function(pool: ScorerPool) -> None:
    first, steps = play(Environment(), pool, "It is 4.")
    assert first == ROW.prompt
    assert steps == [StepResult([], 1.0, done=True)]


def test_a_failed_reward_is_told_with_the_step(pool: ScorerPool) -> None:
    [step] = play(Environment(), pool, "It is 4.", Row(ROW.prompt, "blue", "", {}))[1]
    assert (step.reward, step.done) == (-1.0, True)
    assert step.error is not None
    assert "the answer 'blue' is not a number" in step.error


def test_each_call_of_the_factory_makes_a_new_environment(pool: ScorerPool) -> None:
    make = open_one(Environment(), pool)
    assert make() is not make()


def test_a_users_class_is_an_environment(pool: ScorerPool, counter: str) -> None:
    _, steps = play(Environment(name=f"{counter}:Counter", options={"limit": 3}), pool, "hi")
    assert [step.done for step in steps] == [False, False, True]


def test_a_users_class_gets_the_pool_if_it_asks(pool: ScorerPool, counter: str) -> None:
    made: Any = open_one(Environment(name=f"{counter}:Counter", options={"limit": 3}), pool)()
    assert made.pool is pool


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qestion", {}, "no environment `qestion`; did you mean `question`?"),
        ("question", {"turns": 3}, "its options don't fit: got an unexpected keyword argument 'turns'"),
        ("frozen_lake", {"size": "abc"}, "`frozen_lake`: its options don't fit: TypeError: '>=' not supported"),
        ("frozen_lake", {"special_tokens": 5}, "its options don't fit: TypeError: 'int' object is not iterable"),
        ("sokoban", {"actions": ["a"]}, "its options don't fit: AttributeError: 'list' object has no"),
        ("sokoban", {"format_penalty": "abc"}, "format_penalty must be a number, not 'abc'"),
        ("tools", {"tools": 5}, "its options don't fit: TypeError: 'int' object is not iterable"),
        ("{file}:Counter", {}, "its options don't fit: missing a required argument: 'limit'"),
        ("{file}:Conter", {}, "has no `Conter`; did you mean `Counter`?"),
        ("{file}:Incomplete", {}, "must have a method `async def step`"),
        ("{file}:Mixed", {}, "reset, step, close must all be `async def`"),
        ("{file}:function", {}, "is not a class"),
        ("no_such_module_here:Env", {}, "there is no module `no_such_module_here`"),
    ],
)
def test_an_environment_that_can_not_be_made_is_an_error(
    pool: ScorerPool, counter: str, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        open_one(Environment(name=name.replace("{file}", counter), options=options), pool)


def test_a_row_says_which_of_several_environments_plays_it(pool: ScorerPool, counter: str) -> None:
    several = {"lake": Environment(name="frozen_lake"), "count": Environment(name=f"{counter}:Counter")}
    several["count"].options["limit"] = 1
    envs = EnvSet(several, {}, Rollout())
    assert envs.factory_for(Row([], None, "", {"environment": "count"})).tag == "count"
