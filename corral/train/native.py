"""The native trainer: packed token trees, log-probs from hidden states in chunks, AdamW, on one process or on many.

Every pack is computed as a `TokenTree`: tokens with the same history once, forward and backward. The gradient is that
of the separate sequences, to rounding, and does not depend on how they were packed, nor on how the model and the packs
are spread over processes.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corral.data.batch import Pack
from corral.model.logprobs import head_logprobs
from corral.recipe.schema import LOGITS_CHUNK, Optimizer
from corral.train.base import PolicyLoss, ValueLoss
from corral.train.layout import local_tensor
from corral.train.mesh import Mesh
from corral.train.prediction import Prediction, stand_in
from corral.train.pretrained import write_pretrained
from corral.train.tensors import StoredTensors, write_tensors
from corral.train.trained import Trained, checkpointed


class NativePolicy(Trained):
    """The actor, or with `optimizer=None` the frozen reference."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        logits_chunk: int | None = None,
        optimizer: Optimizer | None = None,
        total_updates: int = 0,
        gradient_checkpointing: bool = False,
        mesh: Mesh | None = None,
        offload: Sequence[str] = (),
    ) -> None:
        super().__init__(
            model,
            model,
            optimizer,
            total_updates,
            gradient_checkpointing=gradient_checkpointing,
            mesh=mesh,
            offload=offload,
        )
        self.temperature = temperature
        self.logits_chunk = logits_chunk or LOGITS_CHUNK[self.mesh.device.type]

    def logprobs(self, packs: Iterable[Pack | None]) -> Iterator[tuple[Tensor, Tensor]]:
        for pack in packs:
            logprobs = entropy = torch.empty(0, device=self.mesh.device)
            if pack is not None or self.mesh.is_sharded:
                with torch.no_grad():
                    scored = self.compute(pack or stand_in(), self._logprobs)
                logprobs, entropy = scored if pack is not None else (logprobs, entropy)
            yield logprobs, entropy

    def forward_backward(self, pack: Pack | None, loss: PolicyLoss | None) -> float:
        if pack is None and not self.mesh.is_sharded:
            return 0.0
        with checkpointed(self.causal, self.gradient_checkpointing):
            logprobs, entropy = self.compute(pack or stand_in(), self._logprobs)
            if pack is None:
                return self.backward(0.0 * (logprobs + entropy).sum())
            assert loss is not None, "a pack has a loss"
            return self.backward(loss(logprobs, entropy))

    def _logprobs(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        logprobs, entropy = head_logprobs(
            prediction.hidden(self.model),
            head.weight,
            getattr(head, "bias", None),
            prediction.row_of_target,
            prediction.targets,
            temperature=self.temperature,
            chunk=self.logits_chunk,
        )
        return prediction.to_tokens(logprobs), prediction.to_tokens(entropy[prediction.row_of_target])

    def save(self, folder: Path, writers: Sequence[int] | None = None) -> None:
        """The model in Hugging Face layout, and the optimizer in `actor/`; called by all ranks. `writers`: those that
        see the folder; None: all."""
        write_pretrained(self.model, self.layout, folder, writers)
        self.save_optimizer(folder / "actor", writers)

    def load(self, folder: Path) -> None:
        """The optimizer; the model was loaded before it was spread over processes."""
        self.load_optimizer(folder / "actor")


class NativeCritic(Trained):
    """A model with one number for each state: how much reward is to come."""

    def __init__(
        self,
        model: "ValueModel",
        optimizer: Optimizer,
        total_updates: int,
        gradient_checkpointing: bool = False,
        mesh: Mesh | None = None,
        offload: Sequence[str] = (),
    ) -> None:
        super().__init__(
            model,
            model.trunk,
            optimizer,
            total_updates,
            gradient_checkpointing=gradient_checkpointing,
            mesh=mesh,
            offload=offload,
            in_float32=[model.head],
        )

    def values(self, packs: Iterable[Pack | None]) -> Iterator[Tensor]:
        for pack in packs:
            values = torch.empty(0, device=self.mesh.device)
            if pack is not None or self.mesh.is_sharded:
                with torch.no_grad():
                    computed = self.compute(pack or stand_in(), self._values)
                values = computed if pack is not None else values
            yield values

    def forward_backward(self, pack: Pack | None, loss: ValueLoss | None) -> float:
        if pack is None and not self.mesh.is_sharded:
            return 0.0
        with checkpointed(self.causal, self.gradient_checkpointing):
            values = self.compute(pack or stand_in(), self._values)
            if pack is None:
                return self.backward(0.0 * values.sum())
            assert loss is not None, "a pack has a loss"
            return self.backward(loss(values))

    def _values(self, prediction: Prediction) -> Tensor:
        values = self.model.head(prediction.hidden(self.causal).float())[:, 0]
        return prediction.to_tokens(values[prediction.row_of_target])

    def save(self, folder: Path, writers: Sequence[int] | None = None) -> None:
        """Model and optimizer, in `critic/`; called by all ranks. `writers`: those that see the folder; None: all."""
        kinds = {name: (spread.dtype, spread.shape) for name, spread in self.layout.spreads.items()}
        write_tensors(folder / "critic", "model", kinds, self.weights(), self.mesh, writers)
        self.save_optimizer(folder / "critic", writers)

    def load(self, folder: Path) -> None:
        stored = StoredTensors(folder / "critic", "model")
        for name, parameter in self.model.named_parameters():
            local_tensor(parameter).copy_(self.layout.part(name, stored[name]))
        self.load_optimizer(folder / "critic")


class ValueModel(nn.Module):
    """A causal model's trunk with a value head that starts at zero: the first values are 0, not noise."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.trunk = model
        width = model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=next(model.parameters()).device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if not model.config.tie_word_embeddings:
            model.get_output_embeddings().requires_grad_(False)
