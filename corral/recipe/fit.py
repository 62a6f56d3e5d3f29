"""`corral plan --fit`: the cheapest settings with which a recipe fits given devices.

A plain search: candidates in a fixed order, the cheapest first, through the same memory estimate as every plan; the
first that fits is proposed. Whole copies, shards within a node, shards over all devices; the same with gradient
checkpointing; with a mixture's experts, then the tokens of a micro-batch, spread over more and more devices; all of
these with the optimizer offloaded, with parameters, too, and last with activations. First with the native engine, then
with vLLM, whose engines have more and more devices. `tensor` is not proposed: `context` saves as much. Nor is
`pipeline`: `shard` saves as much, and waits for nobody.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from corral.recipe.default_mesh import MARGIN, mesh_choices, min_sequences, peak_memory, with_parallel
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.memory import GIB, KV_CACHE, min_micro_batch
from corral.recipe.placement import resolve_meshes, resolve_placement
from corral.recipe.plan import Plan, count, describe_mesh, make_plan
from corral.recipe.presets import resolve_algorithm
from corral.recipe.rules import check
from corral.recipe.schema import MAX_SEQUENCES, EngineChoice, Lora, Parallel, Quantization, Recipe
from corral.recipe.shape import ModelShape
from corral.recipe.step_time import DEVICE_KINDS, DeviceKind, estimate_step_s

DEVICES_PER_NODE = 8
"""Most devices of one kind that are taken to be in one node, unless nodes are written."""
DEVICES = re.compile(
    r"(?:(?P<nodes>[1-9]\d{0,4})x)?(?P<count>[1-9]\d{0,5})x(?P<kind>[a-z0-9]+)(?:-(?P<memory>[1-9]\d{0,3}))?"
)
MICRO_BATCHES = (4096, 8192, 16384, 32768)
OFFLOADS = (
    (),
    ("optimizer",),
    ("parameters", "gradients", "optimizer"),
    ("optimizer", "activations"),
    ("parameters", "gradients", "optimizer", "activations"),
)
SIZES = (2, 4, 8)
"""Devices over which experts, the tokens of a micro-batch, or vLLM's model are spread."""
MOST_DEVICES = 4096
OF_THE_ENGINE = ("rollout weights", KV_CACHE, "activations", "logits of a decode step")
"""Items of the memory estimate that are the engine's during a rollout."""


@dataclass(frozen=True)
class Hardware:
    nodes: int
    devices_per_node: int
    kind_name: str
    memory: int
    """GiB of a device."""

    @classmethod
    def parse(cls, text: str) -> "Hardware":
        """`8xh100-80`, or with nodes `4x8xh100-80`; more than eight devices without nodes are nodes of eight. The GiB
        may be left out of a kind that is made with one memory."""
        match = DEVICES.fullmatch(text.lower())
        if match is None:
            raise UserError(
                f"--devices {text}: write COUNTxKIND-GIB or NODESxCOUNTxKIND-GIB, as 1xa100-40, 8xh100-80, 4x8xh100-80"
            )
        if match["kind"] not in DEVICE_KINDS:
            raise UserError(f"--devices {text}: {match['kind']} is none of {', '.join(DEVICE_KINDS)}")
        memory = match["memory"] or DEVICE_KINDS[match["kind"]].memory_gib
        if memory is None:
            raise UserError(f"--devices {text}: write how many GiB each has, as {text}-80")
        nodes, number = int(match["nodes"] or 1), int(match["count"])
        if match["nodes"] is None and number > DEVICES_PER_NODE:
            nodes, rest = divmod(number, DEVICES_PER_NODE)
            if rest:
                raise UserError(f"--devices {text}: {number} are not whole nodes of 8; write the nodes, as 3x4xh100-80")
            number = DEVICES_PER_NODE
        return cls(nodes, number, match["kind"], int(memory))

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.kind_name}-{self.memory}"

    @property
    def kind(self) -> DeviceKind:
        return DEVICE_KINDS[self.kind_name]

    def larger(self) -> Iterator["Hardware"]:
        """Twice as many devices, and so on: first to a whole node, then more nodes."""
        one = self
        while one.nodes * one.devices_per_node < MOST_DEVICES:
            if one.nodes > 1 or 2 * one.devices_per_node > DEVICES_PER_NODE:
                one = replace(one, nodes=2 * one.nodes)
            else:
                one = replace(one, devices_per_node=2 * one.devices_per_node)
            yield one


@dataclass(frozen=True)
class Fit:
    recipe: Recipe
    """As it was, but for the settings that are proposed."""
    overrides: tuple[str, ...]
    """The proposed settings, as `corral plan` and `corral train` take them."""
    peak: int
    """Bytes of the fullest device."""
    stages_s: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """Seconds of a step: of its stages, or of the longer side where rollouts run ahead of training."""
        rollout, total = self.stages_s.get("rollout", 0.0), sum(self.stages_s.values())
        return max(rollout, total - rollout) if self.recipe.schedule.max_staleness else total

    def as_dict(self) -> dict[str, Any]:
        """The proposal for programs."""
        return {
            "settings": describe_fit(self.recipe),
            "overrides": list(self.overrides),
            "peak_bytes": self.peak,
            "step_s": self.step_s,
            "stages_s": dict(self.stages_s),
        }

    def lines(self, arguments: str, hardware: Hardware) -> list[str]:
        """`arguments`: what the command had, the recipe and its changes."""
        stages = ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in self.stages_s.items())
        step = format_seconds(self.step_s)
        return [
            f"fits {hardware}: {describe_fit(self.recipe)}",
            f"  {self.peak / GIB:.1f} of {hardware.memory} GiB of the fullest device, estimated; up to "
            f"{MARGIN:.0%} are planned with",
            f"  about {step} a step of full-length trajectories ({stages}):",
            "  an estimate from rates measured on one H200, scaled by data sheets; several devices were not measured",
            f"corral train {arguments} \\",
            *(f"  {shlex.quote(line)} \\" for line in self.overrides[:-1]),
            f"  {shlex.quote(self.overrides[-1])}",
        ]


def format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"


def find_fit(recipe: Recipe, hardware: Hardware, shape: ModelShape) -> Fit:
    """Raises a UserError that says what comes closest, and what would fit, where nothing does."""
    closest: tuple[int, Recipe] | None = None
    for peak, candidate in candidates(recipe, hardware, shape):
        if (closest is None or peak < closest[0]) and is_allowed(candidate):
            closest = peak, candidate
            if peak <= room(hardware):
                return made_fit(recipe, grow(candidate, hardware, shape), hardware, shape)
    if closest is None:
        check(on_hardware(recipe, hardware))  # says what is wrong with it
        raise UserError(f"no settings that --fit knows are allowed with this recipe on {hardware}")
    peak, nearest = closest
    message = (
        f"{recipe.model.path} does not fit {hardware}: the least that any settings need is {peak / GIB:.0f} GiB of a "
        f"device, and {room(hardware) / GIB:.0f} of its {hardware.memory} are planned with ({describe_fit(nearest)})"
    )
    raise UserError("\n".join([message, *what_would_fit(recipe, hardware, shape)]))


def candidates(recipe: Recipe, hardware: Hardware, shape: ModelShape) -> Iterator[tuple[int, Recipe]]:
    """Recipes in the order in which they are tried, each with the smallest micro-batch and KV cache that make sense,
    and the bytes of their fullest device. They may break rules (`is_allowed`)."""
    base = on_hardware(recipe, hardware)
    batch = base.batch.model_copy(update={"max_tokens_per_micro_batch": min_micro_batch(recipe)})
    for engine, offload in engines(recipe, hardware, shape):
        sections: dict[str, Any] = {"batch": batch}
        if recipe.needs_engine:
            least = min(min_sequences(recipe), trajectories_per_engine(base, engine))
            sections["rollout"] = base.rollout.model_copy(update={"engine": engine, "max_sequences": least})
        with_engine = base.model_copy(update=sections)
        for checkpoints, sizes in savings(shape):
            if "activations" in offload and not checkpoints:
                continue
            train = {"offload": list(offload), "gradient_checkpointing": checkpoints, "parallel": Parallel(**sizes)}
            changed = with_engine.model_copy(update={"train": base.train.model_copy(update=train)})
            algorithm = resolve_algorithm(changed)
            placement, _ = resolve_placement(changed, algorithm)
            for parallel, _ in mesh_choices(changed, placement):
                candidate = with_parallel(changed, parallel)
                yield peak_memory(candidate, shape, algorithm, placement), candidate


def savings(shape: ModelShape) -> list[tuple[bool, dict[str, int]]]:
    """Gradient checkpointing, and sizes of a mesh that need less memory than shards alone."""
    by_expert = [{"expert": size} for size in SIZES if shape.num_experts and shape.num_experts % size == 0]
    return [(False, {}), *((True, sizes) for sizes in [{}, *by_expert, *({"context": size} for size in SIZES)])]


def on_hardware(recipe: Recipe, hardware: Hardware) -> Recipe:
    cluster = {
        "nodes": hardware.nodes,
        "devices_per_node": hardware.devices_per_node,
        "device_memory": float(hardware.memory),
    }
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=cluster)})


def engines(recipe: Recipe, hardware: Hardware, shape: ModelShape) -> list[tuple[EngineChoice, tuple[str, ...]]]:
    """Engines, and what is offloaded."""
    if not recipe.needs_engine:
        return [(recipe.rollout.engine, offload) for offload in OFFLOADS]
    written = recipe.rollout.engine if recipe.rollout.engine.name == "vllm" else EngineChoice(name="vllm")
    sizes = [size for size in (1, *SIZES) if hardware.devices_per_node % size == 0 and shape.num_heads % size == 0]
    with_vllm = [written.model_copy(update={"tensor_parallel": size}) for size in sizes]
    # Another engine costs less than states that travel to the host and back in every update.
    return [(engine, offload) for offload in OFFLOADS for engine in (EngineChoice(), *with_vllm)]


def trajectories_per_engine(recipe: Recipe, engine: EngineChoice) -> int:
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    return -(-recipe.num_trajectories * engine.tensor_parallel // len(placement.roles["rollout"]))


def is_allowed(candidate: Recipe) -> bool:
    try:
        check(candidate)
    except RecipeError:
        return False
    return True


def room(hardware: Hardware) -> int:
    return int(MARGIN * hardware.memory * GIB)


def grow(candidate: Recipe, hardware: Hardware, shape: ModelShape) -> Recipe:
    """The largest micro-batch and KV cache for which there is memory: they are in different phases of a step."""
    most = 1
    if candidate.needs_engine:
        most = min(MAX_SEQUENCES["cuda"], trajectories_per_engine(candidate, candidate.rollout.engine))
    tokens, sequences = candidate.batch.max_tokens_per_micro_batch, candidate.rollout.max_sequences or most
    changes = [{"batch": {"max_tokens_per_micro_batch": size}} for size in MICRO_BATCHES if size > tokens]
    while sequences < most:
        sequences = min(2 * sequences, most)
        changes.append({"rollout": {"max_sequences": sequences}})
    algorithm = resolve_algorithm(candidate)
    placement, _ = resolve_placement(candidate, algorithm)
    for change in changes:
        sections = {name: getattr(candidate, name).model_copy(update=values) for name, values in change.items()}
        larger = candidate.model_copy(update=sections)
        if peak_memory(larger, shape, algorithm, placement) <= room(hardware):
            candidate = larger
    return candidate


def made_fit(recipe: Recipe, found: Recipe, hardware: Hardware, shape: ModelShape) -> Fit:
    """`recipe`: as it was written."""
    plan = make_plan(found, shape)
    mesh = plan.meshes["actor"]
    values: dict[str, Any] = {
        "cluster.nodes": hardware.nodes,
        "cluster.devices_per_node": hardware.devices_per_node,
        "cluster.device_memory": hardware.memory,
        "train.parallel.replicate": mesh.replicate,
        "train.parallel.shard": mesh.shard,
        "train.gradient_checkpointing": str(found.train.gradient_checkpointing).lower(),
        "batch.max_tokens_per_micro_batch": found.batch.max_tokens_per_micro_batch,
    }
    if len({one.shard for one in plan.meshes.values()}) > 1:
        del values["train.parallel.shard"]  # each role shards over the devices that it has
    for name in ("pipeline", "context", "tensor", "expert"):
        if getattr(mesh, name) != getattr(recipe.train.parallel, name):
            values[f"train.parallel.{name}"] = getattr(mesh, name)
    if found.train.offload != recipe.train.offload:
        values["train.offload"] = f"[{', '.join(found.train.offload)}]"
    if recipe.needs_engine:
        values |= engine_lines(recipe, plan)
        values["rollout.max_sequences"] = found.rollout.max_sequences
    overrides = tuple(key if value is None else f"{key}={value}" for key, value in values.items())
    peak = max(total for group in plan.memory for total in group.totals.values())
    return Fit(found, overrides, peak, estimate_step_s(plan, hardware.kind))


def engine_lines(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Another engine than the written one takes none of its options. Where trainers are on its devices, vLLM is given
    what the plan has for it."""
    engine, written = plan.recipe.rollout.engine, recipe.rollout.engine
    is_other = engine.name != written.name or engine.own_process != written.own_process
    lines: dict[str, Any] = (
        {"~rollout.engine": None} if is_other and "engine" in recipe.rollout.model_fields_set else {}
    )
    if engine.name == "native":
        return lines
    lines["rollout.engine.name"] = engine.name
    lines["rollout.engine.tensor_parallel"] = engine.tensor_parallel
    if plan.placement.colocated:
        [group] = (one for one in plan.memory if "rollout" in one.roles)
        size = sum(item.bytes_by_phase.get("rollout", 0) for item in group.items if item.name in OF_THE_ENGINE)
        available = plan.recipe.cluster.device_memory
        assert available is not None
        lines["rollout.engine.memory_fraction"] = math.ceil(100 * size / (available * GIB)) / 100
    return lines


def describe_fit(recipe: Recipe) -> str:
    placement, _ = resolve_placement(recipe, resolve_algorithm(recipe))
    mesh = resolve_meshes(recipe, placement)["actor"]
    parts = [
        describe_mesh(mesh) or "one device",
        "selective " * (recipe.train.gradient_checkpointing == "selective")
        + "gradient checkpointing" * bool(recipe.train.gradient_checkpointing),
        f"{', '.join(recipe.train.offload)} offloaded" * bool(recipe.train.offload),
    ]
    engine = recipe.rollout.engine
    if recipe.needs_engine:
        over = f" over {engine.tensor_parallel} devices" if engine.tensor_parallel > 1 else ""
        parts.append(f"engine {engine.name}{over}, {count(recipe.rollout.max_sequences or 1, 'sequence')} at once")
    parts.append(f"micro-batches of {recipe.batch.max_tokens_per_micro_batch} tokens")
    return ", ".join(filter(None, parts))


def what_would_fit(recipe: Recipe, hardware: Hardware, shape: ModelShape) -> Iterator[str]:
    """More devices of the same kind, and adapters on these."""

    def first(changed: Recipe, devices: Hardware) -> Recipe | None:
        found = candidates(changed, devices, shape)
        return next((one for peak, one in found if peak <= room(devices) and is_allowed(one)), None)

    for more in hardware.larger():
        if (fitting := first(recipe, more)) is not None:
            yield f"the closest that fits: --devices {more}: {describe_fit(fitting)}"
            break
    else:
        yield f"no number of such devices up to {MOST_DEVICES} would fit it"
    lora, in_four_bits = recipe.model.lora or Lora(rank=32), Quantization(bits=4)
    written = "" if recipe.model.lora is not None else "`model.lora.rank=32`"
    smaller: dict[str, dict[str, Any]] = {
        f"with adapters, {written}": {"lora": lora},
        " ".join(filter(None, ["with", written, "`model.quantization.bits=4`"])): {
            "lora": lora,
            "quantization": in_four_bits,
        },
    }
    for how, changes in smaller.items():
        changed = recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})
        if changed.model != recipe.model and (fitting := first(changed, hardware)) is not None:
            yield f"on {hardware} it fits {how}: {describe_fit(fitting)}"
            break
