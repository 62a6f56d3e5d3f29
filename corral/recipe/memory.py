"""What a recipe will hold in memory, per device and phase. Estimates, to find out on paper what would not fit.

P is the number of parameters, b the bytes of one weight, S the devices that share one copy of a model (`train.parallel`
without replicate). A rollout device that does not hold the whole actor has its own copy of the weights. What stays
between phases (weights, optimizer state) counts in all of them; what `train.offload` takes to the host, only where the
device computes with it. Layers that sharding gathers for a moment, and buffers in which weights travel, are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from corral.recipe.mesh import MeshShape
from corral.recipe.placement import Placement, resolve_meshes
from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.rules import max_trajectory_tokens
from corral.recipe.schema import LOGITS_CHUNK, MAX_PREFILL_TOKENS, MAX_SEQUENCES, Recipe
from corral.recipe.shape import ModelShape
from corral.recipe.warnings import is_scored

Phase = Literal["playing", "scoring", "learning"]
PHASES: tuple[Phase, ...] = ("playing", "scoring", "learning")
FLOAT32 = 4


def phases_of(algorithm: ResolvedAlgorithm) -> tuple[Phase, ...]:
    """Nothing is scored where all that learning needs is known from playing."""
    return PHASES if is_scored(algorithm) else ("playing", "learning")


@dataclass(frozen=True)
class MemoryItem:
    name: str
    bytes_by_phase: dict[Phase, int]


@dataclass(frozen=True)
class DeviceMemory:
    """Of each device of a group that has the same roles."""

    roles: tuple[str, ...]
    devices: tuple[int, ...]
    items: tuple[MemoryItem, ...]
    phases: tuple[Phase, ...]

    @property
    def totals(self) -> dict[Phase, int]:
        return {phase: sum(item.bytes_by_phase.get(phase, 0) for item in self.items) for phase in self.phases}


def estimate_memory(
    recipe: Recipe,
    algorithm: ResolvedAlgorithm,
    placement: Placement,
    shape: ModelShape,
    weight_bytes: int,
    on_gpu: bool,
) -> list[DeviceMemory]:
    estimate = _Estimate(recipe, algorithm, resolve_meshes(recipe, placement), shape, weight_bytes, on_gpu)
    phases = phases_of(algorithm)
    return [
        DeviceMemory(roles, devices, tuple(estimate.items(roles)), phases)
        for roles, devices in placement.groups().items()
    ]


@dataclass(frozen=True)
class _Estimate:
    recipe: Recipe
    algorithm: ResolvedAlgorithm
    meshes: dict[str, MeshShape]
    shape: ModelShape
    weight_bytes: int
    """Also of an activation: computation is in the weights' type."""
    on_gpu: bool

    def items(self, roles: tuple[str, ...]) -> Iterator[MemoryItem]:
        for role in ("actor", "critic", "reference"):
            if role in roles:
                yield MemoryItem(f"{role} weights", self.held("parameters", self.weights(role), self.computes(role)))
        if "rollout" in roles and ("actor" not in roles or not self.meshes["actor"].is_whole):
            yield MemoryItem("rollout weights", self.always(self.shape.num_parameters * self.weight_bytes))
        for role in ("actor", "critic"):
            if role in roles:
                yield MemoryItem(f"{role} optimizer", self.held("optimizer", self.optimizer(role), ["learning"]))
        if "rollout" in roles:
            yield MemoryItem("KV cache", {"playing": self.kv_cache()})
            if self.recipe.rollout.max_turns > 1 and not self.on_gpu:  # there they are pages of the cache itself
                yield MemoryItem("KV of turns before, at most", {"playing": self.kv_cache()})
            yield MemoryItem("logits of a decode step", {"playing": self.decode_logits()})
        if "actor" in roles or "critic" in roles:
            trained = [role for role in ("actor", "critic") if role in roles]  # one after the other
            yield MemoryItem("gradients", {"learning": max(map(self.gradients, trained))})
        yield MemoryItem("activations", self.activations(roles))
        if "actor" in roles or "reference" in roles:
            yield MemoryItem("logits chunk", self.logits_chunk(roles))

    def always(self, size: int) -> dict[Phase, int]:
        return dict.fromkeys(phases_of(self.algorithm), size)

    def held(self, part: str, size: int, used_in: Sequence[Phase]) -> dict[Phase, int]:
        """On the device in all phases, or, if the part is offloaded, in those that use it."""
        return dict.fromkeys(used_in, size) if part in self.recipe.train.offload else self.always(size)

    def computes(self, role: str) -> list[Phase]:
        """Phases in which a role's own weights are used. Offloaded ones are shards, with which no engine decodes."""
        scores = role != "actor" or self.algorithm.old_logprobs == "recompute"
        phases: dict[Phase, bool] = {"playing": False, "scoring": scores, "learning": role != "reference"}
        return [phase for phase, used in phases.items() if used]

    def sharing(self, role: str) -> int:
        """S: devices that hold one copy together."""
        return self.meshes[role].size // self.meshes[role].replicate

    def weights(self, role: str) -> int:
        """P b / S"""
        return self.shape.num_parameters * self.weight_bytes // self.sharing(role)

    def optimizer(self, role: str) -> int:
        """AdamW's two moments in float32, and a float32 master copy where the weights are smaller: 8 P (+ 4 P) / S."""
        copies = 2 if self.weight_bytes >= FLOAT32 else 3
        return self.shape.num_parameters * FLOAT32 * copies // self.sharing(role)

    def gradients(self, role: str) -> int:
        """4 P / S: summed over micro-batches in float32, whatever the weights are."""
        return self.shape.num_parameters * FLOAT32 // self.sharing(role)

    def kv_cache(self) -> int:
        """sequences x tokens x layers x kv_heads x head_dim x 2 (keys, values) x b. A bound: on a CPU it grows as
        needed; on a GPU it is taken at once, or as much of it as fits, and given back for learning."""
        shape = self.shape
        per_token = shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * self.weight_bytes
        return self.max_sequences * max_trajectory_tokens(self.recipe) * per_token

    def decode_logits(self) -> int:
        """sequences x vocabulary: in float32, and their probabilities; on a GPU as they come."""
        per_logit = self.weight_bytes if self.on_gpu else 2 * FLOAT32
        return self.max_sequences * self.shape.vocab_size * per_logit

    @property
    def max_sequences(self) -> int:
        return self.recipe.rollout.max_sequences or MAX_SEQUENCES[self.device]

    @property
    def device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"

    def activations(self, roles: tuple[str, ...]) -> dict[Phase, int]:
        """Without gradients one layer's at a time; with them every layer's, or with recompute every layer's input and
        one layer's inside. Devices of a context share the tokens of a micro-batch, and those of a tensor group roughly
        the width of a layer."""
        shape, layer = self.shape, self.layer_activations()
        micro_batch = self.recipe.batch.max_tokens_per_micro_batch / self.splits_of_micro_batch(roles)
        learning = layer * shape.num_layers
        if self.recipe.train.gradient_checkpointing:
            learning = layer + shape.hidden_size * self.weight_bytes * shape.num_layers
        prefill = self.recipe.rollout.max_prefill_tokens or MAX_PREFILL_TOKENS[self.device]
        sizes: dict[Phase, int] = {
            "playing": prefill * layer * ("rollout" in roles),
            "scoring": int(micro_batch * layer) * self.scores(roles),
            "learning": int(micro_batch * learning) * ("actor" in roles or "critic" in roles),
        }
        return {phase: size for phase, size in sizes.items() if size}

    def splits_of_micro_batch(self, roles: tuple[str, ...]) -> int:
        """Roles on the same devices have the same mesh."""
        return max((mesh.context * mesh.tensor for role, mesh in self.meshes.items() if role in roles), default=1)

    def layer_activations(self) -> int:
        """Bytes that one layer keeps of one token for its backward pass: norms and residuals (6 x hidden), queries,
        keys and values before and after rotation, attention's output, and four of the feed-forward's width. Within a
        quarter of what transformers keeps for Llama and Qwen3."""
        shape = self.shape
        attention = 2 * shape.attention_size + shape.num_heads * shape.head_dim
        return (6 * shape.hidden_size + attention + 4 * shape.active_intermediate_size) * self.weight_bytes

    def logits_chunk(self, roles: tuple[str, ...]) -> dict[Phase, int]:
        """chunk x vocabulary. On a CPU in float32: logits and probabilities, and learning also their gradients. On a
        GPU once, in the weights' type. Learning, too, the head's own gradient in float32."""
        vocabulary, most = self.shape.vocab_size, self.recipe.batch.max_tokens_per_micro_batch
        chunk = min(most, self.recipe.train.logits_chunk or LOGITS_CHUNK[self.device])
        scoring, learning = (self.weight_bytes, self.weight_bytes) if self.on_gpu else (3 * FLOAT32, 4 * FLOAT32)
        head = self.shape.hidden_size * vocabulary * FLOAT32
        of_policy = "reference" in roles or ("actor" in roles and self.algorithm.old_logprobs == "recompute")
        sizes: dict[Phase, int] = {
            "scoring": chunk * vocabulary * scoring * of_policy,
            "learning": (chunk * vocabulary * learning + head) * ("actor" in roles),
        }
        return {phase: size for phase, size in sizes.items() if size}

    def scores(self, roles: tuple[str, ...]) -> bool:
        recomputes = "actor" in roles and self.algorithm.old_logprobs == "recompute"
        return recomputes or "reference" in roles or "critic" in roles


def human_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.0f} TiB" if size >= 100 else f"{size:.3g} TiB"


def human_count(number: float) -> str:
    for unit in ("", " thousand", " million"):
        if number < 999.95:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g} billion" if number < 10_000 else f"{number:,.0f} billion"
