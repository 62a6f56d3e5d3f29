"""RLinf's runner, data, rewards, batches and algorithm: conditions on several keys, and conversions of single ones."""

from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    built_in,
    converted,
    format_value,
    mapped,
    no_effect,
    one_or_all,
    unsupported,
)
from corral.migrate.table import ForeignConfig
from corral.recipe.keys import KeyPath
from corral.recipe.rules import TRACKERS_WITH_PROJECTS

ADVANTAGES = {
    **dict.fromkeys(("grpo", "math_grpo", "grpo-math", "grpo_dynamic"), "grpo"),
    **dict.fromkeys(("gae", "ppo"), "ppo"),
    "reinpp": "reinforce_plus_plus",
    "reinpp_baseline": "reinforce_plus_plus_baseline",
    "raw": "reinforce",
}
LOSSES = {
    **dict.fromkeys(("actor", "math_ppo_actor", "math_actor", "actor_critic", "ppo", "grpo"), "ppo"),
    "gspo": "gspo",
}
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
TRACKERS = ("tensorboard", "wandb", "swanlab")
ALL_TOKENS = 1_000_000
"""`top_k` of RLinf's examples: more than any vocabulary."""
ONLY_SEARCH = "of RLinf's agents only Search-R1's (reward_type searchr1) is read"


# --- conditions, and what several keys mean together


def value_of(config: ForeignConfig, key: str) -> Any:
    """The value as written; where that is null, the default of the table."""
    return default_of(config, key) if config[key] is None else config[key]


def default_of(config: ForeignConfig, key: str) -> Any:
    row = config.table.row(key)
    assert row is not None, key
    return row.default


def advantage_of(config: ForeignConfig) -> str:
    name = ADVANTAGES.get(config.value("algorithm.adv_type"), "grpo")
    if name == "reinforce_plus_plus" and config["algorithm.use_reinpp_baseline"]:
        return "reinforce_plus_plus_baseline"
    return name


def is_reinpp(config: ForeignConfig) -> bool:
    return advantage_of(config).startswith("reinforce_plus_plus")


def has_critic(config: ForeignConfig) -> bool:
    return advantage_of(config) == "ppo"


def loss_of(config: ForeignConfig) -> str:
    return LOSSES.get(config.value("algorithm.loss_type"), "ppo")


def kl_in_loss(config: ForeignConfig) -> bool:
    return bool(config.value("algorithm.kl_beta") > 0)


def kl_in_reward(config: ForeignConfig) -> bool:
    beta = config["algorithm.reinpp_kl_beta"]
    return bool(beta and beta > 0 and is_reinpp(config))


def has_kl(config: ForeignConfig) -> bool:
    return kl_in_loss(config) or kl_in_reward(config)


def is_fsdp(config: ForeignConfig, role: str = "actor") -> bool:
    """Where no backend is written: whether the trainer has settings of FSDP."""
    key = f"{role}.training_backend"
    if key not in config and config.below(f"{role}.fsdp_config"):
        return True
    return bool(config[key] == "fsdp")


def is_megatron(config: ForeignConfig, role: str = "actor") -> bool:
    return not is_fsdp(config, role)


def has_images(config: ForeignConfig) -> bool:
    return config["data.type"] not in ("math", None)


def is_search(config: ForeignConfig) -> bool:
    return bool(config["reward.reward_type"] == "searchr1")


def ends_by_epochs(config: ForeignConfig) -> bool:
    steps = config["runner.max_steps"]
    return steps is None or steps < 0


def has_projects(config: ForeignConfig) -> bool:
    return not TRACKERS_WITH_PROJECTS.isdisjoint(config["runner.logger.logger_backends"] or [])


def batches_by_tokens(config: ForeignConfig) -> bool:
    return bool(config["runner.enable_dynamic_batch_size"])


def batches_by_sequences(config: ForeignConfig) -> bool:
    return not batches_by_tokens(config)


# --- run


def max_steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return built_in("by epochs") if ends_by_epochs(config) else mapped("schedule.steps", given.value)


def save_interval(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 0:
        ours = {"checkpoint.every": 0, "checkpoint.at_end": False}
        return converted(ours, f"{format_value(given.value)}: none, at the end neither")
    steps = config["runner.max_steps"]
    if steps is not None and 0 <= steps < given.value:
        return converted({"checkpoint.every": 0}, f"every {given.value} steps of {steps}: at the end only")
    return mapped("checkpoint.every", given.value, "the last 2 are kept (`checkpoint.keep`), RLinf keeps all")


def trackers(config: ForeignConfig, given: ForeignValue) -> Outcome:
    named = given.value or []
    ours: dict[KeyPath, Any] = {("logging", "trackers"): ["console", *(name for name in named if name in TRACKERS)]}
    if strange := [name for name in named if name not in TRACKERS]:
        return Outcome("unsupported", ours, f"there is no tracker {' or '.join(strange)}")
    return Outcome("mapped", ours)


# --- batch and sampling


def response_tokens(config: ForeignConfig) -> int:
    """Number of tokens of everything behind the prompt."""
    left: int = max(config.value("runner.seq_length") - config.value("data.max_prompt_length"), 1)
    most = config["algorithm.sampling_params.max_new_tokens"]
    return left if most is None else min(left, most)


def sequence_length(config: ForeignConfig, given: ForeignValue) -> Outcome:
    length, prompt = config.value("runner.seq_length"), config.value("data.max_prompt_length")
    tokens = response_tokens(config)
    if length <= prompt:
        raise ValueError(f"should be above `data.max_prompt_length`, which is {prompt}")
    return converted({"rollout.max_response_tokens": tokens}, f"{length} less {prompt} of the prompt: {tokens} at most")


def new_tokens(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("as many as runner.seq_length leaves")
    tokens = response_tokens(config)
    if tokens == given.value:
        return mapped("rollout.max_response_tokens", tokens)
    ours = {"rollout.max_response_tokens": tokens}
    return converted(ours, f"{given.value}, of which runner.seq_length leaves {tokens}")


def minibatches(config: ForeignConfig, given: ForeignValue) -> Outcome:
    prompts, samples = config.value("data.rollout_batch_size"), config.value("algorithm.group_size")
    updates = config.value("algorithm.n_minibatches")
    if updates < 1:
        raise ValueError("should be at least 1")
    each = f"{prompts * samples // updates:,}"
    note = f"{prompts} x {samples} = {prompts * samples:,} trajectories a step, in {updates} updates of {each}"
    return mapped("batch.updates_per_step", updates, note)


def micro_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    length = config.value("runner.seq_length")
    sequences = config.value("algorithm.training_batch_size_per_gpu")
    return micro_batch_tokens(config, sequences * length, f"{sequences} x runner.seq_length {length}")


def micro_batch_budget(config: ForeignConfig, given: ForeignValue) -> Outcome:
    budget = config.value("runner.max_tokens_per_mbs")
    return micro_batch_tokens(config, budget, f"{budget} tokens")


def micro_batch_tokens(config: ForeignConfig, tokens: int, source: str) -> Outcome:
    trajectory = config.value("data.max_prompt_length") + response_tokens(config)
    if tokens < trajectory:
        source += f", and {trajectory} for one whole trajectory"
    most = max(tokens, trajectory)
    return converted({"batch.max_tokens_per_micro_batch": most}, f"{source}: {most} tokens at most")


def generation_batches(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 1:
        return built_in("one batch of prompts a step")
    ours = {"algorithm.dynamic_sampling.enabled": True, "algorithm.dynamic_sampling.max_rounds": given.value - 1}
    return converted(ours, f"{given.value} batches of prompts for a step at most: {given.value - 1} to refill it")


def top_k(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 0 or given.value >= ALL_TOKENS:
        return converted({"rollout.top_k": 0}, f"{format_value(given.value)}: all tokens, 0 here")
    return mapped("rollout.top_k", given.value)


# --- algorithm


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
    return mapped("algorithm.name", advantage_of(config))


def whitening(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Over the whole batch, on top of what the advantage does. (GRPO's division by its group's deviation is not it.)"""
    if is_reinpp(config):
        return built_in("advantages are normalized over the batch either way")
    if has_critic(config):
        return built_in("so it is") if given.value else unsupported("GAE's advantages are always normalized")
    return mapped("algorithm.whiten", given.value)


def critic_model(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if bool(given.value) is has_critic(config):
        return built_in("adv_type gae has a critic, the others have none")
    if given.value:
        return no_effect(f"adv_type {config.value('algorithm.adv_type')} does not use it")
    return unsupported("gae needs a critic; without one it is RLinf's reinpp")


def loss(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is not None and given.value not in LOSSES:
        return unsupported(f"there is no such loss; RLinf's {', '.join(LOSSES)} are known")
    if loss_of(config) == "gspo":
        return mapped("algorithm.loss.name", "gspo")
    return built_in("the clipped loss of PPO")


def aggregation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = AGGREGATIONS.get(given.value)
    if ours is None:
        return unsupported(f"there is no such mean; RLinf's {', '.join(AGGREGATIONS)} are known")
    if loss_of(config) == "gspo":
        is_so = given.value == "seq-mean-token-mean"
        return built_in("so it is") if is_so else unsupported("GSPO is always seq-mean-token-mean")
    note = "over all tokens of an update; RLinf takes it of each micro-batch, and then the mean of these"
    return mapped("algorithm.aggregation.name", ours, note if ours == "token_mean" else "")


def clip_both(config: ForeignConfig, given: ForeignValue) -> Outcome:
    left = [side for side in ("low", "high") if f"algorithm.clip_ratio_{side}" not in config]
    if not left:
        return no_effect("clip_ratio_low and clip_ratio_high count")
    if given.value is None or (not given.where and loss_of(config) == "ppo"):
        return built_in("0.2, as in Corral")
    return converted(
        {f"algorithm.loss.clip_{side}": given.value for side in left}, f"{given.value:g} {' and '.join(left)}"
    )


def dual_clip(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("off, as in Corral")
    if loss_of(config) != "ppo":
        return no_effect("only the loss of PPO has it")
    return mapped("algorithm.loss.dual_clip", given.value)


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
    name = config.value("algorithm.kl_penalty_type")
    if name not in ESTIMATORS:
        return unsupported(f"there is no such estimator; RLinf's {', '.join(ESTIMATORS)} are known")
    return mapped("algorithm.kl.estimator.name", ESTIMATORS[name])


# --- data and rewards


def train_paths(config: ForeignConfig, given: ForeignValue) -> Outcome:
    paths = given.value or default_of(config, "data.train_data_paths")
    note = "" if given.where and given.value else "put AReaL-boba-106k there, or name your own file"
    return mapped("data.train.path", one_or_all(paths), note)


def data_size(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value < 0:
        return built_in("all rows")
    return mapped("data.train.max_rows", given.value)


def reward_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in ("math", None):
        return mapped("environment.reward.name", "math")
    if is_search(config):
        ours = {"environment.name": "search", "environment.options.prompt": None, "environment.reward.name": "em"}
        return converted(ours, "searchr1: exact match of what is found by searching; prompts as they are in the rows")
    return unsupported("write it as a function and name it in `environment.reward.name`: `file.py:function`")


def reward_weight(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if config["reward.reward_type"] in ("math", "searchr1", None):
        return no_effect(f"reward_type {config.value('reward.reward_type')} has no parts")
    return unsupported("parts of a reward are weighted in its function") if given.value else built_in("off")


def reward_scale(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_search(config):
        return no_effect("searchr1 does not scale")
    if config["reward.reward_type"] not in ("math", None):
        return unsupported("it belongs to a reward that is not read")
    scale, high, low = (config.value(f"reward.reward_{name}") for name in ("scale", "max_val", "min_val"))
    reward: KeyPath = ("environment", "reward")
    ours = {(*reward, "options", "right"): high * scale, (*reward, "options", "wrong"): low * scale}
    return converted(
        {**ours, (*reward, "on_error"): low * scale},
        f"{high * scale:g} for a right answer, {low * scale:g} for any other",
    )


# --- the agent that searches


def outside_search(config: ForeignConfig, given: ForeignValue) -> Outcome | None:
    """What becomes of an agent's key that has no value, or is not Search-R1's."""
    if given.value is None:
        return built_in("nothing")
    return None if is_search(config) else unsupported(ONLY_SEARCH)


def search_option(config: ForeignConfig, given: ForeignValue, ours: str) -> Outcome:
    return outside_search(config, given) or mapped(ours, given.value)


def search_parser(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return outside_search(config, given) or built_in("<search> and <answer> are looked for")


def search_turns(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if outside := outside_search(config, given):
        return outside
    if given.value < 2:
        return unsupported("with one turn nothing that is found is read; use `environment.options.do_search: false`")
    note = f"{given.value} replies: {given.value - 1} that may search, and one more"
    return converted({"rollout.max_turns": given.value - 1}, note)


def truncated_side(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if outside := outside_search(config, given):
        return outside
    return built_in("the end is cut off") if given.value == "right" else unsupported("only the end is cut off")


def retriever(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if outside := outside_search(config, given):
        return outside
    address = given.value if "://" in given.value else f"http://{given.value}"
    return converted({"environment.options.retriever": address}, f"{given.value}, as an address")
