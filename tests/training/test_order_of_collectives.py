"""Ranks never wait for each other for ever, where each collective blocks until all members of its group are there, as
NCCL's may. gloo's broadcast ends on its sender before anybody receives, and passes some orders that NCCL does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from sharded_cases import build_model, mesh_of, policy_of, shapes, weights_of
from team import Team
from test_sharded_checkpoint import advance, contents, load_and_save
from test_sharded_training import name
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from corral.recipe.mesh import MeshShape

pytestmark = pytest.mark.slow


class Call(NamedTuple):
    kind: str
    group: str
    ranks: tuple[int, ...]
    """All that take part; of a transfer the sender and the receiver."""
    num_bytes: int = 0


class Recording(TorchDispatchMode):
    """What this rank calls of torch.distributed, by whomever, FSDP included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if func.namespace == "c10d":
            boxed = next(
                one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())
            )
            group, kind = dist.ProcessGroup.unbox(boxed), func._schema.name.removeprefix("c10d::")
            ranks = dist.get_process_group_ranks(group)
            if kind in ("send", "recv_"):
                ends = (dist.get_rank(), ranks[args[2]])
                ranks = ends if kind == "send" else ends[::-1]
            first = args[0][0] if isinstance(args[0], list) else args[0]
            num_bytes = first.nbytes if kind in ("send", "recv_", "allreduce_", "broadcast_", "_allgather_base_") else 0
            self.calls.append(Call(kind, group.group_name, tuple(ranks), num_bytes))
        return func(*args, **(kwargs or {}))


def where_ranks_wait(calls: list[list[Call]]) -> dict[int, Call]:
    """The call that each rank never returns from. A collective waits for the same one on all its ranks. What was sent
    waits for its receiver, and the next one to the same receiver for that."""
    left, on_the_way, has_changed = [own[::-1] for own in calls], dict[tuple[Any, ...], int](), True
    while has_changed:
        has_changed = False
        for rank, own in enumerate(left):
            if not own:
                continue
            kind, group, ranks, num_bytes = call = own[-1]
            if kind == "send" and (group, ranks) not in on_the_way:
                on_the_way[group, ranks] = num_bytes
            elif kind == "recv_" and on_the_way.get((group, ranks)) == num_bytes:
                del on_the_way[group, ranks]
            elif kind in ("send", "recv_") or any(left[other][-1:] != [call] for other in ranks):
                continue
            for other in (rank,) if kind in ("send", "recv_") else ranks:
                left[other].pop()
            has_changed = True
    return {rank: own[-1] for rank, own in enumerate(left) if own}


def calls_of_training(shape: MeshShape, folder: Path) -> list[Call]:
    """Those of an update, a checkpoint, a resume, a second checkpoint, and weights for engines."""
    mesh, family = mesh_of(shape), "llama" if shape.expert == 1 else "qwen3_moe"
    with Recording() as recording:
        policy = policy_of(build_model(family, torch.bfloat16), mesh)
        advance(policy, mesh, 1)
        policy.save(folder / "first")
        policy.load(folder / "first")
        assert mesh is not None
        assert policy.optimizer is not None
        for master in policy.optimizer.masters if mesh.rank % 2 else ():  # a set's order is each process' own
            master.state = dict(reversed(master.state.items()))
        policy.save(folder / "second")
        weights_of(policy)
    return recording.calls


@pytest.mark.parametrize("shape", shapes(4, with_experts=True), ids=name)
def test_no_rank_waits_for_ever_and_checkpoints_are_those_of_one_process(
    team: Callable[[int], Team], tmp_path: Path, shape: MeshShape
) -> None:
    calls = team(4).run(calls_of_training, shape, tmp_path)
    assert all(calls) == (not shape.is_whole)
    assert where_ranks_wait(calls) == {}
    load_and_save(None, torch.bfloat16, tmp_path / "first", tmp_path / "alone")
    assert contents(tmp_path / "first") == contents(tmp_path / "second") == contents(tmp_path / "alone")


def test_ranks_that_wait_in_a_circle_are_found() -> None:
    """Two groups of two that both ranks call in another order; a rank that leaves a call out; a transfer of less."""
    one, two, sent = Call("a", "1", (0, 1)), Call("a", "2", (0, 1)), Call("send", "1", (0, 1), 8)
    assert where_ranks_wait([[one, two], [one, two]]) == {}
    assert where_ranks_wait([[one, two], [two, one]]) == {0: one, 1: two}
    assert where_ranks_wait([[one, two], [two]]) == {0: one, 1: two}
    assert where_ranks_wait([[sent, one], [one, sent._replace(kind="recv_")]]) == {}
    short = sent._replace(kind="recv_", num_bytes=4)
    assert where_ranks_wait([[sent, sent], [short]]) == {0: sent, 1: short}
