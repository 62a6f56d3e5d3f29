"""What the optimizer sees of each parameter, and what happens to gradients between the processes of a mesh."""

import torch
from torch import Tensor, nn

from corral.train.layout import Layout, local_tensor


class Slot:
    """One parameter: the tensor that the optimizer updates, float32, and how gradients get to it.

    A float32 parameter is updated as it is, and of a sharded one the part that this rank holds. Others (bfloat16,
    float16) get a float32 master copy, and their gradients are summed over micro-batches in float32.
    """

    def __init__(self, name: str, parameter: nn.Parameter, layout: Layout | None) -> None:
        self.name, self.parameter = name, parameter
        self.dtype = parameter.dtype if layout is None else layout.spreads[name].dtype
        """In which the model computes with it."""
        self.is_sharded = layout is not None and layout.mesh.is_sharded
        self.is_copy = parameter.dtype != torch.float32
        self.master = parameter
        if self.is_sharded or self.is_copy:
            self.master = nn.Parameter(local_tensor(parameter).float())
        self.total: Tensor | None = None
        if self.is_copy:
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, low: Tensor) -> None:
        """The first micro-batch's gradient is kept as it came, until there is another one."""
        assert low.grad is not None
        if self.total is None:
            self.total = low.grad
        else:
            self.total = self.total.float().add_(low.grad)
        low.grad = None

    @property
    def received(self) -> Tensor | None:
        """The gradient, in float32 or, where it came in one piece, as it came."""
        if self.is_copy:
            return self.total
        return None if self.parameter.grad is None else local_tensor(self.parameter.grad)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient, float32."""
        if self.is_copy and self.total is not None:
            self.total = self.total.float()
        return self.received

    def start_gradient(self) -> None:
        """At zero, where this rank has seen nothing of the parameter, but another one has."""
        zeros = torch.zeros_like(self.parameter, dtype=torch.float32)
        if self.is_copy:
            self.total = zeros
        else:
            self.parameter.grad = zeros

    def clear(self) -> None:
        self.total = self.parameter.grad = None

    @property
    def current(self) -> Tensor:
        """The float32 weights, or this rank's part of them. (FSDP may move the memory of a shard.)"""
        return self.master.detach() if self.is_copy else local_tensor(self.parameter)

    def attach(self) -> None:
        """The master is where the optimizer computes."""
        if self.master is not self.parameter:
            self.master.data = self.current.to(local_tensor(self.parameter).device)

    def publish(self) -> None:
        """The model computes with the new weights from here on."""
        if self.is_copy:
            self.parameter.copy_(self.master)
        if self.master is not self.parameter:
            self.master.grad = None


def sum_gradients(slots: list[Slot], layout: Layout) -> None:
    """What the backward pass has not summed: over replicas where nothing is sharded, and within tensor groups."""
    mesh = layout.mesh
    if not mesh.is_sharded:
        sum_over_replicas(slots, layout)
        return
    gradients = [(layout.spreads[slot.name], slot.gradient) for slot in slots if slot.gradient is not None]
    mesh.sum_([gradient for spread, gradient in gradients if spread.is_partial], "tensor")
    # Equal on all ranks of a tensor group but for the order of atomic sums on a GPU; from here on to the last bit.
    same = [gradient for spread, gradient in gradients if spread.cut is None and not spread.is_partial]
    mesh.copy_first_(same, "tensor")


def sum_over_replicas(slots: list[Slot], layout: Layout) -> None:
    mesh = layout.mesh
    if mesh.shape.size == 1:
        return
    seen = torch.tensor([slot.gradient is not None for slot in slots], dtype=torch.float32)
    mesh.sum_([seen], "replicate")
    wanted = [slot for slot, ranks in zip(slots, seen.tolist(), strict=True) if ranks]
    for slot in wanted:
        if slot.gradient is None:
            slot.start_gradient()
    mesh.sum_([slot.gradient for slot in wanted if slot.gradient is not None], "replicate")


def total_norm(slots: list[Slot], layout: Layout | None) -> Tensor:
    """Of the whole gradient, where it is. Parts are squared and added up over the ranks that hold different ones."""
    if layout is None or not layout.mesh.is_sharded:
        gradients = [slot.received for slot in slots if slot.received is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)))
        return norm
    squares = torch.zeros(2, dtype=torch.float64)
    for slot in slots:
        if slot.gradient is not None:
            is_cut = layout.spreads[slot.name].cut is not None
            squares[int(is_cut)] += torch.linalg.vector_norm(slot.gradient, dtype=torch.float64).cpu() ** 2
    squares = layout.mesh.sum_squares(squares, "sharded")
    cut = layout.mesh.sum_squares(squares[1:], "tensor")
    return (squares[0] + cut[0]).sqrt()
