"""RLinf's rows and rewards, and of its agents the one that searches."""

from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    anything,
    boolean,
    built_in,
    converted,
    integer,
    mapped,
    no_effect,
    number,
    text,
    texts,
    unsupported,
)
from corral.migrate.rlinf.facts import (
    DEFAULTS,
    NEVER_VALIDATES,
    UNREAD_LENGTHS,
    all_of,
    area,
    foreign,
    is_search,
    said,
    usual,
    usual_same,
)
from corral.migrate.table import Convert, ForeignConfig, idle, lacking, needless, same, turned
from corral.recipe.keys import KeyPath

OWN_TEMPLATE = "give a template in which it is so as model.chat_template"
OF_IMAGES = "image_keys choice_key solution_key use_chat_template"
ONLY_SEARCH = "of RLinf's agents only Search-R1's (reward_type searchr1) is read"


def data_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in ("math", None):
        return built_in("rows with a prompt and an answer")
    return unsupported("only rows of text, with a prompt and an answer, are read")


def train_paths(config: ForeignConfig, given: ForeignValue) -> Outcome:
    paths = given.value or DEFAULTS["data.train_data_paths"]
    note = "" if given.where and given.value else "put AReaL-boba-106k there, or name your own file"
    return mapped("data.train.path", paths[0] if len(paths) == 1 else paths, note)


def data_size(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value < 0:
        return built_in("all rows")
    return mapped("data.train.max_rows", given.value)


def long_prompts(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value:
        return converted({"data.overlong": "filter"}, "true: longer prompts are left out")
    return converted({"data.overlong": "truncate_right"}, "false: the end of longer prompts is cut off")


def seed_of_actor(config: ForeignConfig, given: ForeignValue) -> Outcome:
    seed = said(config, "data.seed")
    return built_in("there is one seed" if given.value in (seed, None) else f"there is one seed, data.seed: {seed}")


def reward_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in ("math", None):
        return mapped("environment.reward.name", "math")
    if is_search(config):
        ours: dict[KeyPath, Any] = {
            ("environment", "name"): "search",
            ("environment", "options", "prompt"): None,
            ("environment", "reward", "name"): "em",
        }
        return converted(ours, "searchr1: exact match of what is found by searching; prompts as they are in the rows")
    return unsupported("write it as a function and name it in `environment.reward.name`: `file.py:function`")


def of_images(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if config["data.type"] in ("math", None):
        return no_effect("rows of text do not have it")
    return unsupported("images are not read") if given.value else built_in("off, as in Corral")


def reward_weight(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if config["reward.reward_type"] in ("math", "searchr1", None):
        return no_effect(f"reward_type {said(config, 'reward.reward_type')} has no parts")
    return unsupported("parts of a reward are weighed in its function") if given.value else built_in("off")


def reward_scale(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_search(config):
        return no_effect("searchr1 does not scale")
    if config["reward.reward_type"] not in ("math", None):
        return unsupported("it belongs to a reward that is not read")
    scale, high, low = (said(config, f"reward.reward_{name}") for name in ("scale", "max_val", "min_val"))
    right, wrong = high * scale, low * scale
    ours: dict[KeyPath, Any] = {
        ("environment", "reward", "options", "right"): right,
        ("environment", "reward", "options", "wrong"): wrong,
        ("environment", "reward", "on_error"): wrong,
    }
    return converted(ours, f"{right:g} for a right answer, {wrong:g} for any other")


def of_search(convert: Convert) -> Convert:
    def guarded(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if given.value is None:
            return built_in("nothing")
        if not is_search(config):
            return unsupported(ONLY_SEARCH)
        return convert(config, given)

    return guarded


def to(ours: str) -> Convert:
    return lambda _, given: mapped(ours, given.value)


def search_turns(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value < 2:
        return unsupported("with one turn nothing that is found is read; use `environment.options.do_search: false`")
    note = f"{given.value} replies: {given.value - 1} that may search, and one more"
    return converted({"rollout.max_turns": given.value - 1}, note)


def retriever(config: ForeignConfig, given: ForeignValue) -> Outcome:
    address = given.value if "://" in given.value else f"http://{given.value}"
    return converted({"environment.options.retriever": address}, f"{given.value}, as an address")


def cut_side(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return built_in("the end is cut off") if given.value == "right" else unsupported("only the end is cut off")


ROWS = (
    turned("data.type", text, data_type),
    needless("data.dataset_name", "files are read by their endings"),
    usual_same("data.max_prompt_length", "data.max_prompt_tokens", integer),
    usual("data.filter_prompt_by_length", boolean, long_prompts),
    usual_same("data.rollout_batch_size", "batch.prompts_per_step", integer),
    same("data.prompt_key", "data.prompt_key", text),
    usual_same("data.answer_key", "data.answer_key", text),
    usual_same("data.apply_chat_template", "data.chat", boolean),
    lacking("data.apply_chat_template_kwargs", OWN_TEMPLATE),
    lacking("data.apply_chat_template_kwargs.**", OWN_TEMPLATE),
    same("data.shuffle", "data.shuffle", boolean),
    usual_same("data.seed", "seed", integer),
    turned("actor.seed", integer, seed_of_actor),
    usual("data.train_data_paths", texts, train_paths),
    turned("data.data_size", integer, data_size),
    idle("data.val_data_paths", f"{NEVER_VALIDATES}; `data.validation` does"),
    *all_of(idle, "data", "val_rollout_batch_size validation_shuffle", NEVER_VALIDATES),
    *all_of(needless, "data", "num_workers process_workers process_batch_size lazy_loading", "rows are read at once"),
    *(turned(f"data.{name}", anything, of_images) for name in OF_IMAGES.split()),
    usual("reward.reward_type", text, reward_type),
    usual("reward.reward_scale", number, reward_scale),
    turned("reward.reward_max_val", number, reward_scale),
    turned("reward.reward_min_val", number, reward_scale),
    lacking("reward.use_reward_model", "rewards are functions"),
    lacking("reward.use_prompt", "a function gets the row, and with it the prompt"),
    turned("reward.reward_weights.**", anything, reward_weight),
    *all_of(idle, "reward", "len_reward_penalty safe_length max_length", UNREAD_LENGTHS),
    needless("reward.group_name", "rewards are computed beside the rollout"),
    *area("reward.tokenizer", "the model's own"),
    turned("agentloop.max_turns", integer, of_search(search_turns)),
    turned("agentloop.max_tool_response_length", integer, of_search(to("rollout.max_observation_tokens"))),
    turned("agentloop.tool_response_truncate_side", text, of_search(cut_side)),
    turned("agentloop.toolcall_parser", text, of_search(lambda *_: built_in("<search> and <answer> are looked for"))),
    *all_of(needless, "agentloop", "group_name print_outputs is_dynamic_rollout_batch", "a trajectory is one sequence"),
    lacking("agentloop.**", ONLY_SEARCH),
    turned("tools.search.server_addr", text, of_search(retriever)),
    turned("tools.search.topk", integer, of_search(to("environment.options.topk"))),
    lacking("tools.**", ONLY_SEARCH),
    foreign("agentlightning.**", "agents of your own play in the environment `agent`"),
    foreign("env.**", "simulators of robots are not run"),
)
