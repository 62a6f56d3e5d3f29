"""AdamW with warm-up and decay, gradient clipping, float32 master weights and, for float16, loss scaling.

An update whose gradient is not finite never reaches the weights: it is skipped and reported.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from corral.recipe.schema import Optimiser as OptimiserRecipe


@dataclass(frozen=True)
class UpdateResult:
    gradient_norm: float
    learning_rate: float
    skipped: bool
    """The gradient was not finite; the weights are as before."""
    overflow: bool = False
    """Skipped, but expected now and then: float16's loss scale was too high and has been halved."""


class MasterOptimiser:
    """Parameters in float32 are updated as they are. Others (bfloat16, float16) get a float32 master copy, and their
    gradients are summed over micro-batches in float32."""

    def __init__(self, parameters: Iterable[nn.Parameter], recipe: OptimiserRecipe, total_updates: int) -> None:
        self.recipe, self.total_updates = recipe, total_updates
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [self._master(parameter) for parameter in self.parameters]
        self.adamw = torch.optim.AdamW(
            self.masters,
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.updates = 0
        self.scaler = LossScaler(enabled=any(p.dtype == torch.float16 for p in self.parameters))

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype == torch.float32:
            return parameter
        master = nn.Parameter(parameter.detach().float())

        def accumulate(low: Tensor) -> None:
            assert low.grad is not None
            gradient = low.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            low.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    def backward(self, loss: Tensor) -> None:
        (loss * self.scaler.scale).backward()

    def step(self) -> UpdateResult:
        rate = self.learning_rate(self.updates)
        gradients = [master.grad for master in self.masters if master.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) / self.scaler.scale
        self.updates += 1
        finite = math.isfinite(norm)
        if finite:
            factor = min(1.0, self.recipe.max_gradient_norm / (norm + 1e-6)) / self.scaler.scale
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self._apply(rate)
        self.zero_gradients()
        overflow = self.scaler.update(finite)
        return UpdateResult(norm, rate, skipped=not finite, overflow=overflow)

    @torch.no_grad()
    def _apply(self, rate: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    def zero_gradients(self) -> None:
        for master in self.masters:
            master.grad = None

    def learning_rate(self, update: int) -> float:
        recipe = self.recipe
        if update < recipe.warmup_steps:
            return recipe.learning_rate * (update + 1) / recipe.warmup_steps
        if recipe.schedule == "constant":
            return recipe.learning_rate
        progress = min(1.0, (update - recipe.warmup_steps) / max(1, self.total_updates - recipe.warmup_steps))
        decay = 1.0 - progress if recipe.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        floor = recipe.min_learning_rate_ratio
        return recipe.learning_rate * (floor + (1.0 - floor) * decay)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, numbers), for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for i, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            for key, value in self.adamw.state[master].items():
                tensors[f"{i}.{key}"] = value
            if parameter is not master:
                tensors[f"{i}.master"] = master.detach()
        return tensors, {"updates": self.updates, "loss_scale": self.scaler.scale, "good": self.scaler.good}

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.updates = int(numbers["updates"])
        self.scaler.scale, self.scaler.good = float(numbers["loss_scale"]), int(numbers["good"])
        for i, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            state = {key: tensors[f"{i}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{i}.{key}" in tensors}
            if state:
                self.adamw.state[master] = {
                    key: value.clone() if key == "step" else value.to(master.device) for key, value in state.items()
                }
            if parameter is not master:
                master.data.copy_(tensors[f"{i}.master"])


class LossScaler:
    """Keeps float16 gradients in range: doubles the scale after 200 good updates, halves it after a bad one."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = 2.0**15 if enabled else 1.0
        self.good = 0

    def update(self, finite: bool) -> bool:
        """-> whether a bad update is the scale's fault, so that the next one may do better."""
        if not self.enabled:
            return False
        if finite:
            self.good += 1
            if self.good % 200 == 0:
                self.scale *= 2.0
            return False
        self.scale, self.good = self.scale / 2.0, 0
        return self.scale >= 1.0
