"""The trainer seam. A trainer knows models, gradients and devices; it knows nothing of algorithms.

A model may be sharded over several processes. Then each of them has a trainer, and every method is called by all of
them at the same time, with the same number of packs: None stands for a pack on ranks that have fewer than others.
`tests/training/trainer_contract.py` puts every implementation through this.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from corral.data.batch import Pack
from corral.training.optimizer import UpdateResult
from corral.training.tensor_files import DeferredWrites

PolicyLoss = Callable[[Tensor, Tensor], Tensor]
"""(log-probs [tokens], entropy [tokens]) of a pack, both 0 where nothing was generated -> its contribution to the
loss."""
ValueLoss = Callable[[Tensor], Tensor]
"""(values [tokens]) of a pack, 0 where nothing was generated -> its contribution to the loss."""


class Trainer(Protocol):
    """What policy and value trainers have in common."""

    def step(self, scale: float = 1.0) -> UpdateResult:
        """One optimizer update with the accumulated gradients times `scale`, which are zero afterwards. A gradient that
        is not finite never reaches the weights: the update is skipped, and the result says so."""
        ...

    def zero_grad(self) -> None:
        """Drops the gradients that were accumulated since the last update."""
        ...

    def copy_from(self, copy: int) -> None:
        """Weights and optimizer become those of another copy of the model, to the last bit, and accumulated gradients
        zero. Called on all copies."""
        ...

    def save(self, folder: Path, writers: Sequence[int] | None = None, deferred: DeferredWrites | None = None) -> None:
        """Writes model and optimizer into a checkpoint's folder. `writers`: ranks that can write to it; None: all.
        `deferred` takes tensors, which are copied and written while training goes on: `step`, `copy_from` and `load`
        wait until they are copied. OSError on all ranks if one fails."""
        ...

    def take_expert_counts(self) -> list[list[int]]:
        """Tokens of this rank's packs that each expert of a mixture was trained with, layer by layer, since the last
        call. Empty where there are no experts, or their tokens are not counted (the general path)."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote. The weights of a policy are not restored: it is built from the checkpoint."""
        ...


class PolicyTrainer(Trainer, Protocol):
    """The actor, or the frozen reference, of which only `compute_logprobs` is used."""

    @property
    def dtype(self) -> torch.dtype:
        """The data type in which the model computes."""
        ...

    @property
    def whole_model(self) -> Any | None:
        """The model itself, for an engine that decodes with the trainer's own tensors; None if it is sharded."""
        ...

    def compute_logprobs(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        """Log-probs [tokens] of each pack, 0 where nothing was generated, without gradient; empty for None, and on all
        stages of a pipeline but the last."""
        ...

    def forward_backward(self, micro_batches: Sequence[tuple[Pack | None, PolicyLoss | None]]) -> float:
        """Adds the gradients of the packs' contributions to the loss, and returns the sum of the contributions. After
        one that is not finite the next update is skipped. Without a pack there is no loss, and the contribution is 0;
        it is also 0 on all stages of a pipeline but the last, where losses are computed."""
        ...

    def router_loss(self) -> Tensor:
        """The load-balancing loss of the pack whose loss is being computed."""
        ...

    def weights(self, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, by the names of the unsharded model. All ranks iterate to the end. Of a model with adapters
        only these; `merged`: all others, with the adapters merged into them."""
        ...

    def compute_reference_logprobs(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        """`compute_logprobs` of the model without its adapters, which must have some."""
        ...


class ValueTrainer(Trainer, Protocol):
    """The critic."""

    def compute_values(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        """Values [tokens] of each pack, of the state in which each token was generated, without gradient; empty as for
        the policy."""
        ...

    def forward_backward(self, micro_batches: Sequence[tuple[Pack | None, ValueLoss | None]]) -> float:
        """As for the policy."""
        ...
