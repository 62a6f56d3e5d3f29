"""ROLL's keys for a run and its steps: checkpoints, trackers, model, batch, lengths, sampling, data, rewards."""

import math
import re
from typing import Any

from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, mapped, unsupported
from corral.migrate.roll.pipelines_and_devices import (
    data_parallel,
    group_size,
    is_agentic,
    is_rlvr,
    lengths,
    num_prompts,
    num_steps,
    on_cluster,
    replaced,
    validates,
)
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import one_or_all, plural, text
from corral.recipe.rules import TRACKERS_WITH_PROJECTS

TRAINING = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"
SEES = re.compile(r"(?i)(?:^|[-_/.\d])(?:vl|omni|vision)(?:[-_/.\d]|$)")
NOT_FOR_WORKERS = re.compile(
    r"(?i)(?:use_modelscope|modelscope|model_download|vllm|sglang|nvte|megatron|hccl|ascend|npu|roll|ray|task_queue|"
    r"multi_stream|cpu_affinity|combined_enable)(?:_.*)?|.*visible_devices"
)
"""Environment variables that only ROLL, its libraries, or Ray read."""


# --- length, checkpoints, trackers


def every(config: ForeignConfig, key: str) -> int:
    """Number of steps between two checkpoints or validations; 0 where the run ends before the first."""
    period, steps = int(config.value(key)), num_steps(config)
    return 0 if period <= 0 or (steps is not None and period > steps) else period


def all_checkpoints(config: ForeignConfig, given: ForeignValue) -> Outcome:
    steps = int(config.value("max_steps"))
    made = steps // every(config, "save_steps") + 1
    return converted({"checkpoint.keep": max(made, 2)}, f"all: {made} of {steps} steps")


def resume(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, False):
        return converted({"checkpoint.resume": "never"}, "false: start anew")
    return mapped("checkpoint.resume", "auto" if given.value is True else text(given.value))


def has_projects(config: ForeignConfig) -> bool:
    return config.value("track_with") in TRACKERS_WITH_PROJECTS


def hidden(value: Any) -> str:
    """A key of a tracker's account, which must not be in a report."""
    return "(not shown)"


def environment_variable(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A recipe has names of variables, and never their values."""
    name = given.key.rpartition("system_envs.")[2]
    if NOT_FOR_WORKERS.fullmatch(name):
        return built_in("Corral does not read it; models are loaded from a folder or from the Hugging Face hub")
    if not on_cluster(config):
        return built_in(f"set {name} where you start `corral train`")
    names = sorted({key.rpartition("system_envs.")[2] for key in config.given if "system_envs." in key})
    passed = [one for one in names if not NOT_FOR_WORKERS.fullmatch(one)]
    return converted({"cluster.environment": passed}, f"set {name} where you start `corral train`: workers get it")


def pipeline_class(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if "agentic" in (given.value or "agentic") or "rlvr" in given.value:
        return built_in("see the other keys")
    return unsupported("Corral has the agentic and the RLVR pipeline")


# --- model


def sees(config: ForeignConfig) -> bool:
    return SEES.search(config.value("pretrain")) is not None


def critic_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    own = config["critic.model_args.model_name_or_path"] or config["reward_pretrain"]
    if own == config.value("pretrain"):
        return built_in("the critic starts as a copy of the model")
    return mapped("critic.path", own)


def dtype(config: ForeignConfig, given: ForeignValue) -> Outcome:
    main, value = config["actor_train.model_args.dtype"] or "bf16", given.value or "bf16"
    names = config.constants["dtypes"]
    if value not in names:
        raise ValueError(f"should be one of {', '.join(names)}")
    if main in names and value != main:
        return unsupported(f"all roles compute alike in Corral: {main}, as actor_train")
    return mapped("model.dtype", names[value])


# --- batch


def rollout_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    size, samples = config.value("rollout_batch_size"), group_size(config)
    ours = {"batch.prompts_per_step": num_prompts(config), "batch.samples_per_prompt": samples}
    if is_rlvr(config):
        return converted(ours, f"{size} prompts, {plural(samples, 'answer')} each: {size * samples} trajectories")
    if size % samples:
        raise ValueError(
            f"should be a multiple of `train_env_manager.group_size`, {samples}: groups are generated whole"
        )
    return converted(ours, f"{size} trajectories in groups of {samples}: {plural(size // samples, 'board')}")


def updates(config: ForeignConfig, given: ForeignValue) -> Outcome:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    each, times = (config.value(f"{TRAINING}.{name}") for name in names)
    copies, trajectories = data_parallel(config), num_prompts(config) * group_size(config)
    size = each * times * copies
    made = math.ceil(trajectories / size)
    note = f"{each} x {times} x {copies} = {size} trajectories per update, of {trajectories}: "
    return converted({"batch.updates_per_step": made}, f"{note}{plural(made, 'update')} per step")


def micro_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The number of updates, and how many tokens are computed at once."""
    found, tokens = updates(config, given), sum(lengths(config))
    each = config.value(f"{TRAINING}.per_device_train_batch_size")
    ours = {**found.ours, ("batch", "max_tokens_per_micro_batch"): each * tokens}
    return converted(ours, f"{found.note}; {each} x {tokens} tokens at once")


def dynamic_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    wanted, least = config["actor_train.max_tokens_per_microbatch_in_train"], sum(lengths(config))
    note = f"{wanted} tokens at once" + (f": at least one trajectory, {least}" if wanted < least else "")
    return converted({"batch.max_tokens_per_micro_batch": max(wanted, least)}, note)


# --- lengths


def sequence(config: ForeignConfig, given: ForeignValue) -> Outcome:
    (prompt, response), total = lengths(config), config.value("sequence_length")
    if "response_length" in config and "sequence_length" not in config:
        return built_in("see `prompt_length` and `response_length`")
    if total < 2 or (is_rlvr(config) and total <= prompt):
        raise ValueError(f"should be above the prompt's length, {max(prompt, 1)}")
    ours = {"data.max_prompt_tokens": prompt, "rollout.max_response_tokens": response}
    return converted(ours, f"{total} tokens: {prompt} for the prompt and {response} for what follows")


def validation_length(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, sum(lengths(config)), lengths(config)[0]):
        return built_in("as in training")
    return unsupported("validation has the lengths of the training")


# --- sampling


def has_own_validation(config: ForeignConfig) -> bool:
    """Environments are validated with the sampling of the training, unless that is not `actor_infer`'s."""
    of_actor = any(one.key.startswith(f"{SAMPLING}.") for one in config.given.values())
    return bool(config.below("val_env_manager.generating_args")) and not of_actor


# --- data and rewards of the RLVR pipeline


def train_files(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = {"data.train.path": one_or_all(given.value or []), "data.answer_key": "ground_truth"}
    return converted(ours, "ROLL's rows have their answers in the column `ground_truth`")


def validation_files(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not validates(config):
        return built_in("`eval_steps` is 0: there is no validation")
    return mapped("data.validation.path", one_or_all(given.value))


def mixture(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if len(config.below("actor_train.data_args.domain_interleave_probs")) == 1:
        return built_in("one domain, all of the data")
    return unsupported("rows are taken as the files have them; mix them there")


def reward_of(config: ForeignConfig, domain: str) -> str | None:
    worker = (config[f"rewards.{domain}.worker_cls"] or "").rpartition(".")[2]
    name: str | None = config.constants["rewards"].get(worker)
    return name


def reward_class(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """All rows have the reward of one domain: the first that Corral has one for."""
    if is_agentic(config):
        return unsupported("environments have rewards of their own")
    domain = given.key.split(".")[1]
    domains = list(dict.fromkeys(key.partition(".")[0] for key in config.below("rewards")))
    name, main = reward_of(config, domain), next((one for one in domains if reward_of(config, one)), domains[0])
    if domain != main:
        return unsupported(f"one reward for all rows: that of {main}; `by_source` chooses by `data_source`")
    if name is None:
        known = ", ".join(config.constants["rewards"].values())
        why = f"Corral has {known} of ROLL's; write it as a function and name it here"
        return replaced({"environment.reward.name": f"my_rewards:{domain}"}, why)
    return converted({"environment.reward.name": name}, "without ROLL's penalty for repetition")
