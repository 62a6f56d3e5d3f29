"""What every group of workers does, in this process or on a Ray cluster."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from deadlines import within

sys.path.insert(0, str(Path(__file__).parent))

from scenarios import FakeRole, message_of, placement_of, recipe_with, running

from corral.runtime.group import Group, LocalGroup, LocalRuntime
from corral.runtime.worker import WorkerContext

ON_RAY = pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.core, pytest.mark.xdist_group("ray")])


@asynccontextmanager
async def local_group() -> AsyncIterator[Group[FakeRole]]:
    contexts = [WorkerContext(rank, 2, "127.0.0.1", None, within(60)) for rank in range(2)]  # type: ignore[arg-type]
    yield LocalGroup("actor", [FakeRole("actor", context) for context in contexts], within(60))


@asynccontextmanager
async def ray_group(logs: Path) -> AsyncIterator[Group[FakeRole]]:
    async with running(str(logs), devices_per_node=2, placement={"actor": "all"}) as runtime:
        yield runtime.groups["actor"]


async def observe(group: Group[FakeRole]) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "size": group.size,
        "ranks": [facts["rank"] for facts in await group.all(FakeRole.facts)],
        "one": await group.one(1, FakeRole.echo, "hello"),
        "async": await group.one(0, FakeRole.echo_later, "hello"),
        "each": await group.each(FakeRole.echo, [("a",), ("b",)]),
        "some": await group.all(FakeRole.echo, "x", ranks=[1]),
        "nobody": await group.all(FakeRole.echo, "x", ranks=[]),
        "user_error": await message_of(group.all(FakeRole.fail, "user")),
        "run_error": await message_of(group.one(1, FakeRole.fail, "run")),
        "disk_error": await message_of(group.one(1, FakeRole.fail, "disk")),
        "other_error": await message_of(group.one(1, FakeRole.fail, "other")),
        "late": await message_of(group.one(1, FakeRole.hang, timeout_s=0.3)),
        "name": group.names[1],
    }
    began = time.monotonic()
    seen["one_fails"] = await message_of(group.each(FakeRole.fail_or_hang, [(True,), (False,)]))
    seen["one_fails_s"] = time.monotonic() - began
    return {**seen, "afterwards": await group.all(FakeRole.echo, 1)}


@pytest.fixture(scope="module", params=["local", ON_RAY])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        opened = local_group() if request.param == "local" else ray_group(tmp_path_factory.mktemp("logs"))
        async with opened as group:
            return await observe(group)

    return asyncio.run(run())


def test_a_method_is_called_on_one_on_some_or_on_each_with_its_own_arguments(seen: dict[str, Any]) -> None:
    assert (seen["size"], seen["ranks"]) == (2, [0, 1])
    assert (seen["one"], seen["each"], seen["some"], seen["nobody"]) == ("hello", ["a", "b"], ["x"], [])


def test_methods_may_be_async(seen: dict[str, Any]) -> None:
    assert seen["async"] == "hello"


def test_errors_arrive_with_their_reason_and_those_for_the_user_as_they_are(seen: dict[str, Any]) -> None:
    assert (seen["user_error"], seen["run_error"]) == ("UserError: the reason", "RunError: the reason")
    assert "the reason" in seen["other_error"]
    assert seen["disk_error"] == "TimeoutError: the reason"  # and not that of the call


def test_a_deadline_names_the_method_and_the_worker(seen: dict[str, Any]) -> None:
    assert seen["late"].startswith(f"CallTimeout: actor.hang: no answer from {seen['name']} within 0.3 s")


def test_after_a_failure_the_others_are_not_waited_for(seen: dict[str, Any]) -> None:
    assert seen["one_fails"] == "RunError: the reason"
    assert seen["one_fails_s"] < within(20)
    assert seen["afterwards"] == [1, 1]


def test_without_a_cluster_all_roles_are_in_this_process() -> None:
    async def facts_of_rollout() -> list[dict[str, Any]]:
        recipe = recipe_with(placement={"actor,rollout": "all"})
        runtime = LocalRuntime(recipe, placement_of(recipe), builder="scenarios:build_fake")
        for role in runtime.placement.roles:
            await runtime.build(role, recipe, None)
        facts = await runtime.groups["rollout"].all(FakeRole.facts)
        runtime.close()
        return facts

    [facts] = asyncio.run(facts_of_rollout())
    assert facts["beside"] == ["actor", "rollout"]
    assert (facts["rank"], facts["size"]) == (0, 1)
