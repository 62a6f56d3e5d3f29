"""ROLL's keys for a run around the training: its name, length, checkpoints, logs, and the model."""

import re
from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    anything,
    built_in,
    converted,
    integer,
    mapped,
    no_effect,
    number,
    run_name,
    text,
    unsupported,
)
from corral.migrate.roll.facts import (
    TRAINING,
    amount,
    instead,
    is_rlvr,
    kl_where,
    natural,
    num_steps,
    on_cluster,
    taken,
    uses_critic,
    validates,
)
from corral.migrate.table import ForeignConfig, idle, lacking, needless, only, same, turned
from corral.recipe.rules import TRACKERS_WITH_PROJECTS

DEMO_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SEES = re.compile(r"(?i)(?:^|[-_/.\d])(?:vl|omni|vision)(?:[-_/.\d]|$)")
TRACKERS = {name: ["console", name] for name in ("tensorboard", "wandb", "swanlab", "trackio", "mlflow")}
TRACKERS["stdout"] = ["console"]
NOT_FOR_WORKERS = re.compile(
    r"(?i)(?:use_modelscope|modelscope|model_download|vllm|sglang|nvte|megatron|hccl|ascend|npu|roll|ray|task_queue|"
    r"multi_stream|cpu_affinity|combined_enable)(?:_.*)?|.*visible_devices"
)
"""Environment variables that only ROLL, what it is built of, or Ray look at."""


# --- name and length


def steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if (steps := num_steps(config)) is not None:
        return mapped("schedule.steps", steps)
    epochs = f"{TRAINING}.num_train_epochs"
    if is_rlvr(config) and epochs in config:
        return converted({"schedule.epochs": config[epochs]}, f"-1: {config[epochs]:g} passes over the data")
    raise ValueError("should be above 0: the number of steps to train")


def epochs(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if is_rlvr(config) and num_steps(config) is None:
        return mapped("schedule.epochs", given.value)
    return no_effect("`max_steps` ends the training")


def every(config: ForeignConfig, key: str) -> int:
    """Steps between two of them; 0 where the run ends before."""
    period, steps = int(taken(config, key)), num_steps(config)
    return 0 if period <= 0 or (steps is not None and period > steps) else period


def save_steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    period = taken(config, "save_steps")
    if every(config, "save_steps") == period:
        return mapped("checkpoint.every", period)
    return converted({"checkpoint.every": 0}, f"every {period} steps of {num_steps(config)}: at the end only")


def keep(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """0 is all of them."""
    period, steps = every(config, "save_steps"), num_steps(config)
    if given.value:
        return mapped("checkpoint.keep", given.value)
    if period and steps is not None:
        return converted(
            {"checkpoint.keep": max(steps // period + 1, 2)}, f"all: {steps // period + 1} of {steps} steps"
        )
    return built_in("there is one, at the end") if steps is not None else unsupported("Corral keeps a number of them")


def eval_steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not validates(config):
        return built_in("off, as in Corral without validation data")
    period = every(config, "eval_steps")
    return mapped("validation.every", period, "" if period else "the run ends before: first and last only")


def resume(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, False):
        return converted({"checkpoint.resume": "never"}, "false: start anew")
    if given.value is True:
        return mapped("checkpoint.resume", "auto")
    return mapped("checkpoint.resume", text(given.value))


def auto_resume(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return built_in("`checkpoint.resume: auto`, unless `resume_from_checkpoint` says otherwise")


# --- folders and trackers


def checkpoint_folder(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("logging.runs", given.value, "the run's folder, with its checkpoints")


def output_folder(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if "checkpoint_config.output_dir" in config:
        return built_in("all of a run is in one folder, that of `checkpoint_config.output_dir`")
    return mapped("logging.runs", given.value)


def trackers(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value not in TRACKERS:
        return unsupported(f"Corral has {', '.join(TRACKERS)}")
    return mapped("logging.trackers", TRACKERS[given.value])


def project(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if taken(config, "track_with") in TRACKERS_WITH_PROJECTS:
        return mapped("logging.project", given.value)
    return no_effect(f"{taken(config, 'track_with')} has no projects")


def variable(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A recipe has names of variables, and never their values."""
    name = given.key.rpartition("system_envs.")[2]
    if NOT_FOR_WORKERS.fullmatch(name):
        return built_in("Corral does not look at it; models are loaded from a folder or from the Hugging Face hub")
    if not on_cluster(config):
        return built_in(f"set {name} where you start `corral train`")
    names = sorted({key.rpartition("system_envs.")[2] for key in config.given if "system_envs." in key})
    passed = [one for one in names if not NOT_FOR_WORKERS.fullmatch(one)]
    return converted({"cluster.environment": passed}, f"set {name} where you start `corral train`: workers get it")


def call_timeout(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if on_cluster(config):
        return mapped("cluster.call_timeout_s", given.value)
    return built_in("there is one process, and nobody to wait for")


# --- the model


def model(config: ForeignConfig, given: ForeignValue) -> Outcome:
    path = taken(config, "pretrain")
    if three_paths(config):
        return no_effect("every role names its model itself")
    if SEES.search(path):
        return instead({"model.path": path}, "Corral trains on text; it has no models that see")
    return mapped("model.path", path)


def three_paths(config: ForeignConfig) -> bool:
    """Only then do ROLL's roles have models of their own."""
    roles = ("actor_train", "actor_infer", "reference")
    return all(f"{role}.model_args.model_name_or_path" in config for role in roles)


def actor_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not three_paths(config):
        return no_effect("ROLL takes `pretrain`, unless actor_train, actor_infer and reference all have one")
    if given.value != config["actor_train.model_args.model_name_or_path"]:
        return unsupported("the engine plays with the weights that are trained")
    return mapped("model.path", given.value)


def reference_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not three_paths(config):
        return no_effect("ROLL takes `pretrain`, unless actor_train, actor_infer and reference all have one")
    if kl_where(config) is None or given.value == config["actor_train.model_args.model_name_or_path"]:
        return built_in("the model as it was before training, where there is KL")
    return mapped("reference.path", given.value)


def critic_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not uses_critic(config):
        return no_effect(f"{taken(config, 'adv_estimator')} has no critic")
    own = config["critic.model_args.model_name_or_path"] or config["reward_pretrain"]
    if own == taken(config, "pretrain"):
        return built_in("the critic starts as a copy of the model")
    return mapped("critic.path", own)


def hidden(value: Any) -> str:
    """A key is nobody's business, and reports are shown around."""
    return "(not shown)"


DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def dtype(config: ForeignConfig, given: ForeignValue) -> Outcome:
    main = config["actor_train.model_args.dtype"] or "bf16"
    value = given.value or "bf16"
    if value not in DTYPES:
        raise ValueError(f"should be one of {', '.join(DTYPES)}")
    if main in DTYPES and value != main:
        return unsupported(f"all roles compute alike in Corral: {main}, as actor_train")
    return mapped("model.dtype", DTYPES[value])


ROWS = [
    turned("exp_name", text, run_name, "agentic_pipeline"),
    same("seed", "seed", integer, 42),
    turned("max_steps", integer, steps, 500),
    turned(f"{TRAINING}.num_train_epochs", amount, epochs),
    turned("save_steps", integer, save_steps, 10_000),
    turned("max_ckpt_to_keep", natural, keep, 0),
    turned("eval_steps", integer, eval_steps, 10),
    needless("logging_steps", "the metrics of every step are written"),
    turned("resume_from_checkpoint", anything, resume),
    turned("auto_resume", anything, auto_resume),
    turned("checkpoint_config.output_dir", text, checkpoint_folder),
    only("checkpoint_config.type", text, ("file_system",), "files, as in Corral", "Corral writes checkpoints to files"),
    needless("checkpoint_config.**", "Corral writes a checkpoint into the run's folder and goes on when it is whole"),
    turned("output_dir", text, output_folder),
    needless("base_dir", "all of a run is in one folder"),
    needless("logging_dir", "all of a run is in one folder"),
    needless("rollout_dump_dir", "every trajectory is written to the run's folder"),
    needless("dump_run_name", "every trajectory is written to the run's folder"),
    needless("otlp_output_dir", "all of a run is in one folder"),
    idle("render_save_dir", "nothing draws frames"),
    turned("track_with", text, trackers, "tensorboard"),
    turned("tracker_kwargs.project", text, project),
    needless("tracker_kwargs.log_dir", "all of a run is in one folder"),
    needless("tracker_kwargs.name", "a tracker's run is called as the run is"),
    turned(
        "tracker_kwargs.api_key",
        hidden,
        lambda *_: built_in("keys are not for recipes: set WANDB_API_KEY where you start `corral train`"),
    ),
    turned(
        "tracker_kwargs.login_kwargs.**",
        hidden,
        lambda *_: built_in("keys are not for recipes: log in where you start `corral train`"),
    ),
    lacking("tracker_kwargs.**", "of a tracker's settings Corral has the project"),
    turned("system_envs.**", anything, variable),
    turned("*.system_envs.**", anything, variable),
    turned("rpc_timeout", number, call_timeout),
    turned("pretrain", text, model, DEMO_MODEL),
    turned("reward_pretrain", text, critic_path),
    turned("actor_train.model_args.model_name_or_path", text, actor_path),
    turned("actor_infer.model_args.model_name_or_path", text, actor_path),
    turned("reference.model_args.model_name_or_path", text, reference_path),
    turned("critic.model_args.model_name_or_path", text, critic_path),
    needless("model_download_type", "models are loaded from a folder or from the Hugging Face hub"),
    turned("actor_train.model_args.dtype", text, dtype, "bf16"),
    *[turned(f"{role}.model_args.dtype", text, dtype) for role in ("actor_infer", "reference", "critic")],
]
