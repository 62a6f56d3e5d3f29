"""1F1B as the paper draws it: every order of turns comes to an end, and no stage holds more than it must. Nor do stages
wait for each other in a circle where they talk as by NCCL."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from corral.training.pipeline_schedule import PipelineSchedule, schedule

SIZES = [(size, number) for size, number in product((2, 3, 4, 7), (0, 1, 2, 5, 12))]


@pytest.mark.parametrize(("size", "num_micro_batches"), SIZES)
def test_all_turns_are_made_with_as_little_in_flight_as_there_can_be(size: int, num_micro_batches: int) -> None:
    """A stage waits for the forward pass of the one before it, and for the backward pass of the one behind it."""
    left = [schedule(rank, size, num_micro_batches) for rank in range(size)]
    made: list[list[tuple[bool, int]]] = [[] for _ in range(size)]
    num_rounds = 0
    while any(left):
        before = [set(turns) for turns in made]
        for rank in range(size):
            is_forward, _ = turn = left[rank][0] if left[rank] else (True, -1)
            neighbor = rank - 1 if is_forward else rank + 1
            if left[rank] and (neighbor not in range(size) or turn in before[neighbor]):
                made[rank].append(left[rank].pop(0))
                in_flight = sum(1 if forward else -1 for forward, _ in made[rank])
                assert 0 <= in_flight <= size - rank
        num_rounds += 1
        assert num_rounds <= 2 * (num_micro_batches + size - 1), "more turns are idle than in the paper"
    for turns in made:
        for kind in (True, False):
            assert [index for is_forward, index in turns if is_forward == kind] == list(range(num_micro_batches))


# --- stages that talk as by NCCL


class Circle(Exception):
    """All threads wait, and none of what they wait for can happen."""


class Op(NamedTuple):
    """One end of a transfer, as `dist.P2POp` has it."""

    op: Callable[..., Any]
    tensor: Tensor
    group: "Side"
    group_peer: int


@dataclass(eq=False)
class Call:
    """What a rank has launched at once: all of it comes to its end together."""

    ends: list[tuple[tuple[Any, ...], Tensor]]
    """((communicator, sender, receiver, whether it sends), tensor)"""
    before: "Call | None"
    """The call before it in the queue of the communicator."""
    is_done: bool = False


class Nccl:
    """The rules of NCCL that can make a circle, read strictly, for ranks that are threads. Calls of a communicator run
    one after the other on each rank. A batch is one call, on the communicator of the group; without one, two ranks have
    their own for each group. Before the first transfer in a direction both hosts wait for each other, in that call, of
    which nothing has begun. A host waits for each work."""

    def __init__(self, num_threads: int) -> None:
        self.changed, self.num_threads, self.is_stuck = threading.Condition(), num_threads, False
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.connecting: set[tuple[Any, ...]] = set()
        self.last: dict[tuple[Any, int], Call] = {}
        self.calls: list[Call] = []
        self.launched: dict[tuple[Any, ...], list[tuple[Call, Tensor]]] = defaultdict(list)
        self.met: Counter[Any] = Counter()

    def until(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            self.waiting[threading.get_ident()] = holds
            self.changed.notify_all()
            while not holds():
                self.is_stuck |= len(self.waiting) == self.num_threads and not any(
                    one() for one in self.waiting.values()
                )
                if self.is_stuck:
                    self.changed.notify_all()
                    raise Circle
                self.changed.wait()
            del self.waiting[threading.get_ident()]

    def meet(self, key: Any, size: int) -> None:
        """Two ranks compute together, as tensor parallel ones do."""
        with self.changed:
            self.met[key] += 1
        self.until(lambda: self.met[key] == size)

    def launch(self, side: "Side", communicator: Any, operations: Sequence[Op]) -> "Work":
        ends = []
        for operation in operations:
            sends = operation.op is dist.isend
            pair = (side.rank, operation.group_peer)
            ends.append(((communicator, *(pair if sends else pair[::-1]), sends), operation.tensor))
        with self.changed:
            self.connecting.update(place for place, _ in ends)
        self.until(lambda: all((*place[:-1], not place[-1]) in self.connecting for place, _ in ends))
        with self.changed:
            call = Call(ends, self.last.get((communicator, side.rank)))
            self.last[communicator, side.rank] = call
            self.calls.append(call)
            for place, tensor in ends:
                self.launched[place].append((call, tensor))
            while any(self._finish(one) for one in self.calls if not one.is_done):
                pass
            self.changed.notify_all()
        return Work(self, call)

    def _finish(self, call: Call) -> bool:
        """A call ends when it has begun and the other end of each of its transfers has."""
        if not self._has_begun(call):
            return False
        for place, tensor in call.ends:
            index = next(i for i, (one, _) in enumerate(self.launched[place]) if one is call)
            others = self.launched[(*place[:-1], not place[-1])]
            if index >= len(others) or not self._has_begun(others[index][0]):
                return False
            if not place[-1]:
                tensor.detach().copy_(others[index][1])
        call.is_done = True
        return True

    def _has_begun(self, call: Call) -> bool:
        return call.before is None or call.before.is_done


@dataclass
class Work:
    nccl: Nccl
    call: Call

    def wait(self) -> None:
        self.nccl.until(lambda: self.call.is_done)


@dataclass
class Side:
    """A process group, as one of its ranks has it."""

    nccl: Nccl
    name: tuple[str, int]
    rank: int


def isend(tensor: Tensor, group: Side, group_dst: int) -> Work:
    pair = frozenset({group.rank, group_dst})
    return group.nccl.launch(group, (group.name, pair), [Op(dist.isend, tensor.clone(), group, group_dst)])


def irecv(tensor: Tensor, group: Side, group_src: int) -> Work:
    pair = frozenset({group.rank, group_src})
    return group.nccl.launch(group, (group.name, pair), [Op(dist.irecv, tensor, group, group_src)])


def batch_isend_irecv(operations: list[Op]) -> list[Work]:
    return [operations[0].group.nccl.launch(operations[0].group, operations[0].group.name, operations)]


@dataclass
class Mesh:
    """One rank of `size` stages and two columns, which compute together."""

    nccl: Nccl
    rank: int
    size: int
    column: int
    device: torch.device = torch.device("cpu")
    groups: dict[str, Side] = field(init=False)
    gradients: Side = field(init=False)

    def __post_init__(self) -> None:
        self.groups = {"pipeline": Side(self.nccl, ("pipeline", self.column), self.rank)}
        self.gradients = Side(self.nccl, ("gradients", self.column), self.rank)

    def rank_in(self, _: str) -> int:
        return self.rank

    def size_of(self, _: str) -> int:
        return self.size

    def max(self, number: int, _: str) -> int:
        return number


def gradients_of_first_stage(mesh: Mesh, num_micro_batches: int) -> list[float]:
    """Each stage doubles what it gets; the loss of micro-batch i is its sum times i + 1. Before, the same are computed
    without gradient, as log-probs are."""
    stage: Any = SimpleNamespace(width=2, dtype=torch.float32)
    try:
        pipeline = PipelineSchedule(mesh, stage)  # type: ignore[arg-type]
        num_tokens = [1 + index % 3 for index in range(num_micro_batches)]
        inputs = [torch.ones(number, 2, requires_grad=True) for number in num_tokens]

        def forward(index: int, received: Tensor | None) -> Tensor:
            mesh.nccl.meet((mesh.rank, "forward", index), 2)
            output = 2 * (inputs[index] if received is None else received)
            return (index + 1) * output.sum() if mesh.rank == mesh.size - 1 else output

        def backward(index: int, output: Tensor, gradient: Tensor | None) -> None:
            mesh.nccl.meet((mesh.rank, "backward", index), 2)
            output.backward(gradient)

        for number in num_tokens:
            with torch.no_grad():
                pipeline.compute(
                    number, lambda received, own=torch.ones(number, 2): own if received is None else received
                )
        pipeline.train(num_tokens, forward, backward)
        return [] if mesh.rank else [float(one.grad[0, 0]) for one in inputs if one.grad is not None]
    finally:
        with mesh.nccl.changed:
            mesh.nccl.num_threads -= 1
            mesh.nccl.changed.notify_all()


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 9, 17])
@pytest.mark.parametrize("size", range(2, 9))
def test_stages_do_not_wait_for_each_other_in_a_circle(
    monkeypatch: pytest.MonkeyPatch, size: int, num_micro_batches: int
) -> None:
    for name, function in (("isend", isend), ("irecv", irecv), ("batch_isend_irecv", batch_isend_irecv), ("P2POp", Op)):
        monkeypatch.setattr(dist, name, function)
    nccl = Nccl(2 * size)
    with ThreadPoolExecutor(2 * size) as threads:
        ranks = [Mesh(nccl, rank, size, column) for column in range(2) for rank in range(size)]
        found = [threads.submit(gradients_of_first_stage, mesh, num_micro_batches) for mesh in ranks]
    expected = [2.0**size * (index + 1) for index in range(num_micro_batches)]
    assert [one.result() for one in found if one.result()] == [expected, expected]
