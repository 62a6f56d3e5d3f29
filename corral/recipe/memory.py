"""What a recipe will hold in memory, per device and phase. Estimates, to find out on paper what would not fit.

P is the number of parameters, b the bytes of one weight, S the devices that hold one copy of a model together
(`train.parallel` without replicate); of a pipeline, what its largest stage has is counted. A rollout device that does
not hold the whole actor has its own copy of the weights. What stays between phases (weights, optimizer state) counts in
all of them; what `train.offload` takes to the host, only where the device computes with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from corral.recipe.errors import RecipeError
from corral.recipe.mesh import MeshShape, deal_layers
from corral.recipe.placement import (
    Placement,
    engine_returns_weights,
    format_devices,
    resolve_meshes,
    transfer_kind,
)
from corral.recipe.presets import ResolvedAlgorithm
from corral.recipe.recipe_warnings import needs_logprobs
from corral.recipe.rules import max_trajectory_tokens
from corral.recipe.schema import (
    KEYS_PER_TOKEN,
    LOGITS_CHUNK,
    MAX_PREFILL_TOKENS,
    MAX_SEQUENCES,
    OPTIMIZER_SLOT_SIZE,
    OPTIMIZER_SLOTS,
    SORTED_ROWS,
    Recipe,
)
from corral.recipe.shape import ModelShape

Phase = Literal["rollout", "logprobs", "train"]
PHASES: tuple[Phase, ...] = ("rollout", "logprobs", "train")
FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_CACHE = "KV cache"
UP_TO_A_BUDGET = ("KV of turns before, at most", "activations", "logits of a decode step", "logits chunk")
"""Items that grow with the tokens or sequences computed together, which a recipe only bounds: a step may have fewer."""
REWARD_MODEL_WEIGHTS = "reward model weights"
GIB = 2**30
COMMUNICATOR = 300 * 2**20
"""Bytes of one of NCCL's connections: an allowance. 200 to 700 MiB are known of eight H100s, and less of few GPUs."""
BUCKET_BYTES = 256 * 2**20
"""Bytes of a bucket in which weights travel (`runtime/transfer_channels.py`, which engines load without recipes)."""
LARGEST_GPU = 288e9 / GIB
"""Most memory of a GPU that Corral runs on, in GiB: NVIDIA's B300, by its data sheet of 2025."""
USUAL_GPU = 80
"""Memory in GiB of the GPUs that most people train on."""


def phases_of(recipe: Recipe, algorithm: ResolvedAlgorithm) -> tuple[Phase, ...]:
    """Log-probs are a phase of their own only where training needs some that sampling does not leave behind, or a
    reward model computes between rollout and training; rollout is one where there is an engine."""
    computes = needs_logprobs(algorithm) or recipe.needs_reward_model
    happens = {"rollout": recipe.needs_engine, "logprobs": computes, "train": True}
    return tuple(phase for phase in PHASES if happens[phase])


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


def check_memory(recipe: Recipe, groups: Sequence[DeviceMemory]) -> list[str]:
    """Raises a RecipeError where a device has less than it needs. Where what it has is not known: less than the largest
    GPU has, and only what is held for certain is counted; then it returns warnings where a usual GPU has less. The KV
    cache is left out: an engine takes what there is for it."""
    known = recipe.cluster.device_memory
    available = LARGEST_GPU if known is None else known
    left_out = (KV_CACHE,) if known is not None else (KV_CACHE, *UP_TO_A_BUDGET)
    problems, warnings = [], []
    for group in groups:
        needed = dict.fromkeys(group.phases, 0.0)
        for phase, size in (
            each for one in group.items if one.name not in left_out for each in one.bytes_by_phase.items()
        ):
            needed[phase] += size / GIB
        fullest = max(needed, key=lambda one: needed[one])
        what = (
            f"device {format_devices(group.devices)} ({'+'.join(group.roles)}) needs {needed[fullest]:.0f} GiB for "
            f"{fullest}, without {'' if known is not None else 'activations and '}a KV cache"
        )
        if needed[fullest] > available:
            of_any = f"no GPU has more than {available:.0f}; for CPUs write what they have: `cluster.device_memory`"
            has = of_any if known is None else f"has {available:g} (`cluster.device_memory`)"
            problems.append(f"{what}, and {has}{what_would_fit(recipe, group, needed, available)}")
        elif known is None and needed[fullest] > USUAL_GPU:
            warnings.append(
                f"{what}, more than the {USUAL_GPU} of an A100 or H100; with `cluster.device_memory` a plan that does "
                "not fit is an error"
            )
    if problems:
        raise RecipeError(problems)
    return warnings


def what_would_fit(recipe: Recipe, group: DeviceMemory, needed: dict[Phase, float], available: float) -> str:
    """The engine's part or the reward model's, which are not spread over the devices by themselves."""
    classifier = next((one.bytes_by_phase for one in group.items if one.name == REWARD_MODEL_WEIGHTS), {})
    without = {phase: value - classifier.get(phase, 0) / GIB for phase, value in needed.items()}
    if classifier and max(without.values()) < available:
        if len(group.roles) > 1:
            return "; without the reward model it would fit: give that devices of its own in `cluster.placement`"
        for size in (2, 4, 8, 16):
            if len(group.devices) % size == 0 and without["logprobs"] + classifier["logprobs"] / GIB / size < available:
                return f"; `reward_model.shard: {size}` would spread its weights over so many devices"
    weights = next((item.bytes_by_phase for item in group.items if item.name == "rollout weights"), {})
    whole = weights.get("rollout", 0) * recipe.rollout.engine.tensor_parallel / GIB
    others = {phase: value - weights.get(phase, 0) / GIB for phase, value in needed.items()}
    for size in (2, 4, 8, 16):
        fits = others.get("rollout", 0) + whole / size < available and max(others.values()) < available
        if whole and fits and recipe.cluster.devices_per_node % size == 0 and len(group.devices) % size == 0:
            return f"; `rollout.engine: {{name: vllm, tensor_parallel: {size}}}` would fit"
    return ""


def estimate_memory(
    recipe: Recipe,
    algorithm: ResolvedAlgorithm,
    placement: Placement,
    shape: ModelShape,
    auto_bytes: int,
    on_gpu: bool,
) -> list[DeviceMemory]:
    """`auto_bytes`: of a weight whose type is `auto`."""
    returns_weights = recipe.needs_engine and engine_returns_weights(recipe, placement)
    meshes = resolve_meshes(recipe, placement)
    broadcast = recipe.needs_engine and transfer_kind(recipe, placement) == "collective"
    nodes = {device // recipe.cluster.devices_per_node for device in placement.roles["actor"]} if broadcast else ()
    estimate = _Estimate(recipe, algorithm, meshes, shape, auto_bytes, on_gpu, returns_weights, len(nodes))
    phases = phases_of(recipe, algorithm)
    groups = [
        DeviceMemory(roles, devices, tuple(estimate.items(roles)), phases)
        for roles, devices in placement.groups().items()
    ]
    available = recipe.cluster.device_memory
    return groups if available is None else [with_cache_that_fits(group, int(available * GIB)) for group in groups]


def with_cache_that_fits(group: DeviceMemory, available: int) -> DeviceMemory:
    """An engine has a smaller KV cache, and decodes fewer sequences at a time, where there is not room for all."""
    over = max(0, group.totals.get("rollout", 0) - available)
    items = [
        MemoryItem(item.name, {phase: max(0, size - over) for phase, size in item.bytes_by_phase.items()})
        if item.name == KV_CACHE
        else item
        for item in group.items
    ]
    return replace(group, items=tuple(items))


@dataclass(frozen=True)
class _Estimate:
    recipe: Recipe
    algorithm: ResolvedAlgorithm
    meshes: dict[str, MeshShape]
    shape: ModelShape
    auto_bytes: int
    on_gpu: bool
    returns_weights: bool
    num_senders: int
    """Number of trainers that broadcast weights; 0: these travel in another way."""

    @property
    def weight_bytes(self) -> int:
        """Also of an activation: computation is in the weights' type."""
        return DTYPE_BYTES.get(self.recipe.model.dtype, self.auto_bytes)

    def items(self, roles: tuple[str, ...]) -> Iterator[MemoryItem]:
        for role in ("actor", "critic", "reference"):
            if role in roles:
                yield MemoryItem(f"{role} weights", self.held("parameters", self.weights(role), self.computes(role)))
        if "reward_model" in roles:
            yield MemoryItem(REWARD_MODEL_WEIGHTS, self.held("parameters", self.reward_model_weights(), ["logprobs"]))
        engine = self.recipe.rollout.engine
        if "rollout" in roles and not ("actor" in roles and self.meshes["actor"].is_whole and engine.in_process):
            held = self.whole_weights() if engine.in_process else self.shape.num_parameters * self.weight_bytes
            held //= engine.tensor_parallel
            yield MemoryItem("rollout weights", dict.fromkeys(self.phases_of_engine(roles), held))
        for role in ("actor", "critic"):
            if role in roles:
                yield MemoryItem(f"{role} optimizer", self.optimizer_states(role, roles))
        if communicators := self.communicators(roles):
            yield MemoryItem("NCCL", self.always(communicators))
        if "rollout" in roles:
            yield MemoryItem(KV_CACHE, {"rollout": self.kv_cache()})
            if self.recipe.rollout.max_turns > 1 and not self.on_gpu:  # there they are pages of the cache itself
                yield MemoryItem("KV of turns before, at most", {"rollout": self.kv_cache()})
            # CUDA graphs of the engine keep theirs while the trainer computes.
            stays = self.on_gpu and engine.in_process
            logits = self.decode_logits()
            yield MemoryItem("logits of a decode step", self.always(logits) if stays else {"rollout": logits})
        if "actor" in roles or "critic" in roles:
            trained = [role for role in ("actor", "critic") if role in roles]  # one after the other
            yield MemoryItem("gradients", {"train": max(map(self.gradients, trained))})
        yield MemoryItem("activations", self.activations(roles))
        if gathered := self.gathered_layers(roles):
            yield MemoryItem("gathered layers", gathered)
        if "actor" in roles or "reference" in roles:
            yield MemoryItem("logits chunk", self.logits_chunk(roles))

    def phases_of_engine(self, roles: tuple[str, ...]) -> tuple[Phase, ...]:
        """Phases in which an engine's copy of the weights is on the device. vLLM has it on the host while it sleeps; a
        reward model computes while prompts of the step may still be sampled."""
        phases = phases_of(self.recipe, self.algorithm)
        sleeps = self.on_gpu and self.recipe.rollout.engine.name == "vllm" and "actor" in roles
        if not sleeps and not self.returns_weights:
            return phases
        return ("rollout", "logprobs") if self.recipe.needs_reward_model and not sleeps else ("rollout",)

    def communicators(self, roles: tuple[str, ...]) -> int:
        """What NCCL takes beside torch. Roles on the same devices have the same groups. Weights that are broadcast have
        a group for each sender, of which there is one on each node of trainers, and buckets."""
        number, travelling = self.mesh_of(roles).num_communicators, 0
        if self.num_senders and "rollout" in roles:
            number, travelling = number + self.num_senders, self.num_senders + 1
        elif self.num_senders and "actor" in roles:
            number, travelling = number + 1, 2
        return self.on_gpu * (number * COMMUNICATOR + travelling * BUCKET_BYTES)

    def always(self, size: int) -> dict[Phase, int]:
        return dict.fromkeys(phases_of(self.recipe, self.algorithm), size)

    def held(self, part: str, size: int, used_in: Sequence[Phase]) -> dict[Phase, int]:
        """On the device in all phases, or, if the part is offloaded, in those that use it."""
        return dict.fromkeys(used_in, size) if part in self.recipe.train.offload else self.always(size)

    def computes(self, role: str) -> list[Phase]:
        """Phases in which a role's own weights are used. Offloaded ones are shards, with which no engine decodes."""
        computes_logprobs = role != "actor" or self.algorithm.old_logprobs == "recompute"
        phases: dict[Phase, bool] = {"rollout": False, "logprobs": computes_logprobs, "train": role != "reference"}
        return [phase for phase, used in phases.items() if used]

    def held_part(self, role: str, size: int, shape: ModelShape | None = None) -> int:
        """What a device holds of what is spread as the parameters are: size / S, or more where stages differ."""
        mesh = self.meshes[role]
        of_stage = size * largest_stage(shape or self.shape, mesh.pipeline)
        return int(of_stage * mesh.replicate / mesh.stage_size)

    def weights(self, role: str) -> int:
        """P b / S, and with adapters those of the roles that are trained."""
        if role == "reference":
            size = self.reference_shape.num_parameters * self.weight_bytes
            return self.held_part(role, size, self.reference_shape)
        return self.held_part(role, self.whole_weights())

    def whole_weights(self) -> int:
        """Those of the policy with its adapters, the others perhaps in few bits."""
        adapters = self.num_trained if self.recipe.model.lora is not None else 0
        saved = quantization_saves(self.recipe, self.shape, self.weight_bytes)
        return (self.shape.num_parameters + adapters) * self.weight_bytes - saved

    @property
    def reference_shape(self) -> ModelShape:
        """Its own where it has a path and is on this machine, else that of the model."""
        path = self.recipe.reference.path
        return (path and ModelShape.find(path)) or self.shape

    @property
    def reward_model_shape(self) -> ModelShape:
        """Its own where it is on this machine, else that of the model. A score takes no head over the vocabulary."""
        path = self.recipe.reward_model.path
        return replace((path and ModelShape.find(path)) or self.shape, tie_word_embeddings=True)

    @property
    def reward_model_bytes(self) -> int:
        return DTYPE_BYTES.get(self.recipe.reward_model.dtype, self.auto_bytes)

    @property
    def longest_conversation(self) -> int:
        """Tokens of a conversation that the reward model computes as a whole."""
        longest, limit = max_trajectory_tokens(self.recipe), self.recipe.reward_model.max_length
        return longest if limit is None else min(longest, limit)

    def reward_model_weights(self) -> int:
        """Every device of the role has all of them, or a part and what is gathered: the embedding and two layers."""
        shape, shard = self.reward_model_shape, self.recipe.reward_model.shard
        whole = shape.num_parameters * self.reward_model_bytes
        if shard == 1:
            return whole
        gathered = shape.embedding_parameters + 2 * layer_size(shape)
        return whole // shard + gathered * self.reward_model_bytes

    @property
    def num_trained(self) -> int:
        """Number of parameters that are trained: all, or those of the adapters."""
        return num_trained_parameters(self.recipe, self.shape)

    def optimizer(self, role: str) -> int:
        """AdamW's two moments, and a float32 master copy where the weights are smaller: 8 P (+ 4 P) / S."""
        master = 0 if self.weight_bytes >= FLOAT32 else FLOAT32
        return self.held_part(role, self.num_trained * (moment_bytes(self.recipe, role) + master))

    def optimizer_states(self, role: str, roles: tuple[str, ...]) -> dict[Phase, int]:
        """Offloaded ones are on a GPU only while they are updated, in parts that fit a few slots, none larger than
        the largest parameter or its shard. The memory of activations is free by then."""
        total = self.optimizer(role)
        if "optimizer" not in self.recipe.train.offload:
            return self.always(total)
        if not self.on_gpu:
            return {"train": total}
        largest = max(self.shape.vocab_size * self.shape.hidden_size, self.shape.layer_embeddings)
        if self.shape.num_experts:  # of a layer together, gates and ups
            of_layer = 2 * self.shape.num_experts * self.shape.intermediate_size * self.shape.hidden_size
            largest = max(largest, of_layer // self.meshes[role].expert)
        mesh = self.meshes[role]
        largest = OPTIMIZER_SLOTS * min(OPTIMIZER_SLOT_SIZE * mesh.stage_size // mesh.replicate, largest)
        part = int(total * min(1.0, largest / max(1, self.num_trained)))
        return {"train": max(0, part - self.activations(roles)["train"] - self.logits_chunk(roles).get("train", 0))}

    def gradients(self, role: str) -> int:
        """4 P / S: summed over micro-batches in float32, whatever the weights are."""
        return self.held_part(role, self.num_trained * FLOAT32)

    def kv_cache(self) -> int:
        """sequences x tokens x layers x kv_heads x (head_dim of keys, and of values) x b. A bound: on a CPU it grows as
        needed; on a GPU it is taken at once, or as much of it as fits, and given back for training; vLLM and SGLang
        keep less where keys and values come from latent vectors (DeepSeek)."""
        per_token = self.shape.kv_values_per_token * self.weight_bytes
        spread = min(self.recipe.rollout.engine.tensor_parallel, self.shape.num_kv_heads)
        return self.max_sequences * max_trajectory_tokens(self.recipe) * per_token // spread

    def decode_logits(self) -> int:
        """sequences x vocabulary: in float32, and their probabilities; on a GPU as they come, unless some are left
        out."""
        if not self.on_gpu:
            return self.max_sequences * self.shape.vocab_size * 2 * FLOAT32
        rollout = self.recipe.rollout
        truncates = min(rollout.top_p, self.recipe.validation.top_p) < 1 or rollout.top_k > 0 or rollout.min_p > 0
        return sampling_bytes(self.shape, self.weight_bytes, self.max_sequences, truncates)

    @property
    def max_sequences(self) -> int:
        return self.recipe.rollout.max_sequences or MAX_SEQUENCES[self.device]

    @property
    def device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"

    def activations(self, roles: tuple[str, ...]) -> dict[Phase, int]:
        """Without gradients one layer's at a time; with them every layer's, or with gradient checkpointing every
        layer's input and one layer's inside, or selectively every layer's products. Devices of a context split the
        tokens of a micro-batch, and those of a tensor group roughly the width of a layer. A stage of a pipeline has its
        own layers' only, of as many micro-batches as there are stages from it to the end."""
        shape, mesh, fused = self.shape, self.mesh_of(roles), self.has_fused_layers(roles)
        num_parts = mesh.context * mesh.tensor
        layer = layer_activations(shape, self.weight_bytes, fused)
        of_classifier = layer_activations(self.reward_model_shape, self.reward_model_bytes) * ("reward_model" in roles)
        micro_batch = self.recipe.batch.max_tokens_per_micro_batch / num_parts
        num_kept = num_kept_layers(shape, mesh)
        # Of inputs that wait on the host: the one that is used, and those on their way there and back.
        inputs = min(3, num_kept) if "activations" in self.recipe.train.offload else num_kept
        checkpointed = layer + shape.hidden_size * self.weight_bytes * inputs
        train: float = checkpointed if self.recipe.train.gradient_checkpointing else layer * num_kept
        if self.recipe.train.gradient_checkpointing == "selective":
            train += product_activations(shape, self.weight_bytes) * num_kept
        of_keys = shape.kv_size * self.weight_bytes * self.keys_per_token
        train += of_keys + key_gradients(shape, self.weight_bytes) * self.keys_per_token
        # A trajectory that is longer than a micro-batch is checkpointed, one chunk of it in a feed-forward at a time.
        longest = max(0, max_micro_batch(self.recipe) / num_parts - micro_batch)
        in_chunks = 0 if shape.num_experts else (4 - fused) * shape.active_intermediate_size * self.weight_bytes
        train_long = (micro_batch + longest) * checkpointed - longest * in_chunks if longest else 0
        sizes: dict[Phase, int] = {
            "rollout": self.prefill(fused) * ("rollout" in roles),
            "logprobs": max(
                int(micro_batch * (layer + of_keys) + longest * (layer - in_chunks)) * self.computes_logprobs(roles),
                max(self.recipe.batch.max_tokens_per_micro_batch, self.longest_conversation) * of_classifier,
            ),
            "train": int(max(micro_batch * train, train_long)) * ("actor" in roles or "critic" in roles),
        }
        return {phase: size for phase, size in sizes.items() if size}

    def prefill(self, fused: bool) -> int:
        """A prefill on a GPU also gathers the keys of turns before, or of a long prompt's chunks before."""
        num_tokens = self.recipe.rollout.max_prefill_tokens or MAX_PREFILL_TOKENS[self.device]
        longest, num_keys = max_trajectory_tokens(self.recipe), 0
        if self.on_gpu:
            has_turns = self.recipe.rollout.max_turns > 1
            num_keys = max_prefill_keys(num_tokens, longest, self.max_sequences) if has_turns else longest
        return prefill_bytes(self.shape, self.weight_bytes, fused, num_tokens, num_keys)

    @property
    def keys_per_token(self) -> float:
        """Keys that one call of attention on a GPU gathers for each distinct token of a micro-batch, which has whole
        groups: those of a prompt once for each of its samples."""
        whole, prompt = self.recipe.max_trained_tokens, self.recipe.data.max_prompt_tokens
        num_samples = 1 if self.recipe.trains_on_rows else self.recipe.batch.samples_per_prompt
        distinct = prompt + num_samples * (whole - prompt)
        return min(KEYS_PER_TOKEN, num_samples * whole / distinct) * self.on_gpu

    def has_fused_layers(self, roles: tuple[str, ...]) -> bool:
        """Whether the trainer's layers are Corral's own on a GPU."""
        model = self.recipe.model
        is_fast = model.implementation == "auto" and model.quantization is None and not model.exact
        return self.on_gpu and self.shape.has_fused_layers and is_fast and self.mesh_of(roles).tensor == 1

    def gathered_layers(self, roles: tuple[str, ...]) -> dict[Phase, int]:
        """What ranks with shards put together for a moment: embeddings and head for a whole pass, the layer that
        computes and the next one; in training also a layer's gradient, in the weights' type and, to sum it, float32."""
        mesh = self.mesh_of(roles)
        if mesh.is_whole:
            return {}
        shape, trains = self.shape, self.recipe.model.lora is None
        ends, of_experts = shape.embedding_parameters, shape.num_expert_parameters
        layers = shape.num_parameters - shape.vision_parameters - ends - of_experts + of_experts // mesh.expert
        layer = layers // shape.num_layers
        if mesh.pipeline > 1:  # no stage has both ends
            ends = shape.vocab_size * shape.hidden_size
        passing = (ends + 2 * layer) * self.weight_bytes
        sizes: dict[Phase, int] = {
            "logprobs": passing * self.computes_logprobs(roles),
            "train": (passing + layer * (self.weight_bytes + FLOAT32) * trains)
            * ("actor" in roles or "critic" in roles),
        }
        return {phase: size // mesh.tensor for phase, size in sizes.items() if size}

    def mesh_of(self, roles: tuple[str, ...]) -> MeshShape:
        """Roles on the same devices have the same mesh."""
        return next((self.meshes[role] for role in roles if role in self.meshes), MeshShape())

    def logits_chunk(self, roles: tuple[str, ...]) -> dict[Phase, int]:
        """chunk x vocabulary. On a CPU in float32: logits and probabilities, and in training also their gradients. On a
        GPU once, in the weights' type. In training also the head's own gradient in float32, and where there are several
        chunks that of one, which is added to it."""
        vocabulary, most = self.shape.vocab_size, self.recipe.batch.max_tokens_per_micro_batch
        chunk = min(most, self.recipe.train.logits_chunk or LOGITS_CHUNK[self.device])
        logprobs, train = (self.weight_bytes, self.weight_bytes) if self.on_gpu else (3 * FLOAT32, 4 * FLOAT32)
        head = self.shape.hidden_size * vocabulary * FLOAT32 * (self.recipe.model.lora is None)
        head *= 2 if self.on_gpu and max_micro_batch(self.recipe) > chunk else 1
        of_policy = "reference" in roles or self.actor_computes_logprobs(roles)
        sizes: dict[Phase, int] = {
            "logprobs": chunk * vocabulary * logprobs * of_policy,
            "train": (chunk * vocabulary * train + head) * ("actor" in roles),
        }
        return {phase: size for phase, size in sizes.items() if size}

    def computes_logprobs(self, roles: tuple[str, ...]) -> bool:
        return self.actor_computes_logprobs(roles) or "reference" in roles or "critic" in roles

    def actor_computes_logprobs(self, roles: tuple[str, ...]) -> bool:
        """Its own before an update, or without its adapters those of the reference."""
        is_reference = self.algorithm.needs_reference and "reference" not in self.meshes
        return "actor" in roles and (is_reference or self.algorithm.old_logprobs == "recompute")


def moment_bytes(recipe: Recipe, role: str) -> int:
    """Bytes of both moments of one parameter."""
    optimizer = recipe.critic.optimizer if role == "critic" else recipe.optimizer
    return 2 * DTYPE_BYTES[optimizer.state_dtype]


def layer_activations(shape: ModelShape, weight_bytes: int, fused: bool = False) -> int:
    """Bytes that one layer keeps of one token for its backward pass: norms and residuals (6 x hidden), queries, keys
    and values before and after rotation, attention's output, and four of the feed-forward's width; of each expert that
    the token passes through, its copy of the input and its result. Within a quarter of what transformers keeps for
    Llama, Qwen3 and Mixtral. `fused`: what Corral's fused layers keep on a GPU, which is 4 x hidden, queries, keys and
    values once, and three of the feed-forward's width."""
    output = shape.output_size
    if fused:
        attention = shape.attention_size + output * (2 if shape.qk_norm else 1)  # queries before their norm
        values = 4 * shape.hidden_size + attention + 3 * shape.active_intermediate_size
    else:
        of_experts = 2 * shape.experts_per_token * shape.hidden_size
        attention = 2 * shape.attention_size + output
        values = 6 * shape.hidden_size + attention + of_experts + 4 * shape.active_intermediate_size
    return values * weight_bytes


def key_gradients(shape: ModelShape, weight_bytes: int) -> int:
    """Bytes of the gradients of one gathered token's keys and values in one layer. FlashAttention has them for each
    query head first, and adds up those of a key-value head then."""
    of_heads = 2 * shape.num_heads * shape.head_dim if shape.num_heads > shape.num_kv_heads else 0
    return (of_heads + shape.kv_size) * weight_bytes


def max_prefill_keys(max_prefill_tokens: int, max_length: int, max_sequences: int) -> int:
    """Most keys that one prefill gathers from the cache, which has at least one sequence whole."""
    return max(max_length, min(KEYS_PER_TOKEN * max_prefill_tokens, max_sequences * max_length))


def prefill_bytes(shape: ModelShape, weight_bytes: int, fused: bool, num_tokens: int, num_keys: int) -> int:
    """Bytes of one layer's inside, and of the keys and values that are gathered for it."""
    return num_tokens * layer_activations(shape, weight_bytes, fused) + num_keys * shape.kv_size * weight_bytes


def sampling_bytes(shape: ModelShape, weight_bytes: int, num_rows: int, truncates: bool) -> int:
    """Bytes of logits on a GPU. To leave some out, they are divided by the temperature and masked, both in float32, and
    a few rows at a time sorted, with the numbers that come of it."""
    per_row = weight_bytes + (2 * FLOAT32 if truncates else 0)
    sorted_rows = min(num_rows, SORTED_ROWS) if truncates else 0
    return (num_rows * per_row + sorted_rows * 10 * FLOAT32) * shape.vocab_size


def product_activations(shape: ModelShape, weight_bytes: int) -> int:
    """Bytes of the results of one layer's matrix products and attention, of one token. Each expert that it passes
    through has a result of its own."""
    attention = shape.attention_size + shape.output_size
    outputs = 1 + max(1, shape.experts_per_token) + (shape.shared_expert_size > 0)  # of attention, then of experts
    return (attention + outputs * shape.hidden_size + 2 * shape.active_intermediate_size) * weight_bytes


def max_micro_batch(recipe: Recipe) -> int:
    """Most tokens that are computed together: a trajectory or pair that is longer than a micro-batch is one."""
    return max(min_micro_batch(recipe), recipe.batch.max_tokens_per_micro_batch)


def min_micro_batch(recipe: Recipe) -> int:
    """Tokens of the longest trajectory, or pair of them: a micro-batch has at least one whole."""
    return recipe.max_trained_tokens * (2 if recipe.trains_on_pairs else 1)


def num_kept_layers(shape: ModelShape, mesh: MeshShape) -> int:
    """Layers whose activations a device has at the same time, counted once for each micro-batch."""
    return max(len(own) * (mesh.pipeline - stage) for stage, own in enumerate(stage_layers(shape, mesh.pipeline)))


def offloaded_inputs(recipe: Recipe, shape: ModelShape, mesh: MeshShape, weight_bytes: int) -> int:
    """Bytes of layers' inputs that one device has in its host's memory (`train.offload: [activations]`)."""
    tokens = max_micro_batch(recipe) / mesh.context
    return int(tokens * shape.hidden_size * weight_bytes * num_kept_layers(shape, mesh))


def stage_layers(shape: ModelShape, num_stages: int) -> list[range]:
    """The layers of each stage of a pipeline, about as the trainer deals them: as if all were of one size."""
    embedding = shape.vocab_size * shape.hidden_size
    return deal_layers([layer_size(shape)] * shape.num_layers, embedding, embedding, num_stages)


def layer_size(shape: ModelShape) -> int:
    """Parameters of a layer, in the mean."""
    return (shape.num_parameters - shape.vision_parameters - shape.embedding_parameters) // shape.num_layers


def largest_stage(shape: ModelShape, num_stages: int) -> Fraction:
    """Part of the parameters that the largest stage of a pipeline has. Both ends have a tied embedding."""
    if num_stages == 1:
        return Fraction(1)
    embedding, layer = shape.vocab_size * shape.hidden_size, layer_size(shape)
    sizes = [
        len(own) * layer + embedding * (stage in (0, num_stages - 1))
        for stage, own in enumerate(stage_layers(shape, num_stages))
    ]
    return Fraction(max(sizes), shape.num_parameters)


def num_trained_parameters(recipe: Recipe, shape: ModelShape) -> int:
    lora = recipe.model.lora
    if lora is None:
        return shape.num_parameters
    return shape.num_adapter_parameters(lora.rank, None if lora.targets == "all-linear" else lora.targets)


def quantization_saves(recipe: Recipe, shape: ModelShape, weight_bytes: int) -> int:
    """Bytes by which `model.quantization` makes the weights smaller: to half a byte and a float32 for 64 numbers, or to
    a byte and a float32 for a row, less one matrix that is put together to compute with."""
    if recipe.model.quantization is None or shape.num_experts:
        return 0
    per_number = 0.5 + FLOAT32 / 64 if recipe.model.quantization.bits == 4 else 1.0 + FLOAT32 / shape.hidden_size
    largest = shape.hidden_size * max(shape.intermediate_size, shape.output_size)
    return int(shape.num_quantizable_parameters * (weight_bytes - per_number)) - largest * weight_bytes


def memory_table(group: DeviceMemory) -> list[str]:
    rows = [(item.name, item.bytes_by_phase) for item in group.items] + [("total", group.totals)]
    width = max(len(name) for name, _ in rows)
    header = f"{'':<{width}}" + "".join(f"{phase:>11}" for phase in group.phases)
    return [header] + [
        f"{name:<{width}}"
        + "".join(f"{human_bytes(sizes[phase]) if sizes.get(phase) else '-':>11}" for phase in group.phases)
        for name, sizes in rows
    ]


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
