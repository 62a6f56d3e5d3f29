"""What the loop itself costs at 1,024 devices: CPU time of the driver's process for each step.

    python benchmarks/driver_overhead.py            # about 5 minutes, and 4 GB of memory
    python benchmarks/driver_overhead.py --smoke    # 8 devices, to see whether it works

The driver is the real loop. All workers are in its process, do nothing and answer after as long as a profile says,
with trajectories made beforehand; so the CPU time of the process is the driver's. What Ray adds for each call is not in
that, and is measured separately, with a few real workers.
"""

import argparse
import asyncio
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import HERE, RESULTS, temporary_folder
from overlap import open_simulated, ray_cluster
from simulated import Profile, SimulatedRolloutWorker, SimulatedTrainer, profile_of, random_trajectory
from tiny import save_tiny_model

from corral.algorithms.losses import GlobalCounts
from corral.bench.comparison import BenchmarkReport, StepTimes
from corral.bench.step_sides import timed_steps
from corral.data.batch import Batch, Trajectory
from corral.observe.console import Console
from corral.recipe.placement import Placement, parse_placement
from corral.recipe.schema import Recipe
from corral.rollout.driver import Prompt
from corral.rollout.engine import Sampling
from corral.runtime import ray_group
from corral.runtime.group import Group, LocalGroup
from corral.runtime.model_workers import ActorWorker, UpdateTerms
from corral.runtime.ray_group import RELAYED_FROM, RayGroup
from corral.runtime.rollout_worker import RolloutRequest, RolloutWorker

PROFILE = Profile(
    prompt_tokens=200,
    median_tokens=700,
    sigma=0.5,
    prefill_s=0.5,
    token_s=0.02,
    logprob_token_s=5e-5,
    train_token_s=5e-4,
    call_s=0.1,
    step_s=1.0,
    transfer_s=3.0,
)
NUM_SAMPLES = 8
AT_ONCE = 32
"""Pairs of calls through Ray that are under way at the same time; of those that a relay passes on, `NODES_AT_ONCE`."""
NODES_AT_ONCE = 8
DEVICES_PER_NODE = 8
RELAYED, DIRECT = ", node by node", ", worker by worker"


@dataclass(frozen=True)
class Size:
    num_rollout_devices: int
    num_trainers: int
    num_prompts: int

    @property
    def num_devices(self) -> int:
        return self.num_rollout_devices + self.num_trainers

    @property
    def num_trajectories(self) -> int:
        return self.num_prompts * NUM_SAMPLES


SIZE = Size(num_rollout_devices=768, num_trainers=256, num_prompts=1024)
SMOKE = Size(num_rollout_devices=6, num_trainers=2, num_prompts=8)

VARIANTS: dict[str, dict[str, Any]] = {
    "without trajectory files": {},
    "pipelined, without trajectory files": {"schedule": {"pipelined": True}},
    "with trajectory files": {"logging": {"trajectories": True}},
}
STAGES = {
    "requests dispatched and collected": ["rollout_worker.py:_feed", "rollout_worker.py:submit"],
    "one batch of all trajectories": ["batch.py:of"],
    "log-probs: shards out, numbers in": ["model_workers.py:compute_column"],
    "advantages": ["train_step.py:add_advantages"],
    "train: shards out, sums in": ["train_step.py:train"],
    "publish": ["weight_publisher.py:publish"],
    "ledger": ["ledger.py:_record"],
    "metrics of the step": ["rollout_step.py:step_metrics", "run_files.py:log"],
}
"""Functions that are not called by one another, each with all that it calls."""
PARTS = ["batch.py:split", "batch.py:take", "batch.py:positions_of"]
FAKES = ["simulated.py:submit", "simulated.py:collect", "driver_overhead.py:_roll_out", "dataclasses.py:replace"]
"""Functions of the simulated workers; only their own time is counted, not that of what they call."""


def main() -> None:
    options = parse_options()
    size = SMOKE if options.smoke else SIZE
    title = f"The driver's CPU time at {size.num_devices:,} devices"
    report = BenchmarkReport("driver_overhead", title, options.results, ["ray"])
    with temporary_folder() as folder:
        save_tiny_model(Path(folder) / "model")
        recipes = {name: recipe_of(size, Path(folder), options, changes) for name, changes in VARIANTS.items()}
        recipe = next(iter(recipes.values()))
        step_s = step_seconds(recipe, size)
        print(f"making {size.num_trajectories:,} trajectories", flush=True)
        workers = Workers(size, make_trajectories(recipe))
        steps = {name: timed_steps(recipes[name], workers.open) for name in options.variants}
        add_totals(report, size, steps, step_s)
        workers.calls.clear()
        add_stages(report, *profiled(recipe, workers), step_s)
        if options.ray:
            add_ray(report, recipe, {name: n / options.steps for name, n in workers.calls.items()}, step_s)
    print(f"wrote {report.path}.json and .md")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="of each variant; the first one is not counted")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    faster = "than the profile says, the workers' clock runs; the driver's CPU time is the same"
    parser.add_argument("--faster", type=float, default=6, metavar="TIMES", help=faster)
    parser.add_argument("--no-ray", dest="ray", action="store_false", help="without the cost of Ray's calls")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and Markdown files")
    parser.add_argument("--smoke", action="store_true", help="8 devices; the numbers mean nothing")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.faster = 2, 500
    return options


def recipe_of(size: Size, folder: Path, options: argparse.Namespace, changes: dict[str, Any]) -> Recipe:
    profile = PROFILE.faster(options.faster)
    return Recipe.model_validate(
        {
            "name": "overhead",
            "model": {"path": str(folder / "model")},
            "data": {
                "train": {
                    "path": f"{HERE / 'simulated.py'}:rows",
                    "options": {"num_rows": size.num_prompts, "prompt_tokens": profile.prompt_tokens},
                },
                "chat": False,
                "shuffle": False,
            },
            "environment": {"name": "simulated:Profile", "options": asdict(profile)},
            "rollout": {"max_response_tokens": 2048},
            "batch": {"prompts_per_step": size.num_prompts, "samples_per_prompt": NUM_SAMPLES},
            "algorithm": {"kl": {"where": "loss"}},
            "schedule": {"steps": options.steps, **changes.get("schedule", {})},
            "logging": {"runs": str(folder / "runs"), "trajectories": False, **changes.get("logging", {})},
            "cluster": {
                "runtime": "ray",
                "devices_per_node": size.num_devices,
                "placement": {
                    "rollout": f"0-{size.num_rollout_devices - 1}",
                    "actor,reference": f"{size.num_rollout_devices}-{size.num_devices - 1}",
                },
            },
        }
    )


def step_seconds(recipe: Recipe, size: Size) -> float:
    """What a step takes by the profile, with a driver that costs nothing: all trajectories are decoded at once."""
    lengths = PROFILE.lengths(recipe, range(size.num_prompts))
    tokens = (int(lengths.sum()) + size.num_trajectories * PROFILE.prompt_tokens) / size.num_trainers
    rollout_s = PROFILE.sample_s(int(lengths.max()))
    return rollout_s + PROFILE.logprobs_s(tokens) + PROFILE.train_s(tokens) + PROFILE.step_s + PROFILE.transfer_s


# --- workers in this process


Trajectories = list[list[Trajectory]]
"""Trajectories of each prompt of a step."""


def make_trajectories(recipe: Recipe) -> Trajectories:
    rng = np.random.default_rng(0)
    prompts = range(recipe.batch.prompts_per_step)
    prompt_tokens = profile_of(recipe).prompt_tokens
    return [
        [
            random_trajectory(Prompt(i, i, None, [5 + i % 50] * prompt_tokens), sample, rng, np.zeros(length, np.int64))
            for sample, length in enumerate(lengths.tolist())
        ]
        for i, lengths in zip(prompts, profile_of(recipe).lengths(recipe, prompts), strict=True)
    ]


class PrecomputedRolloutWorker(SimulatedRolloutWorker):
    """Returns trajectories that were made before, with one timer for each prompt."""

    def __init__(self, recipe: Recipe, trajectories: Trajectories) -> None:
        super().__init__(recipe)
        self.trajectories = trajectories

    async def _roll_out(self, request: RolloutRequest) -> None:
        trajectories = self.trajectories[request.prompt.prompt_id % len(self.trajectories)]
        await asyncio.sleep(self.profile.sample_s(max(trajectory.num_generated for trajectory in trajectories)))
        self.finished.append((request.id, [replace(one, prompt_id=request.prompt.prompt_id) for one in trajectories]))
        self.has_news.set()


class CountingGroup(LocalGroup[Any]):
    def __init__(self, role: str, hosted: Sequence[Any], calls: "Counter[str]") -> None:
        super().__init__(role, hosted, timeout_s=3600.0)
        self.calls = calls

    def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        self.calls[f"{self.role}.{method}"] += 1
        return super().send(rank, method, arguments)

    async def send_each(
        self, ranks: Sequence[int], method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Counts one call for each node where a group on Ray would make that."""
        answers = await super().send_each(ranks, method, arguments)
        if len(ranks) >= RELAYED_FROM:
            name = f"{self.role}.{method.__name__}"
            self.calls[name] -= len(ranks)
            self.calls[name + RELAYED] += len({rank // DEVICES_PER_NODE for rank in ranks})
            self.calls[name + DIRECT] += len(ranks)
        return answers


class Workers:
    """A runtime for any number of devices."""

    def __init__(self, size: Size, trajectories: Trajectories) -> None:
        self.size, self.trajectories = size, trajectories
        self.calls: Counter[str] = Counter()
        self.groups: dict[str, Group[Any]] = {}

    @asynccontextmanager
    async def open(
        self, recipe: Recipe, placement: Placement, logs: Path, console: Console, lost_nodes: frozenset[str]
    ) -> AsyncIterator["Workers"]:
        self.placement = placement
        yield self

    async def device_memory(self) -> None:
        """Unknown."""

    def hurry(self) -> None: ...

    async def build(self, role: str, recipe: Recipe, resume_from: Path | None, *, rank: int | None = None) -> Any:
        if role == "rewards":
            return []
        hosted: list[Any]
        if role == "rollout":
            hosted = [PrecomputedRolloutWorker(recipe, self.trajectories) for _ in self.placement.roles[role]]
        else:
            hosted = [SimulatedTrainer(recipe) for _ in self.placement.roles[role]]
        self.groups[role] = CountingGroup(role, hosted, self.calls)
        return [one.facts() for one in hosted]

    async def watch(self) -> None:
        await asyncio.Event().wait()


# --- results


def add_totals(report: BenchmarkReport, size: Size, steps: dict[str, StepTimes], step_s: float) -> None:
    rows = [
        [name, f"{cpu_s(measured):.2f}", f"{100 * cpu_s(measured) / step_s:.1f} %"] for name, measured in steps.items()
    ]
    heading = (
        f"{size.num_rollout_devices} devices roll out and {size.num_trainers} train; {size.num_trajectories:,} "
        f"trajectories of about {PROFILE.prompt_tokens + 800} tokens; a step of {step_s:.0f} s by the profile"
    )
    columns = ["", "CPU s per step", "of the step"]
    report.add("total", heading, columns, rows, {"profile": asdict(PROFILE), "step_s": step_s, "steps": steps})


def cpu_s(steps: StepTimes) -> float:
    return statistics.median(step["cpu_s"] for step in steps)


def profiled(recipe: Recipe, workers: Workers) -> tuple[pstats.Stats, int]:
    """Without trajectory files; of all steps, the first included."""
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(timed_steps, recipe, workers.open)
    assert recipe.schedule.steps is not None
    return pstats.Stats(profiler), recipe.schedule.steps


def add_stages(report: BenchmarkReport, stats: pstats.Stats, num_steps: int, step_s: float) -> None:
    own, whole = Counter[str](), Counter[str]()
    for (file, _, function), (_, _, own_s, whole_s, _) in stats.stats.items():  # type: ignore[attr-defined]
        own[f"{Path(file).name}:{function}"] += own_s / num_steps
        whole[f"{Path(file).name}:{function}"] += whole_s / num_steps
    named = [*(function for functions in STAGES.values() for function in functions), *PARTS, *FAKES]
    if unknown := [function for function in named if function not in whole]:
        raise SystemExit(f"never called, so probably renamed: {', '.join(unknown)}; see STAGES, PARTS and FAKES")
    seconds = {name: sum(whole[function] for function in functions) for name, functions in STAGES.items()}
    seconds |= {f"of these, {name.partition(':')[2]}": whole[name] for name in PARTS}
    seconds["of these, the workers' own"] = sum(own[name] for name in FAKES)
    rows = [[name, f"{value:.2f}", f"{100 * value / step_s:.2f} %"] for name, value in seconds.items()]
    heading = "by stage, with a profiler, which adds to it; without trajectory files"
    report.add("stages", heading, ["", "CPU s per step", "of the step"], rows, seconds)
    hot = [[name, f"{value:.3f}"] for name, value in own.most_common(12)]
    report.add("functions", "those that use most themselves", ["", "CPU s per step"], hot, dict(own.most_common(40)))


# --- Ray


def add_ray(report: BenchmarkReport, recipe: Recipe, calls: dict[str, float], step_s: float) -> None:
    """CPU time of the driver for each kind of call, times the calls that a step made above; and what it would be if it
    called every worker itself."""
    per_call = asyncio.run(ray_costs(recipe))
    rows, total, direct = [], 0.0, 0.0
    for name, number in sorted(calls.items()):
        kind = RELAYED if name.endswith(RELAYED) else ""
        spent_s = number * (cost_s := per_call.get(name.removesuffix(DIRECT), per_call[f"small{kind}"]))
        total += 0.0 if name.endswith(DIRECT) else spent_s
        direct += 0.0 if name.endswith(RELAYED) else spent_s
        if number:
            rows.append([name, f"{number:,.0f}", f"{1000 * cost_s:.2f}", f"{spent_s:.2f}"])
    for name, own in (("all", total), ("all, if each worker were called", direct)):
        rows.append([name, "", "", f"{own:.2f} ({100 * own / step_s:.1f} % of the step)"])
    heading = f"what Ray adds, extrapolated from 4 workers on this machine; nodes of {DEVICES_PER_NODE} devices"
    columns = ["call", "calls per step", "CPU ms per call", "CPU s per step"]
    numbers = {"per_call_s": per_call, "calls": calls, "cpu_s": total, "cpu_s_direct": direct}
    report.add("ray", heading, columns, rows, numbers)


async def ray_costs(recipe: Recipe) -> dict[str, float]:
    """By name, of calls that carry groups of 8 trajectories or shards of 32; `small`: of one that carries next to
    nothing, such as the log-probs of a probe."""
    instant = {name: 0.0 if name.endswith("_s") else value for name, value in asdict(PROFILE).items()}
    environment = recipe.environment.model_copy(update={"options": instant})
    cluster = recipe.cluster.model_copy(update={"devices_per_node": 4})
    recipe = recipe.model_copy(update={"environment": environment, "cluster": cluster})
    placement = parse_placement({"rollout": "0-1", "actor": "2-3"}, 4)
    prompt = Prompt(0, 0, None, [5] * PROFILE.prompt_tokens)
    rng = np.random.default_rng(0)
    share = Batch.of([random_trajectory(prompt, i, rng, np.zeros(800, np.int64)) for i in range(32)])
    columns = ("old_logprobs", "reference_logprobs", "advantages", "returns")
    with_columns = replace(share, columns=dict.fromkeys(columns, share.logprobs))
    terms = UpdateTerms(GlobalCounts(1, 1), 0, 0.0)
    request = RolloutRequest(0, prompt, NUM_SAMPLES, Sampling(PROFILE.prompt_tokens), "train")
    ray_group.RELAYED_FROM = 3  # so that there is a relay; two workers are still called one by one
    with ray_cluster():
        async with open_simulated(recipe, placement, recipe.logging.folder, Console(), frozenset()) as runtime:
            await runtime.build("actor", recipe, None)
            await runtime.build("rollout", recipe, None)
            actor, rollout = runtime.groups["actor"], runtime.groups["rollout"]
            assert isinstance(actor, RayGroup)
            ranks, shares, pairs = [0, 1] * (DEVICES_PER_NODE // 2), replaced(share), replaced(with_columns)
            return {
                "rollout.collect": await collect_cost(rollout, request),
                "reference.compute_logprobs": await cost(
                    lambda: actor.each(ActorWorker.compute_logprobs, [([share],), ([replace(share)],)])
                ),
                "actor.accumulate": await cost(
                    lambda: actor.each(ActorWorker.accumulate, [(with_columns, terms), (replace(with_columns), terms)])
                ),
                "small": await cost(lambda: actor.all(ActorWorker.step, 1.0)),
                f"reference.compute_logprobs{RELAYED}": await node_cost(
                    lambda: actor._send_to_node(ranks, "compute_logprobs", [([one],) for one in shares])
                ),
                f"actor.accumulate{RELAYED}": await node_cost(
                    lambda: actor._send_to_node(ranks, "accumulate", [(one, terms) for one in pairs])
                ),
                f"small{RELAYED}": await node_cost(
                    lambda: actor._send_to_node(ranks, "step", [(1.0,)] * DEVICES_PER_NODE)
                ),
            }


def replaced(share: Batch) -> list[Batch]:
    """Equal shards for the workers of a node, none of which is the same object."""
    return [Batch.join([share]) for _ in range(DEVICES_PER_NODE)]


async def node_cost(call: Callable[[], Awaitable[Any]], times: int = 10) -> float:
    """CPU seconds of this process for each call to a node."""
    await asyncio.gather(*(call() for _ in range(NODES_AT_ONCE)))
    started = time.process_time()
    for _ in range(times):
        await asyncio.gather(*(call() for _ in range(NODES_AT_ONCE)))
    return (time.process_time() - started) / times / NODES_AT_ONCE


async def cost(call: Callable[[], Awaitable[Any]], times: int = 10) -> float:
    """CPU seconds of this process, all of its threads, for each call. `call` makes two, and `AT_ONCE` of it are under
    way, as when many workers are asked for the same thing."""
    await asyncio.gather(*(call() for _ in range(AT_ONCE)))
    started = time.process_time()
    for _ in range(times):
        await asyncio.gather(*(call() for _ in range(AT_ONCE)))
    return (time.process_time() - started) / times / AT_ONCE / 2


async def collect_cost(rollout: Group[RolloutWorker], request: RolloutRequest, times: int = 100) -> float:
    """The same of calls that collect one group each; those come one by one, as groups are finished."""
    spent = 0.0
    for _ in range(times):
        started = time.process_time()
        await rollout.each(RolloutWorker.collect, [([request],), ([request],)])
        spent += time.process_time() - started
    return spent / times / 2


if __name__ == "__main__":
    main()
