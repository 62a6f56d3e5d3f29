"""The roles that hold a model to score or to learn with: actor, reference, critic.

Each worker of such a role is given its share of the batch, cut by `MeshShape.num_data`; workers that hold parts of one
model (tensor, context) are given the same share. All workers of a role are asked for the same thing at the same time,
because their models compute together; a worker without a share takes part with nothing.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corral.data.batch import Batch, Pack
from corral.data.trajectory import FloatArray
from corral.model.load import load_model
from corral.recipe.mesh import mesh_shape
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import Recipe
from corral.runtime.loss_functions import LossStats, PolicyLossFunction, UpdateTerms, ValueLossFunction
from corral.runtime.transfer import Channel, CollectiveChannel, TransferHandle, make_channel
from corral.runtime.worker import WorkerContext
from corral.train.mesh import Mesh
from corral.train.native import NativeCritic, NativePolicy, ValueModel
from corral.train.optimizer import UpdateResult


class _Role:
    """What actor, reference and critic have in common."""

    def __init__(self, role: str, site: WorkerContext, recipe: Recipe) -> None:
        self.recipe, self.site = recipe, site
        self.algorithm = resolve_algorithm(recipe)
        self.mesh = Mesh.build(mesh_shape(recipe.train.parallel, site.size, role), site.device, site.timeout_s)

    def load_model(self, path: str | None) -> Any:
        """On the host where it is going to be sharded: it may not fit the device."""
        model = self.recipe.model.model_copy(update={"path": path or self.recipe.model.path})
        return load_model(model, torch.device("cpu") if self.mesh.is_sharded else self.site.device)

    def packs(self, share: Batch | None) -> Sequence[Pack | None]:
        """As many as the worker with the most has."""
        if self.site.device.type == "cuda" and "rollout" in self.site.hosted:
            self.site.hosted["rollout"].release_cache()
        packs: list[Pack | None] = []
        if share is not None:
            packs += share.pack(self.recipe.batch.max_tokens_per_micro_batch)
        return packs + [None] * (self.mesh.max(len(packs)) - len(packs))

    def sees(self, file: Path) -> bool:
        return file.exists()

    @property
    def num_updates(self) -> int:
        recipe = self.recipe
        assert recipe.schedule.steps is not None, "the controller has worked it out"
        return recipe.schedule.steps * recipe.batch.updates_per_step * recipe.batch.ppo_epochs


class Scorer(_Role):
    """The reference; and what of the actor only looks."""

    trainer: NativePolicy

    def __init__(self, role: str, site: WorkerContext, recipe: Recipe, path: str | None) -> None:
        super().__init__(role, site, recipe)
        self.trainer = self.make_trainer(self.load_model(path))

    def make_trainer(self, model: Any) -> NativePolicy:
        return self.policy(model.requires_grad_(False))

    @property
    def policy(self) -> partial[NativePolicy]:
        recipe = self.recipe
        return partial(
            NativePolicy,
            temperature=recipe.rollout.temperature,
            logits_chunk=recipe.train.logits_chunk,
            mesh=self.mesh,
            offload=recipe.train.offload,
        )

    def logprobs(self, shares: Sequence[Batch | None]) -> list[FloatArray]:
        """Of each share, one number for each of its tokens."""
        return [self._logprobs(share) for share in shares]

    def _logprobs(self, share: Batch | None) -> FloatArray:
        packs = self.packs(share)
        return gather(share, packs, [logprobs for logprobs, _ in self.trainer.logprobs(packs)])


class Actor(Scorer):
    """The policy that learns."""

    channel: Channel | None = None

    def make_trainer(self, model: Any) -> NativePolicy:
        return self.policy(
            model,
            optimizer=self.recipe.optimizer,
            total_updates=self.num_updates,
            gradient_checkpointing=self.recipe.train.gradient_checkpointing,
        )

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.trainer.dtype).removeprefix("torch.")}

    def accumulate(self, share: Batch | None, terms: UpdateTerms) -> LossStats:
        """Adds the gradient of a share of the update."""
        sums = LossStats()
        for pack in self.packs(share):
            loss = None if pack is None else PolicyLossFunction(self.algorithm, pack, terms, sums)
            sums.loss += self.trainer.forward_backward(pack, loss)
        return sums.read()

    def step(self, scale: float = 1.0) -> UpdateResult:
        """`scale`: for what the gradient is still to be divided by."""
        return self.trainer.step(scale)

    def zero_grad(self) -> None:
        self.trainer.zero_grad()

    def save(self, folder: Path, writers: Sequence[int]) -> None:
        self.trainer.save(folder, writers)

    def load(self, folder: Path) -> None:
        self.trainer.load(folder)

    # --- sending weights to engines in other processes

    async def open_channel(self, kind: str) -> str:
        """On the first worker, which sends. Returns where the receivers join."""
        if self.channel is not None:
            await asyncio.to_thread(self.channel.close)  # also ends what may still wait in it
        self.channel = make_channel(kind, self.site.address, self.site.device)
        return self.channel.open() if isinstance(self.channel, CollectiveChannel) else ""

    async def join_channel(self, meeting: str, size: int) -> None:
        if isinstance(self.channel, CollectiveChannel):
            await asyncio.to_thread(self.channel.join, meeting, 0, size)

    def send_weights(self) -> TransferHandle:
        """The first worker sends; the others help to put sharded tensors together."""
        weights = self.trainer.weights()
        try:
            return None if self.channel is None else self.channel.send(weights)
        finally:
            for _ in weights:  # the others wait for this one, also when sending has failed
                pass

    def release_weights(self) -> None:
        assert self.channel is not None
        self.channel.release()


class Critic(_Role):
    """Says how much reward is to come, and learns to."""

    def __init__(self, site: WorkerContext, recipe: Recipe) -> None:
        super().__init__("critic", site, recipe)
        self.trainer = NativeCritic(
            ValueModel(self.load_model(recipe.critic.path)),
            recipe.critic.optimizer,
            self.num_updates,
            recipe.train.gradient_checkpointing,
            mesh=self.mesh,
            offload=recipe.train.offload,
        )

    def values(self, shares: Sequence[Batch | None]) -> list[FloatArray]:
        return [self._values(share) for share in shares]

    def _values(self, share: Batch | None) -> FloatArray:
        packs = self.packs(share)
        return gather(share, packs, list(self.trainer.values(packs)))

    def accumulate(self, share: Batch | None, terms: UpdateTerms) -> LossStats:
        sums = LossStats()
        for pack in self.packs(share):
            loss = None if pack is None else ValueLossFunction(self.recipe.critic.value_clip, pack, terms)
            sums.loss += self.trainer.forward_backward(pack, loss)
        return sums

    def step(self, scale: float = 1.0) -> UpdateResult:
        return self.trainer.step(scale)

    def save(self, folder: Path, writers: Sequence[int]) -> None:
        self.trainer.save(folder, writers)

    def load(self, folder: Path) -> None:
        self.trainer.load(folder)


def gather(share: Batch | None, packs: Sequence[Pack | None], results: Sequence[Any]) -> FloatArray:
    column = np.zeros(0 if share is None else len(share.tokens), np.float32)
    for pack, result in zip_longest(packs, results):
        if pack is not None:
            column[pack.flat] = result.float().cpu().numpy()
    return column
