"""verl's corrections for tokens that another policy drew than the one that is trained, as three versions spell them."""

from typing import Any

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    anything,
    boolean,
    built_in,
    converted,
    no_effect,
    number,
    text,
    unsupported,
)
from corral.migrate.table import ForeignConfig, lacking, needless, turned
from corral.migrate.verl.batch import ACTOR

CORRECTION = "algorithm.rollout_correction"
NO_VETO = "Corral has no veto on sequences with an unlikely token"
REJECTIONS = {"token_k1": "token", "seq_sum_k1": "sequence", "token": "token", "sequence": "sequence"}
"""By whose ratio, in verl's words of today and of before."""


def bounds(threshold: Any) -> tuple[float | None, float]:
    """`2.0`, or `0.5_2.0`: floor and cap."""
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or min(numbers) <= 0:
        raise ValueError("needs a threshold such as 2.0 or 0.5_2.0")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def weights(level: str, floor: float | None, cap: float) -> Outcome:
    """Importance weights: truncated at the cap, or without what is out of bounds where there is a floor."""
    if level not in ("token", "sequence"):
        return unsupported(f"Corral weighs tokens or sequences, not by {level}")
    if floor is None:
        return corrected(f"{level}_tis", f"weights of {level}s, at most {cap:g}", cap=cap)
    if level == "sequence":
        return unsupported("bounds on two sides are of tokens in Corral (icepop)")
    return corrected("icepop", f"weights of tokens, dropped outside {floor:g} to {cap:g}", floor=floor, cap=cap)


def corrected(name: str, words: str, **values: Any) -> Outcome:
    ours = {f"algorithm.correction.{key}": value for key, value in {"name": name, **values}.items()}
    return converted({**ours, "algorithm.old_logprobs": "recompute"}, words)


def correction(config: ForeignConfig, given: ForeignValue) -> Outcome:
    level = config[f"{CORRECTION}.rollout_is"]
    if level is None:
        return built_in("off") if given.value is None else no_effect("`rollout_is` is null")
    if config[f"{CORRECTION}.bypass_mode"]:
        return no_effect("with `bypass_mode` the loss's own ratio corrects")
    return weights(level, *bounds(config[f"{CORRECTION}.rollout_is_threshold"]))


def rejection(config: ForeignConfig, given: ForeignValue) -> Outcome:
    kind = config[f"{CORRECTION}.rollout_rs"]
    if kind is None:
        return built_in("off") if given.value is None else no_effect("`rollout_rs` is null")
    if config[f"{CORRECTION}.rollout_is"] is not None or config[f"{CORRECTION}.bypass_mode"]:
        return unsupported("Corral corrects in one way, and there is another here")
    if kind not in REJECTIONS:
        return unsupported(f"Corral rejects by {' or '.join(REJECTIONS)}")
    floor, cap = bounds(config[f"{CORRECTION}.rollout_rs_threshold"])
    floor = floor or config[f"{CORRECTION}.rollout_rs_threshold_lower"] or 1 / cap
    words = f"{REJECTIONS[kind]}s with a ratio outside {floor:g} to {cap:g} are dropped"
    return corrected("rejection", words, level=REJECTIONS[kind], floor=floor, cap=cap)


def bypass_loss(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if not config[f"{CORRECTION}.bypass_mode"]:
        return no_effect("`bypass_mode` is off")
    return built_in("the loss that is chosen") if given.value == "ppo_clip" else unsupported("ppo_clip only")


def flat_correction(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """verl 0.6."""
    threshold = config["algorithm.rollout_is_threshold"]
    masks = config["algorithm.rollout_is_mode"] == "mask"
    if not threshold or threshold < 0:
        return no_effect("`algorithm.rollout_is_threshold` is null")
    if not config["algorithm.rollout_is"]:
        return unsupported("a mask without weights") if masks else no_effect("`rollout_is` is off: metrics only")
    floor = (config["algorithm.rollout_is_threshold_lower"] or 1 / threshold) if masks else None
    return weights(config["algorithm.rollout_is_level"] or "token", floor, threshold)


def capped_ratio(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None or given.value <= 0:
        return built_in("off")
    return weights("token", None, given.value)


CORRECTIONS = (
    turned(f"{CORRECTION}.rollout_is", text, correction),
    turned(f"{CORRECTION}.rollout_is_threshold", anything, correction, 2.0),
    turned(f"{CORRECTION}.rollout_rs", text, rejection),
    turned(f"{CORRECTION}.rollout_rs_threshold", anything, rejection),
    turned(f"{CORRECTION}.rollout_rs_threshold_lower", number, rejection),
    lacking(f"{CORRECTION}.rollout_token_veto_threshold", NO_VETO),
    turned(f"{CORRECTION}.loss_type", text, bypass_loss),
    needless(f"{CORRECTION}.bypass_mode", "old log-probs are the engine's, unless a correction needs others"),
    needless(f"{CORRECTION}.debug_rollout_actor_probs", "only for metrics"),
    lacking(f"{CORRECTION}.rollout_is_batch_normalize", "weights are not normalised over the batch"),
    turned("algorithm.rollout_is", boolean, flat_correction, False),
    *(
        turned(f"algorithm.rollout_is_{key}", kind, flat_correction)
        for key, kind in (("threshold", number), ("threshold_lower", number), ("level", text), ("mode", text))
    ),
    lacking("algorithm.rollout_is_veto_threshold", NO_VETO),
    turned(f"{ACTOR}.tis_imp_ratio_cap", number, capped_ratio),
)
