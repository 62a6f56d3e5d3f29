"""ROLL's keys for advantages, and for what goes into them.

In ROLL an advantage has three parts: how rewards are normalised (by the group, by the batch, not at all), the
estimator, and whether the result is whitened. Corral has a name for each of the sensible combinations.
"""

import math
from dataclasses import dataclass
from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    boolean,
    built_in,
    converted,
    mapped,
    no_effect,
    number,
    text,
    unsupported,
)
from corral.migrate.roll.facts import (
    amount,
    choice,
    count,
    group_size,
    instead,
    is_rlvr,
    kl_where,
    natural,
    share,
    taken,
    uses_critic,
)
from corral.migrate.table import ForeignConfig, lacking, only, turned
from corral.recipe.presets import DISCOUNTED, GROUP_BASELINES, WHITENED

ESTIMATORS = ("gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce")
NORMALISATION = "reward_normalization"


def normalised(config: ForeignConfig) -> tuple[str | None, str | None]:
    """Of whom the mean is that rewards are taken off, and the deviation: group, batch, running, other or nobody."""
    if is_rlvr(config):
        return normalised_answers(config)
    method, grouping = taken(config, f"{NORMALISATION}.method"), taken(config, f"{NORMALISATION}.grouping")
    tags = taken(config, "train_env_manager.tags")
    scope = {"traj_group_id": "group", "batch": "batch"}.get(grouping, "other")
    if scope == "other" and grouping == "tags" and len(tags) == 1:
        scope = "batch"
    mean, std = {"mean": ("group", None), "identity": (None, None)}.get(method, ("group", "group"))
    if grouping == "batch":
        mean, std = mean and "batch", std and "batch"
    mean = config[f"{NORMALISATION}.norm_mean_type"] or mean
    std = config[f"{NORMALISATION}.norm_std_type"] or std
    return (scope if mean == "group" else mean), (scope if std == "group" else std)


def normalised_answers(config: ForeignConfig) -> tuple[str | None, str | None]:
    if taken(config, "adv_estimator") == "grpo":
        return "group", None if config["reward_shift"] else "group"
    if old := config["reward_norm"]:
        return (None if config["reward_scale"] else old), (None if config["reward_shift"] else old)
    return config["norm_mean_type"], config["norm_std_type"]


@dataclass(frozen=True)
class Advantage:
    name: str
    words: str
    """What it is in ROLL."""
    differs: str = ""
    """What Corral does otherwise."""


def advantage(config: ForeignConfig) -> Advantage:
    estimator, white = taken(config, "adv_estimator"), bool(taken(config, "whiten_advantages"))
    mean, std = normalised(config)
    words = f"{estimator}, rewards {rewards_in_words(mean, std)}, {'whitened' if white else 'not whitened'}"
    if uses_critic(config):
        return Advantage("gae", words, "gae takes rewards as they are" if mean or std else "")
    if estimator == "gigpo":
        differs = "" if (mean, std) == ("group", "group") else "gigpo divides by the group's deviation"
        return Advantage("gigpo", words, differs)
    if estimator == "step_reinforce" and "group" in (mean, std):
        return Advantage("turn_grpo", words, "turns are compared with the same turn of the group's other games")
    name, differs = CHOICES.get((mean, std, white), ("reinforce_plus_plus", "rewards are not normalised that way"))
    return Advantage(name, words, differs)


CHOICES: dict[tuple[str | None, str | None, bool], tuple[str, str]] = {
    (None, None, False): ("reinforce", ""),
    (None, None, True): ("reinforce_plus_plus", ""),
    ("group", "group", False): ("grpo", ""),
    ("group", "group", True): ("grpo", ""),
    ("group", None, False): ("dr_grpo", ""),
    ("group", None, True): ("reinforce_plus_plus_baseline", ""),
    ("group", "batch", False): ("reinforce_plus_plus_baseline", "the deviation is that of tokens, not of trajectories"),
    ("group", "batch", True): ("reinforce_plus_plus_baseline", ""),
    ("batch", "batch", False): ("reinforce_plus_plus", "mean and deviation are those of tokens, not of trajectories"),
    ("batch", "batch", True): ("reinforce_plus_plus", ""),
    ("batch", None, True): ("reinforce_plus_plus", ""),
    (None, "batch", True): ("reinforce_plus_plus", ""),
}
"""By mean, deviation, and whether all is whitened: whitening undoes what the batch's own mean and deviation did."""


def rewards_in_words(mean: str | None, std: str | None) -> str:
    if mean is None and std is None:
        return "as they are"
    parts = [f"less the mean of the {mean}"] * bool(mean) + [f"over the deviation of the {std}"] * bool(std)
    return " ".join(parts)


def estimator(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found, written = advantage(config), taken(config, "adv_estimator")
    if found.name in GROUP_BASELINES and group_size(config) == 1:
        size = "num_return_sequences_in_group" if is_rlvr(config) else "train_env_manager.group_size"
        raise ValueError(
            f"with these rewards compares the samples of a group, and `{size}` is 1: nothing would be learnt"
        )
    ours: dict[Any, Any] = {"algorithm.name": "ppo" if found.name == "gae" else found.name}
    if found.name == "gae":
        ours["algorithm.kl.where"] = kl_where(config)
    note = f"{found.words}: {found.name}"
    if found.name in ("reinforce", "reinforce_plus_plus") and not is_rlvr(config) and written != "step_reinforce":
        note += "; a token counts for what is still to come, in ROLL for all of the game"
    discounted = written == "step_reinforce" and taken(config, "step_reward_gamma") != 1
    if written not in ESTIMATORS or (discounted and found.name in DISCOUNTED):
        why = "rewards of later turns are not discounted" if discounted else f"Corral has {', '.join(ESTIMATORS)}"
        return instead(ours, f"{why}; {found.name} takes its place")
    return converted(ours, note)


def normalisation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = advantage(config)
    if given.value == "asym_clip":
        return unsupported("advantages are clipped alike on both sides: `algorithm.advantage_clip`")
    if found.differs and found.name == taken(config, "adv_estimator"):
        return unsupported(found.differs)
    if found.differs:
        return unsupported(f"{found.differs}; {found.name} takes its place")
    return built_in(f"part of the advantage {found.name}")


def of_answers(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Keys at the top, which games do not look at."""
    if not is_rlvr(config):
        return no_effect(f"games have `{NORMALISATION}`")
    if taken(config, "adv_estimator") == "grpo" and given.key != "reward_shift":
        return no_effect("grpo normalises by the group in any case")
    return normalisation(config, given)


def whitening(config: ForeignConfig, given: ForeignValue) -> Outcome:
    name = advantage(config).name
    whitens = name in WHITENED
    if bool(given.value) == whitens:
        return built_in(f"part of the advantage {name}" if whitens else f"{name} does not")
    if given.value:
        return mapped("algorithm.whiten", True)
    return unsupported("gae is whitened in any case") if name == "gae" else normalisation(config, given)


def turn_gamma(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if advantage(config).name not in ("gigpo", "turn_grpo"):
        if taken(config, "adv_estimator") == "step_reinforce":
            return built_in("`adv_estimator` says what became of it")
        return no_effect("it belongs to gigpo and step_reinforce")
    return mapped("algorithm.turn_gamma", taken(config, "step_reward_gamma"))


def turn_weight(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if advantage(config).name != "gigpo":
        return no_effect("it belongs to gigpo")
    step, episode = taken(config, "step_reward_weight"), taken(config, "episode_reward_weight")
    if step <= 0 or episode <= 0:
        raise ValueError("should be above 0, `step_reward_weight` and `episode_reward_weight` alike")
    ours = {"algorithm.turn_weight": step / episode}
    if episode == 1:
        return mapped("algorithm.turn_weight", step)
    return instead(ours, f"games count 1, and turns {step / episode:g}")


def gamma(config: ForeignConfig, given: ForeignValue) -> Outcome:
    name, value = advantage(config).name, given.value
    if value in (None, 1):
        return built_in("1, as in Corral")
    if name in DISCOUNTED and taken(config, "adv_estimator") != "agentic_reinforce":
        return mapped("algorithm.gamma", value)
    return unsupported(f"{name} does not discount")


def lam(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if uses_critic(config):
        return mapped("algorithm.lam", taken(config, "lambd"))
    return no_effect("it belongs to gae")


def reward_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    bound, (mean, std) = taken(config, "reward_clip"), normalised(config)
    if not bound:
        return built_in("never, as in Corral")
    if mean is None and std is None:
        return mapped("algorithm.reward_clip", bound)
    size = group_size(config)
    most = (size - 1) / math.sqrt(size)
    if (mean, std) == ("group", "group") and most <= bound:
        return built_in(f"never reached: rewards of a group of {size} are within {most:.3g} deviations of their mean")
    return unsupported("rewards are clipped before they are normalised in Corral")


def critic_key(ours: str) -> Any:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if not uses_critic(config):
            return no_effect(f"{taken(config, 'adv_estimator')} has no critic")
        return mapped(ours, given.value)

    return convert


ROWS = [
    turned("adv_estimator", text, estimator, "reinforce"),
    turned(f"{NORMALISATION}.method", choice("identity", "mean", "mean_std", "asym_clip"), normalisation, "identity"),
    turned(f"{NORMALISATION}.grouping", text, normalisation, "tags"),
    turned(f"{NORMALISATION}.norm_mean_type", choice("batch", "group"), normalisation),
    turned(f"{NORMALISATION}.norm_std_type", choice("batch", "group"), normalisation),
    lacking(f"{NORMALISATION}.**", "rewards are not scaled or shifted by constants"),
    turned("norm_mean_type", choice("batch", "group", "running"), of_answers),
    turned("norm_std_type", choice("batch", "group", "running"), of_answers),
    turned("reward_norm", choice("batch", "group", "running"), of_answers),
    turned("reward_shift", boolean, of_answers),
    turned("reward_scale", boolean, of_answers),
    turned("whiten_advantages", boolean, whitening, True),
    lacking("whiten_rewards", "rewards are not whitened; `algorithm.name: reinforce_plus_plus` whitens advantages"),
    turned("step_reward_gamma", share, turn_gamma, 0.95),
    turned("step_reward_weight", number, turn_weight, 1.0),
    turned("episode_reward_weight", number, turn_weight, 1.0),
    turned("gamma", share, gamma),
    turned("lambd", share, lam, 0.95),
    turned("reward_clip", amount, reward_clip, 20.0),
    turned(
        "advantage_clip",
        amount,
        lambda config, _: mapped("algorithm.advantage_clip", taken(config, "advantage_clip")),
        10.0,
    ),
    turned("value_clip", amount, critic_key("critic.value_clip"), None),
    turned("critic_warmup", natural, critic_key("critic.warmup_steps")),
    only(
        "critic_epochs", count, (1,), "as often as the model, as in Corral", "the critic learns as often as the model"
    ),
]
