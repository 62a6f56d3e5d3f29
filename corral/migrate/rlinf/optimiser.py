"""RLinf's optimisers, the actor's and the critic's: Megatron and FSDP have keys of their own for the learning rate."""

import math

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
    text,
    unsupported,
)
from corral.migrate.rlinf.facts import area, has_critic, is_fsdp, said, usual
from corral.migrate.rlinf.model import backend, critic_path
from corral.migrate.table import Convert, ForeignConfig, KeyRow, idle, needless, only, turned

TRAIN_ITERATIONS = 100_000
"""Over which Megatron's learning rate decays where `lr_decay_iters` is null: RLinf sets it so."""
TORCH_COSINE_END = 1e-6
"""Of `lr_scheduler: torch_cosine`, whatever else is said."""


def optimiser_rows(role: str, ours: str) -> tuple[KeyRow, ...]:
    optim, schedule = f"{role}.optim", f"{role}.lr_sched"

    def used(convert: Convert) -> Convert:
        def guarded(config: ForeignConfig, given: ForeignValue) -> Outcome:
            if role == "critic" and not has_critic(config):
                return no_effect("there is no critic")
            return convert(config, given)

        return guarded

    def megatron(convert: Convert) -> Convert:
        def guarded(config: ForeignConfig, given: ForeignValue) -> Outcome:
            return no_effect("only Megatron's trainer reads it") if is_fsdp(config, role) else convert(config, given)

        return used(guarded)

    def fsdp(convert: Convert) -> Convert:
        def guarded(config: ForeignConfig, given: ForeignValue) -> Outcome:
            return convert(config, given) if is_fsdp(config, role) else no_effect("only FSDP's trainer reads it")

        return used(guarded)

    def to(key: str) -> Convert:
        return used(lambda _, given: mapped(f"{ours}.{key}", given.value))

    def betas(config: ForeignConfig, given: ForeignValue) -> Outcome:
        both = [said(config, f"{optim}.adam_beta{which}") for which in (1, 2)]
        return converted({f"{ours}.betas": both}, f"both betas: {both[0]:g} and {both[1]:g}")

    def decays(config: ForeignConfig) -> bool:
        if is_fsdp(config, role):
            return said(config, f"{optim}.lr_scheduler") in ("cosine", "torch_cosine")
        return said(config, f"{schedule}.lr_decay_style") in ("linear", "cosine")

    def lowest(config: ForeignConfig) -> dict[str, float]:
        """Where the decay ends, as a share of the rate."""
        key, rate = f"{ours}.min_learning_rate_ratio", said(config, f"{optim}.lr")
        if not is_fsdp(config, role):
            least = config[f"{schedule}.min_lr"] or 0.0
        elif config[f"{optim}.lr_scheduler"] == "torch_cosine":
            least = TORCH_COSINE_END
        elif config[f"{optim}.min_lr_rate"] is not None:
            return {key: config[f"{optim}.min_lr_rate"]}
        else:
            least = config[f"{optim}.min_lr"] or 0.0
        if rate <= 0 or not 0 <= least <= rate:
            raise ValueError(f"would let the learning rate {rate:g} end at {least:g}, which should not be above it")
        return {key: least / rate}

    def decay(config: ForeignConfig, given: ForeignValue) -> Outcome:
        kind = {"torch_constant": "constant", "torch_cosine": "cosine"}.get(given.value, given.value or "constant")
        if kind not in ("constant", "linear", "cosine"):
            return unsupported("there are constant, linear and cosine")
        if kind == "constant":
            return mapped(f"{ours}.schedule", kind)
        length = "total_training_steps" if is_fsdp(config, role) else "lr_decay_iters"
        note = f"{kind}, over the whole run; in RLinf over {length}, which should be as long"
        return converted({f"{ours}.schedule": kind, **lowest(config)}, note)

    def minimum(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if not decays(config):
            return no_effect("the learning rate is constant")
        ratio = lowest(config)
        return converted(
            ratio, f"{format_value(given.value)}: a share of {next(iter(ratio.values())):g} of the learning rate"
        )

    def decay_length(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if decays(config):
            return built_in("the whole run, which it should be as long as")
        return built_in("what the share for warming up is a share of")

    def warmup_share(config: ForeignConfig, given: ForeignValue) -> Outcome:
        iterations = config[f"{schedule}.lr_decay_iters"] or TRAIN_ITERATIONS
        return warmup(given.value or 0.0, iterations, "lr_decay_iters", 1)

    def warmup_iterations(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if not given.value or f"{schedule}.lr_warmup_fraction" in config:
            return built_in("lr_warmup_fraction counts" if given.value else "none")
        return mapped(f"{ours}.warmup_steps", given.value, "both count updates")

    def fsdp_updates(config: ForeignConfig) -> int:
        """FSDP's learning rate changes once a step."""
        updates: int = said(config, "algorithm.n_minibatches")
        return 1 if config["actor.lr_sched_sync_with_optim"] else updates

    def warmup_steps(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if given.value is None or given.value < 0:
            return built_in("lr_warmup_steps_ratio counts")
        updates = given.value * fsdp_updates(config)
        note = f"{given.value} steps of {fsdp_updates(config)} updates: {updates} updates"
        return converted({f"{ours}.warmup_steps": updates}, note)

    def warmup_steps_share(config: ForeignConfig, given: ForeignValue) -> Outcome:
        steps = config[f"{optim}.lr_warmup_steps"]
        if steps is not None and steps >= 0:
            return no_effect("lr_warmup_steps counts")
        length = config[f"{optim}.total_training_steps"] or 0
        return warmup(given.value or 0.0, length, "total_training_steps", fsdp_updates(config))

    def warmup(share: float, length: int, words: str, each: int) -> Outcome:
        updates = math.floor(share * length + 1e-9) * each  # 0.29 x 100 is 29
        note = f"{share:g} of {words} {length}: {updates} update{'s' * (updates != 1)}"
        return converted({f"{ours}.warmup_steps": updates}, note)

    return (
        usual(f"{optim}.lr", number, to("learning_rate")),
        usual(f"{optim}.adam_beta1", number, used(betas)),
        usual(f"{optim}.adam_beta2", number, used(betas)),
        usual(f"{optim}.adam_eps", number, to("epsilon")),
        usual(f"{optim}.weight_decay", number, to("weight_decay")),
        usual(f"{optim}.clip_grad", number, to("max_gradient_norm")),
        only(f"{optim}.optimizer", text, ("adam", "adamw"), "AdamW", "there is only AdamW"),
        turned(f"{optim}.min_lr", number, fsdp(minimum)),
        turned(f"{optim}.min_lr_rate", number, fsdp(minimum)),
        usual(f"{optim}.lr_scheduler", text, fsdp(decay)),
        turned(f"{optim}.total_training_steps", integer, fsdp(decay_length)),
        turned(f"{optim}.lr_warmup_steps", integer, fsdp(warmup_steps)),
        turned(f"{optim}.lr_warmup_steps_ratio", number, fsdp(warmup_steps_share)),
        only(f"{optim}.num_cycles", number, (0.5,), "half a wave", "the cosine falls once: 0.5"),
        *area(f"{optim}", "Corral's optimiser shards, scales float16's loss and overlaps by itself"),
        usual(f"{schedule}.lr_decay_style", text, megatron(decay)),
        usual(f"{schedule}.lr_decay_iters", integer, megatron(decay_length)),
        usual(f"{schedule}.lr_warmup_fraction", number, megatron(warmup_share)),
        turned(f"{schedule}.lr_warmup_iters", integer, megatron(warmup_iterations)),
        only(f"{schedule}.lr_warmup_init", number, (0,), "from 0", "warming up begins at 0"),
        turned(f"{schedule}.min_lr", number, megatron(minimum)),
        idle(f"{schedule}.max_lr", "optim.lr is the learning rate"),
        *(same_as_decay(f"{schedule}.{end}_weight_decay", f"{optim}.weight_decay") for end in ("start", "end")),
        *area(f"{schedule}", "the learning rate goes on where a run goes on"),
    )


def same_as_decay(key: str, decay: str) -> KeyRow:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if given.value in (None, said(config, decay)):
            return built_in("weight decay is constant")
        return unsupported("weight decay is constant")

    return turned(key, number, convert)


ROWS = (
    *optimiser_rows("actor", "optimiser"),
    turned("critic.training_backend", text, backend, "megatron"),
    turned("critic.model.model_path", text, critic_path),
    *optimiser_rows("critic", "critic.optimiser"),
    needless("critic.**", "the critic is spread, offloaded and computed as the actor is"),
)
