"""The order in which the stages of a pipeline compute micro-batches, and what they send each other.

1F1B (Narayanan et al. 2021): a stage first computes forward as many micro-batches as there are stages behind it, then
one forward and one backward in turn, then what is left backward. So it never holds the activations of more
micro-batches than there are stages from it to the end, however many an update has. All stages know the packs, so shapes
are known and only hidden states and their gradients travel.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from corral.model.pipeline_stage import PipelineStage
from corral.training.process_mesh import ProcessMesh, exchange

Forward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, hidden states [tokens, width] of the stage before) -> the hidden states for the next one, or on the
last stage the loss"""
Backward = Callable[[int, Tensor, Tensor | None], None]
"""(micro-batch, what `Forward` returned for it, the gradient of it; None: it is the loss)"""


class PipelineSchedule:
    """This rank's place in a pipeline, between the stages before and behind it."""

    def __init__(self, mesh: ProcessMesh, stage: PipelineStage) -> None:
        self.mesh, self.stage, self.group = mesh, stage, mesh.groups["pipeline"]
        self.rank, self.size = mesh.rank_in("pipeline"), mesh.size_of("pipeline")
        mesh.max(0, "pipeline")  # NCCL wants all ranks of a group in its first call; later ones are between two

    def train(self, num_tokens: Sequence[int], forward: Forward, backward: Backward) -> None:
        """Computes micro-batches of so many tokens, forward and backward, in the order of `schedule`."""
        in_flight: deque[tuple[Tensor | None, Tensor]] = deque()
        computed: list[tuple[int, Tensor]] = []  # what the last turn computed for another stage, and for which
        for is_forward, index in schedule(self.rank, self.size, len(num_tokens)):
            neighbor = self.rank - 1 if is_forward else self.rank + 1
            received = self._exchange(computed, neighbor, num_tokens[index])
            if is_forward:
                hidden = None if received is None else received.requires_grad_()
                output = forward(index, hidden)
                in_flight.append((hidden, output))
                computed = [(self.rank + 1, output.detach())]
            else:
                hidden, output = in_flight.popleft()
                backward(index, output, received)
                computed = []
                if hidden is not None:
                    computed = [(self.rank - 1, torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)]
        self._exchange(computed)

    def compute(self, num_tokens: int, forward: Callable[[Tensor | None], Tensor]) -> Tensor:
        """Computes one micro-batch without gradient. The result is that of this stage."""
        output = forward(self._exchange([], self.rank - 1, num_tokens))
        self._exchange([(self.rank + 1, output)])
        return output

    def _exchange(
        self, computed: Sequence[tuple[int, Tensor]], neighbor: int | None = None, num_tokens: int = 0
    ) -> Tensor | None:
        """Sends what was computed to the stages that want it, and at the same time receives [tokens, width] of the
        neighbor. There is nothing to send or receive beyond the ends of the pipeline."""
        stages = range(self.size)
        operations: list[tuple[Callable[..., Any], Tensor, int]] = [
            (dist.isend, self._checked(tensor), to) for to, tensor in computed if to in stages
        ]
        received = None
        if neighbor is not None and neighbor in stages:
            received = torch.empty(num_tokens, self.stage.width, dtype=self.stage.dtype, device=self.mesh.device)
            operations.append((dist.irecv, received, neighbor))
        exchange(operations, self.group)
        return received

    def _checked(self, tensor: Tensor) -> Tensor:
        assert tensor.dtype == self.stage.dtype, f"hidden states are {tensor.dtype}, the model {self.stage.dtype}"
        return tensor.contiguous()


def schedule(rank: int, size: int, num_micro_batches: int) -> list[tuple[bool, int]]:
    """(whether it is a forward pass, micro-batch) of each turn of a stage."""
    num_ahead = min(size - 1 - rank, num_micro_batches)
    turns = [(True, index) for index in range(num_ahead)]
    for index in range(num_ahead, num_micro_batches):
        turns += [(True, index), (False, index - num_ahead)]
    return turns + [(False, index) for index in range(num_micro_batches - num_ahead, num_micro_batches)]
