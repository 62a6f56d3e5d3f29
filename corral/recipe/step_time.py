"""How long a step takes, about: measured rates of one H200, scaled to other devices by their data sheets.

What was measured is in docs/results.md, on one device: training as a part of the matrix peak, rollouts as a part of the
time that memory and matrix products need at least. Traffic between devices was not measured, and is
taken at a stated part of the links' rates; training hides it behind computation, up to the larger of the two.
"""

from dataclasses import dataclass

from corral.recipe.link_traffic import (
    Traffic,
    link_traffic,
    micro_batches_per_update,
    num_logprob_passes,
    trained_tokens,
)
from corral.recipe.memory import FLOAT32, num_trained_parameters
from corral.recipe.plan import Plan
from corral.recipe.schema import MAX_SEQUENCES


@dataclass(frozen=True)
class DeviceKind:
    """A device, by its data sheet. Bytes are per second and in one direction."""

    matrix_flops: float
    """Dense products of bfloat16 matrices."""
    memory_bytes: float
    link_bytes: float
    """To the other devices of a node."""
    network_bytes: float
    """To other nodes, for each device: what nodes of such devices usually have, not a property of the device."""
    memory_gib: int | None = None
    """None: it is made with several."""


DEVICE_KINDS = {
    "a100": DeviceKind(312e12, 2.0e12, 300e9, 25e9),
    "a800": DeviceKind(312e12, 2.0e12, 200e9, 25e9, 80),
    "h20": DeviceKind(148e12, 4.0e12, 450e9, 50e9, 96),
    "h100": DeviceKind(989e12, 3.35e12, 450e9, 50e9, 80),
    "h800": DeviceKind(989e12, 3.35e12, 200e9, 50e9, 80),
    "h200": DeviceKind(989e12, 4.8e12, 450e9, 50e9, 141),
    "b200": DeviceKind(2250e12, 8.0e12, 900e9, 50e9, 180),
    "l40s": DeviceKind(362e12, 0.86e12, 32e9, 12e9, 48),
    "rtx4090": DeviceKind(165e12, 1.0e12, 32e9, 3e9, 24),
}
MATRIX_PEAK, MEMORY_PEAK = 0.79, 0.88
"""Parts of the data sheet that a large product and a large copy reached on an H200 (780 TFLOP/s, 4.2 TB/s)."""
TRAINING = {False: 0.60, True: 0.47}
"""Part of that matrix peak in training, without and with gradient checkpointing, whose own work is not counted."""
ROLLOUT = 0.9
"""Part of the two peaks in a rollout: the mean of 1.5 B and 7 B, 128 and 512 sequences, each within a third."""
MIXTURE = 0.32
"""What a mixture of experts reaches of a dense model's rates."""
VLLM = 0.75
"""What vLLM reaches of the native engine's rate with 7 B."""
LINK = 0.7
"""Part of a link's rate. Not measured."""
HOST_BYTES = 40e9
"""Bytes per second between a device and its host, in each direction: what an H200 reached with the states of 7 B."""


def estimate_step_s(plan: Plan, kind: DeviceKind) -> dict[str, float]:
    """Returns seconds by stage of a step whose trajectories all have full length."""
    traffic = link_traffic(plan)
    stages = {"rollout": rollout_s(plan, kind), "weights": link_s(plan, kind, traffic["weight transfer"])}
    if "expert exchange" in traffic:  # nothing is computed while tokens are on their way
        stages["expert exchange"] = link_s(plan, kind, traffic["expert exchange"])
    stages |= {"log-probs": logprobs_s(plan, kind), "training": training_s(plan, kind), "offload": offload_s(plan)}
    return {stage: seconds for stage, seconds in stages.items() if seconds}


def rollout_s(plan: Plan, kind: DeviceKind) -> float:
    recipe, shape = plan.recipe, plan.shape
    assert shape is not None
    if recipe.trains_on_rows:
        return 0.0
    engine, response = recipe.rollout.engine, recipe.rollout.max_response_tokens
    num_devices = len(plan.placement.roles["rollout"])
    per_engine = recipe.num_trajectories / (num_devices / engine.tensor_parallel)
    at_once = min(per_engine, recipe.rollout.max_sequences or MAX_SEQUENCES["cuda"])
    matrix_flops = kind.matrix_flops * MATRIX_PEAK * engine.tensor_parallel
    memory_bytes = kind.memory_bytes * MEMORY_PEAK * engine.tensor_parallel
    mean_length = recipe.data.max_prompt_tokens + response / 2
    # One decode step reads the weights (of a mixture those of the experts that any sequence passes through) and the
    # keys and values of every sequence.
    used = min(1.0, at_once * shape.experts_per_token / shape.num_experts) if shape.num_experts else 1.0
    num_read = shape.num_parameters - shape.num_expert_parameters * (1 - used)
    num_read += at_once * mean_length * shape.kv_values_per_token
    decode_s = num_read * plan.weight_bytes / memory_bytes + at_once * 2 * shape.num_matrix_parameters / matrix_flops
    prefill = recipe.batch.prompts_per_step * recipe.data.max_prompt_tokens * engine.tensor_parallel / num_devices
    prefill_s = prefill * forward_flops(plan) / matrix_flops
    rate = ROLLOUT * (VLLM if engine.name == "vllm" else 1.0) * (MIXTURE if shape.num_experts else 1.0)
    return (response * per_engine / at_once * decode_s + prefill_s) / rate


def forward_flops(plan: Plan) -> float:
    """Operations of one token: two for each parameter that it is multiplied with, and attention to half of a
    trajectory, which is what causal tokens see on average."""
    shape = plan.shape
    assert shape is not None
    widths = shape.num_heads * shape.head_dim + shape.output_size  # of scores, and of what they weight
    attention = 2 * shape.num_layers * widths * plan.recipe.max_trained_tokens / 2
    return 2 * shape.num_matrix_parameters + attention


def logprobs_s(plan: Plan, kind: DeviceKind) -> float:
    """Passes without gradients: of old log-probs, of the reference and of values."""
    return sum(computing_s(plan, role, kind, num_logprob_passes(plan, role), False) for role in plan.meshes)


def training_s(plan: Plan, kind: DeviceKind) -> float:
    """A backward pass is twice a forward pass, or as much where only adapters have gradients."""
    passes = (3 if plan.recipe.model.lora is None else 2) * plan.recipe.batch.ppo_epochs
    checkpoints = plan.recipe.train.gradient_checkpointing is True  # selectively, next to nothing is computed twice
    roles = [role for role in plan.meshes if role != "reference"]
    computing = sum(computing_s(plan, role, kind, passes, checkpoints) for role in roles)
    traffic = link_traffic(plan)
    return max(computing, link_s(plan, kind, traffic["parameter gathers"] + traffic["gradient reduction"]))


def computing_s(plan: Plan, role: str, kind: DeviceKind, passes: int, checkpoints: bool) -> float:
    assert plan.shape is not None
    rate = TRAINING[checkpoints] * (MIXTURE if plan.shape.num_experts else 1.0)
    flops = passes * trained_tokens(plan.recipe) * forward_flops(plan)
    mesh = plan.meshes[role]
    busy = 1 - mesh.bubble(micro_batches_per_update(plan.recipe, mesh))
    return flops / (mesh.size * busy * kind.matrix_flops * MATRIX_PEAK * rate)


def link_s(plan: Plan, kind: DeviceKind, traffic: Traffic) -> float:
    """The slower of the two kinds of links."""
    network = kind.network_bytes * plan.recipe.cluster.devices_per_node
    return max(traffic.within_node / kind.link_bytes, traffic.across_nodes / network) / LINK


def offload_s(plan: Plan) -> float:
    """For each update optimizer states to the device and back, at the same time where nothing is sharded; for each
    micro-batch parameters to it, forward and backward, and gradients from it."""
    assert plan.shape is not None
    mesh, batch, offload = plan.meshes["actor"], plan.recipe.batch, plan.recipe.train.offload
    times = (3 if mesh.is_whole else 6) * ("optimizer" in offload)
    times += 3 * micro_batches_per_update(plan.recipe, mesh) * ("parameters" in offload)
    shard = num_trained_parameters(plan.recipe, plan.shape) * FLOAT32 / (mesh.size // mesh.replicate)
    return times * shard * batch.updates_per_step * batch.ppo_epochs / HOST_BYTES
