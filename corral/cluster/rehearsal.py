"""Runs a recipe for many devices on this machine, small, from its start to a resume on another mesh: `corral rehearse`.

The training is a child process, as `corral train` in a shell would be, and begins as a run of `corral chaos` with one
fault: a worker is killed after two steps, and the run has to make another one. Then it is stopped as with Ctrl-C, and
resumed for a step with its model spread differently.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from corral.child_process import start_child, terminate_group
from corral.cluster.chaos import KILL_S, TRAIN, ChaosRun, free_name, last_step, running_cluster
from corral.cluster.chaos_report import ChaosOptions, audit_folder
from corral.cluster.faults import Reach
from corral.cluster.gcs import attached
from corral.cluster.rehearsal_recipe import Rehearsal, cut, prepare
from corral.model.families import checked_plan
from corral.observe.console import is_validation
from corral.observe.run_files import read_metrics, write_atomically
from corral.recipe.errors import RunError, UserError
from corral.recipe.link_traffic import describe_links
from corral.recipe.load import dump_recipe
from corral.recipe.mesh import MeshShape
from corral.recipe.placement import runs_on_ray, transfer_kind
from corral.recipe.plan import Plan, describe_mesh
from corral.recipe.schema import HERE, Recipe
from corral.rewards.scorer_pool import ScorerPools
from corral.runtime.connection import HOW_TO_START
from corral.runtime.worker import environments_with_rewards

Show = Callable[[str], None]
RECOVER_S = 1800.0
"""Seconds in which a run must have replaced a worker, on a machine with many processes on few cores."""
MOST_STEPS = 1000
"""It is stopped long before."""
OTHER_MESHES: tuple[dict[str, int], ...] = ({}, {"replicate": 2}, {"pipeline": 2}, {"tensor": 2})
"""Values of `train.parallel` to go on with, of which the first that is another mesh and fits is taken."""
NOT_SHOWN = (
    "NVLink and InfiniBand: workers talk over loopback; `corral doctor` measures what a cluster's nodes have",
    "memory and speed at the real size: see `corral plan`, and `--fit`",
    "the model's weights, its tokenizer and its chat template: see `corral plan --check`",
)


@dataclass
class RehearsalReport:
    recipe: str
    run: str
    machine: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    """What was run, and how it went."""
    replaced: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    links: dict[str, list[str]] = field(default_factory=dict)
    """What a step of the real size sends, as its plan has it."""
    not_shown: Sequence[str] = NOT_SHOWN

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": not self.problems}

    def text(self) -> str:
        width = max(len(what) for what, _ in self.rows)
        sections = {
            f"rehearsal of {self.recipe}, on {self.machine}": [f"{what:<{width}}  {how}" for what, how in self.rows],
            **self.links,
            "replaced": self.replaced,
            "not shown": list(self.not_shown),
            "problems": self.problems,
        }
        lines = [line for title, own in sections.items() if own for line in (title, *(f"  {one}" for one in own))]
        return "\n".join([*lines, "failed" if self.problems else "passed"])


def rehearse(plan: Plan, file: Path, show: Show, *, on_cluster: bool = False) -> RehearsalReport:
    """Raises what ends the run before its first step. `plan`: of the whole recipe. `show`: called with what the run
    prints, and what happens to it. `on_cluster`: on the nodes of the Ray cluster that runs already."""
    address = running_cluster(plan.recipe) if on_cluster else HERE
    if address is None:
        raise UserError(f"--on-cluster: no Ray cluster runs that this recipe would use; {HOW_TO_START}")
    runs = plan.recipe.logging.folder
    folder = runs / free_name(runs, f"{plan.recipe.name}-rehearsal")
    rehearsal = cut(plan.recipe, folder / "rehearsal", address)
    rehearsal.recipe = rehearsal.recipe.model_copy(update={"name": folder.name})
    prepare(rehearsal)
    small = checked_plan(rehearsal.recipe)
    if not on_cluster:  # a reward that cannot be loaded is known before all workers start
        ScorerPools.start(environments_with_rewards(small.recipe)).close()
    report = RehearsalReport(
        str(file), str(folder), describe_machine(), replaced=rehearsal.replaced, links=describe_links(plan)
    )
    workers = describe_workers(small) if runs_on_ray(small.recipe) else "this recipe runs in one process"
    report.rows.append(("workers", workers))
    if on_cluster:
        report.not_shown = NOT_SHOWN[1:]  # its network is that of the run
    with attached(address) if on_cluster else nullcontext():
        train_with_fault(small, rehearsal, folder, report, Reach(on_cluster), show)
    if not report.problems:
        resume(small, rehearsal, folder, report, show)
    facts, problems = audit_folder(folder)
    report.rows += [(name, text) for name, _, text in (fact.partition(": ") for fact in facts)]
    report.problems += [problem for problem in problems if problem not in report.problems]
    return report


def describe_machine() -> str:
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{len(os.sched_getaffinity(0))} cores and {', '.join(gpus) or 'no GPU'}"


def describe_workers(plan: Plan) -> str:
    cluster = plan.recipe.cluster
    roles = ", ".join(f"{'+'.join(roles)} {len(devices)}" for roles, devices in plan.placement.groups().items())
    nodes = f"{cluster.nodes} nodes of {cluster.devices_per_node} devices"
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "NCCL, over sockets" if cluster.is_here else "NCCL"
    return f"{nodes}: {roles}; trainers: {name_mesh(plan.meshes['actor'])}; {backend}"


def name_mesh(mesh: MeshShape) -> str:
    return describe_mesh(mesh) or "one device"


def train_with_fault(
    plan: Plan, rehearsal: Rehearsal, folder: Path, report: RehearsalReport, reach: Reach, show: Show
) -> None:
    file = write_recipe(rehearsal, "recipe.yaml", rehearsal.recipe)
    kind = "kill-worker" if runs_on_ray(plan.recipe) else "kill-controller"
    options = ChaosOptions(1, plan.recipe.seed, (kind,), 0.0, RECOVER_S, RECOVER_S, after_step=2)
    lines: list[str] = []

    def echo(line: str) -> None:
        lines.append(line)
        show(line)

    command = [*TRAIN, str(file), f"schedule.steps={MOST_STEPS}", "checkpoint.resume=auto"]
    run = ChaosRun(command, folder, options, reach, show, echo)
    try:
        seen = run.run()
    except RunError:
        raise RunError(last_words(lines)) from None
    report.problems += seen.problems
    steps = [row for row in read_metrics(folder / "metrics.jsonl") if not is_validation(row)]
    report.rows += describe_steps(plan, steps)
    if steps and not any(row["updates/made"] for row in steps):
        report.problems.append("no update was made")
    for fault in seen.faults:
        recovered = (
            "it did not recover" if fault.recovered_s is None else f"{fault.outcome}, in {fault.recovered_s:.0f} s"
        )
        report.rows.append((f"{fault.target} killed", recovered))
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    if checkpoints:
        size = sum(file.stat().st_size for file in checkpoints[-1].rglob("*") if file.is_file())
        report.rows.append(("checkpoint", f"{checkpoints[-1].name}, {size / 2**20:.1f} MiB"))


def describe_steps(plan: Plan, steps: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    yield "steps", f"{len(steps)}, the last in {steps[-1]['time/step_s']:.1f} s" if steps else "none"
    made = sum(row["updates/made"] for row in steps)
    yield (
        "updates",
        f"{made:g}, gradient norm up to {max((row['policy/gradient_norm'] for row in steps), default=0.0):.2g}",
    )
    published = [row for row in steps if "time/transfer_s" in row]
    if published:
        deviation = max(row.get("transfer/probe_deviation", 0.0) for row in published)
        kind = transfer_kind(plan.recipe, plan.placement)
        yield (
            "weights",
            f"{kind}, {published[-1]['time/transfer_s']:.2f} s; log-probs differ by {deviation:.1e} at most",
        )


def last_words(lines: list[str]) -> str:
    """What a run that ended before its first step says of it."""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (
        errors[0] if errors else "the run ended before its first step: " + (lines[-1] if lines else "no output at all")
    )


def resume(plan: Plan, rehearsal: Rehearsal, folder: Path, report: RehearsalReport, show: Show) -> None:
    parallel = find_other_mesh(plan)
    small = rehearsal.recipe
    steps = last_step(folder / "metrics.jsonl") + 1
    train = (
        small.train if parallel is None else small.train.model_copy(update={"parallel": parallel_of(small, parallel)})
    )
    schedule = small.schedule.model_copy(update={"steps": steps})
    checkpoint = small.checkpoint.model_copy(update={"resume": "auto"})
    changed = small.model_copy(update={"train": train, "schedule": schedule, "checkpoint": checkpoint})
    file = write_recipe(rehearsal, "resumed.yaml", changed)
    mesh = "the same mesh" if parallel is None else name_mesh(checked_plan(changed).meshes["actor"])
    show(f"resuming with {mesh}")
    started, lines = time.monotonic(), list[str]()
    code = run_child([*TRAIN, str(file)], lines, show)
    if code == 0 and last_step(folder / "metrics.jsonl") == steps:
        report.rows.append(("resume", f"with {mesh}: step {steps}, in {time.monotonic() - started:.0f} s"))
    else:
        report.problems.append(f"resume with {mesh}: {last_words(lines)}")


def find_other_mesh(plan: Plan) -> dict[str, int] | None:
    """Returns `train.parallel` of another mesh for the same devices; None where there is none."""
    if not runs_on_ray(plan.recipe):
        return None
    for parallel in OTHER_MESHES:
        train = plan.recipe.train.model_copy(update={"parallel": parallel_of(plan.recipe, parallel)})
        try:
            found = checked_plan(plan.recipe.model_copy(update={"train": train}))
        except UserError:  # of the recipe, or of a model that cannot be cut so
            continue
        if found.meshes["actor"] != plan.meshes["actor"]:
            return parallel
    return None


def parallel_of(recipe: Recipe, written: Mapping[str, int]) -> Any:
    return type(recipe.train.parallel).model_validate(written)


def write_recipe(rehearsal: Rehearsal, name: str, recipe: Recipe) -> Path:
    write_atomically(rehearsal.folder / name, dump_recipe(recipe))
    return rehearsal.folder / name


def run_child(command: list[str], lines: list[str], show: Show) -> int:
    child = start_child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, death_signal=signal.SIGTERM)
    assert child.stdout is not None
    try:
        for line in child.stdout:
            lines.append(line.decode(errors="replace").rstrip())
            show(lines[-1])
        return child.wait()
    finally:
        terminate_group(child, grace_s=KILL_S)
