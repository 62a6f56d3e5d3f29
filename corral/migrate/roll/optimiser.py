"""ROLL's `training_args`, as far as they say how a model learns: those of `actor_train`, and of `critic`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from corral.migrate.outcome import (
    ABSENT,
    ForeignValue,
    Kind,
    Outcome,
    built_in,
    converted,
    mapped,
    no_effect,
    text,
    unsupported,
)
from corral.migrate.roll.facts import TRAINING, amount, count, natural, share, taken, uses_critic
from corral.migrate.table import ForeignConfig, KeyRow, idle, lacking, needless, only, turned

SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")


@dataclass(frozen=True)
class Learner:
    role: str
    ours: str
    """The section of a recipe."""

    @property
    def rows(self) -> list[KeyRow]:
        rate, warmup = (5e-5, 0) if self.role == "critic" else (1e-6, 10)
        return [
            self.row("learning_rate", amount, self.plain("learning_rate"), rate),
            self.row("weight_decay", amount, self.plain("weight_decay")),
            self.row("warmup_steps", natural, self.warmup_steps, warmup),
            self.row("warmup_ratio", share, self.warmup_ratio),
            self.row("lr_scheduler_type", text, self.schedule, "linear"),
            self.row("lr_scheduler_kwargs.min_lr", amount, self.least),
            self.row("lr_scheduler_kwargs.min_lr_rate", amount, self.least),
            lacking(self.key("lr_scheduler_kwargs.**"), "of a schedule's settings Corral has min_lr and min_lr_rate"),
            self.row("adam_beta1", share, self.betas, 0.9),
            self.row("adam_beta2", share, self.betas, 0.999),
            self.row("adam_epsilon", amount, self.plain("epsilon", "adam_epsilon")),
            idle(self.key("max_grad_norm"), "ROLL takes the one at the top, `max_grad_norm`"),
            only(self.key("optim"), text, ADAMW, "AdamW, as in Corral", "Corral's optimiser is AdamW"),
        ]

    def key(self, name: str) -> str:
        return f"{self.role}.training_args.{name}"

    def row(
        self, name: str, kind: Kind, convert: Callable[[ForeignConfig, ForeignValue], Outcome], default: Any = ABSENT
    ) -> KeyRow:
        """A critic's say something only where there is one."""

        def checked(config: ForeignConfig, given: ForeignValue) -> Outcome:
            if self.role == "critic" and not uses_critic(config):
                return no_effect(f"{taken(config, 'adv_estimator')} has no critic")
            return convert(config, given)

        return turned(self.key(name), kind, checked, default)

    def plain(self, ours: str, name: str | None = None) -> Callable[[ForeignConfig, ForeignValue], Outcome]:
        return lambda config, _: mapped(f"{self.ours}.{ours}", taken(config, self.key(name or ours)))

    def warmup_steps(self, config: ForeignConfig, given: ForeignValue) -> Outcome:
        steps = taken(config, self.key("warmup_steps"))
        if self._is_flat(config):
            return no_effect("the schedule constant has no warm-up there; constant_with_warmup has")
        if steps == 0 and config[self.key("warmup_ratio")]:
            return built_in("`warmup_ratio` says it")
        return mapped(f"{self.ours}.warmup_steps", steps, "both count updates")

    def warmup_ratio(self, config: ForeignConfig, given: ForeignValue) -> Outcome:
        if self._is_flat(config):
            return no_effect("the schedule constant has no warm-up there; constant_with_warmup has")
        if steps := taken(config, self.key("warmup_steps")):
            return no_effect(f"`warmup_steps`, {steps}, goes before it")
        return mapped(f"{self.ours}.warmup_ratio", given.value or None)

    def _is_flat(self, config: ForeignConfig) -> bool:
        is_megatron = config["actor_train.strategy_args.strategy_name"] == "megatron_train"
        return taken(config, self.key("lr_scheduler_type")) == "constant" and not is_megatron

    def schedule(self, config: ForeignConfig, given: ForeignValue) -> Outcome:
        kind = taken(config, self.key("lr_scheduler_type"))
        if kind == "cosine_with_min_lr":
            return mapped(f"{self.ours}.schedule", "cosine", "with `lr_scheduler_kwargs`")
        if kind not in SCHEDULES:
            return unsupported(f"Corral has {', '.join(SCHEDULES)} and cosine_with_min_lr")
        return mapped(f"{self.ours}.schedule", SCHEDULES[kind])

    def least(self, config: ForeignConfig, given: ForeignValue) -> Outcome:
        if config[self.key("lr_scheduler_type")] != "cosine_with_min_lr":
            return no_effect("it belongs to `lr_scheduler_type: cosine_with_min_lr`")
        rate = taken(config, self.key("learning_rate"))
        ratio = given.value / rate if given.key.endswith(".min_lr") else given.value
        if not 0 <= ratio <= 1:
            raise ValueError(f"should be from 0 to the learning rate, {rate:g}")
        return converted({f"{self.ours}.min_learning_rate_ratio": ratio}, f"{ratio:g} of the learning rate {rate:g}")

    def betas(self, config: ForeignConfig, given: ForeignValue) -> Outcome:
        pair = [taken(config, self.key(f"adam_beta{place}")) for place in (1, 2)]
        return converted({f"{self.ours}.betas": pair}, f"betas {pair[0]:g} and {pair[1]:g}")


def gradient_norm(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value == 0:
        return converted({"optimiser.max_gradient_norm": 1e9}, "0, never clipped: a bound that no gradient reaches")
    return mapped("optimiser.max_gradient_norm", given.value)


def critic_batch(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not uses_critic(config):
        return no_effect(f"{taken(config, 'adv_estimator')} has no critic")
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    own = math.prod(taken(config, f"{TRAINING}.{name}") for name in names)
    written = math.prod(config[f"critic.training_args.{name}"] or 1 for name in names)
    if written == own:
        return built_in("the critic learns in the same updates as the model")
    return unsupported(f"the critic learns in the same updates as the model, of {own} for each device")


ROWS = [
    *Learner("actor_train", "optimiser").rows,
    turned("max_grad_norm", amount, gradient_norm),
    *Learner("critic", "critic.optimiser").rows,
    turned("critic.training_args.per_device_train_batch_size", count, critic_batch),
    turned("critic.training_args.gradient_accumulation_steps", count, critic_batch),
    idle("critic.training_args.num_train_epochs", "`max_steps` ends the training"),
    needless("critic.training_args.**", "Corral's own trainer"),
]
