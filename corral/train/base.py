"""The trainer seam. A trainer knows models, gradients and devices; it knows nothing of algorithms."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from corral.data.batch import Pack
from corral.train.optimiser import UpdateResult

PolicyLoss = Callable[[Tensor, Tensor], Tensor]
"""(log-probs [tokens], entropy [tokens]) of a pack, both 0 where nothing was generated -> its share of the loss."""
ValueLoss = Callable[[Tensor], Tensor]
"""(values [tokens]) -> its share of the loss."""


class PolicyTrainer(Protocol):
    def logprobs(self, packs: Iterable[Pack]) -> Iterator[tuple[Tensor, Tensor]]:
        """(log-probs, entropy) [tokens of the pack], without gradient."""
        ...

    def forward_backward(self, pack: Pack, loss: PolicyLoss) -> float:
        """Adds the gradient of the pack's share of the loss; returns that share. A share that is not finite adds
        nothing, and the update that follows is skipped."""
        ...

    def step(self) -> UpdateResult: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class ValueTrainer(Protocol):
    def values(self, packs: Iterable[Pack]) -> Iterator[Tensor]:
        """[tokens of the pack], the value of the state in which each token was chosen; without gradient."""
        ...

    def forward_backward(self, pack: Pack, loss: ValueLoss) -> float: ...

    def step(self) -> UpdateResult: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...
