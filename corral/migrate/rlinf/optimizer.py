"""RLinf's optimizers, the actor's and the critic's: Megatron and FSDP have keys of their own for the learning rate."""

import math

from corral.migrate.rlinf.facts import area, has_critic, is_fsdp, said, usual
from corral.migrate.rlinf.model import backend, critic_path
from corral.migrate.table import (
    Convert,
    Given,
    Outcome,
    Reading,
    Row,
    built_in,
    converted,
    idle,
    mapped,
    needless,
    no_effect,
    number,
    only,
    show,
    text,
    turned,
    unsupported,
    whole,
)

TRAIN_ITERATIONS = 100_000
"""Over which Megatron's learning rate decays where `lr_decay_iters` is null: RLinf sets it so."""
TORCH_COSINE_END = 1e-6
"""Of `lr_scheduler: torch_cosine`, whatever else is said."""


def optimizer_rows(role: str, ours: str) -> tuple[Row, ...]:
    optim, schedule = f"{role}.optim", f"{role}.lr_sched"

    def used(convert: Convert) -> Convert:
        def guarded(reading: Reading, given: Given) -> Outcome:
            if role == "critic" and not has_critic(reading):
                return no_effect("there is no critic")
            return convert(reading, given)

        return guarded

    def megatron(convert: Convert) -> Convert:
        def guarded(reading: Reading, given: Given) -> Outcome:
            return no_effect("only Megatron's trainer reads it") if is_fsdp(reading, role) else convert(reading, given)

        return used(guarded)

    def fsdp(convert: Convert) -> Convert:
        def guarded(reading: Reading, given: Given) -> Outcome:
            return convert(reading, given) if is_fsdp(reading, role) else no_effect("only FSDP's trainer reads it")

        return used(guarded)

    def to(key: str) -> Convert:
        return used(lambda _, given: mapped(f"{ours}.{key}", given.value))

    def betas(reading: Reading, given: Given) -> Outcome:
        both = [said(reading, f"{optim}.adam_beta{which}") for which in (1, 2)]
        return converted({f"{ours}.betas": both}, f"both betas: {both[0]:g} and {both[1]:g}")

    def decays(reading: Reading) -> bool:
        if is_fsdp(reading, role):
            return said(reading, f"{optim}.lr_scheduler") in ("cosine", "torch_cosine")
        return said(reading, f"{schedule}.lr_decay_style") in ("linear", "cosine")

    def lowest(reading: Reading) -> dict[str, float]:
        """Where the decay ends, as a share of the rate."""
        key, rate = f"{ours}.min_learning_rate_ratio", said(reading, f"{optim}.lr")
        if not is_fsdp(reading, role):
            least = reading[f"{schedule}.min_lr"] or 0.0
        elif reading[f"{optim}.lr_scheduler"] == "torch_cosine":
            least = TORCH_COSINE_END
        elif reading[f"{optim}.min_lr_rate"] is not None:
            return {key: reading[f"{optim}.min_lr_rate"]}
        else:
            least = reading[f"{optim}.min_lr"] or 0.0
        if rate <= 0 or not 0 <= least <= rate:
            raise ValueError(f"would let the learning rate {rate:g} end at {least:g}, which should not be above it")
        return {key: least / rate}

    def decay(reading: Reading, given: Given) -> Outcome:
        kind = {"torch_constant": "constant", "torch_cosine": "cosine"}.get(given.value, given.value or "constant")
        if kind not in ("constant", "linear", "cosine"):
            return unsupported("there are constant, linear and cosine")
        if kind == "constant":
            return mapped(f"{ours}.schedule", kind)
        length = "total_training_steps" if is_fsdp(reading, role) else "lr_decay_iters"
        note = f"{kind}, over the whole run; in RLinf over {length}, which should be as long"
        return converted({f"{ours}.schedule": kind, **lowest(reading)}, note)

    def minimum(reading: Reading, given: Given) -> Outcome:
        if not decays(reading):
            return no_effect("the learning rate is constant")
        ratio = lowest(reading)
        return converted(ratio, f"{show(given.value)}: a share of {next(iter(ratio.values())):g} of the learning rate")

    def decay_length(reading: Reading, given: Given) -> Outcome:
        if decays(reading):
            return built_in("the whole run, which it should be as long as")
        return built_in("what the share for warming up is a share of")

    def warmup_share(reading: Reading, given: Given) -> Outcome:
        iterations = reading[f"{schedule}.lr_decay_iters"] or TRAIN_ITERATIONS
        return warmup(given.value or 0.0, iterations, "lr_decay_iters", 1)

    def warmup_iterations(reading: Reading, given: Given) -> Outcome:
        if not given.value or f"{schedule}.lr_warmup_fraction" in reading:
            return built_in("lr_warmup_fraction counts" if given.value else "none")
        return mapped(f"{ours}.warmup_steps", given.value, "both count updates")

    def fsdp_updates(reading: Reading) -> int:
        """FSDP's learning rate changes once a step."""
        updates: int = said(reading, "algorithm.n_minibatches")
        return 1 if reading["actor.lr_sched_sync_with_optim"] else updates

    def warmup_steps(reading: Reading, given: Given) -> Outcome:
        if given.value is None or given.value < 0:
            return built_in("lr_warmup_steps_ratio counts")
        updates = given.value * fsdp_updates(reading)
        note = f"{given.value} steps of {fsdp_updates(reading)} updates: {updates} updates"
        return converted({f"{ours}.warmup_steps": updates}, note)

    def warmup_steps_share(reading: Reading, given: Given) -> Outcome:
        steps = reading[f"{optim}.lr_warmup_steps"]
        if steps is not None and steps >= 0:
            return no_effect("lr_warmup_steps counts")
        length = reading[f"{optim}.total_training_steps"] or 0
        return warmup(given.value or 0.0, length, "total_training_steps", fsdp_updates(reading))

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
        turned(f"{optim}.total_training_steps", whole, fsdp(decay_length)),
        turned(f"{optim}.lr_warmup_steps", whole, fsdp(warmup_steps)),
        turned(f"{optim}.lr_warmup_steps_ratio", number, fsdp(warmup_steps_share)),
        only(f"{optim}.num_cycles", number, (0.5,), "half a wave", "the cosine falls once: 0.5"),
        *area(f"{optim}", "Corral's optimizer shards, scales float16's loss and overlaps by itself"),
        usual(f"{schedule}.lr_decay_style", text, megatron(decay)),
        usual(f"{schedule}.lr_decay_iters", whole, megatron(decay_length)),
        usual(f"{schedule}.lr_warmup_fraction", number, megatron(warmup_share)),
        turned(f"{schedule}.lr_warmup_iters", whole, megatron(warmup_iterations)),
        only(f"{schedule}.lr_warmup_init", number, (0,), "from 0", "warming up begins at 0"),
        turned(f"{schedule}.min_lr", number, megatron(minimum)),
        idle(f"{schedule}.max_lr", "optim.lr is the learning rate"),
        *(same_as_decay(f"{schedule}.{end}_weight_decay", f"{optim}.weight_decay") for end in ("start", "end")),
        *area(f"{schedule}", "the learning rate goes on where a run goes on"),
    )


def same_as_decay(key: str, decay: str) -> Row:
    def convert(reading: Reading, given: Given) -> Outcome:
        if given.value in (None, said(reading, decay)):
            return built_in("weight decay is constant")
        return unsupported("weight decay is constant")

    return turned(key, number, convert)


ROWS = (
    *optimizer_rows("actor", "optimizer"),
    turned("critic.training_backend", text, backend, "megatron"),
    turned("critic.model.model_path", text, critic_path),
    *optimizer_rows("critic", "critic.optimizer"),
    needless("critic.**", "the critic is spread, offloaded and computed as the actor is"),
)
