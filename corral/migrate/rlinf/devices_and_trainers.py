"""RLinf's devices (`cluster.component_placement`), its model, and its trainers (Megatron, FSDP): precision, sharding,
offloading, log-probs, optimizers.

What is wrong with a value is reported by its own row; other rows that need it go on with something near.
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from corral.migrate.engines import engine_of, split_engine
from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    built_in,
    converted,
    image_model,
    mapped,
    no_effect,
    unsupported,
)
from corral.migrate.rlinf.reasoning import has_critic, has_kl, is_fsdp
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import format_value, text
from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath
from corral.recipe.placement import format_devices, parse_devices

GPUS_PER_NODE = 8
"""RLinf's default in its first version; today it counts them."""
MOST_NODES, MOST_DEVICES_PER_NODE = 10_000, 100
"""More are a slip of the pen, and would have to be counted through."""
OF_ROBOTS = re.compile(r"openpi|gr00t|dexbotic|dreamzero|fastwam|policy|cma|abot|resnet|cfg_model|value_model|vla")
"""Model types of RLinf's that move robots."""
CUTS = tuple(f"actor.model.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
TRAIN_ITERATIONS = 100_000
"""Over which Megatron's learning rate decays where `lr_decay_iters` is null: RLinf sets it so."""
TORCH_COSINE_END = 1e-6
"""Learning rate at which `lr_scheduler: torch_cosine` ends, whatever else is written."""


# --- which devices components have


@dataclass(frozen=True)
class ComponentDevices:
    """Devices of the whole configuration."""

    nodes: int
    per_node: int
    is_counted: bool
    """Whether the number of GPUs of a node follows from the placement."""
    by_component: dict[str, tuple[int, ...]]

    @property
    def everything(self) -> tuple[int, ...]:
        return tuple(range(self.nodes * self.per_node))

    def of(self, component: str) -> tuple[int, ...]:
        return self.by_component.get(component, self.everything)

    @property
    def is_one(self) -> bool:
        return self.nodes * self.per_node == 1

    @property
    def disaggregated(self) -> bool:
        return self.of("actor") != self.of("rollout")


def is_whole(config: ForeignConfig) -> bool:
    """Whether it names its model; else it is what a guide changes in RLinf's example."""
    return "rollout.model.model_path" in config or "actor.model.model_path" in config


def devices_of(config: ForeignConfig) -> ComponentDevices:
    nodes = min(max(config.value("cluster.num_nodes"), 1), MOST_NODES)
    spans: dict[str, tuple[int, ...]] = {}
    for line, written in config.below("cluster.component_placement").items():
        if "." not in line:
            with suppress(ValueError):
                spans |= dict.fromkeys(components(line), devices_in(written))
    needed = [span for name, span in spans.items() if config.constants["roles"].get(name)]
    counted = math.ceil(max((span[-1] + 1 for span in needed if span), default=0) / nodes)
    is_counted = bool(needed) and all(needed)
    per_node = config["cluster.num_gpus_per_node"]
    if per_node is None:
        per_node = counted if is_counted else max(counted, GPUS_PER_NODE)
    devices = ComponentDevices(nodes, min(max(per_node, 1), MOST_DEVICES_PER_NODE), is_counted, spans)
    return replace(devices, by_component={name: span or devices.everything for name, span in spans.items()})


def is_apart(config: ForeignConfig) -> bool:
    """Whether actor and rollout are on different devices, as in RLinf's example of a pipeline."""
    return devices_of(config).disaggregated


def num_actor_devices(config: ForeignConfig) -> int:
    return len(devices_of(config).of("actor"))


def components(line: str) -> list[str]:
    return [name.strip() for name in line.split(",") if name.strip()]


def devices_in(written: Any) -> tuple[int, ...]:
    """Numbers of `0-3,8`, or of `0-3:0-1` (devices:processes). Empty: all."""
    parts = [part.partition(":")[0].strip() for part in rank_parts(written)]
    if parts == ["all"]:
        return ()
    try:
        return parse_devices(",".join(parts), MOST_NODES * MOST_DEVICES_PER_NODE)
    except RecipeError as error:
        raise ValueError(f"cannot be read: {'; '.join(error.problems)}") from None


def rank_parts(written: Any) -> list[str]:
    if isinstance(written, list):
        return [str(item) for item in written]
    return [part for part in format_value(written).split(",") if part.strip()]


def has_one_process_each(written: Any) -> bool:
    pairs = [part.partition(":") for part in rank_parts(written)]
    return all(not colon or len(devices_in(ranks)) == len(devices_in(processes)) for ranks, colon, processes in pairs)


# --- conversions of devices


def placement(config: ForeignConfig, given: ForeignValue) -> Outcome:
    names, devices = components(given.key.rpartition(".")[2]), devices_of(config)
    if strange := [name for name in names if name not in config.constants["roles"]]:
        return unsupported(f"there is no component {' or '.join(strange)} in Corral")
    own, everything = devices_in(given.value) or devices.everything, devices.everything
    if own[-1] >= len(everything):
        there = f"cluster.num_nodes {devices.nodes} x {devices.per_node} GPUs have 0-{len(everything) - 1}"
        raise ValueError(f"names device {own[-1]}, and {there}")
    if devices.is_one:
        return built_in("one device: everything runs on it, in one process")
    roles = roles_of(config, names, devices)
    for other, span in devices.by_component.items():
        if roles and roles_of(config, [other], devices) and set(own) & set(span) and set(own) != set(span):
            raise ValueError(
                f"shares some of its devices with {other}; two roles share all of theirs or none in Corral"
            )
    if not roles and ("inference" in names or "actor_inference" in names):
        engine = "Corral's engine gives the log-probs of the tokens that it samples"
        why = engine if engine_of(config) == "native" else "the actor computes log-probs by itself"
        idle = f"nothing is left to compute on {format_devices(own)}: they are idle; give them to rollout or actor"
        return built_in(f"{why}, so that {idle}")
    if not roles:
        return built_in("it needs no device of its own")
    path: KeyPath = ("cluster", "placement", ",".join(roles))
    ours: dict[KeyPath, Any] = {path: "all" if own == everything else format_devices(own)}
    if not has_one_process_each(given.value):
        return Outcome("unsupported", ours, "each device has one process; write the devices alone")
    if "rollout" in roles and devices.disaggregated:
        ours["schedule", "pipelined"] = True
        return converted(ours, f"{format_value(given.value)}, apart from actor: {overlap(config)}")
    if extra := [role for role in roles if role not in map(config.constants["roles"].get, names)]:
        return converted(ours, f"{format_value(given.value)}, and {' and '.join(extra)} with the actor, as in RLinf")
    return Outcome("mapped", ours)


def roles_of(config: ForeignConfig, names: list[str], devices: ComponentDevices) -> list[str]:
    """The roles of a line. In RLinf, reference and critic belong to the actor where they have no line."""
    known = config.constants["roles"]
    placed = {known[name] for name in devices.by_component if name in known}
    wanted = {"actor": True, "rollout": True, "reference": has_kl(config), "critic": has_critic(config)}
    roles = [role for name in names if (role := known.get(name)) and wanted[role]]
    if "actor" in roles:
        roles += [role for role in ("reference", "critic") if wanted[role] and role not in placed]
    return list(dict.fromkeys(roles))


def overlap(config: ForeignConfig) -> str:
    """What the trainer does while the rollout goes on."""
    updates = config.value("algorithm.n_minibatches")
    if updates <= 1:
        return "updates start while the rest is still generated"
    return f"log-probs are computed meanwhile, and updates start when the step is complete (n_minibatches {updates})"


def engine_devices(config: ForeignConfig, given: ForeignValue) -> Outcome:
    devices = devices_of(config)
    return split_engine(given, engine_of(config), devices.of("rollout"), devices.per_node)


# --- model and precision


def model_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("model.path", without_slash(given.value or config.default("rollout.model.model_path")))


def without_slash(path: str) -> str:
    return path.rstrip("/") or path


def is_the_model(config: ForeignConfig, given: ForeignValue) -> bool:
    """Whether a path is the model's, or cannot be distinguished from it: a folder of the same name."""

    def folder(one: str) -> str:
        return without_slash(one).rpartition("/")[2]

    paths = [config[key] for key in ("rollout.model.model_path", "actor.model.model_path") if key in config]
    return given.value is None or not paths or folder(given.value) in map(folder, paths)


def image_kind(config: ForeignConfig) -> str | None:
    types = (config[f"{place}.model.model_type"] for place in ("actor", "rollout"))
    return next(filter(None, map(image_model, types)), None)


def model_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    kind, count = image_model(given.value), num_actor_devices(config)
    if kind == "other" or OF_ROBOTS.search(given.value or ""):
        return unsupported("of models of images Corral trains Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and none of robots")
    if kind is None or count == 1:
        return built_in("from the model's own configuration")
    mesh = {"train.parallel.shard": 1, "train.parallel.replicate": count}
    return converted(mesh, f"{given.value}: a model that reads images is whole on each device")


def dtype_of(config: ForeignConfig) -> str:
    """The type that is computed in."""
    written = config.value("actor.model.precision")
    if is_fsdp(config):
        autocast = "actor.fsdp_config.amp_autocast"
        by_autocast = config[f"{autocast}.precision"] if config[f"{autocast}.enabled"] else None
        written = config["actor.fsdp_config.mixed_precision.param_dtype"] or by_autocast or written
    return str(config.constants["precisions"].get(written, "auto"))


def precision(config: ForeignConfig, given: ForeignValue) -> Outcome:
    own, ours = config.constants["precisions"].get(given.value, "auto"), dtype_of(config)
    differs = f"but computed in {ours}; the optimizer has float32 copies"
    return converted(
        {"model.dtype": ours}, f"{format_value(given.value)}, {f'here {ours}' if own == ours else differs}"
    )


# --- trainers


def training_backend(value: Any) -> str:
    if text(value) not in ("megatron", "fsdp"):
        raise ValueError("megatron or fsdp")
    return text(value)


def tensor_parallel(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A piece of a configuration may have devices that the example's 2 does not divide."""
    devices = devices_of(config)
    counts = {name: len(own) for name, own in devices.by_component.items()} | {"actor": len(devices.of("actor"))}
    if not given.where and (
        is_fsdp(config) or any(count % given.value for name, count in counts.items() if name != "rollout")
    ):
        return built_in("1, as in Corral")
    return parallel(config, given, "train.parallel.tensor")


def parallel(config: ForeignConfig, given: ForeignValue, ours: str) -> Outcome:
    count, size = num_actor_devices(config), 1 if given.value is None else given.value
    if size < 1 or count % size:
        raise ValueError(f"should divide the {count} device{'s' * (count > 1)} of actor")
    return mapped(ours, size)


def experts_fit(config: ForeignConfig, given: ForeignValue) -> bool:
    """Whether experts can be split in addition to layers, matrices and tokens, as Corral does it; Megatron splits them
    over devices that share one of these."""
    others = math.prod(value for key in CUTS for _, value in config.ours(key))
    return bool(num_actor_devices(config) % (others * max(given.value or 1, 1)) == 0)


def num_copies(config: ForeignConfig) -> int | None:
    """Number of copies of the model, each sharded over a group of devices. None: one, over all of them."""
    count = num_actor_devices(config)
    size = config["actor.fsdp_config.hybrid_shard_size"] or config["actor.fsdp_config.fsdp_size"] or -1
    if size < 1 or size >= count:
        return None
    if count % size:
        raise ValueError(f"should make groups that divide the {count} devices of actor, and not of {size}")
    return int(count // size)


def offloading(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The parts of the model that are offloaded, which several keys choose together."""
    if not is_fsdp(config):
        of_model, optimizer = (
            any(config.value(f"actor.offload_{name}") for name in names)
            for names in (("weight", "grad"), ("optimizer",))
        )
        parts = ["parameters", "gradients"] * of_model + ["optimizer"] * optimizer
    elif given.key.endswith(("enable_offload", "cpu_offload")):
        everything = config["actor.enable_offload"] and not devices_of(config).disaggregated
        weights = everything or config["actor.fsdp_config.cpu_offload"]
        parts = ["parameters", "gradients"] * bool(weights) + ["optimizer"] * bool(everything)
    else:
        return no_effect("only Megatron's trainer reads it")
    is_whole = is_fsdp(config) and config["actor.fsdp_config.sharding_strategy"] == "no_shard"
    is_whole = is_whole or image_kind(config) == "trained"
    is_sharded = num_actor_devices(config) > 1 and not is_whole
    kept = [part for part in parts if part == "optimizer" or is_sharded]
    return mapped(
        "train.offload", kept, "" if kept == parts else "parameters and gradients stay: the model is not sharded"
    )


# --- log-probs that updates start from


def old_logprobs(config: ForeignConfig) -> str | None:
    """Where old log-probs come from. None: from Corral's own engine, as by default."""
    if config["algorithm.importance_sampling_fix"]:
        return "recompute"
    if not config.value("algorithm.recompute_logprobs"):
        return "engine"
    return None if devices_of(config).disaggregated and engine_of(config) == "native" else "recompute"


# --- optimizers of `actor` and `critic`: Megatron and FSDP have keys of their own for the learning rate


def decays(config: ForeignConfig, role: str) -> bool:
    if is_fsdp(config, role):
        return config.value(f"{role}.optim.lr_scheduler") in ("cosine", "torch_cosine")
    return config.value(f"{role}.lr_sched.lr_decay_style") in ("linear", "cosine")


def final_ratio(config: ForeignConfig, role: str) -> float:
    """Where the decay ends, as a fraction of the learning rate."""
    rate: float = config.value(f"{role}.optim.lr")
    if not is_fsdp(config, role):
        least = config[f"{role}.lr_sched.min_lr"] or 0.0
    elif config[f"{role}.optim.lr_scheduler"] == "torch_cosine":
        least = TORCH_COSINE_END
    elif config[f"{role}.optim.min_lr_rate"] is not None:
        ratio: float = config[f"{role}.optim.min_lr_rate"]
        return ratio
    else:
        least = config[f"{role}.optim.min_lr"] or 0.0
    if rate <= 0 or not 0 <= least <= rate:
        raise ValueError(f"would let the learning rate {rate:g} end at {least:g}, which should not be above it")
    return float(least / rate)


def decay(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    kind = given.value.removeprefix("torch_")
    length = "total_training_steps" if is_fsdp(config, role) else "lr_decay_iters"
    note = f"{kind}, over the whole run; in RLinf over {length}, which should be as long"
    ratio = final_ratio(config, role)
    return converted({f"{ours}.schedule": kind, f"{ours}.min_learning_rate_ratio": ratio}, note, differs=True)


def warmup_fraction(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    iterations = config[f"{role}.lr_sched.lr_decay_iters"] or TRAIN_ITERATIONS
    return warmup(ours, given.value or 0.0, iterations, "lr_decay_iters", 1)


def updates_per_change(config: ForeignConfig) -> int:
    """Number of updates between two changes of FSDP's learning rate, which are once a step."""
    updates: int = config.value("algorithm.n_minibatches")
    return 1 if config["actor.lr_sched_sync_with_optim"] else updates


def warmup_steps_ratio(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    steps = config[f"{role}.optim.lr_warmup_steps"]
    if steps is not None and steps >= 0:
        return no_effect("lr_warmup_steps counts")
    length = config[f"{role}.optim.total_training_steps"] or 0
    return warmup(ours, given.value or 0.0, length, "total_training_steps", updates_per_change(config))


def warmup(ours: str, fraction: float, length: int, key: str, each: int) -> Outcome:
    updates = math.floor(fraction * length + 1e-9) * each  # 0.29 x 100 is 29
    note = f"{fraction:g} of {key} {length}: {updates} update{'s' * (updates != 1)}"
    return converted({f"{ours}.warmup_steps": updates}, note)
