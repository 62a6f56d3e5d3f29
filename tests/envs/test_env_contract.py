"""The contract of environments: every built-in one, and users' classes of each kind, pass the checks of `corral env
test`; what a class leaves out has a default."""

import json
from pathlib import Path
from typing import Any

import parity_environments
import pytest
from env_helpers import boards
from parity_environments import BlockingParity, InheritingParity, Parity

import corral
from corral.data.rows import Message, Row
from corral.data.sources import load_rows
from corral.envs.base import EnvDefaults, as_env_class, built_in_names, find_class
from corral.envs.baselines import Baseline
from corral.envs.env_checks import check_environment
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Environment, Reward, Source

QUESTIONS = [Row([{"role": "user", "content": f"{n} + 1?"}], str(n + 1), "", {}) for n in range(3)]
USERS_CODE = '''
import json, urllib.request

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

def agent(row, base_url, api_key, model):
    """Two requests; the second adds to the first."""
    messages = list(row.prompt)
    for _ in range(2):
        body = json.dumps({"model": model, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=150) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        messages.append({"role": "user", "content": "sure?"})
    return 1.0
'''


def reasoning_gym_rows() -> list[Row]:
    return load_rows(
        Source(path="reasoning_gym:basic_arithmetic", size=3), Data(train=Source(path="reasoning_gym:basic_arithmetic"))
    )


@pytest.fixture
def cases(tmp_path: Path) -> dict[str, tuple[dict[str, Any], list[Row]]]:
    """Options and rows for each built-in environment."""
    file = tmp_path / "users_code.py"
    file.write_text(USERS_CODE)
    return {
        "question": ({}, QUESTIONS),
        "frozen_lake": ({"slippery": True}, boards(5)),
        "sokoban": ({}, boards(5)),
        "gymnasium": ({"id": "FrozenLake-v1"}, boards(3)),
        "reasoning_gym": ({"attempts": 2}, reasoning_gym_rows()),
        "search": ({"do_search": False}, QUESTIONS),
        "tools": ({"tools": [f"{file}:add"]}, QUESTIONS),
        "agent": ({"agent": f"{file}:agent"}, QUESTIONS),
    }


# Two processes import reasoning_gym, in two seconds each.
SLOWLY = {"reasoning_gym": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOWLY.get(name, ())) for name in built_in_names()])
@pytest.mark.slow
def test_every_built_in_environment_keeps_the_contract(
    name: str, cases: dict[str, tuple[dict[str, Any], list[Row]]]
) -> None:
    options, rows = cases[name]
    environment = Environment(name=name, options=options, reward=Reward(name="exact", workers=1), processes=1)
    report = check_environment(environment, rows, max_turns=4, seed=0)
    assert report.failed == []
    assert len(report.passed) == 6
    assert issubclass(find_class(name), (corral.BlockingEnv, corral.Env))


@pytest.mark.parametrize("name", ["Parity", "BlockingParity", "InheritingParity"])
@pytest.mark.slow
def test_users_classes_keep_it_whatever_they_inherit(name: str) -> None:
    environment = Environment(name=f"{parity_environments.__file__}:{name}", processes=1)
    report = check_environment(environment, boards(3), max_turns=2, seed=0)
    assert report.failed == []
    assert json.dumps(report.first_messages) == json.dumps([{"role": "user", "content": "say something even, 0"}])
    assert report.baseline == (Baseline(best_reward=1.0) if name == "Parity" else Baseline())


def test_what_a_class_leaves_out_has_the_default_and_what_it_has_stays() -> None:
    adapted = as_env_class(Parity, "Parity")
    env = adapted()
    assert isinstance(env, Parity)
    assert (env.inline, env.last_turns, list(env.tools), env.bounds_itself) == (False, 0, [], False)
    assert (env.summary(), env.first_state()) == ({}, "")
    assert (adapted.overrides("best_reply"), adapted.overrides("random_reply")) == (True, False)
    assert as_env_class(InheritingParity, "InheritingParity") is InheritingParity
    assert issubclass(as_env_class(BlockingParity, "BlockingParity"), corral.BlockingEnv)


def test_a_class_may_use_the_name_state_for_something_else() -> None:
    class Stateful(Parity):
        state = 7

    assert as_env_class(Stateful, "Stateful")().first_state() == ""


@pytest.mark.parametrize("base", [corral.Env, corral.BlockingEnv, EnvDefaults])
def test_a_class_without_a_step_of_its_own_is_no_environment(base: type) -> None:
    class Resets(base):  # type: ignore[misc]
        async def reset(self, row: Row, seed: int) -> list[Message]:
            return []

    with pytest.raises(UserError, match="must have a method `async def step`"):
        as_env_class(Resets, "Resets")
