"""verl's rows, their rewards, and what the model talks to: questions, or tools."""

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    built_in,
    converted,
    format_value,
    mapped,
    no_effect,
    one_or_all,
    unsupported,
)
from corral.migrate.table import ForeignConfig
from corral.migrate.verl.sizes import ROLLOUT, response_tokens

GROUND_TRUTH = "reward_model.ground_truth"
"""The column that verl's reward functions compare with, whatever other columns there are."""
REWARD_PLACES = ("reward.custom_reward_function", "custom_reward_function")
VALIDATION = f"{ROLLOUT}.val_kwargs"
TURNS = f"{ROLLOUT}.multi_turn"


# --- files


def paths(written: list[str]) -> str | list[str]:
    for path in written:
        if path.startswith(("hdfs:", "s3:", "gs:")):
            raise ValueError(f"should be on a disk, not {path}; copy it to where all nodes see it")
    return one_or_all(written)


def train_files(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        raise ValueError("should name the rows to train on")
    return converted({"data.train.path": paths(given.value), "data.answer_key": GROUND_TRUTH}, "rows in verl's layout")


def validation_files(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("data.validation.path", paths(given.value)) if given.value else built_in("no validation")


def validates(config: ForeignConfig) -> bool:
    """verl's default is a file that nobody has."""
    return bool(config["data.val_files"])


def max_rows(config: ForeignConfig, given: ForeignValue, ours: str) -> Outcome:
    if given.value is None or given.value < 0:
        return built_in("all rows")
    return converted({ours: given.value}, f"the first {given.value} rows, where {config.table.title} samples them")


def keeps_overlong_prompts(config: ForeignConfig) -> bool:
    return not config["data.filter_overlong_prompts"]


def batch_to_generate(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, config["data.train_batch_size"]):
        return built_in("as many as are trained on")
    if config["algorithm.filter_groups.enable"] or config["trainer.v1.trainer_mode"] not in ("sync", None):
        return built_in("as many prompts are rolled out as are missing")
    return unsupported("prompts per step are `data.train_batch_size`, unless `filter_groups` replaces some")


def same_as(config: ForeignConfig, given: ForeignValue, other: str) -> Outcome:
    """A key that refers to the other one in verl's own configuration."""
    if given.value in (None, config[other]):
        return built_in(f"as `{other}`")
    raise ValueError(f"differs from `{other}`, which is {format_value(config[other])}")


# --- sampling


def top_k(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 0:
        return built_in("all tokens, as in Corral")
    return mapped("rollout.top_k", given.value)


def validation_temperature(config: ForeignConfig) -> float:
    """Only the engines of `mode=sync`, which verl has no more, read `do_sample`."""
    if config[f"{ROLLOUT}.mode"] == "sync" and not config[f"{VALIDATION}.do_sample"]:
        return 0.0
    return config[f"{VALIDATION}.temperature"] or 0.0


def validation_sampling(config: ForeignConfig, given: ForeignValue) -> Outcome:
    temperature = validation_temperature(config)
    if given.value and not temperature:
        return no_effect("greedy, because `do_sample` is false" if given.key.endswith("temperature") else "greedy")
    if given.value is False and temperature:
        return no_effect("verl reads it with `mode=sync` only; `temperature` decides")
    return mapped("validation.temperature", temperature)


def validation_top_p(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not validation_temperature(config):
        return no_effect("validation is greedy")
    return mapped("validation.top_p", given.value)


def validation_top_k(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 0 or not validation_temperature(config):
        return built_in("all tokens, as in Corral")
    return unsupported("validation samples from all tokens, or by top_p")


# --- rewards


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


def reward(config: ForeignConfig, given: ForeignValue) -> Outcome:
    function = reward_function(config)
    if function is not None:
        return converted({"environment.reward.name": function}, function) if given.value else no_effect("null")
    if given.where:
        return no_effect("`custom_reward_function.path` is null")
    return converted({"environment.reward.name": "by_source"}, "verl's own functions, by a row's `data_source`")


def reward_argument(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if reward_function(config) is None:
        return no_effect("`custom_reward_function.path` is null")
    names = given.key.partition("reward_kwargs.")[2].split(".")
    return mapped(("environment", "reward", "options", *names), given.value)


# --- tools


def has_tools(config: ForeignConfig) -> bool:
    return bool(config[f"{TURNS}.enable"]) or config[f"{ROLLOUT}.agent.default_agent_loop"] == "tool_agent"


def tools(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not has_tools(config):
        return built_in("one turn, as in Corral")
    if given.value in (True, "tool_agent"):
        return mapped("environment.name", "tools")
    return no_effect("`multi_turn` has tools")


def agent_loop(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in ("single_turn_agent", "tool_agent", None):
        return tools(config, given)
    return unsupported("an agent loop of your own is an environment in Corral: `environment.name: file.py:Class`")


def max_turns(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A limit of the tools' turns lets the model say one thing more."""
    extra = {f"{TURNS}.max_assistant_turns": 0, f"{TURNS}.max_user_turns": 1}
    limits = [config[key] + more for key, more in extra.items() if key in config]
    if limits:
        return converted({"rollout.max_turns": min(limits)}, f"{min(limits)} replies")
    most = max(1, response_tokens(config) // 3)
    return converted({"rollout.max_turns": most}, f"no limit there; {most} replies are a third of a response's tokens")
