"""Training on several processes is training on one: the same gradient and weights, to rounding, on every mesh."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import sharded_cases
import torch
from sharded_cases import (
    Outcome,
    alone,
    build_model,
    data_rank,
    deviation,
    mesh_of,
    mesh_with_gradients,
    on_mesh,
    own_packs,
    policy_of,
    shapes,
    weights_of,
)
from team import DEVICE, DEVICE_NAME, GRADIENT_ROUNDING, ROUNDING, Team, on_gpu_only
from tiny import SHAPE
from trajectories import small_batch
from transformers import AutoModelForCausalLM, MistralConfig

from corral.data.batch import Batch, Trajectory
from corral.model.model_loading import load_model
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe
from corral.recipe.mesh import MeshShape, moves_by_all_to_all
from corral.recipe.plan import make_plan
from corral.recipe.schema import Model, Optimizer
from corral.recipe.shape import ModelShape
from corral.training.native_trainer import NativePolicyTrainer, NativeValueTrainer, PackPrediction, ValueModel
from corral.training.optimizer import total_norm
from corral.training.sharding import ShardedModel, local_tensor

pytestmark = pytest.mark.slow

Teams = Callable[[int], Team]


def name(shape: MeshShape) -> str:
    sizes = vars(shape)
    return "-".join(f"{dimension}{size}" for dimension, size in sizes.items() if size > 1)


def check(outcomes: list[Outcome], expected: Outcome, shape: MeshShape, tolerance: float = ROUNDING) -> None:
    shares = {shape.data_rank(rank): outcome.share for rank, outcome in enumerate(outcomes)}
    assert sum(shares.values()) == pytest.approx(expected.share, abs=tolerance * 10)
    for rank, outcome in enumerate(outcomes):
        assert deviation(outcome.gradients, expected.gradients) < max(tolerance, GRADIENT_ROUNDING)
        assert deviation(outcome.weights, expected.weights) < tolerance
        assert outcome.norms == pytest.approx(expected.norms, rel=max(tolerance, GRADIENT_ROUNDING))
        assert outcome.norms == outcomes[0].norms  # to the last bit: they decide what all ranks do
        is_last_stage = rank >= shape.size - shape.stage_size
        same = shares[shape.data_rank(rank)] if is_last_stage else 0.0
        assert outcome.share == (same if DEVICE_NAME is None else pytest.approx(same, rel=tolerance))
        seen = outcome.logprobs != 0
        torch.testing.assert_close(outcome.logprobs[seen], expected.logprobs[seen], atol=tolerance, rtol=tolerance)


DENSE = [shape for size in (2, 3, 4) for shape in shapes(size, with_experts=False)]
DEALT = [shape for size in (2, 3, 4) for shape in shapes(size, with_experts=True) if shape.expert > 1]


EACH = [MeshShape(pipeline=2), MeshShape(replicate=2), MeshShape(shard=2), MeshShape(context=2), MeshShape(tensor=2)]
PRODUCTS = [MeshShape(replicate=2, shard=2), MeshShape(shard=2, tensor=2), MeshShape(pipeline=2, context=2)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*product([torch.float32], [*EACH, MeshShape(tensor=4), *PRODUCTS]), *product([torch.bfloat16], EACH)],
    ids=lambda value: name(value) if isinstance(value, MeshShape) else str(value),
)
def test_adapters_are_trained_on_meshes_of_each_dimension(team: Teams, shape: MeshShape, dtype: torch.dtype) -> None:
    tolerance = GRADIENT_ROUNDING if dtype == torch.float32 else 0.07
    outcomes, expected = team(shape.size).run(on_mesh, shape, "llama+lora", dtype), alone("llama+lora", dtype)
    assert all(name.endswith(("lora_A", "lora_B")) for name in expected.gradients)
    assert len(expected.weights) == len(expected.gradients) == 56
    for outcome in outcomes:
        assert deviation(outcome.gradients, expected.gradients) < tolerance
        assert outcome.norms == pytest.approx(expected.norms, rel=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", DENSE, ids=name)
def test_every_mesh_gives_the_same_gradient_and_weights(team: Teams, shape: MeshShape) -> None:
    check(team(shape.size).run(on_mesh, shape, "llama"), alone("llama"), shape)


EIGHT = [
    *(("llama:8", MeshShape(pipeline=8)), ("llama", MeshShape(shard=8)), ("llama", MeshShape(pipeline=4, tensor=2))),
    *(("llama", MeshShape(replicate=2, shard=2, tensor=2)), ("qwen3_moe", MeshShape(pipeline=4, expert=2))),
]


@on_gpu_only
@pytest.mark.gpu
@pytest.mark.parametrize(("family", "shape"), EIGHT, ids=lambda value: value if isinstance(value, str) else name(value))
def test_eight_ranks_train_what_one_does(team: Teams, family: str, shape: MeshShape) -> None:
    check(team(8).run(on_mesh, shape, family), alone(family), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in DENSE if shape.tensor > 1 and shape.replicate == 1], ids=name)
def test_biases_and_a_head_of_its_own_are_cut_right(team: Teams, shape: MeshShape) -> None:
    check(team(shape.size).run(on_mesh, shape, "qwen2"), alone("qwen2"), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", DEALT, ids=name)
def test_experts_are_dealt_on_every_mesh(team: Teams, shape: MeshShape) -> None:
    check(team(shape.size).run(on_mesh, shape, "qwen3_moe"), alone("qwen3_moe"), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MeshShape(expert=2), MeshShape(expert=4), MeshShape(expert=2, tensor=2)], ids=name)
def test_tokens_of_many_experts_are_gathered_and_the_gradient_is_the_same(team: Teams, shape: MeshShape) -> None:
    assert not moves_by_all_to_all(12, 6, shape.expert)
    assert moves_by_all_to_all(12, 2, shape.expert)  # as in the other tests
    check(team(shape.size).run(on_mesh, shape, "qwen3_moe*6"), alone("qwen3_moe*6"), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe*6", "qwen3_moe+lora", "qwen3_moe+lora*6"])
def test_experts_are_dealt_in_bfloat16(team: Teams, family: str) -> None:
    """In one process gradients in bfloat16 differ from float32's by 0.16 to 0.56, which depends on the device: routers
    choose others. Those of experts that are dealt may differ from either by as much, where another order of a sum lets
    routers choose others again: with adapters, and on a GPU."""
    dtype = torch.bfloat16
    outcomes, expected = team(2).run(on_mesh, MeshShape(expert=2), family, dtype), alone(family, dtype)
    rounding = deviation(expected.gradients, alone(family).gradients)
    bound = max(0.25, 1.25 * rounding) if "lora" in family or DEVICE.type == "cuda" else 0.1
    for outcome in outcomes:
        assert deviation(outcome.gradients, expected.gradients) < bound
        assert outcome.norms == pytest.approx(expected.norms, rel=0.05 if "lora" in family else 0.03)


ADAPTED = [
    *(MeshShape(expert=2), MeshShape(expert=4), MeshShape(expert=2, tensor=2)),
    *(MeshShape(pipeline=2, expert=2), MeshShape(shard=2, expert=2), MeshShape(tensor=2)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *product(["qwen3_moe+lora"], ADAPTED),
        *product(["qwen3_moe+lora*6"], [MeshShape(expert=2), MeshShape(expert=2, tensor=2)]),
    ],
    ids=lambda value: name(value) if isinstance(value, MeshShape) else value,
)
def test_adapters_of_experts_are_trained_on_meshes(team: Teams, family: str, shape: MeshShape) -> None:
    expected = alone(family)
    of_experts = [name for name in expected.gradients if ".experts." in name]
    assert len(of_experts) == 4 * 2 * 2  # layers, matrices, A and B
    assert all(expected.gradients[name].abs().max() > 1e-4 for name in of_experts)
    check(team(shape.size).run(on_mesh, shape, family), expected, shape)


def routed_to(experts: tuple[int, ...], shape: MeshShape | None) -> Outcome:
    """Every token goes to the same two of 12 experts."""
    mesh, model = mesh_of(shape), build_model("qwen3_moe")
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            preferred = torch.zeros(12)
            preferred[list(experts)] = torch.tensor([9.0, 8.0])
            module.register_forward_hook(partial(replace_choice, preferred))
    return sharded_cases.outcome(policy_of(model, mesh), mesh)


def replace_choice(preferred: torch.Tensor, module: object, inputs: object, output: tuple[torch.Tensor, ...]) -> object:
    logits = output[0] * 0.1 + preferred
    weights, chosen = logits.softmax(-1).topk(2, -1)
    return logits, weights, chosen


@pytest.mark.parametrize("shape", [MeshShape(expert=2), MeshShape(expert=4)], ids=name)
@pytest.mark.parametrize("experts", [(0, 1), (0, 11), (11, 10)], ids=str)
def test_ranks_whose_experts_get_no_token_take_part(team: Teams, shape: MeshShape, experts: tuple[int, ...]) -> None:
    check(team(shape.size).run(routed_to, experts, shape), routed_to(experts, None), shape)


@pytest.mark.parametrize(
    "shape", [MeshShape(expert=2), MeshShape(expert=3), MeshShape(tensor=2), MeshShape(pipeline=4)], ids=name
)
def test_mixtral_trains_too(team: Teams, shape: MeshShape) -> None:
    check(team(shape.size).run(on_mesh, shape, "mixtral"), alone("mixtral"), shape)


@pytest.mark.parametrize(
    "shape", [MeshShape(tensor=2), MeshShape(context=2), MeshShape(shard=2), MeshShape(pipeline=2)], ids=name
)
def test_a_mixture_can_be_cut_like_any_other_model(team: Teams, shape: MeshShape) -> None:
    check(team(shape.size).run(on_mesh, shape, "qwen3_moe"), alone("qwen3_moe"), shape)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(shard=2),
        MeshShape(context=2),
        MeshShape(expert=2),
        MeshShape(pipeline=2),
        MeshShape(pipeline=2, expert=2),
        MeshShape(pipeline=2, tensor=2),
    ],
    ids=name,
)
def test_activations_can_be_recomputed(team: Teams, shape: MeshShape) -> None:
    family = "qwen3_moe" if shape.expert > 1 else "llama"
    check(team(shape.size).run(on_mesh, shape, family, torch.float32, True), alone(family), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MeshShape(replicate=2), MeshShape(shard=2), MeshShape(shard=3)], ids=name)
def test_the_general_path_is_sharded_too(team: Teams, shape: MeshShape) -> None:
    """Ranks have different numbers of sequences, and gather parameters together for each."""
    check(team(shape.size).run(on_mesh, shape, "llama/sdpa"), alone("llama"), shape)


@pytest.mark.parametrize("shape", [MeshShape(tensor=2), MeshShape(context=2), MeshShape(pipeline=2)], ids=name)
def test_the_general_path_refuses_what_it_cannot_distribute(team: Teams, shape: MeshShape) -> None:
    with pytest.raises(Exception, match="sequence by sequence"):
        team(2).run(on_mesh, shape, "llama/sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "offload", [("optimizer",), ("parameters", "gradients"), ("parameters", "gradients", "optimizer")]
)
@pytest.mark.parametrize("shape", [MeshShape(shard=2), MeshShape(pipeline=2)], ids=name)
def test_offloading_changes_nothing(team: Teams, shape: MeshShape, offload: Sequence[str]) -> None:
    check(team(2).run(on_mesh, shape, "llama", torch.float32, False, offload), alone("llama"), shape)


def norm_of_step(shape: MeshShape) -> float:
    """Sums differ in the last bits, as those of NCCL may from group to group."""
    mesh = mesh_of(shape)
    assert mesh is not None
    policy, sum_numbers = policy_of(build_model("llama"), mesh), mesh.sum_numbers
    sharded_cases.backward(policy, own_packs(small_batch(), mesh))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "sum_numbers", lambda numbers, name: sum_numbers(numbers, name) * (1 + mesh.rank * 1e-12))
        return policy.step().gradient_norm


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MeshShape(shard=2), MeshShape(tensor=2), MeshShape(pipeline=2)], ids=name)
def test_all_ranks_clip_by_the_same_norm(team: Teams, shape: MeshShape) -> None:
    assert len(set(team(2).run(norm_of_step, shape))) == 1


def waits_for_the_device(shape: MeshShape) -> tuple[int, int]:
    """-> (how often the host reads a tensor for the norm, number of parameters)"""
    mesh = mesh_of(shape)
    policy, reads, cpu = policy_of(build_model("llama"), mesh), list[str](), torch.Tensor.cpu
    sharded_cases.backward(policy, own_packs(small_batch(), mesh))
    assert policy.optimizer is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda tensor: reads.append("") or cpu(tensor))
        total_norm(policy.optimizer.masters, policy.layout)
    return len(reads), len(policy.optimizer.masters)


def test_the_norm_of_many_shards_waits_for_the_device_a_few_times(team: Teams) -> None:
    for num_reads, num_parameters in team(2).run(waits_for_the_device, MeshShape(shard=2)):
        assert num_reads <= 4 < num_parameters


def devices_of_offloaded(shape: MeshShape) -> set[str]:
    mesh, model = copy(mesh_of(shape)), build_model("llama")  # its head is its embedding
    assert mesh is not None
    mesh.device = torch.device("meta")  # stands for a GPU
    ShardedModel(model, model, mesh, trained=True, offload=True, in_float32=[])
    return {local_tensor(parameter).device.type for parameter in model.parameters()}


def test_offloaded_parameters_are_on_the_host(team: Teams) -> None:
    assert team(2).run(devices_of_offloaded, MeshShape(shard=2)) == [{"cpu"}] * 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [MeshShape(replicate=2), MeshShape(shard=2), MeshShape(context=2), MeshShape(pipeline=2)], ids=name
)
def test_bfloat16_is_as_close_as_it_can_be(team: Teams, shape: MeshShape) -> None:
    check(team(2).run(on_mesh, shape, "llama", torch.bfloat16), alone("llama", torch.bfloat16), shape, tolerance=0.03)


def on_mesh_with_gradients(shape: MeshShape, dtype: str) -> Outcome:
    with mesh_with_gradients(shape, dtype):
        return on_mesh(shape, "llama")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MeshShape(replicate=2), MeshShape(shard=2)], ids=name)
def test_gradients_travel_in_bfloat16_where_the_recipe_says_so(team: Teams, shape: MeshShape) -> None:
    for outcome in team(2).run(on_mesh_with_gradients, shape, "bfloat16"):
        assert 1e-4 < deviation(outcome.gradients, alone("llama").gradients) < 0.01  # 8 bits
        assert outcome.norms == pytest.approx(alone("llama").norms, rel=0.01)


# --- long trajectories

LENGTH = 131_072
LONG_RECIPE = f"""\
name: long
model: {{path: model}}
data: {{train: {{path: rows.jsonl}}, max_prompt_tokens: 1024}}
rollout: {{max_response_tokens: {LENGTH - 1024}}}
batch: {{prompts_per_step: 2, samples_per_prompt: 2, max_tokens_per_micro_batch: {LENGTH}}}
schedule: {{steps: 1}}
cluster: {{devices_per_node: 2}}
train: {{parallel: {{context: 2}}}}
"""


def weights_after_a_long_trajectory(folder: Path, shape: MeshShape | None) -> tuple[dict[str, torch.Tensor], int]:
    """And the number of tokens that this process computed."""
    mesh = mesh_of(shape)
    model = load_model(Model(path=str(folder), dtype="float32"), torch.device("cpu"))
    optimizer = Optimizer(learning_rate=1e-2, epsilon=1e-2)
    policy = NativePolicyTrainer(model, temperature=1.0, logits_chunk=4096, optimizer=optimizer, mesh=mesh)
    tokens = np.random.default_rng(1).integers(3, 90, LENGTH)
    [pack] = Batch.of([Trajectory.from_tokens(tokens.tolist(), 1024)]).pack(LENGTH)
    policy.forward_backward([(pack, lambda logprobs, _: (logprobs * torch.linspace(-1e-4, 1e-4, LENGTH)).sum())])
    assert not policy.step().skipped
    return weights_of(policy), PackPrediction(pack, policy.mesh).num_nodes


def test_a_trajectory_of_128k_tokens_is_planned_and_trained(
    team: Teams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": LENGTH, "sliding_window": 256, "head_dim": 8}
    config = MistralConfig(**SHAPE | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    Path("recipe.yaml").write_text(LONG_RECIPE)
    plan = make_plan(load_recipe("recipe.yaml"), ModelShape.find("model"))
    assert plan.recipe.max_trained_tokens == LENGTH
    assert plan.meshes["actor"] == MeshShape(context=2)
    expected, _ = weights_after_a_long_trajectory(tmp_path / "model", None)
    for weights, num_tokens in team(2).run(weights_after_a_long_trajectory, tmp_path / "model", plan.meshes["actor"]):
        assert num_tokens == LENGTH // 2
        assert deviation(weights, expected) < 1e-5


# --- what is not finite


def one_bad_loss(shape: MeshShape, bad_rank: int, dtype: torch.dtype) -> tuple[bool, float, bool, bool, float]:
    """-> (skipped, norm, whether the weights are as before, whether the next update is made, its loss scale)"""
    mesh = mesh_of(shape)
    assert mesh is not None
    policy = policy_of(build_model("llama", dtype), mesh)
    before = weights_of(policy)
    for pack in own_packs(small_batch(), mesh):
        factor = torch.nan if data_rank(mesh) == bad_rank else 1.0
        policy.forward_backward([(pack, lambda logprobs, _, factor=factor: logprobs.sum() * factor)])
    result = policy.step()
    unchanged = all(torch.equal(before[n], weight) for n, weight in weights_of(policy).items())
    for pack in own_packs(small_batch(), mesh):
        policy.forward_backward([(pack, lambda logprobs, _: logprobs.sum() * 1e-3)])
    assert policy.optimizer is not None
    return result.skipped, result.gradient_norm, unchanged, not policy.step().skipped, policy.optimizer.scaler.scale


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [MeshShape(replicate=2), MeshShape(shard=2), MeshShape(context=2), MeshShape(pipeline=2)], ids=name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_update_on_all(
    team: Teams, shape: MeshShape, dtype: torch.dtype
) -> None:
    bad_rank = shape.num_data - 1
    for skipped, norm, unchanged, goes_on, scale in team(2).run(one_bad_loss, shape, bad_rank, dtype):
        assert skipped
        assert norm != norm
        assert unchanged
        assert goes_on
        assert scale == (2.0**15 if dtype == torch.float16 else 1.0)


def overflow(shape: MeshShape) -> tuple[list[bool], float]:
    mesh = mesh_of(shape)
    assert mesh is not None
    policy = policy_of(build_model("llama", torch.float16), mesh)
    skipped = []
    for _ in range(3):
        for pack in own_packs(small_batch(), mesh):
            steep = 1e3 if data_rank(mesh) == 1 and not skipped else 1.0
            policy.forward_backward([(pack, lambda logprobs, _, steep=steep: (logprobs * steep).mean())])
        skipped.append(policy.step().skipped)
    assert policy.optimizer is not None
    return skipped, policy.optimizer.scaler.scale


@pytest.mark.parametrize("shape", [MeshShape(replicate=2), MeshShape(shard=2)], ids=name)
def test_ranks_agree_on_float16s_loss_scale(team: Teams, shape: MeshShape) -> None:
    first, second = team(2).run(overflow, shape)
    assert first == second
    skipped, scale = first
    assert skipped[0]
    assert not skipped[-1]
    assert scale < 2.0**15


# --- the frozen reference and the critic


def reference_logprobs(shape: MeshShape | None) -> torch.Tensor:
    mesh = mesh_of(shape)
    policy = NativePolicyTrainer(build_model("llama").requires_grad_(False), temperature=1.0, logits_chunk=8, mesh=mesh)
    scored = list(policy.compute_logprobs(small_batch().pack(1000)))
    return scored[0]


@pytest.mark.parametrize("shape", [MeshShape(shard=3), MeshShape(pipeline=3)], ids=name)
def test_a_frozen_model_is_sharded_too(team: Teams, shape: MeshShape) -> None:
    expected = reference_logprobs(None)
    for logprobs in team(3).run(reference_logprobs, shape)[-shape.stage_size :]:
        torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=2e-6)


@cache
def values_after_training(
    shape: MeshShape | None, dtype: torch.dtype, family: str = "qwen2"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mesh = mesh_of(shape)
    recipe = Optimizer(learning_rate=1e-2, epsilon=1e-2)
    critic = NativeValueTrainer(ValueModel(build_model(family, dtype)), recipe, 10, mesh=mesh)
    for _ in range(3):
        packs = own_packs(small_batch(), mesh)
        critic.forward_backward([(pack, lambda values: (values - 1.0).square().sum() / 100) for pack in packs])
        assert not critic.step().skipped
    (values,) = critic.compute_values(small_batch().pack(1000))
    return values, weights_of(critic)


@pytest.mark.parametrize("shape", [MeshShape(shard=2), MeshShape(context=2), MeshShape(tensor=2)], ids=name)
def test_a_critic_trains_the_same_values(team: Teams, shape: MeshShape) -> None:
    dtype = torch.bfloat16 if shape.shard > 1 else torch.float32
    expected, weights = values_after_training(None, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for values, weights_there in team(2).run(values_after_training, shape, dtype):
        torch.testing.assert_close(values, expected, atol=tolerance, rtol=tolerance)
        assert [w.dtype for w in weights_there.values()] == [w.dtype for w in weights.values()]


@pytest.mark.parametrize(
    "shape", [MeshShape(pipeline=2), MeshShape(pipeline=4), MeshShape(pipeline=2, shard=2)], ids=name
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_critic_trains_the_same_weights_in_stages(team: Teams, shape: MeshShape, family: str) -> None:
    """Of a tied embedding only the first stage has a gradient."""
    expected, weights = values_after_training(None, torch.float32, family)
    answers = team(shape.size).run(values_after_training, shape, torch.float32, family)
    for rank, (values, weights_there) in enumerate(answers):
        assert deviation(weights_there, weights) < 1e-5
        if rank >= shape.size - shape.stage_size:
            torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


# --- what is refused


def refusal(shape: MeshShape, family: str, offload: Sequence[str] = (), kv_heads: int = 12, num_layers: int = 4) -> str:
    """What is said of a model with so many key-value heads and layers."""
    model = build_model(family)
    model.config.num_key_value_heads = kv_heads
    del model.model.layers[num_layers:]
    with pytest.raises(UserError) as error:
        policy_of(model, mesh_of(shape), offload=offload)
    return str(error.value)


def test_what_cannot_be_cut_is_refused_with_the_numbers(team: Teams) -> None:
    narrow = team(2).run(refusal, MeshShape(tensor=2), "llama", (), 7)[0]
    assert "2 does not divide the model's 7 (num_key_value_heads)" in narrow
    assert "has no experts" in team(2).run(refusal, MeshShape(expert=2), "llama")[0]
    assert "has no experts" in team(4).run(refusal, MeshShape(pipeline=2, expert=2), "llama")[0]
    short = team(2).run(refusal, MeshShape(pipeline=2), "llama", (), 12, 1)[0]
    assert "2 stages for 1 layers; a stage has one layer at least" in short


def test_offloads_that_make_no_sense_are_refused(team: Teams) -> None:
    assert "name both" in team(2).run(refusal, MeshShape(shard=2), "llama", ("gradients",))[0]
    assert "nothing is sharded here" in team(2).run(refusal, MeshShape(replicate=2), "llama", ("parameters",))[0]
    with pytest.raises(UserError, match="nothing is sharded here"):
        policy_of(build_model("llama"), offload=("parameters", "gradients"))
