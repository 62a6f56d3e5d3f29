"""The mesh where a recipe writes neither `train.parallel.shard` nor `replicate`.

Whole copies where a device holds one, since these exchange gradients once an update and nothing else; else shards
within a node and copies across nodes, so that layers are gathered over the faster links; else shards over all devices.
What a device holds is known where the model's shape is, and the memory of devices: to a plan with
`cluster.device_memory`, to a run on GPUs by itself. Elsewhere everything is sharded, which needs the least memory.
"""

import math
from collections.abc import Sequence

from corral.recipe.memory import GIB, estimate_memory
from corral.recipe.placement import MESH_ROLES, Placement
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import MAX_SEQUENCES, Parallel, Recipe
from corral.recipe.shape import ModelShape

MARGIN = 0.9
"""Part of a device's memory that an estimate may fill: the rest is for what the estimate leaves out."""
MIN_SEQUENCES = 32
"""Sequences of full length for which an engine's KV cache should have memory, at least."""
UNKNOWN = (
    "all devices hold one model together: what one holds is known with `cluster.device_memory` and a local model; a "
    "run on GPUs chooses by their memory"
)


def with_default_mesh(recipe: Recipe, placement: Placement, shape: ModelShape | None) -> tuple[Recipe, str | None]:
    """Returns the recipe with its mesh, and why it has this one: None where it is written, or there is no choice."""
    parallel, available = recipe.train.parallel, recipe.cluster.device_memory
    if {"shard", "replicate"} & parallel.model_fields_set or len(placement.roles["actor"]) == 1:
        return recipe, None
    if available is None or shape is None:
        return recipe, UNKNOWN
    reason, algorithm = None, resolve_algorithm(recipe)
    for choice, reason in mesh_choices(recipe, placement):
        chosen = with_parallel(recipe, choice)
        smallest = chosen.rollout.model_copy(update={"max_sequences": min_sequences(chosen)})
        needed = peak_memory(chosen.model_copy(update={"rollout": smallest}), shape, algorithm, placement)
        if needed <= MARGIN * available * GIB:
            return chosen, reason
    return recipe, reason


def mesh_choices(recipe: Recipe, placement: Placement) -> list[tuple[Parallel, str]]:
    """Meshes with the recipe's sizes other than shard and replicate, the least sharded one first, and why one would
    take each. One `replicate` is for all roles, so it divides the devices of each. Empty: the sizes do not divide."""
    parallel, per_node = recipe.train.parallel, recipe.cluster.devices_per_node
    roles = [placement.roles[role] for role in MESH_ROLES if role in placement.roles]
    fixed = parallel.pipeline * parallel.expert * parallel.context * parallel.tensor
    common = math.gcd(*(len(devices) for devices in roles))
    if common % fixed:
        return []
    common //= fixed
    divisors = [number for number in range(1, common + 1) if common % number == 0]
    stages = parallel.pipeline  # each on devices of its own, which are beside each other
    within_a_node = [n for n in divisors if all(is_within_nodes(one, n * stages, per_node) for one in roles)]
    choices = {common: "whole copies: a device holds one" if fixed == 1 else "as many copies as there can be"}
    if fixed == 1 and {"parameters", "gradients"} & set(recipe.train.offload):
        choices = {}  # only shards are gathered when they are needed
    for number in within_a_node[:1]:
        where = "over all devices" if number == 1 else "within a node, copies across nodes"
        choices.setdefault(number, f"shards {where}: a device does not hold a whole copy")
    choices.setdefault(1, "shards over all devices: those of one node do not hold a whole copy")
    return [
        (parallel.model_copy(update={"replicate": number, "shard": None}), reason) for number, reason in choices.items()
    ]


def is_within_nodes(devices: Sequence[int], num_copies: int, per_node: int) -> bool:
    """Whether each copy of a model on these devices has devices of one node only."""
    size = len(devices) // num_copies
    spans = (devices[start : start + size] for start in range(0, len(devices), size))
    return all(span[0] // per_node == span[-1] // per_node for span in spans)


def min_sequences(recipe: Recipe) -> int:
    return min(MIN_SEQUENCES, recipe.rollout.max_sequences or MAX_SEQUENCES["cuda"])


def with_parallel(recipe: Recipe, parallel: Parallel) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"parallel": parallel})})


def peak_memory(recipe: Recipe, shape: ModelShape, algorithm: ResolvedAlgorithm, placement: Placement) -> int:
    """Bytes that the fullest device needs in the phase in which it is fullest, with the whole of its KV cache."""
    unbounded = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"device_memory": None})})
    groups = estimate_memory(unbounded, algorithm, placement, shape, auto_bytes=2, on_gpu=True)
    return max(total for group in groups for total in group.totals.values())
