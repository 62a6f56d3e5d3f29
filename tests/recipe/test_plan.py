import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from recipe_texts import QWEN_7B, QWEN_72B

from corral.recipe.errors import RecipeError
from corral.recipe.load import load_recipe
from corral.recipe.memory import BUCKET_BYTES, COMMUNICATOR, human_bytes, human_count
from corral.recipe.mesh import MeshShape
from corral.recipe.plan import describe_rewards, host_memory, make_plan, update_sizes
from corral.recipe.shape import SMOLLM2_135M, ModelShape
from corral.runtime import transfer_channels

BATCH = ["batch.prompts_per_step=64", "batch.samples_per_prompt=8", "batch.max_tokens_per_micro_batch=16384"]


def lines_of(recipe, **options):
    return [line.strip() for line in make_plan(recipe, SMOLLM2_135M, **options).text().splitlines()]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "batch.updates_per_step=4",
            "64 prompts x 8 samples = 512 trajectories -> 4 updates of 128 on 1 trainer",
        ),
        ("cluster.nodes=2 cluster.devices_per_node=4", "1 update of 512 on 8 trainers (8 shards)"),
        (
            "cluster.devices_per_node=4 train.parallel.tensor=2",
            "on 4 trainers (2 shards x 2 tensor), up to 16384",
        ),
        ("cluster.devices_per_node=4 train.parallel.replicate=4", "on 4 trainers (4 replicas), up to"),
        (
            "cluster.devices_per_node=4 train.parallel.context=2 train.parallel.expert=2",
            "on 4 trainers (2 expert x 2 context), up to",
        ),
        ("cluster.devices_per_node=4 train.parallel.pipeline=2", "on 4 trainers (2 stages x 2 shards), up to"),
        ("batch.updates_per_step=1", "-> 1 update of 512 on"),
        ("batch.updates_per_step=3", "-> 3 updates of 171, 171 and 170 on"),
        ("batch.updates_per_step=5", "-> 5 updates (2 of 103 and 3 of 102) on"),
        ("batch.ppo_epochs=2 batch.updates_per_step=4", "-> 2 passes of 4 updates of 128 on"),
        (
            "batch.prompts_per_step=1 batch.samples_per_prompt=1 algorithm.name=reinforce",
            "1 prompt x 1 sample = 1 trajectory -> 1 update of 1 on 1 trainer",
        ),
        ("algorithm.name=remax", "and 64 greedy answers to compare with, not trained on"),
    ],
)
def test_the_plan_says_the_batch_in_words(load, overrides, words):
    assert any(words in line for line in lines_of(load(*BATCH, *overrides.split())))


def test_updates_differ_by_one_at_most():
    assert update_sizes(10, 4) == [3, 3, 2, 2]


def test_the_schedule_is_said_in_steps_and_epochs_where_rows_are_known(load):
    assert "10 steps = 640 prompts, 5120 trajectories, 10 updates; 2 epochs of 320 rows" in lines_of(
        load(*BATCH), num_rows=320
    )


def test_the_size_of_a_generated_source_is_known_from_the_recipe(load):
    recipe = load(*BATCH, "data.train.path=arithmetic:addition", "data.train.size=100", "data.train.max_rows=50")
    assert make_plan(recipe).num_rows == 50


def test_a_fraction_of_an_epoch_is_not_rounded_up_to_a_step_more(load):
    recipe = load("batch.prompts_per_step=10", "~schedule.steps", "schedule.epochs=1.1")
    assert make_plan(recipe, num_rows=100).num_steps == 11


def test_epochs_become_steps_where_rows_are_known(load):
    recipe = load(*BATCH, "~schedule.steps", "schedule.epochs=1.5")
    assert make_plan(recipe, num_rows=100).num_steps == 3
    assert make_plan(recipe).num_steps is None
    assert any("1.5 epochs of the training data" in line for line in lines_of(recipe))


def test_the_plan_describes_the_algorithm(load):
    text = "\n".join(lines_of(load("algorithm.name=ppo", "algorithm.entropy_coefficient=0.01")))
    assert "gae: generalized advantage estimation" in text
    assert "ppo: clipped ratio of the new to the old probability, token by token; clip_low 0.2, clip_high 0.2" in text
    assert "in the reward, estimator k1, coefficient 0.001" in text
    assert "bonus with coefficient 0.01" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("algorithm.name=gmpo", "clip_low 0.4, clip_high 0.4"),
        ("algorithm.name=sapo", "tau_positive 1, tau_negative 1.05"),
        ("algorithm.name=dro", "beta 0.05"),
        ("algorithm.loss.dual_clip=3", "dual_clip 3"),
        ("algorithm.max_mean_ratio=1.5", "mean ratio of new to old probability above 1.5 is not made"),
        ("algorithm.reward_clip=2", "of a trajectory, within [-2, 2]"),
        ("algorithm.whiten=true", "divided by their standard deviation; whitened over the batch"),
        ("algorithm.advantage_clip=5", "divided by their standard deviation; within [-5, 5]"),
        ("algorithm.name=ppo algorithm.advantage_clip=5", "gamma 1, gae_lambda 1, whiten True; within [-5, 5]"),
        ("algorithm.name=dr_grpo", "divided by a constant, mean over trajectories; norm 256"),
        ("algorithm.name=dapo", "replaced by other prompts, in up to 10 rounds"),
        ("algorithm.name=reinforce algorithm.advantage.gamma=0.9", "gamma 0.9"),
        ("algorithm.shaping=overlong algorithm.shaping.buffer_tokens=64", "buffer_tokens 64, penalty 1"),
        ("algorithm.llds_coefficient=0.2", "penalty with coefficient 0.2"),
        ("algorithm.kl.where=loss algorithm.kl.controller=adaptive", "target 0.1, horizon 10000"),
        ("algorithm.old_logprobs=recompute", "recomputed by the trainer"),
        ("algorithm.old_logprobs=recompute algorithm.correction.name=icepop", "floor 0.5, cap 5"),
    ],
)
def test_the_plan_has_the_numbers_of_an_algorithm(load, overrides, words):
    assert words in "\n".join(lines_of(load(*overrides.split())))


APART = ["cluster.devices_per_node=2", "cluster.placement={actor: 0, reference: 0, rollout: 1}"]


@pytest.mark.parametrize(
    ("overrides", "mode", "words"),
    [
        ([], "synchronous", "then training on it"),
        ([*APART, "schedule.pipelined=true"], "pipelined", "trained on as they come in; the next step waits"),
        ([*APART, "schedule.pipelined=true", "batch.ppo_epochs=2"], "pipelined", "log-probs are computed as they come"),
        ([*APART, "schedule.max_staleness=1"], "async", "1 version ahead of training, corrected with token_tis"),
        (
            [*APART, "schedule.max_staleness=3", "schedule.pipelined=true", "algorithm.correction.name=none"],
            "async",
            "3 versions ahead of training, without a correction; finished samples are trained on as they come in",
        ),
    ],
)
def test_the_plan_says_when_what_happens(load, overrides, mode, words):
    recipe = load(*overrides)
    assert any(line.startswith(f"{mode}: ") and words in line for line in lines_of(recipe))
    assert make_plan(recipe).as_dict()["schedule"]["mode"] == mode


def test_a_plan_that_runs_ahead_recomputes_and_corrects(load):
    text = "\n".join(lines_of(load(*APART, "schedule.max_staleness=1")))
    assert "recomputed by the trainer before the first update" in text
    assert "token_tis: each token weighs its ratio of trainer's to engine's probability, at most `cap`; cap 2" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "shared: nothing travels, the engine decodes with the trainer's own tensors"),
        (["cluster.devices_per_node=2"], "shared: gathered from the shards within each process"),
        (APART, "collective: broadcast to the engines"),
        ([*APART, "cluster.transfer=ipc"], "ipc: through memory of the node that trainers and engines map"),
        (["cluster.nodes=2", "cluster.placement={actor: 0, rollout: 1}"], "collective: broadcast to the engines"),
        ([*APART, "cluster.transfer=object"], "object: through Ray's object store"),
    ],
)
def test_the_plan_says_how_weights_travel(load, overrides, words):
    recipe = load(*overrides)
    assert any(line.startswith(f"weights  {words}") for line in lines_of(recipe))
    assert make_plan(recipe).as_dict()["cluster"]["transfer"] == words.split(":")[0]


@pytest.mark.parametrize(
    ("sizes", "number"),
    [({}, 0), ({"shard": 8}, 1), ({"replicate": 2}, 1), ({"replicate": 4, "shard": 8}, 2),
     ({"shard": 2, "tensor": 4}, 4), ({"pipeline": 2, "tensor": 2}, 7)],
)  # fmt: skip
def test_the_plan_counts_connections_of_nccl(sizes, number):
    assert MeshShape(**sizes).num_communicators == number


def test_nccl_and_buckets_of_weights_take_memory_of_gpus(load):
    found = {group.roles: {item.name: item.bytes_by_phase for item in group.items}
             for group in make_plan(load(*APART), SMOLLM2_135M, device="cuda").memory}  # fmt: skip
    assert {roles: items["NCCL"]["rollout"] for roles, items in found.items()} == {
        ("actor",): COMMUNICATOR + 2 * BUCKET_BYTES,
        ("rollout",): COMMUNICATOR + 2 * BUCKET_BYTES,
    }
    of_cpus = make_plan(load(*APART), SMOLLM2_135M, device="cpu").memory
    assert not any(item.name == "NCCL" for group in of_cpus for item in group.items)
    assert transfer_channels.BUCKET_BYTES == BUCKET_BYTES


def test_gpus_do_not_map_each_others_memory(load):
    with pytest.raises(RecipeError, match=r"`cluster.transfer: ipc` does not work between GPUs"):
        make_plan(load(*APART, "cluster.transfer=ipc"), device="cuda")


@pytest.mark.parametrize(
    ("overrides", "words", "runtime", "address"),
    [
        ([], "this process", "local", None),
        (["cluster.runtime=local"], "this process", "local", None),
        (["cluster.nodes=2"], "Ray, the cluster that runs on this machine, else one that is started", "ray", "auto"),
        (["cluster.address=10.0.0.1:6379"], "Ray, at 10.0.0.1:6379", "ray", "10.0.0.1:6379"),
    ],
)
def test_the_plan_says_what_it_runs_on(load, overrides, words, runtime, address):
    recipe = load(*overrides)
    assert any(line.startswith(f"runtime  {words}") for line in lines_of(recipe))
    told = make_plan(recipe).as_dict()["cluster"]
    assert (told["runtime"], told["address"]) == (runtime, address)


def test_the_placement_is_drawn(load):
    assert "node 0 | 0 actor+rollout |" in lines_of(load())


def test_the_plan_names_the_reward(load):
    assert describe_rewards(load()) == ["exact, the default"]
    assert describe_rewards(load("environment.reward.name=exact")) == ["exact"]
    both = "environment.rewards={right: {name: math}, format: {name: regex, weight: 0.1}}"
    assert describe_rewards(load(both)) == ["math + regex"]
    assert describe_rewards(load("environment.name=frozen_lake")) == []
    assert "reward\n  exact, the default\n" in make_plan(load()).text()


def test_warnings_are_part_of_the_plan(load):
    assert any(line.startswith("- `rollout.top_p: 0.9`") for line in lines_of(load("rollout.top_p=0.9")))


def test_a_recipe_with_problems_has_no_plan(load):
    with pytest.raises(RecipeError, match="both set"):
        make_plan(load("schedule.epochs=1"))


# --- memory


def memory_of(recipe, **options):
    (group,) = make_plan(recipe, SMOLLM2_135M, **options).memory
    return {item.name: item.bytes_by_phase for item in group.items}, group.totals


def test_without_a_local_model_the_memory_is_said_to_be_unknown(load):
    text = make_plan(load(), None).text()
    assert "unknown: some/model is not on this machine" in text


ON_32 = "cluster.devices_per_node=32 " + " ".join(
    f"train.parallel.{name}=2" for name in ("replicate", "expert", "context", "tensor")
)


@pytest.mark.parametrize(
    ("overrides", "item", "phase", "bytes_per_parameter"),
    [
        ("model.dtype=bfloat16", "actor weights", "rollout", 2),
        ("model.dtype=bfloat16", "actor optimizer", "train", 12),  # with a master copy
        ("algorithm.name=ppo", "reference weights", "rollout", 4),
        ("algorithm.name=ppo", "critic optimizer", "train", 8),
        ("cluster.devices_per_node=4", "actor weights", "train", 4 / 4),
        ("cluster.devices_per_node=4", "rollout weights", "rollout", 4),
        ("cluster.devices_per_node=4 train.parallel.replicate=4", "actor weights", "train", 4),
        ("cluster.devices_per_node=4 train.parallel.replicate=4", "rollout weights", "rollout", None),
        # every dimension but replicas divides what a device holds
        (ON_32, "actor weights", "train", 4 / 16),
        (ON_32, "actor optimizer", "train", 8 / 16),
        (ON_32, "gradients", "train", 4 / 16),
    ],
)
def test_a_device_holds_its_part_of_the_parameters(load, overrides, item, phase, bytes_per_parameter):
    """None: the engine has no copy of its own."""
    items, _ = memory_of(load(*overrides.split()))
    if bytes_per_parameter is None:
        assert item not in items
    else:
        assert items[item][phase] == bytes_per_parameter * SMOLLM2_135M.num_parameters
    assert set(items.get("rollout weights", ["rollout"])) == {"rollout"}


def test_weights_gradients_and_optimizer_in_float32_take_sixteen_bytes_a_parameter(load):
    items, _ = memory_of(load())
    held = [items["actor weights"], items["actor optimizer"], items["gradients"]]
    assert sum(item["train"] for item in held) == 16 * SMOLLM2_135M.num_parameters


def test_only_adapters_have_gradients_and_optimizer_states(load):
    items, _ = memory_of(load("model.lora.rank=8", "model.dtype=bfloat16"))
    shape = SMOLLM2_135M
    attention = 2 * (576 + 576) + 2 * (576 + 192)  # inputs and outputs of q and o, of k and v
    trained = 8 * 30 * (attention + 3 * (576 + 1536))
    assert items["actor weights"]["train"] == 2 * (shape.num_parameters + trained)
    assert items["gradients"]["train"] == 4 * trained
    assert items["actor optimizer"]["train"] == 12 * trained
    on_values = [f"model.lora={{rank: 8, targets: [{name}]}}" for name in ("v_proj", "q_proj")]
    sizes = [memory_of(load(one, "model.dtype=bfloat16"))[0]["gradients"]["train"] for one in on_values]
    assert sizes == [4 * 8 * 30 * 768, 4 * 8 * 30 * 1152]


@pytest.mark.parametrize(("target", "is_there"), [("c_attn", True), ("experts.down_proj", False)])
def test_adapters_of_layers_that_llama_lacks_are_planned_with(load, target, is_there):
    recipe = load(
        f"model.lora={{rank: 8, targets: [{target}]}}", "train.offload=[optimizer]", "cluster.device_memory=80"
    )
    assert memory_of(recipe)[0]["gradients"]["train"] > 0 or not is_there


def test_embeddings_of_layers_are_gathered_as_a_whole_and_updated_in_parts(load):
    shape = replace(SMOLLM2_135M, layer_embeddings=10**10)
    recipe = load(
        "cluster.devices_per_node=2",
        "train.parallel.shard=2",
        "train.offload=[optimizer]",
        "cluster.device_memory=1000",
    )
    (group,) = make_plan(recipe, shape).memory
    items = {item.name: item.bytes_by_phase["train"] for item in group.items if "train" in item.bytes_by_phase}
    assert items["gathered layers"] > 2 * 10**10
    assert items["actor optimizer"] < 0.1 * 12 * 10**10 / 2


def test_with_adapters_the_reference_is_no_model_of_its_own(load):
    kl = ("algorithm.kl.where=loss", "algorithm.kl.coefficient=0.1")
    assert "reference weights" in memory_of(load(*kl))[0]
    with_adapters = memory_of(load(*kl, "model.lora.rank=8"))[0]
    assert "reference weights" not in with_adapters
    assert with_adapters["activations"]["logprobs"] > 0  # the actor computes it
    assert "reference weights" in memory_of(load(*kl, "model.lora.rank=8", "reference.path=other"))[0]


def test_dropout_of_adapters_is_refused_where_ranks_split_a_layer(load):
    with pytest.raises(RecipeError, match=r"model.lora.dropout: 0.1.*drop different inputs"):
        make_plan(load("model.lora.dropout=0.1", "train.parallel.tensor=2", "cluster.devices_per_node=2"))


def test_what_auto_means_depends_on_the_device(load):
    assert make_plan(load(), SMOLLM2_135M).weight_bytes == 4
    assert make_plan(load(), SMOLLM2_135M, device="cuda").weight_bytes == 2
    assert make_plan(load("model.dtype=float32"), SMOLLM2_135M, device="cuda").weight_bytes == 4


def test_the_kv_cache_is_bounded_by_sequences_and_lengths(load):
    items, _ = memory_of(load("rollout.max_sequences=3", "data.max_prompt_tokens=10", "rollout.max_response_tokens=6"))
    assert items["KV cache"] == {"rollout": 3 * 16 * 30 * 3 * 64 * 2 * 4}


def test_nothing_is_scored_where_nothing_has_to_be(load):
    assert set(memory_of(load())[1]) == {"rollout", "train"}
    assert set(memory_of(load("algorithm.kl.where=loss"))[1]) == {"rollout", "logprobs", "train"}


def test_keys_of_a_prompt_are_gathered_for_each_of_its_samples(load):
    sizes = ("data.max_prompt_tokens=4000", "rollout.max_response_tokens=100", "batch.max_tokens_per_micro_batch=8000")

    def activations(num_samples):
        recipe = load(*sizes, "model.dtype=bfloat16", f"batch.samples_per_prompt={num_samples}")
        return memory_of(recipe, device="cuda")[0]["activations"]["train"]

    of_key = 2 * (384 + 384 + 2 * 576)  # keys and values, their gradients, and before them those of each query head
    more = 8 * 4100 / (4000 + 8 * 100) - 1
    assert activations(8) - activations(1) == pytest.approx(8000 * more * of_key, abs=2)
    assert activations(10_000) == pytest.approx(activations(1) + 8000 * 15 * of_key, abs=2)


def test_turns_gather_keys_of_those_before(load):
    def activations(*overrides):
        recipe = load("model.dtype=bfloat16", "rollout.max_sequences=500", "environment.name=frozen_lake", *overrides)
        return memory_of(recipe, device="cuda")[0]["activations"]["rollout"]

    one = activations("data.max_prompt_tokens=1000", "rollout.max_response_tokens=1000")
    several = activations("data.max_prompt_tokens=1000", "rollout.max_response_tokens=1000", "rollout.max_turns=5")
    assert several - one == (16 * 8192 - 2000) * 384 * 2


def test_a_gpu_keeps_the_logits_of_its_graphs_and_leaving_tokens_out_takes_more(load):
    every, _ = memory_of(load("model.dtype=bfloat16"), device="cuda")
    nucleus, _ = memory_of(load("model.dtype=bfloat16", "rollout.top_p=0.9"), device="cuda")
    name, per_logit = "logits of a decode step", 512 * SMOLLM2_135M.vocab_size
    assert every[name] == {"rollout": 2 * per_logit, "train": 2 * per_logit}
    assert nucleus[name]["train"] == (2 + 8) * per_logit + 64 * 40 * SMOLLM2_135M.vocab_size
    assert memory_of(load(), device="cpu")[0][name].keys() == {"rollout"}


def test_the_gradient_of_a_head_is_added_up_over_chunks(load):
    def chunk(*overrides):
        return memory_of(load("model.dtype=bfloat16", *overrides), device="cuda")[0]["logits chunk"]["train"]

    vocabulary, head = SMOLLM2_135M.vocab_size, SMOLLM2_135M.vocab_size * SMOLLM2_135M.hidden_size * 4
    assert chunk("batch.max_tokens_per_micro_batch=8192") == 8192 * vocabulary * 2 + head
    assert chunk("batch.max_tokens_per_micro_batch=8193") == 8192 * vocabulary * 2 + 2 * head


def test_recomputing_takes_far_less_for_activations(load):
    kept, _ = memory_of(load())
    recomputed, _ = memory_of(load("train.gradient_checkpointing=true"))
    assert recomputed["activations"]["train"] < kept["activations"]["train"] / 10


def test_moments_in_bfloat16_take_half(load):
    items, _ = memory_of(load("model.dtype=bfloat16", "optimizer.state_dtype=bfloat16"))
    assert items["actor optimizer"]["train"] == (2 * 2 + 4) * SMOLLM2_135M.num_parameters
    offloaded = load("model.dtype=bfloat16", "optimizer.state_dtype=bfloat16", "train.offload=[optimizer]")
    assert host_memory(make_plan(offloaded, SMOLLM2_135M)) == (2 * 2 + 4) * SMOLLM2_135M.num_parameters


def test_products_are_more_than_inputs_and_less_than_everything(load):
    sizes = [
        memory_of(load(*overrides))[0]["activations"]["train"]
        for overrides in (
            ["train.gradient_checkpointing=true", "train.offload=[activations]"],
            ["train.gradient_checkpointing=true"],
            ["train.gradient_checkpointing=selective"],
            [],
        )
    ]
    assert sizes == sorted(sizes)
    assert 4 * sizes[0] < 3 * sizes[1] < sizes[2] < 0.6 * sizes[3]
    inputs = 30 * 4096 * SMOLLM2_135M.hidden_size * 4
    plan = make_plan(load("train.gradient_checkpointing=true", "train.offload=[activations]"), SMOLLM2_135M)
    assert host_memory(plan) == inputs
    assert "per node: activations (`train.offload`)" in plan.text()


def test_a_trajectory_in_parts_takes_less_than_as_a_whole(load):
    long = ["data.max_prompt_tokens=2000", "rollout.max_response_tokens=30000"]
    whole, _ = memory_of(load(*long, "batch.max_tokens_per_micro_batch=32000", "train.gradient_checkpointing=true"))
    parts, _ = memory_of(load(*long, "batch.max_tokens_per_micro_batch=2000"))
    short, _ = memory_of(load("batch.max_tokens_per_micro_batch=2000"))
    assert short["activations"]["train"] < parts["activations"]["train"] < 0.85 * whole["activations"]["train"]
    text = make_plan(load(*long, "batch.max_tokens_per_micro_batch=2000"), SMOLLM2_135M).text()
    assert "up to 2000 tokens per micro-batch, longer ones in parts" in text


def test_a_copy_of_the_base_stays_with_the_engine_because_only_adapters_come_again(load):
    items, _ = memory_of(load("cluster.devices_per_node=4", "model.lora.rank=4", "train.parallel.shard=4"))
    assert set(items["rollout weights"]) == {"rollout", "train"}


def test_a_device_holds_what_the_largest_stage_has(load):
    """30 layers, and an embedding as large as 8 of them at both ends: stages of 15 and 15 layers, or 4, 11, 11, 4."""
    embedding = SMOLLM2_135M.vocab_size * SMOLLM2_135M.hidden_size
    layer = (SMOLLM2_135M.num_parameters - embedding) // 30
    for stages, largest in ((2, 15 * layer + embedding), (4, 4 * layer + embedding)):
        items, _ = memory_of(load("cluster.devices_per_node=4", f"train.parallel.pipeline={stages}"))
        assert items["actor weights"]["train"] == pytest.approx(4 * largest / (4 // stages), rel=1e-6)
        assert items["gradients"]["train"] == pytest.approx(4 * largest / (4 // stages), rel=1e-6)


def test_the_first_stage_keeps_activations_of_as_many_micro_batches_as_there_are_stages(load):
    alone, _ = memory_of(load("cluster.devices_per_node=2"))
    staged, _ = memory_of(load("cluster.devices_per_node=2", "train.parallel.pipeline=2"))
    assert staged["activations"]["train"] == alone["activations"]["train"]  # 2 x 15 layers


def test_the_plan_says_how_long_stages_wait(load):
    recipe = load(*BATCH, "cluster.devices_per_node=4", "train.parallel.pipeline=4", "data.max_prompt_tokens=512")
    plan = make_plan(recipe, SMOLLM2_135M)
    number = math.ceil((64 * 512 + 512 * recipe.rollout.max_response_tokens) / recipe.batch.max_tokens_per_micro_batch)
    assert plan.as_dict()["batch"]["pipeline_bubble"] == pytest.approx(3 / (number + 3))
    assert f"pipeline: 4 stages; with {number} micro-batches of an update of full length, each waits" in plan.text()


def test_context_and_tensor_divide_the_activations(load):
    recipe = ["cluster.devices_per_node=4", "algorithm.kl.where=loss"]
    sharded, _ = memory_of(load(*recipe))
    split, _ = memory_of(load(*recipe, "train.parallel.context=2", "train.parallel.tensor=2"))
    for phase in ("logprobs", "train"):
        assert split["activations"][phase] == sharded["activations"][phase] // 4
    assert split["activations"]["rollout"] == sharded["activations"]["rollout"]


def test_an_engine_with_devices_of_its_own_has_a_whole_model(load):
    actor, rollout = make_plan(load(*APART), SMOLLM2_135M).memory
    assert "rollout weights" not in {item.name for item in actor.items}
    assert rollout.items[0].name == "rollout weights"
    assert rollout.items[0].bytes_by_phase["rollout"] == 4 * SMOLLM2_135M.num_parameters


def test_what_is_offloaded_counts_where_it_is_computed_with(load):
    recipe = load(
        "cluster.devices_per_node=4", "algorithm.name=ppo", "train.offload=[parameters, gradients, optimizer]"
    )
    items, _ = memory_of(recipe)
    phases = {name: set(sizes) for name, sizes in items.items()}
    assert phases["actor weights"] == {"train"}
    assert phases["critic weights"] == {"logprobs", "train"}
    assert phases["reference weights"] == {"logprobs"}
    assert phases["actor optimizer"] == phases["critic optimizer"] == phases["gradients"] == {"train"}
    assert phases["rollout weights"] == {"rollout"}


def test_what_is_offloaded_is_on_the_host_of_each_node(load):
    everything = "train.offload=[parameters, gradients, optimizer]"
    of_actor, of_reference = 16, 2  # bytes of a parameter: master, gradient and two moments in float32; bfloat16
    nodes = ["cluster.nodes=2", "cluster.devices_per_node=4", "model.dtype=bfloat16", "algorithm.name=ppo"]
    plan = make_plan(load(*nodes, everything), SMOLLM2_135M)
    assert host_memory(plan) == pytest.approx((2 * of_actor + of_reference) * SMOLLM2_135M.num_parameters / 2)
    assert "per node: parameters, gradients, optimizer (`train.offload`)" in plan.text()
    whole = make_plan(load("model.dtype=bfloat16", "train.offload=[optimizer]"), SMOLLM2_135M)
    assert host_memory(whole) == 12 * SMOLLM2_135M.num_parameters
    assert "(`train.offload`)" not in make_plan(load(), SMOLLM2_135M).text()


def test_an_actor_that_recomputes_is_there_for_scoring(load):
    offloaded = [
        "cluster.devices_per_node=4",
        "train.offload=[parameters,gradients]",
        "algorithm.old_logprobs=recompute",
    ]
    items, _ = memory_of(load(*offloaded))
    assert set(items["actor weights"]) == {"logprobs", "train"}
    assert set(items["actor optimizer"]) == {"rollout", "logprobs", "train"}


def test_totals_are_the_sums_of_their_phase(load):
    items, totals = memory_of(load("algorithm.name=ppo"))
    assert totals["train"] == sum(sizes.get("train", 0) for sizes in items.values())


def test_groups_of_devices_are_told_apart(load):
    recipe = load("cluster.devices_per_node=3", "cluster.placement={rollout: 0-1, actor: 2}")
    lines = lines_of(recipe)
    assert "device 0-1 (rollout)" in lines
    assert "device 2 (actor)" in lines


# --- for programs


def test_the_plan_as_a_dictionary_survives_json(load):
    plan = make_plan(load("algorithm.name=ppo", *BATCH), SMOLLM2_135M, num_rows=100).as_dict()
    assert json.loads(json.dumps(plan)) == plan
    assert plan["batch"]["update_sizes"] == [512]
    assert plan["placement"] == {"actor": [0], "rollout": [0], "reference": [0], "critic": [0], "idle": []}
    assert plan["algorithm"]["advantage"] == {"name": "gae", "gamma": 1.0, "gae_lambda": 1.0, "whiten": True}
    whole = {"pipeline": 1, "replicate": 1, "shard": 1, "expert": 1, "context": 1, "tensor": 1}
    assert plan["mesh"] == {"actor": whole, "reference": whole, "critic": whole}
    assert plan["memory"][0]["total"]["train"] > 0


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (2**50, "1,024 TiB")],
)
def test_bytes_are_said_in_human_units(size, words):
    assert human_bytes(size) == words


@pytest.mark.parametrize(
    ("number", "words"), [(12, "12"), (134_515_008, "134.5 million"), (30_532_122_624, "30.53 billion")]
)
def test_counts_are_said_in_human_units(number, words):
    assert human_count(number) == words


# --- engines, and models that do not fit one device

FOUR_NODES = (
    "cluster.nodes=4",
    "cluster.devices_per_node=8",
    "cluster.device_memory=80",
    "train.gradient_checkpointing=true",
    "data.max_prompt_tokens=1024",
    "rollout.max_response_tokens=3072",
    "batch.max_tokens_per_micro_batch=8192",
)


def test_another_engine_has_corrected_log_probs_by_default_and_the_plan_says_why(load):
    lines = lines_of(load("rollout.engine=vllm"))
    assert any("recomputed" in line and "vllm computes with other kernels than the trainers" in line for line in lines)
    assert any(line.startswith("correction") and "token_tis" in line for line in lines)
    assert "engine   vllm: 1 engine, in processes of their own" in lines
    assert not any("other kernels" in line for line in lines_of(load()))


def test_a_model_of_72_billion_parameters_is_spread_over_four_devices_of_an_engine(load):
    recipe = load(*FOUR_NODES, "rollout.engine=vllm", "rollout.engine.tensor_parallel=4")
    plan = make_plan(recipe, QWEN_72B)
    [group] = plan.memory
    items = {item.name: item.bytes_by_phase for item in group.items}
    assert items["rollout weights"] == {"rollout": 2 * QWEN_72B.num_parameters // 4}
    assert items["actor weights"]["train"] == 2 * QWEN_72B.num_parameters // 32
    assert items["KV cache"]["rollout"] > 2**30
    assert all(total <= 80 * 2**30 for total in group.totals.values())
    text = plan.text()
    assert "engine   vllm: 8 engines of 4 devices each, in processes of their own" in text
    assert "of 2 bytes, of 80 GiB" in text


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_what_does_not_fit_is_an_error_that_says_what_would(load, engine):
    with pytest.raises(RecipeError) as caught:
        make_plan(load(*FOUR_NODES, f"rollout.engine={engine}"), QWEN_72B)
    [problem] = caught.value.problems
    assert problem.startswith("device 0-31 (actor+rollout) needs 168 GiB for rollout, ")
    assert "and has 80 (`cluster.device_memory`)" in problem
    assert problem.endswith("`rollout.engine: {name: vllm, tensor_parallel: 4}` would fit")


def test_trainers_that_do_not_fit_are_not_helped_by_an_engine(load):
    with pytest.raises(RecipeError) as caught:
        make_plan(load("cluster.devices_per_node=8", "cluster.device_memory=80"), QWEN_72B)
    assert "would fit" not in caught.value.problems[0]


def test_what_no_gpu_holds_is_an_error_where_memory_is_not_written(load):
    sizes = ("cluster.devices_per_node=4", "model.dtype=bfloat16")
    with pytest.raises(RecipeError) as caught:
        make_plan(load(*sizes), QWEN_72B)
    [problem] = caught.value.problems
    # weights in 2 bytes, moments and a master copy in 12, and a whole copy for the engine: 72.7e9 x (14 / 4 + 2)
    assert problem.startswith(
        "device 0-3 (actor+rollout) needs 373 GiB for rollout, without activations and a KV cache"
    )
    assert "no GPU has more than 268; for CPUs write what they have: `cluster.device_memory`" in problem
    assert make_plan(load(*sizes), QWEN_72B, device="cpu").memory
    assert make_plan(load(*sizes, "cluster.device_memory=1000"), QWEN_72B).memory


def test_what_few_gpus_hold_is_a_warning_where_memory_is_not_written(load):
    sizes = ("cluster.devices_per_node=8", "model.dtype=bfloat16")
    for engine, needed in (("native", 254), ("{name: vllm, tensor_parallel: 2}", 187)):
        [warning] = [
            one for one in make_plan(load(*sizes, f"rollout.engine={engine}"), QWEN_72B).warnings if "GiB" in one
        ]
        assert warning.startswith(f"device 0-7 (actor+rollout) needs {needed} GiB for rollout, without activations")
    # a budget that is larger than what a step can fill is no need
    assert not make_plan(load(*sizes, "batch.max_tokens_per_micro_batch=10000000"), QWEN_7B).warnings


def test_the_plan_of_preferences_counts_pairs_and_has_a_reference(load):
    changes = ("algorithm.name=dpo", "data.train.path=arithmetic:addition", "data.train.size=1000")
    changes += ("~schedule.steps", "schedule.epochs=3", "batch.prompts_per_step=32", "batch.updates_per_step=2")
    plan = make_plan(load(*changes))
    assert plan.num_steps == 94
    assert "32 pairs -> 2 updates of 16 on 1 trainer" in plan.text()
    assert "94 steps = 3008 pairs of up to 6.16 million tokens, 188 updates; 3.01 epochs of 1000 rows" in plan.text()
    assert "trained on pairs of answers of the rows, nothing is rolled out; no engine is built" in plan.text()
    assert plan.as_dict()["placement"] == {"actor": [0], "reference": [0], "idle": []}
    assert plan.as_dict()["batch"]["trajectories"] == 64
    assert plan.as_dict()["batch"]["update_sizes"] == [16, 16]
    without = make_plan(load(*changes, "algorithm.name=simpo"))
    assert without.as_dict()["placement"] == {"actor": [0], "idle": []}


def test_the_plan_of_supervised_fine_tuning_counts_rows_and_has_no_engine(load):
    changes = ("algorithm.name=sft", "data.train.path=arithmetic:addition", "data.train.size=1000")
    plan = make_plan(load(*changes, "~schedule.steps", "schedule.epochs=3", "batch.prompts_per_step=32"))
    assert plan.num_steps == 94
    assert "32 rows -> 1 update of 32 on 1 trainer" in plan.text()
    assert "94 steps = 3008 rows of up to 3.08 million tokens, 94 updates; 3.01 epochs of 1000 rows" in plan.text()
    assert "no engine is built" in plan.text()
    assert plan.as_dict()["placement"] == {"actor": [0], "idle": []}
    assert plan.as_dict()["batch"]["trajectories"] == 32


QWEN_1_5B = ModelShape(1536, 28, 12, 2, 128, 8960, 151936, tie_word_embeddings=True, qkv_bias=True)


@pytest.mark.parametrize(("name", "shape"), [("qwen2.5-1.5b-gsm8k", QWEN_1_5B), ("qwen2.5-7b-lora", QWEN_7B)])
def test_the_recipes_for_one_gpu_fit_into_80_gib(name, shape):
    path = Path(__file__).parents[2] / "recipes" / f"{name}.yaml"
    [group] = make_plan(load_recipe(path, ["model.dtype=bfloat16", "cluster.device_memory=80"]), shape).memory
    assert max(group.totals.values()) < 70 * 2**30


def test_frozen_weights_in_four_bits_take_half_a_byte_and_a_scale_for_64(load):
    items, _ = memory_of(load("model.lora.rank=8", "model.dtype=bfloat16", "model.quantization.bits=4"))
    plain, _ = memory_of(load("model.lora.rank=8", "model.dtype=bfloat16"))
    linear = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    saved = int(linear * (2 - 0.5 - 4 / 64)) - 2 * 576 * 1536
    assert plain["actor weights"]["train"] - items["actor weights"]["train"] == saved
    assert items["gradients"] == plain["gradients"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), r"model.quantization.*only adapters beside them"),
        (("model.lora.rank=8", "rollout.engine=vllm"), r"model.quantization.*decode with other weights"),
        (
            ("model.lora.rank=8", "train.parallel.shard=2", "cluster.devices_per_node=2"),
            r"codes of weights are not shar",
        ),
    ],
)
def test_quantization_is_refused_where_it_is_not_computed(load, options, why):
    with pytest.raises(RecipeError, match=why):
        make_plan(load("model.quantization.bits=4", *options))
    make_plan(load("model.quantization.bits=8", "model.lora.rank=8"))
