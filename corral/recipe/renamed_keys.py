"""Keys that had another name in earlier releases: a recipe with an old one gets an error that names the new one."""

from corral.recipe.keys import KeyPath, did_you_mean, dotted, find_key, nearest_key

RENAMED = {
    "optimiser": "optimizer",
    "critic.optimiser": "critic.optimizer",
    "algorithm.lam": "algorithm.advantage.gae_lambda",
    "algorithm.gae_lambda": "algorithm.advantage.gae_lambda",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.turn_gamma": "algorithm.advantage.turn_gamma",
    "algorithm.turn_weight": "algorithm.advantage.turn_weight",
    "algorithm.clip_low": "algorithm.loss.clip_low",
    "algorithm.clip_high": "algorithm.loss.clip_high",
    "algorithm.dual_clip": "algorithm.loss.dual_clip",
    "algorithm.sapo_tau_positive": "algorithm.loss.tau_positive",
    "algorithm.sapo_tau_negative": "algorithm.loss.tau_negative",
    "algorithm.dro_beta": "algorithm.loss.beta",
    "algorithm.dppo_threshold": "algorithm.loss.threshold",
    "algorithm.aggregation_norm": "algorithm.aggregation.norm",
    "algorithm.kl.target": "algorithm.kl.controller.target",
    "algorithm.kl.horizon": "algorithm.kl.controller.horizon",
    "algorithm.overlong": "algorithm.shaping",
    "batch.passes": "batch.ppo_epochs",
    "train.recompute": "train.gradient_checkpointing",
    "environments.*.share": "environments.*.weight",
    "environments.*.validation_share": "environments.*.validation_weight",
}
"""Old to new; a section stands for all keys below it, and `*` for a name of the user's choice."""

OVERLONG = ", with `algorithm.shaping.name: overlong`"
NOTES = {
    "train.recompute": ", which is true or false (full is now true)",
    "algorithm.overlong": OVERLONG,
    "algorithm.overlong.buffer_tokens": OVERLONG,
    "algorithm.overlong.penalty": OVERLONG,
}


def new_path(path: KeyPath) -> KeyPath | None:
    """The key that `path` was renamed to. None: it was not renamed."""
    for old, new in RENAMED.items():
        pattern = tuple(old.split("."))
        head, rest = path[: len(pattern)], path[len(pattern) :]
        if len(head) == len(pattern) and all(name in ("*", given) for name, given in zip(pattern, head, strict=True)):
            chosen = dict(zip(pattern, head, strict=True)).get("*", "*")
            return (*(chosen if name == "*" else name for name in new.split(".")), *rest)
    return None


def renamed_key(path: KeyPath) -> str | None:
    """What an error says after `is now`."""
    found = new_path(path)
    if found is not None and find_key(found) is None:  # a name below it that is no key either
        return f"below `{dotted(found[:-1])}`, which has no `{found[-1]}`{did_you_mean(nearest_key(found))}"
    return None if found is None else f"`{dotted(found)}`{NOTES.get(dotted(path), '')}"
