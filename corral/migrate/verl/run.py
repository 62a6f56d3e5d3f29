"""verl's sizes (how many trajectories and tokens go through how many devices), rows and rewards, models, optimizers,
and what is around a training: names, folders, trackers.

`data.train_batch_size` and `ppo_mini_batch_size` count prompts, micro-batches count sequences. Search-R1 has keys of
its own for some of it, and its mini-batches count trajectories. Learning rates change once a step in verl, and once an
update in Corral.
"""

import math
import re
from pathlib import PurePosixPath
from typing import Any

from corral.migrate.engines import engine_of, split_engine
from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    as_path,
    built_in,
    converted,
    image_model,
    mapped,
    no_effect,
    unsupported,
)
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import format_value, number, one_or_all, plural
from corral.recipe.rules import TRACKERS_WITH_PROJECTS
from corral.recipe.schema import BatchSizes

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MICRO_PER_DEVICE = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
MICRO_OF_ALL = f"{ACTOR}.ppo_micro_batch_size"
MICRO_TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
ENGINES = ("fsdp_config", "megatron", "veomni", "torchtitan", "automodel", "deepspeed", "mindspeed")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
FSDP_SIZES = (f"{ACTOR}.fsdp_config.fsdp_size", f"{ACTOR}.veomni.fsdp_size")
REWARD_PLACES = ("reward.custom_reward_function", "custom_reward_function")
VALIDATION = f"{ROLLOUT}.val_kwargs"
TURNS = f"{ROLLOUT}.multi_turn"
TRACKERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
SCHEDULE_KEYS = ("warmup_style", "lr_scheduler_type", "lr_decay_style", "decay_type")
"""Spellings of verl's engines, of which the first that was written counts."""


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
    prompts, size = positive(config, "data.train_batch_size"), positive(config, f"{ACTOR}.ppo_mini_batch_size")
    return math.ceil(prompts * (samples_per_prompt(config) if searches(config) else 1) / size)


def updates_of_schedule(config: ForeignConfig) -> int:
    """Number of updates between two changes of the learning rate. Search-R1's FSDP workers do not read `ppo_epochs`."""
    is_read = config.table.row("do_search") is None or config[f"{ACTOR}.strategy"] == "megatron"
    return updates_per_step(config) * (positive(config, f"{ACTOR}.ppo_epochs") if is_read else 1)


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
    note += f": {tokens} tokens"
    takes_means = config.table.title == "Search-R1"
    if takes_means:  # dp_actor.py: masked_mean of a micro-batch, divided by their number
        note += "; Search-R1's loss is the mean of their means, here that over all tokens of an update"
    return converted({"batch.max_tokens_per_micro_batch": tokens}, note, differs=takes_means)


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
            groups = max(1, num_devices(config) // num_of_sequence(config))
            note = f"{sequences} on {groups} devices: "
            sequences = max(1, sequences // groups)
        tokens = sequences * longest
        note += f"{plural(sequences, 'sequence')} of up to {longest} tokens"
    return max(tokens, longest), note


# --- how the model is spread over the devices


def axis_size(config: ForeignConfig, name: str) -> int:
    if image_kind(config) == "trained":
        return 1
    return max(1, *(config[key] or 1 for key in config.constants["axes"][name]))


def num_of_sequence(config: ForeignConfig, *others: str) -> int:
    """Number of devices that compute one sequence together, or on which other axes are split, too."""
    return math.prod(axis_size(config, name) for name in ("context", "pipeline", "tensor", *others))


def num_shards(config: ForeignConfig) -> int:
    """Number of devices that one copy of the model is spread over."""
    if image_kind(config) == "trained":
        return 1
    size = max(config[key] or 0 for key in FSDP_SIZES)
    return size if 0 < size < num_devices(config) else num_devices(config)


def has_critic(config: ForeignConfig) -> bool:
    return bool(config["algorithm.adv_estimator"] == "gae")


def offload(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    moved = offloaded_parts(config)
    if not set(config.constants["offloaded"][given.key.rpartition(".")[2]]) & set(moved):
        return unsupported("every device holds a whole model, of which only the optimizer can be moved out")
    return converted({"train.offload": moved}, f"{', '.join(moved)} in the host's memory between their uses")


def offloaded_parts(config: ForeignConfig) -> list[str]:
    """What actor and critic move out together: Corral has one list for all models."""
    places = [f"{ACTOR}.{engine}" for engine in ENGINES]
    places += [f"critic.{engine}" for engine in ("fsdp", *ENGINES[1:])] * has_critic(config)
    offloaded = config.constants["offloaded"].items()
    wanted = {part for place in places for key, parts in offloaded if config[f"{place}.{key}"] for part in parts}
    possible = ("parameters", "gradients", "optimizer") if num_shards(config) > 1 else ("optimizer",)
    return [part for part in possible if part in wanted]


# --- the engine


def engine_devices(config: ForeignConfig, given: ForeignValue) -> Outcome:
    nodes, per_node = (max(config[f"trainer.{key}"] or 1, 1) for key in ("nnodes", "n_gpus_per_node"))
    return split_engine(given, engine_of(config), range(nodes * per_node), per_node)


def engine_dtype(config: ForeignConfig, given: ForeignValue) -> Outcome:
    keys = [f"{ACTOR}.{place}.dtype" for place in ("fsdp_config", "megatron", "torchtitan")]
    trained = next((config[key] for key in keys if key in config), "bfloat16")
    if given.value in (None, "auto") or DTYPES.get(given.value, given.value) == DTYPES.get(trained, trained):
        return built_in("engine and trainers compute in the same type")
    return unsupported(f"engine and trainers compute in the same type, here {trained}")


# --- files


def paths(config: ForeignConfig, given: ForeignValue) -> str | list[str]:
    for path in given.value:
        if path.startswith(("hdfs:", "s3:", "gs:")):
            raise ValueError(f"should be on a disk, not {path}; copy it to where all nodes see it")
    return one_or_all(given.value)


# --- sampling, rewards, tools


def validation_temperature(config: ForeignConfig) -> float:
    """Only the engines of `mode=sync`, which verl has no more, read `do_sample`."""
    if config[f"{ROLLOUT}.mode"] == "sync" and not config[f"{VALIDATION}.do_sample"]:
        return 0.0
    return config[f"{VALIDATION}.temperature"] or 0.0


def reward_function(config: ForeignConfig) -> str | None:
    """`file.py:function`; None where verl has its own, by the row's `data_source`."""
    for place in REWARD_PLACES:
        if f"{place}.path" in config:
            path = config[f"{place}.path"].removeprefix("file://")
            if path.startswith("pkg://"):
                path = path.removeprefix("pkg://").replace("/", ".")
            if ":" in path:
                raise ValueError("should be a Python file on disk, or `pkg://module`")
            return f"{path}:{config[f'{place}.name'] or 'compute_score'}"
    return None


def reward_argument(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if reward_function(config) is None:
        return no_effect("`custom_reward_function.path` is null")
    names = given.key.partition("reward_kwargs.")[2].split(".")
    return mapped(("environment", "reward", "options", *names), given.value)


def max_turns(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A limit of the tools' turns lets the model say one thing more."""
    extra = {f"{TURNS}.max_assistant_turns": 0, f"{TURNS}.max_user_turns": 1}
    limits = [config[key] + more for key, more in extra.items() if key in config]
    if limits:
        return converted({"rollout.max_turns": min(limits)}, f"{min(limits)} replies")
    most = max(1, response_tokens(config) // 3)
    return converted({"rollout.max_turns": most}, f"no limit there; {most} replies are a third of a response's tokens")


# --- models


def image_kind(config: ForeignConfig) -> str | None:
    path = next(key for key in ("actor_rollout_ref.model.path", "model.path") if config.table.row(key))
    return image_model(config[path])


def column(config: ForeignConfig, given: ForeignValue, ours: str) -> Outcome:
    """A column of rows, with the keys below it that an early verl has beside: `extra_info` and `[question]`."""
    below = config[given.key.replace("_key", "_dict_keys")] or []
    return mapped(ours, ".".join([given.value, *below]))


# --- names and folders


def trackers_of(config: ForeignConfig) -> list[str]:
    return [name for name in config["trainer.logger"] or [] if name in TRACKERS]


def trackers(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = {as_path("logging.trackers"): trackers_of(config)}
    unknown = [name for name in given.value or [] if name not in (*TRACKERS, "file")]
    if unknown:
        return Outcome("unsupported", ours, f"{', '.join(unknown)}: Corral knows {', '.join(TRACKERS)}")
    return Outcome("mapped", ours, "metrics.jsonl is always written" * ("file" in (given.value or [])))


def runs_folder(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("`runs`")
    if given.value.startswith(("hdfs:", "s3:")):
        raise ValueError("should be on a disk that all nodes see")
    folder, name = PurePosixPath(given.value), str(config["trainer.experiment_name"] or "")
    if folder == PurePosixPath("checkpoints") / str(config["trainer.project_name"] or "") / name:
        return built_in("runs/NAME")
    if folder.name != name:
        return mapped("logging.runs", given.value, "a run has a folder of its own in it, by its name")
    return converted({"logging.runs": str(folder.parent)}, f"a run's folder is {folder.parent}/{name} here, too")


def has_projects(config: ForeignConfig) -> bool:
    return not TRACKERS_WITH_PROJECTS.isdisjoint(trackers_of(config))


# --- optimizers: `optim` is the section of verl, `ours` that of the recipe


def pair(value: Any) -> list[float]:
    if isinstance(value, str) and re.fullmatch(r"[\[(][\d.e, -]+[\])]", value):
        value = [float(item) for item in value[1:-1].split(",")]
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("two numbers")
    return [number(item) for item in value]


def schedule_of(config: ForeignConfig, optim: str) -> str:
    return next((config[f"{optim}.{key}"] for key in SCHEDULE_KEYS if f"{optim}.{key}" in config), "constant")


def knows_schedule(config: ForeignConfig, optim: str) -> bool:
    return schedule_of(config, optim) in config.constants["schedules"]


def gradient_norm(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    """Two keys for one thing, of different engines: the one that is not left at 1 counts."""
    written = [config[key] for key in (f"{role}.grad_clip", f"{role}.optim.clip_grad") if key in config]
    return mapped(f"{ours}.max_gradient_norm", next((value for value in written if value != 1), 1.0))


def optimizer_argument(config: ForeignConfig, given: ForeignValue, ours: str) -> Outcome:
    name = given.key.rpartition(".")[2]
    if name in ("eps", "adam_eps"):
        return mapped(f"{ours}.epsilon", number(given.value))
    if "offload" in name or name.startswith(("overlap", "use_precision_aware", "fused", "foreach")):
        return built_in("memory and speed; `train.offload` moves the optimizer out")
    return unsupported("AdamW has no other arguments in Corral") if given.value else built_in("off")
