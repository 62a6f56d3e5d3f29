"""What is behind a tag of ROLL's: which of Corral's games, and with which options and prompts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corral.migrate.roll.facts import is_old
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
"""ROLL's, with their `env_type` and `env_config`."""
GAMES: dict[str, dict[str, Any]] = {
    "sokoban": {"dim_room": [6, 6], "num_boxes": 3, "search_depth": 300},
    "frozen_lake": {"size": 4, "p": 0.8, "is_slippery": True},
}
"""What ROLL takes where `env_config` says nothing."""
PENALTIES = {"sokoban": ("sokoban_format_penalty", -0.15), "frozen_lake": ("frozen_format_penalty", -0.01)}
OURS: dict[str, dict[KeyPath, Any]] = {
    "sokoban": {("dim_room",): [6, 6], ("num_boxes",): 1, ("search_depth",): 300, ("format_penalty",): -0.15},
    "frozen_lake": {("size",): 4, ("p",): 0.8, ("slippery",): False, ("format_penalty",): 0.0},
}
"""What Corral takes where an option is not written."""
SIGNS = {
    "sokoban": ("wall", "empty", "target", "box_on_target", "box", "player", "player_on_target"),
    "frozen_lake": ("player", "empty", "hole", "goal", "player_in_hole", "player_on_goal"),
}
ACTIONS = {"sokoban": ("Up", "Down", "Left", "Right"), "frozen_lake": ("Left", "Down", "Right", "Up")}
"""By ROLL's numbers for them, in order."""
PLACES = {
    "turn_idx": "{turn}",
    "observation": "{observation}",
    "state": "{observation}",
    "actions_left": "{actions_left}",
    "max_response_length": "{max_response_tokens}",
    "env_instruction": "{instruction}",
    "suffix": "",
}
TEXTS = {"agent_system_template": ("system",), "agent_template": ("opening", "turn")}
OPENING = "{instruction}\nSymbols: {symbols}\nActions: {actions}\n"


@dataclass(frozen=True)
class Played:
    name: str
    options: Mapping[KeyPath, Any]


def behind(config: ForeignConfig, tag: str) -> Played:
    game = game_of(config, tag)
    if game not in GAMES:
        return Played(f"my_environments:{tag}", {})
    options: dict[KeyPath, Any] = {}
    game_config = config_of(config, tag, game)
    for key in game_config:
        options |= as_options(game, key, game_config)
    options |= texts_of(config, tag)
    return Played(game, unlike_ours(game, options))


def unlike_ours(game: str, options: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    return {path: value for path, value in options.items() if OURS[game].get(path) != value}


def told(config: ForeignConfig, tag: str) -> set[KeyPath]:
    """Options that the configuration itself gives it, rather than ROLL's files."""
    game, written = game_of(config, tag), config.below(f"custom_envs.{tag}.env_config")
    game_config = config_of(config, tag, game)
    found = {path for key in written for path in as_options(game, room_key(key), game_config)}
    if f"custom_envs.{tag}.env_instruction" in config:
        found.add(("prompts", "instruction"))
    for name, own in TEXTS.items():
        if f"custom_envs.{tag}.{name}" in config:
            found |= {("prompts", one) for one in own}
    return found


def room_key(key: str) -> str:
    """Of older versions."""
    return "dim_room" if key in ("dim_x", "dim_y") else key


def game_of(config: ForeignConfig, tag: str) -> str:
    return str(config[f"custom_envs.{tag}.env_type"] or TAGS.get(tag, ("",))[0])


def config_of(config: ForeignConfig, tag: str, game: str) -> dict[str, Any]:
    """`env_config`, with what ROLL's files and code have where it says nothing."""
    written = {key: value for key, value in config.below(f"custom_envs.{tag}.env_config").items() if value is not None}
    helper, penalty = PENALTIES[game]
    game_config = {**GAMES[game], "format_penalty": 0.0}
    if tag in TAGS:
        game_config |= {"format_penalty": penalty if config[helper] is None else config[helper], **TAGS[tag][1]}
        if "action_pattern" in config and tag != "FrozenLakeThink":
            game_config["action_pattern"] = config["action_pattern"]
    if penalty_of_all(config) is not None:
        game_config["format_penalty"] = penalty_of_all(config)
    if f"custom_envs.{tag}.env_instruction" in config:
        game_config["env_instruction"] = config[f"custom_envs.{tag}.env_instruction"]
    game_config |= written
    if "dim_x" in game_config and "dim_y" in game_config:
        game_config["dim_room"] = [game_config["dim_x"], game_config["dim_y"]]
    return game_config


def penalty_of_all(config: ForeignConfig) -> float | None:
    """For replies that are no action. Older versions have one for all games, until `env_config` got its own."""
    older = (".user_prompt_format", ".reward_template")
    if is_old(config) or any(one.key.endswith(older) for one in config.given.values()):
        penalty: float | None = config["train_env_manager.format_penalty"]
        return penalty
    return None


def as_options(game: str, key: str, game_config: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Of one key of `env_config`: options of Corral's environment."""
    name, _, place = key.partition(".")
    value: Any = game_config.get(key)
    if name in ("size", "p", "num_boxes", "search_depth", "format_penalty", "dim_room"):
        return {(name,): value} if (name,) in OURS[game] else {}
    if name == "is_slippery" and game == "frozen_lake":
        return {("slippery",): value}
    if name == "action_pattern" and value != ANSWER:
        form = answer_format(value)
        shown: dict[KeyPath, Any] = {("answer_format",): form} if form else {}
        return {("action_pattern",): value, **shown}
    if name == "grid_lookup" and place.isdigit() and int(place) < len(SIGNS[game]):
        return {("grid_vocab", SIGNS[game][int(place)]): value}
    if name == "action_lookup" and place.isdigit():
        number = int(place) - ("action_lookup.4" in game_config)  # from 0 or from 1
        action = ACTIONS[game][number] if 0 <= number < 4 else value
        return {} if value == action else {("actions", action): value}
    if name == "env_instruction":
        return {("prompts", "instruction"): value}
    return {("special_tokens",): value} if name == "special_token_list" else {}


def answer_format(pattern: str) -> str | None:
    """A reply that it understands."""
    for form in REPLIES:
        found = re.search(pattern, form.replace("{action}", "Up"), re.DOTALL)
        if found is not None and found.re.groups and (found[found.re.groups] or "").strip() == "Up":
            return form
    return None


def texts_of(config: ForeignConfig, tag: str) -> dict[KeyPath, Any]:
    """Prompts that the configuration has."""
    found: dict[KeyPath, Any] = {}
    system = config[f"custom_envs.{tag}.agent_system_template"] or config["agent_system_template"]
    if system is not None and (rendered := template(system)) is not None:
        found["prompts", "system"] = rendered
    turn = config[f"custom_envs.{tag}.agent_template"] or config["agent_template"]
    if turn is not None and (rendered := template(turn)) is not None:
        found["prompts", "opening"] = rendered if "{instruction}" in rendered else OPENING + rendered
        found["prompts", "turn"] = rendered
    return found


def template(written: str) -> str | None:
    """With Corral's placeholders. None: it has one that Corral lacks."""
    words = re.findall(r"\{([a-z_]+)\}", written)
    if any(word not in PLACES for word in words):
        return None
    return re.sub(r"\{([a-z_]+)\}", lambda found: PLACES[found[1]], written).rstrip("\n")
