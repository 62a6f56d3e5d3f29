"""The mesh that a recipe has without writing one, and what it moves between devices."""

import asyncio
import itertools
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from conftest import Load
from recipe_texts import QWEN_7B, QWEN_72B

from corral.loop.components import with_mesh_for_devices
from corral.observe.console import Console
from corral.recipe.default_mesh import UNKNOWN
from corral.recipe.errors import RecipeError
from corral.recipe.link_traffic import Traffic, link_traffic
from corral.recipe.memory import GIB
from corral.recipe.mesh import MeshShape, deal_layers, other_ranks_of_token
from corral.recipe.placement import resolve_meshes, resolve_placement
from corral.recipe.plan import Plan, make_plan
from corral.recipe.presets import resolve_algorithm
from corral.recipe.shape import SMOLLM2_135M, ModelShape
from corral.runtime.group import LocalRuntime

FOUR_NODES = ("cluster.nodes=4", "cluster.devices_per_node=8")
OF_80_GIB = (*FOUR_NODES, "cluster.device_memory=80", "train.gradient_checkpointing=true")


@pytest.mark.parametrize(
    ("shape", "mesh", "reason"),
    [
        (SMOLLM2_135M, MeshShape(replicate=32), "whole copies: a device holds one"),
        (QWEN_7B, MeshShape(replicate=4, shard=8), "shards within a node, copies across nodes"),
        (QWEN_72B, MeshShape(shard=32), "shards over all devices: those of one node do not hold a whole copy"),
    ],
)
def test_a_model_is_sharded_no_further_than_it_has_to_be(
    load: Load, shape: ModelShape, mesh: MeshShape, reason: str
) -> None:
    engine = () if shape != QWEN_72B else ("rollout.engine=vllm", "rollout.engine.tensor_parallel=8")
    plan = make_plan(load(*OF_80_GIB, *engine), shape)
    assert plan.meshes["actor"] == mesh
    assert f"mesh     {reason}" in plan.text()


@pytest.mark.parametrize(("filled", "replicate"), [(0.89, 32), (0.91, 4)])
def test_a_tenth_of_a_device_is_left_for_what_the_estimate_leaves_out(
    load: Load, filled: float, replicate: int
) -> None:
    whole = make_plan(load(*OF_80_GIB, "rollout.max_sequences=32", "train.parallel.replicate=32"), SMOLLM2_135M)
    needed = max(total for group in whole.memory for total in group.totals.values()) / GIB
    plan = make_plan(load(*OF_80_GIB, f"cluster.device_memory={needed / filled}"), SMOLLM2_135M)
    assert plan.meshes["actor"].replicate == replicate


def test_a_mesh_that_is_written_is_kept(load: Load) -> None:
    plan = make_plan(load(*OF_80_GIB, "train.parallel.shard=32"), SMOLLM2_135M)
    assert plan.meshes["actor"] == MeshShape(shard=32)
    assert plan.mesh_reason is None
    assert make_plan(load("cluster.device_memory=80"), SMOLLM2_135M).mesh_reason is None  # one device has no choice


def test_other_dimensions_that_are_written_stay(load: Load) -> None:
    plan = make_plan(load(*OF_80_GIB, "train.parallel.tensor=2", "train.parallel.context=2"), SMOLLM2_135M)
    assert plan.meshes["actor"] == MeshShape(replicate=8, context=2, tensor=2)


def test_stages_are_the_first_to_be_on_different_nodes(load: Load) -> None:
    plan = make_plan(load(*OF_80_GIB, "train.parallel.pipeline=4"), QWEN_7B)
    assert plan.meshes["actor"] == MeshShape(pipeline=4, replicate=8)
    assert MeshShape(pipeline=2, shard=2, tensor=2).data_rank(5) == 0


@pytest.mark.parametrize(
    ("sizes", "first", "last", "lengths"),
    [
        ([1] * 8, 0, 0, [2, 2, 2, 2]),
        ([1] * 8, 2, 2, [1, 3, 3, 1]),
        ([1] * 5, 0, 0, [1, 1, 1, 2]),
        ([3, 1, 1, 1, 1, 1], 0, 0, [1, 1, 2, 2]),
        ([1] * 4, 9, 0, [1, 1, 1, 1]),
    ],
)
def test_the_largest_stage_is_as_small_as_it_can_be(
    sizes: list[int], first: int, last: int, lengths: list[int]
) -> None:
    dealt = deal_layers(sizes, first, last, 4)
    assert [index for own in dealt for index in own] == list(range(len(sizes)))
    assert sorted(map(len, dealt)) == sorted(lengths)

    def largest(lengths: list[int]) -> int:
        ends = list(itertools.accumulate(lengths, initial=0))
        costs = [sum(sizes[start:end]) for start, end in itertools.pairwise(ends)]
        return max(costs[0] + first, *costs[1:-1], costs[-1] + last)

    every = (each for each in itertools.product(range(1, len(sizes)), repeat=4) if sum(each) == len(sizes))
    assert largest([len(own) for own in dealt]) == min(largest(list(each)) for each in every)


def test_more_stages_than_layers_are_refused_by_the_plan(load: Load) -> None:
    with pytest.raises(RecipeError, match=r"`train\.parallel\.pipeline`: 32 stages for 30 layers"):
        make_plan(load(*FOUR_NODES, "train.parallel.pipeline=32"), SMOLLM2_135M)


def test_where_it_is_not_known_what_a_device_holds_everything_is_sharded(load: Load) -> None:
    for recipe, shape in ((load(*FOUR_NODES), SMOLLM2_135M), (load(*OF_80_GIB), None)):
        plan = make_plan(recipe, shape)
        assert plan.meshes["actor"] == MeshShape(shard=32)
        assert plan.mesh_reason == UNKNOWN


@pytest.mark.parametrize(("free", "replicas"), [(80.0, 2), (None, 1)])
def test_a_run_on_gpus_chooses_by_what_they_have_free(
    load: Load, tiny_model: Path, capsys: pytest.CaptureFixture[str], free: float | None, replicas: int
) -> None:
    recipe = load("cluster.devices_per_node=2", f"model.path={tiny_model}")
    runtime = LocalRuntime(recipe, resolve_placement(recipe, resolve_algorithm(recipe))[0])

    async def device_memory() -> float | None:
        return free

    runtime.device_memory = device_memory  # type: ignore[method-assign]
    chosen = asyncio.run(with_mesh_for_devices(recipe, runtime, Console()))
    assert resolve_meshes(chosen, runtime.placement)["actor"].replicate == replicas
    assert chosen.cluster == recipe.cluster
    assert ("mesh: 2 replicas; whole copies" in capsys.readouterr().out) == (free is not None)


def test_parameters_that_are_offloaded_are_sharded(load: Load) -> None:
    plan = make_plan(load(*OF_80_GIB, "train.offload=[parameters, gradients]"), SMOLLM2_135M)
    assert plan.meshes["actor"] == MeshShape(replicate=4, shard=8)


def test_roles_with_fewer_devices_have_as_many_copies(load: Load) -> None:
    apart = "cluster.placement={actor: 0-15, reference: 16-23, rollout: 24-31}"
    plan = make_plan(load(*OF_80_GIB, "algorithm.kl.where=loss", apart), SMOLLM2_135M)
    assert plan.meshes == {"actor": MeshShape(replicate=8, shard=2), "reference": MeshShape(replicate=8)}


def test_layers_that_are_gathered_count_where_they_are_computed_with(load: Load) -> None:
    plan = make_plan(load(*FOUR_NODES, "model.dtype=bfloat16", "algorithm.kl.where=loss"), QWEN_7B)
    [group] = plan.memory
    [gathered] = [item.bytes_by_phase for item in group.items if item.name == "gathered layers"]
    ends, norm = 2 * 152064 * 3584, 3584  # the final norm is spread over the layers
    layer = (QWEN_7B.num_parameters - ends - norm) / 28
    assert gathered["logprobs"] == pytest.approx(2 * ends + 2 * 2 * layer, rel=1e-6)
    assert gathered["train"] == pytest.approx(2 * ends + (2 * 2 + 2 + 4) * layer, rel=1e-6)
    whole = make_plan(load(*FOUR_NODES, "train.parallel.replicate=32"), QWEN_7B)
    assert "gathered layers" not in {item.name for item in whole.memory[0].items}


# --- bytes over links

P = SMOLLM2_135M.num_parameters
TWO_NODES = ("cluster.nodes=2", "cluster.devices_per_node=2", "batch.max_tokens_per_micro_batch=1000000")


def traffic_of(plan: Plan) -> list[tuple[Any, Any]]:
    """(bytes within a node, bytes across nodes) of gathers, gradients and weights, each for a parameter."""
    return [(one.within_node / P, one.across_nodes / P) for one in link_traffic(plan).values()]


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        # 4 bytes a parameter. Whole copies: a sum that all have, twice 3/4 of it to a device, twice 1/2 to a node.
        ("replicate=4", [(0, 0), (6, 4), (0, 0)]),
        # Shards: gathered twice, scattered once, and gathered once more for the engine.
        ("shard=4", [(6, 4), (3, 2), (3, 2)]),
        # Shards within a node: over the network only sums of the two halves, for each of the node's two devices.
        ("replicate=2", [(4, 0), (2, 4), (2, 0)]),
    ],
)
def test_bytes_over_links_are_those_counted_by_hand(load: Load, mesh: str, expected: list[tuple[float, float]]) -> None:
    plan = make_plan(load(*TWO_NODES, f"train.parallel.{mesh}"), SMOLLM2_135M)
    assert traffic_of(plan) == pytest.approx(expected)


def test_shards_move_for_each_micro_batch_and_whole_copies_for_each_update(load: Load) -> None:
    batch = ("batch.updates_per_step=2", "batch.prompts_per_step=8", "data.max_prompt_tokens=1024")
    # 8 x 1024 + 64 x 256 tokens, by 2 updates and 4 devices: 3072, or 2 micro-batches of 2048.
    batch += ("rollout.max_response_tokens=256", "batch.max_tokens_per_micro_batch=2048")
    sharded = make_plan(load(*TWO_NODES, *batch, "train.parallel.shard=4"), SMOLLM2_135M)
    assert traffic_of(sharded) == pytest.approx([(4 * 6, 4 * 4), (4 * 3, 4 * 2), (3, 2)])
    whole = make_plan(load(*TWO_NODES, *batch, "train.parallel.replicate=4"), SMOLLM2_135M)
    assert traffic_of(whole) == pytest.approx([(0, 0), (2 * 6, 2 * 4), (0, 0)])
    # Shards are summed within the nodes in each of four micro-batches, and over the nodes in each of two updates.
    both = make_plan(load(*TWO_NODES, *batch, "train.parallel={shard: 2, replicate: 2}"), SMOLLM2_135M)
    assert traffic_of(both)[1] == pytest.approx((4 * 2, 2 * 4))


def test_stages_exchange_hidden_states_and_their_gradients(load: Load) -> None:
    plan = make_plan(load(*TWO_NODES, "train.parallel.pipeline=4"), SMOLLM2_135M)
    of_batch = plan.recipe.batch.prompts_per_step * plan.recipe.data.max_prompt_tokens
    of_batch += plan.recipe.num_trajectories * plan.recipe.rollout.max_response_tokens
    size = of_batch * SMOLLM2_135M.hidden_size * 4
    traffic = link_traffic(plan)
    # Two stages are on each node: over the network one forward and one backward, of which each node receives one.
    assert traffic["pipeline stages"] == Traffic(within_node=size, across_nodes=size)
    assert traffic["parameter gathers"] == traffic["gradient reduction"] == Traffic()
    assert traffic["weight transfer"].within_node == 3 * P


def test_weights_reach_engines_on_other_nodes_once(load: Load) -> None:
    plan = make_plan(load(*TWO_NODES, "cluster.placement={actor: 0-1, rollout: 2-3}"), SMOLLM2_135M)
    assert link_traffic(plan)["weight transfer"] == Traffic(within_node=(4 + 2) * P, across_nodes=4 * P)


def test_adapters_alone_have_gradients_to_sum(load: Load) -> None:
    plan = make_plan(load(*TWO_NODES, "train.parallel.replicate=4", "model.lora.rank=8"), SMOLLM2_135M)
    trained = SMOLLM2_135M.num_adapter_parameters(8, None)
    assert link_traffic(plan)["gradient reduction"].across_nodes == 4 * trained


def test_experts_that_are_spread_are_gathered_by_fewer(load: Load) -> None:
    mixture = ModelShape(64, 2, 4, 4, 16, 128, 256, tie_word_embeddings=True, num_experts=8, experts_per_token=2)
    experts = 2 * 8 * 3 * 64 * 128
    assert mixture.num_expert_parameters == experts
    plan = make_plan(load(*TWO_NODES, "train.parallel.expert=2", "algorithm.old_logprobs=engine"), mixture)
    others = mixture.num_parameters - experts
    # Forward and backward: others over 4 devices, half of the experts over the 2 of the nodes that have the same half.
    gathers = link_traffic(plan)["parameter gathers"]
    assert gathers.within_node == 2 * 4 * others * 3 / 4
    assert gathers.across_nodes == 2 * (4 * others / 2 + 2 * 4 * (experts / 2) / 2)


MIXTURE = ModelShape(64, 3, 4, 4, 16, 128, 256, True, num_experts=8, experts_per_token=1, num_dense_layers=1)


@pytest.mark.parametrize(("experts_per_token", "to_another"), [(1, 1 / 4), (8, 1.0)])
def test_tokens_on_their_way_to_experts_are_counted(load: Load, experts_per_token: int, to_another: float) -> None:
    """One expert for each token: an all-to-all, to a quarter of the ranks. All experts: everything is gathered."""
    batch = ("batch.prompts_per_step=8", "data.max_prompt_tokens=1024", "rollout.max_response_tokens=256")
    shape = replace(MIXTURE, experts_per_token=experts_per_token)
    recipe = load(*TWO_NODES, *batch, "train.parallel.expert=4", "algorithm.old_logprobs=engine", "model.dtype=float32")
    plan = make_plan(recipe, shape)
    tokens = (8 * 1024 + 64 * 256) / 4
    # There and back, in 2 layers, forward and backward, 4 bytes a number; a node has two of the four devices.
    moved = 2 * 2 * 2 * tokens * 64 * 4
    within = 1 if experts_per_token == 1 else 3  # a gather counts what comes over the network as passed on within
    across = 4 if experts_per_token == 1 else 2  # and sends it to a node once, for both of its devices
    expected = Traffic(moved * within * to_another, moved * across * to_another)
    assert link_traffic(plan)["expert exchange"] == expected
    how = (
        "by all-to-all: a token has 1 expert, on 0.75 of 3"
        if experts_per_token == 1
        else "tokens are gathered on all ranks"
    )
    assert f"experts  {how}" in plan.text()


@pytest.mark.parametrize(("num_experts", "per_token", "size"), [(8, 2, 2), (12, 3, 4), (8, 8, 4), (6, 1, 3)])
def test_a_token_goes_to_the_mean_of_ranks_over_all_choices(num_experts: int, per_token: int, size: int) -> None:
    ranks = np.arange(num_experts) // (num_experts // size)
    others = [len({*ranks[list(choice)]} - {0}) for choice in combinations(range(num_experts), per_token)]
    assert other_ranks_of_token(num_experts, per_token, size) == pytest.approx(np.mean(others))


def test_the_plan_prints_links_only_where_something_travels(load: Load) -> None:
    text = make_plan(load(*TWO_NODES, "train.parallel.shard=4"), SMOLLM2_135M).text()
    assert "links: bytes of a step of full length, estimated" in text
    assert "across nodes, to a node" in text
    assert "across nodes" not in make_plan(load("cluster.devices_per_node=2"), SMOLLM2_135M).text()
    assert "links" not in make_plan(load(), SMOLLM2_135M).text()
    plan = make_plan(load(*TWO_NODES), SMOLLM2_135M).as_dict()
    assert plan["links"]["gradient reduction"] == {"within_node": 3 * P, "across_nodes": 2 * P}


# --- hub names


def test_a_hub_name_in_the_cache_has_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**config, "intermediate_size": 128, "vocab_size": 256}))
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = ModelShape.find("org/name")
    assert found is not None
    assert (found.hidden_size, found.num_layers) == (64, 2)
    assert ModelShape.find("org/other") is None
    assert ModelShape.find("no such/../name") is None
