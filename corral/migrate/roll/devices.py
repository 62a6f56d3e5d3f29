"""ROLL's keys for who computes where: devices of roles, and how a model is spread over them."""

import math
from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    boolean,
    built_in,
    converted,
    integer,
    mapped,
    no_effect,
    number,
    text,
    unsupported,
)
from corral.migrate.roll.facts import (
    ROLES,
    STRATEGY,
    count,
    devices,
    empty,
    experts,
    instead,
    kl_where,
    layout,
    parallel,
    plural,
    role_devices,
    shard,
    taken,
    uses_critic,
)
from corral.migrate.table import ForeignConfig, idle, lacking, needless, only, turned
from corral.recipe.placement import format_devices

TRAINERS = ("deepspeed_train", "fsdp2_train", "megatron_train", "veomni_train")
EVERY_MODEL = ("actor_train", "actor_infer", "reference", "critic")


# --- devices of roles


def devices_per_node(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = layout(config)
    if found.is_one:
        return built_in("one device in all: the run is one process")
    written = taken(config, "num_gpus_per_node")
    nodes, each = found.nodes, found.devices_per_node
    note = f"devices 0-{nodes * each - 1}: {plural(nodes, 'node')} of {each}"
    if each < written:
        note += f"; the node's other {written - each} are not used"
    return converted({"cluster.nodes": nodes, "cluster.devices_per_node": each}, note)


def actor_devices(config: ForeignConfig, given: ForeignValue) -> Outcome:
    num_devices, (by_tensor, by_pipeline, by_context) = len(role_devices(config, "actor")), parallel(config)
    least = by_tensor * by_pipeline * by_context
    if num_devices % least:
        split = f"tensor {by_tensor} x pipeline {by_pipeline} x context {by_context}"
        raise ValueError(f"has {plural(num_devices, 'device')}, and {split} parallel needs a multiple of {least}")
    return placed(config, "actor")


def rollout_devices(config: ForeignConfig, given: ForeignValue) -> Outcome:
    actor, rollout = set(role_devices(config, "actor")), set(role_devices(config, "rollout"))
    if actor == rollout or not actor & rollout:
        return placed(config, "rollout")
    found = layout(config)
    if rollout < actor:
        words = f"devices {format_devices(sorted(rollout))}: in Corral all of the training's play"
        return built_in(words) if found.is_everywhere else converted({"cluster.placement": found.placement()}, words)
    if not actor < rollout:
        raise ValueError("should have all of actor_train's devices, some of them alone, or none of them")
    why = (
        f"devices that play and train by turns while others only play: in Corral rollout has "
        f"{format_devices(found.roles['rollout'])} and the training {format_devices(sorted(actor))}"
    )
    return instead({"cluster.placement": found.placement()}, why)


def reference_devices(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) is None:
        return built_in("without KL there is no reference model")
    return placed(config, "reference")


def critic_devices(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not uses_critic(config):
        return built_in(f"{taken(config, 'adv_estimator')} has no critic")
    return placed(config, "critic")


def placed(config: ForeignConfig, role: str) -> Outcome:
    found, wanted = layout(config), role_devices(config, role)
    if found.is_one:
        return built_in("one device in all: the run is one process")
    if found.is_everywhere:
        return built_in(f"devices {format_devices(wanted)}: all there are, as in Corral where nothing is said")
    words = f"devices {format_devices(wanted)}"
    if found.roles[role] != wanted:
        words += f": with the training on {format_devices(found.roles[role])}, since roles share all devices or none"
    return converted({"cluster.placement": found.placement()}, words)


def num_nodes(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return built_in(f"follows from the devices: {layout(config).nodes}, in ROLL too")


def staleness(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ratio = given.value or 0
    if ratio < 0:
        raise ValueError("should be at least 0")
    if ratio == 0:
        return built_in("every step plays with the newest weights, as in Corral")
    if layout(config).colocated:
        return unsupported("only an engine with devices of its own can play ahead of the training")
    steps = math.ceil(ratio)
    note = f"up to {plural(steps, 'step')} ahead; tokens of older weights are weighed (`algorithm.correction`)"
    return converted({"schedule.max_staleness": steps}, note)


# --- how a model is spread


def pipeline(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if (given.value or 1) == 1:
        return built_in("1, as in Corral")
    return unsupported(
        f"layers are not dealt to devices in Corral; these {given.value} share a model by its parameters"
    )


def expert(config: ForeignConfig, given: ForeignValue) -> Outcome:
    wanted = given.value or 1
    if experts(config) == wanted:
        return mapped("train.parallel.expert", wanted)
    by_tensor, _, by_context = parallel(config)
    return unsupported(
        f"experts are dealt beside the rest: {wanted} x tensor {by_tensor} x context {by_context} does not divide "
        f"{plural(len(role_devices(config, 'actor')), 'device')}"
    )


def fsdp_size(config: ForeignConfig, given: ForeignValue) -> Outcome:
    size = shard(config)
    if size is None:
        return built_in("a model is sharded over all devices that are left for it")
    by_tensor, _, by_context = parallel(config)
    copies = len(role_devices(config, "actor")) // (by_tensor * by_context * experts(config) * size)
    ours = {"train.parallel.shard": size, "train.parallel.replicate": copies}
    return converted(ours, f"{copies} copies of the model, each over {plural(size, 'device')}")


def tensor(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("train.parallel.tensor", parallel(config)[0])


def context(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("train.parallel.context", parallel(config)[2])


def recompute(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """ROLL's other back ends have another key for it."""
    if given.value == "full":
        return mapped("train.recompute", "full")
    if given.value in (None, "selective"):
        return built_in("attention is computed again in the backward pass anyway")
    raise ValueError("should be full or selective")


def checkpointing(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if config["actor_train.strategy_args.strategy_name"] == "megatron_train":
        return no_effect("with megatron_train `recompute_granularity` says it")
    is_on = not taken(config, "actor_train.model_args.disable_gradient_checkpointing")
    return mapped("train.recompute", "full" if is_on else "none")


def offload(config: ForeignConfig, given: ForeignValue) -> Outcome:
    parts = offloaded(config)
    if not parts:
        return built_in("on the device, as in Corral")
    return converted({"train.offload": parts}, f"{' and '.join(parts)} in the host's memory")


def offloaded(config: ForeignConfig) -> list[str]:
    """Only a model of which each device holds a part can have it all in the host's memory."""
    is_sharded = len(role_devices(config, "actor")) > 1 and taken(config, f"{STRATEGY}.fsdp_size") != 1
    device = config[f"{STRATEGY}.zero_optimization.offload_param.device"]
    all_of_it = bool(config[f"{STRATEGY}.offload_policy"])
    keys = ("is_offload_optimizer_states_in_train_step", f"{STRATEGY}.optimizer_cpu_offload")
    optimiser = all_of_it or any(config[key] for key in keys)
    optimiser |= config[f"{STRATEGY}.zero_optimization.offload_optimizer.device"] in ("cpu", "nvme")
    parts = ["parameters"] * (is_sharded and (all_of_it or device in ("cpu", "nvme")))
    parts += ["gradients"] * (is_sharded and all_of_it)
    return parts + ["optimiser"] * bool(optimiser)


def trainer(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value in TRAINERS:
        return built_in("Corral's own trainer, which shards as FSDP does")
    return unsupported(f"Corral trains language models: {', '.join(TRAINERS)}")


def size(value: Any) -> int:
    """-1 is all."""
    if integer(value) < -1:
        raise ValueError("a whole number")
    return int(value)


ROWS = [
    turned("num_gpus_per_node", count, devices_per_node, 8),
    turned("num_nodes", count, num_nodes),
    turned(f"{ROLES['actor']}.device_mapping", devices, actor_devices, [0]),
    turned(f"{ROLES['rollout']}.device_mapping", devices, rollout_devices),
    turned(f"{ROLES['reference']}.device_mapping", devices, reference_devices),
    turned(f"{ROLES['critic']}.device_mapping", devices, critic_devices),
    turned("async_generation_ratio", number, staleness),
    turned("actor_train.strategy_args.strategy_name", text, trainer),
    turned(f"{STRATEGY}.tensor_model_parallel_size", count, tensor, 1),
    turned(f"{STRATEGY}.context_parallel_size", count, context, 1),
    turned("actor_train.model_args.ulysses_size", count, context, 1),
    turned(f"{STRATEGY}.expert_model_parallel_size", count, expert, 1),
    turned(f"{STRATEGY}.pipeline_model_parallel_size", count, pipeline, 1),
    needless(f"{STRATEGY}.virtual_pipeline_model_parallel_size", "it belongs to pipeline parallelism"),
    needless(f"{STRATEGY}.use_distributed_optimizer", "the optimiser is sharded with the model"),
    turned(f"{STRATEGY}.recompute_granularity", text, recompute),
    turned("actor_train.model_args.disable_gradient_checkpointing", boolean, checkpointing, False),
    turned(f"{STRATEGY}.fsdp_size", size, fsdp_size, -1),
    turned(f"{STRATEGY}.offload_policy", boolean, offload),
    turned(f"{STRATEGY}.optimizer_cpu_offload", boolean, offload),
    turned(f"{STRATEGY}.zero_optimization.offload_optimizer.device", text, offload),
    turned(f"{STRATEGY}.zero_optimization.offload_param.device", text, offload),
    turned("is_offload_optimizer_states_in_train_step", boolean, offload),
    needless("is_offload_states", "who takes turns on a device makes room for the others"),
    needless("offload_backend", "who takes turns on a device makes room for the others"),
    lacking(f"{STRATEGY}.fp8", "Corral computes in float32, bfloat16 or float16"),
    lacking(f"{STRATEGY}.fp8_recipe", "Corral computes in float32, bfloat16 or float16"),
    lacking(f"{STRATEGY}.fp8_param", "Corral computes in float32, bfloat16 or float16"),
    lacking(f"{STRATEGY}.moe_aux_loss_coeff", "the loss of a mixture's router is not added"),
    lacking(f"{STRATEGY}.additional_configs.**", "settings of Megatron's own"),
    needless(f"{STRATEGY}.**", "a setting of the trainer that Corral's takes the place of"),
    empty(STRATEGY),
    needless("actor_infer.strategy_args.strategy_name", "Corral's own engine"),
    lacking(
        "actor_infer.strategy_args.strategy_config.quantization", "the engine plays with the weights that are trained"
    ),
    lacking(
        "actor_infer.strategy_args.strategy_config.online_quantization",
        "the engine plays with the weights that are trained",
    ),
    needless(
        "actor_infer.strategy_args.strategy_config.**",
        "each device of the rollout holds a whole model; the engine finds out the rest",
    ),
    empty("actor_infer.strategy_args.strategy_config"),
    *[
        needless(f"{role}.strategy_args.**", "every model is computed as the actor is")
        for role in ("reference", "critic")
    ],
    *[needless(f"{role}.infer_batch_size", "what fits is computed at once") for role in EVERY_MODEL],
    *[needless(f"{role}.num_gpus_per_worker", "one process for each device") for role in EVERY_MODEL],
    *[needless(f"{role}.world_size", "one process for each device") for role in EVERY_MODEL],
    *[needless(f"{role}.max_concurrency", "the engine takes what comes") for role in EVERY_MODEL],
    *[needless(f"{role}.backend_timeout", "`cluster.call_timeout_s` bounds every wait") for role in EVERY_MODEL],
    *[
        only(
            f"{role}.model_update_frequency",
            integer,
            (1,),
            "after every step, as in Corral",
            "weights are new after every step",
        )
        for role in EVERY_MODEL
    ],
    needless("model_update_buffer_size_mb", "weights travel in pieces of Corral's choice"),
    needless("transfer_backend.**", "data travel by Ray"),
    needless("partial_gpu_mode", "the devices say it"),
    needless("router_args.**", "games are dealt to who has room"),
    needless("max_running_requests", "games are dealt to who has room"),
    idle("local_rank", "nothing reads it"),
]
