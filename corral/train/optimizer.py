"""AdamW with warm-up and decay, gradient clipping, float32 master weights and, for float16, loss scaling.

An update whose gradient is not finite never reaches the weights: it is skipped and reported.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from corral.recipe.schema import Optimizer as OptimizerRecipe
from corral.train.layout import Layout
from corral.train.slots import Slot, sum_gradients, total_norm


@dataclass(frozen=True)
class UpdateResult:
    gradient_norm: float
    learning_rate: float
    skipped: bool
    """The gradient was not finite; the weights are as before."""
    overflow: bool = False
    """Skipped, but expected now and then: float16's loss scale was too high and has been halved."""


class MasterOptimizer:
    """Of all parameters that are trained, given by name; `layout` says how they are spread over processes."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        recipe: OptimizerRecipe,
        total_updates: int,
        *,
        layout: Layout | None = None,
        on_host: bool = False,
    ) -> None:
        """`on_host`: moments and masters are in the host's memory between updates."""
        self.recipe, self.total_updates, self.layout, self.on_host = recipe, total_updates, layout, on_host
        self.num_warmup = recipe.warmup_steps
        if recipe.warmup_ratio is not None:
            self.num_warmup = int(recipe.warmup_ratio * total_updates)
        self.slots = [Slot(name, parameter, layout) for name, parameter in parameters if parameter.requires_grad]
        self.adamw = torch.optim.AdamW(
            [slot.master for slot in self.slots],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.epsilon,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        self.updates = 0
        self.scaler = LossScaler(enabled=any(slot.dtype == torch.float16 for slot in self.slots))
        self._rest()

    def backward(self, loss: Tensor) -> None:
        (loss * self.scaler.scale).backward()

    def step(self, scale: float = 1.0) -> UpdateResult:
        """One update with the gradients times `scale`."""
        rate = self.learning_rate(self.updates)
        if self.layout is not None:
            sum_gradients(self.slots, self.layout)
        norm = total_norm(self.slots, self.layout)
        self.updates += 1
        size = self._step_on_gpu(norm, scale, rate) if norm.is_cuda else self._step_on_host(float(norm), scale, rate)
        self.zero_gradients()
        overflow = self.scaler.update(math.isfinite(size))
        return UpdateResult(size, rate, skipped=not math.isfinite(size), overflow=overflow)

    def _step_on_host(self, norm: float, scale: float, rate: float) -> float:
        """-> the gradient's norm, in the loss' own scale"""
        norm = norm * scale / self.scaler.scale
        if math.isfinite(norm):
            factor = min(1.0, self.recipe.max_gradient_norm / (norm + 1e-6)) * scale / self.scaler.scale
            if factor != 1.0:
                torch._foreach_mul_([slot.gradient for slot in self.slots if slot.gradient is not None], factor)
            self._apply(rate)
        return norm

    @torch.no_grad()
    def _step_on_gpu(self, norm: Tensor, scale: float, rate: float) -> float:
        """The same in one pass over everything, launched without waiting for the norm: where that is not finite, the
        kernel changes nothing."""
        from corral.kernels.gpu import adamw

        norm = norm * (scale / self.scaler.scale)
        factor = (self.recipe.max_gradient_norm / (norm + 1e-6)).clamp(max=1.0) * (scale / self.scaler.scale)
        factor = torch.where(norm.isfinite(), factor, math.nan)
        slots = [slot for slot in self.slots if slot.received is not None]
        for slot in slots:
            slot.attach()
            self._move_moments(slot, slot.master.device)
        states = [self._state(slot) for slot in slots]
        torch._foreach_add_([state["step"] for state in states], norm.isfinite().float())
        for slot, state in zip(slots, states, strict=True):
            assert slot.received is not None
            adamw.update(
                slot.current,
                slot.received.contiguous(),
                state["exp_avg"],
                state["exp_avg_sq"],
                slot.parameter if slot.is_copy else None,
                state["step"],
                factor,
                rate=rate,
                decay=self.recipe.weight_decay,
                betas=self.recipe.betas,
                log_betas=(log(self.recipe.betas[0]), log(self.recipe.betas[1])),
                eps=self.recipe.epsilon,
            )
        self._rest()
        return norm.item()

    def _state(self, slot: Slot) -> dict[str, Tensor]:
        """As torch's AdamW keeps it."""
        state: dict[str, Tensor] = self.adamw.state[slot.master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=slot.master.device)
            state["exp_avg"] = torch.zeros_like(slot.current)
            state["exp_avg_sq"] = torch.zeros_like(slot.current)
        return state

    @torch.no_grad()
    def _apply(self, rate: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = rate
        for slot in self.slots:
            slot.attach()
            if slot.master is not slot.parameter:
                slot.master.grad = slot.gradient
            self._move_moments(slot, slot.master.device)
        self.adamw.step()
        for slot in self.slots:
            slot.publish()
        self._rest()

    def _rest(self) -> None:
        """Between updates."""
        if self.on_host:
            for slot in self.slots:
                if slot.is_copy:
                    slot.master.data = slot.master.data.cpu()
                self._move_moments(slot, torch.device("cpu"))

    def _move_moments(self, slot: Slot, device: torch.device) -> None:
        state = self.adamw.state.get(slot.master, {})
        for key, value in state.items():
            state[key] = value.to(device)

    def zero_gradients(self) -> None:
        for slot in self.slots:
            slot.clear()

    def learning_rate(self, update: int) -> float:
        recipe = self.recipe
        if update < self.num_warmup:
            return recipe.learning_rate * (update + 1) / self.num_warmup
        if recipe.schedule == "constant":
            return recipe.learning_rate
        progress = min(1.0, (update - self.num_warmup) / max(1, self.total_updates - self.num_warmup))
        decay = 1.0 - progress if recipe.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        floor = recipe.min_learning_rate_ratio
        return recipe.learning_rate * (floor + (1.0 - floor) * decay)

    def numbers(self) -> dict[str, Any]:
        return {"updates": self.updates, "loss_scale": self.scaler.scale, "good": self.scaler.good}

    def load_numbers(self, numbers: dict[str, Any]) -> None:
        self.updates = int(numbers["updates"])
        self.scaler.scale, self.scaler.good = float(numbers["loss_scale"]), int(numbers["good"])

    def tensors(self, slot: Slot) -> dict[str, Tensor]:
        """What has to be saved of a parameter, besides itself: this rank's parts, and the number of its updates."""
        state = dict(self.adamw.state.get(slot.master, {}))
        return state if slot.dtype == torch.float32 else {**state, "master": slot.current}

    def load_tensors(self, slot: Slot, tensors: dict[str, Tensor]) -> None:
        """As given by `tensors`."""
        if "master" in tensors:
            slot.current.copy_(tensors["master"])
        moments = {key: value for key, value in tensors.items() if key != "master"}
        if moments:
            device = torch.device("cpu") if self.on_host else slot.master.device
            self.adamw.state[slot.master] = {key: value.to(device, copy=True) for key, value in moments.items()}


def log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


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
