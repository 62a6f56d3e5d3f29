"""ROLL's keys for advantages, the loss, KL, corrections of off-policy tokens, and optimizers.

In ROLL an advantage has three parts: how rewards are normalized (by the group, by the batch, not at all), the
estimator, and whether the result is whitened. Corral has a name for each of the sensible combinations.
"""

import math
from dataclasses import dataclass
from typing import Any

from corral.algorithms.advantages import ADVANTAGES
from corral.algorithms.losses import LOSSES
from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, mapped, unsupported
from corral.migrate.roll.pipelines_and_devices import (
    group_size,
    is_agentic,
    is_rlvr,
    kl_where,
    replaced,
    uses_critic,
)
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import format_value

ESTIMATORS = ("gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce")


# --- advantages


def normalized_by(config: ForeignConfig) -> tuple[str | None, str | None]:
    """Whose mean is subtracted from rewards, and whose deviation divides them: group, batch, running, other or none."""
    if is_rlvr(config):
        if config.value("adv_estimator") == "grpo":
            return "group", None if config["reward_shift"] else "group"
        if old := config["reward_norm"]:
            return (None if config["reward_scale"] else old), (None if config["reward_shift"] else old)
        return config["norm_mean_type"], config["norm_std_type"]
    method, grouping = (config.value(f"reward_normalization.{name}") for name in ("method", "grouping"))
    scope = {"traj_group_id": "group", "batch": "batch"}.get(grouping, "other")
    if grouping == "tags" and len(config.value("train_env_manager.tags")) == 1:
        scope = "batch"
    mean, std = {"mean": ("group", None), "identity": (None, None)}.get(method, ("group", "group"))
    if grouping == "batch":
        mean, std = mean and "batch", std and "batch"
    mean = config["reward_normalization.norm_mean_type"] or mean
    std = config["reward_normalization.norm_std_type"] or std
    return (scope if mean == "group" else mean), (scope if std == "group" else std)


@dataclass(frozen=True)
class RollAdvantage:
    name: str
    description: str
    """The advantage as ROLL has it, for the report."""
    difference: str = ""
    """How Corral differs from it. Empty: not at all."""


def advantage(config: ForeignConfig) -> RollAdvantage:
    estimator, white = config.value("adv_estimator"), bool(config.value("whiten_advantages"))
    mean, std = normalized_by(config)
    parts = [f"less the mean of the {mean}"] * bool(mean) + [f"over the deviation of the {std}"] * bool(std)
    rewards = " ".join(parts) or "as they are"
    description = f"{estimator}, rewards {rewards}, {'whitened' if white else 'not whitened'}"
    if uses_critic(config):
        return RollAdvantage("gae", description, "gae takes rewards as they are" if parts else "")
    if estimator == "gigpo":
        is_same = (mean, std) == ("group", "group")
        return RollAdvantage("gigpo", description, "" if is_same else "gigpo divides by the group's deviation")
    if estimator == "step_reinforce" and "group" in (mean, std):
        difference = "turns are compared with the same turn of the group's other trajectories"
        return RollAdvantage("turn_grpo", description, difference)
    other = {"name": "reinforce_plus_plus", "difference": "rewards are not normalized that way"}
    found = config.constants["advantages"].get(" ".join(map(format_value, (mean, std, white))), other)
    return RollAdvantage(found["name"], description, found.get("difference", ""))


def estimator(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found, written = advantage(config), config.value("adv_estimator")
    if ADVANTAGES[found.name].needs.groups and group_size(config) == 1:
        size = "num_return_sequences_in_group" if is_rlvr(config) else "train_env_manager.group_size"
        raise ValueError(
            f"with these rewards compares the samples of a group, and `{size}` is 1: all advantages would be 0"
        )
    ours: dict[Any, Any] = {"algorithm.name": "ppo" if found.name == "gae" else found.name}
    if found.name == "gae":
        ours["algorithm.kl.where"] = kl_where(config)
    discounted = written == "step_reinforce" and config.value("step_reward_gamma") != 1
    if written not in ESTIMATORS or (discounted and "gamma" in ADVANTAGES[found.name].option_names):
        why = "rewards of later turns are not discounted" if discounted else f"Corral has {', '.join(ESTIMATORS)}"
        return replaced(ours, f"{why}; {found.name} takes its place")
    note = f"{found.description}: {found.name}"
    if found.name in ("reinforce", "reinforce_plus_plus") and is_agentic(config) and written != "step_reinforce":
        note += "; a token has the return from there on, in ROLL that of the whole trajectory"
    return converted(ours, note)


def whitens(config: ForeignConfig) -> bool:
    return ADVANTAGES[advantage(config).name].whitened


def turn_weight(config: ForeignConfig, given: ForeignValue) -> Outcome:
    step, episode = config.value("step_reward_weight"), config.value("episode_reward_weight")
    if step <= 0 or episode <= 0:
        raise ValueError("should be above 0, `step_reward_weight` and `episode_reward_weight` alike")
    if episode == 1:
        return mapped("algorithm.advantage.turn_weight", step)
    return replaced(
        {"algorithm.advantage.turn_weight": step / episode}, f"episodes weigh 1, and turns {step / episode:g}"
    )


def discounts(config: ForeignConfig) -> bool:
    has_gamma = "gamma" in ADVANTAGES[advantage(config).name].option_names
    return has_gamma and config.value("adv_estimator") != "agentic_reinforce"


def reward_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    bound, normalized = config.value("reward_clip"), normalized_by(config)
    if not bound:
        return built_in("never, as in Corral")
    if normalized == (None, None):
        return mapped("algorithm.reward_clip", bound)
    size = group_size(config)
    most = (size - 1) / math.sqrt(size)
    if normalized == ("group", "group") and most <= bound:
        return built_in(f"never reached: rewards of a group of {size} are within {most:.3g} deviations of their mean")
    return unsupported("rewards are clipped before they are normalized in Corral")


# --- loss


def uses_variants(config: ForeignConfig) -> bool:
    """Whether the worker is that of ROLL's two kinds that reads `pg_variant`."""
    return "pgworker" in (config["actor_train.worker_cls"] or "").lower().replace("_", "")


def loss(config: ForeignConfig) -> str:
    if uses_variants(config):
        return str(config.constants["variants"].get(config["actor_train.pg_variant"] or "vanilla", "ppo"))
    if is_rlvr(config) and config["use_policy_loss_type"] == "PG":
        return "gpg"
    return "gspo" if is_rlvr(config) and config["importance_sampling"] == "seq" else "ppo"


def clips(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ranged, usual = bool(config["use_pg_clip_range"]), LOSSES[loss(config)].options()
    low, high = (config.value(f"pg_clip_{side}" if ranged else "pg_clip") for side in ("low", "high"))
    if not given.where and (usual.clip_low, usual.clip_high) == (low, high):
        return built_in("as in Corral")
    return clipped(low, high)


def cispo_clips(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return clipped(*(config.value(f"actor_train.cispo_epsilon_{side}") for side in ("low", "high")))


def clipped(low: float, high: float) -> Outcome:
    ours = {"algorithm.loss.clip_low": low, "algorithm.loss.clip_high": high}
    return converted(ours, f"ratios from {1 - low:g} to {1 + high:g}")


def dual_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    clip = config.value("pg_clip")
    if clip <= 0:
        raise ValueError("needs a `pg_clip` above 0")
    return converted({"algorithm.loss.dual_clip": 1 + 2 * clip}, f"1 + 2 x {clip:g}")


def aggregation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    written = config.value("loss_agg_mode").replace("-", "_")
    forced = LOSSES[loss(config)].aggregation
    if forced is not None:
        return (built_in if written == forced else unsupported)(f"the loss {loss(config)} is always {forced}")
    if written != "seq_mean_token_sum_norm":
        return mapped("algorithm.aggregation.name", written)
    length = config.value("sequence_length")
    ours = {"algorithm.aggregation.name": written, "algorithm.aggregation.norm": length}
    return converted(ours, f"divided by the length of a sequence, {length}")


# --- tokens sampled with other weights, or by another engine


def rejection_filters(config: ForeignConfig, given: ForeignValue) -> Outcome:
    rules = [rule for rule in given.value or [] if not isinstance(rule, dict) or rule.get("enabled")]
    if not rules:
        return built_in("off, as in Corral")
    rule = rules[0] if isinstance(rules[0], dict) else {}
    level, low, high = rule.get("agg_type", "token"), rule.get("ratio_low", 0.8), rule.get("ratio_high", 1.2)
    by_ratio = rule.get("ratio_enabled", True) and not rule.get("diff_enabled")
    alone = len(rules) == 1 and not config["train_infer_correction.is_weight.enabled"]
    if not (alone and by_ratio and level in ("token", "sequence")):
        return unsupported("one filter, by the ratio of tokens or trajectories, or weights instead")
    if not all(isinstance(bound, int | float) for bound in (low, high)):
        raise ValueError("should have numbers as ratio_low and ratio_high")
    ours = {"algorithm.correction.name": "rejection", "algorithm.old_logprobs": "recompute"}
    options = {"level": level, "floor": low, "cap": high}
    return converted(ours | {f"algorithm.correction.{key}": value for key, value in options.items()}, "rejection")


# --- optimizers: `training_args` of `actor_train` and of `critic`


def minimum_rate(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    rate = config.value(f"{role}.training_args.learning_rate")
    ratio = given.value / rate if given.key.endswith(".min_lr") else given.value
    if not 0 <= ratio <= 1:
        raise ValueError(f"should be from 0 to the learning rate, {rate:g}")
    return converted({f"{ours}.min_learning_rate_ratio": ratio}, f"{ratio:g} of the learning rate {rate:g}")


def critic_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    own = math.prod(config.value(f"actor_train.training_args.{name}") for name in names)
    if math.prod(config[f"critic.training_args.{name}"] or 1 for name in names) == own:
        return built_in("the critic has the same updates as the model")
    return unsupported(f"the critic has the same updates as the model, of {own} for each device")
