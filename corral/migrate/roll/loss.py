"""ROLL's keys for the loss: what is clipped, how it is summed up, KL, and what was drawn by other weights."""

from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    anything,
    boolean,
    built_in,
    converted,
    mapped,
    no_effect,
    text,
    unsupported,
)
from corral.migrate.roll.facts import (
    amount,
    choice,
    count,
    is_rlvr,
    kl_in_reward,
    kl_where,
    taken,
)
from corral.migrate.table import Convert, ForeignConfig, lacking, needless, only, same, turned
from corral.recipe.presets import CLIPS, FORCED_AGGREGATION

CORRECTION = "train_infer_correction.is_weight"
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
ESTIMATES = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3"}
VARIANTS = {"ppo": "ppo", "vanilla": "gpg", "cispo": "cispo"}


# --- the loss


def loss(config: ForeignConfig) -> str:
    if uses_variants(config):
        return VARIANTS.get(config["actor_train.pg_variant"] or "vanilla", "ppo")
    if is_rlvr(config) and config["use_policy_loss_type"] == "PG":
        return "gpg"
    return "gspo" if is_rlvr(config) and config["importance_sampling"] == "seq" else "ppo"


def uses_variants(config: ForeignConfig) -> bool:
    """ROLL has two kinds of workers, and only this one looks at the variant."""
    return "pgworker" in (config["actor_train.worker_cls"] or "").lower().replace("_", "")


def variant(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not uses_variants(config):
        return no_effect("only ROLL's ActorPGWorker looks at it")
    if given.value not in VARIANTS:
        return unsupported(f"Corral has {', '.join(VARIANTS)} of these; ppo takes its place")
    return mapped("algorithm.loss", VARIANTS[given.value])


def worker_class(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if uses_variants(config):
        return mapped("algorithm.loss", loss(config), "by `actor_train.pg_variant`")
    if given.value is None or given.value.startswith("roll."):
        return built_in("Corral's own trainer")
    return unsupported("code of yours that computes the loss: losses are functions in corral/algorithms")


def loss_choice(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """`importance_sampling`, `use_policy_loss_type`."""
    if not is_rlvr(config):
        return no_effect("games have the ratio of single tokens")
    if uses_variants(config):
        return no_effect("`actor_train.pg_variant` goes before it")
    return mapped("algorithm.loss", loss(config)) if loss(config) != "ppo" else built_in("ppo, as in Corral")


def clips(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = loss(config)
    if found not in ("ppo", "gspo"):
        return no_effect(f"the loss {found} has other bounds, or none")
    ranged = bool(config["use_pg_clip_range"])
    if given.key == "pg_clip" and ranged:
        return no_effect("`pg_clip_low` and `pg_clip_high` go before it")
    if given.key in ("pg_clip_low", "pg_clip_high") and not ranged:
        return no_effect("`use_pg_clip_range` is off")
    low, high = (taken(config, f"pg_clip_{side}" if ranged else "pg_clip") for side in ("low", "high"))
    if not given.where and CLIPS[found] == (low, high):  # type: ignore[index]
        return built_in("as in Corral")
    return converted(
        {"algorithm.clip_low": low, "algorithm.clip_high": high}, f"ratios from {1 - low:g} to {1 + high:g}"
    )


def cispo_clips(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if loss(config) != "cispo":
        return no_effect("it belongs to `pg_variant: cispo`")
    low, high = (taken(config, f"actor_train.cispo_epsilon_{side}") for side in ("low", "high"))
    return converted(
        {"algorithm.clip_low": low, "algorithm.clip_high": high}, f"ratios from {1 - low:g} to {1 + high:g}"
    )


def dual_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value or loss(config) != "ppo":
        return built_in("off, as in Corral") if not given.value else no_effect(f"the loss {loss(config)} has none")
    clip = taken(config, "pg_clip")
    if clip <= 0:
        raise ValueError("needs a `pg_clip` above 0")
    return converted({"algorithm.dual_clip": 1 + 2 * clip}, f"1 + 2 x {clip:g}")


def aggregation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    written = AGGREGATIONS[taken(config, "loss_agg_mode")]
    forced = FORCED_AGGREGATION.get(loss(config))  # type: ignore[call-overload]
    if forced is not None:
        note = f"the loss {loss(config)} is always {forced}"
        return built_in(note) if written == forced else unsupported(note)
    if written != "seq_mean_token_sum_norm":
        return mapped("algorithm.aggregation", written)
    length = taken(config, "sequence_length")
    ours = {"algorithm.aggregation": written, "algorithm.aggregation_norm": length}
    return converted(ours, f"divided by the length of a sequence, {length}")


def old_logprobs(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value:
        return mapped("algorithm.old_logprobs", "recompute")
    return built_in("those with which the tokens were drawn, where these are the newest weights'")


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
    if kl_where(config) == "loss":
        return unsupported("KL is in the loss or in the reward, not in both: it is in the loss")
    return mapped("algorithm.kl.where", "reward")


def kl_coefficient(config: ForeignConfig, given: ForeignValue) -> Outcome:
    value = taken(config, "init_kl_coef")
    if value == 0:
        return built_in("0, as in Corral")
    if not kl_in_reward(config):
        return no_effect("ROLL takes it off the reward only with `add_token_level_kl`")
    if kl_where(config) == "loss":
        return unsupported("KL is in the loss or in the reward, not in both: it is in the loss")
    return converted({"algorithm.kl.where": "reward", "algorithm.kl.coefficient": value}, f"{value:g}, off the reward")


def kl_estimate(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) != "reward":
        return no_effect("there is no KL in the reward; in the loss it is k3")
    if given.value not in ESTIMATES:
        return unsupported(f"Corral has {', '.join(ESTIMATES)}; k1 takes its place")
    return mapped("algorithm.kl.estimator", ESTIMATES[given.value])


def kl_target(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) != "reward" or not given.value:
        return built_in("a fixed coefficient, as in Corral") if not given.value else no_effect("no KL in the reward")
    ours = {"algorithm.kl.controller": "adaptive", "algorithm.kl.target": given.value}
    return converted(ours, f"the coefficient follows the KL, to {given.value:g}")


def kl_horizon(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) != "reward" or not config["target_kl"]:
        return no_effect("it belongs to `target_kl`")
    return mapped("algorithm.kl.horizon", given.value)


# --- what was drawn by other weights, or another engine


def weights(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral where the newest weights play")
    kind = taken(config, f"{CORRECTION}.weight_type")
    if kind not in ("token", "sequence"):
        return unsupported("tokens or whole trajectories are weighed in Corral")
    return corrected(f"{kind}_tis")


def corrected(name: str, **more: Any) -> Outcome:
    ours = {"algorithm.correction.name": name, "algorithm.old_logprobs": "recompute"}
    return converted({**ours, **{f"algorithm.correction.{key}": value for key, value in more.items()}}, name)


def weight_bound(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not config[f"{CORRECTION}.enabled"] or taken(config, f"{CORRECTION}.weight_type") not in ("token", "sequence"):
        return no_effect("weights are off")
    if not (bound := taken(config, f"{CORRECTION}.upper_bound")):
        return unsupported("weights have a bound in Corral")
    return mapped("algorithm.correction.cap", bound)


def filters(config: ForeignConfig, given: ForeignValue) -> Outcome:
    rules = [rule for rule in given.value or [] if not isinstance(rule, dict) or rule.get("enabled")]
    if not rules:
        return built_in("off, as in Corral")
    rule = rules[0] if isinstance(rules[0], dict) else {}
    level, low, high = rule.get("agg_type", "token"), rule.get("ratio_low", 0.8), rule.get("ratio_high", 1.2)
    by_ratio = rule.get("ratio_enabled", True) and not rule.get("diff_enabled")
    alone = len(rules) == 1 and not config[f"{CORRECTION}.enabled"]
    if not (alone and by_ratio and level in ("token", "sequence")):
        return unsupported("one filter, by the ratio of tokens or trajectories, or weights instead")
    if not all(isinstance(bound, int | float) for bound in (low, high)):
        raise ValueError("should have numbers as ratio_low and ratio_high")
    return corrected("rejection", level=level, floor=low, cap=high)


def ratio_mask(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    if config[f"{CORRECTION}.enabled"]:
        return unsupported("tokens are weighed or left out, not both: they are weighed")
    low, high = (taken(config, f"train_infer_ratio_threshold_{side}") for side in ("low", "high"))
    return corrected("rejection", level="token", floor=low, cap=high)


def belongs_to(key: str) -> Convert:
    return lambda *_: built_in(f"`{key}` says what became of it")


ROWS = [
    turned("actor_train.worker_cls", text, worker_class),
    turned("actor_train.pg_variant", text, variant),
    turned("importance_sampling", choice("token", "seq"), loss_choice),
    turned("use_policy_loss_type", choice("PPO", "PG"), loss_choice),
    turned("pg_clip", amount, clips, 0.2),
    turned("use_pg_clip_range", boolean, clips),
    turned("pg_clip_low", amount, clips, 0.2),
    turned("pg_clip_high", amount, clips, 0.2),
    turned("actor_train.cispo_epsilon_low", amount, cispo_clips, 0.1),
    turned("actor_train.cispo_epsilon_high", amount, cispo_clips, 0.1),
    lacking("actor_train.cispo_use_unified_mask", "cispo leaves no token out"),
    *[
        needless(f"actor_train.{key}", "`pg_variant` says what became of it")
        for key in ("tis_lower_bound", "tis_upper_bound", "topr_positive_weight", "topr_negative_weight", "kimi15_tau")
    ],
    turned("dual_clip_loss", boolean, dual_clip),
    turned("loss_agg_mode", choice(*AGGREGATIONS), aggregation, "seq-mean-token-mean"),
    same("entropy_loss_coef", "algorithm.entropy_coefficient", amount),
    turned("enable_old_logprobs_recompute", boolean, old_logprobs),
    needless("force_disable_old_logprobs_recompute", "those with which the tokens were drawn, where that is the same"),
    needless("enable_reference", "there is a reference model where there is KL"),
    turned("use_kl_loss", boolean, kl_loss, False),
    turned("kl_loss_coef", amount, kl_loss_coefficient, 0.0),
    turned("add_token_level_kl", boolean, kl_reward),
    turned("init_kl_coef", amount, kl_coefficient, 0.0),
    turned("kl_penalty", choice("kl", "abs", "mse", "k3", "full"), kl_estimate),
    turned("target_kl", amount, kl_target),
    turned("kl_horizon", count, kl_horizon),
    turned(f"{CORRECTION}.enabled", boolean, weights),
    turned(
        f"{CORRECTION}.weight_type",
        choice("token", "segment", "geometric", "sequence"),
        belongs_to(f"{CORRECTION}.enabled"),
        "token",
    ),
    turned(f"{CORRECTION}.upper_bound", amount, weight_bound, 1.2),
    only(
        f"{CORRECTION}.detach", boolean, (True,), "weights have no gradient, as in Corral", "weights have no gradient"
    ),
    turned("train_infer_correction.filters", anything, filters),
    turned("train_infer_ratio_mask", boolean, ratio_mask),
    turned("train_infer_ratio_threshold_low", amount, belongs_to("train_infer_ratio_mask"), 0.8),
    turned("train_infer_ratio_threshold_high", amount, belongs_to("train_infer_ratio_mask"), 1.2),
]
