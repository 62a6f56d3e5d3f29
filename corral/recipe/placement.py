"""Which role uses which devices: the grammar of `cluster.placement`, its rules, what follows from it, and a picture.

Devices are numbered through all nodes, from 0. They are written as `all`, `0-19` (inclusive), `0,2,5`, mixes of these,
`[0, 1]` or `list(range(0, 4))`, which is recognized and never evaluated. Two roles share all of their devices or none.
Devices that `cluster.services` claim are for no role.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Literal

from corral.recipe.errors import RecipeError
from corral.recipe.keys import did_you_mean, nearest
from corral.recipe.mesh import MeshShape, mesh_shape
from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.schema import Cluster, Recipe

ROLES = ("actor", "rollout", "reference", "critic", "reward_model")
MESH_ROLES = ("actor", "reference", "critic")
"""Those whose models are spread as `train.parallel` says. Each device of the others has a whole model."""
INITIALS = {"actor": "A", "rollout": "R", "reference": "F", "critic": "C", "reward_model": "M"}
"""For a picture with little room."""
PICTURE_WIDTH = 100
MOST_DEVICES = 100_000
"""Of a cluster: each of them is listed, so a number without end would take time and memory without end."""

Devices = str | int | Sequence[int]
"""What a user may write."""
TransferKind = Literal["shared", "collective", "object", "ipc"]

RANGE_CALL = re.compile(r"(?:list\s*\(\s*range|range)\s*\(([^()]*)\)(?P<close>\s*\))?")
SPAN = re.compile(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?")
BOUND = re.compile(r"-?[0-9]{1,9}")


def resolve_placement(recipe: Recipe, algorithm: ResolvedAlgorithm) -> tuple["Placement", list[str]]:
    """The roles that this recipe needs, on their devices, and warnings. Raises a RecipeError with all problems."""
    cluster = recipe.cluster
    num_devices = cluster.nodes * cluster.devices_per_node
    if num_devices > MOST_DEVICES:
        raise RecipeError(
            f"`cluster.nodes` x `cluster.devices_per_node` gives more devices than Corral counts ({MOST_DEVICES:,})"
        )
    placement = parse_placement(cluster.placement, num_devices, devices_of_services(cluster))
    needed = ["actor"] + ["rollout"] * recipe.needs_engine
    needed += ["reference"] * needs_reference_role(recipe, algorithm) + ["critic"] * algorithm.needs_critic
    needed += ["reward_model"] * recipe.needs_reward_model
    missing = [role for role in needed if role not in placement.roles]
    if missing:
        why = f"the recipe ({recipe.algorithm.name}) needs"
        raise RecipeError(f"`cluster.placement` has no devices for {role}, which {why}" for role in missing)
    warnings = [
        f"`cluster.placement`: nothing uses `{line}`, because the recipe ({recipe.algorithm.name}) has no such role"
        for line in cluster.placement
        if not set(split_roles(line)) & set(needed)
    ]
    return placement.only(needed), warnings


def devices_of_services(cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """The devices that services claim, by service: the last ones of every node, in the order of the services."""
    claims = {name: service.devices for name, service in cluster.services.items() if service.devices}
    per_node, num_claimed = cluster.devices_per_node, cluster.num_service_devices
    if claims and num_claimed >= per_node:
        raise RecipeError(
            f"`cluster.services` ({', '.join(claims)}) claim {num_claimed} devices of every node, and "
            f"`cluster.devices_per_node: {per_node}` leaves none for roles"
        )
    starts = [(node + 1) * per_node - num_claimed for node in range(cluster.nodes)]
    devices: dict[str, tuple[int, ...]] = {}
    for name, size in claims.items():
        devices[name] = tuple(device for start in starts for device in range(start, start + size))
        starts = [start + size for start in starts]
    return devices


def needs_reference_role(recipe: Recipe, algorithm: ResolvedAlgorithm) -> bool:
    """Whether the reference of the KL is a model of its own. With adapters it is the actor without them, and a teacher
    behind an endpoint is none of this run's."""
    is_own = recipe.model.lora is None or recipe.reference.path is not None
    return algorithm.needs_reference and is_own and recipe.reference.endpoint is None


def runs_on_ray(recipe: Recipe) -> bool:
    """Else it runs in this process."""
    runtime = recipe.cluster.runtime
    return runtime == "ray" or (runtime == "auto" and "cluster" in recipe.model_fields_set)


def transfer_kind(recipe: Recipe, placement: "Placement") -> TransferKind:
    """How new weights reach the rollout: as written, else the least work that the placement allows."""
    if recipe.cluster.transfer != "auto":
        return recipe.cluster.transfer
    return "shared" if placement.colocated else "collective"


def check_ipc_of_gpus(recipe: Recipe, placement: "Placement") -> None:
    """Refuses `ipc` where devices are GPUs: a worker sees its own only, and maps no memory of another."""
    if recipe.needs_engine and transfer_kind(recipe, placement) == "ipc":
        raise RecipeError(
            [
                "`cluster.transfer: ipc` does not work between GPUs: each worker sees its own only, and cannot map the "
                "trainer's memory; leave it at auto, which is collective here (NCCL, over NVLink where there is one)"
            ]
        )


def role_mesh(recipe: Recipe, role: str, num_devices: int) -> MeshShape:
    """The mesh of a role on its devices. Raises a RecipeError where it does not fit them."""
    if role == "reward_model":
        return MeshShape(replicate=num_devices // recipe.reward_model.shard, shard=recipe.reward_model.shard)
    return mesh_shape(recipe.train.parallel, num_devices, role)


def resolve_meshes(recipe: Recipe, placement: "Placement") -> dict[str, MeshShape]:
    """By role. Raises a RecipeError where `train.parallel` does not fit a role's devices."""
    return {role: role_mesh(recipe, role, len(placement.roles[role])) for role in MESH_ROLES if role in placement.roles}


def engine_returns_weights(recipe: Recipe, placement: "Placement") -> bool:
    """Whether engines give the memory of their weights to the trainers beside them, from the last token of a step to
    the weights of the next one: where they have a copy, because trainers have shards, and all of it comes again. With
    adapters only these do; an engine in its own process has its own way."""
    if transfer_kind(recipe, placement) != "shared" or not recipe.rollout.engine.in_process:
        return False
    takes_turns, all_travel = not recipe.schedule.pipelined, recipe.model.lora is None
    return takes_turns and all_travel and not resolve_meshes(recipe, placement)["actor"].is_whole


@dataclass(frozen=True)
class Placement:
    num_devices: int
    roles: Mapping[str, tuple[int, ...]]
    services: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Devices that programs beside the workers have for themselves."""

    @property
    def colocated(self) -> bool:
        """Whether actor and rollout take turns on the same devices."""
        return self.roles["actor"] == self.roles.get("rollout")

    @property
    def idle(self) -> tuple[int, ...]:
        used = {device for devices in (*self.roles.values(), *self.services.values()) for device in devices}
        return tuple(device for device in range(self.num_devices) if device not in used)

    def users(self, device: int) -> tuple[str, ...]:
        return self._users.get(device, ())

    @cached_property
    def _users(self) -> dict[int, tuple[str, ...]]:
        users: dict[int, tuple[str, ...]] = {}
        for role in ROLES:
            users |= {device: (*users.get(device, ()), role) for device in self.roles.get(role, ())}
        return users

    def groups(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Devices by who uses them, in the order of their first device; idle ones left out."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for device in range(self.num_devices):
            if users := self.users(device):
                groups.setdefault(users, []).append(device)
        return {users: tuple(devices) for users, devices in groups.items()}

    def only(self, roles: Iterable[str]) -> "Placement":
        """Those of the roles that are placed."""
        chosen = set(roles)
        return replace(self, roles={role: devices for role, devices in self.roles.items() if role in chosen})

    def picture(self, nodes: int, devices_per_node: int) -> str:
        """One row per node, one cell per device: its number and who uses it; by initials where words do not fit."""
        assert nodes * devices_per_node == self.num_devices
        services = {name: name for name in self.services}
        rows = self._rows(nodes, devices_per_node, {role: role for role in ROLES} | services, "idle")
        if len(rows[0]) > PICTURE_WIDTH:
            rows = [*self._rows(nodes, devices_per_node, INITIALS | dict.fromkeys(services, "s"), "."), self._legend()]
        return "\n".join(rows)

    def _rows(self, nodes: int, devices_per_node: int, names: Mapping[str, str], idle: str) -> list[str]:
        claimed = {device: names[name] for name, devices in self.services.items() for device in devices}
        labels = [
            "+".join(names[role] for role in self.users(device)) or claimed.get(device, idle)
            for device in range(self.num_devices)
        ]
        width, digits = max(map(len, labels)), len(str(self.num_devices - 1))
        cells = [f"{device:>{digits}} {label:<{width}}" for device, label in enumerate(labels)]
        starts = range(0, self.num_devices, devices_per_node)
        return [
            f"node {node:>{len(str(nodes - 1))}} | {' | '.join(cells[start : start + devices_per_node])} |"
            for node, start in enumerate(starts)
        ]

    def _legend(self) -> str:
        names = [f"{INITIALS[role]} {role}" for role in self.roles]
        names += [f"s {' and '.join(self.services)}"] * bool(self.services) + [". idle"] * bool(self.idle)
        return ", ".join(names)


def parse_placement(
    written: Mapping[str, Devices], num_devices: int, services: Mapping[str, tuple[int, ...]] | None = None
) -> Placement:
    """Raises a RecipeError with all that is wrong. `services`: devices that they claim."""
    problems: list[str] = []
    claimed = {device: name for name, own in (services or {}).items() for device in own}
    roles: dict[str, tuple[int, ...]] = {}
    for line, devices in written.items():
        parsed: tuple[int, ...] = ()
        try:
            parsed = parse_devices(devices, num_devices)
        except RecipeError as error:
            problems += [f"`cluster.placement`, `{line}: {devices}`: {problem}" for problem in error.problems]
        if devices == "all":
            parsed = tuple(device for device in parsed if device not in claimed)
        elif taken := [device for device in parsed if device in claimed]:
            whose = f"`cluster.services.{claimed[taken[0]]}.devices`"
            problems.append(f"`cluster.placement`, `{line}: {devices}`: {whose} claims device {format_devices(taken)}")
        for role in split_roles(line):
            if role not in ROLES:
                hint = did_you_mean(nearest(role, ROLES)) or f"; the roles are {', '.join(ROLES)}"
                problems.append(f"`cluster.placement`, `{line}`: `{role}` is not a role{hint}")
            elif role in roles:
                problems.append(f"`cluster.placement`, `{line}`: {role} has been placed before")
            else:
                roles[role] = parsed
    problems += overlaps(roles)
    if problems:
        raise RecipeError(problems)
    return Placement(num_devices, {role: roles[role] for role in ROLES if role in roles}, services or {})


def split_roles(line: str) -> list[str]:
    return [role.strip() for role in line.split(",")]


def overlaps(roles: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"`cluster.placement`: {one} ({format_devices(roles[one])}) and {other} ({format_devices(roles[other])}) share "
        f"device {format_devices(shared)} but not all; two roles share all of their devices or none"
        for one, other in combinations(roles, 2)
        if roles[one] != roles[other] and (shared := sorted(set(roles[one]) & set(roles[other])))
    ]


def parse_devices(written: Devices, num_devices: int) -> tuple[int, ...]:
    """Sorted device numbers. Raises a RecipeError that says what cannot be read or does not exist."""
    if isinstance(written, str):
        spans = parse_spans(written.strip(), num_devices)
    else:
        spans = [range(number, number + 1) for number in ([written] if isinstance(written, int) else written)]
    devices: set[int] = set()
    for span in spans:
        check_exists(span, num_devices)
        if twice := devices.intersection(span):
            raise RecipeError(f"device {min(twice)} is listed twice")
        devices.update(span)
    if not devices:
        raise RecipeError(f"there is no device in it; {EXPECTED}")
    return tuple(sorted(devices))


EXPECTED = "write `all`, `0-3`, `0,2,5`, `[0, 1]` or `list(range(0, 4))`"


def parse_spans(text: str, num_devices: int) -> list[range]:
    if text == "all":
        return [range(num_devices)]
    if match := RANGE_CALL.fullmatch(text):
        if text.startswith("list") == (match["close"] is not None):
            return [parse_range(match[1], text)]
        raise RecipeError(f"`{text}` has unbalanced parentheses")
    bracketed = re.fullmatch(r"\[(.*)\]", text)
    return [parse_span(part.strip()) for part in (bracketed[1] if bracketed else text).split(",")]


def parse_range(arguments: str, text: str) -> range:
    """Half-open, as in Python."""
    bounds = [part.strip() for part in arguments.split(",")]
    if len(bounds) > 3 or not all(BOUND.fullmatch(bound) for bound in bounds):
        raise RecipeError(f"`{text}` is not a range; write `list(range(0, 4))` or `list(range(0, 8, 2))`")
    numbers = [int(bound) for bound in bounds]
    if len(numbers) == 3 and numbers[2] == 0:
        raise RecipeError(f"`{text}` has a step of 0")
    return range(*numbers)


def parse_span(part: str) -> range:
    """`5`, or `0-19` with both ends."""
    match = SPAN.fullmatch(part)
    if match is None:
        raise RecipeError(f"`{part}` is not a device or a span of devices; {EXPECTED}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise RecipeError(f"`{part}` runs backwards; write `{last}-{first}`")
    return range(first, last + 1)


def check_exists(span: range, num_devices: int) -> None:
    """Before the span is spelled out: it may be far longer than memory."""
    if not span:
        return
    low, high, step = min(span[0], span[-1]), max(span[0], span[-1]), abs(span.step)
    if low >= 0 and high < num_devices:
        return
    steps_inside = max(0, -(-(num_devices - low) // step))
    missing = low if low < 0 else low + steps_inside * step
    there = "device 0 only" if num_devices == 1 else f"devices 0-{num_devices - 1}"
    raise RecipeError(f"device {missing} does not exist; `cluster.nodes` x `cluster.devices_per_node` gives {there}")


def format_devices(devices: Iterable[int]) -> str:
    """The shortest way to write a set of devices: `0-3,8`. `parse_devices` reads it back."""
    spans: list[list[int]] = []
    for device in sorted(set(devices)):
        if spans and device == spans[-1][-1] + 1:
            spans[-1].append(device)
        else:
            spans.append([device])
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
