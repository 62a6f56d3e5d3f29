"""What a recipe will do, worked out before any device is touched: batch arithmetic, algorithm, placement, memory."""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from corral.recipe.default_mesh import with_default_mesh
from corral.recipe.errors import RecipeError
from corral.recipe.link_traffic import describe_links, link_traffic, micro_batches_per_update
from corral.recipe.memory import (
    DTYPE_BYTES,
    FLOAT32,
    REWARD_MODEL_WEIGHTS,
    DeviceMemory,
    check_memory,
    estimate_memory,
    human_bytes,
    human_count,
    max_micro_batch,
    memory_table,
    moment_bytes,
    num_trained_parameters,
    offloaded_inputs,
)
from corral.recipe.mesh import MeshShape, moves_by_all_to_all, other_ranks_of_token
from corral.recipe.placement import (
    Placement,
    TransferKind,
    check_ipc_of_gpus,
    engine_returns_weights,
    format_devices,
    resolve_meshes,
    resolve_placement,
    runs_on_ray,
    transfer_kind,
)
from corral.recipe.presets import ResolvedAlgorithm, ResolvedKL, resolve_algorithm
from corral.recipe.recipe_warnings import why_training_waits
from corral.recipe.rules import check
from corral.recipe.schema import Recipe, Source
from corral.recipe.shape import ModelShape, UnknownShape

TRANSFERS: dict[TransferKind, str] = {
    "shared": "shared: gathered from the shards within each process",
    "collective": "collective: broadcast to the engines",
    "object": "object: through Ray's object store",
    "ipc": "ipc: through memory of the node that trainers and engines map",
}
MESH_NOUNS = {
    "pipeline": "stages",
    "replicate": "replicas",
    "shard": "shards",
    "expert": "expert",
    "context": "context",
    "tensor": "tensor",
}
READ_RATE = 1e9
"""Bytes per second at which a node is taken to read weights."""


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    algorithm: ResolvedAlgorithm
    placement: Placement
    meshes: dict[str, MeshShape]
    """How the models of actor, reference and critic are spread, those that there are."""
    num_rows: int | None
    """Of the training data, where known."""
    num_steps: int | None
    shape: ModelShape | None
    weight_bytes: int
    memory: tuple[DeviceMemory, ...]
    """Empty where the model's shape is unknown."""
    warnings: tuple[str, ...]
    model_path: str | None = None
    """How the model is computed, and why; None where it is not known before it is loaded."""
    mesh_reason: str | None = None
    """Why the mesh is as it is, where the recipe does not write it."""

    def text(self) -> str:
        cluster = self.recipe.cluster
        algorithm = describe_algorithm(self.algorithm)
        widest = max(map(len, algorithm))
        sections = {
            f"{self.recipe.name}: {self.recipe.algorithm.name} on {self.recipe.model.path}": (
                [] if self.model_path is None else [f"computed on the {self.model_path}"]
            ),
            **({"data": data} if (data := describe_data(self.recipe)) else {}),
            **({"reward": rewards} if (rewards := describe_rewards(self.recipe)) else {}),
            "batch": describe_batch(self),
            "schedule": describe_schedule(self),
            "algorithm": [f"{name:<{widest}}  {line}" for name, line in algorithm.items()],
            "placement": [
                *self.placement.picture(cluster.nodes, cluster.devices_per_node).splitlines(),
                *describe_cluster(self),
            ],
            memory_title(self): describe_memory(self),
            **describe_links(self),
            "warnings": [f"- {warning}" for warning in self.warnings] or ["none"],
        }
        return "\n".join(
            line for title, lines in sections.items() for line in [title, *(f"  {line}".rstrip() for line in lines)]
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan for programs: numbers and names."""
        batch = self.recipe.batch
        return {
            "name": self.recipe.name,
            "model": {
                "path": self.recipe.model.path,
                "parameters": None if self.shape is None else self.shape.num_parameters,
                "weight_bytes": self.weight_bytes,
                "computed_on": self.model_path,
            },
            "batch": {
                "prompts": batch.prompts_per_step,
                "samples_per_prompt": self.recipe.num_trajectories // batch.prompts_per_step,
                "trajectories": self.recipe.num_trajectories,
                "ppo_epochs": batch.ppo_epochs,
                "update_sizes": update_sizes(self.recipe.num_units, batch.updates_per_step),
                "trainers": len(self.placement.roles["actor"]),
                "pipeline_bubble": pipeline_bubble(self),
                "max_tokens_per_micro_batch": batch.max_tokens_per_micro_batch,
                "max_trajectory_tokens": self.recipe.max_trained_tokens,
            },
            "schedule": {
                "steps": self.num_steps,
                "rows": self.num_rows,
                "mode": mode_of(self.recipe),
                "max_staleness": self.recipe.schedule.max_staleness,
                "pipelined": self.recipe.schedule.pipelined,
            },
            "data": describe_data(self.recipe),
            "algorithm": {"name": self.recipe.algorithm.name, **self.algorithm.as_dict()},
            "placement": {
                **{role: list(devices) for role, devices in self.placement.roles.items()},
                "idle": list(self.placement.idle),
            },
            "mesh": {role: asdict(mesh) for role, mesh in self.meshes.items()},
            "cluster": {
                "nodes": self.recipe.cluster.nodes,
                "devices_per_node": self.recipe.cluster.devices_per_node,
                "runtime": "ray" if runs_on_ray(self.recipe) else "local",
                "address": self.recipe.cluster.address if runs_on_ray(self.recipe) else None,
                "transfer": transfer_kind(self.recipe, self.placement),
                "devices_of_services": {name: list(devices) for name, devices in self.placement.services.items()},
            },
            "memory": [
                {
                    "roles": list(group.roles),
                    "devices": list(group.devices),
                    "bytes": {item.name: item.bytes_by_phase for item in group.items},
                    "total": group.totals,
                }
                for group in self.memory
            ],
            "links": {name: asdict(traffic) for name, traffic in link_traffic(self).items()},
            "warnings": list(self.warnings),
        }


def make_plan(
    recipe: Recipe,
    model_shape: ModelShape | None = None,
    *,
    num_rows: int | None = None,
    device: str | None = None,
    model_path: str | None = None,
) -> Plan:
    """Raises a RecipeError with everything that is wrong with the recipe.

    `num_rows`: of the training data, if they have been counted. What `model.dtype: auto` means depends on the device:
    float32 on a CPU and bfloat16 elsewhere. Where the device is not known, the estimate is of a CPU, and what no GPU
    holds is an error.
    """
    warnings = check(recipe)
    algorithm = resolve_algorithm(recipe)
    placement, _ = resolve_placement(recipe, algorithm)
    if device not in (None, "cpu"):
        check_ipc_of_gpus(recipe, placement)
    recipe, mesh_reason = with_default_mesh(recipe, placement, model_shape)
    rows = known_rows(recipe, num_rows)
    on_gpu = device not in (None, "cpu") or recipe.cluster.device_memory is not None
    auto_bytes = 2 if on_gpu else 4
    memory: list[DeviceMemory] = []
    if model_shape is not None:
        if recipe.model.quantization is not None and model_shape.num_experts:
            raise RecipeError(["`model.quantization`: experts of a mixture are not quantized; leave it out"])
        memory = estimate_memory(recipe, algorithm, placement, model_shape, auto_bytes, on_gpu)
        if on_gpu:
            warnings += check_memory(recipe, memory)
        elif device is None:
            of_gpu = estimate_memory(recipe, algorithm, placement, model_shape, 2, on_gpu=True)
            warnings += check_memory(recipe, of_gpu)
    return Plan(
        recipe=recipe,
        algorithm=algorithm,
        placement=placement,
        meshes=resolve_meshes(recipe, placement),
        num_rows=rows,
        num_steps=count_steps(recipe, rows),
        shape=model_shape,
        weight_bytes=DTYPE_BYTES.get(recipe.model.dtype, auto_bytes),
        memory=tuple(memory),
        warnings=tuple(warnings),
        model_path=model_path,
        mesh_reason=mesh_reason,
    )


def known_rows(recipe: Recipe, counted: int | None) -> int | None:
    """Rows of the training data: counted, or what the recipe says of them."""
    if counted is not None:
        return counted
    total = 0
    for source in recipe.data.train.named_sources.values():
        if source.size is None or source.filters:
            return None
        total += min(source.size, source.max_rows or source.size)
    return total


def count_steps(recipe: Recipe, num_rows: int | None) -> int | None:
    """None: depends on the number of rows."""
    if recipe.schedule.steps is not None:
        return recipe.schedule.steps
    if recipe.schedule.epochs is None or num_rows is None:
        return None
    # Exact, as 1.1 * 100 is a little more than 110 in floating point, and would be a step more.
    return math.ceil(Fraction(str(recipe.schedule.epochs)) * num_rows / recipe.batch.prompts_per_step)


def update_sizes(trajectories: int, updates: int) -> list[int]:
    """They differ by one at most, the larger ones first."""
    size, larger = divmod(trajectories, updates)
    return [size + 1] * larger + [size] * (updates - larger)


def pipeline_bubble(plan: Plan) -> float:
    """Part of an update's time in which a pipeline stage waits for others, with trajectories of full length."""
    mesh = plan.meshes["actor"]
    return mesh.bubble(micro_batches_per_update(plan.recipe, mesh))


def describe_batch(plan: Plan) -> list[str]:
    lines = describe_samples(plan)
    mesh = plan.meshes["actor"]
    if mesh.pipeline > 1:
        number = micro_batches_per_update(plan.recipe, mesh)
        of_update = f"{number} micro-batch{'es' * (number > 1)} of an update of full length"
        waits = f"each waits {pipeline_bubble(plan):.0%} of the time"
        lines.append(f"pipeline: {mesh.pipeline} stages; with {of_update}, {waits}")
    return lines


def describe_samples(plan: Plan) -> list[str]:
    """64 prompts x 8 samples = 512 trajectories -> 4 updates of 128 on 1 trainer, up to 16384 tokens per micro-batch"""
    recipe, batch, mesh = plan.recipe, plan.recipe.batch, describe_mesh(plan.meshes["actor"])
    updates = describe_updates(update_sizes(recipe.num_units, batch.updates_per_step))
    if batch.ppo_epochs > 1:
        updates = f"{batch.ppo_epochs} passes of {updates}"
    sampled = (
        f"{count(batch.prompts_per_step, 'prompt')} x {count(batch.samples_per_prompt, 'sample')} = "
        f"{count(recipe.num_trajectories, 'trajectory')}"
    )
    trained = (
        f"{count(batch.prompts_per_step, noun_of_row(recipe)) if recipe.trains_on_rows else sampled} -> {updates} on "
        f"{count(len(plan.placement.roles['actor']), 'trainer')}{f' ({mesh})' if mesh else ''}, "
        f"up to {batch.max_tokens_per_micro_batch} tokens per micro-batch"
        + ", longer ones in parts"
        * (max_micro_batch(recipe) > batch.max_tokens_per_micro_batch)
    )
    if recipe.trains_on_pairs:
        each = (
            f"a pair: a prompt, computed once, and two answers, each with it up to {recipe.max_trained_tokens} tokens"
        )
        return [trained, each]
    if recipe.trains_on_rows:
        return [trained, f"a row: up to {recipe.max_trained_tokens} tokens, answers included"]
    lines = [
        trained,
        f"a trajectory: up to {recipe.data.max_prompt_tokens} prompt tokens + {recipe.rollout.max_response_tokens} "
        f"response tokens = {recipe.max_trained_tokens}",
    ]
    if plan.algorithm.needs_greedy_baseline:
        lines.append(f"and {count(batch.prompts_per_step, 'greedy answer')} to compare with, not trained on")
    return lines


def noun_of_row(recipe: Recipe) -> str:
    return "pair" if recipe.trains_on_pairs else "row"


def describe_updates(sizes: list[int]) -> str:
    """`4 updates of 128`, or `3 updates of 171, 171 and 170`, or with many `12 updates: 8 of 43 and 4 of 42`"""
    text = count(len(sizes), "update")
    if sizes[0] == sizes[-1]:
        return f"{text} of {sizes[0]}"
    if len(sizes) <= 4:
        return f"{text} of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
    larger = sizes.count(sizes[0])
    return f"{text} ({larger} of {sizes[0]} and {len(sizes) - larger} of {sizes[-1]})"


def describe_schedule(plan: Plan) -> list[str]:
    recipe, batch, steps = plan.recipe, plan.recipe.batch, plan.num_steps
    if steps is None:
        epochs = f"{recipe.schedule.epochs:g} epochs of the training data"
        return [f"{epochs}; how many steps that is depends on its number of rows", describe_mode(plan)]
    prompts = steps * batch.prompts_per_step
    issued = f"{count(prompts, 'prompt')}, {count(prompts * batch.samples_per_prompt, 'trajectory')}"
    if recipe.trains_on_rows:
        most = recipe.num_trajectories * steps * recipe.max_trained_tokens
        issued = f"{count(prompts, noun_of_row(recipe))} of up to {human_count(most)} tokens"
    line = f"{count(steps, 'step')} = {issued}, {count(steps * batch.updates_per_step * batch.ppo_epochs, 'update')}"
    if plan.num_rows is not None:
        line += f"; {prompts / plan.num_rows:.3g} epochs of {count(plan.num_rows, 'row')}"
    if plan.algorithm.dynamic_sampling:
        line += " (without the prompts that dynamic sampling replaces)"
    return [line, describe_mode(plan)]


def describe_rewards(recipe: Recipe) -> list[str]:
    """One line for each environment that asks questions; others may have no use for a reward function."""
    lines = []
    for tag, environment in recipe.tagged_environments.items() if recipe.needs_engine else ():
        names = " + ".join(reward.name for reward in environment.named_rewards.values())
        is_default = not environment.rewards and "name" not in environment.reward.model_fields_set
        if environment.name == "question":
            lines.append(f"{tag}: " * bool(tag) + names + ", the default" * is_default)
    return lines


def describe_data(recipe: Recipe) -> list[str]:
    """One line for each thing that is done to the rows of the sources. Empty: they are used as they are."""
    data, curriculum = recipe.data, recipe.data.curriculum
    lines = []
    total = sum(one.weight or 0 for one in data.train.sources.values())
    for name, one in data.train.sources.items():
        drawn = "each row once an epoch" if one.weight is None else f"{one.weight / total:.3g} of the prompts"
        lines.append(f"{name}: {drawn}, from {one.path}")
    for part in ("train", "validation"):
        source: Source | None = getattr(data, part)
        for name, rows in ({} if source is None else source.named_sources).items():
            for column, (low, high) in rows.filters.items():
                bounds = f"[{'-inf' if low is None else f'{low:g}'}, {'inf' if high is None else f'{high:g}'}]"
                lines.append(f"{name or part}: only rows with `{column}` in {bounds}; the others are counted when read")
    if curriculum.order_by is not None:
        direction = "highest to the lowest" if curriculum.descending else "lowest to the highest"
        lines.append(f"each epoch goes from the {direction} `{curriculum.order_by}`")
    if curriculum.mean_reward is not None:
        low, high = curriculum.mean_reward
        lines.append(
            f"rows whose mean reward so far is outside [{low:g}, {high:g}] are drawn in {curriculum.others:g} of the "
            "epochs"
        )
    for what, times in (("solved", curriculum.skip_solved), ("failed", curriculum.skip_failed)):
        if times is not None:
            lines.append(f"rows {what} in every sample {count(times, 'time')} in a row are skipped from then on")
    return lines


def mode_of(recipe: Recipe) -> Literal["supervised", "synchronous", "pipelined", "async"]:
    if recipe.trains_on_rows:
        return "supervised"
    if recipe.schedule.max_staleness:
        return "async"
    return "pipelined" if recipe.schedule.pipelined else "synchronous"


def describe_mode(plan: Plan) -> str:
    schedule, correction = plan.recipe.schedule, plan.algorithm.correction.name
    streams = "trained on as they come in"
    if why_training_waits(plan.recipe, plan.algorithm):
        streams = "trained on when the step is complete; log-probs are computed as they come in"
    match mode_of(plan.recipe):
        case "supervised":
            generated = "the engine only validates" if plan.recipe.needs_engine else "no engine is built"
            answers = "pairs of answers" if plan.recipe.trains_on_pairs else "the answers"
            return f"supervised: trained on {answers} of the rows, nothing is rolled out; {generated}"
        case "synchronous":
            return "synchronous: rollout of a step, then training on it, then rollout of the next one"
        case "pipelined":
            return f"pipelined: finished samples are {streams}; the next step waits for the new weights"
    corrected = "without a correction" if correction == "none" else f"corrected with {correction}"
    text = f"async: rollout up to {count(schedule.max_staleness, 'version')} ahead of training, {corrected}"
    return f"{text}; finished samples are {streams}" if schedule.pipelined else text


def describe_cluster(plan: Plan) -> list[str]:
    engine, kind = plan.recipe.rollout.engine, transfer_kind(plan.recipe, plan.placement)
    weights = "they stay with the trainers: there is no engine"
    if plan.recipe.needs_engine:
        weights = describe_transfer(kind, plan.meshes["actor"], engine.in_process)
        if engine_returns_weights(plan.recipe, plan.placement):
            weights += ", for engines that have no memory while training"
    runtime, address = "this process", plan.recipe.cluster.address
    if runs_on_ray(plan.recipe):
        known = "the cluster that runs on this machine, else one that is started for the run"
        known = "all nodes on this machine" if plan.recipe.cluster.is_here else known
        runtime = f"Ray, {known if address in ('auto', 'here') else f'at {address}'}"
    lines = [f"weights  {weights}", f"runtime  {runtime}"]
    if plan.mesh_reason is not None:
        lines.append(f"mesh     {plan.mesh_reason}")
    if plan.meshes["actor"].expert > 1 and plan.shape is not None and plan.shape.num_experts:
        lines.append(f"experts  {describe_expert_exchange(plan.shape, plan.meshes['actor'].expert)}")
    if (teacher := plan.recipe.reference.endpoint) is not None:
        asked = f"{count(teacher.concurrency, 'request')} at once; it needs no device of this run"
        lines.append(f"teacher  {teacher.model} at {teacher.url}, {asked}")
    if engine.in_process or not plan.recipe.needs_engine:
        return lines
    number = len(plan.placement.roles["rollout"]) // engine.tensor_parallel
    devices = f" of {engine.tensor_parallel} devices each" if engine.tensor_parallel > 1 else ""
    return [f"engine   {engine.name}: {count(number, 'engine')}{devices}, in processes of their own", *lines]


def describe_mesh(mesh: MeshShape) -> str:
    """`2 shards x 2 tensor`; empty for one device."""
    sizes = {noun: getattr(mesh, name) for name, noun in MESH_NOUNS.items()}
    return " x ".join(f"{size} {noun}" for noun, size in sizes.items() if size > 1)


def describe_expert_exchange(shape: ModelShape, size: int) -> str:
    routing = shape.num_experts, shape.experts_per_token, size
    others = f"{other_ranks_of_token(*routing):.2g} of {count(size - 1, 'other rank')}"
    reached = f"a token has {count(shape.experts_per_token, 'expert')}, on {others} on average"
    if moves_by_all_to_all(*routing):
        return f"by all-to-all: {reached}, and goes only there"
    return f"tokens are gathered on all ranks: {reached}, so an all-to-all would move hardly less"


def describe_transfer(kind: TransferKind, actor: MeshShape, in_process: bool) -> str:
    if kind == "shared" and not in_process:
        return "shared: through memory of the node that a worker and its engine's process map"
    if kind == "shared" and actor.is_whole:
        return "shared: nothing travels, the engine decodes with the trainer's own tensors"
    return TRANSFERS[kind]


def describe_algorithm(algorithm: ResolvedAlgorithm) -> dict[str, str]:
    """A title and a text for each line. What is off and rarely used is left out."""
    advantage, clip = algorithm.advantage.describe(), algorithm.advantage_clip
    advantage += "; whitened over the batch" * algorithm.whiten
    advantage += "; each set of rewards by itself" * (algorithm.whiten_by == "rewards")
    engine, recompute = "those the engine sampled with", "recomputed by the trainer before the first update"
    recompute += "" if algorithm.engine_difference is None else f": {algorithm.engine_difference}"
    lines = {"loss": algorithm.loss.describe(), "aggregation": algorithm.aggregation.describe()}
    if not algorithm.loss.declaration.trains_on_rows:
        lines = {
            "advantage": advantage if clip is None else f"{advantage}; within [{-clip:g}, {clip:g}]",
            **lines,
            "KL": describe_kl(algorithm.kl),
            "old log-probs": engine if algorithm.old_logprobs == "engine" else recompute,
            "correction": algorithm.correction.describe(),
        }
    elif algorithm.loss.declaration.needs_reference:
        lines["reference"] = "its log-probs of each answer are computed once, and kept for later epochs"
    if (limit := algorithm.max_mean_ratio) is not None:
        lines["mean ratio"] = f"an update with a mean ratio of new to old probability above {limit:g} is not made"
    if (bound := algorithm.reward_clip) is not None:
        lines["rewards"] = f"of a trajectory, within [{-bound:g}, {bound:g}]"
    if algorithm.lone_sample == "raw":
        lines["lone samples"] = "a sample without others of its prompt has its reward for an advantage"
    if algorithm.mask_truncated:
        lines["cut off"] = "samples cut off by length are in no loss; their rewards count in their groups"
    if algorithm.mask_mean_reward is not None:
        low, high = algorithm.mask_mean_reward
        lines["too hard or easy"] = f"prompts whose mean reward is not between {low:g} and {high:g} are in no loss"
    if algorithm.entropy_coefficient:
        lines["entropy"] = f"bonus with coefficient {algorithm.entropy_coefficient:g}"
    if algorithm.llds_coefficient:
        lines["LLDS"] = f"penalty with coefficient {algorithm.llds_coefficient:g} on good samples becoming less likely"
    if algorithm.dynamic_sampling:
        rounds = f"in up to {algorithm.max_rounds} rounds"
        lines["dynamic sampling"] = f"zero-variance groups are replaced by other prompts, {rounds}"
    if algorithm.shaping.name != "none":
        lines["shaping"] = algorithm.shaping.describe()
    return lines


def describe_kl(kl: ResolvedKL | None) -> str:
    if kl is None:
        return "none, so no reference model"
    text = f"in the {kl.where}, estimator {kl.estimator.name}, coefficient {kl.coefficient:g}"
    return text if kl.controller.name == "fixed" else f"{text} to begin with; {kl.controller.describe()}"


def memory_title(plan: Plan) -> str:
    if plan.shape is None:
        return "memory"
    return (
        f"memory per device, estimated: {human_count(plan.shape.num_parameters)} parameters of "
        f"{plan.weight_bytes} bytes"
        + (
            f", and {human_count(num_trained_parameters(plan.recipe, plan.shape))} in adapters, which are trained"
            if plan.recipe.model.lora is not None
            else ""
        )
        + (f"; linear layers in {quantized.bits} bits" if (quantized := plan.recipe.model.quantization) else "")
        + (f", of {available:g} GiB" if (available := plan.recipe.cluster.device_memory) else "")
    )


def describe_memory(plan: Plan) -> list[str]:
    if plan.shape is None:
        try:
            ModelShape.read(plan.recipe.model.path)
        except UnknownShape as error:
            return [f"unknown: {error}"]
        return ["unknown"]
    lines = []
    others = {
        "critic": plan.recipe.critic.path,
        "reference": plan.recipe.reference.path,
        "reward_model": plan.recipe.reward_model.path,
    }
    unknown = [role for role, path in others.items() if path and (role == "critic" or ModelShape.find(path) is None)]
    if unknown:
        lines.append(f"({' and '.join(unknown)}: taken to be as large as the model)")
    for group in plan.memory:
        if len(plan.memory) > 1:
            lines.append(f"device {format_devices(group.devices)} ({'+'.join(group.roles)})")
        lines += memory_table(group)
    return [*lines, *describe_loading(plan)]


def describe_loading(plan: Plan) -> list[str]:
    """What it takes to load the model, per node, and what its host's memory holds after that."""
    assert plan.shape is not None
    size = plan.shape.num_parameters * plan.weight_bytes
    lines = [
        f"loading    a node reads {human_bytes(size)} of weights ({max(1, round(size / READ_RATE))} s at 1 GB/s); "
        "ranks map the files, and copy out of them what they hold"
    ]
    parts = ("parameters", "gradients", "optimizer", "activations")
    if offloaded := [part for part in parts if part in plan.recipe.train.offload]:
        lines.append(f"host       {human_bytes(host_memory(plan))} per node: {', '.join(offloaded)} (`train.offload`)")
    return lines


def host_memory(plan: Plan) -> int:
    """Bytes of the fullest node's host that are offloaded: float32 masters, moments and gradients of what its devices
    train, weights of what they only compute with, and activations."""
    assert plan.shape is not None
    offload, per_node = plan.recipe.train.offload, plan.recipe.cluster.devices_per_node
    of_nodes: dict[int, int] = {}
    num_all, num_trained = plan.shape.num_parameters, num_trained_parameters(plan.recipe, plan.shape)
    for role, mesh in plan.meshes.items():
        # Masters are a part of the optimizer only where they are not the parameters themselves, as shards are.
        states = moment_bytes(plan.recipe, role) + FLOAT32 * (mesh.is_whole and plan.weight_bytes < FLOAT32)
        trained = 0 if role == "reference" else num_trained
        sizes = {
            "parameters": trained * FLOAT32 + max(0, num_all - trained) * plan.weight_bytes,
            "gradients": trained * FLOAT32,
            "optimizer": trained * states,
        }
        own = sum(sizes.get(part, 0) for part in offload) // (mesh.size // mesh.replicate)
        if "activations" in offload and role != "reference":
            own += offloaded_inputs(plan.recipe, plan.shape, mesh, plan.weight_bytes)
        for device in plan.placement.roles[role]:
            node = device // per_node
            of_nodes[node] = of_nodes.get(node, 0) + own
    for group in plan.memory if "parameters" in offload else ():
        size = next((one.bytes_by_phase["logprobs"] for one in group.items if one.name == REWARD_MODEL_WEIGHTS), 0)
        for device in group.devices:
            of_nodes[device // per_node] = of_nodes.get(device // per_node, 0) + size
    return max(of_nodes.values(), default=0)


def count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"
