"""The trainer seam. A trainer knows models, gradients and devices; it knows nothing of algorithms.

A model may be spread over several processes. Then each of them has a trainer, every method is called by all of them at
the same time, and with the same number of packs: `None` stands for a pack on ranks that have fewer than others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from corral.data.batch import Pack
from corral.train.optimizer import UpdateResult

PolicyLoss = Callable[[Tensor, Tensor], Tensor]
"""(log-probs [tokens], entropy [tokens]) of a pack, both 0 where nothing was generated -> its share of the loss."""
ValueLoss = Callable[[Tensor], Tensor]
"""(values [tokens]) -> its share of the loss."""


class PolicyTrainer(Protocol):
    def logprobs(self, packs: Iterable[Pack | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """(log-probs, entropy) [tokens of the pack], without gradient; empty for None."""
        ...

    def forward_backward(self, pack: Pack | None, loss: PolicyLoss | None) -> float:
        """Adds the gradient of the pack's share of the loss; returns that share. After a share that is not finite the
        update that follows is skipped. Without a pack there is no loss, and the share is 0."""
        ...

    def step(self, scale: float = 1.0) -> UpdateResult:
        """One update with the gradients times `scale`."""
        ...

    def zero_grad(self) -> None:
        """As if nothing had been learnt since the last update."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, by the names of the unsharded model."""
        ...

    def save(self, folder: Path, writers: Sequence[int] | None = None) -> None:
        """The model and the optimizer's state, into a checkpoint's folder. `writers`: ranks that see it; None: all."""
        ...

    def load(self, folder: Path) -> None: ...


class ValueTrainer(Protocol):
    def values(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        """[tokens of the pack], the value of the state in which each token was chosen; without gradient."""
        ...

    def forward_backward(self, pack: Pack | None, loss: ValueLoss | None) -> float: ...

    def step(self, scale: float = 1.0) -> UpdateResult: ...

    def zero_grad(self) -> None: ...

    def save(self, folder: Path, writers: Sequence[int] | None = None) -> None: ...

    def load(self, folder: Path) -> None: ...
