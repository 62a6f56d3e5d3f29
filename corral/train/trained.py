"""What policy and critic have in common: a model on its mesh, its optimiser, the guard against losses that are not
finite, and the optimiser's files."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from corral.data.batch import Pack
from corral.model.fused_layers import unfuse
from corral.recipe.errors import UserError
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import Optimiser
from corral.train.mesh import Mesh
from corral.train.optimiser import MasterOptimiser, UpdateResult
from corral.train.prediction import Prediction
from corral.train.sharding import Sharded, check_offload
from corral.train.tensors import StoredTensors, together, write_tensors

Result = TypeVar("Result")
STATE = ("step", "exp_avg", "exp_avg_sq", "master")
"""What an optimiser may keep of a parameter."""


class Trained:
    def __init__(
        self,
        model: nn.Module,
        causal: Any,
        optimiser: Optimiser | None,
        total_updates: int,
        *,
        recompute: bool,
        mesh: Mesh | None,
        offload: Sequence[str],
        in_float32: Sequence[nn.Module] = (),
    ) -> None:
        """`causal`: the transformers model in `model`; modules beside it compute `in_float32`. Without an `optimiser`
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
            trained=optimiser is not None,
            offload="parameters" in offload,
            in_float32=in_float32,
        )
        self.layout = self.sharded.layout
        self.optimiser: MasterOptimiser | None = None
        if optimiser is not None:
            self.optimiser = MasterOptimiser(
                model.named_parameters(),
                optimiser,
                total_updates,
                layout=self.layout,
                on_host="optimiser" in offload,
            )
        self.recompute = recompute
        self.poisoned = False

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes. (Sharded parameters that are trained are float32 whatever it is.)"""
        return next(iter(self.layout.spreads.values())).dtype

    def compute(self, pack: Pack, read: Callable[[Prediction], Result]) -> Result:
        """What `read` makes of a pack; all ranks that share a copy of the model compute at the same time."""
        prediction = Prediction(pack, self.mesh)
        if self.sharded.exchange is not None:
            self.sharded.exchange.max_tokens = self.mesh.max(prediction.num_nodes, "expert")
        return self.sharded(lambda: read(prediction))

    def backward(self, loss: Tensor) -> float:
        """A share that is not finite spoils the update. Where others wait for this rank's gradients, it is computed
        with all the same; and on a GPU, which is not kept waiting until the share is known."""
        assert self.optimiser is not None, "a frozen model is not trained"
        share = Share(loss.detach())
        if loss.is_cuda or self.mesh.is_sharded or share.is_finite:
            self.optimiser.backward(loss)
        self.poisoned |= not share.is_finite
        return share.value

    def step(self, scale: float = 1.0) -> UpdateResult:
        """One update with the gradients times `scale`; the same on all ranks."""
        assert self.optimiser is not None, "a frozen model is not trained"
        if self.mesh.any(self.poisoned):
            self.forget_gradients()
            return UpdateResult(math.nan, self.optimiser.learning_rate(self.optimiser.updates), skipped=True)
        return self.optimiser.step(scale)

    def forget_gradients(self) -> None:
        """As if nothing had been learnt since the last update."""
        assert self.optimiser is not None, "a frozen model is not trained"
        self.poisoned = False
        self.optimiser.zero_gradients()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters, one after the other; on all ranks at the same time."""
        for name, parameter in self.model.named_parameters():
            yield name, self.layout.weight(name, parameter)

    def save_optimiser(self, folder: Path, writers: Sequence[int] | None) -> None:
        optimiser = self.optimiser
        assert optimiser is not None
        shapes = {slot.name: self.layout.spreads[slot.name].shape for slot in optimiser.slots}
        kinds = {
            f"{slot.name}.{key}": (torch.float32, torch.Size() if key == "step" else shapes[slot.name])
            for slot in optimiser.slots
            for key in optimiser.tensors(slot)
        }

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for slot in optimiser.slots:
                for key, local in optimiser.tensors(slot).items():
                    yield f"{slot.name}.{key}", local if key == "step" else self.layout.whole(slot.name, local)

        write_tensors(folder, "optimiser", kinds, tensors(), self.mesh, writers)
        is_first = self.mesh.rank == (0 if writers is None else writers[0])
        numbers = json.dumps(optimiser.numbers())
        together(self.mesh, lambda: write_text(folder / "optimiser.json", numbers) if is_first else None)

    def load_optimiser(self, folder: Path) -> None:
        optimiser = self.optimiser
        assert optimiser is not None
        stored = StoredTensors(folder, "optimiser")
        unknown = stored.names - {f"{slot.name}.{key}" for slot in optimiser.slots for key in STATE}
        if unknown:
            raise UserError(f"{folder} is the optimiser of another model: this one has no {min(unknown)}")
        for slot in optimiser.slots:
            found = {key: stored[name] for key in STATE if (name := f"{slot.name}.{key}") in stored.names}
            parts = {key: t if key == "step" else self.layout.part(slot.name, t) for key, t in found.items()}
            optimiser.load_tensors(slot, parts)
        optimiser.load_numbers(json.loads((folder / "optimiser.json").read_text()))


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


class recomputing:
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
