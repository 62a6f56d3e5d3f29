"""Which devices RLinf's components have: `cluster.component_placement`, and the placement of roles in a recipe.

What is wrong with a value is reported by its own row; other rows that need it go on with something near.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from corral.migrate.outcome import ForeignValue, Outcome, built_in, converted, mapped, unsupported
from corral.migrate.rlinf.reasoning import has_critic, has_kl
from corral.migrate.table import ForeignConfig
from corral.migrate.value_kinds import format_value
from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath
from corral.recipe.placement import format_devices, parse_devices

GPUS_PER_NODE = 8
"""RLinf's default in its first version; today it counts them."""
MOST_NODES, MOST_DEVICES_PER_NODE = 10_000, 100
"""More are a slip of the pen, and would have to be counted through."""
ONE_DEVICE = "one device: everything runs on it, in one process"
ROLES = {
    "actor": "actor",
    "rollout": "rollout",
    "inference": "reference",
    "actor_inference": "reference",
    "critic": "critic",
    "critic_inference": None,
    "reward": None,
}
"""Components and their roles in a recipe; None: built in, and in need of no device."""


@dataclass(frozen=True)
class ComponentDevices:
    """Devices of the whole configuration."""

    nodes: int
    per_node: int
    is_counted: bool
    """Whether the number of GPUs of a node follows from the placement."""
    by_component: dict[str, tuple[int, ...]]

    @property
    def everything(self) -> tuple[int, ...]:
        return tuple(range(self.nodes * self.per_node))

    def of(self, component: str) -> tuple[int, ...]:
        return self.by_component.get(component, self.everything)

    @property
    def disaggregated(self) -> bool:
        return self.of("actor") != self.of("rollout")


def devices_of(config: ForeignConfig) -> ComponentDevices:
    nodes = min(max(config.value("cluster.num_nodes"), 1), MOST_NODES)
    spans: dict[str, tuple[int, ...]] = {}
    for line, written in config.below("cluster.component_placement").items():
        if "." not in line:
            with suppress(ValueError):
                spans |= dict.fromkeys(components(line), devices_in(written))
    needed = [span for name, span in spans.items() if ROLES.get(name)]
    counted = math.ceil(max((span[-1] + 1 for span in needed if span), default=0) / nodes)
    is_counted = bool(needed) and all(needed)
    per_node = config["cluster.num_gpus_per_node"]
    if per_node is None:
        per_node = counted if is_counted else max(counted, GPUS_PER_NODE)
    devices = ComponentDevices(nodes, min(max(per_node, 1), MOST_DEVICES_PER_NODE), is_counted, spans)
    return replace(devices, by_component={name: span or devices.everything for name, span in spans.items()})


def num_actor_devices(config: ForeignConfig) -> int:
    return len(devices_of(config).of("actor"))


def components(line: str) -> list[str]:
    return [name.strip() for name in line.split(",") if name.strip()]


def devices_in(written: Any) -> tuple[int, ...]:
    """Numbers of `0-3,8`, or of `0-3:0-1` (devices:processes). Empty: all."""
    parts = [part.partition(":")[0].strip() for part in rank_parts(written)]
    if parts == ["all"]:
        return ()
    try:
        return parse_devices(",".join(parts), MOST_NODES * MOST_DEVICES_PER_NODE)
    except RecipeError as error:
        raise ValueError(f"cannot be read: {'; '.join(error.problems)}") from None


def rank_parts(written: Any) -> list[str]:
    if isinstance(written, list):
        return [str(item) for item in written]
    return [part for part in format_value(written).split(",") if part.strip()]


def has_one_process_each(written: Any) -> bool:
    pairs = [part.partition(":") for part in rank_parts(written)]
    return all(not colon or len(devices_in(ranks)) == len(devices_in(processes)) for ranks, colon, processes in pairs)


# --- conversions


def nodes(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is not None and not 1 <= given.value <= MOST_NODES:
        raise ValueError("should be the number of nodes; 0, all that are connected, is not known here")
    devices = devices_of(config)
    if len(devices.everything) == 1:
        return built_in(ONE_DEVICE)
    if "cluster.num_gpus_per_node" in config:
        return mapped("cluster.nodes", devices.nodes)
    source = "as many as the placement needs" if devices.is_counted else "set `cluster.devices_per_node` to yours"
    ours = {"cluster.nodes": devices.nodes, "cluster.devices_per_node": devices.per_node}
    return converted(ours, f"of {devices.per_node} GPUs, which RLinf counts by itself: {source}")


def gpus_per_node(config: ForeignConfig, given: ForeignValue) -> Outcome:
    if given.value is None:
        return built_in("counted by RLinf: see cluster.num_nodes")
    if not 1 <= given.value <= MOST_DEVICES_PER_NODE:
        raise ValueError("should be the number of GPUs of each node")
    is_one = len(devices_of(config).everything) == 1
    return built_in(ONE_DEVICE) if is_one else mapped("cluster.devices_per_node", given.value)


def placement(config: ForeignConfig, given: ForeignValue) -> Outcome:
    names, devices = components(given.key.rpartition(".")[2]), devices_of(config)
    if strange := [name for name in names if name not in ROLES]:
        return unsupported(f"there is no component {' or '.join(strange)} in Corral")
    own, everything = devices_in(given.value) or devices.everything, devices.everything
    if own[-1] >= len(everything):
        there = f"cluster.num_nodes {devices.nodes} x {devices.per_node} GPUs have 0-{len(everything) - 1}"
        raise ValueError(f"names device {own[-1]}, and {there}")
    if len(everything) == 1:
        return built_in(ONE_DEVICE)
    roles = roles_of(config, names, devices)
    if not roles and ("inference" in names or "actor_inference" in names):
        return built_in(
            "Corral's engine gives the log-probs of the tokens that it samples, so that nothing is left to compute on "
            f"{format_devices(own)}: they are idle; give them to rollout or actor"
        )
    if not roles:
        return built_in("it needs no device of its own")
    path: KeyPath = ("cluster", "placement", ",".join(roles))
    ours: dict[KeyPath, Any] = {path: "all" if own == everything else format_devices(own)}
    if not has_one_process_each(given.value):
        return Outcome("unsupported", ours, "each device has one process; write the devices alone")
    if "rollout" in roles and devices.disaggregated:
        ours["schedule", "pipelined"] = True
        return converted(ours, f"{format_value(given.value)}, apart from actor: {overlap(config)}")
    if extra := [role for role in roles if role not in map(ROLES.get, names)]:
        return converted(ours, f"{format_value(given.value)}, and {' and '.join(extra)} with the actor, as in RLinf")
    return Outcome("mapped", ours)


def roles_of(config: ForeignConfig, names: list[str], devices: ComponentDevices) -> list[str]:
    """The roles of a line. In RLinf, reference and critic belong to the actor where they have no line."""
    placed = {ROLES[name] for name in devices.by_component if name in ROLES}
    wanted = {"actor": True, "rollout": True, "reference": has_kl(config), "critic": has_critic(config)}
    roles = [role for name in names if (role := ROLES[name]) and wanted[role]]
    if "actor" in roles:
        roles += [role for role in ("reference", "critic") if wanted[role] and role not in placed]
    return list(dict.fromkeys(roles))


def overlap(config: ForeignConfig) -> str:
    """What the trainer does while the rollout goes on."""
    updates = config.value("algorithm.n_minibatches")
    if updates <= 1:
        return "updates start while the rest is still generated"
    return f"log-probs are computed meanwhile, and updates start when the step is complete (n_minibatches {updates})"
