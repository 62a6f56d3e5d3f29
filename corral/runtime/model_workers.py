"""The roles that hold a model to compute log-probs or values with, or to train: actor, reference, critic.

Each worker of such a role is given its shard of the batch, cut by `MeshShape.num_data`; workers that hold parts of one
model (tensor, context parallel) are given the same shard. All workers of a role are called for the same thing at the
same time, because their models compute together; a worker without a shard takes part with nothing.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
from corral.data.batch import Batch, Pack
from corral.data.trajectory import FloatArray
from corral.kernels.host_to_device import on_device
from corral.model.model_loading import load_model
from corral.recipe.mesh import MeshShape, mesh_shape
from corral.recipe.presets import ResolvedAlgorithm, resolve_algorithm
from corral.recipe.schema import Recipe
from corral.runtime.group import Group
from corral.runtime.transfer_channels import Channel, TransferHandle, make_channel
from corral.runtime.worker import Role, WorkerContext
from corral.training.native_trainer import NativePolicyTrainer, NativeValueTrainer, ValueModel
from corral.training.optimizer import UpdateResult
from corral.training.process_mesh import ProcessMesh
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


@dataclass
class LossStats:
    """Sums over the tokens that one worker computed of an update; they add up over workers."""

    loss: float = 0.0
    num_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    unread: list[tuple[str, TokenLoss]] = field(default_factory=list)
    """Losses whose numbers are still on the device: reading them would wait for it."""

    @property
    def mean_ratio(self) -> float:
        """Mean ratio of new to old probability, as the policy loss has it."""
        return self.sums.get("policy/ratio", 0.0) / max(self.num_tokens, 1)

    def add(self, name: str, token_loss: TokenLoss) -> None:
        self.unread.append((name, TokenLoss(token_loss.loss.detach(), token_loss.sums, token_loss.maxima)))

    def read(self) -> "LossStats":
        """These statistics, with everything that was added read from the device."""
        for name, token_loss in self.unread:
            for key, value in token_loss.sums.items():
                self.sums[f"{name}/{key}"] = self.sums.get(f"{name}/{key}", 0.0) + float(value)
            for key, value in token_loss.maxima.items():
                self.maxima[f"{name}/{key}"] = max(self.maxima.get(f"{name}/{key}", 0.0), float(value))
        self.unread.clear()
        return self

    def merge(self, other: "LossStats") -> None:
        self.loss += other.loss
        self.num_tokens += other.num_tokens
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        for key, value in other.maxima.items():
            self.maxima[key] = max(self.maxima.get(key, 0.0), value)


@dataclass
class PolicyLossFunction:
    """A pack's contribution to the policy loss, as a function of its log-probs and entropy."""

    algorithm: ResolvedAlgorithm
    pack: Pack
    terms: UpdateTerms
    sums: LossStats

    def __call__(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        algorithm, device = self.algorithm, logprobs.device
        mask, offsets = (on_device(array, device) for array in (self.pack.generated, self.pack.offsets))
        column = {name: on_device(self.pack.column(name), device) for name in self.pack.batch.columns}
        terms = PolicyTerms(logprobs, column["old_logprobs"], column["advantages"], mask, offsets)
        token_loss = policy_token_loss(algorithm.loss, terms)
        entropy_sum = (entropy.detach() * mask).sum()
        self.sums.add(
            "policy", TokenLoss(token_loss.loss, {**token_loss.sums, "entropy": entropy_sum}, token_loss.maxima)
        )
        self.sums.num_tokens += int(self.pack.generated.sum())
        loss = token_loss.loss
        if "correction" in column:
            loss = loss * column["correction"]
        if algorithm.kl is not None and algorithm.kl.where == "loss":
            penalty = kl_penalty(algorithm.kl.estimator, logprobs, column["reference_logprobs"])
            loss = loss + self.terms.kl_coefficient * penalty
        if algorithm.entropy_coefficient:
            loss = loss - algorithm.entropy_coefficient * entropy
        total = aggregate(loss, mask, offsets, algorithm.aggregation, self.terms.counts)
        if algorithm.llds_coefficient:
            fallen = llds(logprobs, terms.old_logprobs, terms.advantages, mask, offsets)
            counts = GlobalCounts(self.terms.counts.num_tokens, self.terms.preserved)
            total = total + algorithm.llds_coefficient * aggregate(fallen, mask, offsets, SEQ_MEAN_TOKEN_MEAN, counts)
        return total


@dataclass
class ValueLossFunction:
    """A pack's contribution to the value loss, as a function of its values."""

    clip: float | None
    pack: Pack
    terms: UpdateTerms

    def __call__(self, values: Tensor) -> Tensor:
        device = values.device
        mask, offsets = (on_device(array, device) for array in (self.pack.generated, self.pack.offsets))
        old, returns = (on_device(self.pack.column(name), device) for name in ("values", "returns"))
        token_loss = value_loss(values, old, returns, mask, self.clip)
        return aggregate(token_loss.loss, mask, offsets, TOKEN_MEAN, self.terms.counts)


# --- on the workers


class ModelWorker(Role, ABC):
    """What actor, reference and critic have in common. The reference is never asked to train."""

    trainer: PolicyTrainer | ValueTrainer

    def __init__(self, role: str, context: WorkerContext, recipe: Recipe, path: str | None) -> None:
        """`path`: another model than the recipe's."""
        self.recipe, self.context = recipe, context
        self.algorithm = resolve_algorithm(recipe)
        shape = mesh_shape(recipe.train.parallel, context.size, role)
        self.mesh = ProcessMesh.build(shape, context.device, context.timeout_s)
        settings = recipe.model.model_copy(update={"path": path or recipe.model.path})
        # A model that is going to be sharded may not fit the device: it is loaded on the host.
        model = load_model(settings, torch.device("cpu") if self.mesh.is_sharded else context.device)
        self.trainer = self.make_trainer(model)

    @abstractmethod
    def make_trainer(self, model: Any) -> PolicyTrainer | ValueTrainer: ...

    def accumulate(self, shard: Batch | None, terms: UpdateTerms) -> LossStats:
        """Adds the gradient of a shard of the update."""
        stats = LossStats()
        for pack in self.packs(shard):
            loss = None if pack is None else self.loss_function(pack, terms, stats)
            stats.loss += self.trainer.forward_backward(pack, loss)
        return stats.read()

    @abstractmethod
    def loss_function(self, pack: Pack, terms: UpdateTerms, stats: LossStats) -> Any:
        """Makes the pack's contribution to the loss, as a function of what the model computes."""

    def step(self, scale: float) -> UpdateResult:
        """Makes one optimizer step with the gradients times `scale`."""
        return self.trainer.step(scale)

    def save(self, folder: Path, writers: Sequence[int]) -> None:
        self.trainer.save(folder, writers)

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
            if pack is not None:
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
        )

    def loss_function(self, pack: Pack, terms: UpdateTerms, stats: LossStats) -> PolicyLossFunction:
        return PolicyLossFunction(self.algorithm, pack, terms, stats)

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
        )

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.trainer.dtype).removeprefix("torch.")}

    def zero_grad(self) -> None:
        self.trainer.zero_grad()

    # --- sending weights to engines in other processes

    async def open_channel(self, kind: str) -> str:
        """Opens the sending end, on the first worker. Returns where the receivers join."""
        if self.channel is not None:
            await asyncio.to_thread(self.channel.close)  # also ends what may still wait in it
        self.channel = make_channel(kind, self.context.address, self.context.device)
        return self.channel.open()

    async def join_channel(self, rendezvous: str, size: int) -> None:
        assert self.channel is not None
        await asyncio.to_thread(self.channel.join, rendezvous, 0, size)

    def send_weights(self) -> TransferHandle:
        """Sends the weights from the first worker; the others help to put sharded tensors together."""
        weights = self.trainer.weights()
        try:
            return None if self.channel is None else self.channel.send(weights)
        finally:
            for _ in weights:  # the other workers wait for this one in collectives, also when sending has failed
                pass

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
        )

    def loss_function(self, pack: Pack, terms: UpdateTerms, stats: LossStats) -> ValueLossFunction:
        return ValueLossFunction(self.recipe.critic.value_clip, pack, terms)

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
        shards = [shard_of(batch, own) for own in batch.split(self.mesh.num_data, rows)]
        arguments = [(shards[self.mesh.data_rank(rank)], terms) for rank in range(self.group.size)]
        total = LossStats()
        for stats in self.one_per_shard(await self.group.each(ModelWorker.accumulate, arguments)):
            total.merge(stats)
        return total

    async def step(self, scale: float = 1.0) -> UpdateResult:
        """Makes one optimizer step with the gradients times `scale`."""
        return (await self.group.all(ModelWorker.step, scale))[0]

    def one_per_shard(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Returns one answer for each shard: workers that hold parts of one model give the same."""
        return answers[:: self.mesh.context * self.mesh.tensor]


def shard_of(batch: Batch, rows: Sequence[int]) -> Batch | None:
    return batch.take(rows) if rows else None
