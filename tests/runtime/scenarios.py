"""What the tests of runtimes do on a host, and roles that do next to nothing."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from deadlines import within

from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import Placement, devices_of_services, parse_placement
from corral.recipe.schema import Recipe
from corral.runtime import ray_group
from corral.runtime.group import WorkerLost
from corral.runtime.ray_group import RayGroup
from corral.runtime.ray_runtime import RayRuntime
from corral.runtime.worker import Role, WorkerContext


class FakeRole(Role):
    """A role that computes next to nothing."""

    def __init__(self, role: str, context: WorkerContext) -> None:
        self.role, self.context = role, context

    def facts(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "rank": self.context.rank,
            "size": self.context.size,
            "address": self.context.address,
            "pid": os.getpid(),
            "cwd": os.getcwd(),
            "beside": sorted(self.context.roles),
        }

    def echo(self, value: Any) -> Any:
        return value

    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    def all_reduce(self) -> float:
        value = torch.tensor([float(self.context.rank + 1)])
        dist.all_reduce(value)
        return value.item()

    def interface(self) -> str | None:
        return os.environ.get("GLOO_SOCKET_IFNAME")

    def triton_cache(self) -> str | None:
        return os.environ.get("TRITON_CACHE_DIR")

    def fail(self, kind: str) -> None:
        print("about to fail", flush=True)
        raise {"user": UserError, "run": RunError, "disk": TimeoutError, "other": ValueError}[kind]("the reason")

    def end(self, how: str) -> None:
        print("my last words", flush=True)
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)

    async def echo_later(self, value: Any) -> Any:
        await asyncio.sleep(0.01)
        return value

    async def hang(self) -> None:
        await asyncio.sleep(600)

    def end_or_echo(self, how: str) -> str:
        if how:
            self.end(how)
        return how

    async def fail_or_hang(self, fails: bool) -> None:
        if fails:
            raise RunError("the reason")
        await asyncio.sleep(600)


def build_fake(role: str, context: WorkerContext, recipe: Recipe, resume_from: Path | None) -> FakeRole:
    return FakeRole(role, context)


def recipe_with(**cluster: Any) -> Recipe:
    written = {"start_timeout_s": within(60), "call_timeout_s": within(60), "node_timeout_s": 5, **cluster}
    return Recipe.model_validate(
        {"name": "fake", "model": {"path": "none"}, "data": {"train": {"path": "none"}}, "cluster": written}
    )


@asynccontextmanager
async def running(
    logs: str, output: list[str] | None = None, without: list[str] | None = None, build: bool = True, **cluster: Any
) -> AsyncIterator[RayRuntime]:
    recipe = recipe_with(**cluster)
    runtime = await RayRuntime.start(
        recipe,
        placement_of(recipe),
        Path(logs),
        report=(output if output is not None else []).append,
        without_nodes=frozenset(without or []),
        builder="scenarios:build_fake",
    )
    try:
        if build:
            for role in runtime.placement.roles:
                await runtime.build(role, recipe, None)
        yield runtime
    finally:
        runtime.close()


def placement_of(recipe: Recipe) -> Placement:
    cluster = recipe.cluster
    num_devices = cluster.nodes * cluster.devices_per_node
    return parse_placement(cluster.placement, num_devices, devices_of_services(cluster))


async def message_of(work: Any) -> str:
    """Of what it raises, with its kind."""
    try:
        await work
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


async def workers_while(work: Any, logs: Path, device: int, call: str) -> list[dict[str, Any]]:
    """What the file says that the workers do, once that of this device is in this call."""
    task = asyncio.ensure_future(work)
    try:
        return await workers_at(logs, device, call)
    finally:
        task.cancel()


async def workers_at(logs: Path, device: int, call: str) -> list[dict[str, Any]]:
    async with asyncio.timeout(within(30)):
        while True:
            await asyncio.sleep(0.1)
            with suppress(FileNotFoundError):
                workers: list[dict[str, Any]] = json.loads((logs / "workers.json").read_text())["workers"]
                if (device, call) in [(one["device"], one["call"]) for one in workers]:
                    return workers


def calls_kept_by_ray() -> list[str]:
    """Names of the calls that Ray's head keeps, once it has one that was made after all others."""
    ray.get(ray.remote(num_cpus=0)(lambda: None).options(name="the last call").remote())
    kept: list[str] = []
    deadline = time.monotonic() + within(10)
    while "the last call" not in kept and time.monotonic() < deadline:
        time.sleep(0.1)
        kept = [event.task_info.name for event in ray._private.state.state._get_all_task_events()]
    return kept


# --- on a cluster that stays whole


async def colocated(logs: str) -> dict[str, Any]:
    """Four devices on two nodes, all with the same roles."""
    began = time.monotonic()
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    mine = signal.getsignal(signal.SIGTERM)
    async with running(logs, nodes=2, devices_per_node=2, placement={"actor,rollout": "all"}) as runtime:
        started_s = time.monotonic() - began
        actor, rollout, array = runtime.groups["actor"], runtime.groups["rollout"], np.ones(200_000)
        seen = {
            "started_s": started_s,
            "keeps_signal_handler": signal.getsignal(signal.SIGTERM) is mine,
            "sets": [[one.roles, one.devices] for one in runtime.sets],
            "nodes": [[node.rank, node.hostname, node.address, node.devices] for node in runtime.nodes],
            "actor": await actor.all(FakeRole.facts),
            "rollout": await rollout.all(FakeRole.facts),
            "names": actor.names,
            "one": await actor.one(2, FakeRole.echo, "hello"),
            "each": await actor.each(FakeRole.echo, [(rank,) for rank in range(actor.size)]),
            "some": await actor.all(FakeRole.echo, "x", ranks=[1, 3]),
            "shared": await actor.all(FakeRole.total, array),
            "all_reduce": await actor.all(FakeRole.all_reduce),
            "interfaces": await actor.all(FakeRole.interface),
            "workers": await workers_while(actor.one(3, FakeRole.hang), Path(logs), 3, "actor.hang"),
            "late": await message_of(actor.one(3, FakeRole.hang, timeout_s=0.5)),
            "late_user_error": await message_of(actor.one(1, FakeRole.fail, "user")),
            "late_run_error": await message_of(actor.one(1, FakeRole.fail, "run")),
            "late_other_error": await message_of(actor.one(1, FakeRole.fail, "other")),
            "still_works": await actor.all(FakeRole.echo, 1),
            "kept_by_ray": await asyncio.to_thread(calls_kept_by_ray),
        }
        began = time.monotonic()
    signal.signal(signal.SIGTERM, handler)
    return {**seen, "closed_s": time.monotonic() - began}


async def relayed(logs: str) -> dict[str, Any]:
    """Calls that go through a relay on each node, as in a run with many workers."""
    relayed_from, ray_group.RELAYED_FROM = ray_group.RELAYED_FROM, 2
    layout = {"nodes": 2, "devices_per_node": 2, "placement": {"actor": "0-1", "rollout": "2-3"}}
    async with running(logs, call_timeout_s=within(30), **layout) as runtime:
        actor, rollout = runtime.groups["actor"], runtime.groups["rollout"]
        workers: RayGroup[FakeRole] = RayGroup(
            "rollout", [runtime.devices[3], runtime.devices[2]], runtime.nodes, within(30), 5
        )
        seen: dict[str, Any] = {
            "each": await rollout.each(FakeRole.echo, [("a",), ("b",)]),
            "shared": await actor.all(FakeRole.total, np.ones(200_000)),
            "async": await rollout.all(FakeRole.echo_later, 1),
            "all_reduce": await actor.all(FakeRole.all_reduce),
            "order": [facts["pid"] for facts in await workers.all(FakeRole.facts)],
            "pids": [runtime.devices[device].process.pid for device in (3, 2)],
            "user_error": await message_of(actor.all(FakeRole.fail, "user")),
            "other_error": await message_of(actor.each(FakeRole.fail_or_hang, [(False,), (True,)])),
        }
        rollout.timeout_s = 1.0
        seen["late"] = await message_of(rollout.all(FakeRole.hang))
        rollout.timeout_s = within(30)
        seen["killed"] = await lost_of(rollout.each(FakeRole.end_or_echo, [("SIGKILL",), ("",)]))
        await runtime.replace(2)
        await runtime.build("rollout", runtime.recipe, None, ranks=[0])
        seen["after"] = await rollout.all(FakeRole.echo, 2)
        hanging = asyncio.ensure_future(rollout.all(FakeRole.hang))
        await workers_at(Path(logs), 2, "rollout.hang")
        began = time.monotonic()
        ray.kill(runtime.nodes[1].relay, no_restart=False)
        seen["relay_ends"] = await lost_of(hanging)
        seen["relay_ends_s"] = time.monotonic() - began
    ray_group.RELAYED_FROM = relayed_from
    return seen


async def deaths(logs: str) -> dict[str, Any]:
    """Actor and rollout apart, and rollouts that die."""
    placement = {"actor": "0-1", "rollout": "2-3"}
    async with running(logs, nodes=2, devices_per_node=2, placement=placement) as runtime:
        rollout, pids = (
            runtime.groups["rollout"],
            [facts["pid"] for facts in await runtime.groups["rollout"].all(FakeRole.facts)],
        )
        seen: dict[str, Any] = {
            "sets": [[one.roles, one.devices, one.is_world] for one in runtime.sets],
            "actor": await runtime.groups["actor"].all(FakeRole.facts),
            "rollout": await rollout.all(FakeRole.facts),
            "all_reduce": await runtime.groups["actor"].all(FakeRole.all_reduce),
        }
        began = time.monotonic()
        seen["killed"] = await lost_of(rollout.one(1, FakeRole.end, "SIGKILL"))
        seen["killed_s"] = time.monotonic() - began
        seen["again"] = await lost_of(rollout.one(1, FakeRole.echo, 1))
        await runtime.replace(3)
        await runtime.build("rollout", runtime.recipe, None, ranks=[1])
        after = await rollout.all(FakeRole.facts)
        seen["replaced"] = [new["pid"] == old for new, old in zip(after, pids, strict=True)]
        seen["exited"] = await lost_of(rollout.all(FakeRole.end, "exit", ranks=[0]))
        output: list[str] = []
        again = {"nodes": 2, "devices_per_node": 2}
        seen["booked"] = await message_of(runtime_of(logs, output, start_timeout_s=2, **again))
        seen["output"] = output
        seen["actor_lives"] = await runtime.groups["actor"].all(FakeRole.all_reduce)
    async with running(logs, build=False, nodes=2, devices_per_node=1) as runtime:
        seen["freed"] = len(runtime.devices)
    return seen


async def runtime_of(logs: str, output: list[str], **cluster: Any) -> None:
    async with running(logs, output, **cluster):
        pass


async def lost_of(work: Any) -> dict[str, Any]:
    try:
        await work
    except WorkerLost as lost:
        return {"message": str(lost), "device": lost.device, "node": lost.node}
    raise AssertionError("nothing was lost")


async def refusals(logs: str) -> dict[str, Any]:
    output: list[str] = []
    small = {"devices_per_node": 2, "start_timeout_s": 3}
    return {
        "three_nodes": await message_of(runtime_of(logs, output, nodes=3, **small)),
        "output": output,
        "no_cluster": await message_of(runtime_of(logs, [], address="127.0.0.1:1", **small)),
    }


# --- without a cluster


async def started_here(logs: str) -> dict[str, Any]:
    """Ray is started for the run, and ended with it."""
    began = time.monotonic()
    two = await message_of(runtime_of(logs, [], nodes=2))
    async with running(logs, devices_per_node=2) as runtime:
        seen = {
            "two_nodes": two,
            "started_s": time.monotonic() - began,
            "all_reduce": await runtime.groups["actor"].all(FakeRole.all_reduce),
            "caches": await runtime.groups["actor"].all(FakeRole.triton_cache),
            "interfaces": await runtime.groups["actor"].all(FakeRole.interface),
            "listening": subprocess.check_output(["ss", "-ltnpH"], text=True).splitlines(),
            "processes": subprocess.check_output(["ps", "-eo", "args"], text=True).splitlines(),
        }
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.killpg(0, signal.SIGINT)
        await asyncio.sleep(1.0)
        signal.signal(signal.SIGINT, handler)
        seen["after_ctrl_c"] = await runtime.groups["actor"].all(FakeRole.all_reduce)
    return seen


# --- on a cluster that loses nodes


async def node_cut(logs: str, ready: str) -> dict[str, Any]:
    """A worker's node is cut off while it is asked for something."""
    async with running(logs, nodes=3, devices_per_node=1, placement={"actor": "0", "rollout": "1-2"}) as runtime:
        rollout = runtime.groups["rollout"]
        seen: dict[str, Any] = {
            "nodes": [[node.rank, node.hostname] for node in runtime.nodes],
            "accelerators": [device.process.accelerators for device in runtime.devices.values()],
        }
        waiting = asyncio.ensure_future(lost_of(rollout.one(1, FakeRole.hang)))
        watching = asyncio.ensure_future(lost_of(runtime.watch()))
        Path(ready).touch()
        while not Path(f"{ready}.cut").exists():
            await asyncio.sleep(0.05)
        began = time.monotonic()
        seen["watch"] = await watching
        seen["noticed_s"] = time.monotonic() - began
        seen["call"] = await waiting
        seen["others"] = await rollout.one(0, FakeRole.echo, 1)
        seen["num_nodes"] = runtime.num_nodes
        seen["replace"] = await lost_of(runtime.replace(2))
        seen["error_elsewhere"] = await message_of(rollout.one(0, FakeRole.fail, "other"))
        began = time.monotonic()
    return {**seen, "closed_s": time.monotonic() - began}


async def without_node(logs: str, address: str) -> dict[str, Any]:
    """The run goes on with the nodes that are left."""
    common: dict[str, Any] = {"nodes": 3, "devices_per_node": 1, "without": [address]}
    async with running(logs, min_nodes=2, placement={"actor": "all"}, **common) as runtime:
        seen: dict[str, Any] = {
            "roles": dict(runtime.placement.roles),
            "nodes": [[node.rank, node.hostname] for node in runtime.nodes],
            "all_reduce": await runtime.groups["actor"].all(FakeRole.all_reduce),
        }
    gone = runtime_of(logs, [], min_nodes=2, placement={"actor": "0-1", "rollout": "2"}, **common)
    seen["role_gone"] = await message_of(gone)
    seen["too_few"] = await message_of(runtime_of(logs, [], start_timeout_s=1, **common))
    return seen


async def host_killed(logs: str, ready: str, address: str) -> dict[str, Any]:
    """A host ends while others compute with it: they see broken connections sooner than anyone sees the loss. It is
    Ray's head, too, so that there is no cluster afterwards."""
    common: dict[str, Any] = {"nodes": 3, "devices_per_node": 1, "without": [address], "min_nodes": 2}
    async with running(logs, placement={"actor": "all"}, **common) as runtime:
        actor = runtime.groups["actor"]

        async def compute() -> None:
            while True:
                await actor.all(FakeRole.all_reduce)
                Path(ready).touch()

        seen: dict[str, Any] = {"lost": await lost_of(compute())}
        began = time.monotonic()
    seen["closed_s"] = time.monotonic() - began
    seen["again"] = await message_of(runtime_of(logs, [], **common))
    return seen
