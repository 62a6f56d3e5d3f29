"""verl's sizes: how many trajectories and tokens go through how many devices. Several keys decide each of them.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, micro-batches count sequences. Search-R1 has keys of
its own for some of it, and its mini-batches count trajectories.
"""

import math

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    built_in,
    converted,
    format_value,
    mapped,
    no_effect,
    plural,
    unsupported,
)
from corral.migrate.table import ForeignConfig
from corral.recipe.schema import BatchSizes

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"

MICRO_PER_DEVICE = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
MICRO_OF_ALL = f"{ACTOR}.ppo_micro_batch_size"
MICRO_TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
ENGINES = ("fsdp_config", "megatron", "veomni", "torchtitan", "automodel", "deepspeed", "mindspeed")
AXES = {
    "context": (
        f"{ACTOR}.ulysses_sequence_parallel_size",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        f"{ACTOR}.megatron.context_parallel_size",
        f"{ACTOR}.veomni.ulysses_parallel_size",
        f"{ACTOR}.torchtitan.context_parallel_size",
    ),
    "tensor": (f"{ACTOR}.megatron.tensor_model_parallel_size", f"{ACTOR}.torchtitan.tensor_parallel_size"),
    "expert": (
        f"{ACTOR}.megatron.expert_model_parallel_size",
        f"{ACTOR}.veomni.expert_parallel_size",
        f"{ACTOR}.torchtitan.expert_parallel_size",
    ),
}
"""Keys of all training engines of verl, by Corral's name of the axis."""
FSDP_SIZES = (f"{ACTOR}.fsdp_config.fsdp_size", f"{ACTOR}.veomni.fsdp_size")
OFFLOADED = {
    "param_offload": ("parameters", "gradients"),
    "grad_offload": ("parameters", "gradients"),
    "optimizer_offload": ("optimizer",),
    "offload_policy": ("parameters", "gradients", "optimizer"),
    "enable_fsdp_offload": ("parameters", "gradients", "optimizer"),
}
"""What each key moves out. Parameters and their gradients go together."""


def positive(config: ForeignConfig, key: str) -> int:
    value = config[key]
    if value is None or value < 1:
        raise ValueError(f"needs `{key}` to be at least 1, and it is {format_value(value)}")
    return int(value)


# --- batches


def searches(config: ForeignConfig) -> bool:
    """Whether it is Search-R1 with its search on."""
    return config.table.row("do_search") is not None and bool(config["do_search"])


def samples_per_prompt(config: ForeignConfig) -> int:
    return positive(config, f"{ROLLOUT}.n_agent" if searches(config) else f"{ROLLOUT}.n")


def response_tokens(config: ForeignConfig) -> int:
    return positive(config, "data.max_prompt_length" if searches(config) else "data.max_response_length")


def trajectory_tokens(config: ForeignConfig) -> int:
    prompt = positive(config, "data.max_start_length" if searches(config) else "data.max_prompt_length")
    return prompt + response_tokens(config)


def num_devices(config: ForeignConfig) -> int:
    return positive(config, "trainer.nnodes") * positive(config, "trainer.n_gpus_per_node")


def updates_per_step(config: ForeignConfig) -> int:
    trajectories = samples_per_prompt(config) if searches(config) else 1
    size = positive(config, f"{ACTOR}.ppo_mini_batch_size")
    return math.ceil(positive(config, "data.train_batch_size") * trajectories / size)


def updates(config: ForeignConfig, given: ForeignValue) -> Outcome:
    prompts, size = positive(config, "data.train_batch_size"), positive(config, f"{ACTOR}.ppo_mini_batch_size")
    number = updates_per_step(config)
    note = f"{size} prompts per update, of {prompts}"
    if searches(config):
        note = f"{size} trajectories per update, of {prompts} prompts x {samples_per_prompt(config)}"
    return converted({"batch.updates_per_step": number}, f"{note}: {plural(number, 'update')} per step")


def as_the_actors(config: ForeignConfig, given: ForeignValue, key: str) -> Outcome:
    """Corral splits a batch in the same way for critic and actor."""
    if given.value in (None, config[key]):
        return built_in("as the actor's")
    return unsupported(f"critic and actor have the same in Corral, and `{key}` is {format_value(config[key])}")


# --- micro-batches


def micro_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The size of micro-batches, for which one of three keys decides."""
    decides = None
    if config[f"{ACTOR}.use_dynamic_bsz"]:
        decides = MICRO_TOKENS
    elif MICRO_PER_DEVICE in config:
        decides = MICRO_PER_DEVICE
    elif config[MICRO_OF_ALL] is not None:
        decides = MICRO_OF_ALL
    if given.key == MICRO_OF_ALL and given.key in config and decides == MICRO_PER_DEVICE:
        raise ValueError(f"and `{MICRO_PER_DEVICE}` are both set; keep one of them")
    if given.key != (decides or MICRO_PER_DEVICE):
        return no_effect(f"`{decides}` decides" if decides else "null")
    tokens, note = micro_batch_tokens(config, decides)
    if decides == MICRO_TOKENS and tokens == config[decides]:
        return mapped("batch.max_tokens_per_micro_batch", tokens)
    return converted({"batch.max_tokens_per_micro_batch": tokens}, f"{note}: {tokens} tokens")


def micro_batch_tokens(config: ForeignConfig, decides: str | None) -> tuple[int, str]:
    longest = trajectory_tokens(config)
    if decides is None:
        return max(longest, BatchSizes().max_tokens_per_micro_batch), f"not given; a trajectory has up to {longest}"
    if decides == MICRO_TOKENS:
        context = axis_size(config, "context")
        tokens = positive(config, MICRO_TOKENS) * context
        note = f"{tokens // context} tokens per device" + f", {context} of which share a sequence" * (context > 1)
        if tokens < longest:
            note += f", which a trajectory of {longest} would not fit into"
    else:
        sequences, note = positive(config, decides), ""
        if decides == MICRO_OF_ALL:
            groups = max(1, num_devices(config) // (axis_size(config, "context") * axis_size(config, "tensor")))
            note = f"{sequences} on {groups} devices: "
            sequences = max(1, sequences // groups)
        tokens = sequences * longest
        note += f"{plural(sequences, 'sequence')} of up to {longest} tokens"
    return max(tokens, longest), note


# --- how the model is spread over the devices


def axis_size(config: ForeignConfig, name: str) -> int:
    return max(1, *(config[key] or 1 for key in AXES[name]))


def parallel(config: ForeignConfig, given: ForeignValue, name: str) -> Outcome:
    size, devices = axis_size(config, name), num_devices(config)
    if given.value is None or given.value <= 1:
        return built_in("not split this way")
    if given.value != size:
        return no_effect(f"another key says {size}")
    sizes = {other: axis_size(config, other) for other in AXES}
    if name == "expert" and devices % math.prod(sizes.values()):
        return built_in("experts are sharded with the other parameters")
    if devices % (sizes["context"] * sizes["tensor"]):
        raise ValueError(f"does not divide the {devices} devices (nodes x GPUs per node)")
    return mapped(f"train.parallel.{name}", size)


def num_shards(config: ForeignConfig) -> int:
    """Number of devices that one copy of the model is spread over."""
    size = max(config[key] or 0 for key in FSDP_SIZES)
    return size if 0 < size < num_devices(config) else num_devices(config)


def copies(config: ForeignConfig, given: ForeignValue) -> Outcome:
    devices, size, context = num_devices(config), num_shards(config), axis_size(config, "context")
    if size == devices:
        return built_in("sharded over all devices")
    if devices % size:
        raise ValueError(f"does not divide the {devices} devices (nodes x GPUs per node)")
    if size % context:
        return unsupported(f"{size} devices of a copy are not a multiple of the {context} that share a sequence")
    ours = {"train.parallel.replicate": devices // size, "train.parallel.shard": size // context}
    return converted(ours, f"{devices // size} copies, each sharded over {size} devices")


def has_critic(config: ForeignConfig) -> bool:
    return bool(config["algorithm.adv_estimator"] == "gae")


def offload(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    moved = offloaded_parts(config)
    if not set(OFFLOADED[given.key.rpartition(".")[2]]) & set(moved):
        return unsupported("every device holds a whole model, of which only the optimizer can be moved out")
    return converted({"train.offload": moved}, f"{', '.join(moved)} in the host's memory between their uses")


def offloaded_parts(config: ForeignConfig) -> list[str]:
    """What actor and critic move out together: Corral has one list for all models."""
    places = [f"{ACTOR}.{engine}" for engine in ENGINES]
    places += [f"critic.{engine}" for engine in ("fsdp", *ENGINES[1:])] * has_critic(config)
    wanted = {
        part for place in places for key, parts in OFFLOADED.items() if config[f"{place}.{key}"] for part in parts
    }
    possible = ("parameters", "gradients", "optimizer") if num_shards(config) > 1 else ("optimizer",)
    return [part for part in possible if part in wanted]
