"""A batch and the workers that compute it: each gets its share, and what they answer is put together again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from corral.data.batch import Batch
from corral.data.trajectory import FloatArray
from corral.recipe.mesh import MeshShape
from corral.runtime.group import Group
from corral.runtime.loss_functions import LossStats, UpdateTerms
from corral.train.optimizer import UpdateResult

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class TrainerGroup:
    """The workers of actor, reference or critic."""

    group: Group
    mesh: MeshShape

    async def column(self, method: str, batch: Batch, updates: Sequence[Sequence[int]]) -> FloatArray:
        """One number for each token of the batch, computed in the very shares that will be learnt from."""
        dealt = [self.deal(batch, rows) for rows in updates]
        shares = [[share(batch, rows[data]) for rows in dealt] for data in range(self.mesh.num_data)]
        answers = await self.group.each(method, [(shares[self.mesh.data_rank(r)],) for r in range(self.group.size)])
        column = np.zeros(len(batch.tokens), np.float32)
        for data, answer in enumerate(self.by_data(answers)):
            for rows, numbers in zip(dealt, answer, strict=True):
                if rows[data]:
                    column[batch.positions_of(rows[data])] = numbers
        return column

    async def accumulate(self, batch: Batch, rows: Sequence[int], terms: UpdateTerms) -> LossStats:
        """Adds the gradient of these trajectories."""
        shares = [share(batch, own) for own in self.deal(batch, rows)]
        arguments = [(shares[self.mesh.data_rank(rank)], terms) for rank in range(self.group.size)]
        total = LossStats()
        for sums in self.by_data(await self.group.each("accumulate", arguments)):
            total.merge(sums)
        return total

    async def step(self, scale: float = 1.0) -> UpdateResult:
        result: UpdateResult = (await self.group.all("step", scale))[0]
        return result

    def deal(self, batch: Batch, rows: Sequence[int]) -> list[list[int]]:
        return batch.split(self.mesh.num_data, rows)

    def by_data(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """One answer for each share: workers that hold parts of one model give the same."""
        return answers[:: self.mesh.context * self.mesh.tensor]


def share(batch: Batch, rows: Sequence[int]) -> Batch | None:
    return batch.take(rows) if rows else None
