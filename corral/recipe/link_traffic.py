"""Bytes that a step moves between devices, by link: within a node, and across nodes.

Estimates for trajectories of full length. A device that lacks a part of a tensor receives it once, over the links of
its node where another device of its group is there; a node receives over the network what none of its devices has.
Not in it: activations that tensor and context groups exchange, and what the controller sends.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

from corral.recipe.memory import DTYPE_BYTES, human_bytes, num_trained_parameters
from corral.recipe.mesh import MeshShape, moves_by_all_to_all, other_ranks_of_token
from corral.recipe.placement import transfer_kind
from corral.recipe.schema import Recipe

if TYPE_CHECKING:
    from corral.recipe.plan import Plan

Groups = Sequence[Sequence[int]]
"""Devices that take part in one collective together, for each of those that run at the same time."""


@dataclass(frozen=True)
class Traffic:
    within_node: float = 0.0
    """Bytes that a device receives from its own node."""
    across_nodes: float = 0.0
    """Bytes that a node receives from other nodes, all of its devices together."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.within_node + other.within_node, self.across_nodes + other.across_nodes)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(self.within_node * times, self.across_nodes * times)


def link_traffic(plan: "Plan") -> dict[str, Traffic]:
    """Returns what moves in a step, by its purpose. Empty where the model's shape is unknown."""
    if plan.shape is None:
        return {}
    gathers, gradients, stages, exchange = Traffic(), Traffic(), Traffic(), Traffic()
    updates = plan.recipe.batch.updates_per_step * plan.recipe.batch.ppo_epochs
    for role, mesh in plan.meshes.items():
        num_micro_batches = updates * micro_batches_per_update(plan.recipe, mesh)
        if role != "reference":
            # Shards are summed in the backward pass of each micro-batch, replicas once an update.
            gradients += gradient_scatter(plan, role) * num_micro_batches + replica_sum(plan, role) * updates
            gathers += parameter_gather(plan, role) * (2 * num_micro_batches)  # forward, and again backward
        forward_only = num_logprob_passes(plan, role) * num_micro_batches / plan.recipe.batch.ppo_epochs
        gathers += parameter_gather(plan, role) * forward_only
        stages += hidden_states(plan, role)
        if mesh.expert > 1 and plan.shape.num_experts:
            exchange += expert_exchange(plan, role) * num_passes(plan, role)
    of_activations = {"pipeline stages": stages, "expert exchange": exchange}
    return {
        "parameter gathers": gathers,
        "gradient reduction": gradients,
        "weight transfer": weight_transfer(plan),
        **{what: traffic for what, traffic in of_activations.items() if traffic != Traffic()},
    }


def hidden_states(plan: "Plan", role: str) -> Traffic:
    """Hidden states that each pipeline stage receives of the one before it, and in training their gradients of the one
    behind it."""
    assert plan.shape is not None
    mesh, epochs, per_node = plan.meshes[role], plan.recipe.batch.ppo_epochs, plan.recipe.cluster.devices_per_node
    tokens = trained_tokens(plan.recipe) / mesh.num_data / mesh.context
    size, backward = tokens * plan.shape.hidden_size * plan.weight_bytes, epochs * (role != "reference")
    within, across = dict[int, float](), dict[int, float]()
    for group in groups_along(mesh, plan.placement.roles[role], ("pipeline",)):
        for before, behind in pairwise(group):
            is_within = before // per_node == behind // per_node
            for device, times in ((behind, backward + num_logprob_passes(plan, role)), (before, backward)):
                received, key = (within, device) if is_within else (across, device // per_node)
                received[key] = received.get(key, 0.0) + size * times
    return Traffic(max(within.values(), default=0.0), max(across.values(), default=0.0))


def trained_tokens(recipe: Recipe) -> int:
    """Most tokens of a step that training computes: the prompt of a group is computed once."""
    if recipe.trains_on_rows:
        return recipe.num_trajectories * recipe.max_trained_tokens
    prompts = recipe.batch.prompts_per_step * recipe.data.max_prompt_tokens
    return prompts + recipe.num_trajectories * recipe.rollout.max_response_tokens


def micro_batches_per_update(recipe: Recipe, mesh: MeshShape) -> int:
    batch = recipe.batch
    tokens = trained_tokens(recipe) / batch.updates_per_step / mesh.num_data
    return max(1, math.ceil(tokens / batch.max_tokens_per_micro_batch))


def num_logprob_passes(plan: "Plan", role: str) -> int:
    """Passes without gradients that a role makes over the tokens of a step."""
    if role != "actor":
        return 1
    is_reference = plan.algorithm.needs_reference and "reference" not in plan.meshes
    is_reference &= plan.recipe.reference.endpoint is None
    return int(plan.algorithm.old_logprobs == "recompute") + is_reference


def num_passes(plan: "Plan", role: str) -> int:
    """Passes over the tokens of a step in which activations travel: forward, of gradients, and forward again where
    activations are computed twice."""
    trained = 0 if role == "reference" else 2 + bool(plan.recipe.train.gradient_checkpointing)
    return trained * plan.recipe.batch.ppo_epochs + num_logprob_passes(plan, role)


def expert_exchange(plan: "Plan", role: str) -> Traffic:
    """Tokens of a step on their way to their experts and back, in one pass through the layers of a device."""
    mesh, shape = plan.meshes[role], plan.shape
    assert shape is not None
    own = trained_tokens(plan.recipe) / (mesh.num_data * mesh.context) * shape.hidden_size * plan.weight_bytes
    times = 2 * (shape.num_layers - shape.num_dense_layers) / mesh.pipeline
    routing = shape.num_experts, shape.experts_per_token, mesh.expert
    if not moves_by_all_to_all(*routing):
        return gather(plan, role, ("expert",), own * mesh.expert) * times
    to_each = own * other_ranks_of_token(*routing) / (mesh.expert - 1)
    within, across = 0, dict[int, float]()
    for group in groups_along(mesh, plan.placement.roles[role], ("expert",)):
        nodes = [device // plan.recipe.cluster.devices_per_node for device in group]
        for node in nodes:
            within = max(within, nodes.count(node) - 1)
            across[node] = across.get(node, 0.0) + to_each * (len(nodes) - nodes.count(node))
    return Traffic(to_each * within, max(across.values())) * times


def parameter_gather(plan: "Plan", role: str) -> Traffic:
    """All layers of a sharded model, once."""
    assert plan.shape is not None
    mesh = plan.meshes[role]
    num_experts = plan.shape.num_expert_parameters if mesh.expert > 1 else 0
    size = plan.weight_bytes / mesh.tensor / mesh.pipeline
    dense = gather(plan, role, ("shard", "expert", "context"), (plan.shape.num_parameters - num_experts) * size)
    return dense + gather(plan, role, ("shard", "context"), num_experts * size / mesh.expert)


def gradient_scatter(plan: "Plan", role: str) -> Traffic:
    """Scattered sums over a copy's devices: one gather's bytes."""
    mesh, size = plan.meshes[role], gradient_size(plan)
    return gather(plan, role, ("shard", "expert", "context"), size / mesh.tensor / mesh.pipeline)


def replica_sum(plan: "Plan", role: str) -> Traffic:
    """Sums over the copies of what a device has of the gradient. All have them: two gathers' bytes."""
    mesh = plan.meshes[role]
    return gather(plan, role, ("replicate",), gradient_size(plan) * mesh.replicate / mesh.size) * 2


def gradient_size(plan: "Plan") -> int:
    """Bytes of the whole gradient as it travels."""
    assert plan.shape is not None
    return num_trained_parameters(plan.recipe, plan.shape) * DTYPE_BYTES[plan.recipe.train.gradient_dtype]


def weight_transfer(plan: "Plan") -> Traffic:
    """New weights, once: gathered by trainers that hold shards, and sent to engines on other devices."""
    assert plan.shape is not None
    recipe, per_node = plan.recipe, plan.recipe.cluster.devices_per_node
    if not recipe.needs_engine:
        return Traffic()
    only_adapters = recipe.model.lora is not None and recipe.rollout.engine.in_process
    num_sent = num_trained_parameters(recipe, plan.shape) if only_adapters else plan.shape.num_parameters
    size = num_sent * plan.weight_bytes
    gathered = gather(plan, "actor", ("pipeline", "shard", "expert", "context", "tensor"), size)
    if transfer_kind(recipe, plan.placement) == "shared":
        return gathered
    trainers, engines = ({d // per_node for d in plan.placement.roles[role]} for role in ("actor", "rollout"))
    return gathered + Traffic(size, size * bool(engines - trainers or len(trainers) > 1))


def gather(plan: "Plan", role: str, dimensions: Sequence[str], size: float) -> Traffic:
    """A tensor of `size` bytes, of which each device of a group along the dimensions has an equal part, on all of
    them. What each device of a sum receives is the same."""
    per_node = plan.recipe.cluster.devices_per_node
    groups = groups_along(plan.meshes[role], plan.placement.roles[role], dimensions)
    within, across = 0.0, dict[int, float]()
    for group in groups:
        nodes = [device // per_node for device in group]
        if len(set(nodes)) < len(group):
            within = size * (1 - 1 / len(group))
        for node in set(nodes):
            across[node] = across.get(node, 0.0) + size * (1 - nodes.count(node) / len(group))
    return Traffic(within, max(across.values()))


def groups_along(mesh: MeshShape, devices: Sequence[int], dimensions: Sequence[str]) -> Groups:
    """Devices that differ in these dimensions only."""
    sizes = asdict(mesh)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, position in zip(devices, product(*map(range, sizes.values())), strict=True):
        rest = tuple(place for name, place in zip(sizes, position, strict=True) if name not in dimensions)
        groups.setdefault(rest, []).append(device)
    return list(groups.values())


def describe_links(plan: "Plan") -> dict[str, list[str]]:
    """The section of the plan, with its title. Empty where nothing travels, or it is not known how much."""
    traffic = link_traffic(plan)
    if not any(one.within_node or one.across_nodes for one in traffic.values()):
        return {}
    has_network = plan.recipe.cluster.nodes > 1
    lines = [f"{'':<20}{'within a node, to a device':>28}" + f"{'across nodes, to a node':>26}" * has_network]
    for name, one in {**traffic, "total": sum(traffic.values(), Traffic())}.items():
        sizes = [(one.within_node, 28), (one.across_nodes, 26)][: 1 + has_network]
        lines.append(f"{name:<20}" + "".join(f"{human_bytes(size) if size else '-':>{width}}" for size, width in sizes))
    return {"links: bytes of a step of full length, estimated": lines}
