"""How much of a step is hidden behind another: the real loop on real Ray processes, with stages of a known length.

    python benchmarks/overlap.py                # about 3 minutes
    python benchmarks/overlap.py --smoke        # a profile 20 times shorter, to see whether it works

Two devices roll out, one holds the reference and one trains. The stages sleep for as long as a profile says (see
`simulated.py`), so the best possible time of a step is known, and whatever is above it is the loop's, Ray's and the
machine's. The four schedules do the same work: the actor's log-probs are computed again in all of them.
"""

import argparse
import heapq
import statistics
import textwrap
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, temporary_folder
from simulated import BUILDER, Profile
from tiny import save_tiny_model

from corral.bench.comparison import BenchmarkReport, StepTimes
from corral.bench.step_sides import timed_steps
from corral.loop.rollout_step import PIECES_PER_STEP
from corral.observe.console import Console
from corral.recipe.placement import Placement
from corral.recipe.schema import Cluster, Recipe
from corral.runtime.group import Runtime
from corral.runtime.weight_publisher import PROBE_TOKENS

PROFILE = Profile(
    prompt_tokens=60,
    median_tokens=200,
    sigma=0.6,
    prefill_s=0.02,
    token_s=0.002,
    logprob_token_s=1e-5,
    train_token_s=3e-5,
    call_s=0.01,
    step_s=0.1,
    transfer_s=0.15,
)
NUM_ROLLOUT_DEVICES = 2
SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "pipelined": {"pipelined": True},
    "staleness 1": {"max_staleness": 1},
    "staleness 1, pipelined": {"max_staleness": 1, "pipelined": True},
}
WARM_UP = 2
"""Steps at the beginning that are not counted; nor is the last one, beside which no rollout runs."""


def main() -> None:
    options = parse_options()
    profile = PROFILE.faster(20) if options.smoke else PROFILE
    report = BenchmarkReport(
        "overlap", "A step's stages, one after the other and at the same time", options.results, ["ray"]
    )
    measured: dict[str, StepTimes] = {}
    bounds: dict[str, float] = {}
    with temporary_folder() as folder, ray_cluster():
        model = Path(folder) / "model"
        save_tiny_model(model)
        for name in options.schedules:
            recipe = recipe_of(name, profile, Path(folder), model, options.steps)
            measured[name] = timed_steps(recipe, open_simulated)[WARM_UP - 1 : -1]
            bounds[name] = bound(recipe, profile, range(WARM_UP + 1, options.steps))
            print(f"  {name}: " + ", ".join(f"{step['seconds']:.2f}" for step in measured[name]) + " s", flush=True)
        times = rollout_times(recipe, profile, WARM_UP + 1)
    report.add(
        "overlap",
        f"{NUM_ROLLOUT_DEVICES} rollout devices, one reference, one trainer; {len(measured[name])} steps of each",
        ["schedule", "step s: mean", "against synchronous", "bound s", "measured / bound"],
        list(table(measured, bounds)),
        {"profile": asdict(profile), "bounds": bounds, "steps": measured},
    )
    report.sections.append(about(recipe, profile, times))
    report.write()
    print(report.sections[-1], f"wrote {report.path}.json and .md", sep="\n\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=11, help=f"of each; {WARM_UP + 1} of them are not counted")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and Markdown files")
    parser.add_argument("--smoke", action="store_true", help="20 times shorter; the numbers mean little")
    options = parser.parse_args()
    if options.smoke:
        options.steps = WARM_UP + 2
    return options


def recipe_of(schedule: str, profile: Profile, folder: Path, model: Path, steps: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": schedule.replace(" ", "-").replace(",", ""),
            "model": {"path": str(model)},
            "data": {
                "train": {
                    "path": f"{HERE / 'simulated.py'}:rows",
                    "options": {"num_rows": 1024, "prompt_tokens": profile.prompt_tokens},
                },
                "chat": False,
            },
            "environment": {"name": "simulated:Profile", "options": asdict(profile)},
            "rollout": {"max_response_tokens": 1024, "max_sequences": 16},
            "batch": {"prompts_per_step": 16, "samples_per_prompt": 8},
            "algorithm": {"kl": {"where": "loss"}, "old_logprobs": "recompute"},
            "schedule": {"steps": steps, **SCHEDULES[schedule]},
            "logging": {"runs": str(folder / "runs"), "trajectories": False},
            "cluster": {
                "runtime": "ray",
                "devices_per_node": NUM_ROLLOUT_DEVICES + 2,
                "placement": {
                    "rollout": f"0-{NUM_ROLLOUT_DEVICES - 1}",
                    "reference": NUM_ROLLOUT_DEVICES,
                    "actor": NUM_ROLLOUT_DEVICES + 1,
                },
            },
        }
    )


# --- Ray


@contextmanager
def ray_cluster() -> Iterator[None]:
    """One Ray cluster for all runs; not one that runs on this machine for something else."""
    import ray

    from corral.runtime.connection import start_here

    start_here(Cluster(devices_per_node=NUM_ROLLOUT_DEVICES + 2))
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def open_simulated(
    recipe: Recipe, placement: Placement, logs: Path, console: Console, lost_nodes: frozenset[str]
) -> AsyncIterator[Runtime]:
    from corral.runtime.ray_runtime import RayRuntime

    runtime = await RayRuntime.start(recipe, placement, logs, report=print, builder=BUILDER)
    try:
        yield runtime
    finally:
        runtime.close()


# --- what the profile allows


@dataclass(frozen=True)
class RolloutTimes:
    """A step's samples on all slots of the engines, none of which is ever free while a sample waits."""

    ends: list[float]
    """Time at which the last sample of each prompt is done."""
    work_s: float
    """Time of all samples, divided by the number of slots."""
    tokens: list[int]
    """Tokens of each prompt's trajectories."""

    @property
    def makespan_s(self) -> float:
        return max(self.ends)


def rollout_times(recipe: Recipe, profile: Profile, step: int) -> RolloutTimes:
    prompts, samples = recipe.batch.prompts_per_step, recipe.batch.samples_per_prompt
    lengths = profile.lengths(recipe, range((step - 1) * prompts, step * prompts))
    free_at = [0.0] * (NUM_ROLLOUT_DEVICES * recipe.rollout.max_sequences)
    ends, work = [], 0.0
    for group in lengths.tolist():
        end = 0.0
        for length in group:
            done = heapq.heappop(free_at) + profile.sample_s(length)
            heapq.heappush(free_at, done)
            end, work = max(end, done), work + profile.sample_s(length)
        ends.append(end)
    tokens = (lengths.sum(axis=1) + samples * profile.prompt_tokens).tolist()
    return RolloutTimes(ends, work / len(free_at), tokens)


def bound(recipe: Recipe, profile: Profile, steps: Sequence[int]) -> float:
    """Seconds from one step to the next, a mean over `steps`; `FORMULAS` explains it."""
    publish = profile.transfer_s + profile.logprobs_s(min(profile.prompt_tokens, PROBE_TOKENS))
    rollouts = [rollout_times(recipe, profile, step) for step in steps]
    tokens = [sum(times.tokens) for times in rollouts]
    busy = statistics.mean(profile.logprobs_s(n) + profile.train_s(n) for n in tokens) + profile.step_s + publish
    whole = statistics.mean(times.makespan_s for times in rollouts) + busy
    if recipe.schedule.pipelined:
        whole = statistics.mean(end_of_pipeline(times, profile) for times in rollouts) + profile.step_s + publish
    if not recipe.schedule.max_staleness:
        return whole
    work = statistics.mean(times.work_s for times in rollouts)
    return max(work + profile.transfer_s, busy, whole / (1 + recipe.schedule.max_staleness))


def end_of_pipeline(times: RolloutTimes, profile: Profile) -> float:
    """Time at which the last piece is trained on.

    A piece is what is finished, in the order of the prompts, when the trainer is free for it, and at least an eighth of
    the step: start(k) = max(rolled_out(k), end(k - 1)), end(k) = start(k) + logprobs + train.
    """
    size, taken, now = -(-len(times.ends) // PIECES_PER_STEP), 0, 0.0
    while taken < len(times.ends):
        end = min(taken + size, len(times.ends))
        now = max(now, *times.ends[taken:end])
        while end < len(times.ends) and times.ends[end] <= now:
            end += 1
        tokens = sum(times.tokens[taken:end])
        now += profile.logprobs_s(tokens) + profile.train_s(tokens)
        taken = end
    return now


FORMULAS = """\
Bounds follow from the profile alone, from means over the measured steps. `rollout` is the time of a step's samples on
all slots of the engines without a gap, first come, first served (in another order it can be a little shorter, so a step
may lie below its bound); `work` the same without the tail, which is all samples / slots; `busy` = logprobs + train +
optimizer + publish; `publish` = transfer + probe:

- synchronous: rollout + busy
- pipelined: end of the last piece + optimizer + publish, where a piece begins when it is rolled out and the one before
  it is trained on (max-plus)
- staleness 1: the largest of work + transfer (engines pause for it), busy, and half of the synchronous bound (a step's
  rollout begins when the weights of two steps before are there)
- staleness 1, pipelined: the largest of work + transfer, busy, and half of the pipelined bound"""


def about(recipe: Recipe, profile: Profile, times: RolloutTimes) -> str:
    batch, rollout, tokens = recipe.batch, recipe.rollout, sum(times.tokens)
    sentences = [
        f"A step is {batch.prompts_per_step} prompts of {profile.prompt_tokens} tokens x {batch.samples_per_prompt}",
        f"samples. The tokens of a response are log-normal, median {profile.median_tokens:g}, sigma {profile.sigma:g},",
        f"{rollout.max_response_tokens} at most. A sample takes {1000 * profile.prefill_s:g} ms and",
        f"{1000 * profile.token_s:g} ms per token, {rollout.max_sequences} samples at once on each of",
        f"{NUM_ROLLOUT_DEVICES} devices. Log-probs take {1e6 * profile.logprob_token_s:g} us per token and training",
        f"{1e6 * profile.train_token_s:g} us, and {1000 * profile.call_s:g} ms per call; the optimizer",
        f"{profile.step_s:g} s; new weights {profile.transfer_s:g} s. So the first measured step has {tokens:,}",
        f"tokens: rollout {times.makespan_s:.2f} s (work {times.work_s:.2f} s), log-probs",
        f"{profile.logprobs_s(tokens):.2f} s, train {profile.train_s(tokens):.2f} s.",
    ]
    return textwrap.fill(" ".join(sentences), 120) + "\n\n" + FORMULAS


def table(measured: dict[str, StepTimes], bounds: dict[str, float]) -> Iterator[list[str]]:
    first = mean_s(next(iter(measured.values())))
    for name, steps in measured.items():
        mean = mean_s(steps)
        yield [name, f"{mean:.2f}", f"{mean / first:.2f} x", f"{bounds[name]:.2f}", f"{mean / bounds[name]:.2f}"]


def mean_s(steps: StepTimes) -> float:
    return statistics.mean(step["seconds"] for step in steps)


if __name__ == "__main__":
    main()
