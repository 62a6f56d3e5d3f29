"""verl's rows, their rewards, and what the model talks to: questions, or tools."""

from corral.migrate.table import (
    Convert,
    Given,
    Outcome,
    Reading,
    Row,
    anything,
    built_in,
    converted,
    lacking,
    mapped,
    needless,
    no_effect,
    number,
    only,
    same,
    show,
    text,
    texts,
    truth,
    turned,
    unsupported,
    whole,
)
from corral.migrate.verl.batch import ROLLOUT, optional, provided, response_tokens

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


def train_files(reading: Reading, given: Given) -> Outcome:
    if not given.value:
        raise ValueError("should name the rows to train on")
    return converted({"data.train.path": paths(given.value), "data.answer_key": GROUND_TRUTH}, "rows in verl's layout")


def validation_files(reading: Reading, given: Given) -> Outcome:
    return mapped("data.validation.path", paths(given.value)) if given.value else built_in("no validation")


def validates(reading: Reading) -> bool:
    """verl's default is a file that nobody has."""
    return bool(reading["data.val_files"])


def max_rows(ours: str) -> Convert:
    def convert(reading: Reading, given: Given) -> Outcome:
        if given.value is None or given.value < 0:
            return built_in("all rows")
        return converted({ours: given.value}, f"the first {given.value} rows, where {reading.table.title} draws them")

    return convert


def truncation(reading: Reading, given: Given) -> Outcome:
    if reading["data.filter_overlong_prompts"]:
        return no_effect("prompts that are too long are filtered out")
    words = {"error": "error", "left": "truncate_left", "right": "truncate_right"}
    if given.value == "middle":
        return unsupported("prompts are cut at one end")
    if given.value not in words:
        raise ValueError("should be error, left or right")
    return mapped("data.overlong", words[given.value])


def filtering(reading: Reading, given: Given) -> Outcome:
    return mapped("data.overlong", "filter") if given.value else built_in("`data.truncation` decides")


def batch_to_generate(reading: Reading, given: Given) -> Outcome:
    if given.value in (None, reading["data.train_batch_size"]):
        return built_in("as many as are learnt from")
    if reading["algorithm.filter_groups.enable"] or reading["trainer.v1.trainer_mode"] not in ("sync", None):
        return built_in("as many prompts are played as are missing")
    return unsupported("prompts per step are `data.train_batch_size`, unless `filter_groups` replaces some")


def same_as(key: str, other: str) -> Row:
    """A reference of verl's own to another key."""

    def convert(reading: Reading, given: Given) -> Outcome:
        if given.value in (None, reading[other]):
            return built_in(f"as `{other}`")
        raise ValueError(f"differs from `{other}`, which is {show(reading[other])}")

    return turned(key, anything, convert)


# --- sampling


def top_k(reading: Reading, given: Given) -> Outcome:
    if given.value is None or given.value <= 0:
        return built_in("all tokens, as in Corral")
    return mapped("rollout.top_k", given.value)


def validation_temperature(reading: Reading) -> float:
    """Only the engines of `mode=sync`, which verl has no more, read `do_sample`."""
    if reading[f"{ROLLOUT}.mode"] == "sync" and not reading[f"{VALIDATION}.do_sample"]:
        return 0.0
    return reading[f"{VALIDATION}.temperature"] or 0.0


def validation_sampling(reading: Reading, given: Given) -> Outcome:
    temperature = validation_temperature(reading)
    if given.value and not temperature:
        return no_effect("greedy, because `do_sample` is false" if given.key.endswith("temperature") else "greedy")
    if given.value is False and temperature:
        return no_effect("verl reads it with `mode=sync` only; `temperature` decides")
    return mapped("validation.temperature", temperature)


def validation_top_p(reading: Reading, given: Given) -> Outcome:
    if not validation_temperature(reading):
        return no_effect("validation is greedy")
    return mapped("validation.top_p", given.value)


def validation_top_k(reading: Reading, given: Given) -> Outcome:
    if given.value is None or given.value <= 0 or not validation_temperature(reading):
        return built_in("all tokens, as in Corral")
    return unsupported("validation draws from all tokens, or by top_p")


# --- rewards


def reward_function(reading: Reading) -> str | None:
    """`file.py:function`; None where verl has its own, by the row's `data_source`."""
    for place in REWARD_PLACES:
        if f"{place}.path" in reading:
            path = reading[f"{place}.path"].removeprefix("file://")
            if path.startswith("pkg://"):
                path = path.removeprefix("pkg://").replace("/", ".")
            if ":" in path:
                raise ValueError("should be a Python file on disk, or `pkg://module`")
            return f"{path}:{reading[f'{place}.name'] or 'compute_score'}"
    return None


def reward(reading: Reading, given: Given) -> Outcome:
    function = reward_function(reading)
    if function is not None:
        return converted({"environment.reward.name": function}, function) if given.value else no_effect("null")
    if given.where:
        return no_effect("`custom_reward_function.path` is null")
    return converted({"environment.reward.name": "by_source"}, "verl's own functions, by a row's `data_source`")


def reward_argument(reading: Reading, given: Given) -> Outcome:
    if reward_function(reading) is None:
        return no_effect("`custom_reward_function.path` is null")
    names = given.key.partition("reward_kwargs.")[2].split(".")
    return mapped(("environment", "reward", "options", *names), given.value)


def manager(reading: Reading, given: Given) -> Outcome:
    if given.value in (*MANAGERS, None):
        return built_in("rewards are computed in processes of their own")
    if given.value == "batch":
        return unsupported("functions score one response at a time, not a batch of them")
    return unsupported(f"Corral does what {', '.join(MANAGERS)} do")


# --- tools


def has_tools(reading: Reading) -> bool:
    return bool(reading[f"{TURNS}.enable"]) or reading[f"{ROLLOUT}.agent.default_agent_loop"] == "tool_agent"


def tools(reading: Reading, given: Given) -> Outcome:
    if not has_tools(reading):
        return built_in("one turn, as in Corral")
    if given.value in (True, "tool_agent"):
        return mapped("environment.name", "tools")
    return no_effect("`multi_turn` has tools")


def agent_loop(reading: Reading, given: Given) -> Outcome:
    if given.value in ("single_turn_agent", "tool_agent", None):
        return tools(reading, given)
    return unsupported("an agent loop of your own is an environment in Corral: `environment.name: file.py:Class`")


def max_turns(reading: Reading, given: Given) -> Outcome:
    """A limit of the tools' turns lets the model say one thing more."""
    extra = {f"{TURNS}.max_assistant_turns": 0, f"{TURNS}.max_user_turns": 1}
    limits = [reading[key] + more for key, more in extra.items() if key in reading]
    if limits:
        return converted({"rollout.max_turns": min(limits)}, f"{min(limits)} replies")
    most = max(1, response_tokens(reading) // 3)
    return converted({"rollout.max_turns": most}, f"no limit there; {most} replies are a third of a response's tokens")


def cut_side(reading: Reading, given: Given) -> Outcome:
    if given.value in ("left", None):
        return built_in("the beginning of a result is kept")
    return unsupported("the beginning of a long result is kept")


def of_tools(row: Row) -> Row:
    return provided(row, has_tools, NO_TOOLS)


# --- rows

ENDS = (
    same("data.max_prompt_length", "data.max_prompt_tokens", whole, 512),
    same("data.max_response_length", "rollout.max_response_tokens", whole, 512),
    same_as(f"{ROLLOUT}.prompt_length", "data.max_prompt_length"),
    same_as(f"{ROLLOUT}.response_length", "data.max_response_length"),
)

DATA = (
    turned("data.train_files", texts, train_files, ["~/data/rlhf/gsm8k/train.parquet"]),
    turned("data.val_files", texts, validation_files),
    turned("data.train_max_samples", whole, max_rows("data.train.max_rows")),
    provided(turned("data.val_max_samples", whole, max_rows("data.validation.max_rows")), validates, NOT_VALIDATED),
    same("data.prompt_key", "data.prompt_key", text),
    only("data.reward_fn_key", text, ("data_source",), "as in Corral", "the column `data_source` names a row's source"),
    *ENDS,
    turned("data.truncation", text, truncation),
    turned("data.filter_overlong_prompts", truth, filtering, False),
    same("data.shuffle", "data.shuffle", truth),
    optional("data.seed", "seed", whole),
    turned("data.gen_batch_size", whole, batch_to_generate),
    same_as("data.tool_config_path", f"{TURNS}.tool_config_path"),
    same_as("data.function_tool_path", f"{TURNS}.function_tool_path"),
)

SAMPLING = (
    same(f"{ROLLOUT}.temperature", "rollout.temperature", number),
    same(f"{ROLLOUT}.top_p", "rollout.top_p", number),
    turned(f"{ROLLOUT}.top_k", whole, top_k),
    *(
        provided(row, validates, NOT_VALIDATED)
        for row in (
            turned(f"{VALIDATION}.do_sample", truth, validation_sampling),
            turned(f"{VALIDATION}.temperature", number, validation_sampling),
            turned(f"{VALIDATION}.top_p", number, validation_top_p),
            turned(f"{VALIDATION}.top_k", whole, validation_top_k),
            same(f"{VALIDATION}.n", "validation.samples_per_prompt", whole),
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
    *(optional(f"{root}.num_workers", "environment.reward.workers", whole) for root in ("reward", "reward_model")),
)

TOOLS = (
    turned(f"{TURNS}.enable", truth, tools, False),
    turned(f"{ROLLOUT}.agent.default_agent_loop", text, agent_loop),
    *(
        of_tools(row)
        for row in (
            turned(f"{TURNS}.max_assistant_turns", whole, max_turns, None),
            turned(f"{TURNS}.max_user_turns", whole, max_turns),
            same(f"{TURNS}.max_parallel_calls", "environment.options.max_calls_per_turn", whole, 1),
            same(f"{TURNS}.max_tool_response_length", "environment.options.max_result_characters", whole, 256),
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
