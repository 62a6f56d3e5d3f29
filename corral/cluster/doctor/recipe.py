"""What a recipe asks of the nodes: devices, memory, disk."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from corral.cluster.doctor.findings import Finding, Place
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.load import load_recipe
from corral.recipe.memory import human_bytes
from corral.recipe.placement import format_devices
from corral.recipe.plan import Plan, make_plan
from corral.recipe.schema import Recipe
from corral.recipe.shape import ModelShape

TIGHT = 0.9


def read_recipe(path: Path, overrides: Sequence[str], has_gpus: bool) -> tuple[Plan | None, list[Finding]]:
    """Its plan, unless something is wrong with it. `has_gpus`: what `model.dtype: auto` means depends on it."""
    try:
        recipe = load_recipe(path, overrides)
        plan = make_plan(recipe, ModelShape.find(recipe.model.path), device="cuda" if has_gpus else "cpu")
    except RecipeError as error:
        return None, [Finding("error", "recipe", problem) for problem in error.problems]
    except UserError as error:
        return None, [Finding("error", "recipe", str(error))]
    warnings = [Finding("warning", "recipe", warning) for warning in plan.warnings]
    return plan, warnings or [Finding("ok", "recipe", f"{path}: nothing to object to")]


def checkpoint_bytes(plan: Plan) -> int:
    """For as many as are kept, and one more while it is written: weights, and the optimizer's float32 state."""
    if plan.shape is None:
        return 0
    models = 2 if plan.algorithm.needs_critic else 1
    state = 8 if plan.weight_bytes >= 4 else 12
    return plan.shape.num_parameters * (plan.weight_bytes + state) * models * (plan.recipe.checkpoint.keep + 1)


# --- devices and memory


@dataclass(frozen=True)
class Capacity:
    """Of a node."""

    devices: int
    """That Ray hands out; GPUs, or worker slots."""
    gpu_bytes: tuple[int, ...]
    """Of each GPU; none on a node without."""
    memory: int


def check_devices(recipe: Recipe, capacities: Mapping[Place, Capacity]) -> Iterator[Finding]:
    """`capacities`: of the nodes of a cluster."""
    cluster = recipe.cluster
    large = [place for place, own in capacities.items() if own.devices >= cluster.devices_per_node]
    wanted = f"`cluster` has {cluster.nodes} x {cluster.devices_per_node} devices"
    if len(large) >= cluster.nodes:
        yield Finding("ok", "devices", f"{wanted}, and there are enough")
        return
    there = ", ".join(f"{own.devices} on {place.host}" for place, own in capacities.items())
    fix = "wait for the missing nodes (`corral check`), or change `cluster.nodes` and `cluster.devices_per_node`"
    yield Finding("error", "devices", f"{wanted}, and there are {there}", fix)


def check_fit(plan: Plan, capacities: Mapping[Place, Capacity]) -> Iterator[Finding]:
    """Whether the plan's memory fits the devices. `capacities`: in the order of the nodes' ranks."""
    places, per_node = list(capacities), plan.recipe.cluster.devices_per_node
    needs: dict[Place, int] = dict.fromkeys(places, 0)
    """Of main memory, on nodes without GPUs."""
    is_fine = bool(plan.memory)
    for group in plan.memory:
        most = max(group.totals.values())
        for device in group.devices:
            if device // per_node >= len(places):
                continue  # told by `check_devices`
            place = places[device // per_node]
            sizes = capacities[place].gpu_bytes
            if not sizes:
                needs[place] += most
            elif device % per_node < len(sizes):
                found = fit(most, sizes[device % per_node], f"device {device} ({'+'.join(group.roles)})")
                if found is not None:
                    is_fine = False
                    yield Finding(found[0], "memory fit", found[1], SMALLER, (place,), f"GPU {device % per_node}")
    for place, most in needs.items():
        found = fit(most, capacities[place].memory, "the workers of the node together") if most else None
        if found is not None:
            is_fine = False
            yield Finding(found[0], "memory fit", found[1], SMALLER, (place,))
    if is_fine:
        largest = max(plan.memory, key=lambda group: max(group.totals.values()))
        size = human_bytes(max(largest.totals.values()))
        what = f"a device needs {size} at most, estimated (device {format_devices(largest.devices)}); that is there"
        yield Finding("ok", "memory fit", what)


SMALLER = (
    "`corral plan` says what takes it; less with `train.parallel`, `train.offload`, `train.gradient_checkpointing` or a "
    "smaller `batch.max_tokens_per_micro_batch`"
)


def fit(needs: int, there: int, who: str) -> tuple[Literal["error", "warning"], str] | None:
    if needs <= TIGHT * there:
        return None
    what = f"{who} will need {human_bytes(needs)}, estimated, of {human_bytes(there)}"
    return ("error" if needs > there else "warning", what)
