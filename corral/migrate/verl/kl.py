"""verl's KL, and with it the reference model: in the reward, in the loss, or nowhere."""

from corral.migrate.outcome import (
    ForeignValue,
    Outcome,
    boolean,
    built_in,
    converted,
    integer,
    mapped,
    no_effect,
    number,
    text,
    unsupported,
)
from corral.migrate.table import Convert, ForeignConfig, provided, same, turned
from corral.migrate.verl.batch import ACTOR, explicit, has_critic

ESTIMATES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_where(config: ForeignConfig) -> str | None:
    """verl leaves it out by default, Search-R1 puts it into the reward unless it is in the loss. A coefficient of 0 is
    none."""
    in_loss = bool(config[f"{ACTOR}.use_kl_loss"])
    if in_loss and config[f"{ACTOR}.kl_loss_coef"]:
        return "loss"
    in_reward = config["algorithm.use_kl_in_reward"] and not (in_loss and config.table.row("do_search"))
    return "reward" if in_reward and config["algorithm.kl_ctrl.kl_coef"] else None


def has_reference(config: ForeignConfig) -> bool:
    return kl_where(config) is not None


def kl_in_reward(config: ForeignConfig, given: ForeignValue) -> Outcome:
    where = kl_where(config)
    if where == "reward":
        return mapped("algorithm.kl.where", "reward", "" if given.where else "in the reward, unless it is in the loss")
    if where == "loss":
        return unsupported("KL is in one place in Corral, here the loss") if given.value else built_in("in the loss")
    if has_critic(config):
        return converted({"algorithm.kl.where": None}, "no KL, which Corral's ppo would have in the reward")
    return built_in("no KL, as in Corral")


def kl_in_loss(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) == "loss":
        return mapped("algorithm.kl.where", "loss")
    return no_effect("`kl_loss_coef` is 0") if given.value else built_in("off")


def kl_estimator(where: str, usual: str) -> Convert:
    """`+` is about gradients, which a reward has none of. `usual` is Corral's."""

    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if kl_where(config) != where:
            return no_effect(f"there is no KL in the {where}")
        value = given.value or usual
        plain = value.removesuffix("+")
        if plain == "full":
            return unsupported("the KL over the whole vocabulary; verl has not implemented it either")
        if plain not in ESTIMATES:
            raise ValueError(f"should be one of {', '.join(ESTIMATES)}, or one of these with a +")
        ours = ESTIMATES[plain]
        if value.endswith("+") and where == "loss" and ours != "k2":
            if ours == "abs":
                return unsupported("Corral has abs without the + only")
            ours += "+"
        return explicit(given, "algorithm.kl.estimator", ours, usual)

    return convert


def without_kl(config: ForeignConfig, where: str) -> str:
    """verl before 0.3 had it in the reward, where it was not in the loss, and no key for that."""
    unsaid = "algorithm.use_kl_in_reward" not in config and not config[f"{ACTOR}.use_kl_loss"]
    if where == "reward" and unsaid and config["algorithm.kl_ctrl.kl_coef"] and not config.table.row("do_search"):
        return "there is no KL in the reward unless `use_kl_in_reward` is true, since verl 0.3"
    return f"there is no KL in the {where}"


def kl_coefficient(where: str) -> Convert:
    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        if kl_where(config) != where:
            return no_effect(without_kl(config, where))
        return explicit(given, "algorithm.kl.coefficient", given.value, 0.001)

    return convert


def kl_controller(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if kl_where(config) != "reward":
        return no_effect("there is no KL in the reward")
    if given.value not in ("fixed", "adaptive"):
        raise ValueError("should be fixed or adaptive")
    return explicit(given, "algorithm.kl.controller", given.value, "fixed")


def is_adaptive(config: ForeignConfig) -> bool:
    return kl_where(config) == "reward" and bool(config["algorithm.kl_ctrl.type"] == "adaptive")


KL = (
    turned("algorithm.use_kl_in_reward", boolean, kl_in_reward, False),
    turned(f"{ACTOR}.use_kl_loss", boolean, kl_in_loss, False),
    turned(f"{ACTOR}.kl_loss_coef", number, kl_coefficient("loss"), 0.001),
    turned(f"{ACTOR}.kl_loss_type", text, kl_estimator("loss", "k3"), "low_var_kl"),
    turned("algorithm.kl_penalty", text, kl_estimator("reward", "k1"), "kl"),
    turned("algorithm.kl_ctrl.type", text, kl_controller, "fixed"),
    turned("algorithm.kl_ctrl.kl_coef", number, kl_coefficient("reward"), 0.001),
    *(
        provided(same(f"algorithm.kl_ctrl.{key}", f"algorithm.kl.{ours}", kind), is_adaptive, "the KL is not adaptive")
        for key, ours, kind in (("target_kl", "target", number), ("horizon", "horizon", integer))
    ),
)
