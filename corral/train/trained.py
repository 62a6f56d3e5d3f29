"""What policy and critic have in common: a model on its mesh, its optimizer, the guard against losses that are not
finite, and the optimizer's files."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from corral.data.batch import Pack
from corral.model.fused import unfuse
from corral.recipe.errors import UserError
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import Optimizer
from corral.train.mesh import Mesh
from corral.train.optimizer import MasterOptimizer, UpdateResult
from corral.train.prediction import Prediction
from corral.train.sharding import Sharded, check_offload
from corral.train.tensors import StoredTensors, together, write_tensors

Result = TypeVar("Result")
STATE = ("step", "exp_avg", "exp_avg_sq", "master")
"""What an optimizer may keep of a parameter."""


class Trained:
    def __init__(
        self,
        model: nn.Module,
        causal: Any,
        optimizer: Optimizer | None,
        total_updates: int,
        *,
        gradient_checkpointing: bool,
        mesh: Mesh | None,
        offload: Sequence[str],
        in_float32: Sequence[nn.Module] = (),
    ) -> None:
        """`causal`: the transformers model in `model`; modules beside it compute `in_float32`. Without an `optimizer`
        the model is frozen."""
        self.model: Any = model
        self.causal = causal
        self.mesh = mesh or Mesh.build(MeshShape(), next(model.parameters()).device)
        check_offload(self.mesh, offload)
        if self.mesh.groups.keys() & {"tensor", "expert"}:
            unfuse(causal)  # there, modules within the layers compute in their own way
        self.sharded = Sharded(
            model,
            causal,
            self.mesh,
            trained=optimizer is not None,
            offload="parameters" in offload,
            in_float32=in_float32,
        )
        self.layout = self.sharded.layout
        self.optimizer: MasterOptimizer | None = None
        if optimizer is not None:
            self.optimizer = MasterOptimizer(
                model.named_parameters(),
                optimizer,
                total_updates,
                layout=self.layout,
                on_host="optimizer" in offload,
            )
        self.gradient_checkpointing = gradient_checkpointing
        self.poisoned = False

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes. (Sharded parameters that are trained are float32 whatever it is.)"""
        return next(iter(self.layout.spreads.values())).dtype

    def compute(self, pack: Pack, read: Callable[[Prediction], Result]) -> Result:
        """What `read` makes of a pack; all ranks that share a copy of the model compute at the same time."""
        prediction = Prediction(pack, self.mesh)
        if self.sharded.exchange is not None:
            self.sharded.exchange.most_tokens = self.mesh.max(prediction.num_nodes, "expert")
        return self.sharded(lambda: read(prediction))

    def backward(self, loss: Tensor) -> float:
        """A share that is not finite spoils the update. Where others wait for this rank's gradients, it is computed
        with all the same; and on a GPU, which is not kept waiting until the share is known."""
        assert self.optimizer is not None, "a frozen model is not trained"
        share = Share(loss.detach())
        if loss.is_cuda or self.mesh.is_sharded or share.is_finite:
            self.optimizer.backward(loss)
        self.poisoned |= not share.is_finite
        return share.value

    def step(self, scale: float = 1.0) -> UpdateResult:
        """One update with the gradients times `scale`; the same on all ranks."""
        assert self.optimizer is not None, "a frozen model is not trained"
        if self.mesh.any(self.poisoned):
            self.zero_grad()
            return UpdateResult(math.nan, self.optimizer.learning_rate(self.optimizer.updates), skipped=True)
        return self.optimizer.step(scale)

    def zero_grad(self) -> None:
        """As if nothing had been learnt since the last update."""
        assert self.optimizer is not None, "a frozen model is not trained"
        self.poisoned = False
        self.optimizer.zero_gradients()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, one after the other; on all ranks at the same time."""
        for name, parameter in self.model.named_parameters():
            yield name, self.layout.weight(name, parameter)

    def save_optimizer(self, folder: Path, writers: Sequence[int] | None) -> None:
        optimizer = self.optimizer
        assert optimizer is not None
        shapes = {slot.name: self.layout.spreads[slot.name].shape for slot in optimizer.slots}
        kinds = {
            f"{slot.name}.{key}": (torch.float32, torch.Size() if key == "step" else shapes[slot.name])
            for slot in optimizer.slots
            for key in optimizer.tensors(slot)
        }

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for slot in optimizer.slots:
                for key, local in optimizer.tensors(slot).items():
                    yield f"{slot.name}.{key}", local if key == "step" else self.layout.whole(slot.name, local)

        write_tensors(folder, "optimizer", kinds, tensors(), self.mesh, writers)
        is_first = self.mesh.rank == (0 if writers is None else writers[0])
        numbers = json.dumps(optimizer.numbers())
        together(self.mesh, lambda: write_text(folder / "optimizer.json", numbers) if is_first else None)

    def load_optimizer(self, folder: Path) -> None:
        optimizer = self.optimizer
        assert optimizer is not None
        stored = StoredTensors(folder, "optimizer")
        unknown = stored.names - {f"{slot.name}.{key}" for slot in optimizer.slots for key in STATE}
        if unknown:
            raise UserError(f"{folder} is the optimizer of another model: this one has no {min(unknown)}")
        for slot in optimizer.slots:
            found = {key: stored[name] for key in STATE if (name := f"{slot.name}.{key}") in stored.names}
            parts = {key: t if key == "step" else self.layout.part(slot.name, t) for key, t in found.items()}
            optimizer.load_tensors(slot, parts)
        optimizer.load_numbers(json.loads((folder / "optimizer.json").read_text()))


class Share:
    """A number on its way from the device: what is queued there after it does not delay it."""

    def __init__(self, number: Tensor) -> None:
        self.number = number
        self.copied: torch.cuda.Event | None = None
        if number.is_cuda:
            self.number = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
            self.copied = torch.cuda.current_stream(number.device).record_event()

    @property
    def value(self) -> float:
        if self.copied is not None:
            self.copied.synchronize()
        return self.number.item()

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value)


def write_text(path: Path, text: str) -> None:
    path.write_text(text)


class checkpointed:
    """Activations are computed again in the backward pass, where asked."""

    def __init__(self, model: Any, enabled: bool) -> None:
        self.model, self.enabled = model, enabled

    def __enter__(self) -> None:
        if self.enabled:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            self.model.train()

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            self.model.gradient_checkpointing_disable()
            self.model.eval()
