"""Processes with somebody's code get no token of the environment, but for those that the recipe names."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corral.child_process import allowed_environment, with_kept_variable
from corral.data.rows import Message, Row
from corral.envs.base import EnvSet
from corral.envs.built_in.agent import AgentRunner
from corral.envs.chat_endpoint import ChatSession
from corral.recipe.schema import Environment, Reward, Rollout
from corral.rewards.scorer_pool import ScorerPools

SECRETS = ("RAY_AUTH_TOKEN", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "MY_KEY")
CODE = """
import os
from corral import BlockingEnv, StepResult

def found():
    return " ".join(sorted(name for name, value in os.environ.items() if value == "secret"))

def score(response):
    assert os.environ["PATH"]
    return {"score": len(found().split()), "has_key": "MY_KEY" in os.environ}

class Spy(BlockingEnv):
    def reset(self, row, seed):
        return [{"role": "user", "content": found()}]

    def step(self, reply):
        return StepResult([], 0.0, done=True)
"""
ROW = Row([Message(role="user", content="?")], "", "", {})


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    path = tmp_path / "spy.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize(
    ("env", "options", "expected"),
    [([], {}, (0, 0)), (["MY_KEY"], {}, (1, 1)), ([], {"api_key_variable": "HF_TOKEN"}, (1, 0))],
)
def test_a_reward_function_gets_no_token(
    file: Path, env: list[str], options: dict[str, Any], expected: tuple[int, int]
) -> None:
    if options:
        file.write_text(CODE.replace("def score(response)", "def score(response, *, api_key_variable)"))
    environment = Environment(env=env, reward=Reward(name=f"{file}:score", options=options))
    pools = ScorerPools.start({"": environment})
    score = asyncio.run(pools.by_tag[""].score("", ROW))
    pools.close()
    assert score.error is None
    assert (score.reward, score.metrics["has_key"]) == expected


@pytest.mark.parametrize(("env", "expected"), [([], ""), (["MY_KEY"], "MY_KEY")])
@pytest.mark.slow
def test_an_environment_in_a_process_gets_no_token(file: Path, env: list[str], expected: str) -> None:
    async def first_message() -> str:
        spy = envs.factory_for(ROW).make()
        try:
            return str((await spy.reset(ROW, 0))[0]["content"])
        finally:
            await spy.close()

    envs = EnvSet({"": Environment(name=f"{file}:Spy", env=env)}, {}, Rollout())
    try:
        assert asyncio.run(first_message()) == expected
    finally:
        envs.close()


@pytest.mark.parametrize(("env", "expected"), [([], ["OPENAI_API_KEY"]), (["MY_KEY"], ["MY_KEY", "OPENAI_API_KEY"])])
def test_an_agents_program_gets_no_token_but_its_own(file: Path, env: list[str], expected: list[str]) -> None:
    names = f"[name for name in {sorted(SECRETS)!r} if name in os.environ]"
    told = f"{{'score': 1, 'names': ' '.join({names}), 'own': os.environ['OPENAI_API_KEY']}}"
    program = f"import json, os; print(json.dumps({told}))"
    runner = AgentRunner(None, ["python", "-c", program], "m", variables=env)
    try:
        session = ChatSession(runner.endpoint, lambda event: None)
        result = runner.start(ROW, session, in_process=False).result(60)
    finally:
        runner.close()
    assert result["names"].split() == expected
    assert result["own"] != "secret"


def test_what_processes_need_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_UP", "mark")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("HF_HOME", "/cache")
    monkeypatch.setenv("PATHETIC_TOKEN", "secret")
    allowed = allowed_environment()
    assert {"PATH", "LC_ALL", "HF_HOME", "CORRAL_UP"} <= set(allowed)
    assert "PATHETIC_TOKEN" not in allowed


def test_an_error_about_a_variable_that_was_kept_says_how_to_pass_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    assert with_kept_variable("failed: KeyError: 'MY_KEY'").endswith(
        "unless the recipe says `environment.env: [MY_KEY]`"
    )
    for error in ("failed: KeyError: 'PATH'", "failed: KeyError: 'no such row'", "failed: ValueError: MY_KEY"):
        assert with_kept_variable(error) == error
