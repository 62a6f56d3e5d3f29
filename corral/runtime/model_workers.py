"""The roles that hold a model to compute log-probs or values with, or to train: actor, reference, critic.

Each worker of such a role is given its shard of the batch, cut by `MeshShape.num_data`; workers that hold parts of one
model (tensor, context parallel) are given the same shard. All workers of a role are called for the same thing at the
same time, because their models compute together; a worker without a shard takes part with nothing.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.data.batch import Batch, FloatArray, Pack
from corral.model.model_loading import load_model
from corral.recipe.mesh import mesh_shape
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import Recipe
from corral.runtime.loss_functions import LossStats, PolicyLossFunction, UpdateTerms, ValueLossFunction
from corral.runtime.transfer_buckets import TransferHandle
from corral.runtime.transfer_channels import Channel, make_channel
from corral.runtime.worker import Role, WorkerContext
from corral.training.native_trainer import NativePolicyTrainer, NativeValueTrainer, ValueModel
from corral.training.optimizer import UpdateResult
from corral.training.process_mesh import ProcessMesh
from corral.training.trainer import PolicyTrainer, ValueTrainer


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
