"""What a recipe will hold in memory, per device and phase. Estimates, to find out on paper what would not fit.

P is the number of parameters, b the bytes of one weight. Models are sharded over the devices of their role (FSDP); a
rollout device that does not hold the whole actor needs its own copy of the weights. What stays between phases
(weights, optimiser state) counts in all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from corral.recipe.placement import Placement
from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.rules import max_trajectory_tokens
from corral.recipe.schema import Recipe
from corral.recipe.shape import ModelShape

Phase = Literal["playing", "scoring", "learning"]
PHASES: tuple[Phase, ...] = ("playing", "scoring", "learning")
FLOAT32 = 4


def phases_of(algorithm: ResolvedAlgorithm) -> tuple[Phase, ...]:
    """Nothing is scored where all that learning needs is known from playing."""
    scores = algorithm.needs_reference or algorithm.needs_critic or algorithm.old_logprobs == "recompute"
    return PHASES if scores else ("playing", "learning")


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
) -> list[DeviceMemory]:
    estimate = _Estimate(recipe, algorithm, placement, shape, weight_bytes)
    phases = phases_of(algorithm)
    return [
        DeviceMemory(roles, devices, tuple(estimate.items(roles)), phases)
        for roles, devices in placement.groups().items()
    ]


@dataclass(frozen=True)
class _Estimate:
    recipe: Recipe
    algorithm: ResolvedAlgorithm
    placement: Placement
    shape: ModelShape
    weight_bytes: int
    """Also of an activation: computation is in the weights' type."""

    def items(self, roles: tuple[str, ...]) -> Iterator[MemoryItem]:
        for role in ("actor", "critic", "reference"):
            if role in roles:
                yield MemoryItem(f"{role} weights", self.always(self.weights(role)))
        if "rollout" in roles and ("actor" not in roles or self.num_devices("actor") > 1):
            yield MemoryItem("rollout weights", {"playing": self.shape.num_parameters * self.weight_bytes})
        for role in ("actor", "critic"):
            if role in roles:
                yield MemoryItem(f"{role} optimiser", self.always(self.optimiser(role)))
        if "rollout" in roles:
            yield MemoryItem("KV cache", {"playing": self.kv_cache()})
            yield MemoryItem("logits of a decode step", {"playing": self.decode_logits()})
        if "actor" in roles or "critic" in roles:
            trained = [role for role in ("actor", "critic") if role in roles]  # one after the other
            yield MemoryItem("gradients", {"learning": max(map(self.gradients, trained))})
        yield MemoryItem("activations", self.activations(roles))
        if "actor" in roles or "reference" in roles:
            yield MemoryItem("logits chunk", self.logits_chunk(roles))

    def always(self, size: int) -> dict[Phase, int]:
        return dict.fromkeys(phases_of(self.algorithm), size)

    def num_devices(self, role: str) -> int:
        return len(self.placement.roles[role])

    def weights(self, role: str) -> int:
        """P b, shared by the role's devices."""
        return self.shape.num_parameters * self.weight_bytes // self.num_devices(role)

    def optimiser(self, role: str) -> int:
        """AdamW's two moments in float32, and a float32 master copy where the weights are smaller: 8 P (+ 4 P)."""
        copies = 2 if self.weight_bytes >= FLOAT32 else 3
        return self.shape.num_parameters * FLOAT32 * copies // self.num_devices(role)

    def gradients(self, role: str) -> int:
        """4 P: summed over micro-batches in float32, whatever the weights are."""
        return self.shape.num_parameters * FLOAT32 // self.num_devices(role)

    def kv_cache(self) -> int:
        """sequences x tokens x layers x kv_heads x head_dim x 2 (keys, values) x b. A bound: it grows as needed."""
        shape = self.shape
        per_token = shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * self.weight_bytes
        return self.recipe.rollout.max_sequences * max_trajectory_tokens(self.recipe) * per_token

    def decode_logits(self) -> int:
        """sequences x vocabulary in float32, and their probabilities."""
        return 2 * self.recipe.rollout.max_sequences * self.shape.vocab_size * FLOAT32

    def activations(self, roles: tuple[str, ...]) -> dict[Phase, int]:
        """Without gradients one layer's at a time; with them every layer's, or with recompute every layer's input and
        one layer's inside."""
        shape, micro_batch = self.shape, self.recipe.batch.max_tokens_per_micro_batch
        layer = self.layer_activations()
        learning = layer * shape.num_layers
        if self.recipe.train.recompute == "full":
            learning = layer + shape.hidden_size * self.weight_bytes * shape.num_layers
        sizes: dict[Phase, int] = {
            "playing": self.recipe.rollout.max_prefill_tokens * layer * ("rollout" in roles),
            "scoring": micro_batch * layer * self.scores(roles),
            "learning": micro_batch * learning * ("actor" in roles or "critic" in roles),
        }
        return {phase: size for phase, size in sizes.items() if size}

    def layer_activations(self) -> int:
        """Bytes that one layer keeps of one token for its backward pass: norms and residuals (6 x hidden), queries,
        keys and values before and after rotation, attention's output, and four of the feed-forward's width. Within a
        quarter of what transformers keeps for Llama and Qwen3."""
        shape = self.shape
        attention = 2 * shape.attention_size + shape.num_heads * shape.head_dim
        return (6 * shape.hidden_size + attention + 4 * shape.active_intermediate_size) * self.weight_bytes

    def logits_chunk(self, roles: tuple[str, ...]) -> dict[Phase, int]:
        """chunk x vocabulary in float32: logits and probabilities, and learning also their gradients; there, too, the
        head's own gradient in float32."""
        chunk = self.recipe.train.logits_chunk * self.shape.vocab_size * FLOAT32
        head = self.shape.hidden_size * self.shape.vocab_size * FLOAT32
        of_policy = "reference" in roles or ("actor" in roles and self.algorithm.old_logprobs == "recompute")
        sizes: dict[Phase, int] = {
            "scoring": 3 * chunk * of_policy,
            "learning": (4 * chunk + head) * ("actor" in roles),
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
