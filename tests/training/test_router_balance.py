"""The load of a mixture's experts and the loss that evens it out: transformers' own, and the same on every mesh."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sharded_cases import build_model, data_rank, deviation, mesh_of, weights_of
from team import Team
from torch import Tensor
from trajectories import small_batch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as loss_of_mixtral
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as loss_of_qwen3

from corral.data.batch import Batch, Trajectory
from corral.recipe.errors import UserError
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import Optimizer
from corral.training.native_trainer import NativePolicyTrainer
from corral.training.process_mesh import ProcessMesh

Teams = Callable[[int], Team]
TOKENS = np.random.default_rng(2).integers(3, 90, 60).tolist()


def policy_with_router_loss(
    family: str, mesh: ProcessMesh | None = None, gradient_checkpointing: bool = False
) -> NativePolicyTrainer:
    return NativePolicyTrainer(
        build_model(family),
        temperature=1.0,
        logits_chunk=64,
        optimizer=Optimizer(learning_rate=1e-2, epsilon=1e-2),
        total_updates=10,
        gradient_checkpointing=gradient_checkpointing,
        mesh=mesh,
        with_router_loss=True,
    )


@pytest.mark.parametrize(("family", "theirs"), [("qwen3_moe", loss_of_qwen3), ("mixtral", loss_of_mixtral)])
def test_loss_gradient_and_counts_are_those_of_transformers(family: str, theirs: Callable[..., Tensor]) -> None:
    policy = policy_with_router_loss(family)
    [pack] = Batch.of([Trajectory.from_tokens([*TOKENS, 5])]).pack(100)  # the last token is only predicted
    loss = policy.forward_backward([(pack, lambda *_: policy.router_loss())])
    plain = build_model(f"{family}/eager")
    logits = plain.get_decoder()(torch.tensor([TOKENS]), output_router_logits=True).router_logits
    expected = theirs(logits, 12, 2)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("gate.weight" in name for name in gradients)
    ours = dict(policy.model.named_parameters())
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name].grad, gradient, atol=1e-7, rtol=1e-4)
    chosen = [layer.topk(2).indices.flatten() for layer in logits]
    assert policy.take_expert_counts() == [torch.bincount(one, minlength=12).tolist() for one in chosen]
    assert not np.any(policy.take_expert_counts())  # they were taken


def test_a_model_without_router_has_no_such_loss() -> None:
    with pytest.raises(UserError, match="router_aux_loss_coef: transformers gives no logits of a router for Llama"):
        policy_with_router_loss("llama")
    with pytest.raises(UserError, match="router_aux_loss_coef: models of the general path have no such loss"):
        policy_with_router_loss("qwen3_moe/sdpa")


def weights_and_counts(shape: MeshShape | None, gradient_checkpointing: bool) -> tuple[dict[str, Tensor], np.ndarray]:
    """After an update with the same two packs on every mesh: one for each of two data shards, or both for one."""
    mesh = mesh_of(shape)
    policy = policy_with_router_loss("qwen3_moe", mesh, gradient_checkpointing)
    batch = small_batch()
    packs = [batch.pack(1000, rows)[0] for rows in (range(5), range(5, len(batch)))]
    own = packs if mesh is None or mesh.shape.num_data == 1 else packs[data_rank(mesh) : data_rank(mesh) + 1]
    for pack in own:
        weights = torch.linspace(-0.01, 0.01, len(pack.flat))
        policy.forward_backward([(pack, lambda logprobs, _, w=weights: (w * logprobs).sum() + policy.router_loss())])
    counts = np.array(policy.take_expert_counts())
    assert not policy.step().skipped
    return weights_of(policy), counts


@pytest.mark.slow
@pytest.mark.parametrize("dimension", ["replicate", "shard", "expert", "context", "tensor"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "with gradient checkpointing"])
def test_loss_and_counts_are_the_same_on_every_mesh(team: Teams, dimension: str, checkpoints: bool) -> None:
    shape = MeshShape(**{dimension: 2})
    expected, expected_counts = weights_and_counts(None, False)
    answers = team(2).run(weights_and_counts, shape, checkpoints)
    assert all(deviation(weights, expected) < 5e-6 for weights, _ in answers)
    one_per_shard = answers[:: shape.size // shape.num_data]
    assert np.array_equal(sum(counts for _, counts in one_per_shard), expected_counts)


def loss_of_a_short_row(shape: MeshShape | None) -> float:
    """Of one row of three tokens."""
    policy = policy_with_router_loss("qwen3_moe", mesh_of(shape))
    [pack] = Batch.of([Trajectory.from_tokens([5, 6, 7], 1)]).pack(1000)
    return policy.forward_backward([(pack, lambda logprobs, _: 0.1 * logprobs.sum() + policy.router_loss())])


@pytest.mark.slow
def test_ranks_of_a_context_group_may_have_no_token(team: Teams) -> None:
    losses = team(4).run(loss_of_a_short_row, MeshShape(context=4))
    assert losses == pytest.approx([loss_of_a_short_row(None)] * 4, rel=1e-5)


@pytest.mark.slow
def test_expert_counts_of_pipeline_stages_are_those_of_all_layers(team: Teams) -> None:
    answers = team(2).run(counts_in_stages, MeshShape(pipeline=2))
    assert answers[0] == answers[1] == counts_in_stages(None)


def counts_in_stages(shape: MeshShape | None) -> list[list[int]]:
    mesh, optimizer = mesh_of(shape), Optimizer(learning_rate=1e-3)
    model = build_model("qwen3_moe")
    policy = NativePolicyTrainer(model, temperature=1.0, logits_chunk=64, optimizer=optimizer, mesh=mesh)
    policy.forward_backward([(pack, lambda logprobs, _: logprobs.sum()) for pack in small_batch().pack(40)])
    return policy.take_expert_counts()
