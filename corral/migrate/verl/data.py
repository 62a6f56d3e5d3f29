"""verl's rows, their rewards, and what the model talks to: questions, or tools."""

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    anything,
    boolean,
    built_in,
    converted,
    format_value,
    integer,
    mapped,
    no_effect,
    number,
    text,
    texts,
    unsupported,
)
from corral.migrate.table import Convert, ForeignConfig, KeyRow, lacking, needless, only, provided, same, turned
from corral.migrate.verl.batch import ROLLOUT, optional, response_tokens

GROUND_TRUTH = "reward_model.ground_truth"
"""The column that verl's reward functions compare with, whatever other columns there are."""
REWARD_PLACES = ("reward.custom_reward_function", "custom_reward_function")
VALIDATION = f"{ROLLOUT}.val_kwargs"
TURNS = f"{ROLLOUT}.multi_turn"
NOT_VALIDATED = "there are no `data.val_files`"
NO_TOOLS = "`multi_turn.enable` is off"
MANAGERS = ("naive", "dapo", "prime", "remote")
"""They differ in how calls are spread, which Corral does by itself, and in dapo's length penalty."""


# --- files


def paths(written: list[str]) -> str | list[str]:
    for path in written:
        if path.startswith(("hdfs:", "s3:", "gs:")):
            raise ValueError(f"should be on a disk, not {path}; copy it to where all nodes see it")
    return written[0] if len(written) == 1 else written


def train_files(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        raise ValueError("should name the rows to train on")
    return converted({"data.train.path": paths(given.value), "data.answer_key": GROUND_TRUTH}, "rows in verl's layout")


def validation_files(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("data.validation.path", paths(given.value)) if given.value else built_in("no validation")


def validates(config: ForeignConfig) -> bool:
    """verl's default is a file that nobody has."""
    return bool(config["data.val_files"])


def max_rows(ours: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if given.value is None or given.value < 0:
            return built_in("all rows")
        return converted({ours: given.value}, f"the first {given.value} rows, where {config.table.title} draws them")

    return convert


def truncation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if config["data.filter_overlong_prompts"]:
        return no_effect("prompts that are too long are filtered out")
    words = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    if given.value == "middle":
        return unsupported("prompts are cut at one end")
    if given.value not in words:
        raise ValueError("should be error, left or right")
    return mapped("data.overlong", words[given.value])


def filtering(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("data.overlong", "filter") if given.value else built_in("`data.truncation` decides")


def batch_to_generate(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, config["data.train_batch_size"]):
        return built_in("as many as are learnt from")
    if config["algorithm.filter_groups.enable"] or config["trainer.v1.trainer_mode"] not in ("sync", None):
        return built_in("as many prompts are played as are missing")
    return unsupported("prompts per step are `data.train_batch_size`, unless `filter_groups` replaces some")


def same_as(key: str, other: str) -> KeyRow:
    """A reference of verl's own to another key."""

    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if given.value in (None, config[other]):
            return built_in(f"as `{other}`")
        raise ValueError(f"differs from `{other}`, which is {format_value(config[other])}")

    return turned(key, anything, convert)


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
    return unsupported("validation draws from all tokens, or by top_p")


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


def manager(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (*MANAGERS, None):
        return built_in("rewards are computed in processes of their own")
    if given.value == "batch":
        return unsupported("functions score one response at a time, not a batch of them")
    return unsupported(f"Corral does what {', '.join(MANAGERS)} do")


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


def cut_side(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in ("left", None):
        return built_in("the beginning of a result is kept")
    return unsupported("the beginning of a long result is kept")


def of_tools(row: KeyRow) -> KeyRow:
    return provided(row, has_tools, NO_TOOLS)


# --- rows

ENDS = (
    same("data.max_prompt_length", "data.max_prompt_tokens", integer, 512),
    same("data.max_response_length", "rollout.max_response_tokens", integer, 512),
    same_as(f"{ROLLOUT}.prompt_length", "data.max_prompt_length"),
    same_as(f"{ROLLOUT}.response_length", "data.max_response_length"),
)

DATA = (
    turned("data.train_files", texts, train_files, ["~/data/rlhf/gsm8k/train.parquet"]),
    turned("data.val_files", texts, validation_files),
    turned("data.train_max_samples", integer, max_rows("data.train.max_rows")),
    provided(turned("data.val_max_samples", integer, max_rows("data.validation.max_rows")), validates, NOT_VALIDATED),
    same("data.prompt_key", "data.prompt_key", text),
    only("data.reward_fn_key", text, ("data_source",), "as in Corral", "the column `data_source` names a row's source"),
    *ENDS,
    turned("data.truncation", text, truncation),
    turned("data.filter_overlong_prompts", boolean, filtering, False),
    same("data.shuffle", "data.shuffle", boolean),
    optional("data.seed", "seed", integer),
    turned("data.gen_batch_size", integer, batch_to_generate),
    same_as("data.tool_config_path", f"{TURNS}.tool_config_path"),
    same_as("data.function_tool_path", f"{TURNS}.function_tool_path"),
)

SAMPLING = (
    same(f"{ROLLOUT}.temperature", "rollout.temperature", number),
    same(f"{ROLLOUT}.top_p", "rollout.top_p", number),
    turned(f"{ROLLOUT}.top_k", integer, top_k),
    *(
        provided(row, validates, NOT_VALIDATED)
        for row in (
            turned(f"{VALIDATION}.do_sample", boolean, validation_sampling),
            turned(f"{VALIDATION}.temperature", number, validation_sampling),
            turned(f"{VALIDATION}.top_p", number, validation_top_p),
            turned(f"{VALIDATION}.top_k", integer, validation_top_k),
            same(f"{VALIDATION}.n", "validation.samples_per_prompt", integer),
        )
    ),
)

REWARDS = (
    turned(f"{REWARD_PLACES[0]}.path", text, reward, None),
    turned(f"{REWARD_PLACES[1]}.path", text, reward),
    *(turned(f"{place}.name", text, reward) for place in REWARD_PLACES),
    *(turned(f"{place}.reward_kwargs.**", anything, reward_argument) for place in REWARD_PLACES),
    lacking("reward.compute_score_kwargs", "nothing is passed to verl's own functions; name one of Corral's"),
    lacking("reward.compute_score_kwargs.**", "nothing is passed to verl's own functions; name one of Corral's"),
    *(
        turned(key, text, manager)
        for key in ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
    ),
    *(optional(f"{root}.num_workers", "environment.reward.workers", integer) for root in ("reward", "reward_model")),
)

TOOLS = (
    turned(f"{TURNS}.enable", boolean, tools, False),
    turned(f"{ROLLOUT}.agent.default_agent_loop", text, agent_loop),
    *(
        of_tools(row)
        for row in (
            turned(f"{TURNS}.max_assistant_turns", integer, max_turns, None),
            turned(f"{TURNS}.max_user_turns", integer, max_turns),
            same(f"{TURNS}.max_parallel_calls", "environment.options.max_calls_per_turn", integer, 1),
            same(f"{TURNS}.max_tool_response_length", "environment.options.max_result_characters", integer, 256),
            turned(f"{TURNS}.tool_response_truncate_side", text, cut_side),
            only(f"{TURNS}.format", text, ("hermes", "chatml"), "as in Corral", "calls are in the style of hermes"),
            lacking(f"{TURNS}.tool_config_path", "write the tools as functions: `environment.options.tools`"),
            lacking(f"{TURNS}.function_tool_path", "name its functions: `environment.options.tools: [file.py:name]`"),
            lacking(f"{TURNS}.interaction_config_path", "Corral has no simulated user; write an environment"),
            lacking(f"{TURNS}.completion_callback", "a program of your own is `environment.name: agent` in Corral"),
            lacking(f"{TURNS}.num_repeat_rollouts", "samples are `rollout.n`"),
        )
    ),
    needless(f"{TURNS}.use_inference_chat_template", "what the model wrote is kept token by token"),
    needless(f"{TURNS}.tokenization_sanity_check_mode", "nothing is tokenised again"),
    needless(f"{TURNS}.enable_tokenization_sanity_check", "nothing is tokenised again"),
)
