"""Copies of a model: one takes the states of another, and one that is gone keeps no other waiting."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from sharded_cases import backward, build_model, deviation, mesh_of, own_packs, policy_of, weights_of
from team import Team
from trajectories import small_batch

from corral.recipe.mesh import MeshShape
from corral.training.replicas import ReplicaLost
from corral.training.sharding import local_tensor

COPIES = [MeshShape(replicate=2), MeshShape(replicate=2, shard=2), MeshShape(replicate=2, pipeline=2)]


def test_ranks_of_a_copy_differ_in_everything_but_the_copy() -> None:
    shape = MeshShape(pipeline=2, replicate=3, shard=2)
    assert [shape.ranks_of_copy(copy) for copy in range(3)] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert [shape.place_in_copies(rank) for rank in (0, 3, 10)] == [(0, 0), (1, 1), (2, 2)]


def states_after_loss(shape: MeshShape, dtype: torch.dtype) -> list[float]:
    """A trainer makes two updates, another one of the last copy none. It takes the first copy's states, and both make
    one more. Returns how far its weights, masters and moments are from what they would be; and its counter."""
    mesh = mesh_of(shape)
    assert mesh is not None
    assert mesh.replicas is not None
    packs, trained = own_packs(small_batch(), mesh), policy_of(build_model("llama", dtype), mesh)
    for _ in range(2):
        backward(trained, packs)
        trained.step()
    assert trained.optimizer is not None
    for master in trained.optimizer.masters:  # as loaded from a checkpoint, where keys come in any order
        master.state = dict(reversed(master.state.items()))
    late = trained if mesh.replicas.copy == 0 else policy_of(build_model("llama", dtype), mesh)
    if late is not trained:
        backward(late, packs)  # what was interrupted
    mesh.any(False)
    late.copy_from(0)
    assert late.optimizer is not None
    same = [deviation(weights_of(trained), weights_of(late))]
    for own, other in zip(trained.optimizer.masters, late.optimizer.masters, strict=True):
        expected, found = trained.optimizer.state_of(own), late.optimizer.state_of(other)
        assert expected.keys() == found.keys()
        same += [float((expected[key] - found[key]).abs().max()) for key in expected if expected[key].numel()]
    backward(late, packs)
    late.step()
    return [max(same), late.optimizer.updates]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((torch.float32, shape) for shape in COPIES),
        (torch.bfloat16, COPIES[0]),
        *(pytest.param(torch.bfloat16, shape, marks=pytest.mark.slow) for shape in COPIES[1:]),
    ],
    ids=str,
)
def test_a_copy_takes_the_states_of_another_to_the_bit(
    team: Callable[[int], Team], shape: MeshShape, dtype: torch.dtype
) -> None:
    assert team(shape.size).run(states_after_loss, shape, dtype) == [[0.0, 3]] * shape.size


def wait_for_copy(shape: MeshShape) -> tuple[str, bool]:
    """The last copy does not take part in an update. Returns what the others wait for ends with, and whether their
    weights are as before."""
    mesh = mesh_of(shape)
    assert mesh is not None
    replicas = mesh.replicas
    assert replicas is not None
    policy = policy_of(build_model("llama"), mesh)
    before = weights_of(policy)
    backward(policy, own_packs(small_batch(), mesh))
    if replicas.copy == 1:
        time.sleep(2)
        return "left out", True
    position = shape.place_in_copies(mesh.rank)[1]
    threading.Timer(0.5 + 0.5 * position, replicas.abort).start()
    try:
        policy.step()
    except ReplicaLost as lost:
        return str(lost).partition(": ")[0], deviation(before, weights_of(policy)) == 0
    return "went on", False


@pytest.mark.gpu
@pytest.mark.parametrize("shape", COPIES[:2], ids=str)
@pytest.mark.slow
def test_a_copy_makes_no_update_when_another_is_gone(shape: MeshShape) -> None:
    team = Team(shape.size)  # their connection is of no use afterwards
    try:
        answers = team.run(wait_for_copy, shape)
    finally:
        team.close()
    assert [answer for answer in answers if answer[0] != "left out"] == [
        ("another copy of the model was lost", True)
    ] * shape.copy.size


def elements_summed(shape: MeshShape, num_micro_batches: int) -> tuple[int, int]:
    """-> (elements that this rank has summed with other copies in an update, elements that it holds and, for each
    parameter, whether it has a gradient)"""
    mesh = mesh_of(shape)
    assert mesh is not None
    replicas = mesh.replicas
    assert replicas is not None
    policy = policy_of(build_model("llama"), mesh)
    assert policy.optimizer is not None
    summed, sum_with_copies = [], replicas.sum_

    def count(flat: torch.Tensor) -> None:
        summed.append(flat.numel())
        sum_with_copies(flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "sum_", count)
        for pack in small_batch().pack(10_000):
            for _ in range(num_micro_batches):
                backward(policy, [pack])
        assert not summed  # not while gradients are computed
        policy.step()
    return sum(summed), sum(local_tensor(p).numel() + 1 for p in policy.model.parameters())


@pytest.mark.parametrize("shape", COPIES[:2], ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_copies_sum_their_gradients_once_in_an_update(
    team: Callable[[int], Team], shape: MeshShape, num_micro_batches: int
) -> None:
    for summed, held in team(shape.size).run(elements_summed, shape, num_micro_batches):
        assert summed == held
