"""Engines of other systems: vLLM and SGLang stay what they are, unless Corral's rules for them say otherwise.

The constant `engine` of a table names that system's keys: `name` of the engine, `sampling` (temperature, top-p, top-k),
and `corrections`, those that weigh or leave out tokens because another policy sampled them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from corral.migrate.outcome import ForeignValue, Outcome, as_path, built_in, converted, mapped, no_effect, unsupported
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import text

PROCESSES = ("vllm", "sglang")
"""Engines that run as what they are, in processes of their own."""
TRANSFORMERS = ("hf", "naive")
"""Names of generation by transformers, which needs no other engine than Corral's."""
OWN_DECIDES = "Corral's own engine decides it"


def engine_name(value: Any) -> str | None:
    """`???` is Hydra's mark for a value that is still missing."""
    return None if value == "???" else text(value)


def wanted_engine(config: ForeignConfig) -> str | None:
    """The engine that the other system generates with. None: nothing says which."""
    found: str | None = config.value(config.constants["engine"]["name"])
    return found


def engine_of(config: ForeignConfig) -> str:
    """The engine that the recipe has."""
    wanted = wanted_engine(config)
    return wanted if wanted in PROCESSES and why_native(config) is None else "native"


def why_native(config: ForeignConfig) -> str | None:
    """Why Corral refuses the other system's engine for this recipe."""
    settings = [setting for key in config.constants["engine"]["sampling"] for setting in config.ours(key)]
    chosen = {path[1]: value for path, value in settings if path[0] == "rollout"}
    temperature = chosen.pop("temperature", 1.0)
    excluding = {name: value for name, value in chosen.items() if value not in (None, 1 if name == "top_p" else 0)}
    if wanted_engine(config) != "vllm" or temperature in (None, 1) or not excluding:
        return None
    both = ", ".join(f"{name} {value:g}" for name, value in {"temperature": temperature, **excluding}.items())
    return f"vLLM's log-probs are of no use with {both} together"


def corrects(config: ForeignConfig) -> bool:
    """Whether the recipe gets a correction without it being turned off: one of its keys sets it, or makes Corral do."""
    paths = {as_path("algorithm.correction.name"), as_path("schedule.max_staleness")}
    return any(path in paths for key in config.constants["engine"]["corrections"] for path, _ in config.ours(key))


def engine(config: ForeignConfig, given: ForeignValue) -> Outcome:
    """The engine, and what Corral would correct in its log-probs where the other system corrects nothing."""
    wanted, ours = wanted_engine(config), {as_path("rollout.engine.name"): engine_of(config)}
    uncorrected = "" if corrects(config) else f"; log-probs are not corrected, as in {config.table.title}"
    if uncorrected:
        ours[as_path("algorithm.correction.name")] = "none"
    if wanted is None:
        return converted(ours, f"no engine is named, so that Corral's own generates{uncorrected}")
    if wanted in PROCESSES:
        why = why_native(config)
        how = f"{wanted}, in a process of its own" if why is None else f"{wanted}, here Corral's own engine: {why}"
        return converted(ours, f"{how}{uncorrected}", differs=why is not None)
    if wanted in TRANSFORMERS:
        return converted(ours, f"{wanted}, here Corral's own engine{uncorrected}")
    return Outcome(
        "unsupported", ours, f"Corral generates with vllm or sglang, or as here with its own engine{uncorrected}"
    )


def split_engine(given: ForeignValue, name: str, devices: Sequence[int], devices_per_node: int) -> Outcome:
    """How many devices one engine called `name` has, of those of the rollout."""
    key, size = "rollout.engine.tensor_parallel", given.value or 1

    def fits(number: int) -> bool:
        spans = (devices[start : start + number] for start in range(0, len(devices), number))
        return len(devices) % number == 0 and all(
            len({device // devices_per_node for device in span}) == 1 for span in spans
        )

    if size <= 1:
        return built_in("each device has a whole model")
    if name != "vllm":
        why = f"with {name if name in PROCESSES else 'its own engine'} Corral has a whole model on each device"
        return converted({key: 1}, f"{size}, here 1: {why}; speed and memory differ, and the plan says whether it fits")
    if fits(size):
        return mapped(key, size)
    if not given.where:
        return built_in(f"{size} does not go with {len(devices)} devices: 1")
    if len(devices) % size:
        raise ValueError(f"does not divide the {len(devices)} devices of the rollout")
    most = max(number for number in range(1, size) if fits(number))
    return Outcome("unsupported", {as_path(key): most}, f"an engine has devices of one node: {most} here")


def engine_option(config: ForeignConfig, given: ForeignValue, section: str, name: str | None = None) -> Outcome:
    """An argument by its own name, which is what is behind `section`. `name`: the only engine that gets it."""
    wanted, chosen = wanted_engine(config), engine_of(config)
    if name is not None and wanted not in (None, name):
        return no_effect(f"the engine is {wanted}")
    if chosen == "native":
        return built_in(OWN_DECIDES)
    return passed_on(chosen, config.table.canonical(given.key).removeprefix(f"{section}.").split("."), given.value)


def passed_on(name: str, argument: Sequence[str], value: Any) -> Outcome:
    if value is None:
        return built_in(f"as {name} has it")
    if argument[0] in (own := decided_elsewhere(name)):
        return unsupported(f"this is decided by {own[argument[0]]}")
    return mapped(("rollout", "engine", "arguments", *argument), value)


def decided_elsewhere(name: str) -> Mapping[str, str]:
    """Arguments that are not for recipes. (These modules need torch, which most migrations do without.)"""
    from corral.rollout import sglang_backend, vllm_backend

    return {"vllm": vllm_backend.OWN, "sglang": sglang_backend.OWN}[name]
