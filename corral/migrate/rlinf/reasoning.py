"""RLinf's runner, data, rewards, batches and algorithm: conditions on several keys, and conversions of single ones."""

from typing import Any

from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, mapped, unsupported
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import one_or_all
from corral.recipe.keys import KeyPath
from corral.recipe.rules import TRACKERS_WITH_PROJECTS

TRACKERS = ("tensorboard", "wandb", "swanlab")


# --- conditions, and what several keys mean together


def advantage_of(config: ForeignConfig) -> str:
    name: str = config.constants["advantages"].get(config.value("algorithm.adv_type"), "grpo")
    if name == "reinforce_plus_plus" and config["algorithm.use_reinpp_baseline"]:
        return "reinforce_plus_plus_baseline"
    return name


def is_reinpp(config: ForeignConfig) -> bool:
    return advantage_of(config).startswith("reinforce_plus_plus")


def has_critic(config: ForeignConfig) -> bool:
    return advantage_of(config) == "ppo"


def loss_of(config: ForeignConfig) -> str:
    return str(config.constants["losses"].get(config.value("algorithm.loss_type"), "ppo"))


def kl_in_loss(config: ForeignConfig) -> bool:
    return bool(config.value("algorithm.kl_beta") > 0)


def kl_in_reward(config: ForeignConfig) -> bool:
    beta = config["algorithm.reinpp_kl_beta"]
    return bool(beta and beta > 0 and is_reinpp(config))


def has_kl(config: ForeignConfig) -> bool:
    return kl_in_loss(config) or kl_in_reward(config)


def is_fsdp(config: ForeignConfig, role: str = "actor") -> bool:
    """Where no backend is written: whether the trainer has settings of FSDP."""
    key = f"{role}.training_backend"
    if key not in config and config.below(f"{role}.fsdp_config"):
        return True
    return bool(config[key] == "fsdp")


def has_projects(config: ForeignConfig) -> bool:
    return not TRACKERS_WITH_PROJECTS.isdisjoint(config["runner.logger.logger_backends"] or [])


# --- run


def trackers(config: ForeignConfig, given: ForeignValue) -> Outcome:
    named = given.value or []
    ours: dict[KeyPath, Any] = {("logging", "trackers"): ["console", *(name for name in named if name in TRACKERS)]}
    if strange := [name for name in named if name not in TRACKERS]:
        return Outcome("unsupported", ours, f"there is no tracker {' or '.join(strange)}")
    return Outcome("mapped", ours)


# --- batch and sampling


def response_tokens(config: ForeignConfig) -> int:
    """Number of tokens of everything behind the prompt."""
    left: int = max(config.value("runner.seq_length") - config.value("data.max_prompt_length"), 1)
    most = config["algorithm.sampling_params.max_new_tokens"]
    return left if most is None else min(left, most)


def trajectory_tokens(config: ForeignConfig) -> int:
    return int(config.value("data.max_prompt_length")) + response_tokens(config)


# --- data and rewards


def train_paths(config: ForeignConfig, given: ForeignValue) -> Outcome:
    paths = given.value or config.default("data.train_data_paths")
    note = "" if given.where and given.value else "put AReaL-boba-106k there, or name your own file"
    return mapped("data.train.path", one_or_all(paths), note)


def image_column(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if len(given.value or []) > 1:
        return unsupported("images of a prompt are in one column, `data.images_key`")
    return mapped("data.images_key", given.value[0]) if given.value else built_in("none")


# --- the agent that searches


def retriever(config: ForeignConfig, given: ForeignValue) -> Outcome:
    address = given.value if "://" in given.value else f"http://{given.value}"
    return converted({"environment.options.retriever": address}, f"{given.value}, as an address")
