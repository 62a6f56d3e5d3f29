"""The roles that hold a model to compute log-probs or values with, or to train: actor, reference, critic. And how the
controller gives them batches, and their weights to the rollout workers.

Each worker of such a role is given its shard of the batch, cut by `MeshShape.num_data`; workers that hold parts of one
model (tensor, context, pipeline parallel) are given the same shard. All workers of a role are called for the same thing
at the same time, because their models compute together; a worker without a shard takes part with nothing.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from corral.data.batch import Batch, FloatArray, Pack, Trajectory
from corral.host_memory import available_memory
from corral.kernels.host_to_device import on_device
from corral.model.lora import bit_sums
from corral.model.model_loading import load_model, load_to_shard
from corral.recipe.errors import RunError
from corral.recipe.mesh import MeshShape, mesh_shape
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import Recipe
from corral.runtime.group import Group, WorkerLost, gather_calls
from corral.runtime.rollout_worker import RolloutScheduler, RolloutWorker
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
    with_entropies: bool = False
    """Whether the entropy at each token is returned: for the files of trajectories, since it is computed anyway."""


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
    entropies: FloatArray | None = None
    """Entropy at each token of the worker's shard, 0 where nothing was generated; only where it was asked for."""
    unread_entropies: list[tuple[Pack, Tensor]] = field(default_factory=list)

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
        entropies, self.unread_entropies = self.unread_entropies, []
        for pack, entropy in entropies:
            if self.entropies is None:
                self.entropies = np.zeros(len(pack.batch.tokens), np.float32)
            self.entropies[pack.flat] = entropy.float().cpu().numpy()
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
    if update.with_entropies:
        stats.unread_entropies.append((pack, entropy.detach()))
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
    deferred: DeferredWrites

    def __init__(self, role: str, context: WorkerContext, recipe: Recipe, path: str | None) -> None:
        """`path`: another model than the recipe's."""
        self.recipe, self.context = recipe, context
        self.algorithm = resolve_algorithm(recipe)
        shape = mesh_shape(recipe.train.parallel, context.size, role)
        self.mesh = ProcessMesh.build(shape, context.device, context.timeout_s)
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
        return stats.read()

    @abstractmethod
    def loss_function(self, pack: Pack, terms: UpdateTerms, stats: LossStats) -> Callable[..., Tensor]:
        """Makes the pack's contribution to the loss, as a function of what the model computes."""

    def step(self, scale: float) -> UpdateResult:
        """Makes one optimizer step with the gradients times `scale`."""
        return self.trainer.step(scale)

    def save(self, folder: Path, writers: Sequence[int]) -> None:
        """Copies what this worker writes of a checkpoint to host memory, for `finish_save`. What does not fit into half
        of the memory that is left, in equal parts for the workers of a node, is written at once."""
        self.deferred = DeferredWrites(available_memory() // 2 // self.recipe.cluster.devices_per_node)
        self.trainer.save(folder, writers, self.deferred)

    async def finish_save(self) -> None:
        """Writes what `save` copied, while the worker computes other things."""
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

    @property
    def num_updates(self) -> int:
        recipe = self.recipe
        assert recipe.schedule.steps is not None, "the controller has worked it out"
        return recipe.schedule.steps * recipe.batch.updates_per_step * recipe.batch.ppo_epochs


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
            total_updates=self.num_updates,
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

    def zero_grad(self) -> None:
        self.trainer.zero_grad()

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
            self.num_updates,
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


@dataclass(frozen=True)
class TrainerGroup(Generic[ModelWorkerT]):
    """The workers of actor, reference or critic."""

    group: Group[ModelWorkerT]
    mesh: MeshShape

    async def compute_column(
        self,
        method: Callable[[ModelWorkerT, Sequence[Batch | None]], list[FloatArray]],
        batch: Batch,
        updates: Sequence[Sequence[int]],
    ) -> FloatArray:
        """Returns one number for each token of the batch, computed in the very shards that will be trained on."""
        splits = [batch.split(self.mesh.num_data, rows) for rows in updates]
        shards = [[shard_of(batch, split[data]) for split in splits] for data in range(self.mesh.num_data)]
        answers = await self.group.each(method, [(shards[self.mesh.data_rank(r)],) for r in range(self.group.size)])
        column = np.zeros(len(batch.tokens), np.float32)
        for data, answer in enumerate(self.one_per_shard(answers)):
            for split, numbers in zip(splits, answer, strict=True):
                if split[data]:
                    column[batch.positions_of(split[data])] = numbers
        return column

    async def accumulate(self, batch: Batch, rows: Sequence[int], terms: UpdateTerms) -> LossStats:
        """Adds the gradient of these trajectories."""
        split = batch.split(self.mesh.num_data, rows)
        shards = [shard_of(batch, own) for own in split]
        arguments = [(shards[self.mesh.data_rank(rank)], terms) for rank in range(self.group.size)]
        total = LossStats()
        answers = await self.group.each(ModelWorker.accumulate, arguments)
        for own, stats in zip(split, self.one_per_shard(answers), strict=True):
            total.merge(stats)
            if stats.entropies is not None:
                batch.set_entropies(own, stats.entropies)
        return total

    async def step(self, scale: float = 1.0) -> UpdateResult:
        """Makes one optimizer step with the gradients times `scale`."""
        return (await self.group.all(ModelWorker.step, scale))[0]

    def one_per_shard(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Returns one answer for each shard: workers that hold parts of one layer give the same, and of a pipeline the
        last stage knows."""
        return answers[-self.mesh.stage_size :: self.mesh.context * self.mesh.tensor]


def shard_of(batch: Batch, rows: Sequence[int]) -> Batch | None:
    return batch.take(rows) if rows else None


# --- the last stage of a step: the engines get the new weights, and a probe shows that they have them
#
# In one process with whole tensors nothing travels: the engine decodes with the trainer's own. Otherwise weights go
# through a channel (`runtime/transfer_channels.py`), in buckets, and every engine computes the log-probs of one prompt
# afterwards, which must be the trainer's. A tensor that did not arrive, arrived twice or in the wrong place, or belongs
# to another version, shows there, whichever it is: all of them take part in every log-prob.


PROBE_TOKENS = 64
"""Tokens of the probe: one forward pass of next to no time."""

PROBE_BOUNDS = {torch.float32: 2e-4, torch.bfloat16: 1.0, torch.float16: 0.1}
"""Largest deviation of a log-prob, by the model's data type: three to five times what mere rounding does. Where engine
and trainer use the same kernels the deviation is 0. With others (the same 64 tokens of SmolLM2-135M computed one by one
instead of all at once) it was 4e-5, 0.3 and 0.02: a log-prob is a difference of logits of up to 40, which bfloat16
rounds to multiples of 0.25. One of the model's 272 tensors missing made it 1.4 and more. Weights that are one update
old show in float32 (7e-4 for a learning rate of 1e-6), and not in the others with any bound that rounding keeps."""


class WeightPublisher:
    """Sends the actor's weights to all rollout workers that are there.

    `scheduler`: knows which rollout workers there are, and whom to tell when one is lost. `kind`: shared, collective,
    object or ipc. `in_process`: whether engines are in the process of their rollout worker. `has_adapters`: whether
    only adapters are trained, and sent to such engines. `prompt`: some tokens to probe with. Whoever calls it holds the
    lock of the trainers. `senders`: ranks of the trainers that send, each a part, where the channel has several: one of
    each node, so that every node's link is used.
    """

    def __init__(
        self,
        actor: TrainerGroup[ActorWorker],
        scheduler: RolloutScheduler,
        kind: str,
        dtype: str,
        prompt: Sequence[int],
        version: int = 0,
        *,
        in_process: bool = True,
        has_adapters: bool = False,
        returns_weights: bool = False,
        senders: Sequence[int] = (0,),
    ) -> None:
        self.in_process, self.has_adapters, self.returns_weights = in_process, has_adapters, returns_weights
        self.senders = list(senders) if kind == "collective" else [0]
        self.actor, self.scheduler, self.rollout, self.kind = actor, scheduler, scheduler.group, kind
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.probe = probe_batch(prompt if len(prompt) > 1 else [*prompt, *prompt])
        self.version = version
        """Version of the trainers' weights."""
        self.channel_ranks: list[int] | None = None
        """Ranks of the rollout workers that have joined the channel; None: there is no channel that works."""

    async def publish(self, version: int) -> dict[str, float]:
        """Consumes the trainers' weights; afterwards all engines sample with them. Waits for both sides. What is being
        generated goes on with the new weights, after a pause that is a metric."""
        self.version = version
        return await self._publish()

    async def release(self) -> None:
        """Gives the memory of the engines' copies of the weights to the trainers beside them, where that is agreed on,
        until the next `publish`. All prompts are rolled out."""
        if self.returns_weights:
            await self.rollout.all(RolloutWorker.release_weights)

    async def add_receiver(self, rank: int, device: int) -> None:
        """Sends the current weights to a rollout worker that is new, and to all others again: a channel has a fixed set
        of ends, so there is a new one anyway. The loss of the new one is raised."""
        self.channel_ranks = None
        await self._publish((rank, device))

    async def _publish(self, joining: tuple[int, int] | None = None) -> dict[str, float]:
        """Publishes, and again without those that are lost meanwhile. `joining`: rank and device of a new one."""
        while ranks := sorted({*self.scheduler.queues, *(() if joining is None else joining[:1])}):
            try:
                return await self._publish_to(ranks)
            except WorkerLost as lost:
                if joining is not None and lost.device == joining[1]:
                    raise
                if not self.scheduler.on_lost(lost):
                    raise
        return {}

    async def _publish_to(self, ranks: Sequence[int]) -> dict[str, float]:
        started = time.perf_counter()
        # One that died while it was idle is noticed here, before others wait for it in a collective.
        await self.rollout.all(RolloutWorker.ping, ranks=ranks)
        if self.kind == "shared":
            if not any(await self.rollout.all(RolloutWorker.load_local_weights, self.version)):
                return {}  # the engines' tensors are the trainers'
            pauses = [0.0]
        else:
            try:
                pauses = await self._send(list(ranks))
            except BaseException:
                self.channel_ranks = None  # it failed, or one of its ends is gone: of no use any more
                raise
        return {
            "time/transfer_s": time.perf_counter() - started,
            "time/pause_s": max(pauses),
            "transfer/probe_deviation": await self._check(ranks),
        }

    async def _send(self, ranks: list[int]) -> list[float]:
        actor, rollout = self.actor.group, self.rollout
        if ranks != self.channel_ranks:
            num_senders, size = len(self.senders), len(ranks) + len(self.senders)
            rendezvous = await actor.one(self.senders[0], ActorWorker.open_channel, self.kind)
            ends = [(self.kind, rendezvous, end, size, num_senders) for end in range(size)]
            await gather_calls(
                actor.each(ActorWorker.join_channel, ends[:num_senders], ranks=self.senders),
                rollout.each(RolloutWorker.join_channel, ends[num_senders:], ranks=ranks),
            )
            self.channel_ranks = ranks
        pauses: list[float]
        if self.kind == "collective":  # both sides at the same time
            _, pauses = await gather_calls(
                actor.all(ActorWorker.send_weights),
                rollout.all(RolloutWorker.receive_weights, None, self.version, ranks=ranks),
            )
        else:
            handle = (await actor.all(ActorWorker.send_weights))[0]
            pauses = await rollout.all(RolloutWorker.receive_weights, handle, self.version, ranks=ranks)
        await actor.all(ActorWorker.release_weights, ranks=self.senders)
        return pauses

    async def _check(self, ranks: Sequence[int]) -> float:
        if self.has_adapters and self.in_process:
            await self._check_adapters(ranks)
        trainer = await self.actor.compute_column(ActorWorker.compute_logprobs, self.probe, [[0]])
        engines = await self.rollout.all(RolloutWorker.compute_logprobs, self.probe.tokens.tolist(), ranks=ranks)
        return max(
            compare_logprobs(trainer[1:], engine, self.dtype, version=self.version, name=self.rollout.names[rank])
            for rank, engine in zip(ranks, engines, strict=True)
        )

    async def _check_adapters(self, ranks: Sequence[int]) -> None:
        """Raises where an engine does not have the trainers' adapters, bit for bit. The probe alone would not see it:
        an update moves adapters by less than what bfloat16 rounds, so an engine could sample with the bare model for
        long."""
        sent = (await self.actor.group.all(ActorWorker.adapter_sums))[0]
        for rank, arrived in zip(ranks, await self.rollout.all(RolloutWorker.adapter_sums, ranks=ranks), strict=True):
            if wrong := [name for name in sent if arrived.get(name) != sent[name]]:
                raise RunError(
                    f"after the transfer of version {self.version} the engine on {self.rollout.names[rank]} has other "
                    f"adapters than the trainer: {len(wrong)} of {len(sent)} differ, the first is {wrong[0]}"
                )


def probe_batch(prompt: Sequence[int]) -> Batch:
    """Makes a batch of the beginning of a prompt, every token behind the first marked as generated."""
    return Batch.of([Trajectory.from_tokens(prompt[:PROBE_TOKENS])])


def compare_logprobs(
    trainer: Sequence[float] | FloatArray,
    engine: Sequence[float] | FloatArray,
    dtype: torch.dtype,
    *,
    version: int,
    name: str,
) -> float:
    """Returns the largest difference of two log-probs of the same token. `name`: of the engine, for the error if it is
    too large."""
    difference = np.abs(np.asarray(trainer, np.float64) - np.asarray(engine, np.float64))
    deviation, bound = float(difference.max()), PROBE_BOUNDS[dtype]
    if not deviation <= bound:  # nor when it is not a number
        raise RunError(
            f"after the transfer of version {version} the engine on {name} disagrees with the trainer by "
            f"{deviation:.2g} on the probe prompt (bound {bound:g}): its weights are not those that were sent, or the "
            "two do not compute the same model"
        )
    return deviation
