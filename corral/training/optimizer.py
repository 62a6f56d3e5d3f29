"""AdamW with warm-up and decay, gradient clipping, float32 master weights and, for float16, loss scaling.

An update whose gradient is not finite never reaches the weights: it is skipped and reported.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from corral.kernels.host_to_device import pinned_buffer
from corral.kernels.stochastic_rounding import round_to_bfloat16
from corral.recipe.schema import OPTIMIZER_SLOT_SIZE, OPTIMIZER_SLOTS
from corral.recipe.schema import Optimizer as OptimizerRecipe
from corral.training.process_mesh import ProcessMesh
from corral.training.sharding import ShardingLayout, local_tensor

ALIGNMENT = 256
"""Bytes, as torch's own allocations have."""


@dataclass(frozen=True)
class UpdateResult:
    gradient_norm: float
    learning_rate: float
    skipped: bool
    """Whether the loss or the gradient was not finite; then the weights are as before."""
    overflow: bool = False
    """Skipped, but expected now and then: float16's loss scale was too high and has been halved."""


class MasterOptimizer:
    """The optimizer of all parameters that are trained, given by name; `layout` says how they are sharded."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        recipe: OptimizerRecipe,
        total_updates: int,
        *,
        layout: ShardingLayout | None = None,
        on_host: bool = False,
    ) -> None:
        """`on_host`: moments and masters are in the host's memory, and on the device only while they are updated."""
        self.recipe, self.total_updates, self.layout, self.on_host = recipe, total_updates, layout, on_host
        self.num_warmup = recipe.warmup_steps
        if recipe.warmup_ratio is not None:
            self.num_warmup = int(recipe.warmup_ratio * total_updates)
        self.masters = [MasterWeight(name, p, layout) for name, p in parameters if p.requires_grad]
        self.state_dtype: torch.dtype = getattr(torch, recipe.state_dtype)
        self.updates = 0
        self.scaler = LossScaler(enabled=any(master.dtype == torch.float16 for master in self.masters))
        if on_host:
            self._move_to_host()

    def backward(self, loss: Tensor) -> None:
        (loss * self.scaler.scale).backward()

    def step(self, scale: float = 1.0) -> UpdateResult:
        """One update with the gradients times `scale`."""
        rate = self.learning_rate(self.updates)
        if self.layout is not None:
            sum_gradients(self.masters, self.layout)
        norm = total_norm(self.masters, self.layout)
        size = self._step_on_gpu(norm, scale, rate) if norm.is_cuda else self._step_on_host(float(norm), scale, rate)
        overflow = self.scaler.update(math.isfinite(size))
        return self._end_update(size, overflow)

    def skip(self) -> UpdateResult:
        """Skips an update whose loss was not finite. For the learning rate's schedule it counts, as one does that is
        skipped because of its gradient."""
        return self._end_update(math.nan, overflow=False)

    def _end_update(self, norm: float, overflow: bool) -> UpdateResult:
        rate = self.learning_rate(self.updates)
        self.updates += 1
        self.zero_grad()
        return UpdateResult(norm, rate, skipped=not math.isfinite(norm), overflow=overflow)

    def _step_on_host(self, norm: float, scale: float, rate: float) -> float:
        """-> the gradient's norm, in the scale of the loss"""
        norm = norm * scale / self.scaler.scale
        if math.isfinite(norm):
            # One factor undoes the loss scale, applies the caller's, and clips: one pass over the gradients.
            factor = min(1.0, self.recipe.max_gradient_norm / (norm + 1e-6)) * scale / self.scaler.scale
            if factor != 1.0:
                torch._foreach_mul_([m.gradient for m in self.masters if m.gradient is not None], factor)
            self._step_adamw(rate)
        return norm

    @torch.no_grad()
    def _step_on_gpu(self, norm: Tensor, scale: float, rate: float) -> float:
        """The same in one fused pass over weights, moments and gradients, launched without waiting for the norm: where
        that is not finite, the factor is NaN and the kernel changes nothing."""
        from corral.kernels.gpu.adamw_kernel import adamw_update

        norm = norm * (scale / self.scaler.scale)
        factor = (self.recipe.max_gradient_norm / (norm + 1e-6)).clamp(max=1.0) * (scale / self.scaler.scale)
        factor = torch.where(norm.isfinite(), factor, math.nan)
        masters = [master for master in self.masters if master.received is not None]
        torch._foreach_add_([self._moments(master)["step"] for master in masters], norm.isfinite().float())
        parts = self._parts_in_slots(masters, factor.device) if self.on_host else map(self._whole, masters)
        log_betas = tuple(math.log(beta) if beta > 0 else -math.inf for beta in self.recipe.betas)
        for master, part, weight, exp_avg, exp_avg_sq in parts:
            assert master.received is not None
            adamw_update(
                weight,
                master.received.contiguous().view(-1)[part],
                exp_avg,
                exp_avg_sq,
                master.parameter.detach().view(-1)[part] if master.is_copy else None,
                master.state["step"],
                factor,
                learning_rate=rate,
                weight_decay=self.recipe.weight_decay,
                betas=self.recipe.betas,
                log_betas=(log_betas[0], log_betas[1]),
                eps=self.recipe.epsilon,
            )
        return norm.item()

    def _whole(self, master: "MasterWeight") -> "UpdatedPart":
        return master, slice(None), master.current, master.state["exp_avg"], master.state["exp_avg_sq"]

    def _parts_in_slots(self, masters: list["MasterWeight"], device: torch.device) -> Iterator["UpdatedPart"]:
        """Brings states to the device a part of a parameter at a time: all of them are three times the size of a
        float32 model, which is why they are on the host. Copies run beside the updates of other parts."""
        kinds = {"exp_avg": self.state_dtype, "exp_avg_sq": self.state_dtype}
        if any(master.is_copy for master in masters):
            kinds["weight"] = torch.float32
        slots = StateSlots(kinds, max(master.current.numel() for master in masters), device)
        for master in masters:
            on_host = {key: master.state[key].view(-1) for key in ("exp_avg", "exp_avg_sq")}
            if master.is_copy:
                on_host["weight"] = master.current.view(-1)
            for start in range(0, master.current.numel(), OPTIMIZER_SLOT_SIZE):
                part = slice(start, start + OPTIMIZER_SLOT_SIZE)
                with slots.lent({key: state[part] for key, state in on_host.items()}) as states:
                    weight = states.get("weight", master.current.view(-1)[part])
                    yield master, part, weight, states["exp_avg"], states["exp_avg_sq"]
        slots.finish()

    def _moments(self, master: "MasterWeight") -> dict[str, Tensor]:
        """The state of one parameter, in the form of torch's AdamW, so that checkpoints do not depend on the device."""
        if not master.state:
            zero = torch.zeros((), device=local_tensor(master.parameter).device)
            moments = torch.zeros_like(master.current, dtype=self.state_dtype) if not self.on_host else zero
            self._set_state(master, {"step": zero, "exp_avg": moments, "exp_avg_sq": moments.clone()})
        return master.state

    def _set_state(self, master: "MasterWeight", state: dict[str, Tensor]) -> None:
        """Keeps moments where they belong: on the device, or at their places in the host's memory."""
        device = local_tensor(master.parameter).device
        for key, value in state.items():
            if key in master.on_host:
                master.state[key] = master.on_host[key].copy_(value)
            else:
                master.state[key] = value.to(device, torch.float32 if key == "step" else self.state_dtype)

    @torch.no_grad()
    def _step_adamw(self, rate: float) -> None:
        masters = [master for master in self.masters if master.gradient is not None]
        # States on the host come to a device one parameter at a time.
        for together in [[master] for master in masters] if self.on_host else [masters]:
            for master in together:
                self._moments(master)
                master.to_device()
            if self.state_dtype == torch.float32:
                self._update_with_torch(together, [master.state for master in together], rate)
            else:
                for master in together:
                    self._update_rounded(master, rate)
            for master in together:
                master.copy_to_parameter()
                if self.on_host:
                    self._return_to_host(master)

    def _update_rounded(self, master: "MasterWeight", rate: float) -> None:
        """Both moments are float32 while they are updated, those of one parameter at a time."""
        state = master.state
        wide = {key: value.float() for key, value in state.items()}
        self._update_with_torch([master], [wide], rate)
        state["step"] = wide["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = round_to_bfloat16(wide[key], master.current, wide["step"])

    def _update_with_torch(self, masters: list["MasterWeight"], states: list[dict[str, Tensor]], rate: float) -> None:
        recipe = self.recipe
        adamw(
            [master.current for master in masters],
            [master.gradient for master in masters if master.gradient is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=recipe.betas[0],
            beta2=recipe.betas[1],
            lr=rate,
            weight_decay=recipe.weight_decay,
            eps=recipe.epsilon,
            maximize=False,
        )

    def _move_to_host(self) -> None:
        """Gives all masters and moments places in one piece of the host's memory, which a GPU can copy by itself."""
        kinds = {"exp_avg": self.state_dtype, "exp_avg_sq": self.state_dtype}
        places = [
            (master, key, dtype)
            for master in self.masters
            for key, dtype in (kinds | ({"weight": torch.float32} if master.is_copy else {})).items()
        ]
        sizes = [-(-master.current.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for master, _, dtype in places]
        on_device = self.masters and local_tensor(self.masters[0].parameter).is_cuda
        self.host_memory = pinned_buffer(sum(sizes), pin=bool(on_device))  # pinned as long as it is referenced
        for (master, key, dtype), place in zip(places, self.host_memory.split(sizes), strict=True):
            master.on_host[key] = place.view(dtype)[: master.current.numel()].view(master.current.shape)
        for master in self.masters:
            self._return_to_host(master)

    def _return_to_host(self, master: "MasterWeight") -> None:
        if master.is_copy:
            master.weight.data = master.on_host["weight"].copy_(master.weight.detach())
        self._set_state(master, dict(master.state))

    def zero_grad(self) -> None:
        for master in self.masters:
            master.clear_gradient()

    def learning_rate(self, update: int) -> float:
        recipe = self.recipe
        if update < self.num_warmup:
            return recipe.learning_rate * (update + 1) / self.num_warmup
        if recipe.schedule == "constant":
            return recipe.learning_rate
        progress = min(1.0, (update - self.num_warmup) / max(1, self.total_updates - self.num_warmup))
        decay = 1.0 - progress if recipe.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        min_ratio = recipe.min_learning_rate_ratio
        return recipe.learning_rate * (min_ratio + (1.0 - min_ratio) * decay)

    # --- checkpoints and replicas

    @torch.no_grad()
    def copy_from(self, copy: int, mesh: ProcessMesh) -> None:
        """Weights, moments and counters become those of another copy of the model. All copies call this."""
        numbers = torch.tensor(list(self.counters().values()), dtype=torch.float64)
        # No moments before the first update, nor of an expert that never had a token.
        has_moments = torch.tensor([bool(master.state) for master in self.masters]).float()
        mesh.copy_from_([numbers], copy)
        mesh.copy_from_([has_moments], copy)
        self.load_counters(dict(zip(self.counters(), numbers.tolist(), strict=True)))
        for master, is_there in zip(self.masters, has_moments.tolist(), strict=True):
            if not is_there:
                master.state.clear()
        moments = [self._moments(m) for m, is_there in zip(self.masters, has_moments.tolist(), strict=True) if is_there]
        # By name: a state that was loaded from a checkpoint has another order than one that is new.
        states = [state[key] for state in moments for key in sorted(state)]
        mesh.copy_from_([*(master.current for master in self.masters), *states], copy)
        for master in self.masters:
            master.copy_to_parameter()
        self.zero_grad()

    def counters(self) -> dict[str, Any]:
        return {"updates": self.updates, "loss_scale": self.scaler.scale, "good": self.scaler.num_good}

    def load_counters(self, counters: dict[str, Any]) -> None:
        updates, scale, num_good = int(counters["updates"]), float(counters["loss_scale"]), int(counters["good"])
        largest = 2.0**64 if self.scaler.enabled else 1.0  # with one beyond float32 no update would ever be made
        if not (updates >= 0 and num_good >= 0 and 0 < scale <= largest):
            raise ValueError(f"counters are {counters}")
        self.updates, self.scaler.scale, self.scaler.num_good = updates, scale, num_good

    def state_of(self, master: "MasterWeight") -> dict[str, Tensor]:
        """What has to be saved of a parameter besides itself: this rank's parts, and the number of its updates."""
        state = dict(master.state)
        return state if master.dtype == torch.float32 else {**state, "master": master.current}

    def load_state(self, master: "MasterWeight", state: dict[str, Tensor]) -> None:
        """Restores what `state_of` returned."""
        if "master" in state:
            master.current.copy_(state["master"])
        self._set_state(master, {key: state[key].clone() for key in state.keys() - {"master"}})


class LossScaler:
    """Keeps float16 gradients in range: doubles the scale after 200 good updates, halves it after a bad one.

    Below 6e-8 a float16 is 0, and many gradients are. The loss is multiplied before the backward pass, so that all
    gradients are larger by that factor, and they are divided by it in float32. Too large a factor overflows to infinity
    somewhere, which is noticed and costs one update.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = 2.0**15 if enabled else 1.0
        self.num_good = 0

    def update(self, finite: bool) -> bool:
        """-> whether a bad update is the scale's fault, so that the next one may succeed. At a scale below 1 the
        gradient itself is out of range."""
        if not self.enabled:
            return False
        if finite:
            self.num_good += 1
            if self.num_good % 200 == 0:
                self.scale *= 2.0
            return False
        self.scale, self.num_good = self.scale / 2.0, 0
        return self.scale >= 1.0


class MasterWeight:
    """The float32 tensor that the optimizer updates for one parameter, and how gradients get to it.

    A float32 parameter is updated as it is, and of a sharded one the part that this rank holds. Others (bfloat16,
    float16) get a float32 copy: an update is often smaller than their resolution, and would be rounded away each time.
    Their gradients are summed over micro-batches in float32 for the same reason.
    """

    def __init__(self, name: str, parameter: nn.Parameter, layout: ShardingLayout | None) -> None:
        self.name, self.parameter = name, parameter
        self.dtype = parameter.dtype if layout is None else layout[name].dtype
        """The data type in which the model computes with it."""
        self.is_copy = parameter.dtype != torch.float32
        self.weight = parameter
        if self.is_copy or (layout is not None and layout.mesh.is_sharded):
            self.weight = nn.Parameter(local_tensor(parameter).float())
        self.state: dict[str, Tensor] = {}
        """AdamW's `step`, `exp_avg` and `exp_avg_sq`, from the first update on."""
        self.on_host: dict[str, Tensor] = {}
        """Places in the host's memory of the moments and the master (`weight`), if they are offloaded."""
        self.accumulated: Tensor | None = None
        if self.is_copy:
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, low: Tensor) -> None:
        """The first micro-batch's gradient is kept as it is until there is another one: with one micro-batch per update
        no float32 copy is made."""
        assert low.grad is not None
        if self.accumulated is None:
            self.accumulated = low.grad
        else:
            self.accumulated = self.accumulated.float().add_(low.grad)
        low.grad = None

    @property
    def received(self) -> Tensor | None:
        """The gradient, in float32 or, of a single micro-batch, in the parameter's dtype."""
        if self.is_copy:
            return self.accumulated
        return None if self.parameter.grad is None else local_tensor(self.parameter.grad)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient, float32."""
        if self.is_copy and self.accumulated is not None:
            self.accumulated = self.accumulated.float()
        return self.received

    def start_gradient(self) -> None:
        """Sets the gradient to zero, where this rank has none for the parameter but another one has."""
        zeros = torch.zeros_like(self.parameter, dtype=torch.float32)
        if self.is_copy:
            self.accumulated = zeros
        else:
            self.parameter.grad = zeros

    def clear_gradient(self) -> None:
        self.accumulated = self.parameter.grad = None

    @property
    def current(self) -> Tensor:
        """The float32 weights, or this rank's part of them. (FSDP may move the memory of a shard.)"""
        return self.weight.detach() if self.is_copy else local_tensor(self.parameter)

    def to_device(self) -> None:
        """Brings master and moments to where the optimizer computes."""
        device = local_tensor(self.parameter).device
        if self.weight is not self.parameter:
            self.weight.data = self.current.to(device)
        for key, value in self.state.items():
            self.state[key] = value.to(device)

    def copy_to_parameter(self) -> None:
        """Rounds the new weights into the model's parameter."""
        if self.is_copy:
            self.parameter.copy_(self.weight)


UpdatedPart = tuple[MasterWeight, slice, Tensor, Tensor, Tensor]
"""A part of a flat parameter, and of its master and moments what is on the device."""


class StateSlots:
    """Memory of the device through which states pass while they are updated. Everything is queued: the host does not
    wait. On a CPU the copies are made one after the other."""

    def __init__(self, kinds: dict[str, torch.dtype], largest: int, device: torch.device) -> None:
        """`largest`: numbers of the largest parameter."""
        size = min(OPTIMIZER_SLOT_SIZE, largest)
        self.slots = [
            {key: torch.empty(size, dtype=dtype, device=device) for key, dtype in kinds.items()}
            for _ in range(OPTIMIZER_SLOTS)
        ]
        self.emptied: list[torch.cuda.Event | None] = [None] * OPTIMIZER_SLOTS
        self.next = 0
        self.computing = self.incoming = self.outgoing = None
        if device.type == "cuda":
            self.computing = torch.cuda.current_stream(device)
            self.incoming, self.outgoing = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.incoming.wait_stream(self.computing)  # others may still compute with what the slots' memory was

    @contextmanager
    def lent(self, on_host: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The states on the device. What they are at the end of the block goes back to the host."""
        number, self.next = self.next, (self.next + 1) % OPTIMIZER_SLOTS
        states = {key: self.slots[number][key][: len(value)] for key, value in on_host.items()}
        with torch.cuda.stream(self.incoming):
            wait_for(self.incoming, self.emptied[number])
            for key, value in on_host.items():
                states[key].copy_(value, non_blocking=True)
        wait_for(self.computing, event_of(self.incoming))
        yield states
        with torch.cuda.stream(self.outgoing):
            wait_for(self.outgoing, event_of(self.computing))
            for key, value in on_host.items():
                value.copy_(states[key], non_blocking=True)
        self.emptied[number] = event_of(self.outgoing)

    def finish(self) -> None:
        """Whoever waits for the stream that computes, waits for all copies, too."""
        wait_for(self.computing, event_of(self.outgoing))


def event_of(stream: "torch.cuda.Stream | None") -> "torch.cuda.Event | None":
    return None if stream is None else stream.record_event()


def wait_for(stream: "torch.cuda.Stream | None", event: "torch.cuda.Event | None") -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def sum_gradients(masters: list[MasterWeight], layout: ShardingLayout) -> None:
    """Sums what the backward pass has not: over replicas, within tensor groups, and of an embedding that is also the
    head over the two ends of a pipeline."""
    mesh = layout.mesh
    if mesh.replicas is not None:
        mesh.agree(lambda: sum_over_replicas(masters, mesh))
    if not mesh.is_sharded:
        return
    tied = [master for master in masters if len(layout[master.name].stages) > 1]
    for master in tied:
        if master.gradient is None:
            master.start_gradient()  # a critic has no use for the embedding at its end
    mesh.sum_ends_([master.gradient for master in tied if master.gradient is not None], "pipeline")
    gradients = [(layout[master.name], master.gradient) for master in masters if master.gradient is not None]
    mesh.sum_([gradient for sharding, gradient in gradients if sharding.is_partial], "tensor")
    # Equal on all ranks of a tensor group but for the order of atomic sums on a GPU; from here on to the last bit, or
    # copies of one parameter would drift apart.
    same = [gradient for sharding, gradient in gradients if sharding.cut is None and not sharding.is_partial]
    mesh.copy_first_(same, "tensor")


def sum_over_replicas(masters: list[MasterWeight], mesh: ProcessMesh) -> None:
    # An expert that no token of this rank went to has no gradient here; all ranks must reduce the same list of tensors.
    has_gradient = torch.tensor([master.gradient is not None for master in masters], dtype=torch.float32)
    mesh.sum_over_copies_([has_gradient])
    wanted = [master for master, num_ranks in zip(masters, has_gradient.tolist(), strict=True) if num_ranks]
    for master in wanted:
        if master.gradient is None:
            master.start_gradient()
    mesh.sum_over_copies_([one.gradient for one in wanted if one.gradient is not None], mesh.gradient_dtype)


def total_norm(masters: list[MasterWeight], layout: ShardingLayout | None) -> Tensor:
    """Norm of the whole gradient, on its device. Sharded parts are squared and summed over the ranks that hold
    different ones: a parameter that is not cut is the same on all ranks of a tensor group, and counts once, as does an
    embedding at both ends of a pipeline."""
    if layout is None or not layout.mesh.is_sharded:
        gradients = [master.received for master in masters if master.received is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)))
        return norm
    squares, stage = torch.zeros(2, dtype=torch.float64), layout.mesh.rank_in("pipeline")
    held = [(layout[master.name], master.gradient) for master in masters if layout[master.name].stages[0] == stage]
    counted = [(int(sharding.cut is not None), gradient) for sharding, gradient in held if gradient is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for _, gradient in counted]
    for (kind, _), norm in zip(counted, torch.stack(norms).cpu() if norms else [], strict=True):  # waits once
        squares[kind] += norm**2
    squares = layout.mesh.sum_numbers(squares, "sharded")
    cut = layout.mesh.sum_numbers(squares[1:], "tensor")
    norm = layout.mesh.sum_numbers(squares[0] + cut[0], "pipeline").sqrt()
    # NCCL adds in the order of each group's ring. Ranks that clip by another norm would drift apart.
    layout.mesh.copy_first_([norm], "copy")
    # On a GPU the update is one fused pass. Offloaded gradients are on the host, and so is theirs.
    return norm.to(counted[0][1].device, torch.float32) if counted and counted[0][1].is_cuda else norm
