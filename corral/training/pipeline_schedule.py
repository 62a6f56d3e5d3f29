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
from corral.training.process_mesh import ProcessMesh

Forward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, hidden states [tokens, width] of the stage before) -> the hidden states for the next one, or on the
last stage the loss"""
Backward = Callable[[int, Tensor, Tensor | None], None]
"""(micro-batch, what `Forward` returned for it, the gradient of it; None: it is the loss)"""


class PipelineSchedule:
    """This rank's place in a pipeline, between the stages before and behind it.

    Hidden states and gradients each have a group of their own, and no two tensors travel in one call. NCCL completes
    the calls of two ranks of a group in order, those of a batch together, and when two ranks talk for the first time
    their hosts wait for each other. A stage that received a gradient in the call in which it sends hidden states would
    wait for stages that wait for these. So links are connected at the start, one after the other along the pipeline,
    and a stage waits only for what it computes next, and for what it sent to the same neighbor before.
    """

    def __init__(self, mesh: ProcessMesh, stage: PipelineStage) -> None:
        self.mesh, self.stage = mesh, stage
        self.rank, self.size = mesh.rank_in("pipeline"), mesh.size_of("pipeline")
        self.sending: dict[int, tuple[Any, Tensor]] = {}
        """What is on its way to each neighbor. Its memory is not used for anything else until it has arrived."""
        for step in (1, -1):
            self._receive(self.rank - step, 1)
            self._send(self.rank + step, torch.zeros(1, stage.width, dtype=stage.dtype, device=mesh.device))
        self._finish_sending()

    def train(self, num_tokens: Sequence[int], forward: Forward, backward: Backward) -> None:
        """Computes micro-batches of so many tokens, forward and backward, in the order of `schedule`."""
        in_flight: deque[tuple[Tensor | None, Tensor]] = deque()
        for is_forward, index in schedule(self.rank, self.size, len(num_tokens)):
            if is_forward:
                received = self._receive(self.rank - 1, num_tokens[index])
                hidden = None if received is None else received.requires_grad_()
                output = forward(index, hidden)
                in_flight.append((hidden, output))
                self._send(self.rank + 1, output.detach())
            else:
                gradient = self._receive(self.rank + 1, num_tokens[index])
                hidden, output = in_flight.popleft()
                backward(index, output, gradient)
                if hidden is not None:
                    self._send(self.rank - 1, torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)
        self._finish_sending()

    def compute(self, num_tokens: int, forward: Callable[[Tensor | None], Tensor]) -> Tensor:
        """Computes one micro-batch without gradient. The result is that of this stage."""
        output = forward(self._receive(self.rank - 1, num_tokens))
        self._send(self.rank + 1, output)
        return output

    def _receive(self, sender: int, num_tokens: int) -> Tensor | None:
        """[tokens, width] of a neighbor. There is none beyond the ends of the pipeline."""
        if sender not in range(self.size):
            return None
        received = torch.empty(num_tokens, self.stage.width, dtype=self.stage.dtype, device=self.mesh.device)
        work: Any = dist.irecv(received, group=self._group(sender, self.rank), group_src=sender)
        work.wait()
        return received

    def _send(self, receiver: int, tensor: Tensor) -> None:
        if receiver in range(self.size):
            assert tensor.dtype == self.stage.dtype, f"hidden states are {tensor.dtype}, the model {self.stage.dtype}"
            if receiver in self.sending:
                self.sending.pop(receiver)[0].wait()
            sent = tensor.contiguous()
            self.sending[receiver] = dist.isend(sent, group=self._group(self.rank, receiver), group_dst=receiver), sent

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup:
        assert self.mesh.gradients is not None
        return self.mesh.groups["pipeline"] if sender < receiver else self.mesh.gradients

    def _finish_sending(self) -> None:
        for work, _ in self.sending.values():
            work.wait()
        self.sending.clear()


def schedule(rank: int, size: int, num_micro_batches: int) -> list[tuple[bool, int]]:
    """(whether it is a forward pass, micro-batch) of each turn of a stage."""
    num_ahead = min(size - 1 - rank, num_micro_batches)
    turns = [(True, index) for index in range(num_ahead)]
    for index in range(num_ahead, num_micro_batches):
        turns += [(True, index), (False, index - num_ahead)]
    return turns + [(False, index) for index in range(num_micro_batches - num_ahead, num_micro_batches)]
