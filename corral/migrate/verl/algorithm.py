"""verl's algorithm: advantages, losses, dynamic sampling, and what long answers cost."""

from corral.migrate.table import (
    Convert,
    Given,
    Outcome,
    Reading,
    Row,
    built_in,
    converted,
    idle,
    lacking,
    mapped,
    needless,
    no_effect,
    number,
    same,
    text,
    truth,
    turned,
    unsupported,
    whole,
)
from corral.migrate.verl.batch import ACTOR, provided, response_tokens, samples
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


def advantage(reading: Reading, given: Given) -> Outcome:
    name = ESTIMATORS.get(given.value)
    if name is None:
        return unsupported(f"the recipe has grpo instead; Corral has {', '.join(ESTIMATORS)}")
    if PRESETS[name].advantage in GROUP_BASELINES and samples(reading) == 1:
        raise ValueError("compares the samples of a prompt, and there is one: give `rollout.n` (`n_agent`) at least 2")
    return mapped("algorithm.name", name)


def without_deviation(reading: Reading, given: Given) -> Outcome:
    estimator = reading["algorithm.adv_estimator"]
    if estimator not in ("grpo", "grpo_vectorized", "grpo_passk"):
        return no_effect(f"the estimator {estimator} does not read it")
    if given.value in (True, None):
        return built_in("as in Corral")
    if estimator == "grpo_passk":
        return unsupported("grpo_passk always divides by the deviation")
    return converted({"algorithm.advantage": "dr_grpo"}, "rewards are not divided by their deviation: dr_grpo")


def loss_of(reading: Reading) -> LossName:
    return LOSSES.get(reading[f"{ACTOR}.policy_loss.loss_mode"], "ppo")


def loss(reading: Reading, given: Given) -> Outcome:
    ours = LOSSES.get(given.value)
    usual = PRESETS[ESTIMATORS.get(reading["algorithm.adv_estimator"], "grpo")].loss
    if ours is None:
        return unsupported(f"the recipe has {usual} instead; Corral has {', '.join(LOSSES)}")
    return built_in("as in Corral") if ours == usual else mapped("algorithm.loss", ours)


def clip_of(reading: Reading, side: str) -> float:
    """`clip_ratio` where nothing is said of this side."""
    own, both = f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio"
    value: float = reading[own] if own in reading or both not in reading else reading[both]
    return 0.2 if value is None else value


def clip(side: str) -> Convert:
    def convert(reading: Reading, given: Given) -> Outcome:
        return clipped(reading, given, [side])

    return convert


def clip_both(reading: Reading, given: Given) -> Outcome:
    open_sides = [side for side in ("low", "high") if f"{ACTOR}.clip_ratio_{side}" not in reading]
    if not open_sides or given.value is None:
        return no_effect("`clip_ratio_low` and `clip_ratio_high` decide")
    found = clipped(reading, given, open_sides)
    if found.status != "mapped" or reading.table.row("do_search"):
        return found
    unread = "verl reads it where `clip_ratio_low` and `clip_ratio_high` are null only, and else clips at 0.2"
    return converted(found.ours, f"{given.value:g} on either side; {unread}")


def clipped(reading: Reading, given: Given, sides: list[str]) -> Outcome:
    ours = loss_of(reading)
    if ours in DPPO_THRESHOLDS:
        low, high = clip_of(reading, "low"), clip_of(reading, "high")
        if low != high:
            return unsupported(f"{ours} has one threshold, for probabilities that fall and that rise")
        return converted({"algorithm.dppo_threshold": low}, f"the threshold of {ours}: {low:g}")
    if ours not in CLIPS:
        return no_effect(f"the loss {ours} does not clip")
    usual = dict(zip(("low", "high"), CLIPS[ours], strict=True))
    values = {side: clip_of(reading, side) for side in sides}
    kept = {side: value for side, value in values.items() if given.where or value != usual[side]}
    return Outcome("mapped", {("algorithm", f"clip_{side}"): value for side, value in kept.items()})


def dual_clip(reading: Reading, given: Given) -> Outcome:
    ours = loss_of(reading)
    if ours in DPPO_THRESHOLDS and given.where and given.value is not None:
        words = f"the ratio in {ours} is capped at 20"
        return built_in(words) if given.value >= 20 else unsupported(words)
    if ours != "ppo":
        return no_effect(f"the loss {ours} has no dual clip")
    return mapped("algorithm.dual_clip", given.value)


def aggregation(reading: Reading, given: Given) -> Outcome:
    ours = loss_of(reading)
    if ours in FORCED_AGGREGATION:
        return no_effect(f"the loss {ours} is always a mean over sequences")
    if given.value not in (*AGGREGATIONS, None):
        raise ValueError(f"should be one of {', '.join(AGGREGATIONS)}")
    return mapped("algorithm.aggregation", given.value and given.value.replace("-", "_"))


def token_level(reading: Reading, given: Given) -> Outcome:
    """Before there was `loss_agg_mode`."""
    return mapped("algorithm.aggregation", "seq_mean_token_mean" if given.value is False else "token_mean")


def aggregation_norm(reading: Reading, given: Given) -> Outcome:
    if loss_of(reading) in FORCED_AGGREGATION or reading[f"{ACTOR}.loss_agg_mode"] != "seq-mean-token-sum-norm":
        return no_effect("it belongs to `loss_agg_mode=seq-mean-token-sum-norm`")
    return mapped("algorithm.aggregation_norm", given.value)


def of_loss(key: str, ours: str, *names: str) -> Row:
    """A number of one loss."""
    words = f"the loss is not {' or '.join(names)}"
    return provided(same(f"{ACTOR}.{key}", ours, number), lambda reading: loss_of(reading) in names, words)


def discount(ours: str, *estimators: str) -> Convert:
    def convert(reading: Reading, given: Given) -> Outcome:
        if reading["algorithm.adv_estimator"] not in estimators:
            return no_effect(f"the estimator {reading['algorithm.adv_estimator']} does not read it")
        return mapped(ours, given.value)

    return convert


# --- dynamic sampling and long answers


def dynamic_sampling(reading: Reading) -> bool:
    return bool(reading["algorithm.filter_groups.enable"]) and samples(reading) > 1


def filter_groups(reading: Reading, given: Given) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    if samples(reading) == 1:
        return no_effect("verl keeps groups of one sample")
    return mapped("algorithm.dynamic_sampling.enabled", True)


def filter_metric(reading: Reading, given: Given) -> Outcome:
    if given.value in ("acc", "score", "reward", "seq_reward", "seq_final_reward", "train_reward", None):
        return built_in("groups are compared by the reward function's reward")
    return unsupported("groups are compared by reward")


def filter_rounds(reading: Reading, given: Given) -> Outcome:
    if given.value is None or given.value <= 0:
        return built_in("no limit there; 10 rounds here")
    return mapped("algorithm.dynamic_sampling.max_rounds", given.value)


def reward_manager(reading: Reading) -> str:
    keys = ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
    return next((reading[key] for key in keys if key in reading), "naive")


def not_overlong(reading: Reading, place: str) -> str | None:
    """Why length costs nothing; None: it does."""
    if reward_manager(reading) != "dapo":
        return "the reward manager is not dapo"
    off = [key for key in ("enable", "len", "penalty_factor") if not reading[f"{place}.{key}"]]
    return f"`{off[0]}` is {'off' if off[0] == 'enable' else 0}" if off else None


def overlong_rows(place: str) -> tuple[Row, ...]:
    def buffer(reading: Reading, given: Given) -> Outcome:
        if why := not_overlong(reading, place):
            return no_effect(why)
        tokens = reading[f"{place}.len"]
        if tokens > response_tokens(reading):
            raise ValueError(f"is more than the {response_tokens(reading)} tokens of a response")
        return mapped("algorithm.overlong.buffer_tokens", tokens)

    def penalty(reading: Reading, given: Given) -> Outcome:
        why = not_overlong(reading, place)
        return no_effect(why) if why else mapped("algorithm.overlong.penalty", given.value)

    return (
        turned(f"{place}.enable", truth, buffer),
        turned(f"{place}.len", whole, buffer),
        turned(f"{place}.penalty_factor", number, penalty, 1.0),
        needless(f"{place}.log", "rewards and lengths are always logged"),
    )


def longest_response(reading: Reading, given: Given) -> Outcome:
    if given.value in (None, response_tokens(reading)):
        return built_in("the limit of a response")
    return unsupported(f"the length penalty ends at the limit of a response, {response_tokens(reading)} tokens")


# --- rows

ALGORITHM = (
    turned("algorithm.adv_estimator", text, advantage, "gae"),
    turned("algorithm.norm_adv_by_std_in_grpo", truth, without_deviation, True),
    turned("algorithm.gamma", number, discount("algorithm.gamma", "gae", "reinforce_plus_plus")),
    turned("algorithm.gae_lambda", number, discount("algorithm.gae_lambda", "gae")),
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
        turned(f"{ACTOR}.use_token_level_loss", truth, token_level),
        lambda reading: loss_of(reading) not in FORCED_AGGREGATION,
        "the loss is always a mean over sequences",
    ),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", number, 0.0),
    turned("algorithm.filter_groups.enable", truth, filter_groups, False),
    provided(turned("algorithm.filter_groups.metric", text, filter_metric), dynamic_sampling, "`enable` is off"),
    provided(
        turned("algorithm.filter_groups.max_num_gen_batches", whole, filter_rounds), dynamic_sampling, "`enable` is off"
    ),
    needless("algorithm.filter_groups.max_inflight_gen_batches", "as many prompts are played again as are missing"),
    *(row for place in OVERLONG_PLACES for row in overlong_rows(place)),
    *(turned(f"{root}.reward_kwargs.max_resp_len", whole, longest_response) for root in ("reward", "reward_model")),
    lacking("algorithm.use_pf_ppo", "Corral does not draw samples again by their reward"),
)
