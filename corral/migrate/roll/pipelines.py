"""What several keys of a ROLL configuration mean together: pipeline, batch, lengths, KL; and kinds of values."""

from collections.abc import Mapping
from typing import Any, Literal

from corral.migrate.outcome import ABSENT, ForeignValue, Outcome, as_path, integer, mapped, number, text
from corral.migrate.table import ForeignConfig

OWN_DEFAULTS: Mapping[str, Any] = {
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
"""ROLL's own defaults where those of its demo, which the table has, are others."""
MEANINGFUL_NULLS = ("advantage_clip", "reward_clip")
"""Keys that can be null, which is never, as well as be left out."""


def value_of(config: ForeignConfig, key: str) -> Any:
    """The value as written, else the default of ROLL or of its demo."""
    if key in config or (key in MEANINGFUL_NULLS and key in config.given):
        return config[key]
    if key in OWN_DEFAULTS and is_whole(config):
        return OWN_DEFAULTS[key]
    row = config.table.row(key)
    assert row is not None, key
    return None if row.default is ABSENT else row.default


def value_as(config: ForeignConfig, given: ForeignValue, ours: str) -> Outcome:
    """The same under another name, with a default that depends on whether the configuration is whole."""
    return mapped(ours, value_of(config, config.table.canonical(given.key)))


def replaced(ours: Mapping[Any, Any], why: str) -> Outcome:
    """Unsupported, with what takes its place."""
    return Outcome("unsupported", {as_path(key): value for key, value in ours.items()}, why)


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


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


def nonnegative_integer(value: Any) -> int:
    return at_least(value, 0)


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


# --- which pipeline


def is_rlvr(config: ForeignConfig) -> bool:
    """Whether prompts are in files, and answers have rewards. Else the model acts in environments."""
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
    return bool(value_of(config, "eval_steps") > 0 and has_data)


# --- batch and lengths


def group_size(config: ForeignConfig) -> int:
    key = "num_return_sequences_in_group" if is_rlvr(config) else "train_env_manager.group_size"
    return int(value_of(config, key))


def num_prompts(config: ForeignConfig) -> int:
    size = int(value_of(config, "rollout_batch_size"))
    return size if is_rlvr(config) else max(size // group_size(config), 1)


def lengths(config: ForeignConfig) -> tuple[int, int]:
    """Number of tokens of a prompt, and of all that follows it."""
    prompt, sequence = int(value_of(config, "prompt_length")), int(value_of(config, "sequence_length"))
    if "response_length" in config and "sequence_length" not in config:
        sequence = prompt + int(config["response_length"])
    if is_rlvr(config) or ("prompt_length" in config and prompt < sequence):
        return prompt, max(sequence - prompt, 1)
    prompt = min(prompt, sequence // 2)  # ROLL has no limit of its own for the first prompt of an episode
    return prompt, sequence - prompt


def num_steps(config: ForeignConfig) -> int | None:
    """None: until the epochs over the data are done."""
    steps = int(value_of(config, "max_steps"))
    return steps if steps > 0 else None


def runs_by_epochs(config: ForeignConfig) -> bool:
    return is_rlvr(config) and num_steps(config) is None


# --- critic and KL


def uses_critic(config: ForeignConfig) -> bool:
    return str(value_of(config, "adv_estimator")) in ("gae", "skip_obs_gae")


def kl_where(config: ForeignConfig) -> Literal["loss", "reward"] | None:
    if value_of(config, "use_kl_loss") and value_of(config, "kl_loss_coef") > 0:
        return "loss"
    return "reward" if kl_in_reward(config) else None


def kl_in_reward(config: ForeignConfig) -> bool:
    """Only with `add_token_level_kl`; older versions subtracted it from the rewards of environments in any case."""
    if "add_token_level_kl" in config:
        is_on = bool(config["add_token_level_kl"])
    else:
        is_on = is_old(config) and is_agentic(config)
    return bool(is_on and value_of(config, "init_kl_coef") > 0)
