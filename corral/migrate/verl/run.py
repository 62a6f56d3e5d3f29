"""verl's models, optimizers, and what is around a training: names, folders, trackers, validation, checkpoints.

Learning rates change once a step in verl, and once an update in Corral.
"""

import re
from pathlib import PurePosixPath
from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    as_path,
    built_in,
    converted,
    mapped,
    no_effect,
    number,
    plural,
    unsupported,
)
from corral.migrate.table import ForeignConfig
from corral.migrate.verl.sizes import ACTOR, MODEL, has_critic, positive, updates_per_step
from corral.recipe.rules import TRACKERS_WITH_PROJECTS
from corral.recipe.schema import Checkpoint

TRACKERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
VISION_MODEL = re.compile(r"(?:vl\d*|vision|omni|llava|\dv)(?![a-z0-9])", re.IGNORECASE)
"""Qwen2.5-VL-7B-Instruct, InternVL3-2B, GLM-4.1V-9B"""
SCHEDULES = {
    "constant": "constant",
    "cosine": "cosine",
    "linear": "linear",
    "constant_with_warmup": "constant",
    "cosine_with_warmup": "cosine",
}
SCHEDULE_KEYS = ("warmup_style", "lr_scheduler_type", "lr_decay_style", "decay_type")
"""Spellings of verl's engines, of which the first that was written counts."""


# --- models


def model_path(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """A vision model is known by its name only: its rows need no key that says so."""
    if VISION_MODEL.search(PurePosixPath(given.value or "").name):
        note = "by its name a model of pictures, and Corral trains on text only"
        return Outcome("unsupported", {as_path("model.path"): given.value}, note)
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
    """Steps count from 1 in verl, and the actor is trained from step `critic_warmup` on."""
    alone = max(0, (given.value or 0) - 1)
    if not alone:
        return built_in("the actor is trained from the first step on")
    note = f"the actor is trained from step {given.value} on: {plural(alone, 'step')} of the critic alone"
    return converted({"critic.warmup_steps": alone}, note)


def has_adapters(config: ForeignConfig, model: str) -> bool:
    return bool(config[f"{model}.lora_rank"] or config[f"{model}.lora.rank"])


# --- names and folders


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


def validation_every(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if (given.value or 0) > 0:
        return mapped("validation.every", given.value)
    return converted({"validation.every": 0, "validation.after_training": False}, "none in between, none at the end")


def checkpoint_every(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if (given.value or 0) <= 0:
        return converted({"checkpoint.every": 0}, "at the end only")
    keep = "" if "trainer.max_actor_ckpt_to_keep" in config else f"; the newest {Checkpoint().keep} are kept"
    return mapped("checkpoint.every", given.value, f"and at the end{keep}")


def checkpoints_to_keep(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in(f"all there, the newest {Checkpoint().keep} here: `checkpoint.keep`")
    return mapped("checkpoint.keep", given.value)


def resumes_from_path(config: ForeignConfig) -> bool:
    return bool(config["trainer.resume_mode"] == "resume_path")


# --- optimizers: `optim` is the section of verl, `ours` that of the recipe


def pair(value: Any) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("two numbers")
    return [number(item) for item in value]


def schedule_of(config: ForeignConfig, optim: str) -> str:
    return next((config[f"{optim}.{key}"] for key in SCHEDULE_KEYS if f"{optim}.{key}" in config), "constant")


def schedule(config: ForeignConfig, given: ForeignValue, optim: str, ours: str) -> Outcome:
    found = schedule_of(config, optim)
    if given.value is None or given.value != found:
        return no_effect(f"the learning rate is {found}, as another key says")
    if found not in SCHEDULES:
        return unsupported("learning rates are constant, linear or cosine")
    return mapped(f"{ours}.schedule", SCHEDULES[found])


def min_ratio(config: ForeignConfig, given: ForeignValue, optim: str, ours: str) -> Outcome:
    if SCHEDULES.get(schedule_of(config, optim), "constant") == "constant":
        return no_effect("the learning rate is constant")
    return built_in("it ends at 0") if given.value is None else mapped(f"{ours}.min_learning_rate_ratio", given.value)


def min_rate(config: ForeignConfig, given: ForeignValue, optim: str, ours: str) -> Outcome:
    found = min_ratio(config, given, optim, ours)
    if found.status != "mapped":
        return found
    highest = config[f"{optim}.lr"]
    if not highest:
        raise ValueError(f"needs `{optim}.lr`")
    ratio = given.value / highest
    return converted({f"{ours}.min_learning_rate_ratio": ratio}, f"{given.value:g} of {highest:g}: {ratio:g}")


def warmup_steps(config: ForeignConfig, given: ForeignValue, ours: str) -> Outcome:
    if given.value is None or given.value <= 0:
        return no_effect("`lr_warmup_steps_ratio` decides")
    each = updates_per_step(config) * positive(config, f"{ACTOR}.ppo_epochs")
    updates = given.value * each
    return converted(
        {f"{ours}.warmup_steps": updates}, f"{given.value} steps of {plural(each, 'update')}: {updates} updates"
    )


def warmup_ratio(config: ForeignConfig, given: ForeignValue, optim: str, ours: str) -> Outcome:
    if (config[f"{optim}.lr_warmup_steps"] or 0) > 0:
        return no_effect("`lr_warmup_steps` decides")
    return mapped(f"{ours}.warmup_ratio", given.value) if given.value else built_in("no warm-up")


def gradient_norm(config: ForeignConfig, given: ForeignValue, role: str, ours: str) -> Outcome:
    """Two keys for one thing, of different engines: the one that is not left at 1 counts."""
    written = [config[key] for key in (f"{role}.grad_clip", f"{role}.optim.clip_grad") if key in config]
    return mapped(f"{ours}.max_gradient_norm", next((value for value in written if value != 1), 1.0))


def optimizer_argument(config: ForeignConfig, given: ForeignValue, ours: str) -> Outcome:
    name = given.key.rpartition(".")[2]
    if name in ("eps", "adam_eps"):
        return mapped(f"{ours}.epsilon", number(given.value))
    if "offload" in name or name.startswith(("overlap", "use_precision_aware", "fused", "foreach")):
        return built_in("memory and speed; `train.offload` moves the optimizer out")
    return unsupported("AdamW has no other arguments in Corral") if given.value else built_in("off")
