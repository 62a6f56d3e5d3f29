"""verl's sizes: how many trajectories and tokens go through how many devices. Several keys decide each of them.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, micro-batches count sequences. Search-R1 has keys of
its own for some of it, and its mini-batches count trajectories.
"""

import math

from corral.migrate.outcome import (
    ForeignValue,
    Kind,
    Outcome,
    boolean,
    built_in,
    converted,
    format_value,
    integer,
    mapped,
    no_effect,
    unsupported,
)
from corral.migrate.table import Convert, ForeignConfig, KeyRow, needless, provided, same, turned
from corral.recipe.schema import Batch

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
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
    "tensor": (
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        f"{ACTOR}.torchtitan.tensor_parallel_size",
    ),
    "expert": (
        f"{ACTOR}.megatron.expert_model_parallel_size",
        f"{ACTOR}.veomni.expert_parallel_size",
        f"{ACTOR}.torchtitan.expert_parallel_size",
    ),
}
"""By our name, the keys of all of verl's training engines."""
FSDP_SIZES = (f"{ACTOR}.fsdp_config.fsdp_size", f"{ACTOR}.veomni.fsdp_size")
OFFLOADED = {
    "param_offload": ("parameters", "gradients"),
    "grad_offload": ("parameters", "gradients"),
    "optimizer_offload": ("optimiser",),
    "offload_policy": ("parameters", "gradients", "optimiser"),
    "enable_fsdp_offload": ("parameters", "gradients", "optimiser"),
}
"""Parameters and their gradients go together."""


def explicit(given: ForeignValue, ours: str, value: object, usual: object) -> Outcome:
    """A value that was written, or that is not what Corral takes as well."""
    if not given.where and value == usual:
        return built_in("as in Corral")
    return mapped(ours, value)


def optional(key: str, ours: str, kind: Kind) -> KeyRow:
    """Null leaves it to Corral."""

    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        return built_in("null: as Corral likes") if given.value is None else mapped(ours, given.value)

    return turned(key, kind, convert)


def positive(config: ForeignConfig, key: str) -> int:
    value = config[key]
    if value is None or value < 1:
        raise ValueError(f"needs `{key}` to be at least 1, and it is {format_value(value)}")
    return int(value)


# --- sizes


def searches(config: ForeignConfig) -> bool:
    """Search-R1 with its search on."""
    return config.table.row("do_search") is not None and bool(config["do_search"])


def samples(config: ForeignConfig) -> int:
    return positive(config, f"{ROLLOUT}.n_agent" if searches(config) else f"{ROLLOUT}.n")


def prompt_tokens(config: ForeignConfig) -> int:
    return positive(config, "data.max_start_length" if searches(config) else "data.max_prompt_length")


def response_tokens(config: ForeignConfig) -> int:
    return positive(config, "data.max_prompt_length" if searches(config) else "data.max_response_length")


def trajectory_tokens(config: ForeignConfig) -> int:
    return prompt_tokens(config) + response_tokens(config)


def num_devices(config: ForeignConfig) -> int:
    return positive(config, "trainer.nnodes") * positive(config, "trainer.n_gpus_per_node")


def updates_per_step(config: ForeignConfig) -> int:
    trajectories = samples(config) if searches(config) else 1
    size = positive(config, f"{ACTOR}.ppo_mini_batch_size")
    return math.ceil(positive(config, "data.train_batch_size") * trajectories / size)


def updates(config: ForeignConfig, given: ForeignValue) -> Outcome:
    prompts, size = positive(config, "data.train_batch_size"), positive(config, f"{ACTOR}.ppo_mini_batch_size")
    number = updates_per_step(config)
    words = f"{number} update{'s' * (number > 1)} per step"
    if searches(config):
        words = f"{size} trajectories per update, of {prompts} prompts x {samples(config)}: {words}"
    else:
        words = f"{size} prompts per update, of {prompts}: {words}"
    return converted({"batch.updates_per_step": number}, words)


def same_as_actor(key: str, of_actor: str) -> KeyRow:
    """Corral splits a batch in the same way for critic and actor."""

    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if given.value in (None, config[of_actor]):
            return built_in("as the actor's")
        return unsupported(
            f"critic and actor have the same in Corral, and `{of_actor}` is {format_value(config[of_actor])}"
        )

    return turned(key, integer, convert)


# --- micro-batches


def decides_micro(config: ForeignConfig) -> str | None:
    if config[f"{ACTOR}.use_dynamic_bsz"]:
        return MICRO_TOKENS
    if MICRO_PER_DEVICE in config:
        return MICRO_PER_DEVICE
    return MICRO_OF_ALL if config[MICRO_OF_ALL] is not None else None


def micro(key: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        decides = decides_micro(config)
        if key == MICRO_OF_ALL and key in config and decides == MICRO_PER_DEVICE:
            raise ValueError(f"and `{MICRO_PER_DEVICE}` are both set; keep one of them")
        if key == decides or (decides is None and key == MICRO_PER_DEVICE):
            tokens, words = micro_tokens(config, decides)
            if decides == MICRO_TOKENS and tokens == config[decides]:
                return mapped("batch.max_tokens_per_micro_batch", tokens)
            return converted({"batch.max_tokens_per_micro_batch": tokens}, f"{words}: {tokens} tokens")
        return no_effect(f"`{decides}` decides" if decides else "null")

    return convert


def micro_tokens(config: ForeignConfig, decides: str | None) -> tuple[int, str]:
    longest = trajectory_tokens(config)
    if decides is None:
        return max(longest, Batch().max_tokens_per_micro_batch), f"not given; a trajectory has up to {longest}"
    if decides == MICRO_TOKENS:
        context = axis(config, "context")
        tokens = positive(config, MICRO_TOKENS) * context
        words = f"{tokens // context} tokens per device" + f", {context} of which share a sequence" * (context > 1)
        if tokens < longest:
            words += f", which a trajectory of {longest} would not fit into"
    else:
        sequences, words = positive(config, decides), ""
        if decides == MICRO_OF_ALL:
            groups = max(1, num_devices(config) // (axis(config, "context") * axis(config, "tensor")))
            words = f"{sequences} on {groups} devices: "
            sequences = max(1, sequences // groups)
        tokens = sequences * longest
        words += f"{sequences} sequence{'s' * (sequences > 1)} of up to {longest} tokens"
    return max(tokens, longest), words


# --- how the model is spread over the devices


def axis(config: ForeignConfig, name: str) -> int:
    return max(1, *(config[key] or 1 for key in AXES[name]))


def split(name: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        size, devices = axis(config, name), num_devices(config)
        if given.value is None or given.value <= 1:
            return built_in("not split this way")
        if given.value != size:
            return no_effect(f"another key says {size}")
        ways = {other: axis(config, other) for other in ("context", "tensor", "expert")}
        if name == "expert" and devices % math.prod(ways.values()):
            return built_in("experts are sharded with the other parameters")
        if devices % (ways["context"] * ways["tensor"]):
            raise ValueError(f"does not divide the {devices} devices (nodes x GPUs per node)")
        return mapped(f"train.parallel.{name}", size)

    return convert


def shards(config: ForeignConfig) -> int:
    """Devices that one copy of the model is spread over."""
    size = max(config[key] or 0 for key in FSDP_SIZES)
    return size if 0 < size < num_devices(config) else num_devices(config)


def copies(config: ForeignConfig, given: ForeignValue) -> Outcome:
    devices, size, context = num_devices(config), shards(config), axis(config, "context")
    if size == devices:
        return built_in("sharded over all devices")
    if devices % size:
        raise ValueError(f"does not divide the {devices} devices (nodes x GPUs per node)")
    if size % context:
        return unsupported(f"{size} devices of a copy are not a multiple of the {context} that share a sequence")
    return converted(
        {"train.parallel.replicate": devices // size, "train.parallel.shard": size // context},
        f"{devices // size} copies, each sharded over {size} devices",
    )


def has_critic(config: ForeignConfig) -> bool:
    return bool(config["algorithm.adv_estimator"] == "gae")


def offloaded(config: ForeignConfig) -> list[str]:
    """Of actor and critic together: Corral has one list for all models."""
    places = [f"{ACTOR}.{engine}" for engine in ENGINES]
    places += [f"critic.{engine}" for engine in ("fsdp", *ENGINES[1:])] * has_critic(config)
    on = [parts for place in places for key, parts in OFFLOADED.items() if config[f"{place}.{key}"]]
    asked = {part for parts in on for part in parts}
    can = ("parameters", "gradients", "optimiser") if shards(config) > 1 else ("optimiser",)
    return [part for part in can if part in asked]


def offload(parts: tuple[str, ...]) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if not given.value:
            return built_in("off, as in Corral")
        moved = offloaded(config)
        if not set(parts) & set(moved):
            return unsupported("every device holds a whole model, of which only the optimiser can be moved out")
        return converted({"train.offload": moved}, f"{', '.join(moved)} in the host's memory between their uses")

    return convert


# --- rows

NO_CRITIC = "there is no critic: `algorithm.adv_estimator` is not gae"
ONE_CAP = "one cap for all passes: `batch.max_tokens_per_micro_batch`"

SIZES = (
    same("trainer.nnodes", "cluster.nodes", integer, 1),
    same("trainer.n_gpus_per_node", "cluster.devices_per_node", integer, 8),
    same("data.train_batch_size", "batch.prompts_per_step", integer, 1024),
    same(f"{ROLLOUT}.n", "batch.samples_per_prompt", integer, 1),
    turned(f"{ACTOR}.ppo_mini_batch_size", integer, updates, 256),
    same(f"{ACTOR}.ppo_epochs", "batch.passes", integer, 1),
    turned(f"{ACTOR}.use_dynamic_bsz", boolean, lambda *_: built_in("micro-batches are filled by tokens"), False),
    turned(MICRO_TOKENS, integer, micro(MICRO_TOKENS), 16384),
    turned(MICRO_PER_DEVICE, integer, micro(MICRO_PER_DEVICE), None),
    turned(MICRO_OF_ALL, integer, micro(MICRO_OF_ALL)),
    provided(same_as_actor("critic.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"), has_critic, NO_CRITIC),
    provided(same_as_actor("critic.ppo_epochs", f"{ACTOR}.ppo_epochs"), has_critic, NO_CRITIC),
    *(
        provided(needless(f"critic.{key}", ONE_CAP), has_critic, NO_CRITIC)
        for key in (
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "use_dynamic_bsz",
            "ppo_max_token_len_per_gpu",
            "forward_micro_batch_size",
            "forward_micro_batch_size_per_gpu",
            "forward_max_token_len_per_gpu",
        )
    ),
    *(turned(key, integer, split(name)) for name, keys in AXES.items() for key in keys),
    *(turned(key, integer, copies) for key in FSDP_SIZES),
    *(
        turned(f"{ACTOR}.{engine}.{key}", boolean, offload(parts))
        for engine in ENGINES
        for key, parts in OFFLOADED.items()
    ),
    *(
        provided(turned(f"critic.{engine}.{key}", boolean, offload(parts)), has_critic, NO_CRITIC)
        for engine in ("fsdp", *ENGINES[1:])
        for key, parts in OFFLOADED.items()
    ),
)
