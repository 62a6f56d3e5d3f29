"""What several keys of a ROLL configuration mean together (pipeline, batch, lengths, KL, devices), and kinds of values.

Conversions of devices are here, too: how roles are placed, and how a model is spread over devices.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from corral.migrate.engines import engine_of, split_engine
from corral.migrate.outcome import ForeignValue, Outcome, as_path, built_in, converted, image_model, unsupported
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import integer, number, plural, text
from corral.recipe.errors import RecipeError
from corral.recipe.placement import format_devices, parse_devices

STRATEGY = "actor_train.strategy_args.strategy_config"
DEVICES = re.compile(r"\s*(?:list\s*\(\s*range\s*\([^()]*\)\s*\)|range\s*\([^()]*\)|\[[\d\s,]+\]|[\d\s,]+)\s*")
LIST = re.compile(r"list\s*\((\s*\[[\d\s,]+\]\s*)\)")
EXPECTED = "a range or a list of device numbers, such as list(range(0,8)) or [0, 1]"
MOST_DEVICES = 100_000
ROLES = {"actor": "actor_train", "rollout": "actor_infer", "reference": "reference", "critic": "critic"}
"""Roles of a recipe, and what ROLL calls them."""
ONE_DEVICE = "one device in all: the run is one process"


def replaced(ours: Mapping[Any, Any], why: str) -> Outcome:
    """Unsupported, with what takes its place."""
    return Outcome("unsupported", {as_path(key): value for key, value in ours.items()}, why)


# --- kinds of values


def positive_integer(value: Any) -> int:
    if integer(value) < 1:
        raise ValueError("a whole number above 0")
    return int(value)


def positive_integers(value: Any) -> list[int]:
    return [positive_integer(item) for item in (value if isinstance(value, list) else [value])]


def at_least(value: Any, least: int) -> int:
    if integer(value) < least:
        raise ValueError(f"a whole number, at least {least}")
    return int(value)


def nonnegative(value: Any) -> float:
    if number(value) < 0:
        raise ValueError("a number, at least 0")
    return number(value)


def fraction(value: Any) -> float:
    if not 0 <= number(value) <= 1:
        raise ValueError("a number from 0 to 1")
    return number(value)


def choice(value: Any, *names: str) -> str:
    if text(value) not in names:
        raise ValueError(f"one of {', '.join(names)}")
    return text(value)


def empty_section(value: Any) -> None:
    """A section that a file may leave empty, or take from one that is not there."""
    if value:
        raise ValueError("a section of keys and values")


def devices(value: Any) -> Any:
    """Devices as they were written, if they can be read."""
    device_list(value)
    return value


def device_list(value: Any) -> tuple[int, ...]:
    """`list(range(0,8))`, `[0, 1]`, sums of these: ROLL evaluates the text, Corral recognizes it."""
    found: list[int] = []
    for part in LIST.sub(r"\1", value).split("+") if isinstance(value, str) else [value]:
        is_list = isinstance(part, list) and all(type(item) is int for item in part)
        if not (DEVICES.fullmatch(part) if isinstance(part, str) else is_list):
            raise ValueError(EXPECTED)
        try:
            found += parse_devices(part, MOST_DEVICES)
        except RecipeError as error:
            raise ValueError(f"{EXPECTED}: {error}") from None
    if len(set(found)) < len(found):
        raise ValueError(f"{EXPECTED}, each of them once")
    return tuple(sorted(found))


# --- which pipeline


def trains_on_rows(config: ForeignConfig) -> bool:
    """Whether it is the SFT or the DPO pipeline, whose tables name the roles that they have."""
    return "roles" in config.constants


def distills(config: ForeignConfig) -> bool:
    """Whether a teacher says of every token how likely it is. `student_train` is `actor_train` under another name."""
    names = [] if trains_on_rows(config) else [one.key for one in config.given.values() if one.value]
    return any(name in ("is_pure_opd", "use_opd") or name.startswith("student_train.") for name in names)


def is_rlvr(config: ForeignConfig) -> bool:
    """Whether prompts are in files, and answers have rewards. Else the model acts in environments."""
    if trains_on_rows(config):
        return True
    if any(config.below(name) for name in ("train_env_manager", "val_env_manager", "custom_envs")):
        return False
    of_rlvr = ("num_return_sequences_in_group", "actor_train.data_args.file_name")
    return any(key in config for key in of_rlvr) or bool(config.below("rewards"))


def is_agentic(config: ForeignConfig) -> bool:
    return not is_rlvr(config)


def is_whole(config: ForeignConfig) -> bool:
    return "pretrain" in config or is_rlvr(config)


def is_old(config: ForeignConfig) -> bool:
    """Whether it was written for the ROLL of the guides, before `env_groups` became `num_env_groups`."""
    return any(one.key.endswith((".env_groups", ".n_groups")) for one in config.given.values())


def validates(config: ForeignConfig) -> bool:
    has_data = is_agentic(config) or "validation.data_args.file_name" in config
    return bool(config.value("eval_steps") > 0 and has_data)


# --- batch and lengths


def group_size(config: ForeignConfig) -> int:
    key = "num_return_sequences_in_group" if is_rlvr(config) else "train_env_manager.group_size"
    return int(config.value(key))


def num_prompts(config: ForeignConfig) -> int:
    size = int(config.value("rollout_batch_size"))
    return size if is_rlvr(config) else max(size // group_size(config), 1)


def lengths(config: ForeignConfig) -> tuple[int, int]:
    """Number of tokens of a prompt, and of all that follows it."""
    prompt, sequence = int(config.value("prompt_length")), int(config.value("sequence_length"))
    if "response_length" in config and "sequence_length" not in config:
        sequence = prompt + int(config["response_length"])
    if is_rlvr(config) or ("prompt_length" in config and prompt < sequence):
        return prompt, max(sequence - prompt, 1)
    prompt = min(prompt, sequence // 2)  # ROLL has no limit of its own for the first prompt of an episode
    return prompt, sequence - prompt


def num_steps(config: ForeignConfig) -> int | None:
    """Number of steps of the run. None: it ends with its last epoch."""
    steps = int(config.value("max_steps"))
    return steps if steps > 0 else None


# --- critic and KL


def uses_critic(config: ForeignConfig) -> bool:
    has_rewards = not distills(config) or bool(config["use_opd"])
    return has_rewards and str(config.value("adv_estimator")) in ("gae", "skip_obs_gae")


def kl_where(config: ForeignConfig) -> Literal["loss", "reward"] | None:
    if distills(config):
        return None
    if config.value("use_kl_loss") and config.value("kl_loss_coef") > 0:
        return "loss"
    return "reward" if kl_in_reward(config) else None


def kl_in_reward(config: ForeignConfig) -> bool:
    """Whether KL is subtracted from rewards: with `add_token_level_kl`, and in older versions in environments."""
    if "add_token_level_kl" in config:
        is_on = bool(config["add_token_level_kl"])
    else:
        is_on = is_old(config) and is_agentic(config)
    return bool(is_on and config.value("init_kl_coef") > 0)


# --- parallelism


def parallel(config: ForeignConfig) -> tuple[int, int, int]:
    """Sizes of tensor, pipeline and context parallelism."""
    tensor, pipeline = (config.value(f"{STRATEGY}.{name}_model_parallel_size") for name in ("tensor", "pipeline"))
    contexts = (f"{STRATEGY}.context_parallel_size", "actor_train.model_args.ulysses_size")
    return tensor, pipeline, max(config.value(key) for key in contexts)


def image_kind(config: ForeignConfig) -> str | None:
    return image_model(config.value("pretrain"))


def num_actor_devices(config: ForeignConfig) -> int:
    return len(role_devices(config, "actor"))


def data_parallel(config: ForeignConfig) -> int:
    return max(num_actor_devices(config) // math.prod(parallel(config)), 1)


def experts(config: ForeignConfig) -> int:
    """Size of expert parallelism; 1 where experts cannot be split beside tensor and context parallelism."""
    wanted = int(config.value(f"{STRATEGY}.expert_model_parallel_size"))
    return wanted if num_actor_devices(config) % (num_of_copy(config) * wanted) == 0 else 1


def num_of_copy(config: ForeignConfig) -> int:
    """Number of devices that compute one micro-batch together in Corral, without experts."""
    return 1 if image_kind(config) == "trained" else math.prod(parallel(config))


def num_for_sharding(config: ForeignConfig) -> int:
    """Number of the actor's devices that tensor, pipeline, context and expert parallelism leave."""
    return num_actor_devices(config) // (num_of_copy(config) * experts(config))


def shard(config: ForeignConfig) -> int | None:
    """Over how many devices a copy of the model is sharded, where that is written and not all."""
    left, size = num_for_sharding(config), config.value(f"{STRATEGY}.fsdp_size")
    return int(size) if 0 < size < left and left % size == 0 else None


# --- devices of roles


def role_devices(config: ForeignConfig, role: str) -> tuple[int, ...]:
    """Devices of a role as ROLL has them; those of the training where none are written."""
    key = f"{ROLES[role]}.device_mapping"
    return device_list(config[key] if key in config else config.value("actor_train.device_mapping"))


@dataclass(frozen=True)
class RoleLayout:
    nodes: int
    devices_per_node: int
    roles: Mapping[str, tuple[int, ...]]
    """Devices of the roles that a recipe has."""

    @property
    def is_one(self) -> bool:
        return len({device for devices in self.roles.values() for device in devices}) == 1

    @property
    def is_everywhere(self) -> bool:
        return set(self.roles.values()) == {tuple(range(self.nodes * self.devices_per_node))}

    def placement(self) -> dict[str, dict[str, str]]:
        by_devices: dict[tuple[int, ...], list[str]] = {}
        for role, devices in self.roles.items():
            by_devices.setdefault(devices, []).append(role)
        named = {",".join(roles): format_devices(devices) for devices, roles in by_devices.items()}
        return {"cluster.placement": named}


def layout(config: ForeignConfig) -> RoleLayout:
    actor, rollout = role_devices(config, "actor"), role_devices(config, "rollout")
    if actor != rollout and set(actor) & set(rollout):
        rollout = tuple(device for device in rollout if device not in actor) or actor
    roles = {"actor": actor} if trains_on_rows(config) else {"actor": actor, "rollout": rollout}
    for role in ("reference", "critic"):
        if has_role(config, role):
            wanted = role_devices(config, role)
            roles[role] = wanted if fits(config, wanted, roles) else actor
    highest = max(device for devices in roles.values() for device in devices) + 1
    per_node = int(config.value("num_gpus_per_node"))
    nodes = math.ceil(highest / per_node)
    return RoleLayout(nodes, per_node if nodes > 1 else highest, roles)


def has_role(config: ForeignConfig, role: str) -> bool:
    if trains_on_rows(config):
        return role in config.constants["roles"]
    return uses_critic(config) if role == "critic" else distills(config) or kl_where(config) is not None


def fits(config: ForeignConfig, wanted: tuple[int, ...], roles: Mapping[str, tuple[int, ...]]) -> bool:
    """Roles share all of their devices or none, and every model is spread as the actor's is."""
    apart = all(wanted == other or not set(wanted) & set(other) for other in roles.values())
    if shard(config) is not None:
        return apart and len(wanted) == len(roles["actor"])
    return apart and len(wanted) % (num_of_copy(config) * experts(config)) == 0


def on_cluster(config: ForeignConfig) -> bool:
    return not layout(config).is_one


# --- conversions of devices


def rollout_devices(config: ForeignConfig, given: ForeignValue) -> Outcome:
    actor, rollout = set(role_devices(config, "actor")), set(role_devices(config, "rollout"))
    if actor == rollout or not actor & rollout:
        return placed(config, given, "rollout")
    found = layout(config)
    if rollout < actor:
        note = f"devices {format_devices(sorted(rollout))}: in Corral all of the training's devices generate"
        return built_in(note) if found.is_everywhere else converted(found.placement(), note)
    if not actor < rollout:
        raise ValueError("should have all of actor_train's devices, some of them alone, or none of them")
    why = (
        f"devices that generate and train by turns while others only generate: in Corral rollout has "
        f"{format_devices(found.roles['rollout'])} and the training {format_devices(sorted(actor))}"
    )
    return replaced(found.placement(), why)


def placed(config: ForeignConfig, given: ForeignValue, role: str) -> Outcome:
    found, wanted = layout(config), role_devices(config, role)
    if found.is_one:
        return built_in(ONE_DEVICE)
    note = f"devices {format_devices(wanted)}"
    if found.is_everywhere:
        return built_in(f"{note}: all there are, which is Corral's default")
    if found.roles[role] != wanted:
        note += f": with the training on {format_devices(found.roles[role])}, since roles share all devices or none"
    return converted(found.placement(), note)


def staleness(config: ForeignConfig, given: ForeignValue) -> Outcome:
    steps, roles = math.ceil(given.value), layout(config).roles
    if roles["actor"] == roles["rollout"]:
        return unsupported("only an engine with devices of its own can generate ahead of the training")
    note = f"up to {plural(steps, 'step')} ahead; tokens of older weights are weighted (`algorithm.correction`)"
    return converted({"schedule.max_staleness": steps}, note)


def engine_devices(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = layout(config)
    return split_engine(given, engine_of(config), found.roles["rollout"], found.devices_per_node)


# --- conversions of how a model is spread


def offload(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Only a model of which each device holds a part can have it all in the host's memory."""
    is_whole = image_kind(config) == "trained" or config.value(f"{STRATEGY}.fsdp_size") == 1
    is_sharded = num_actor_devices(config) > 1 and not is_whole
    zero = f"{STRATEGY}.zero_optimization"
    all_of_it = bool(config[f"{STRATEGY}.offload_policy"])
    parameters = all_of_it or config[f"{zero}.offload_param.device"] in ("cpu", "nvme")
    optimizer = all_of_it or config[f"{zero}.offload_optimizer.device"] in ("cpu", "nvme")
    for key in ("is_offload_optimizer_states_in_train_step", f"{STRATEGY}.optimizer_cpu_offload"):
        optimizer = optimizer or bool(config[key])
    parts = ["parameters", "gradients"] * (is_sharded and parameters) + ["optimizer"] * optimizer
    if not parts:
        return built_in("on the device, as in Corral")
    return converted({"train.offload": parts}, f"{' and '.join(parts)} in the host's memory")
