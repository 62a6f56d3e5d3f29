"""ROLL's environments: tags and how often each is used, which environment and options are behind a tag, turns, prompts.

A tag is one of ROLL's own, which a configuration usually takes from ROLL's files and which are therefore known here, or
one of `custom_envs`. Where all trajectories have one tag, a recipe has `environment`, else `environments`.
"""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    built_in,
    converted,
    mapped,
    no_effect,
    plural,
    text,
    texts,
    unsupported,
)
from corral.migrate.roll.pipelines_and_devices import (
    at_least,
    is_old,
    is_rlvr,
    lengths,
    num_prompts,
    num_steps,
    replaced,
    validates,
    value_of,
)
from corral.migrate.table import ForeignConfig
from corral.recipe.keys import KeyPath

ANSWER = "<answer>(.*?)</answer>"
THINK = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
REPLIES = ("<answer>{action}</answer>", "<think>your thoughts</think><answer>{action}</answer>", "{action}")
"""Forms of a reply, of which one should be what a pattern looks for."""
LETTERS = dict(zip([f"grid_lookup.{place}" for place in range(7)], "W.GCBA@", strict=True))
TAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "SimpleSokoban": ("sokoban", {"dim_room": [6, 6], "num_boxes": 1}),
    "LargerSokoban": ("sokoban", {"dim_room": [10, 10], "num_boxes": 2, "search_depth": 10}),
    "SokobanDifferentGridVocab": ("sokoban", {"dim_room": [6, 6], "num_boxes": 1, "search_depth": 30, **LETTERS}),
    "FrozenLake": ("frozen_lake", {"is_slippery": False}),
    "WebShopEnv": ("webshop", {}),
    "FrozenLakeThink": ("frozen_lake", {"is_slippery": False, "action_pattern": THINK}),
}
"""ROLL's tags, with their `env_type` and `env_config`."""
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "sokoban": {"dim_room": [6, 6], "num_boxes": 3, "search_depth": 300},
    "frozen_lake": {"size": 4, "p": 0.8, "is_slippery": True},
}
"""ROLL's environments that Corral has, with what ROLL takes where `env_config` has no value."""
PENALTIES = {"sokoban": ("sokoban_format_penalty", -0.15), "frozen_lake": ("frozen_format_penalty", -0.01)}
OUR_DEFAULTS: dict[str, dict[KeyPath, Any]] = {
    "sokoban": {("dim_room",): [6, 6], ("num_boxes",): 1, ("search_depth",): 300, ("format_penalty",): -0.15},
    "frozen_lake": {("size",): 4, ("p",): 0.8, ("slippery",): False, ("format_penalty",): 0.0},
}
"""What Corral takes where an option is not written."""
SIGNS = {
    "sokoban": ("wall", "empty", "target", "box_on_target", "box", "player", "player_on_target"),
    "frozen_lake": ("player", "empty", "hole", "goal", "player_in_hole", "player_on_goal"),
}
ACTIONS = {"sokoban": ("Up", "Down", "Left", "Right"), "frozen_lake": ("Left", "Down", "Right", "Up")}
"""Actions in the order of ROLL's numbers for them."""
PLACEHOLDERS = {
    "turn_idx": "{turn}",
    "observation": "{observation}",
    "state": "{observation}",
    "actions_left": "{actions_left}",
    "max_response_length": "{max_response_tokens}",
    "env_instruction": "{instruction}",
    "suffix": "",
}
PROMPTS = {"agent_system_template": ("system",), "agent_template": ("opening", "turn")}
OPENING = "{instruction}\nSymbols: {symbols}\nActions: {actions}\n"
NO_PROMPT = "a prompt of an environment that Corral does not have"


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
    tags = value_of(config, f"{part}_env_manager.tags")
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
        found[(*base, "name")] = environment if environment in ENVIRONMENTS else f"my_environments:{tag}"
        if environment in ENVIRONMENTS:
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
            raise ValueError(f"names {tag}, of which `custom_envs` has no `env_type`; ROLL's own are {', '.join(TAGS)}")
    unknown = [tag for tag in tags if environment_of(config, tag) not in ENVIRONMENTS and tag in TAGS]
    if unknown:
        return replaced(ours, f"{', '.join(unknown)}: an environment that Corral does not have; write it as a class")
    return converted(ours, note)


def partition(config: ForeignConfig, given: ForeignValue) -> Outcome:
    manager = given.key.partition(".")[0]
    tags, groups = value_of(config, f"{manager}.tags"), value_of(config, f"{manager}.num_env_groups")
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


def env_groups(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.key.startswith("val"):
        written = plural(given.value or 1, "group")
        return built_in(f"all trajectories of a validation are generated at once, not in {written} by turns")
    note = f"all {plural(num_prompts(config), 'group')} of a step are generated at once"
    return built_in(note if given.value == num_prompts(config) else f"{note}, not {given.value} by turns")


def validation_size(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config):
        return built_in("all of the validation data are used")
    if not validates(config):
        return built_in("there is no validation")
    size, each = value_of(config, "val_batch_size"), value_of(config, "val_env_manager.group_size")
    ours = {"data.validation.path": "boards", "validation.samples_per_prompt": each}
    if size < 0:
        return replaced(
            {**ours, "data.validation.size": 128}, "the number of boards is unlimited: 128 of them are used"
        )
    if size == 0 or size % each:
        raise ValueError(f"should be a multiple of `val_env_manager.group_size`, {each}")
    return converted({**ours, "data.validation.size": size // each}, f"{size} trajectories on {size // each} boards")


def validation_group(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config) or not validates(config):
        return built_in("there is no validation in environments")
    return mapped("validation.samples_per_prompt", value_of(config, "val_env_manager.group_size"))


# --- what is behind a tag


def environment_of(config: ForeignConfig, tag: str) -> str:
    return str(config[f"custom_envs.{tag}.env_type"] or TAGS.get(tag, ("",))[0])


def options_of(config: ForeignConfig, tag: str) -> dict[KeyPath, Any]:
    """Options of a tag in a recipe, where they are not Corral's defaults."""
    environment, env_config = environment_of(config, tag), config_of(config, tag)
    options: dict[KeyPath, Any] = {}
    for key in env_config:
        options |= as_options(environment, key, env_config)
    return changed_options(environment, options | prompts_of(config, tag))


def changed_options(environment: str, options: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    return {path: value for path, value in options.items() if OUR_DEFAULTS[environment].get(path) != value}


def written_options(config: ForeignConfig, tag: str) -> set[KeyPath]:
    """Options of a tag that the configuration itself has, rather than ROLL's files."""
    environment, env_config = environment_of(config, tag), config_of(config, tag)
    written = config.below(f"custom_envs.{tag}.env_config")
    found = {path for key in written for path in as_options(environment, room_key(key), env_config)}
    prompts = {"env_instruction": ("instruction",), **PROMPTS}
    return found | {
        ("prompts", one) for name, own in prompts.items() if f"custom_envs.{tag}.{name}" in config for one in own
    }


def room_key(key: str) -> str:
    """Older versions have two keys for the size of a room."""
    return "dim_room" if key in ("dim_x", "dim_y") else key


def config_of(config: ForeignConfig, tag: str) -> dict[str, Any]:
    """`env_config`, with what ROLL's files and code have where it has no value."""
    environment, base = environment_of(config, tag), f"custom_envs.{tag}"
    found = {**ENVIRONMENTS[environment], "format_penalty": 0.0}
    if tag in TAGS:
        key, penalty = PENALTIES[environment]
        found |= {"format_penalty": penalty if config[key] is None else config[key], **TAGS[tag][1]}
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


def as_options(environment: str, key: str, env_config: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Options of Corral's environment that one key of `env_config` stands for."""
    name, _, place = key.partition(".")
    value: Any = env_config.get(key)
    if name in ("size", "p", "num_boxes", "search_depth", "format_penalty", "dim_room"):
        return {(name,): value} if (name,) in OUR_DEFAULTS[environment] else {}
    if name == "is_slippery" and environment == "frozen_lake":
        return {("slippery",): value}
    if name == "action_pattern" and value != ANSWER:
        form = answer_format(value)
        shown: dict[KeyPath, Any] = {("answer_format",): form} if form else {}
        return {("action_pattern",): value, **shown}
    if name == "grid_lookup" and place.isdigit() and int(place) < len(SIGNS[environment]):
        return {("grid_vocab", SIGNS[environment][int(place)]): value}
    if name == "action_lookup" and place.isdigit():
        number = int(place) - ("action_lookup.4" in env_config)  # from 0 or from 1
        action = ACTIONS[environment][number] if 0 <= number < 4 else value
        return {} if value == action else {("actions", action): value}
    if name == "env_instruction":
        return {("prompts", "instruction"): value}
    return {("special_tokens",): value} if name == "special_token_list" else {}


def answer_format(pattern: str) -> str | None:
    """A reply that the pattern understands."""
    for form in REPLIES:
        found = re.search(pattern, form.replace("{action}", "Up"), re.DOTALL)
        if found is not None and found.re.groups and (found[found.re.groups] or "").strip() == "Up":
            return form
    return None


def prompts_of(config: ForeignConfig, tag: str) -> dict[KeyPath, Any]:
    """Prompts that the configuration has."""
    found: dict[KeyPath, Any] = {}
    for name, own in PROMPTS.items():
        written = config[f"custom_envs.{tag}.{name}"] or config[name]
        rendered = None if written is None else template(written)
        if rendered is not None:
            found |= {("prompts", one): rendered for one in own}
    if "{instruction}" not in found.get(("prompts", "opening"), "{instruction}"):
        found["prompts", "opening"] = OPENING + found["prompts", "opening"]
    return found


def template(written: str) -> str | None:
    """The text with Corral's placeholders. None: it has one that Corral lacks."""
    if any(name not in PLACEHOLDERS for name in re.findall(r"\{([a-z_]+)\}", written)):
        return None
    return re.sub(r"\{([a-z_]+)\}", lambda found: PLACEHOLDERS[found[1]], written).rstrip("\n")


# --- conversions of `custom_envs`

TagConvert = Callable[..., Outcome]


def of_tag(convert: TagConvert) -> TagConvert:
    """A conversion that applies to tags that are used, and to values other than null."""

    @wraps(convert)
    def checked(config: ForeignConfig, given: ForeignValue, *arguments: str) -> Outcome:
        if is_rlvr(config) or given.key.split(".")[1] not in all_tags(config):
            return no_effect("no tag names it")
        return built_in("as in ROLL's files") if given.value is None else convert(config, given, *arguments)

    return checked


@of_tag
def built_in_for_tag(config: ForeignConfig, given: ForeignValue, reason: str) -> Outcome:
    return built_in(reason)


@of_tag
def lacking_for_tag(config: ForeignConfig, given: ForeignValue, reason: str) -> Outcome:
    return unsupported(reason) if given.value else built_in("off, as in Corral")


@of_tag
def env_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    tag = given.key.split(".")[1]
    path = (*section(config, tag), "name")
    if given.value in ENVIRONMENTS:
        return mapped(path, given.value)
    why = f"Corral has {', '.join(ENVIRONMENTS)} of ROLL's; write {given.value} as a class and name it here"
    return replaced({path: f"my_environments:{tag}"}, why)


@of_tag
def option(config: ForeignConfig, given: ForeignValue) -> Outcome:
    _, tag, _, key = given.key.split(".", 3)
    environment = environment_of(config, tag)
    if environment not in ENVIRONMENTS:
        return unsupported(f"an option of {environment or 'an environment'} that Corral does not have")
    found = as_options(environment, room_key(key), config_of(config, tag))
    if changed := changed_options(environment, found):
        path = (*section(config, tag), "options")
        return converted({(*path, *one): value for one, value in changed.items()}, f"of {environment}")
    is_read = found or key.partition(".")[0] in ("action_pattern", "action_lookup")
    return built_in("as in Corral") if is_read else no_effect(f"{environment} does not read it")


@of_tag
def action_pattern(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = option(config, given)
    if answer_format(given.value) is None:
        return unsupported("no form of reply is known that it looks for: `options.answer_format`")
    return found


@of_tag
def prompt_text(config: ForeignConfig, given: ForeignValue) -> Outcome:
    _, tag, name = given.key.split(".")
    if environment_of(config, tag) not in ENVIRONMENTS:
        return unsupported(NO_PROMPT)
    if template(given.value) is None:
        return unsupported(f"has a placeholder that Corral lacks; there are {', '.join(PLACEHOLDERS)}")
    path, found = (*section(config, tag), "options", "prompts"), prompts_of(config, tag)
    return converted({(*path, one): found["prompts", one] for one in PROMPTS[name]}, "with Corral's placeholders")


@of_tag
def instruction(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Older versions have the instruction beside `env_config`."""
    tag = given.key.split(".")[1]
    if environment_of(config, tag) not in ENVIRONMENTS:
        return unsupported(NO_PROMPT)
    path = (*section(config, tag), "options", "prompts", "instruction")
    return converted({path: config_of(config, tag)["env_instruction"]}, "the description of the environment")


def format_penalty(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config) or shared_penalty(config) is None:
        return no_effect("ROLL takes that of `env_config`")
    ours = {
        (*section(config, tag), "options", *path): value
        for tag in num_groups(config, "train")
        if (environment := environment_of(config, tag)) in ENVIRONMENTS
        and f"custom_envs.{tag}.env_config.format_penalty" not in config
        for path, value in changed_options(environment, {("format_penalty",): given.value}).items()
    }
    return converted(ours, "for replies that are no action") if ours else built_in("as in Corral")


def environment_manager(config: ForeignConfig, given: ForeignValue) -> Outcome:
    name = (given.value or "TrajEnvManager").rpartition(".")[2]
    if name == "TrajEnvManager":
        return built_in("a trajectory is one conversation")
    if name == "StepEnvManager":
        return unsupported("a trajectory is one conversation; turns are not prompts of their own with some history")
    return unsupported("a trajectory is one conversation of an environment with the model; for agents there is `agent`")


tag_manager = of_tag(environment_manager)


# --- turns


def turns_of(config: ForeignConfig, tag: str) -> int:
    names = ("max_steps", "max_actions_per_traj", "max_steps_per_traj", "env_config.max_steps")
    keys = [key for name in names if (key := f"custom_envs.{tag}.{name}") in config]
    return int(config[keys[0]] if keys else value_of(config, "max_actions_per_traj"))


def num_turns(config: ForeignConfig) -> int:
    """Number of turns of all environments: the largest of theirs."""
    return max(turns_of(config, tag) for tag in all_tags(config))


def turns(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("rollout.max_turns", num_turns(config))


@of_tag
def tag_turns(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if turns_of(config, given.key.split(".")[1]) != given.value:
        return no_effect("`max_steps` takes precedence")
    if given.value != num_turns(config):
        return unsupported(f"all environments have the same number of turns: {num_turns(config)}")
    return mapped("rollout.max_turns", given.value)


def most_turn_tokens(config: ForeignConfig) -> int:
    """Largest number of tokens of a turn that an environment allows, before other limits."""
    keys = [f"custom_envs.{tag}.max_tokens_per_step" for tag in all_tags(config)]
    return max(int(config[key] if key in config else value_of(config, "max_tokens_per_step")) for key in keys)


def num_turn_tokens(config: ForeignConfig) -> int:
    limit, new = most_turn_tokens(config), config["actor_infer.generating_args.max_new_tokens"]
    if new and is_old(config):
        limit = new  # older versions have no other limit
    return min(limit, new or limit, lengths(config)[1])


def turn_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config):
        return no_effect("an answer has `response_length`")
    found = num_turn_tokens(config)
    note = "" if given.value == found else f"the least of this, `max_new_tokens` and what fits: {found}"
    return mapped("rollout.max_turn_tokens", found, note)


@of_tag
def tag_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value != most_turn_tokens(config):
        return unsupported(f"all environments have the same limit: {num_turn_tokens(config)}")
    return turn_tokens(config, given)
