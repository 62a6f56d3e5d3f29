"""RLinf's runner: what is done, how long, and what it leaves behind."""

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    built_in,
    converted,
    format_value,
    integer,
    mapped,
    no_effect,
    number,
    run_name,
    text,
    texts,
    unsupported,
)
from corral.migrate.rlinf.facts import NEVER_VALIDATES, all_of, area, usual
from corral.migrate.table import ForeignConfig, idle, lacking, needless, same, turned
from corral.recipe.keys import KeyPath
from corral.recipe.rules import TRACKERS_WITH_PROJECTS

TRACKERS = ("tensorboard", "wandb", "swanlab")
OTHER_TASKS = {
    "embodied": "robots are not trained",
    "embodied_eval": "robots are not evaluated",
    "reasoning_eval": "it trains nothing",
    "coding_online_rl": "programs judged by those who write code with the model are not trained on",
    "sft": "there is no supervised training",
    "offline": "there is no training from recorded data",
}


def task_type(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value in ("math", "reasoning"):
        return built_in("tasks with an answer to compare with")
    return unsupported(OTHER_TASKS.get(given.value, "only reasoning tasks are trained"))


def max_epochs(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if config["runner.max_steps"] is not None and config["runner.max_steps"] >= 0:
        return no_effect("max_steps ends the run; RLinf would also stop after max_epochs, were that sooner")
    return mapped("schedule.epochs", given.value)


def max_steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value < 0:
        return built_in("by epochs")
    return mapped("schedule.steps", given.value)


def save_interval(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 0:
        ours = {"checkpoint.every": 0, "checkpoint.at_end": False}
        return converted(ours, f"{format_value(given.value)}: none, at the end neither")
    steps = config["runner.max_steps"]
    if steps is not None and 0 <= steps < given.value:
        return converted({"checkpoint.every": 0}, f"every {given.value} steps of {steps}: at the end only")
    return mapped("checkpoint.every", given.value, "the last 2 are kept (`checkpoint.keep`), RLinf keeps all")


def resume_dir(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return converted({"checkpoint.resume": "never"}, "null starts anew each time; auto would go on")
    if given.value == "auto":
        return mapped("checkpoint.resume", "auto")
    return unsupported("checkpoints of RLinf cannot be read: give the model converted for Hugging Face as its path")


def trackers(config: ForeignConfig, given: ForeignValue) -> Outcome:
    named = given.value or []
    path: KeyPath = ("logging", "trackers")
    ours = {path: ["console", *(name for name in named if name in TRACKERS)]}
    if strange := [name for name in named if name not in TRACKERS]:
        return Outcome("unsupported", ours, f"there is no tracker {' or '.join(strange)}")
    return Outcome("mapped", ours)


def project(config: ForeignConfig, given: ForeignValue) -> Outcome:
    backends = config["runner.logger.logger_backends"] or []
    if given.value is None or not TRACKERS_WITH_PROJECTS.intersection(backends):
        return no_effect("tensorboard has no projects")
    return mapped("logging.project", given.value)


ROWS = (
    turned("runner.task_type", text, task_type),
    turned("runner.logger.logger_backends", texts, trackers),
    turned("runner.logger.project_name", text, project),
    *area("runner.logger", "a run has one folder, of its name in `logging.runs`"),
    usual("runner.max_epochs", number, max_epochs),
    turned("runner.max_steps", integer, max_steps),
    idle("runner.val_check_interval", f"{NEVER_VALIDATES}; `validation.every` does"),
    usual("runner.save_interval", integer, save_interval),
    turned("runner.resume_dir", text, resume_dir, None),
    usual("runner.experiment_name", text, run_name),
    same("runner.output_dir", "logging.runs", text),
    lacking("runner.only_eval", "it only evaluates"),
    *all_of(needless, "runner", "per_worker_log per_worker_log_path", "each worker has a log in the run's folder"),
)
