"""The roles that hold a model to compute log-probs or values with, or to train: actor, reference, critic. And how the
controller gives them batches.

Each worker of such a role is given its shard of the batch, cut by `MeshShape.num_data`; workers that hold parts of one
model (tensor, context, pipeline parallel) are given the same shard. All workers of a role are called for the same thing
at the same time, because their models compute together; a worker without a shard takes part with nothing.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from corral.algorithms.declarations import with_options
from corral.algorithms.losses import (
    AGGREGATIONS,
    GlobalCounts,
    PolicyTerms,
    TokenLoss,
    aggregate,
    kl_penalty,
    llds,
    policy_token_loss,
    value_loss,
)
from corral.algorithms.ragged import expand, only
from corral.data.batch import Batch, FloatArray, Pack
from corral.host_memory import available_memory, resident_memory
from corral.kernels.host_to_device import on_device
from corral.model.lora import bit_sums
from corral.model.model_loading import load_model, load_to_shard
from corral.recipe.mesh import MeshShape, mesh_shape
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import Recipe
from corral.runtime.group import Group, WorkerLost
from corral.runtime.transfer_channels import Channel, TransferHandle, make_channel
from corral.runtime.worker import Role, WorkerContext
from corral.training.checkpoint import size_and_hash
from corral.training.native_trainer import NativePolicyTrainer, NativeValueTrainer, ValueModel
from corral.training.optimizer import UpdateResult
from corral.training.process_mesh import ProcessMesh
from corral.training.tensor_files import DeferredWrites
from corral.training.trainer import PolicyTrainer, ValueTrainer

# --- what a trainer is given to minimize: a pack's contribution to the loss, as a function of its tokens' log-probs.
# Trainers know nothing of algorithms; here the two meet.

TOKEN_MEAN = with_options(AGGREGATIONS["token_mean"])
SEQ_MEAN_TOKEN_MEAN = with_options(AGGREGATIONS["seq_mean_token_mean"])


@dataclass(frozen=True)
class UpdateTerms:
    """Numbers of the whole update that each contribution to its loss is computed with."""

    counts: GlobalCounts
    """What losses are divided by, whatever was left out or is computed elsewhere."""
    preserved: int
    """Number of trajectories to which the LLDS regularizer applies."""
    kl_coefficient: float
    with_details: bool = False
    """Whether numbers of each token are returned: for the files of trajectories, since they are computed anyway."""


@dataclass(frozen=True)
class UpdateProgress:
    """How far a worker is with the updates of its model."""

    num_updates: int = 0
    """Optimizer steps that the worker was called for since it started, skipped ones included."""
    last: UpdateResult | None = None


@dataclass
class LossStats:
    """Sums over the tokens that one worker computed of an update; they add up over workers."""

    loss: float = 0.0
    num_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    num_pairs: int = 0
    pair_sums: dict[str, float] = field(default_factory=dict)
    """Sums over pairs, where pairs are trained on."""
    num_turns: int = 0
    """Number of micro-batches of each rank."""
    num_idle_turns: int = 0
    """Turns in which a stage of a pipeline waits for others."""
    expert_counts: list[list[int]] = field(default_factory=list)
    """Tokens of each expert of a mixture, layer by layer."""
    unread: list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=list)
    """Sums, maxima and sums over pairs that are still on the device: reading them would wait for it."""
    details: dict[str, FloatArray] = field(default_factory=dict)
    """Numbers of each token of the worker's shard, 0 where nothing was generated; only where they were asked for."""
    unread_details: list[tuple[Pack, dict[str, Tensor]]] = field(default_factory=list)

    @property
    def mean_ratio(self) -> float:
        """Mean ratio of new to old probability, as the policy loss has it."""
        return self.sums.get("policy/ratio", 0.0) / max(self.num_tokens, 1)

    def add(self, policy_loss: TokenLoss, others: dict[str, Tensor], pack: Pack) -> None:
        """`others`: sums of what is not the policy loss's own."""
        sums = {**policy_loss.sums, **others}
        self.unread.append((sums, policy_loss.maxima, policy_loss.pair_sums))
        self.num_tokens += int(pack.counted.sum())
        self.num_pairs += 0 if pack.is_chosen is None else int(pack.is_chosen.sum())

    def read(self) -> "LossStats":
        """These statistics, with everything that was added read from the device."""
        unread, self.unread = self.unread, []
        details, self.unread_details = self.unread_details, []
        for pack, columns in details:
            computed = torch.stack([column.float() for column in columns.values()]).cpu().numpy()
            for name, own in zip(columns, computed, strict=True):
                self.details.setdefault(name, np.zeros(len(pack.batch.tokens), np.float32))[pack.flat] = own
        for *numbers, pairs in unread:
            sums, maxima = ({f"policy/{key}": float(value) for key, value in own.items()} for own in numbers)
            pair_sums = {f"preference/{key}": float(value) for key, value in pairs.items()}
            self.merge(LossStats(sums=sums, maxima=maxima, pair_sums=pair_sums))
        return self

    def merge(self, other: "LossStats") -> None:
        self.loss += other.loss
        self.num_tokens += other.num_tokens
        self.num_pairs += other.num_pairs
        self.num_turns += other.num_turns
        self.num_idle_turns += other.num_idle_turns
        for own, others in ((self.sums, other.sums), (self.pair_sums, other.pair_sums)):
            for key, value in others.items():
                own[key] = own.get(key, 0.0) + value
        if other.expert_counts:
            own_counts = self.expert_counts or np.zeros_like(other.expert_counts)
            self.expert_counts = np.add(own_counts, other.expert_counts).tolist()
        for key, value in other.maxima.items():
            self.maxima[key] = max(self.maxima.get(key, 0.0), value)


def memory_in_use(device: torch.device) -> dict[str, float]:
    """GiB that this process has, and all processes of its GPU."""
    found = {"memory/process_gib": resident_memory() / 2**30}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["memory/device_gib"] = (total - free) / 2**30
    return found


def policy_loss_of(
    algorithm: ResolvedAlgorithm,
    pack: Pack,
    update: UpdateTerms,
    stats: LossStats,
    logprobs: Tensor,
    entropy: Tensor,
    router_loss: Tensor | None = None,
) -> Tensor:
    """Returns a pack's contribution to the policy loss. `router_loss`: of its tokens together, times its coefficient.
    Each token has it as a term, so that an update has the mean over its micro-batches, weighted as the aggregation
    weighs tokens."""
    device = logprobs.device
    mask, offsets = (on_device(array, device) for array in (pack.counted, pack.offsets))
    column = {name: on_device(pack.column(name), device) for name in pack.batch.columns}
    reference = column.get("reference_logprobs")
    terms = PolicyTerms(logprobs, column["old_logprobs"], column["advantages"], mask, offsets, reference)
    if pack.is_chosen is not None:
        pairs, is_chosen = on_device(pack.pairs, device), on_device(pack.is_chosen, device)
        terms = replace(terms, pairs=pairs, is_chosen=is_chosen)
    token_loss = policy_token_loss(algorithm.loss, terms)
    sums = {"entropy": (entropy.detach() * mask).sum()}
    loss = token_loss.loss
    if router_loss is not None:
        sums["router_loss"] = router_loss.detach() * mask.sum()
    stats.add(token_loss, sums, pack)
    if update.with_details:
        details = {"entropies": entropy.detach(), "trained_logprobs": only(logprobs.detach(), mask)}
        if token_loss.implicit_rewards is not None:
            details["implicit_rewards"] = expand(token_loss.implicit_rewards, offsets)
        stats.unread_details.append((pack, details))
    if "correction" in column:
        loss = loss * column["correction"]
    if router_loss is not None:
        loss = loss + router_loss
    if algorithm.kl is not None and algorithm.kl.where == "loss":
        penalty = kl_penalty(algorithm.kl.estimator, logprobs, column["reference_logprobs"])
        loss = loss + update.kl_coefficient * penalty
    if algorithm.entropy_coefficient:
        loss = loss - algorithm.entropy_coefficient * entropy
    total = aggregate(loss, mask, offsets, algorithm.aggregation, update.counts)
    if algorithm.llds_coefficient:
        fallen = llds(logprobs, terms.old_logprobs, terms.advantages, mask, offsets)
        counts = GlobalCounts(update.counts.num_tokens, update.preserved)
        total = total + algorithm.llds_coefficient * aggregate(fallen, mask, offsets, SEQ_MEAN_TOKEN_MEAN, counts)
    return total


def value_loss_of(clip: float | None, pack: Pack, update: UpdateTerms, values: Tensor) -> Tensor:
    """Returns a pack's contribution to the value loss."""
    columns = pack.counted, pack.offsets, pack.column("values"), pack.column("returns")
    mask, offsets, old, returns = (on_device(column, values.device) for column in columns)
    token_loss = value_loss(values, old, returns, mask, clip)
    return aggregate(token_loss.loss, mask, offsets, TOKEN_MEAN, update.counts)


# --- on the workers


class ModelWorker(Role, ABC):
    """What actor, reference and critic have in common. The reference is never asked to train."""

    trainer: PolicyTrainer | ValueTrainer

    def __init__(self, role: str, context: WorkerContext, recipe: Recipe, path: str | None) -> None:
        """`path`: another model than the recipe's."""
        self.recipe, self.context = recipe, context
        self.algorithm = resolve_algorithm(recipe)
        shape = mesh_shape(recipe.train.parallel, context.size, role)
        self.mesh = mesh_of_worker(context, shape)
        self.mesh.gradient_dtype = getattr(torch, recipe.train.gradient_dtype)
        self.progress = UpdateProgress()
        self.deferred = DeferredWrites(0)
        settings = recipe.model.model_copy(update={"path": path or recipe.model.path})
        if role == "reference":  # with a path of its own it is a model of its own
            settings = settings.model_copy(update={"lora": None, "quantization": None})
        load = load_to_shard if self.mesh.is_sharded else load_model
        self.trainer = self.make_trainer(load(settings, context.device))

    @abstractmethod
    def make_trainer(self, model: Any) -> PolicyTrainer | ValueTrainer: ...

    def accumulate(self, shard: Batch | None, terms: UpdateTerms) -> LossStats:
        """Adds the gradient of a shard of the update."""
        stats, packs = LossStats(), self.packs(shard)
        stats.loss = self.trainer.forward_backward(
            [(pack, None if pack is None else self.loss_function(pack, terms, stats)) for pack in packs]
        )
        stats.num_turns = len(packs)
        stats.num_idle_turns = self.mesh.shape.pipeline - 1 if packs else 0
        stats.expert_counts = self.trainer.take_expert_counts()
        stats.read()
        stats.maxima |= memory_in_use(self.context.device)
        return stats

    @abstractmethod
    def loss_function(self, pack: Pack, terms: UpdateTerms, stats: LossStats) -> Callable[..., Tensor]:
        """Makes the pack's contribution to the loss, as a function of what the model computes."""

    def step(self, scale: float) -> UpdateResult:
        """Makes one optimizer step with the gradients times `scale`."""
        result = self.trainer.step(scale)
        self.progress = UpdateProgress(self.progress.num_updates + 1, result)
        return result

    def zero_grad(self) -> None:
        self.trainer.zero_grad()

    def read_progress(self) -> "UpdateProgress":
        """Returns how far this worker is, once all that it was called for before is done."""
        return self.progress

    def copy_from(self, copy: int, progress: "UpdateProgress") -> None:
        """Takes weights and optimizer of another copy of the model, which is so far."""
        self.trainer.copy_from(copy)
        self.progress = progress

    def save(self, folder: Path, writers: Sequence[int]) -> None:
        """Begins to copy what this worker writes of a checkpoint to host memory, for `finish_save`. What does not fit
        into half of the memory that is left, in equal parts for the workers of a node, is written at once."""
        others = [role.deferred for role in self.context.roles.values() if isinstance(role, ModelWorker)]
        available = available_memory() // self.recipe.cluster.devices_per_node
        self.deferred = DeferredWrites(max(0, available - sum(other.bytes_to_copy for other in others)) // 2)
        self.trainer.save(folder, writers, self.deferred)

    async def finish_save(self) -> None:
        """Writes what `save` began to copy, while the worker computes other things."""
        await asyncio.to_thread(self.deferred.write)

    async def hash_files(self, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Returns size and hash of files of a checkpoint."""
        return await asyncio.to_thread(lambda: {name: size_and_hash(folder / name) for name in names})

    def load(self, folder: Path) -> None:
        self.trainer.load(folder)

    def can_see(self, file: Path) -> bool:
        return file.exists()

    def compute_column(
        self, shard: Batch | None, compute: Callable[[Iterable[Pack | None]], Iterator[Tensor]]
    ) -> FloatArray:
        """Returns one number for each token of the shard."""
        packs = self.packs(shard)
        results = list(compute(packs))  # all packs, before any result is read: reading waits for the device
        column = np.zeros(0 if shard is None else len(shard.tokens), np.float32)
        for pack, result in zip(packs, results, strict=True):
            if pack is not None and self.mesh.is_last_stage:
                column[pack.flat] = result.float().cpu().numpy()
        return column

    def packs(self, shard: Batch | None) -> Sequence[Pack | None]:
        """Cuts a shard into micro-batches; None pads their number to that of the worker with the most."""
        if self.context.device.type == "cuda" and "rollout" in self.context.roles:
            self.context.roles["rollout"].release_cache()
        packs: list[Pack | None] = []
        if shard is not None:
            packs += shard.pack(self.recipe.batch.max_tokens_per_micro_batch)
        return packs + [None] * (self.mesh.max(len(packs)) - len(packs))

    def updates_after(self, num_steps: int) -> int:
        """Number of updates in the run's steps after these: where the learning rate's schedule ends."""
        recipe = self.recipe
        assert recipe.schedule.steps is not None, "the controller has worked it out"
        return max(0, recipe.schedule.steps - num_steps) * recipe.batch.updates_per_step * recipe.batch.ppo_epochs


def mesh_of_worker(context: WorkerContext, shape: MeshShape) -> ProcessMesh:
    """Returns the mesh of a role that was built here before, if it has this shape: groups take memory of the device,
    and roles take turns."""
    for role in context.roles.values():
        if isinstance(role, ModelWorker) and role.mesh.shape == shape:
            return role.mesh
    return ProcessMesh.build(shape, context.device, context.timeout_s, context.replicas)


class PolicyWorker(ModelWorker):
    """The reference: a frozen policy."""

    trainer: PolicyTrainer

    def make_trainer(self, model: Any) -> PolicyTrainer:
        return self.policy(model.requires_grad_(False))

    @property
    def policy(self) -> partial[NativePolicyTrainer]:
        recipe = self.recipe
        return partial(
            NativePolicyTrainer,
            temperature=recipe.rollout.temperature,
            logits_chunk=recipe.train.logits_chunk,
            mesh=self.mesh,
            offload=recipe.train.offload,
            max_tokens=recipe.batch.max_tokens_per_micro_batch,
        )

    def loss_function(self, pack: Pack, terms: UpdateTerms, stats: LossStats) -> Callable[..., Tensor]:
        return partial(policy_loss_of, self.algorithm, pack, terms, stats)

    def compute_logprobs(self, shards: Sequence[Batch | None]) -> list[FloatArray]:
        """Returns for each shard one log-prob for each of its tokens."""
        return [self.compute_column(shard, self.trainer.compute_logprobs) for shard in shards]


class ActorWorker(PolicyWorker):
    """The policy that is trained."""

    channel: Channel | None = None

    def make_trainer(self, model: Any) -> PolicyTrainer:
        return self.policy(
            model,
            optimizer=self.recipe.optimizer,
            total_updates=self.updates_after(self.recipe.critic.warmup_steps),
            gradient_checkpointing=self.recipe.train.gradient_checkpointing,
            with_router_loss=self.recipe.train.router_aux_loss_coef > 0,
        )

    def loss_function(self, pack: Pack, terms: UpdateTerms, stats: LossStats) -> Callable[..., Tensor]:
        coefficient, loss = self.recipe.train.router_aux_loss_coef, super().loss_function(pack, terms, stats)
        if not coefficient:
            return loss
        return lambda *outputs: loss(*outputs, router_loss=coefficient * self.trainer.router_loss())

    def compute_reference_logprobs(self, shards: Sequence[Batch | None]) -> list[FloatArray]:
        """The same without the model's adapters."""
        return [self.compute_column(shard, self.trainer.compute_reference_logprobs) for shard in shards]

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.trainer.dtype).removeprefix("torch."), "address": self.context.address}

    # --- sending weights to engines in other processes

    async def open_channel(self, kind: str) -> str:
        """Makes this worker the first end, which sends. Returns where the others join it."""
        self.channel = await self._new_channel(kind)
        return self.channel.open()

    async def join_channel(self, kind: str, rendezvous: str, rank: int, size: int, num_senders: int) -> None:
        """Joins the channel as end `rank`, which sends as well."""
        if rank > 0:
            self.channel = await self._new_channel(kind)
        assert self.channel is not None
        await asyncio.to_thread(self.channel.join, rendezvous, rank, size, num_senders)

    async def _new_channel(self, kind: str) -> Channel:
        if self.channel is not None:
            await asyncio.to_thread(self.channel.close)  # also ends what may still wait in it
        return make_channel(kind, self.context.address, self.context.device)

    def send_weights(self) -> TransferHandle:
        """Sends the weights from workers that are ends of the channel; all help to put sharded tensors together."""
        weights = self.trainer.weights(merged=not self.recipe.rollout.engine.in_process)
        try:
            return None if self.channel is None else self.channel.send(weights)
        finally:
            for _ in weights:  # the other workers wait for this one in collectives, also when sending has failed
                pass

    def adapter_sums(self) -> dict[str, int]:
        """Returns the sum of the bits of each adapter."""
        return bit_sums(self.trainer.weights())

    def release_weights(self) -> None:
        assert self.channel is not None
        self.channel.release()


class CriticWorker(ModelWorker):
    """Estimates how much reward is still to come, and is trained to."""

    trainer: ValueTrainer

    def make_trainer(self, model: Any) -> ValueTrainer:
        recipe = self.recipe
        return NativeValueTrainer(
            ValueModel(model),
            recipe.critic.optimizer,
            self.updates_after(0),
            recipe.train.gradient_checkpointing,
            mesh=self.mesh,
            offload=recipe.train.offload,
            max_tokens=recipe.batch.max_tokens_per_micro_batch,
        )

    def loss_function(self, pack: Pack, terms: UpdateTerms, stats: LossStats) -> Callable[..., Tensor]:
        return partial(value_loss_of, self.recipe.critic.value_clip, pack, terms)

    def compute_values(self, shards: Sequence[Batch | None]) -> list[FloatArray]:
        """Returns for each shard one value for each of its tokens."""
        return [self.compute_column(shard, self.trainer.compute_values) for shard in shards]


# --- at the controller


Answer = TypeVar("Answer")
ModelWorkerT = TypeVar("ModelWorkerT", bound=ModelWorker)


async def is_final(lost: WorkerLost) -> bool:
    """Returns that the trainers cannot do without what was lost."""
    return False


@dataclass
class TrainerGroup(Generic[ModelWorkerT]):
    """The workers of actor, reference or critic."""

    group: Group[ModelWorkerT]
    mesh: MeshShape
    on_lost: Callable[[WorkerLost], Awaitable[bool]] = is_final
    """Called when a call has failed because a worker was lost. Returns whether all trainers are there again, with the
    states of the last update that was made; then the call is made again."""
    progress: UpdateProgress = field(default_factory=UpdateProgress)
    """How far the workers are."""
    accumulated: list[tuple[Batch, Sequence[int], UpdateTerms]] = field(default_factory=list)
    """What the gradients since the last update are of: a worker that is lost takes its part of them along."""

    async def compute_column(
        self,
        method: Callable[[ModelWorkerT, Sequence[Batch | None]], list[FloatArray]],
        batch: Batch,
        updates: Sequence[Sequence[int]],
    ) -> FloatArray:
        """Returns one number for each token of the batch, computed in the very shards that will be trained on."""
        splits = [batch.split(self.mesh.num_data, rows) for rows in updates]
        shards = [[shard_of(batch, split[data]) for split in splits] for data in range(self.mesh.num_data)]
        arguments = [(shards[self.mesh.data_rank(rank)],) for rank in range(self.group.size)]
        answers = await self.again_when_lost(lambda: self.group.each(method, arguments))
        column = np.zeros(len(batch.tokens), np.float32)
        for data, answer in enumerate(self.one_per_shard(answers)):
            for split, numbers in zip(splits, answer, strict=True):
                if split[data]:
                    column[batch.positions_of(split[data])] = numbers
        return column

    async def accumulate(self, batch: Batch, rows: Sequence[int], terms: UpdateTerms) -> LossStats:
        """Adds the gradient of these trajectories."""
        total = await self.again_when_lost(lambda: self._accumulate(batch, rows, terms))
        self.accumulated.append((batch, rows, terms))
        return total

    async def _accumulate(self, batch: Batch, rows: Sequence[int], terms: UpdateTerms) -> LossStats:
        split = batch.split(self.mesh.num_data, rows)
        shards = [shard_of(batch, own) for own in split]
        arguments = [(shards[self.mesh.data_rank(rank)], terms) for rank in range(self.group.size)]
        total = LossStats()
        answers = await self.group.each(ModelWorker.accumulate, arguments)
        for own, stats in zip(split, self.one_per_shard(answers), strict=True):
            total.merge(stats)
            batch.set_details(own, stats.details)
        return total

    async def step(self, scale: float = 1.0) -> UpdateResult:
        """Makes one optimizer step with the gradients times `scale`."""
        before = self.progress.num_updates

        async def step() -> UpdateResult:
            if self.progress.num_updates > before and self.progress.last is not None:
                return self.progress.last  # a copy of the model had made it when another one was lost
            return (await self.group.all(ModelWorker.step, scale))[0]

        result = await self.again_when_lost(step)
        self.progress = UpdateProgress(before + 1, result)
        self.accumulated.clear()
        return result

    async def zero_grad(self) -> None:
        """Drops the gradients since the last update."""
        await self.again_when_lost(lambda: self.group.all(ModelWorker.zero_grad))
        self.accumulated.clear()

    async def again_when_lost(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Returns what a call returns, which is made again when a trainer was lost meanwhile and replaced."""
        while True:
            try:
                return await call()
            except WorkerLost as lost:
                if not await self.on_lost(lost):
                    raise

    async def go_on_from(self, copy: int, progress: UpdateProgress) -> None:
        """Gives all workers the states of one copy of the model, and computes the gradients since its last update."""
        await self.group.all(ModelWorker.copy_from, copy, progress)
        if progress.num_updates > self.progress.num_updates:
            self.accumulated.clear()
        self.progress = progress
        for contribution in self.accumulated:
            await self._accumulate(*contribution)

    def one_per_shard(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Returns one answer for each shard: workers that hold parts of one layer give the same, and of a pipeline the
        last stage knows."""
        return answers[-self.mesh.stage_size :: self.mesh.context * self.mesh.tensor]


def shard_of(batch: Batch, rows: Sequence[int]) -> Batch | None:
    return batch.take(rows) if rows else None
