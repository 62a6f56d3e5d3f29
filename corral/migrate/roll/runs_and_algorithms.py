"""ROLL's keys for a run and its steps (checkpoints, model, batch, lengths, data, rewards), and for its algorithm:
advantages, the loss, corrections of off-policy tokens, optimizers.

In ROLL an advantage has three parts: how rewards are normalized (by the group, by the batch, not at all), the
estimator, and whether the result is whitened. Corral has a name for each of the sensible combinations.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from corral.algorithms.advantages import ADVANTAGES
from corral.algorithms.losses import LOSSES
from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, from_modelscope, mapped, unsupported
from corral.migrate.roll.pipelines_and_devices import (
    data_parallel,
    distills,
    group_size,
    is_agentic,
    is_rlvr,
    kl_where,
    num_prompts,
    num_steps,
    on_cluster,
    replaced,
    uses_critic,
)
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import format_value, texts
from corral.recipe.rules import TRACKERS_WITH_PROJECTS

TRAINING = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"
SIZES_OF_UPDATE = ("per_device_train_batch_size", "gradient_accumulation_steps")
NOT_FOR_WORKERS = re.compile(
    r"(?i)(?:use_modelscope|modelscope|model_download|vllm|sglang|nvte|megatron|hccl|ascend|npu|roll|ray|task_queue|"
    r"multi_stream|cpu_affinity|combined_enable)(?:_.*)?|.*visible_devices"
)
"""Environment variables that only ROLL, its libraries, or Ray read."""
ESTIMATORS = ("gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce")


# --- length, checkpoints, trackers


def every(config: ForeignConfig, key: str) -> int:
    """Number of steps between two checkpoints or validations; 0 where the run ends before the first."""
    period, steps = int(config.value(key)), num_steps(config)
    return 0 if period <= 0 or (steps is not None and period > steps) else period


def has_projects(config: ForeignConfig) -> bool:
    return config.value("track_with") in TRACKERS_WITH_PROJECTS


def hidden(value: Any) -> str:
    """A key of a tracker's account, which must not be in a report."""
    return "(not shown)"


def environment_variable(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A recipe has names of variables, and never their values."""
    name = given.key.rpartition("system_envs.")[2]
    if name == "USE_MODELSCOPE" and str(given.value).lower() in ("1", "true"):
        return from_modelscope()
    if NOT_FOR_WORKERS.fullmatch(name):
        return built_in("Corral does not read it; models are loaded from a folder or from the Hugging Face hub")
    if not on_cluster(config):
        return built_in(f"set {name} where you start `corral train`")
    names = sorted({key.rpartition("system_envs.")[2] for key in config.given if "system_envs." in key})
    passed = [one for one in names if not NOT_FOR_WORKERS.fullmatch(one)]
    return converted({"cluster.environment": passed}, f"set {name} where you start `corral train`: workers get it")


# --- model


def download_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value and given.value.lower() == "modelscope":
        return from_modelscope()
    return built_in("models are loaded from a folder or from the Hugging Face hub")


def dtype(config: ForeignConfig, given: ForeignValue) -> Outcome:
    main, value = config["actor_train.model_args.dtype"] or "bf16", given.value or "bf16"
    names = config.constants["dtypes"]
    if value not in names:
        raise ValueError(f"should be one of {', '.join(names)}")
    if main in names and value != main:
        return unsupported(f"all roles compute alike in Corral: {main}, as actor_train")
    return mapped("model.dtype", names[value])


# --- batch


def difficulty(config: ForeignConfig) -> list[float]:
    """Between which mean scores a prompt is neither too hard nor too easy."""
    return [config.value("difficulty_low_threshold"), config.value("difficulty_high_threshold")]


def num_trajectories(config: ForeignConfig) -> int:
    return num_prompts(config) * group_size(config)


def sizes_of_update(config: ForeignConfig) -> tuple[int, int, int]:
    """Trajectories of an update: of a device at once, how often, and on how many copies of the model."""
    each, times = (config.value(f"{TRAINING}.{name}") for name in SIZES_OF_UPDATE)
    return each, times, data_parallel(config)


def num_updates(config: ForeignConfig) -> int:
    return math.ceil(num_trajectories(config) / math.prod(sizes_of_update(config)))


# --- SFT and DPO: rows, or pairs of answers, that are in files


def row_tokens(config: ForeignConfig) -> int:
    written = config["sequence_length"]
    if written is None and config["response_length"] is None:
        raise ValueError("needs `sequence_length`, which ROLL refuses to start without")
    return int(written or (config["prompt_length"] or 1024) + config["response_length"])


# --- sampling


def has_own_validation(config: ForeignConfig) -> bool:
    """Environments are validated with the sampling of the training, unless that is not `actor_infer`'s."""
    of_actor = any(one.key.startswith(f"{SAMPLING}.") for one in config.given.values())
    return bool(config.below("val_env_manager.generating_args")) and not of_actor


def has_rlvr_sampling(config: ForeignConfig) -> bool:
    """Whether the RLVR pipeline's validation has a sampling, whose other values are ROLL's defaults."""
    return bool(config.below("validation.generating_args"))


# --- data and rewards of the RLVR pipeline


def num_rewarded_domains(config: ForeignConfig) -> int:
    return len({one.partition(".")[0] for one in config.below("rewards")})


def num_domains(config: ForeignConfig) -> int:
    return len(config.below("actor_train.data_args.domain_interleave_probs"))


def reward_class(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A domain's reward: the only one, or that of rows with one of the domain's tags."""
    if is_agentic(config):
        return unsupported("environments have rewards of their own")
    domain, worker = given.key.split(".")[1], (given.value or "").rpartition(".")[2]
    name = config.constants["rewards"].get(worker)
    key, ours = "environment.reward", dict[Any, Any]()
    domains = {one.partition(".")[0] for one in config.below("rewards")}
    if len(domains) > 1:
        key, tags = f"environment.rewards.{domain}", config[f"rewards.{domain}.tag_included"]
        by_tags = any(config[f"rewards.{one}.tag_included"] for one in domains)
        if by_tags and not tags:
            raise ValueError("is one of several rewards, and no `tag_included` says for which rows it is")
        # Not `data_args.tag`, which chooses templates: roll/pipeline/rlvr/rlvr_pipeline.py (update_dataset_domain).
        column = "tag" if by_tags else "domain"
        ours = {f"{key}.sources": texts(tags) if by_tags else [domain], "data.source_key": column}
    if name is not None:
        return converted(ours | {f"{key}.name": name}, "without ROLL's penalty for repetition")
    why = config.constants["other_rewards"].get(worker, "Corral has no such reward")
    return replaced(ours | {f"{key}.name": f"my_rewards:{domain}"}, f"{why}; write it as a function and name it here")


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
    if distills(config):
        return RollAdvantage("distill", "the teacher's log-probs less the model's own")
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


def teacher(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """On-policy distillation: alone, or beside rewards that are those of grpo."""
    ours: dict[Any, Any] = {"algorithm.name": "distill"}
    if not config["use_opd"]:
        return converted(ours, "advantages are the teacher's log-probs less the model's own")
    if config["is_pure_opd"]:
        raise ValueError("is distillation alone (`is_pure_opd`) and beside rewards (`use_opd`), which ROLL refuses")
    if normalized_by(config) != ("group", "group") or uses_critic(config):
        raise ValueError("is distillation beside rewards other than those of grpo, which is not migrated")
    ours["algorithm.advantage.task_weight"] = 1.0
    return converted(ours, "advantages are those of grpo and the teacher's log-probs less the model's own")


def estimator(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found, written = advantage(config), config.value("adv_estimator")
    if found.name == "distill":
        return teacher(config, given)
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
    by_token = found.name in ("reinforce", "reinforce_plus_plus") and is_agentic(config) and written != "step_reinforce"
    if by_token:
        note += "; a token has the return from there on, in ROLL that of the whole trajectory"
    return converted(ours, note, differs=by_token)


def whitens(config: ForeignConfig) -> bool:
    return ADVANTAGES[advantage(config).name].whitened


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


def has_usual_clips(config: ForeignConfig) -> bool:
    """Whether the bounds are those that Corral has for this loss."""
    ranged, usual = bool(config["use_pg_clip_range"]), LOSSES[loss(config)].options()
    low, high = (config.value(f"pg_clip_{side}" if ranged else "pg_clip") for side in ("low", "high"))
    return bool((usual.clip_low, usual.clip_high) == (low, high))


def aggregation(config: ForeignConfig, given: ForeignValue) -> Outcome:
    written = config.value("loss_agg_mode").replace("-", "_")
    forced = LOSSES[loss(config)].aggregation
    if forced is not None:
        return (built_in if written == forced else unsupported)(f"the loss {loss(config)} is always {forced}")
    if written != "seq_mean_token_sum_norm":
        return mapped("algorithm.aggregation.name", written)
    # roll/utils/functionals.py, commit 8eb27cc: a sum over all trajectories, divided by the length alone
    length, size = config.value("sequence_length"), min(math.prod(sizes_of_update(config)), num_trajectories(config))
    ours = {"algorithm.aggregation.name": written, "algorithm.aggregation.norm": length / size}
    note = f"the sum over {size} trajectories, divided by the length of a sequence, {length}; Corral has their mean"
    return converted(ours, note)


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


def critic_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    own = actor_update(config)
    if critic_update(config) == own:
        return built_in("the critic has the same updates as the model")
    return unsupported(f"the critic has the same updates as the model, of {own} for each device")


def actor_update(config: ForeignConfig) -> int:
    """Number of trajectories of each device in an update of the model."""
    return math.prod(config.value(f"{TRAINING}.{name}") for name in SIZES_OF_UPDATE)


def critic_update(config: ForeignConfig) -> int:
    """Number of trajectories of each device in an update of the critic, which has sizes of its own in ROLL."""
    return math.prod(config.value(f"critic.training_args.{name}") for name in SIZES_OF_UPDATE)
