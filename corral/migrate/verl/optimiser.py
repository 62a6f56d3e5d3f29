"""verl's optimisers and learning rates, of actor and critic. Each of verl's engines has a spelling of its own.

Learning rates change once a step there, and once an update here.
"""

from collections.abc import Iterator
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
    text,
    unsupported,
)
from corral.migrate.table import Convert, ForeignConfig, KeyRow, idle, lacking, needless, only, provided, same, turned
from corral.migrate.verl.batch import ACTOR, NO_CRITIC, has_critic, positive, updates_per_step

SCHEDULES = {
    "constant": "constant",
    "cosine": "cosine",
    "linear": "linear",
    "constant_with_warmup": "constant",
    "cosine_with_warmup": "cosine",
}
SCHEDULE_KEYS = ("warmup_style", "lr_scheduler_type", "lr_decay_style", "decay_type")
"""Whichever was written, the first of them."""
FLOORS = {"min_lr_ratio": True, "min_lr_factor": True, "min_lr": False, "lr_min": False}
"""Where a learning rate ends: whether it is a share of the highest."""


def pair(value: Any) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("two numbers")
    return [number(item) for item in value]


def schedule_of(config: ForeignConfig, optim: str) -> str:
    return next((config[f"{optim}.{key}"] for key in SCHEDULE_KEYS if f"{optim}.{key}" in config), "constant")


def schedule(optim: str, ours: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        found = schedule_of(config, optim)
        if given.value is None or given.value != found:
            return no_effect(f"the learning rate is {found}, as another key says")
        if found not in SCHEDULES:
            return unsupported("learning rates are constant, linear or cosine")
        return mapped(f"{ours}.schedule", SCHEDULES[found])

    return convert


def floor(optim: str, ours: str, is_share: bool) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if SCHEDULES.get(schedule_of(config, optim), "constant") == "constant":
            return no_effect("the learning rate is constant")
        if given.value is None:
            return built_in("it ends at 0")
        if is_share:
            return mapped(f"{ours}.min_learning_rate_ratio", given.value)
        highest = config[f"{optim}.lr"]
        if not highest:
            raise ValueError(f"needs `{optim}.lr`")
        share = given.value / highest
        return converted({f"{ours}.min_learning_rate_ratio": share}, f"{given.value:g} of {highest:g}: {share:g}")

    return convert


def warmup_steps(optim: str, ours: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if given.value is None or given.value <= 0:
            return no_effect("`lr_warmup_steps_ratio` decides")
        each = updates_per_step(config) * positive(config, f"{ACTOR}.ppo_epochs")
        number_of = given.value * each
        words = f"{given.value} steps of {each} update{'s' * (each > 1)}: {number_of} updates"
        return converted({f"{ours}.warmup_steps": number_of}, words)

    return convert


def warmup_ratio(optim: str, ours: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if (config[f"{optim}.lr_warmup_steps"] or 0) > 0:
            return no_effect("`lr_warmup_steps` decides")
        return mapped(f"{ours}.warmup_ratio", given.value) if given.value else built_in("no warm-up")

    return convert


def gradient_norm(role: str, ours: str) -> Convert:
    """Two keys for one thing, of different engines: the one that is not left at 1."""
    keys = (f"{role}.grad_clip", f"{role}.optim.clip_grad")

    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        written = [config[key] for key in keys if key in config]
        return mapped(f"{ours}.max_gradient_norm", next((value for value in written if value != 1), 1.0))

    return convert


def override(ours: str) -> Convert:
    """Arguments of the optimiser's class."""

    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        name = given.key.rpartition(".")[2]
        if name in ("eps", "adam_eps"):
            return mapped(f"{ours}.epsilon", number(given.value))
        if "offload" in name or name.startswith(("overlap", "use_precision_aware", "fused", "foreach")):
            return built_in("memory and speed; `train.offload` moves the optimiser out")
        return unsupported("AdamW has no other arguments in Corral") if given.value else built_in("off")

    return convert


def optimiser_rows(role: str, ours: str, learning_rate: float) -> Iterator[KeyRow]:
    optim = f"{role}.optim"
    yield same(f"{optim}.lr", f"{ours}.learning_rate", number, learning_rate)
    yield same(f"{optim}.betas", f"{ours}.betas", pair)
    yield same(f"{optim}.eps", f"{ours}.epsilon", number)
    yield same(f"{optim}.weight_decay", f"{ours}.weight_decay", number, 0.01)
    yield turned(f"{role}.grad_clip", number, gradient_norm(role, ours))
    yield turned(f"{optim}.clip_grad", number, gradient_norm(role, ours))
    yield turned(f"{optim}.lr_warmup_steps", integer, warmup_steps(optim, ours))
    yield turned(f"{optim}.lr_warmup_steps_ratio", number, warmup_ratio(optim, ours))
    for key in SCHEDULE_KEYS:
        yield turned(f"{optim}.{key}", text, schedule(optim, ours))
    for key, is_share in FLOORS.items():
        yield turned(f"{optim}.{key}", number, floor(optim, ours, is_share))
    for key in ("optimizer", "name"):
        yield only(f"{optim}.{key}", text, ("AdamW", "adamw", "adam", "Adam"), "AdamW", "Corral has AdamW only")
    yield only(f"{optim}.optimizer_impl", text, ("torch.optim",), "AdamW", "Corral has AdamW of PyTorch only")
    yield only(f"{optim}.num_cycles", number, (0.5,), "half a cosine", "a cosine falls once in Corral")
    yield only(f"{optim}.lr_decay_ratio", number, (1,), "to the end", "learning rates fall to the end of training")
    yield only(f"{optim}.weight_decay_incr_style", text, ("constant",), "constant", "weight decay is constant")
    for key in ("lr_warmup_init", "lr_start", "init_lr_ratio"):
        yield lacking(f"{optim}.{key}", "a warm-up begins near 0")
    yield lacking(f"{optim}.lr_decay_steps", "learning rates fall to the end of training")
    yield idle(f"{optim}.lr_wsd_decay_style", "of the schedule WSD, which Corral lacks")
    yield idle(f"{optim}.lr_wsd_decay_steps", "of the schedule WSD, which Corral lacks")
    yield idle(f"{optim}.total_training_steps", "verl fills it in")
    yield needless(f"{optim}.zero_indexed_step", "the first update of a warm-up is not lost")
    yield needless(f"{optim}.use_checkpoint_opt_param_scheduler", "a resumed run goes on with its schedule")
    yield needless(f"{optim}.override_optimizer_config", "nothing is written below it")
    yield turned(f"{optim}.override_optimizer_config.**", anything, override(ours))


OPTIMISERS = (
    *optimiser_rows(ACTOR, "optimiser", 1e-6),
    *(provided(row, has_critic, NO_CRITIC) for row in optimiser_rows("critic", "critic.optimiser", 1e-5)),
)
