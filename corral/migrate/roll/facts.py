"""What a ROLL configuration says in several keys together: which pipeline it is, batch, lengths, KL, devices.

A configuration that does not name its model (`pretrain`) cannot run by itself. It is what a guide changes in ROLL's
FrozenLake demo, and what it leaves out is the demo's: the defaults of the rows. A whole one has ROLL's own (`OWN`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from corral.migrate.outcome import ABSENT, Kind, Outcome, as_path, built_in, integer, mapped, number, text
from corral.migrate.table import ForeignConfig, KeyRow, turned
from corral.recipe.errors import RecipeError
from corral.recipe.placement import format_devices, parse_devices

OWN: Mapping[str, Any] = {
    "adv_estimator": "gae",
    "whiten_advantages": False,
    "advantage_clip": None,
    "reward_clip": None,
    "reward_normalization.grouping": "batch",
    "init_kl_coef": 0.2,
    "save_steps": 50,
    "max_tokens_per_step": 128,
    "actor_train.training_args.learning_rate": 5e-5,
    "actor_train.training_args.warmup_steps": 0,
    "actor_train.training_args.per_device_train_batch_size": 8,
    "actor_train.training_args.gradient_accumulation_steps": 1,
    "actor_infer.generating_args.temperature": 1.0,
    "actor_infer.generating_args.top_p": 1.0,
    "actor_infer.generating_args.top_k": 0,
}
"""ROLL's own defaults, where those of its demo are others."""
NULLS = ("advantage_clip", "reward_clip")
"""Keys of which a null says something: never."""

STRATEGY = "actor_train.strategy_args.strategy_config"
TRAINING = "actor_train.training_args"
DEVICES = re.compile(r"\s*(?:list\s*\(\s*range\s*\([^()]*\)\s*\)|range\s*\([^()]*\)|\[[\d\s,]+\]|[\d\s,]+)\s*")
MOST_DEVICES = 100_000
DEFAULT_PROMPT = 1024
ROLES = {"actor": "actor_train", "rollout": "actor_infer", "reference": "reference", "critic": "critic"}
"""Ours, and what ROLL calls them."""


# --- values


def taken(config: ForeignConfig, key: str) -> Any:
    """As written, else the default of ROLL or of its demo."""
    if key in config or (key in NULLS and key in config.given):
        return config[key]
    if key in OWN and is_whole(config):
        return OWN[key]
    row = config.table.row(key)
    assert row is not None, key
    return None if row.default is ABSENT else row.default


def usual(key: str, ours: str, kind: Kind, default: Any) -> KeyRow:
    """The same thing, with a default that depends on whether the configuration is whole."""
    return turned(key, kind, lambda config, _: mapped(ours, taken(config, key)), default)


def empty(key: str) -> KeyRow:
    """A section that a file may leave empty, or take from one that is not there."""

    def nothing(value: Any) -> None:
        if value:
            raise ValueError("a section of keys and values")

    return KeyRow(key, nothing, lambda *_: built_in("empty, or in a file that is not there"))


def instead(ours: Mapping[Any, Any], why: str) -> Outcome:
    """Unsupported, with what takes its place."""
    return Outcome("unsupported", {as_path(key): value for key, value in ours.items()}, why)


def count(value: Any) -> int:
    if integer(value) < 1:
        raise ValueError("a whole number above 0")
    return int(value)


def natural(value: Any) -> int:
    if integer(value) < 0:
        raise ValueError("a whole number, at least 0")
    return int(value)


def share(value: Any) -> float:
    if not 0 <= number(value) <= 1:
        raise ValueError("a number from 0 to 1")
    return number(value)


def amount(value: Any) -> float:
    """Of something that there is none of, or some."""
    if not 0 <= number(value) < math.inf:
        raise ValueError("a number, at least 0")
    return number(value)


def counts(value: Any) -> list[int]:
    return [count(item) for item in (value if isinstance(value, list) else [value])]


def choice(*names: str) -> Kind:
    def kind(value: Any) -> str:
        if text(value) not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text(value)

    return kind


def devices(value: Any) -> Any:
    """As it was written, if it can be read."""
    device_list(value)
    return value


def device_list(value: Any) -> tuple[int, ...]:
    """`list(range(0,8))`, `[0, 1]`, sums of these: ROLL evaluates the text, Corral recognises it."""
    expected = "a range or a list of device numbers, such as list(range(0,8)) or [0, 1]"
    found: list[int] = []
    for part in value.split("+") if isinstance(value, str) else [value]:
        readable = DEVICES.fullmatch(part) if isinstance(part, str) else is_list_of_numbers(part)
        if not readable:
            raise ValueError(expected)
        try:
            found += parse_devices(part, MOST_DEVICES)
        except RecipeError as error:
            raise ValueError(f"{expected}: {error}") from None
    if len(set(found)) < len(found):
        raise ValueError(f"{expected}, each of them once")
    return tuple(sorted(found))


def is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


# --- which pipeline


def is_rlvr(config: ForeignConfig) -> bool:
    """Prompts in files, and rewards for the answers. Else environments are played."""
    if any(config.below(name) for name in ("train_env_manager", "val_env_manager", "custom_envs")):
        return False
    asked = ("num_return_sequences_in_group", "actor_train.data_args.file_name")
    return any(key in config for key in asked) or bool(config.below("rewards"))


def is_whole(config: ForeignConfig) -> bool:
    return "pretrain" in config or is_rlvr(config)


def is_old(config: ForeignConfig) -> bool:
    """Written for the ROLL of the guides, before `env_groups` became `num_env_groups`."""
    return any(one.key.endswith((".env_groups", ".n_groups")) for one in config.given.values())


# --- batch and lengths


def group_size(config: ForeignConfig) -> int:
    return int(taken(config, "num_return_sequences_in_group" if is_rlvr(config) else "train_env_manager.group_size"))


def num_prompts(config: ForeignConfig) -> int:
    size = int(taken(config, "rollout_batch_size"))
    return size if is_rlvr(config) else max(size // group_size(config), 1)


def num_trajectories(config: ForeignConfig) -> int:
    return num_prompts(config) * group_size(config)


def update_size(config: ForeignConfig) -> int:
    return int(
        taken(config, f"{TRAINING}.per_device_train_batch_size")
        * taken(config, f"{TRAINING}.gradient_accumulation_steps")
        * data_parallel(config)
    )


def num_updates(config: ForeignConfig) -> int:
    return math.ceil(num_trajectories(config) / update_size(config))


def lengths(config: ForeignConfig) -> tuple[int, int]:
    """Of a prompt and of all that follows it, in tokens."""
    prompt = int(taken(config, "prompt_length"))
    sequence = int(taken(config, "sequence_length"))
    if "response_length" in config and "sequence_length" not in config:
        sequence = prompt + int(config["response_length"])
    if is_rlvr(config) or ("prompt_length" in config and prompt < sequence):
        return prompt, max(sequence - prompt, 1)
    prompt = min(prompt, sequence // 2)  # of a game's opening ROLL has no limit of its own
    return prompt, sequence - prompt


def num_steps(config: ForeignConfig) -> int | None:
    """None: as long as the data are passed."""
    steps = int(taken(config, "max_steps"))
    return steps if steps > 0 else None


def validates(config: ForeignConfig) -> bool:
    asked = not is_rlvr(config) or "validation.data_args.file_name" in config
    return bool(taken(config, "eval_steps") > 0 and asked)


# --- what is in the algorithm


def uses_critic(config: ForeignConfig) -> bool:
    return str(taken(config, "adv_estimator")) in ("gae", "skip_obs_gae")


def kl_where(config: ForeignConfig) -> Literal["loss", "reward"] | None:
    if taken(config, "use_kl_loss") and taken(config, "kl_loss_coef") > 0:
        return "loss"
    return "reward" if kl_in_reward(config) else None


def kl_in_reward(config: ForeignConfig) -> bool:
    """Only where it is asked for; older versions took it off the rewards of games in any case."""
    if "add_token_level_kl" in config:
        asked = bool(config["add_token_level_kl"])
    else:
        asked = is_old(config) and not is_rlvr(config)
    return bool(asked and taken(config, "init_kl_coef") > 0)


# --- devices


def parallel(config: ForeignConfig) -> tuple[int, int, int]:
    """Tensor, pipeline, context."""
    sizes = [taken(config, f"{STRATEGY}.{name}_model_parallel_size") for name in ("tensor", "pipeline")]
    context = max(
        taken(config, f"{STRATEGY}.context_parallel_size"), taken(config, "actor_train.model_args.ulysses_size")
    )
    return sizes[0], sizes[1], context


def data_parallel(config: ForeignConfig) -> int:
    return max(len(role_devices(config, "actor")) // math.prod(parallel(config)), 1)


def experts(config: ForeignConfig) -> int:
    """1 where they cannot be dealt beside what is there of tensor and context parallelism."""
    tensor, _, context = parallel(config)
    wanted = int(taken(config, f"{STRATEGY}.expert_model_parallel_size"))
    return wanted if len(role_devices(config, "actor")) % (tensor * context * wanted) == 0 else 1


def shard(config: ForeignConfig) -> int | None:
    """Over how many devices a copy of the model is sharded, where it is said and not all."""
    tensor, _, context = parallel(config)
    left = len(role_devices(config, "actor")) // (tensor * context * experts(config))
    size = taken(config, f"{STRATEGY}.fsdp_size")
    return int(size) if 0 < size < left and left % size == 0 else None


def role_devices(config: ForeignConfig, role: str) -> tuple[int, ...]:
    """As ROLL has them; where it says nothing, those of the training."""
    key = f"{ROLES[role]}.device_mapping"
    return device_list(config[key] if key in config else taken(config, "actor_train.device_mapping"))


@dataclass(frozen=True)
class Layout:
    nodes: int
    devices_per_node: int
    roles: Mapping[str, tuple[int, ...]]
    """Those of ours that there are."""

    @property
    def is_one(self) -> bool:
        return len({device for devices in self.roles.values() for device in devices}) == 1

    @property
    def is_everywhere(self) -> bool:
        return set(self.roles.values()) == {tuple(range(self.nodes * self.devices_per_node))}

    @property
    def colocated(self) -> bool:
        return self.roles["actor"] == self.roles["rollout"]

    def placement(self) -> dict[str, str]:
        by_devices: dict[tuple[int, ...], list[str]] = {}
        for role, devices in self.roles.items():
            by_devices.setdefault(devices, []).append(role)
        return {",".join(roles): format_devices(devices) for devices, roles in by_devices.items()}


def layout(config: ForeignConfig) -> Layout:
    actor, rollout = role_devices(config, "actor"), role_devices(config, "rollout")
    if actor != rollout and set(actor) & set(rollout):
        rollout = tuple(device for device in rollout if device not in actor) or actor
    roles = {"actor": actor, "rollout": rollout}
    for role, there in (("reference", kl_where(config) is not None), ("critic", uses_critic(config))):
        if there:
            wanted = role_devices(config, role)
            roles[role] = wanted if has_place(config, wanted, roles) else actor
    highest = max(device for devices in roles.values() for device in devices) + 1
    per_node = int(taken(config, "num_gpus_per_node"))
    nodes = math.ceil(highest / per_node)
    return Layout(nodes, per_node if nodes > 1 else highest, roles)


def has_place(config: ForeignConfig, wanted: tuple[int, ...], roles: Mapping[str, tuple[int, ...]]) -> bool:
    """Roles share all of their devices or none, and every model is spread as the actor's is."""
    apart = all(wanted == other or not set(wanted) & set(other) for other in roles.values())
    if shard(config) is not None:
        return apart and len(wanted) == len(roles["actor"])
    tensor, _, context = parallel(config)
    return apart and len(wanted) % (tensor * context * experts(config)) == 0


def on_cluster(config: ForeignConfig) -> bool:
    return not layout(config).is_one


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
