"""A batch and the workers that compute it: each gets its shard, and their answers are put together again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from corral.data.batch import Batch, FloatArray
from corral.recipe.mesh import MeshShape
from corral.runtime.group import Group
from corral.runtime.loss_functions import LossStats, UpdateTerms
from corral.runtime.model_workers import ModelWorker
from corral.training.optimizer import UpdateResult

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
