"""ROLL's keys for advantages, the loss, KL, corrections of off-policy tokens, and optimizers.

In ROLL an advantage has three parts: how rewards are normalized (by the group, by the batch, not at all), the
estimator, and whether the result is whitened. Corral has a name for each of the sensible combinations.
"""

import math
from dataclasses import dataclass
from typing import Any

from corral.algorithms.advantages import ADVANTAGES
from corral.algorithms.losses import LOSSES
from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, mapped, no_effect, unsupported
from corral.migrate.roll.pipelines_and_devices import (
    group_size,
    is_agentic,
    is_rlvr,
    kl_in_reward,
    kl_where,
    replaced,
    uses_critic,
    value_of,
)
from corral.migrate.table import ForeignConfig

ESTIMATORS = ("gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce")
NORMALIZED_ADVANTAGES: dict[tuple[str | None, str | None, bool], tuple[str, str]] = {
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
"""By whose mean and deviation, and whether all is whitened, which undoes what the batch's own mean and deviation did:
the advantage, and what Corral does otherwise."""
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
KL_ESTIMATORS = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3"}
VARIANTS = {"ppo": "ppo", "vanilla": "gpg", "cispo": "cispo"}
WEIGHTS = "train_infer_correction.is_weight"
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
NO_WARMUP = "the schedule constant has no warm-up there; constant_with_warmup has"
IN_BOTH = "KL is in the loss or in the reward, not in both: it is in the loss"


# --- advantages


def normalized_by(config: ForeignConfig) -> tuple[str | None, str | None]:
    """Whose mean is subtracted from rewards, and whose deviation divides them: group, batch, running, other or none."""
    if is_rlvr(config):
        if value_of(config, "adv_estimator") == "grpo":
            return "group", None if config["reward_shift"] else "group"
        if old := config["reward_norm"]:
            return (None if config["reward_scale"] else old), (None if config["reward_shift"] else old)
        return config["norm_mean_type"], config["norm_std_type"]
    method, grouping = (value_of(config, f"reward_normalization.{name}") for name in ("method", "grouping"))
    scope = {"traj_group_id": "group", "batch": "batch"}.get(grouping, "other")
    if grouping == "tags" and len(value_of(config, "train_env_manager.tags")) == 1:
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
    estimator, white = value_of(config, "adv_estimator"), bool(value_of(config, "whiten_advantages"))
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
    other = ("reinforce_plus_plus", "rewards are not normalized that way")
    name, difference = NORMALIZED_ADVANTAGES.get((mean, std, white), other)
    return RollAdvantage(name, description, difference)


def estimator(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found, written = advantage(config), value_of(config, "adv_estimator")
    if ADVANTAGES[found.name].needs.groups and group_size(config) == 1:
        size = "num_return_sequences_in_group" if is_rlvr(config) else "train_env_manager.group_size"
        raise ValueError(
            f"with these rewards compares the samples of a group, and `{size}` is 1: all advantages would be 0"
        )
    ours: dict[Any, Any] = {"algorithm.name": "ppo" if found.name == "gae" else found.name}
    if found.name == "gae":
        ours["algorithm.kl.where"] = kl_where(config)
    discounted = written == "step_reinforce" and value_of(config, "step_reward_gamma") != 1
    if written not in ESTIMATORS or (discounted and "gamma" in ADVANTAGES[found.name].option_names):
        why = "rewards of later turns are not discounted" if discounted else f"Corral has {', '.join(ESTIMATORS)}"
        return replaced(ours, f"{why}; {found.name} takes its place")
    note = f"{found.description}: {found.name}"
    if found.name in ("reinforce", "reinforce_plus_plus") and is_agentic(config) and written != "step_reinforce":
        note += "; a token has the return from there on, in ROLL that of the whole trajectory"
    return converted(ours, note)


def normalization(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = advantage(config)
    if given.value == "asym_clip":
        return unsupported("advantages are clipped alike on both sides: `algorithm.advantage_clip`")
    if found.difference:
        is_named = found.name == value_of(config, "adv_estimator")
        return unsupported(found.difference if is_named else f"{found.difference}; {found.name} takes its place")
    return built_in(f"part of the advantage {found.name}")


def rlvr_normalization(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_agentic(config):
        return no_effect("the agentic pipeline has `reward_normalization`")
    if value_of(config, "adv_estimator") == "grpo" and given.key != "reward_shift":
        return no_effect("grpo normalizes by the group in any case")
    return normalization(config, given)


def whitening(config: ForeignConfig, given: ForeignValue) -> Outcome:
    name = advantage(config).name
    whitens = ADVANTAGES[name].whitened
    if bool(given.value) == whitens:
        return built_in(f"part of the advantage {name}" if whitens else f"{name} does not")
    if given.value:
        return mapped("algorithm.whiten", True)
    return unsupported("gae is whitened in any case") if name == "gae" else normalization(config, given)


def turn_gamma(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if advantage(config).name in ("gigpo", "turn_grpo"):
        return mapped("algorithm.advantage.turn_gamma", value_of(config, "step_reward_gamma"))
    if value_of(config, "adv_estimator") == "step_reinforce":
        return built_in("see `adv_estimator`")
    return no_effect("it belongs to gigpo and step_reinforce")


def turn_weight(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if advantage(config).name != "gigpo":
        return no_effect("it belongs to gigpo")
    step, episode = value_of(config, "step_reward_weight"), value_of(config, "episode_reward_weight")
    if step <= 0 or episode <= 0:
        raise ValueError("should be above 0, `step_reward_weight` and `episode_reward_weight` alike")
    if episode == 1:
        return mapped("algorithm.advantage.turn_weight", step)
    return replaced(
        {"algorithm.advantage.turn_weight": step / episode}, f"episodes weigh 1, and turns {step / episode:g}"
    )


def gamma(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, 1):
        return built_in("1, as in Corral")
    name = advantage(config).name
    if "gamma" in ADVANTAGES[name].option_names and value_of(config, "adv_estimator") != "agentic_reinforce":
        return mapped("algorithm.advantage.gamma", given.value)
    return unsupported(f"{name} does not discount")


def reward_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    bound, normalized = value_of(config, "reward_clip"), normalized_by(config)
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
        return VARIANTS.get(config["actor_train.pg_variant"] or "vanilla", "ppo")
    if is_rlvr(config) and config["use_policy_loss_type"] == "PG":
        return "gpg"
    return "gspo" if is_rlvr(config) and config["importance_sampling"] == "seq" else "ppo"


def variant(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not uses_variants(config):
        return no_effect("only ROLL's ActorPGWorker reads it")
    if given.value not in VARIANTS:
        return unsupported(f"Corral has {', '.join(VARIANTS)} of these; ppo takes its place")
    return mapped("algorithm.loss.name", VARIANTS[given.value])


def worker_class(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if uses_variants(config):
        return mapped("algorithm.loss.name", loss(config), "by `actor_train.pg_variant`")
    if given.value is None or given.value.startswith("roll."):
        return built_in("Corral's own trainer")
    return unsupported("code of yours that computes the loss: losses are functions in corral/algorithms")


def loss_choice(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The loss that `importance_sampling` and `use_policy_loss_type` choose in the RLVR pipeline."""
    if is_agentic(config):
        return no_effect("the agentic pipeline has the ratio of single tokens")
    if uses_variants(config):
        return no_effect("`actor_train.pg_variant` takes precedence")
    return mapped("algorithm.loss.name", loss(config)) if loss(config) != "ppo" else built_in("ppo, as in Corral")


def clips(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found, ranged = loss(config), bool(config["use_pg_clip_range"])
    if found not in ("ppo", "gspo"):
        return no_effect(f"the loss {found} has other bounds, or none")
    if given.key == "pg_clip" and ranged:
        return no_effect("`pg_clip_low` and `pg_clip_high` take precedence")
    if given.key in ("pg_clip_low", "pg_clip_high") and not ranged:
        return no_effect("`use_pg_clip_range` is off")
    low, high = (value_of(config, f"pg_clip_{side}" if ranged else "pg_clip") for side in ("low", "high"))
    usual = LOSSES[found].options()
    if not given.where and (usual.clip_low, usual.clip_high) == (low, high):
        return built_in("as in Corral")
    return clipped(low, high)


def cispo_clips(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if loss(config) != "cispo":
        return no_effect("it belongs to `pg_variant: cispo`")
    return clipped(*(value_of(config, f"actor_train.cispo_epsilon_{side}") for side in ("low", "high")))


def clipped(low: float, high: float) -> Outcome:
    ours = {"algorithm.loss.clip_low": low, "algorithm.loss.clip_high": high}
    return converted(ours, f"ratios from {1 - low:g} to {1 + high:g}")


def dual_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    if loss(config) != "ppo":
        return no_effect(f"the loss {loss(config)} has none")
    clip = value_of(config, "pg_clip")
    if clip <= 0:
        raise ValueError("needs a `pg_clip` above 0")
    return converted({"algorithm.loss.dual_clip": 1 + 2 * clip}, f"1 + 2 x {clip:g}")


def aggregation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    written = AGGREGATIONS[value_of(config, "loss_agg_mode")]
    forced = LOSSES[loss(config)].aggregation
    if forced is not None:
        return (built_in if written == forced else unsupported)(f"the loss {loss(config)} is always {forced}")
    if written != "seq_mean_token_sum_norm":
        return mapped("algorithm.aggregation.name", written)
    length = value_of(config, "sequence_length")
    ours = {"algorithm.aggregation.name": written, "algorithm.aggregation.norm": length}
    return converted(ours, f"divided by the length of a sequence, {length}")


# --- KL


def kl_loss(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    if kl_where(config) != "loss":
        return no_effect("`kl_loss_coef` is 0")
    return mapped("algorithm.kl.where", "loss", "k3, as in ROLL")


def kl_loss_coefficient(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) != "loss":
        return no_effect("`use_kl_loss` is off") if given.value else built_in("0, as in Corral")
    return mapped("algorithm.kl.coefficient", given.value)


def kl_reward(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    if not kl_in_reward(config):
        return no_effect("`init_kl_coef` is 0")
    return unsupported(IN_BOTH) if kl_where(config) == "loss" else mapped("algorithm.kl.where", "reward")


def kl_coefficient(config: ForeignConfig, given: ForeignValue) -> Outcome:
    value = value_of(config, "init_kl_coef")
    if value == 0:
        return built_in("0, as in Corral")
    if not kl_in_reward(config):
        return no_effect("ROLL subtracts it from the reward only with `add_token_level_kl`")
    if kl_where(config) == "loss":
        return unsupported(IN_BOTH)
    return converted(
        {"algorithm.kl.where": "reward", "algorithm.kl.coefficient": value}, f"{value:g}, subtracted from the reward"
    )


def kl_estimator(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) != "reward":
        return no_effect("there is no KL in the reward; in the loss it is k3")
    if given.value not in KL_ESTIMATORS:
        return unsupported(f"Corral has {', '.join(KL_ESTIMATORS)}; k1 takes its place")
    return mapped("algorithm.kl.estimator.name", KL_ESTIMATORS[given.value])


def kl_target(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("a fixed coefficient, as in Corral")
    if kl_where(config) != "reward":
        return no_effect("no KL in the reward")
    ours = {"algorithm.kl.controller.name": "adaptive", "algorithm.kl.controller.target": given.value}
    return converted(ours, f"the coefficient follows the KL, to {given.value:g}")


def kl_horizon(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) != "reward" or not config["target_kl"]:
        return no_effect("it belongs to `target_kl`")
    return mapped("algorithm.kl.controller.horizon", given.value)


# --- tokens sampled with other weights, or by another engine


def importance_weights(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral where rollouts have the newest weights")
    kind = value_of(config, f"{WEIGHTS}.weight_type")
    if kind not in ("token", "sequence"):
        return unsupported("tokens or whole trajectories are weighted in Corral")
    return corrected(f"{kind}_tis")


def corrected(name: str, **options: Any) -> Outcome:
    ours = {"algorithm.correction.name": name, "algorithm.old_logprobs": "recompute"}
    return converted(ours | {f"algorithm.correction.{key}": value for key, value in options.items()}, name)


def weight_bound(config: ForeignConfig, given: ForeignValue) -> Outcome:
    is_known = value_of(config, f"{WEIGHTS}.weight_type") in ("token", "sequence")
    if not config[f"{WEIGHTS}.enabled"] or not is_known:
        return no_effect("weights are off")
    if not (bound := value_of(config, f"{WEIGHTS}.upper_bound")):
        return unsupported("weights have a bound in Corral")
    return mapped("algorithm.correction.cap", bound)


def rejection_filters(config: ForeignConfig, given: ForeignValue) -> Outcome:
    rules = [rule for rule in given.value or [] if not isinstance(rule, dict) or rule.get("enabled")]
    if not rules:
        return built_in("off, as in Corral")
    rule = rules[0] if isinstance(rules[0], dict) else {}
    level, low, high = rule.get("agg_type", "token"), rule.get("ratio_low", 0.8), rule.get("ratio_high", 1.2)
    by_ratio = rule.get("ratio_enabled", True) and not rule.get("diff_enabled")
    alone = len(rules) == 1 and not config[f"{WEIGHTS}.enabled"]
    if not (alone and by_ratio and level in ("token", "sequence")):
        return unsupported("one filter, by the ratio of tokens or trajectories, or weights instead")
    if not all(isinstance(bound, int | float) for bound in (low, high)):
        raise ValueError("should have numbers as ratio_low and ratio_high")
    return corrected("rejection", level=level, floor=low, cap=high)


def ratio_mask(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    if config[f"{WEIGHTS}.enabled"]:
        return unsupported("tokens are weighted or left out, not both: they are weighted")
    low, high = (value_of(config, f"train_infer_ratio_threshold_{side}") for side in ("low", "high"))
    return corrected("rejection", level="token", floor=low, cap=high)


# --- optimizers: `training_args` of `actor_train` and of `critic`


def never_warms_up(config: ForeignConfig, role: str) -> bool:
    is_megatron = config["actor_train.strategy_args.strategy_name"] == "megatron_train"
    return value_of(config, f"{role}.training_args.lr_scheduler_type") == "constant" and not is_megatron


def warmup_steps(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    steps = value_of(config, f"{role}.training_args.warmup_steps")
    if never_warms_up(config, role):
        return no_effect(NO_WARMUP)
    if steps == 0 and config[f"{role}.training_args.warmup_ratio"]:
        return built_in("see `warmup_ratio`")
    return mapped(f"{ours}.warmup_steps", steps, "both count updates")


def warmup_ratio(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    if never_warms_up(config, role):
        return no_effect(NO_WARMUP)
    if steps := value_of(config, f"{role}.training_args.warmup_steps"):
        return no_effect(f"`warmup_steps`, {steps}, takes precedence")
    return mapped(f"{ours}.warmup_ratio", given.value or None)


def schedule(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    kind = value_of(config, f"{role}.training_args.lr_scheduler_type")
    if kind == "cosine_with_min_lr":
        return mapped(f"{ours}.schedule", "cosine", "with `lr_scheduler_kwargs`")
    if kind not in SCHEDULES:
        return unsupported(f"Corral has {', '.join(SCHEDULES)} and cosine_with_min_lr")
    return mapped(f"{ours}.schedule", SCHEDULES[kind])


def minimum_rate(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    if config[f"{role}.training_args.lr_scheduler_type"] != "cosine_with_min_lr":
        return no_effect("it belongs to `lr_scheduler_type: cosine_with_min_lr`")
    rate = value_of(config, f"{role}.training_args.learning_rate")
    ratio = given.value / rate if given.key.endswith(".min_lr") else given.value
    if not 0 <= ratio <= 1:
        raise ValueError(f"should be from 0 to the learning rate, {rate:g}")
    return converted({f"{ours}.min_learning_rate_ratio": ratio}, f"{ratio:g} of the learning rate {rate:g}")


def betas(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    pair = [value_of(config, f"{role}.training_args.adam_beta{place}") for place in (1, 2)]
    return converted({f"{ours}.betas": pair}, f"betas {pair[0]:g} and {pair[1]:g}")


def gradient_norm(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value == 0:
        return converted({"optimizer.max_gradient_norm": 1e9}, "0, never clipped: a bound that no gradient reaches")
    return mapped("optimizer.max_gradient_norm", given.value)


def critic_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    own = math.prod(value_of(config, f"actor_train.training_args.{name}") for name in names)
    if math.prod(config[f"critic.training_args.{name}"] or 1 for name in names) == own:
        return built_in("the critic has the same updates as the model")
    return unsupported(f"the critic has the same updates as the model, of {own} for each device")
