"""RLinf's algorithm: advantages, loss, KL, and whose log-probs they start from."""

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
from corral.migrate.rlinf.devices import devices_of
from corral.migrate.rlinf.facts import (
    ADVANTAGES,
    LOSSES,
    UNREAD_LENGTHS,
    advantage_of,
    all_of,
    has_critic,
    has_kl,
    is_fsdp,
    kl_in_loss,
    kl_in_reward,
    loss_of,
    said,
    usual,
)
from corral.migrate.table import Convert, ForeignConfig, idle, lacking, needless, turned

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
}
ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2"), "k2"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    "abs": "abs",
}
OF_ROBOTS = "huber_delta rollout_epoch eval_rollout_epoch reward_type logprob_type entropy_type update_epoch"


def advantage(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is not None and given.value not in ADVANTAGES:
        return unsupported(f"there is no such advantage; RLinf's {', '.join(ADVANTAGES)} are known")
    if given.value == "grpo_dynamic" and config["algorithm.advantage_mode"] != "trajectory":
        return unsupported("advantage_mode turn compares all turns of a prompt; `turn_grpo` those at one place")
    ours = advantage_of(config)
    if ours == given.value:
        return mapped("algorithm.name", ours)
    return converted({"algorithm.name": ours}, f"{given.value}, here {ours}")


def reinpp_baseline(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not advantage_of(config).startswith("reinforce_plus_plus"):
        return no_effect("only adv_type reinpp has one")
    return mapped("algorithm.name", advantage_of(config))


def whitening(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Of the whole batch, on top of what the advantage does. (GRPO's division by its group's deviation is not it.)"""
    ours = advantage_of(config)
    if ours.startswith("reinforce_plus_plus"):
        return built_in("advantages are normalised over the batch either way")
    if ours == "ppo":
        return built_in("so it is") if given.value else unsupported("GAE's advantages are always normalised")
    return mapped("algorithm.whiten", given.value)


def loss(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is not None and given.value not in LOSSES:
        return unsupported(f"there is no such loss; RLinf's {', '.join(LOSSES)} are known")
    if loss_of(config) == "gspo":
        return mapped("algorithm.loss", "gspo")
    return built_in("the clipped loss of PPO")


def aggregation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = AGGREGATIONS.get(given.value)
    if ours is None:
        return unsupported(f"there is no such mean; RLinf's {', '.join(AGGREGATIONS)} are known")
    if loss_of(config) == "gspo":
        is_so = given.value == "seq-mean-token-mean"
        return built_in("so it is") if is_so else unsupported("GSPO is always seq-mean-token-mean")
    if ours == "token_mean":
        note = "over all tokens of an update; RLinf takes it of each micro-batch, and then the mean of these"
        return mapped("algorithm.aggregation", ours, note)
    return mapped("algorithm.aggregation", ours)


def clip_both(config: ForeignConfig, given: ForeignValue) -> Outcome:
    left = [side for side in ("low", "high") if f"algorithm.clip_ratio_{side}" not in config]
    if not left:
        return no_effect("clip_ratio_low and clip_ratio_high count")
    if given.value is None or (not given.where and loss_of(config) == "ppo"):
        return built_in("0.2, as in Corral")
    return converted({f"algorithm.clip_{side}": given.value for side in left}, f"{given.value:g} {' and '.join(left)}")


def clip_one(ours: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        return built_in("ratio_clip_eps counts") if given.value is None else mapped(ours, given.value)

    return convert


def dual_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("off, as in Corral")
    if loss_of(config) != "ppo":
        return no_effect("only the loss of PPO has it")
    return mapped("algorithm.dual_clip", given.value)


def entropy(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value and not config["algorithm.calculate_entropy"]:
        return no_effect("only with calculate_entropy")
    return mapped("algorithm.entropy_coefficient", given.value or 0.0)


def kl_beta(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is not None and given.value < 0:
        raise ValueError("should be 0 or more")
    if given.value:
        ours = {"algorithm.kl.where": "loss", "algorithm.kl.coefficient": given.value}
        return converted(ours, f"{given.value:g}: a KL in the loss")
    if has_critic(config) and not has_kl(config):
        return converted({"algorithm.kl.where": None}, "0: no KL, where Corral's ppo has one in the reward")
    return built_in("no KL in the loss")


def reinpp_kl_beta(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("no KL in the reward")
    if not kl_in_reward(config):
        return no_effect("only adv_type reinpp reads it")
    if kl_in_loss(config):
        return unsupported("kl_beta has a KL in the loss already; there is one place for it")
    ours = {"algorithm.kl.where": "reward", "algorithm.kl.coefficient": given.value}
    return converted(ours, f"{given.value:g}: a KL in the reward")


def kl_estimator(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not has_kl(config):
        return no_effect("there is no KL")
    name = said(config, "algorithm.kl_penalty_type")
    if name not in ESTIMATORS:
        return unsupported(f"there is no such estimator; RLinf's {', '.join(ESTIMATORS)} are known")
    return mapped("algorithm.kl.estimator", ESTIMATORS[name])


def old_logprobs(config: ForeignConfig) -> str | None:
    """None: what Corral does anyway, which is to take the engine's."""
    if config["algorithm.importance_sampling_fix"]:
        return "recompute"
    if not said(config, "algorithm.recompute_logprobs"):
        return "engine"
    return None if devices_of(config).disaggregated else "recompute"


def recompute_logprobs(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = old_logprobs(config)
    if ours is None:
        return built_in("Corral's engine gives the log-probs of what it plays")
    return mapped("algorithm.old_logprobs", ours)


def importance_sampling(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("off, as in Corral")
    ours = {"algorithm.correction.name": "token_tis", "algorithm.old_logprobs": "recompute"}
    return converted(ours, "each token is weighed by trainer's over engine's probability")


def importance_cap(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or not config["algorithm.importance_sampling_fix"]:
        return no_effect("only with importance_sampling_fix")
    note = "the most that a weight may be; RLinf's code has it as the least, which its guides do not say"
    return mapped("algorithm.correction.cap", given.value, note)


def mean_ratio(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("off, as in Corral")
    if is_fsdp(config):
        return no_effect("only Megatron's trainer reads it")
    if said(config, "algorithm.n_minibatches") == 1 and old_logprobs(config) == "recompute":
        return no_effect("a step has one update, whose ratios are all 1")
    note = f"{given.value:g}: an update is left out above it; in RLinf a micro-batch"
    return converted({"algorithm.max_mean_ratio": given.value}, note)


def of_gae(ours: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if not has_critic(config):
            return no_effect("only adv_type gae reads it")
        return mapped(ours, given.value)

    return convert


def critic_model(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if bool(given.value) is has_critic(config):
        return built_in("adv_type gae has a critic, the others have none")
    if given.value:
        return no_effect(f"adv_type {said(config, 'algorithm.adv_type')} does not ask it")
    return unsupported("gae needs a critic; without one it is RLinf's reinpp")


ROWS = (
    usual("algorithm.recompute_logprobs", boolean, recompute_logprobs),
    usual("algorithm.adv_type", text, advantage),
    turned("algorithm.use_reinpp_baseline", boolean, reinpp_baseline),
    turned("algorithm.advantage_mode", text, lambda *_: built_in("see adv_type")),
    turned("algorithm.normalize_advantages", boolean, whitening, True),
    lacking("algorithm.loss_scales", "agents and turns have no shares of the loss: all tokens weigh the same"),
    turned("algorithm.gamma", number, of_gae("algorithm.gamma")),
    turned("algorithm.gae_lambda", number, of_gae("algorithm.lam")),
    turned("algorithm.value_clip", number, of_gae("critic.value_clip")),
    turned("algorithm.critic_warmup_steps", integer, of_gae("critic.warmup_steps")),
    turned("critic.use_critic_model", boolean, critic_model),
    usual("algorithm.loss_type", text, loss),
    turned("algorithm.loss_agg_func", text, aggregation),
    needless("algorithm.use_valid_token_scale", "a mean is over all tokens of an update anyway"),
    usual("algorithm.kl_beta", number, kl_beta),
    turned("algorithm.reinpp_kl_beta", number, reinpp_kl_beta),
    usual("algorithm.kl_penalty_type", text, kl_estimator),
    usual("algorithm.ratio_clip_eps", number, clip_both),
    turned("algorithm.clip_ratio_low", number, clip_one("algorithm.clip_low")),
    turned("algorithm.clip_ratio_high", number, clip_one("algorithm.clip_high")),
    turned("algorithm.clip_ratio_c", number, dual_clip),
    *all_of(needless, "algorithm", "clip_log_ratio_min clip_log_ratio_max", "the loss clips the ratio itself"),
    turned("algorithm.entropy_bonus", number, entropy),
    turned("algorithm.calculate_entropy", boolean, lambda *_: built_in("entropy is always reported")),
    needless("algorithm.entropy_op_type", "Corral decides how entropy is computed"),
    usual("algorithm.early_stop_imp_ratio", number, mean_ratio),
    turned("algorithm.importance_sampling_fix", boolean, importance_sampling),
    turned("algorithm.importance_sampling_clip", number, importance_cap),
    lacking("algorithm.down_sampling.do_down_sampling", "samples are not thinned out; see algorithm.dynamic_sampling"),
    idle("algorithm.down_sampling.**", "only with do_down_sampling"),
    *all_of(idle, "algorithm", "len_reward_penalty safe_length max_length", UNREAD_LENGTHS),
    idle("algorithm.max_resample", "nothing reads it; see algorithm.dynamic_sampling"),
    *all_of(lacking, "algorithm", "drpo_lambda drpo_tau drpo_beta drpo_delta drpo_kl_type", "there is no loss drpo"),
    *all_of(idle, "algorithm", OF_ROBOTS, "reasoning tasks do not read it"),
)
