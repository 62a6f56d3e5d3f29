"""ROLL's keys for games: tags and their shares, what is behind a tag, turns, prompts.

A tag is one of ROLL's own, which a configuration usually takes from ROLL's files and which are therefore known here, or
one of `custom_envs`. Where all that is played has one tag, a recipe has `environment`, else `environments`.
"""

import re
from collections.abc import Mapping
from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Kind,
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
from corral.migrate.roll.facts import (
    count,
    counts,
    empty,
    instead,
    is_old,
    is_rlvr,
    lengths,
    num_prompts,
    num_steps,
    plural,
    share,
    taken,
    validates,
)
from corral.migrate.roll.games import (
    GAMES,
    PLACES,
    TAGS,
    TEXTS,
    answer_format,
    as_options,
    behind,
    config_of,
    game_of,
    penalty_of_all,
    room_key,
    template,
    texts_of,
    told,
    unlike_ours,
)
from corral.migrate.table import Convert, ForeignConfig, KeyRow, idle, lacking, needless, only, turned
from corral.recipe.keys import KeyPath

# --- tags and shares


def train_tags(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config):
        return built_in("questions are asked")
    ours: dict[KeyPath, Any] = {**settings(config, "train"), ("data", "train", "path"): "boards"}
    note = shares_in_words(config, "train")
    if (steps := num_steps(config)) is not None:
        boards = num_prompts(config) * steps
        ours[("data", "train", "size")] = boards
        note += f"; a new board for each of {boards} groups"
    return dealt(config, "train", ours, note)


def validation_tags(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config) or not validates(config):
        return built_in("there is no validation on games")
    ours = {**settings(config, "val"), ("data", "validation", "path"): "boards"}
    return dealt(config, "val", ours, "for validation")


def dealt(config: ForeignConfig, part: str, ours: Mapping[KeyPath, Any], note: str) -> Outcome:
    """What a list of tags amounts to."""
    tags = shares(config, part)
    for tag in tags:
        if not game_of(config, tag):
            raise ValueError(f"names {tag}, of which `custom_envs` has no `env_type`; ROLL's own are {', '.join(TAGS)}")
    unknown = [tag for tag in tags if game_of(config, tag) not in GAMES and tag in TAGS]
    if unknown:
        return instead(ours, f"{', '.join(unknown)}: an environment that Corral does not have; write it as a class")
    return converted(ours, note)


def partition(config: ForeignConfig, given: ForeignValue) -> Outcome:
    manager = given.key.partition(".")[0]
    tags, groups = taken(config, f"{manager}.tags"), taken(config, f"{manager}.num_env_groups")
    if len(given.value or tags) != len(tags):
        raise ValueError(f"should have one number for each of the tags {', '.join(tags)}")
    if groups is not None and sum(given.value or [groups]) != groups:
        raise ValueError(f"adds up to {sum(given.value)} groups, and `{manager}.num_env_groups` is {groups}")
    part = manager.partition("_")[0]
    if is_rlvr(config) or (part == "val" and not validates(config)):
        return no_effect("no games are played for it")
    name = "share" if part == "train" else "validation_share"
    ours = {path: value for path, value in settings(config, part).items() if path[-1] == name}
    return converted(ours, shares_in_words(config, part))


def groups(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.key.startswith("val"):
        return built_in(
            f"all games of a validation are played at once, not in {plural(given.value or 1, 'group')} by turns"
        )
    made = num_prompts(config)
    note = f"all {plural(made, 'group')} of a step are played at once"
    return built_in(note if given.value == made else f"{note}, not {given.value} by turns")


def shares(config: ForeignConfig, part: str) -> dict[str, int]:
    """By tag, for `train` or `val`."""
    if part == "val" and not validates(config):
        return {}
    tags = taken(config, f"{part}_env_manager.tags")
    parts = config[f"{part}_env_manager.num_groups_partition"] or []
    if len(parts) != len(tags):
        parts = [1] * len(tags)
    found = dict.fromkeys(tags, 0)
    for tag, groups in zip(tags, parts, strict=True):
        found[tag] += groups
    return found


def all_tags(config: ForeignConfig) -> list[str]:
    """That are played, in training or validation."""
    return list(dict.fromkeys([*shares(config, "train"), *shares(config, "val")]))


def shares_in_words(config: ForeignConfig, part: str) -> str:
    found = shares(config, part)
    if len(found) == 1:
        return f"{next(iter(found))} alone"
    return "shares " + ", ".join(f"{groups} of {tag}" for tag, groups in found.items())


def settings(config: ForeignConfig, part: str) -> dict[KeyPath, Any]:
    """All of the environments of a part."""
    train, validation = shares(config, "train"), shares(config, "val")
    found: dict[KeyPath, Any] = {}
    for tag in shares(config, part):
        base, played = section(config, tag), behind(config, tag)
        found[(*base, "name")] = played.name
        own = told(config, tag) if played.name in GAMES else set()
        found |= {(*base, "options", *path): value for path, value in played.options.items() if path not in own}
        if base[0] == "environments":
            found[(*base, "share")] = train.get(tag, 0)
            if validation and validation.get(tag, 0) != train.get(tag, 0):
                found[(*base, "validation_share")] = validation.get(tag, 0)
    return found


def section(config: ForeignConfig, tag: str) -> KeyPath:
    """Of the recipe."""
    if len(all_tags(config)) == 1:
        return ("environment",)
    return ("environments", re.sub(r"[^A-Za-z0-9_.-]", "-", tag))


def validation_size(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config):
        return built_in("all of the validation data are played")
    if not validates(config):
        return built_in("there is no validation")
    size, each = taken(config, "val_batch_size"), taken(config, "val_env_manager.group_size")
    ours = {"data.validation.path": "boards", "validation.samples_per_prompt": each}
    if size < 0:
        ours["data.validation.size"] = 128
        return instead(ours, "boards have no end: 128 of them are played")
    if size == 0 or size % each:
        raise ValueError(f"should be a multiple of `val_env_manager.group_size`, {each}")
    return converted({**ours, "data.validation.size": size // each}, f"{size} games on {size // each} boards")


def validation_group(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config) or not validates(config):
        return built_in("there is no validation on games")
    return mapped("validation.samples_per_prompt", taken(config, "val_env_manager.group_size"))


# --- `custom_envs`


def of_tag(convert: Convert) -> Convert:
    """For a tag that is played."""

    def checked(config: ForeignConfig, given: ForeignValue) -> Outcome:
        tag = given.key.split(".")[1]
        if is_rlvr(config) or tag not in all_tags(config):
            return no_effect("no tag names it")
        return built_in("as in ROLL's files") if given.value is None else convert(config, given)

    return checked


def tag_lacking(key: str, why: str) -> KeyRow:
    """Unsupported, unless it is switched off or belongs to a tag that is not played."""
    missing = of_tag(lambda _, given: unsupported(why) if given.value else built_in("off, as in Corral"))
    return turned(key, anything, missing)


def env_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    tag = given.key.split(".")[1]
    path = (*section(config, tag), "name")
    if given.value in GAMES:
        return mapped(path, given.value)
    why = f"Corral has {', '.join(GAMES)} of ROLL's; write {given.value} as a class and name it here"
    return instead({path: behind(config, tag).name}, why)


def option(config: ForeignConfig, given: ForeignValue) -> Outcome:
    _, tag, _, key = given.key.split(".", 3)
    game = game_of(config, tag)
    if game not in GAMES:
        return unsupported(f"an option of {game or 'an environment'} that Corral does not have")
    found = as_options(game, room_key(key), config_of(config, tag, game))
    changed = unlike_ours(game, found)
    if changed:
        path = (*section(config, tag), "options")
        return converted({(*path, *one): value for one, value in changed.items()}, f"of {game}")
    looked_at = found or key.partition(".")[0] in ("action_pattern", "action_lookup")
    return built_in("as in Corral") if looked_at else no_effect(f"{game} does not look at it")


def pattern(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = option(config, given)
    if answer_format(given.value) is None:
        return unsupported("no form of reply is known that it looks for: `options.answer_format`")
    return found


def prompt_text(config: ForeignConfig, given: ForeignValue) -> Outcome:
    _, tag, name = given.key.split(".")
    if game_of(config, tag) not in GAMES:
        return unsupported("a prompt of an environment that Corral does not have")
    if template(given.value) is None:
        return unsupported(f"has a placeholder that Corral lacks; there are {', '.join(PLACES)}")
    path, found = (*section(config, tag), "options", "prompts"), texts_of(config, tag)
    return converted({(*path, one): found["prompts", one] for one in TEXTS[name]}, "with Corral's placeholders")


def instruction(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Of older versions, beside `env_config`."""
    tag = given.key.split(".")[1]
    if game_of(config, tag) not in GAMES:
        return unsupported("a prompt of an environment that Corral does not have")
    path = (*section(config, tag), "options", "prompts", "instruction")
    return converted({path: config_of(config, tag, game_of(config, tag))["env_instruction"]}, "what the game is")


def penalty(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config) or penalty_of_all(config) is None:
        return no_effect("ROLL takes that of `env_config`")
    ours = {
        (*section(config, tag), "options", *path): value
        for tag in shares(config, "train")
        if game_of(config, tag) in GAMES and f"custom_envs.{tag}.env_config.format_penalty" not in config
        for path, value in unlike_ours(game_of(config, tag), {("format_penalty",): given.value}).items()
    }
    return converted(ours, "for replies that are no action") if ours else built_in("as in Corral")


def manager_class(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Who plays."""
    name = (given.value or "TrajEnvManager").rpartition(".")[2]
    if name == "TrajEnvManager":
        return built_in("a game is one conversation")
    if name == "StepEnvManager":
        return unsupported("a game is one conversation; turns are not prompts of their own with some history")
    return unsupported("a game is one conversation of an environment with the model; for agents there is `agent`")


# --- turns


def num_turns(config: ForeignConfig) -> int:
    """One for all environments: the largest."""
    return max(turns_of(config, tag) for tag in all_tags(config))


def turns_of(config: ForeignConfig, tag: str) -> int:
    keys = (
        f"custom_envs.{tag}.max_steps",
        f"custom_envs.{tag}.max_actions_per_traj",
        f"custom_envs.{tag}.max_steps_per_traj",
        f"custom_envs.{tag}.env_config.max_steps",
    )
    return int(next((config[key] for key in keys if key in config), taken(config, "max_actions_per_traj")))


def turns(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config):
        return no_effect("an answer is one turn")
    return mapped("rollout.max_turns", num_turns(config))


def tag_turns(config: ForeignConfig, given: ForeignValue) -> Outcome:
    tag = given.key.split(".")[1]
    if turns_of(config, tag) != given.value:
        return no_effect("`max_steps` goes before it")
    if given.value != num_turns(config):
        return unsupported(f"all environments have the same number of turns: {num_turns(config)}")
    return mapped("rollout.max_turns", given.value)


def turn_tokens(config: ForeignConfig) -> int:
    limit = max(tokens_of(config, tag) for tag in all_tags(config))
    new = config["actor_infer.generating_args.max_new_tokens"]
    if new and is_old(config):
        limit = new  # there is no other
    return min(limit, new or limit, lengths(config)[1])


def tokens_of(config: ForeignConfig, tag: str) -> int:
    key = f"custom_envs.{tag}.max_tokens_per_step"
    return int(config[key] if key in config else taken(config, "max_tokens_per_step"))


def tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config):
        return no_effect("an answer has `response_length`")
    found = turn_tokens(config)
    note = "" if given.value == found else f"the least of this, `max_new_tokens` and what fits: {found}"
    return mapped("rollout.max_turn_tokens", found, note)


def tag_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value != max(tokens_of(config, tag) for tag in all_tags(config)):
        return unsupported(f"all environments have the same limit: {turn_tokens(config)}")
    return tokens(config, given)


# --- kinds


def at_least(least: int) -> Kind:
    def kind(value: Any) -> int:
        if integer(value) < least:
            raise ValueError(f"a whole number, at least {least}")
        return int(value)

    return kind


def room(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("height and width")
    return [at_least(4)(item) for item in value]


def tag_list(value: Any) -> list[str]:
    if not texts(value):
        raise ValueError("at least one tag")
    return texts(value)


def regular_expression(value: Any) -> str:
    try:
        re.compile(text(value))
    except re.error:
        raise ValueError("a regular expression") from None
    return text(value)


OPTIONS: dict[str, Kind] = {
    "size": at_least(2),
    "p": share,
    "is_slippery": boolean,
    "dim_room": room,
    "dim_x": at_least(4),
    "dim_y": at_least(4),
    "num_boxes": count,
    "search_depth": at_least(2),
    "format_penalty": number,
    "env_instruction": text,
    "special_token_list": texts,
    "grid_lookup.**": text,
    "action_lookup.**": text,
}
CONFIG = "custom_envs.*.env_config"
MANAGERS = ("train_env_manager", "val_env_manager")

ROWS = [
    turned("custom_envs.*.env_type", text, of_tag(env_type)),
    *[turned(f"{CONFIG}.{name}", kind, of_tag(option)) for name, kind in OPTIONS.items()],
    turned(f"{CONFIG}.action_pattern", regular_expression, of_tag(pattern)),
    turned(f"{CONFIG}.max_steps", count, of_tag(tag_turns)),
    turned(
        f"{CONFIG}.grid_vocab.**", text, of_tag(lambda *_: built_in("the meanings of signs are in Corral's words"))
    ),
    only(f"{CONFIG}.render_mode", text, ("text",), "text, as in Corral", "the model reads, and does not see"),
    tag_lacking(f"{CONFIG}.**", "not an option of Corral's environment"),
    turned("custom_envs.*.max_steps", count, of_tag(tag_turns)),
    turned("custom_envs.*.max_actions_per_traj", count, of_tag(tag_turns)),
    turned("custom_envs.*.max_steps_per_traj", count, of_tag(tag_turns)),
    turned("custom_envs.*.max_tokens_per_step", count, of_tag(tag_tokens)),
    idle("custom_envs.*.max_tokens", "a number in the prompt; `max_new_tokens` is the limit"),
    turned("custom_envs.*.env_instruction", text, of_tag(instruction)),
    idle("custom_envs.*.user_prompt_format", "nothing reads it"),
    tag_lacking("custom_envs.*.reward_template", "the model is not told the reward of its last action"),
    turned("custom_envs.*.agent_system_template", text, of_tag(prompt_text)),
    turned("custom_envs.*.agent_template", text, of_tag(prompt_text)),
    turned("custom_envs.*.env_manager_cls", text, of_tag(manager_class)),
    needless("custom_envs.*.use_thread_lock", "games do not block each other"),
    needless("custom_envs.*.max_env_step_concurrent", "`environment.concurrency` bounds it"),
    needless("custom_envs.*.history_length", "a game's whole conversation is its history"),
    empty("custom_envs.*.env_config"),
    tag_lacking("custom_envs.*.agent_runner_cls", "for agents there is the environment `agent`"),
    tag_lacking("custom_envs.*.**", "not something that Corral's environments have"),
    empty("custom_envs.*"),
    empty("custom_envs"),
    *[turned(f"{manager}.num_groups_partition", counts, partition) for manager in MANAGERS],
    turned("train_env_manager.tags", tag_list, train_tags, ["SimpleSokoban"]),
    turned("val_env_manager.tags", tag_list, validation_tags, ["SimpleSokoban"]),
    *[turned(f"{manager}.num_env_groups", count, groups) for manager in MANAGERS],
    turned("val_env_manager.group_size", count, validation_group, 1),
    turned("val_batch_size", integer, validation_size, 128),
    turned("max_actions_per_traj", count, turns, 10),
    turned("max_tokens_per_step", count, tokens, 64),
    turned("actor_infer.generating_args.max_new_tokens", count, tokens),
    turned("env_manager_cls", text, manager_class),
    *[
        turned(key, kind, lambda *_: built_in("for the environments that take it"))
        for key, kind in {
            "action_pattern": regular_expression,
            "sokoban_format_penalty": number,
            "frozen_format_penalty": number,
            "agent_system_template": text,
            "agent_template": text,
        }.items()
    ],
    idle("custom_env.**", "only what `custom_envs` takes of it counts"),
    *[
        idle(key, "only what `custom_envs` takes of it counts")
        for key in (
            "all_response_pattern", "think_action_pattern", "default_history_length", "reward_template",
            "user_prompt_no_think_format", "user_prompt_think_format",
            "single_prompt_agent_system_template", "single_prompt_agent_template",
        )
    ],
    lacking("agent_runner_cls", "for agents there is the environment `agent`"),
    lacking("agent_config_common.**", "for agents there is the environment `agent`"),
    turned("train_env_manager.format_penalty", number, penalty),
    idle("val_env_manager.format_penalty", "a validation's scores are without it"),
    *[needless(f"{manager}.max_env_num_per_worker", "all games of a step are played at once") for manager in MANAGERS],
    *[needless(f"{manager}.max_traj_per_env", "all games of a step are played at once") for manager in MANAGERS],
    *[lacking(f"{manager}.group_size_redundancy", "a group's slowest games count too") for manager in MANAGERS],
    *[
        only(
            f"{manager}.group_filter_cls", text, ("roll.pipeline.agentic.agentic_pipeline.GroupFilter",),
            "none, as in Corral", "`algorithm.dynamic_sampling` leaves out groups whose rewards are all equal",
        )
        for manager in MANAGERS
    ],
    *[
        only(f"{manager}.llm_proxy.proxy_type", text, ("policy",), "the model plays", "only what is trained plays")
        for manager in MANAGERS
    ],
    *[lacking(f"{manager}.llm_proxy.**", "only the model that is trained plays") for manager in MANAGERS],
    *[
        needless(f"{manager}.{name}", "games are played beside the engine")
        for manager in MANAGERS
        for name in (
            "worker_cls", "world_size", "num_gpus_per_worker", "max_concurrency", "infer_batch_size", "name",
            "model_args.**", "data_args.**", "strategy_args.**", "device_mapping", "backend_timeout",
        )
    ],
    needless("env_monitor.**", "a game that hangs costs its trajectory: `environment.timeout_s`"),
    only("enable_think", boolean, (False,), "as in Corral", "`<think>` is not put before replies"),
    idle("action_sep", "gone from ROLL: a turn is one action"),
    lacking("use_turn_scores", "`algorithm.name: turn_grpo` looks at single turns"),
    only("enable_response_mask", boolean, (True,), "only generated tokens count", "only generated tokens count"),
    idle("special_token_list", "gone from ROLL: `env_config` has it"),
    lacking("dirty_data_mask", "a game that fails costs its trajectory"),
    lacking("open_feedback_turn", "there are no turns after the last one"),
    lacking("use_token_reward", "rewards are those of turns"),
    needless("skip_mock_system_prompt", "turns are rendered by the chat template as they come"),
    needless("parse_tool_call_parameter_to_dict", "turns are rendered by the chat template as they come"),
]  # fmt: skip
