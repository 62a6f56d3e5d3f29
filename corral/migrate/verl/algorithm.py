"""verl's algorithm: advantages, losses, dynamic sampling, what long answers cost, KL, and off-policy corrections."""

from typing import Any

from corral.algorithms.advantages import ADVANTAGES
from corral.algorithms.losses import LOSSES
from corral.migrate.outcome import ForeignValue, Outcome, converted, mapped, no_effect, unsupported
from corral.migrate.table import ForeignConfig
from corral.migrate.verl.run import ACTOR, samples_per_prompt
from corral.recipe.parts import PRESETS
from corral.recipe.schema import AlgorithmName

CORRECTION = "algorithm.rollout_correction"


# --- advantage and loss


def is_alone(config: ForeignConfig) -> bool:
    """Whether samples of a prompt are compared, and there is one."""
    name: AlgorithmName = config.constants["presets"][config["algorithm.adv_estimator"]]
    return ADVANTAGES[PRESETS[name].advantage].needs.groups and samples_per_prompt(config) == 1


def teachers(config: ForeignConfig) -> list[str]:
    models = config.below("distillation.teacher_models").items()
    return list(dict.fromkeys(value for key, value in models if key.endswith(".model_path")))


def num_teachers(config: ForeignConfig) -> int:
    return len(teachers(config))


def usual_loss(config: ForeignConfig) -> str:
    """The loss that the recipe has unless another one is written."""
    name: AlgorithmName = config.constants["presets"].get(config["algorithm.adv_estimator"], "grpo")
    return PRESETS["distill" if config["distillation.enabled"] else name].loss


def reinforces(config: ForeignConfig) -> bool:
    """Whether the loss is that of `bypass_mode` with `loss_type=reinforce`."""
    return bool(config[f"{CORRECTION}.bypass_mode"]) and config[f"{CORRECTION}.loss_type"] == "reinforce"


def reinforce(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """`-w A log pi`, w the capped ratio to the engine's probability: cispo without a lower bound. Without w: gpg."""
    if config[f"{CORRECTION}.rollout_is"] is None:
        return mapped("algorithm.loss.name", "gpg")
    floor, cap = bounds(config[f"{CORRECTION}.rollout_is_threshold"])
    if config[f"{CORRECTION}.rollout_is"] != "token" or floor is not None or cap < 1:
        return unsupported("Corral has weights of tokens, with a cap of at least 1; the recipe has cispo")
    ours = {"name": "cispo", "clip_low": 1.0, "clip_high": cap - 1}
    note = f"log-probs weighted with the ratio to the engine's probability, at most {cap:g}: cispo"
    return converted({f"algorithm.loss.{key}": value for key, value in ours.items()}, note)


def loss_of(config: ForeignConfig) -> str:
    if reinforces(config):
        return "gpg" if config[f"{CORRECTION}.rollout_is"] is None else "cispo"
    return str(config.constants["losses"].get(config[f"{ACTOR}.policy_loss.loss_mode"], usual_loss(config)))


def clip_of(config: ForeignConfig, side: str) -> float:
    """`clip_ratio` counts where nothing is written for this side."""
    own, both = f"{ACTOR}.clip_ratio_{side}", f"{ACTOR}.clip_ratio"
    value: float = config[own] if own in config or both not in config else config[both]
    return 0.2 if value is None else value


def clip_both(config: ForeignConfig, given: ForeignValue) -> Outcome:
    open_sides = [side for side in ("low", "high") if f"{ACTOR}.clip_ratio_{side}" not in config]
    if not open_sides or given.value is None:
        return no_effect("`clip_ratio_low` and `clip_ratio_high` decide")
    found = clip(config, given, *open_sides)
    if found.status != "mapped" or config.table.row("do_search"):
        return found
    unread = "verl reads it where `clip_ratio_low` and `clip_ratio_high` are null only, and else clips at 0.2"
    return converted(found.ours, f"{given.value:g} on either side; {unread}", differs=given.value != 0.2)


def clip(config: ForeignConfig, given: ForeignValue, *sides: str) -> Outcome:
    ours = loss_of(config)
    options = LOSSES[ours].option_names
    if reinforces(config):
        return no_effect("`loss_type=reinforce` does not clip")
    if "threshold" in options:
        low, high = clip_of(config, "low"), clip_of(config, "high")
        if low != high:
            return unsupported(f"{ours} has one threshold, for probabilities that fall and that rise")
        return converted({"algorithm.loss.threshold": low}, f"the threshold of {ours}: {low:g}")
    if "clip_low" not in options:
        return no_effect(f"the loss {ours} does not clip")
    usual, values = LOSSES[ours].options(), {f"clip_{side}": clip_of(config, side) for side in sides}
    kept = {option: value for option, value in values.items() if given.where or value != getattr(usual, option)}
    return Outcome("mapped", {("algorithm", "loss", option): value for option, value in kept.items()})


def has_threshold(config: ForeignConfig) -> bool:
    return "threshold" in LOSSES[loss_of(config)].option_names


def aggregation_is_free(config: ForeignConfig) -> bool:
    return LOSSES[loss_of(config)].aggregation is None


# --- long answers


def why_not_overlong(config: ForeignConfig, place: str) -> str | None:
    """The reason why length costs nothing, or None where it does."""
    managers = ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
    if next((config[key] for key in managers if key in config), "naive") != "dapo":
        return "the reward manager is not dapo"
    off = [key for key in ("enable", "len", "penalty_factor") if not config[f"{place}.{key}"]]
    return f"`{off[0]}` is {'off' if off[0] == 'enable' else 0}" if off else None


# --- KL, and with it the reference model: in the reward, in the loss, or nowhere


def kl_where(config: ForeignConfig) -> str | None:
    """verl leaves it out by default, Search-R1 puts it into the reward unless it is in the loss. A coefficient of 0 is
    none."""
    in_loss = bool(config[f"{ACTOR}.use_kl_loss"])
    if in_loss and config[f"{ACTOR}.kl_loss_coef"]:
        return "loss"
    in_reward = config["algorithm.use_kl_in_reward"] and not (in_loss and config.table.row("do_search"))
    return "reward" if in_reward and config["algorithm.kl_ctrl.kl_coef"] else None


def kl_estimator_of(config: ForeignConfig, given: ForeignValue, where: str, usual: str) -> str | None:
    """Corral's name, where there is one. `+` is about gradients, which a reward has none of; `usual` is Corral's."""
    value = given.value or usual
    ours: str | None = config.constants["kl_estimators"].get(value.removesuffix("+"))
    return f"{ours}+" if value.endswith("+") and where == "loss" and ours not in (None, "k2") else ours


# --- corrections for tokens that another policy sampled than the one that is trained


def bounds(threshold: Any) -> tuple[float | None, float]:
    """`2.0`, or `0.5_2.0`: floor and cap."""
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or min(numbers) <= 0:
        raise ValueError("needs a threshold such as 2.0 or 0.5_2.0")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def importance_weights(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return weighted(config[f"{CORRECTION}.rollout_is"], *bounds(config[f"{CORRECTION}.rollout_is_threshold"]))


def capped_weights(config: ForeignConfig, given: ForeignValue) -> Outcome:
    return weighted("token", None, given.value)


def weighted(level: str, floor: float | None, cap: float) -> Outcome:
    """Importance weights: truncated at the cap, or without what is out of bounds where there is a floor."""
    if level not in ("token", "sequence"):
        return unsupported(f"Corral weighs tokens or sequences, not by {level}")
    if floor is None:
        return corrected(f"{level}_tis", f"weights of {level}s, at most {cap:g}", cap=cap)
    if level == "sequence":
        return unsupported("bounds on two sides are of tokens in Corral (icepop)")
    return corrected("icepop", f"weights of tokens, dropped outside {floor:g} to {cap:g}", floor=floor, cap=cap)


def corrected(name: str, note: str, **values: Any) -> Outcome:
    ours = {f"algorithm.correction.{key}": value for key, value in {"name": name, **values}.items()}
    return converted({**ours, "algorithm.old_logprobs": "recompute"}, note)


def rejected(config: ForeignConfig, given: ForeignValue) -> Outcome:
    kind, levels = config[f"{CORRECTION}.rollout_rs"], config.constants["rejections"]
    if kind not in levels:
        return unsupported(f"Corral rejects by {' or '.join(levels)}")
    floor, cap = bounds(config[f"{CORRECTION}.rollout_rs_threshold"])
    floor = floor or config[f"{CORRECTION}.rollout_rs_threshold_lower"] or 1 / cap
    note = f"{levels[kind]}s with a ratio outside {floor:g} to {cap:g} are dropped, and not counted"
    if kind.endswith("k1"):
        # verl/trainer/ppo/rollout_corr_helper.py compares -x, x = log pi_train - log pi_engine, with the logarithms
        note += f"; verl's is of the engine's to the trainer's probability, here {1 / cap:g} to {1 / floor:g}"
        floor, cap = 1 / cap, 1 / floor
    return corrected("rejection", note, level=levels[kind], floor=floor, cap=cap, count_dropped=False)


def flat_correction(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The keys of verl 0.6."""
    threshold = config["algorithm.rollout_is_threshold"]
    masks = config["algorithm.rollout_is_mode"] == "mask"
    if not threshold or threshold < 0:
        return no_effect("`algorithm.rollout_is_threshold` is null")
    if not config["algorithm.rollout_is"]:
        return unsupported("a mask without weights") if masks else no_effect("`rollout_is` is off: metrics only")
    floor = (config["algorithm.rollout_is_threshold_lower"] or 1 / threshold) if masks else None
    return weighted(config["algorithm.rollout_is_level"] or "token", floor, threshold)
