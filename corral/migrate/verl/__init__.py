"""verl, from 0.3 on: its keys in the order in which they are read. What goes together is beside it, in its folder."""

import re
from pathlib import PurePosixPath

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    as_path,
    boolean,
    built_in,
    converted,
    integer,
    mapped,
    no_effect,
    number,
    run_name,
    text,
    texts,
    unsupported,
)
from corral.migrate.table import ForeignConfig, KeyRow, KeyTable, lacking, needless, only, provided, same, turned
from corral.migrate.verl.algorithm import ALGORITHM
from corral.migrate.verl.batch import ACTOR, MODEL, NO_CRITIC, REF, SIZES, has_critic
from corral.migrate.verl.correction import CORRECTIONS
from corral.migrate.verl.data import DATA, NOT_VALIDATED, REWARDS, SAMPLING, TOOLS, validates
from corral.migrate.verl.kl import KL, has_reference
from corral.migrate.verl.optimiser import OPTIMISERS
from corral.migrate.verl.rows import ALL, NO_REFERENCE, SPEED, TEXT_ONLY
from corral.recipe.rules import TRACKERS_WITH_PROJECTS
from corral.recipe.schema import Checkpoint

TRACKERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
}
OF_PICTURES = re.compile(r"(?:vl\d*|vision|omni|llava|\dv)(?![a-z0-9])", re.IGNORECASE)
"""Qwen2.5-VL-7B-Instruct, InternVL3-2B, GLM-4.1V-9B"""


# --- models


def recompute(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value:
        return converted({"train.recompute": "full"}, "activations are computed again in the backward pass")
    return converted({"train.recompute": "none"}, "activations are kept for the backward pass")


def dtype(config: ForeignConfig, given: ForeignValue) -> Outcome:
    found = DTYPES.get(given.value)
    if found is None and given.value is not None:
        return unsupported("Corral computes in float32, bfloat16 or float16")
    return mapped("model.dtype", found) if found in ("float16", "float32") else built_in("auto, on a GPU")


def model_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A model of pictures is told by its name only: their rows need no key that says so."""
    if OF_PICTURES.search(PurePosixPath(given.value or "").name):
        words = f"by its name a model of pictures, and {TEXT_ONLY}"
        return Outcome("unsupported", {as_path("model.path"): given.value}, words)
    return mapped("model.path", given.value)


def tokenizer(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, config[f"{MODEL}.path"]):
        return built_in("the model's own")
    return unsupported("the tokenizer is the model's")


def critic_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, config[f"{MODEL}.path"]):
        return built_in("a critic starts as a copy of the model")
    return mapped("critic.path", given.value)


def critic_enabled(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in (None, has_critic(config)):
        return built_in("a critic is there for gae only")
    return unsupported("a critic is there for gae, and only for it")


def critic_warmup(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """Steps count from 1 there, and the actor learns from step `critic_warmup` on."""
    alone = max(0, (given.value or 0) - 1)
    if not alone:
        return built_in("the actor learns from the first step on")
    words = f"the actor learns from step {given.value} on: {alone} step{'s' * (alone > 1)} of the critic alone"
    return converted({"critic.warmup_steps": alone}, words)


# --- names and places


def trackers_of(config: ForeignConfig) -> list[str]:
    return [name for name in config["trainer.logger"] or [] if name in TRACKERS]


def trackers(config: ForeignConfig, given: ForeignValue) -> Outcome:
    ours = {as_path("logging.trackers"): trackers_of(config)}
    unknown = [name for name in given.value or [] if name not in (*TRACKERS, "file")]
    if unknown:
        return Outcome("unsupported", ours, f"{', '.join(unknown)}: Corral knows {', '.join(TRACKERS)}")
    return Outcome("mapped", ours, "metrics.jsonl is always written" * ("file" in (given.value or [])))


def project(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not TRACKERS_WITH_PROJECTS.intersection(trackers_of(config)):
        return built_in("no tracker here has projects")
    return mapped("logging.project", given.value)


def runs_folder(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not given.value:
        return built_in("`runs`")
    if given.value.startswith(("hdfs:", "s3:")):
        raise ValueError("should be on a disk that all nodes see")
    folder, name = PurePosixPath(given.value), str(config["trainer.experiment_name"] or "")
    if folder == PurePosixPath("checkpoints") / str(config["trainer.project_name"] or "") / name:
        return built_in("runs/NAME")
    if folder.name != name:
        return mapped("logging.runs", given.value, "a run has a folder of its own in it, by its name")
    return converted({"logging.runs": str(folder.parent)}, f"a run's folder is {folder.parent}/{name} here, too")


# --- length, validation, checkpoints


def epochs(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if "trainer.total_training_steps" in config:
        return no_effect("`total_training_steps` decides")
    return mapped("schedule.epochs", given.value)


def steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return built_in("`total_epochs` decides") if given.value is None else mapped("schedule.steps", given.value)


def validation_every(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if (given.value or 0) > 0:
        return mapped("validation.every", given.value)
    return converted({"validation.every": 0, "validation.after_training": False}, "none in between, none at the end")


def checkpoint_every(config: ForeignConfig, given: ForeignValue) -> Outcome:
    keep = "" if "trainer.max_actor_ckpt_to_keep" in config else f"; the newest {Checkpoint().keep} are kept"
    if (given.value or 0) <= 0:
        return converted({"checkpoint.every": 0}, "at the end only")
    return mapped("checkpoint.every", given.value, f"and at the end{keep}")


def keep(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in(f"all there, the newest {Checkpoint().keep} here: `checkpoint.keep`")
    return mapped("checkpoint.keep", given.value)


def newest_only(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return mapped("checkpoint.keep", 1) if given.value else built_in("see `max_actor_ckpt_to_keep`")


def resume(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value == "resume_path":
        return unsupported("a checkpoint of verl's cannot be gone on from; export its model and name that")
    if given.value not in ("auto", "disable", None):
        raise ValueError("should be auto, disable or resume_path")
    return mapped("checkpoint.resume", "never" if given.value == "disable" else "auto")


def resume_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if config["trainer.resume_mode"] != "resume_path":
        return no_effect("`resume_mode` is not resume_path")
    return unsupported("a checkpoint of verl's cannot be gone on from; export its model and name that")


def of_validation(row: KeyRow) -> KeyRow:
    return provided(row, validates, NOT_VALIDATED)


# --- rows

TRAINER = (
    turned("trainer.experiment_name", text, run_name, "gsm8k"),
    turned("trainer.logger", texts, trackers, ["console", "wandb"]),
    turned("trainer.project_name", text, project, "verl_examples"),
    turned("trainer.default_local_dir", text, runs_folder),
    turned("trainer.total_epochs", number, epochs, 30),
    turned("trainer.total_training_steps", integer, steps),
    of_validation(same("trainer.val_before_train", "validation.before_training", boolean)),
    of_validation(turned("trainer.test_freq", integer, validation_every, -1)),
    same("trainer.log_val_generations", "logging.samples", integer),
    turned("trainer.save_freq", integer, checkpoint_every),
    turned("trainer.max_actor_ckpt_to_keep", integer, keep),
    turned("trainer.remove_previous_ckpt_in_save", boolean, newest_only),
    needless("trainer.max_critic_ckpt_to_keep", "a checkpoint holds actor and critic"),
    turned("trainer.resume_mode", text, resume),
    turned("trainer.resume_from_path", text, resume_path),
    lacking("trainer.val_only", "this is `corral evaluate`"),
    lacking("trainer.default_hdfs_dir", "checkpoints are on a disk only"),
    lacking("trainer.checkpoint_callback_class", "nothing is called when a checkpoint is saved"),
    needless("trainer.rollout_data_dir", "every trajectory is written to the run's folder"),
    needless("trainer.validation_data_dir", "every trajectory is written to the run's folder"),
    needless("trainer.del_local_ckpt_after_load", "`checkpoint.keep`"),
    needless("trainer.ray_wait_register_center_timeout", "`cluster.start_timeout_s`"),
    *(
        needless(f"trainer.{key}", SPEED)
        for key in ("balance_batch", "balance_keep_minibatch", "use_v1", "use_legacy_worker_impl", "esi_redundant_time")
    ),
    only("trainer.device", text, ("cuda", "cpu"), "what is there", "Corral runs on CUDA devices and CPUs"),
    only(
        "trainer.v1.trainer_mode",
        text,
        ("sync",),
        "as in Corral",
        "asynchronous: give rollout devices in `cluster.placement`, and set `schedule.max_staleness`",
    ),
    provided(turned("trainer.critic_warmup", integer, critic_warmup), has_critic, NO_CRITIC),
)

MODELS = (
    turned(f"{MODEL}.path", text, model_path, "~/models/deepseek-llm-7b-chat"),
    turned(f"{MODEL}.tokenizer_path", text, tokenizer),
    same(f"{MODEL}.custom_chat_template", "model.chat_template", text),
    same(f"{MODEL}.trust_remote_code", "model.trust_remote_code", boolean),
    turned(f"{MODEL}.enable_gradient_checkpointing", boolean, recompute, True),
    *(turned(f"{ACTOR}.{engine}.dtype", text, dtype) for engine in ("fsdp_config", "megatron", "torchtitan")),
    provided(same(f"{REF}.model.path", "reference.path", text), has_reference, NO_REFERENCE),
    turned("critic.enable", boolean, critic_enabled),
    provided(turned("critic.model.path", text, critic_path), has_critic, NO_CRITIC),
    provided(same("critic.cliprange_value", "critic.value_clip", number), has_critic, NO_CRITIC),
)

ROWS = (*TRAINER, *MODELS, *SIZES, *ALGORITHM, *KL, *CORRECTIONS, *OPTIMISERS, *DATA, *SAMPLING, *REWARDS, *TOOLS, *ALL)

ALIASES = {
    "critic.model.fsdp_config.**": "critic.fsdp.**",
    "critic.fsdp_config.**": "critic.fsdp.**",
    "data.shuffle_train_dataloader": "data.shuffle",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "ray_init.**": "ray_kwargs.ray_init.**",
    "profiler.**": "global_profiler.**",
    f"{ACTOR}.checkpoint.contents": f"{ACTOR}.checkpoint.save_contents",
    "critic.checkpoint.contents": "critic.checkpoint.save_contents",
    f"{MODEL}.use_rmpad": f"{MODEL}.use_remove_padding",
    "critic.model.use_rmpad": "critic.model.use_remove_padding",
    "actor_rollout_ref.rollout.multi_turn.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
}

TABLE = KeyTable("verl", ROWS, ALIASES)
