"""The runtime without a cluster has what the one on a cluster has."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scenarios import placement_of, recipe_with

from corral.runtime.local import LocalRuntime


async def facts_of_roles() -> list[dict[str, object]]:
    recipe = recipe_with(placement={"actor,rollout": "all"})
    runtime = LocalRuntime(recipe, placement_of(recipe), builder="scenarios:build_fake")
    for role in runtime.placement.roles:
        await runtime.build(role, recipe, None)
    facts = await runtime.groups["rollout"].all("facts")
    runtime.close()
    return facts


def test_all_roles_are_in_this_process() -> None:
    [facts] = asyncio.run(facts_of_roles())
    assert facts["beside"] == ["actor", "rollout"]
    assert (facts["rank"], facts["size"]) == (0, 1)


async def late() -> None:
    recipe = recipe_with(placement={"actor": "all"})
    runtime = LocalRuntime(recipe, placement_of(recipe), builder="scenarios:build_fake")
    await runtime.build("actor", recipe, None)
    await runtime.groups["actor"].one(0, "hang", timeout_s=0.05)


def test_a_deadline_names_what_was_waited_for() -> None:
    with pytest.raises(Exception, match=r"actor\.hang: no answer from this process within 0\.05 s"):
        asyncio.run(late())
