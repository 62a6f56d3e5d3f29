"""verl's algorithm: advantages, losses, dynamic sampling, and what long answers cost."""

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    boolean,
    built_in,
    converted,
    integer,
    mapped,
    no_effect,
    number,
    text,
    unsupported,
)
from corral.migrate.table import Convert, ForeignConfig, KeyRow, idle, lacking, needless, provided, same, turned
from corral.migrate.verl.batch import ACTOR, response_tokens, samples
from corral.recipe.presets import CLIPS, DPPO_THRESHOLDS, FORCED_AGGREGATION, GROUP_BASELINES, PRESETS
from corral.recipe.schema import AlgorithmName, LossName

ESTIMATORS: dict[str, AlgorithmName] = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "grpo_passk",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
}
"""Our presets with these advantages; a loss of another kind is written beside."""
LOSSES: dict[str, LossName] = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "dro": "dro",
}
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OVERLONG_PLACES = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
    "custom_reward_function.overlong_buffer",
)


# --- advantage and loss


def advantage(config: ForeignConfig, given: ForeignValue) -> Outcome:
    name = ESTIMATORS.get(given.value)
    if name is None:
        return unsupported(f"the recipe has grpo instead; Corral has {', '.join(ESTIMATORS)}")
    if PRESETS[name].advantage in GROUP_BASELINES and samples(config) == 1:
        raise ValueError("compares the samples of a prompt, and there is one: give `rollout.n` (`n_agent`) at least 2")
    return mapped("algorithm.name", name)


def without_deviation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    estimator = config["algorithm.adv_estimator"]
    if estimator not in ("grpo", "grpo_vectorized", "grpo_passk"):
        return no_effect(f"the estimator {estimator} does not read it")
    if given.value in (True, None):
        return built_in("as in Corral")
    if estimator == "grpo_passk":
        return unsupported("grpo_passk always divides by the deviation")
    return converted({"algorithm.advantage": "dr_grpo"}, "rewards are not divided by their deviation: dr_grpo")


def loss_of(config: ForeignConfig) -> LossName:
    return LOSSES.get(config[f"{ACTOR}.policy_loss.loss_mode"], "ppo")


def loss(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = LOSSES.get(given.value)
    usual = PRESETS[ESTIMATORS.get(config["algorithm.adv_estimator"], "grpo")].loss
    if ours is None:
        return unsupported(f"the recipe has {usual} instead; Corral has {', '.join(LOSSES)}")
    return built_in("as in Corral") if ours == usual else mapped("algorithm.loss", ours)


def clip_of(config: ForeignConfig, side: str) -> float:
    """`clip_ratio` where nothing is said of this side."""
    own, both = f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio"
    value: float = config[own] if own in config or both not in config else config[both]
    return 0.2 if value is None else value


def clip(side: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        return clipped(config, given, [side])

    return convert


def clip_both(config: ForeignConfig, given: ForeignValue) -> Outcome:
    open_sides = [side for side in ("low", "high") if f"{ACTOR}.clip_ratio_{side}" not in config]
    if not open_sides or given.value is None:
        return no_effect("`clip_ratio_low` and `clip_ratio_high` decide")
    found = clipped(config, given, open_sides)
    if found.status != "mapped" or config.table.row("do_search"):
        return found
    unread = "verl reads it where `clip_ratio_low` and `clip_ratio_high` are null only, and else clips at 0.2"
    return converted(found.ours, f"{given.value:g} on either side; {unread}")


def clipped(config: ForeignConfig, given: ForeignValue, sides: list[str]) -> Outcome:
    ours = loss_of(config)
    if ours in DPPO_THRESHOLDS:
        low, high = clip_of(config, "low"), clip_of(config, "high")
        if low != high:
            return unsupported(f"{ours} has one threshold, for probabilities that fall and that rise")
        return converted({"algorithm.dppo_threshold": low}, f"the threshold of {ours}: {low:g}")
    if ours not in CLIPS:
        return no_effect(f"the loss {ours} does not clip")
    usual = dict(zip(("low", "high"), CLIPS[ours], strict=True))
    values = {side: clip_of(config, side) for side in sides}
    kept = {side: value for side, value in values.items() if given.where or value != usual[side]}
    return Outcome("mapped", {("algorithm", f"clip_{side}"): value for side, value in kept.items()})


def dual_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = loss_of(config)
    if ours in DPPO_THRESHOLDS and given.where and given.value is not None:
        words = f"the ratio in {ours} is capped at 20"
        return built_in(words) if given.value >= 20 else unsupported(words)
    if ours != "ppo":
        return no_effect(f"the loss {ours} has no dual clip")
    return mapped("algorithm.dual_clip", given.value)


def aggregation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = loss_of(config)
    if ours in FORCED_AGGREGATION:
        return no_effect(f"the loss {ours} is always a mean over sequences")
    if given.value not in (*AGGREGATIONS, None):
        raise ValueError(f"should be one of {', '.join(AGGREGATIONS)}")
    return mapped("algorithm.aggregation", given.value and given.value.replace("-", "_"))


def token_level(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Before there was `loss_agg_mode`."""
    return mapped("algorithm.aggregation", "seq_mean_token_mean" if given.value is False else "token_mean")


def aggregation_norm(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if loss_of(config) in FORCED_AGGREGATION or config[f"{ACTOR}.loss_agg_mode"] != "seq-mean-token-sum-norm":
        return no_effect("it belongs to `loss_agg_mode=seq-mean-token-sum-norm`")
    return mapped("algorithm.aggregation_norm", given.value)


def of_loss(key: str, ours: str, *names: str) -> KeyRow:
    """A number of one loss."""
    words = f"the loss is not {' or '.join(names)}"
    return provided(same(f"{ACTOR}.{key}", ours, number), lambda config: loss_of(config) in names, words)


def discount(ours: str, *estimators: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if config["algorithm.adv_estimator"] not in estimators:
            return no_effect(f"the estimator {config['algorithm.adv_estimator']} does not read it")
        return mapped(ours, given.value)

    return convert


# --- dynamic sampling and long answers


def dynamic_sampling(config: ForeignConfig) -> bool:
    return bool(config["algorithm.filter_groups.enable"]) and samples(config) > 1


def filter_groups(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    if samples(config) == 1:
        return no_effect("verl keeps groups of one sample")
    return mapped("algorithm.dynamic_sampling.enabled", True)


def filter_metric(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in ("acc", "score", "reward", "seq_reward", "seq_final_reward", "train_reward", None):
        return built_in("groups are compared by the reward function's reward")
    return unsupported("groups are compared by reward")


def filter_rounds(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 0:
        return built_in("no limit there; 10 rounds here")
    return mapped("algorithm.dynamic_sampling.max_rounds", given.value)


def reward_manager(config: ForeignConfig) -> str:
    keys = ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
    return next((config[key] for key in keys if key in config), "naive")


def not_overlong(config: ForeignConfig, place: str) -> str | None:
    """Why length costs nothing; None: it does."""
    if reward_manager(config) != "dapo":
        return "the reward manager is not dapo"
    off = [key for key in ("enable", "len", "penalty_factor") if not config[f"{place}.{key}"]]
    return f"`{off[0]}` is {'off' if off[0] == 'enable' else 0}" if off else None


def overlong_rows(place: str) -> tuple[KeyRow, ...]:
    def buffer(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if why := not_overlong(config, place):
            return no_effect(why)
        tokens = config[f"{place}.len"]
        if tokens > response_tokens(config):
            raise ValueError(f"is more than the {response_tokens(config)} tokens of a response")
        return mapped("algorithm.overlong.buffer_tokens", tokens)

    def penalty(config: ForeignConfig, given: ForeignValue) -> Outcome:
        why = not_overlong(config, place)
        return no_effect(why) if why else mapped("algorithm.overlong.penalty", given.value)

    return (
        turned(f"{place}.enable", boolean, buffer),
        turned(f"{place}.len", integer, buffer),
        turned(f"{place}.penalty_factor", number, penalty, 1.0),
        needless(f"{place}.log", "rewards and lengths are always logged"),
    )


def longest_response(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, response_tokens(config)):
        return built_in("the limit of a response")
    return unsupported(f"the length penalty ends at the limit of a response, {response_tokens(config)} tokens")


# --- rows

ALGORITHM = (
    turned("algorithm.adv_estimator", text, advantage, "gae"),
    turned("algorithm.norm_adv_by_std_in_grpo", boolean, without_deviation, True),
    turned("algorithm.gamma", number, discount("algorithm.gamma", "gae", "reinforce_plus_plus")),
    turned("algorithm.lam", number, discount("algorithm.lam", "gae")),
    turned(f"{ACTOR}.policy_loss.loss_mode", text, loss, "vanilla"),
    turned(f"{ACTOR}.clip_ratio", number, clip_both),
    turned(f"{ACTOR}.clip_ratio_low", number, clip("low"), 0.2),
    turned(f"{ACTOR}.clip_ratio_high", number, clip("high"), 0.2),
    turned(f"{ACTOR}.clip_ratio_c", number, dual_clip, 3.0),
    of_loss("tau_pos", "algorithm.sapo_tau_positive", "sapo"),
    of_loss("tau_neg", "algorithm.sapo_tau_negative", "sapo"),
    of_loss("policy_loss.dro_beta", "algorithm.dro_beta", "dro"),
    *(
        idle(f"{ACTOR}.policy_loss.{key}", "of the losses clip_cov and kl_cov, which Corral lacks")
        for key in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    ),
    turned(f"{ACTOR}.loss_agg_mode", text, aggregation),
    turned(f"{ACTOR}.loss_scale_factor", number, aggregation_norm),
    provided(
        turned(f"{ACTOR}.use_token_level_loss", boolean, token_level),
        lambda config: loss_of(config) not in FORCED_AGGREGATION,
        "the loss is always a mean over sequences",
    ),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", number, 0.0),
    turned("algorithm.filter_groups.enable", boolean, filter_groups, False),
    provided(turned("algorithm.filter_groups.metric", text, filter_metric), dynamic_sampling, "`enable` is off"),
    provided(
        turned("algorithm.filter_groups.max_num_gen_batches", integer, filter_rounds),
        dynamic_sampling,
        "`enable` is off",
    ),
    needless("algorithm.filter_groups.max_inflight_gen_batches", "as many prompts are played again as are missing"),
    *(row for place in OVERLONG_PLACES for row in overlong_rows(place)),
    *(turned(f"{root}.reward_kwargs.max_resp_len", integer, longest_response) for root in ("reward", "reward_model")),
    lacking("algorithm.use_pf_ppo", "Corral does not draw samples again by their reward"),
)
