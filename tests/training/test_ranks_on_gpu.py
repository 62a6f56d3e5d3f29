"""Ranks that share a GPU, connected by NCCL: weights go from some to others, and what dies ends nothing else.

gloo fails at once where NCCL waits, and has no watchdog that ends a process: on a CPU these tests would show little.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import within
from sharded_cases import backward, build_model, deviation, own_packs, policy_of, weights_of
from team import DEVICE, Team, on_gpu_only
from torch import Tensor
from trajectories import small_batch

from corral.model.model_parallel import all_gather
from corral.recipe.errors import RunError
from corral.recipe.mesh import MeshShape
from corral.runtime.transfer_channels import CollectiveChannel
from corral.runtime.worker import Worker
from corral.training.process_mesh import ProcessMesh
from corral.training.replicas import ReplicaLost

pytestmark = [pytest.mark.gpu, pytest.mark.slow, on_gpu_only]

SHORT = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"}
"""Torch ends a process a minute after an error, or eight minutes: here 2 s and 5 s after it."""
ALIVE_S = 20
"""How long a process must outlive the loss of another one."""
TIMEOUT_S = within(20)
BUCKET = 1 << 20
SIZES = [60 * (1000 + 7 * number) for number in range(40)]
KEPT: dict[str, Any] = {}
"""What a rank keeps between two calls."""


@pytest.fixture
def team_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Team]]:
    """Makes a team that is no world, and in which ranks may die."""
    for name, value in SHORT.items():
        monkeypatch.setenv(name, value)
    teams: list[Team] = []

    def of_size(size: int) -> Team:
        teams.append(Team(size, has_world=False))
        return teams[-1]

    yield of_size
    for one in teams:
        one.close()


def rank() -> int:
    return int(os.environ["RANK"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- weights


def open_channel(num_ranks: int) -> str | None:
    """Returns where the ends meet, which the first one says. Ranks from `num_ranks` on have none."""
    if rank() >= num_ranks:
        return None
    KEPT["channel"] = CollectiveChannel("127.0.0.1", DEVICE, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET)
    address: str = KEPT["channel"].open() if rank() == 0 else ""
    return address


def join(rendezvous: str, num_ranks: int, num_senders: int = 1) -> str:
    """Returns the error, if there is one."""
    try:
        KEPT["channel"].join(rendezvous, rank(), num_ranks, num_senders)
    except RunError as error:
        return str(error)
    return ""


def transfer(num_senders: int, gather: Callable[[int], Tensor], dies: int = -1) -> str:
    """Sends weights, or receives them and compares each with its number; a receiver may die after the third. Returns
    the error, if there is one."""
    channel = KEPT["channel"]
    try:
        if rank() < num_senders:
            channel.send((str(number), gather(number)) for number in range(len(SIZES)))
        else:
            layout = [(str(number), torch.Size([size]), torch.float32) for number, size in enumerate(SIZES)]
            for number, (_, tensor) in enumerate(channel.receive(None, layout)):
                assert tensor.unique().tolist() == [number]
                if number == 3 and rank() == dies:
                    die()
    except RunError as error:
        return str(error)
    return ""


def gathered_by(group: dist.ProcessGroup, number: int) -> Tensor:
    part = torch.full((SIZES[number] // group.size(),), float(number), device=DEVICE)
    return all_gather(part, group)


def transfer_twice(rendezvous: str, num_senders: int) -> list[str]:
    """The senders put weights together in a group of theirs while they send."""
    trainers = dist.new_group(list(range(num_senders)))
    found = [join(rendezvous, 4, num_senders)]
    for _ in range(2):
        found.append(transfer(num_senders, lambda number: gathered_by(trainers, number)))
        one = torch.ones(1, device=DEVICE)
        dist.all_reduce(one)
        assert int(one) == 4, "all have received it"
        KEPT["channel"].release()
    return found


@pytest.mark.parametrize("num_senders", [1, 2])
def test_ranks_of_a_mesh_send_weights_while_they_gather_them(team: Callable[[int], Team], num_senders: int) -> None:
    ranks = team(4)
    rendezvous = ranks.run(open_channel, 4)[0]
    assert ranks.run(transfer_twice, rendezvous, num_senders) == [["", "", ""]] * 4


def transfer_slowly(gather_s: float, dies: int) -> str:
    def gather(number: int) -> Tensor:
        time.sleep(gather_s)
        return torch.full((SIZES[number],), float(number), device=DEVICE)

    error = transfer(1, gather, dies)
    if dies >= 0:
        time.sleep(ALIVE_S)
    return error


@pytest.mark.parametrize("gather_s", [0.0, 0.5], ids=["while the sender waits", "while the sender gathers"])
def test_a_receiver_that_dies_ends_no_other_process(team_of: Callable[[int], Team], gather_s: float) -> None:
    ranks = team_of(3)
    rendezvous = ranks.run(open_channel, 3)[0]
    assert ranks.run(join, rendezvous, 3) == ["", "", ""]
    sender, receiver, _ = ranks.run(transfer_slowly, gather_s, 2, dying=[2])
    # NCCL passes weights on from one receiver to the next: a sender that does not gather may be done before one dies.
    assert "a process of the transfer died or hangs" in sender or (sender == "" and gather_s == 0)
    assert "did not arrive" in receiver
    left = Left(ranks, 2)
    rendezvous = left.run(open_channel, 2)[0]
    assert left.run(join, rendezvous, 2) == ["", ""]
    assert left.run(transfer_slowly, 0.0, -1) == ["", ""]


class Left(Team):
    """The first ranks of a team, whose others are dead."""

    def __init__(self, team: Team, size: int) -> None:
        self.pipes, self.processes, self.num_runs = team.pipes[:size], team.processes[:size], team.num_runs


def join_alone(rendezvous: str) -> tuple[str, float]:
    """-> (error, seconds until it came)"""
    if rank() > 0:
        return "", 0.0
    started = time.monotonic()
    return join(rendezvous, 2), time.monotonic() - started


def test_a_receiver_that_never_comes_is_waited_for_no_longer_than_the_limit(team_of: Callable[[int], Team]) -> None:
    ranks = team_of(2)
    rendezvous = ranks.run(open_channel, 2)[0]
    (error, took_s), _ = ranks.run(join_alone, rendezvous)
    assert "not all of 2 processes joined" in error
    assert took_s < TIMEOUT_S + within(10)
    rendezvous = ranks.run(open_channel, 2)[0]  # it does come in the end
    assert ranks.run(join, rendezvous, 2) == ["", ""]
    assert ranks.run(transfer_slowly, 0.0, -1) == ["", ""]


# --- copies

COPIES = MeshShape(replicate=2, shard=2)


def open_worlds() -> list[str]:
    KEPT["worker"] = worker = Worker(rank(), COPIES.size, "127.0.0.1", timeout_s=60.0)
    worker.context.device = DEVICE
    return [worker.open_rendezvous() for _ in range(3)]


def join_worlds(rendezvous: list[str]) -> float:
    """The world of this copy, and the connection to the other one. Then an update; returns its gradient's norm."""
    worker, (copy, _) = KEPT["worker"], COPIES.place_in_copies(rank())
    worker.join_world(rendezvous[copy], COPIES)
    worker.join_replicas(rendezvous[2], COPIES)
    mesh = ProcessMesh.build(COPIES, DEVICE, 60.0, worker.context.replicas)
    KEPT["policy"] = policy = policy_of(build_model("llama"), mesh)
    backward(policy, own_packs(small_batch(), mesh))
    return policy.step().gradient_norm


def update_while_a_copy_dies() -> tuple[str, bool, int]:
    """The second copy dies when gradients are summed. -> (error, whether the weights are as before, sum over the copy's
    own world, much later)"""
    policy = KEPT["policy"]
    replicas, before = policy.mesh.replicas, weights_of(policy)
    backward(policy, own_packs(small_batch(), policy.mesh))
    if replicas.copy == 1:
        replicas.sum_ = lambda flat: die()
    threading.Timer(5.0, replicas.abort).start()
    try:
        policy.step()
        return "the update was made", False, 0
    except ReplicaLost as lost:
        error = str(lost)
    time.sleep(ALIVE_S)
    one = torch.ones(1, device=DEVICE)
    dist.all_reduce(one)
    return error, deviation(before, weights_of(policy)) == 0, int(one)


def test_a_copy_that_dies_ends_no_other_and_changes_no_weight(team_of: Callable[[int], Team]) -> None:
    ranks = team_of(COPIES.size)
    assert len(set(ranks.run(join_worlds, ranks.run(open_worlds)[0]))) == 1
    for error, is_as_before, num_in_world in ranks.run(update_while_a_copy_dies, dying=[2, 3])[:2]:
        assert error.startswith("another copy of the model was lost")
        assert is_as_before
        assert num_in_world == 2
