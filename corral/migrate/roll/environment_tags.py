"""ROLL's environments: tags and how often each is used, which environment and options are behind a tag, turns, prompts.

A tag is one of ROLL's own, which a configuration usually takes from ROLL's files and which are therefore known here, or
one of `custom_envs`. Where all trajectories have one tag, a recipe has `environment`, else `environments`.
"""

import re
from collections.abc import Mapping
from typing import Any

from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, mapped, no_effect, unsupported
from corral.migrate.roll.pipelines_and_devices import (
    at_least,
    is_old,
    is_rlvr,
    lengths,
    num_prompts,
    num_steps,
    replaced,
    validates,
)
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import text, texts
from corral.recipe.keys import KeyPath

ANSWER = "<answer>(.*?)</answer>"
OPENING = "{instruction}\nSymbols: {symbols}\nActions: {actions}\n"


# --- kinds of values


def room(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("height and width")
    return [at_least(item, 4) for item in value]


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


# --- tags


def num_groups(config: ForeignConfig, part: str) -> dict[str, int]:
    """Number of groups of each tag, for `train` or `val`."""
    if part == "val" and not validates(config):
        return {}
    tags = config.value(f"{part}_env_manager.tags")
    parts = config[f"{part}_env_manager.num_groups_partition"] or []
    found = dict.fromkeys(tags, 0)
    for tag, groups in zip(tags, parts if len(parts) == len(tags) else [1] * len(tags), strict=True):
        found[tag] += groups
    return found


def all_tags(config: ForeignConfig) -> list[str]:
    """Tags that are used, in training or validation."""
    return list(dict.fromkeys([*num_groups(config, "train"), *num_groups(config, "val")]))


def groups_note(config: ForeignConfig, part: str) -> str:
    found = num_groups(config, part)
    if len(found) == 1:
        return f"{next(iter(found))} alone"
    return ", ".join(f"{groups} of {tag}" for tag, groups in found.items())


def section(config: ForeignConfig, tag: str) -> KeyPath:
    """The section of the recipe for a tag."""
    if len(all_tags(config)) == 1:
        return ("environment",)
    return ("environments", re.sub(r"[^A-Za-z0-9_.-]", "-", tag))


def settings(config: ForeignConfig, part: str) -> dict[KeyPath, Any]:
    """Settings of all environments of `train` or `val`."""
    train, validation = num_groups(config, "train"), num_groups(config, "val")
    found: dict[KeyPath, Any] = {}
    for tag in num_groups(config, part):
        base, environment = section(config, tag), environment_of(config, tag)
        found[(*base, "name")] = environment if is_known(config, tag) else f"my_environments:{tag}"
        if is_known(config, tag):
            options, written = options_of(config, tag), written_options(config, tag)
            found |= {(*base, "options", *path): value for path, value in options.items() if path not in written}
        if base[0] == "environments":
            found[(*base, "weight")] = train.get(tag, 0)
            if validation and validation.get(tag, 0) != train.get(tag, 0):
                found[(*base, "validation_weight")] = validation.get(tag, 0)
    return found


def train_tags(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config):
        return built_in("the RLVR pipeline has data files")
    ours: dict[KeyPath, Any] = {**settings(config, "train"), ("data", "train", "path"): "boards"}
    note = groups_note(config, "train")
    if (steps := num_steps(config)) is not None:
        boards = num_prompts(config) * steps
        ours[("data", "train", "size")] = boards
        note += f"; a new board for each of {boards} groups"
    return tags_outcome(config, "train", ours, note)


def validation_tags(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config) or not validates(config):
        return built_in("there is no validation in environments")
    ours = {**settings(config, "val"), ("data", "validation", "path"): "boards"}
    return tags_outcome(config, "val", ours, "for validation")


def tags_outcome(config: ForeignConfig, part: str, ours: Mapping[KeyPath, Any], note: str) -> Outcome:
    tags = num_groups(config, part)
    for tag in tags:
        if not environment_of(config, tag):
            own = ", ".join(config.constants["tags"])
            raise ValueError(f"names {tag}, of which `custom_envs` has no `env_type`; ROLL's own are {own}")
    unknown = [tag for tag in tags if not is_known(config, tag) and tag in config.constants["tags"]]
    if unknown:
        return replaced(ours, f"{', '.join(unknown)}: an environment that Corral does not have; write it as a class")
    return converted(ours, note)


def partition(config: ForeignConfig, given: ForeignValue) -> Outcome:
    manager = given.key.partition(".")[0]
    tags, groups = config.value(f"{manager}.tags"), config.value(f"{manager}.num_env_groups")
    if len(given.value or tags) != len(tags):
        raise ValueError(f"should have one number for each of the tags {', '.join(tags)}")
    if groups is not None and sum(given.value or [groups]) != groups:
        raise ValueError(f"adds up to {sum(given.value)} groups, and `{manager}.num_env_groups` is {groups}")
    part = manager.partition("_")[0]
    if is_rlvr(config) or (part == "val" and not validates(config)):
        return no_effect("no environments are used for it")
    name = "weight" if part == "train" else "validation_weight"
    ours = {path: value for path, value in settings(config, part).items() if path[-1] == name}
    return converted(ours, groups_note(config, part))


# --- what is behind a tag


def environment_of(config: ForeignConfig, tag: str) -> str:
    own = config.constants["tags"].get(tag, {"env_type": ""})
    return str(config[f"custom_envs.{tag}.env_type"] or own["env_type"])


def is_known(config: ForeignConfig, tag: str) -> bool:
    return environment_of(config, tag) in config.constants["environments"]


def options_of(config: ForeignConfig, tag: str) -> dict[KeyPath, Any]:
    """Options of a tag in a recipe, where they are not Corral's defaults."""
    environment, env_config = environment_of(config, tag), config_of(config, tag)
    options: dict[KeyPath, Any] = {}
    for key in env_config:
        options |= as_options(config, environment, key, env_config)
    return changed_options(config, environment, options | prompts_of(config, tag))


def changed_options(config: ForeignConfig, environment: str, options: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    usual = config.constants["our_defaults"][environment]
    return {path: value for path, value in options.items() if usual.get(".".join(path)) != value}


def written_options(config: ForeignConfig, tag: str) -> set[KeyPath]:
    """Options of a tag that the configuration itself has, rather than ROLL's files."""
    environment, env_config = environment_of(config, tag), config_of(config, tag)
    written = config.below(f"custom_envs.{tag}.env_config")
    found = {path for key in written for path in as_options(config, environment, room_key(key), env_config)}
    prompts = {"env_instruction": ("instruction",), **config.constants["prompts"]}
    return found | {
        ("prompts", one) for name, own in prompts.items() if f"custom_envs.{tag}.{name}" in config for one in own
    }


def room_key(key: str) -> str:
    """Older versions have two keys for the size of a room."""
    return "dim_room" if key in ("dim_x", "dim_y") else key


def config_of(config: ForeignConfig, tag: str) -> dict[str, Any]:
    """`env_config`, with what ROLL's files and code have where it has no value."""
    environment, base = environment_of(config, tag), f"custom_envs.{tag}"
    found = {**config.constants["environments"][environment], "format_penalty": 0.0}
    if tag in config.constants["tags"]:
        key, penalty = config.constants["penalties"][environment]
        own = config.constants["tags"][tag].get("env_config", {})
        found |= {"format_penalty": penalty if config[key] is None else config[key], **own}
        if "action_pattern" in config and tag != "FrozenLakeThink":
            found["action_pattern"] = config["action_pattern"]
    if shared_penalty(config) is not None:
        found["format_penalty"] = shared_penalty(config)
    if f"{base}.env_instruction" in config:
        found["env_instruction"] = config[f"{base}.env_instruction"]
    found |= {key: value for key, value in config.below(f"{base}.env_config").items() if value is not None}
    if "dim_x" in found and "dim_y" in found:
        found["dim_room"] = [found["dim_x"], found["dim_y"]]
    return found


def shared_penalty(config: ForeignConfig) -> float | None:
    """Penalty for replies that are no action. Older versions have one for all environments, not in `env_config`."""
    older = (".user_prompt_format", ".reward_template")
    if is_old(config) or any(one.key.endswith(older) for one in config.given.values()):
        penalty: float | None = config["train_env_manager.format_penalty"]
        return penalty
    return None


def as_options(config: ForeignConfig, environment: str, key: str, env_config: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Options of Corral's environment that one key of `env_config` stands for."""
    name, _, place = key.partition(".")
    value: Any = env_config.get(key)
    if name in ("size", "p", "num_boxes", "search_depth", "format_penalty", "dim_room"):
        return {(name,): value} if name in config.constants["our_defaults"][environment] else {}
    if name == "is_slippery" and environment == "frozen_lake":
        return {("slippery",): value}
    if name == "action_pattern" and value != ANSWER:
        form = answer_format(config, value)
        shown: dict[KeyPath, Any] = {("answer_format",): form} if form else {}
        return {("action_pattern",): value, **shown}
    signs, actions = (config.constants[names][environment] for names in ("signs", "actions"))
    if name == "grid_lookup" and place.isdigit() and int(place) < len(signs):
        return {("grid_vocab", signs[int(place)]): value}
    if name == "action_lookup" and place.isdigit():
        number = int(place) - ("action_lookup.4" in env_config)  # from 0 or from 1
        action = actions[number] if 0 <= number < 4 else value
        return {} if value == action else {("actions", action): value}
    if name == "env_instruction":
        return {("prompts", "instruction"): value}
    return {("special_tokens",): value} if name == "special_token_list" else {}


def answer_format(config: ForeignConfig, pattern: str) -> str | None:
    """A reply that the pattern understands."""
    for form in texts(config.constants["replies"]):
        found = re.search(pattern, form.replace("{action}", "Up"), re.DOTALL)
        if found is not None and found.re.groups and (found[found.re.groups] or "").strip() == "Up":
            return form
    return None


def prompts_of(config: ForeignConfig, tag: str) -> dict[KeyPath, Any]:
    """Prompts that the configuration has."""
    found: dict[KeyPath, Any] = {}
    for name, own in config.constants["prompts"].items():
        written = config[f"custom_envs.{tag}.{name}"] or config[name]
        rendered = None if written is None else template(config, written)
        if rendered is not None:
            found |= {("prompts", one): rendered for one in own}
    if "{instruction}" not in found.get(("prompts", "opening"), "{instruction}"):
        found["prompts", "opening"] = OPENING + found["prompts", "opening"]
    return found


def template(config: ForeignConfig, written: str) -> str | None:
    """The text with Corral's placeholders. None: it has one that Corral lacks."""
    ours = config.constants["placeholders"]
    if any(name not in ours for name in re.findall(r"\{([a-z_]+)\}", written)):
        return None
    return re.sub(r"\{([a-z_]+)\}", lambda found: str(ours[found[1]]), written).rstrip("\n")


# --- conversions of `custom_envs`, for tags that are used and values other than null


def names_tag(config: ForeignConfig, given: ForeignValue) -> bool:
    return not is_rlvr(config) and given.key.split(".")[1] in all_tags(config)


def env_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    tag = given.key.split(".")[1]
    path = (*section(config, tag), "name")
    known = config.constants["environments"]
    if given.value in known:
        return mapped(path, given.value)
    why = f"Corral has {', '.join(known)} of ROLL's; write {given.value} as a class and name it here"
    return replaced({path: f"my_environments:{tag}"}, why)


def option(config: ForeignConfig, given: ForeignValue) -> Outcome:
    _, tag, _, key = given.key.split(".", 3)
    environment = environment_of(config, tag)
    if not is_known(config, tag):
        return unsupported(f"an option of {environment or 'an environment'} that Corral does not have")
    found = as_options(config, environment, room_key(key), config_of(config, tag))
    if changed := changed_options(config, environment, found):
        path = (*section(config, tag), "options")
        return converted({(*path, *one): value for one, value in changed.items()}, f"of {environment}")
    is_read = found or key.partition(".")[0] in ("action_pattern", "action_lookup")
    return built_in("as in Corral") if is_read else no_effect(f"{environment} does not read it")


def action_pattern(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = option(config, given)
    if answer_format(config, given.value) is None:
        return unsupported("no form of reply is known that it looks for: `options.answer_format`")
    return found


def has_prompts(config: ForeignConfig, given: ForeignValue) -> bool:
    return is_known(config, given.key.split(".")[1])


def prompt_text(config: ForeignConfig, given: ForeignValue) -> Outcome:
    _, tag, name = given.key.split(".")
    if template(config, given.value) is None:
        return unsupported(
            f"has a placeholder that Corral lacks; there are {', '.join(config.constants['placeholders'])}"
        )
    path, found = (*section(config, tag), "options", "prompts"), prompts_of(config, tag)
    return converted(
        {(*path, one): found["prompts", one] for one in config.constants["prompts"][name]}, "with Corral's placeholders"
    )


def instruction(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Older versions have the instruction beside `env_config`."""
    tag = given.key.split(".")[1]
    path = (*section(config, tag), "options", "prompts", "instruction")
    return converted({path: config_of(config, tag)["env_instruction"]}, "the description of the environment")


def format_penalty(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config) or shared_penalty(config) is None:
        return no_effect("ROLL takes that of `env_config`")
    ours = {
        (*section(config, tag), "options", *path): value
        for tag in num_groups(config, "train")
        if is_known(config, tag) and f"custom_envs.{tag}.env_config.format_penalty" not in config
        for path, value in changed_options(
            config, environment_of(config, tag), {("format_penalty",): given.value}
        ).items()
    }
    return converted(ours, "for replies that are no action") if ours else built_in("as in Corral")


# --- turns


def turns_of(config: ForeignConfig, tag: str) -> int:
    names = ("max_steps", "max_actions_per_traj", "max_steps_per_traj", "env_config.max_steps")
    keys = [key for name in names if (key := f"custom_envs.{tag}.{name}") in config]
    return int(config[keys[0]] if keys else config.value("max_actions_per_traj"))


def turns_of_tag(config: ForeignConfig, given: ForeignValue) -> int:
    return turns_of(config, given.key.split(".")[1])


def num_turns(config: ForeignConfig) -> int:
    """Number of turns of all environments: the largest of theirs."""
    return max(turns_of(config, tag) for tag in all_tags(config))


def most_turn_tokens(config: ForeignConfig) -> int:
    """Largest number of tokens of a turn that an environment allows, before other limits."""
    keys = [f"custom_envs.{tag}.max_tokens_per_step" for tag in all_tags(config)]
    return max(int(config[key] if key in config else config.value("max_tokens_per_step")) for key in keys)


def num_turn_tokens(config: ForeignConfig) -> int:
    limit, new = most_turn_tokens(config), config["actor_infer.generating_args.max_new_tokens"]
    if new and is_old(config):
        limit = new  # older versions have no other limit
    return min(limit, new or limit, lengths(config)[1])
