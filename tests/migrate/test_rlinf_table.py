"""RLinf's keys: the guide's two pieces, whole files of both times, and what is unlike Corral."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from foreign import entry, read
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.migrate.config import Config, add_file
from corral.migrate.migration import Migration
from corral.migrate.outcome import format_value
from corral.migrate.rlinf import TABLE
from corral.recipe.errors import RecipeError
from corral.recipe.plan import Plan, make_plan

SHARED = """
cluster:
  num_nodes: 4
  num_gpus_per_node: 8
  component_placement:
    actor,rollout: all
"""
"""Of the guide: all phases on all GPUs."""
APART = """
cluster:
  num_nodes: 4
  num_gpus_per_node: 8
  component_placement:
    rollout:    0-19
    inference:  20-23
    actor:      24-31
"""
"""Of the guide: each phase on GPUs of its own."""

FIRST_TIMES = """
defaults:
  - override hydra/job_logging: stdout
hydra: {run: {dir: .}, output_subdir: null}
cluster: {num_nodes: 16, num_gpus_per_node: 8, component_placement: {"actor,rollout": all}}
runner:
  task_type: math
  logger:
    log_path: ${runner.output_dir}/${runner.experiment_name}
    project_name: rlinf
    experiment_name: ${runner.experiment_name}
    logger_backends: ["tensorboard"]
  max_epochs: 5
  max_steps: -1
  val_check_interval: 1
  save_interval: 50
  seq_length: 28672
  enable_dynamic_batch_size: False
  max_tokens_per_mbs: 28672
  resume_dir: null
  experiment_name: grpo-1.5b
  output_dir: ../results
algorithm:
  group_size: 16
  n_minibatches: 4
  training_batch_size_per_gpu: 1
  rollout_batch_size_per_gpu: null
  logprob_forward_micro_batch_size: 1
  val_rollout_batch_size_per_gpu: 4
  recompute_logprobs: True
  shuffle_rollout: False
  loss_type: math_ppo_actor
  loss_agg_func: "token-mean"
  kl_beta: 0.0
  kl_penalty_type: low_var_kl
  ratio_clip_eps: 0.2
  entropy_bonus: 0.0
  calculate_entropy: False
  clip_ratio_c: null
  adv_type: math_grpo
  normalize_advantages: True
  early_stop_imp_ratio: 5.0
  use_valid_token_scale: False
  sampling_params:
    use_greedy: False
    temperature: 1.0
    top_k: 1000000
    top_p: 1.0
    repetition_penalty: 1.0
    max_new_tokens: ${subtract:${runner.seq_length}, ${data.max_prompt_length}}
    min_new_tokens: 1
rollout:
  group_name: "RolloutGroup"
  gpu_memory_utilization: 0.55
  model_dir: /model/DeepSeek-R1-Distill-Qwen-1.5B/
  model_arch: qwen2.5
  enforce_eager: False
  distributed_executor_backend: mp
  disable_log_stats: False
  detokenize: False
  padding: null
  eos: null
  attention_backend: triton
  return_logprobs: ${not:algorithm.recompute_logprobs}
  tensor_parallel_size: 1
  pipeline_parallel_size: 1
  validate_weight: False
  validate_save_dir: null
  print_outputs: False
  sglang_decode_log_interval: 500000
  max_running_requests: 64
  cuda_graph_max_bs: 128
  use_torch_compile: False
  torch_compile_max_bs: 128
data:
  type: math
  max_prompt_length: 1024
  filter_prompt_by_length: True
  rollout_batch_size: 512
  val_rollout_batch_size: null
  num_workers: 2
  prompt_key: prompt
  shuffle: True
  validation_shuffle: True
  seed: 1234
  train_data_paths: ["/dataset/boba/AReaL-boba-106k.jsonl"]
  val_data_paths: ["/dataset/boba/AReaL-boba-106k.jsonl"]
actor:
  group_name: "ActorGroup"
  training_backend: megatron
  mcore_gpt: True
  spec_name: decoder_gpt
  checkpoint_load_path: null
  offload_optimizer: True
  offload_weight: True
  offload_grad: True
  enable_dp_load_balance: False
  calculate_flops: False
  seed: 1234
  model:
    precision: fp16
    add_bias_linear: False
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 1
    activation: swiglu
    sequence_parallel: True
    recompute_method: block
    recompute_granularity: full
    recompute_num_layers: 20
    seq_length: ${runner.seq_length}
    encoder_seq_length: ${runner.seq_length}
    normalization: rmsnorm
    position_embedding_type: rope
    apply_rope_fusion: True
    attention_softmax_in_fp32: True
    variable_seq_lengths: True
    moe_token_dispatcher_type: alltoall
  optim:
    optimizer: adam
    bf16: False
    fp16: True
    lr: 2e-05
    adam_beta1: 0.9
    adam_beta2: 0.95
    adam_eps: 1.0e-05
    min_lr: 2.0e-6
    weight_decay: 0.05
    use_distributed_optimizer: True
    overlap_grad_reduce: True
    overlap_param_gather: True
    optimizer_enable_pin: false
    overlap_param_gather_with_optimizer_step: False
    clip_grad: 0.8
    loss_scale: 65536
  lr_sched:
    lr_warmup_fraction: 0.01
    lr_warmup_init: 0.0
    lr_warmup_iters: 0
    max_lr: 2.0e-5
    min_lr: 0.0
    lr_decay_style: constant
    lr_decay_iters: 10
  tokenizer:
    tokenizer_model: /model/DeepSeek-R1-Distill-Qwen-1.5B/
    use_fast: False
    trust_remote_code: True
    padding_side: 'right'
  megatron:
    ddp_bucket_size: null
    use_hf_ckpt: True
    ckpt_convertor: {model: DeepSeek-R1-Distill-Qwen-1.5B, hf_model_path: "${rollout.model_dir}", use_gpu_num : 0}
    profiler: {activities: ["cpu", "cuda"], record_shapes: True}
reward: {use_reward_model: false, reward_type: 'math', reward_scale: 5.0}
critic: {use_critic_model: false}
"""

TODAY = """
defaults:
  - ../hybrid_engines/fsdp@inference.fsdp_config
  - ../hybrid_engines/fsdp@actor.fsdp_config
  - _self_
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout,reward: all
runner:
  task_type: reasoning
  logger: {project_name: rlinf, logger_backends: ["wandb"]}
  max_epochs: 5
  max_steps: 201
  save_interval: -1
  seq_length: 18432
  enable_dynamic_batch_size: True
  max_tokens_per_mbs: 28672
  resume_dir: auto
  experiment_name: grpo fsdp/1.5b
algorithm:
  group_size: 8
  n_minibatches: 4
  training_batch_size_per_gpu: 1
  recompute_logprobs: False
  loss_type: actor
  adv_type: grpo
  kl_beta: 0.001
  kl_penalty_type: low_var_kl
  clip_ratio_low: 0.2
  clip_ratio_high: 0.28
  ratio_clip_eps: 0.2
  clip_ratio_c: 3.0
  normalize_advantages: True
  early_stop_imp_ratio: 5.0
  sampling_params: {do_sample: True, temperature: 0.9, top_k: -1, top_p: 0.95, max_new_tokens: 8192}
rollout:
  model: {model_path: /models/Qwen3-4B, model_type: qwen3, precision: fp16}
  rollout_backend: vllm
  vllm: {attention_backend: FLASH_ATTN, enable_chunked_prefill: True}
  tensor_parallel_size: 2
data:
  type: math
  dataset_name: boba
  max_prompt_length: 1024
  filter_prompt_by_length: False
  rollout_batch_size: 128
  prompt_key: question
  answer_key: result
  apply_chat_template: True
  shuffle: False
  seed: 42
  data_size: 1000
  train_data_paths: [one.jsonl, two.jsonl]
actor:
  training_backend: fsdp
  enable_offload: True
  global_batch_size: 8
  micro_batch_size: 1
  model: {model_type: "${rollout.model.model_type}", model_path: "${rollout.model.model_path}/", precision: fp32}
  optim:
    lr: 1.0e-6
    lr_scheduler: cosine
    total_training_steps: 200
    lr_warmup_steps_ratio: 0.1
    min_lr: 1.0e-7
    adam_beta1: 0.9
    adam_beta2: 0.999
    adam_eps: 1.0e-8
    weight_decay: 0.01
    clip_grad: 1.0
  lr_sched: {lr_warmup_fraction: 0.01, lr_decay_style: constant}
  tokenizer: {tokenizer_model: "${rollout.model.model_path}", trust_remote_code: False}
  fsdp_config:
    strategy: fsdp2
    sharding_strategy: full_shard
    gradient_checkpointing: True
    cpu_offload: False
    mixed_precision: {param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}
    amp_autocast: {enabled: False, precision: fp16}
    grad_scaler: {enabled: False}
reward: {group_name: RewardGroup, use_reward_model: false, reward_type: math, reward_scale: 1.0}
critic: {use_critic_model: false}
"""


def migrated(tmp_path: Path, text: str, *overrides: str) -> Migration:
    file = tmp_path / "rlinf.yaml"
    file.write_text(text)
    return read(TABLE, *overrides, file=file)


def planned(migration: Migration) -> Plan:
    return make_plan(migration.recipe)


def status(migration: Migration, key: str) -> str:
    return entry(migration, key).outcome.status


def note(migration: Migration, key: str) -> str:
    return entry(migration, key).outcome.note


def problems(*overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read(TABLE, *overrides)
    return list(caught.value.problems)


# --- the guide


def test_the_shared_piece_of_the_guide_is_a_whole_recipe(tmp_path: Path) -> None:
    migration = migrated(tmp_path, SHARED)
    plan = planned(migration).as_dict()
    assert [one.outcome.status for one in migration.entries] == ["mapped"] * 3
    assert plan["placement"]["actor"] == plan["placement"]["rollout"] == list(range(32))
    assert plan["batch"]["trajectories"] == 8192
    assert plan["batch"]["update_sizes"] == [2048] * 4
    assert plan["mesh"]["actor"] == {"replicate": 1, "shard": 16, "expert": 1, "context": 1, "tensor": 2}
    assert plan["warnings"] == []


def test_what_the_piece_leaves_out_is_of_rlinfs_example(tmp_path: Path) -> None:
    recipe = migrated(tmp_path, SHARED).recipe
    assert recipe.model.path == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    assert recipe.model.dtype == "float16"
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens) == (1024, 28672 - 1024)
    assert recipe.optimiser.learning_rate == 2e-5
    assert recipe.optimiser.betas == (0.9, 0.95)
    assert (recipe.optimiser.epsilon, recipe.optimiser.weight_decay) == (1e-5, 0.05)
    assert recipe.optimiser.max_gradient_norm == 0.8
    assert recipe.optimiser.warmup_steps == 0
    assert recipe.environment.reward.options == {"right": 5.0, "wrong": -5.0}
    assert recipe.environment.reward.on_error == -5.0
    assert recipe.train.offload == ["parameters", "gradients", "optimiser"]
    assert recipe.algorithm.old_logprobs == "recompute"
    assert (recipe.schedule.epochs, recipe.checkpoint.every, recipe.seed) == (5, 50, 1234)


def test_that_the_example_s_data_has_to_be_put_there_is_said(tmp_path: Path) -> None:
    setting = migrated(tmp_path, SHARED).settings["data", "train", "path"]
    assert setting.value == "boba-106k.jsonl"
    assert "put AReaL-boba-106k there" in setting.outcome.note


def test_devices_apart_learn_while_the_rest_is_played(tmp_path: Path) -> None:
    migration = migrated(tmp_path, APART)
    recipe = migration.recipe
    assert recipe.cluster.placement == {"rollout": "0-19", "actor": "24-31"}
    assert recipe.schedule.pipelined
    assert "n_minibatches 4" in note(migration, "cluster.component_placement.rollout")
    assert planned(migration).placement.idle == (20, 21, 22, 23)


def test_devices_for_log_probs_are_idle_where_the_engine_gives_them(tmp_path: Path) -> None:
    migration = migrated(tmp_path, APART)
    assert status(migration, "cluster.component_placement.inference") == "built in"
    assert "20-23: they are idle" in note(migration, "cluster.component_placement.inference")
    assert migration.recipe.algorithm.old_logprobs is None


def test_with_a_kl_they_are_the_references(tmp_path: Path) -> None:
    migration = migrated(tmp_path, APART, "algorithm.kl_beta=0.001")
    assert migration.recipe.cluster.placement == {"rollout": "0-19", "reference": "20-23", "actor": "24-31"}
    assert planned(migration).placement.idle == ()


# --- whole files


def test_a_file_of_the_first_times(tmp_path: Path) -> None:
    migration = migrated(tmp_path, FIRST_TIMES)
    plan = planned(migration).as_dict()
    assert migration.unsupported == []
    assert migration.recipe.model.path == "/model/DeepSeek-R1-Distill-Qwen-1.5B"
    assert migration.recipe.model.trust_remote_code
    assert migration.recipe.data.train.path == "/dataset/boba/AReaL-boba-106k.jsonl"
    assert migration.recipe.data.validation is None
    assert migration.recipe.logging.trackers == ["console", "tensorboard"]
    assert migration.recipe.logging.runs == "../results"
    assert plan["batch"]["max_tokens_per_micro_batch"] == 28672
    assert plan["mesh"]["actor"]["shard"] == 64


def test_a_file_says_the_same_as_its_piece(tmp_path: Path) -> None:
    """What is the user's aside."""
    piece = migrated(tmp_path, SHARED.replace("num_nodes: 4", "num_nodes: 16")).recipe
    whole = migrated(tmp_path, FIRST_TIMES).recipe
    own = {"model": whole.model, "data": whole.data, "logging": whole.logging}
    written = piece.model_copy(update=own).model_dump(exclude={"algorithm"})
    assert written == whole.model_dump(exclude={"algorithm"})
    assert make_plan(piece).algorithm == make_plan(whole).algorithm


def test_a_file_of_today(tmp_path: Path) -> None:
    migration = migrated(tmp_path, TODAY)
    recipe, plan = migration.recipe, planned(migration)
    assert migration.unsupported == []
    assert recipe.cluster.placement == {"actor,rollout,reference": "all"}
    assert recipe.cluster.devices_per_node == 8
    assert (recipe.name, recipe.seed) == ("grpo-fsdp-1.5b", 42)
    assert recipe.model.path == "/models/Qwen3-4B"
    assert recipe.model.dtype == "bfloat16"
    assert recipe.data.train.path == ["one.jsonl", "two.jsonl"]
    assert recipe.data.train.max_rows == 1000
    assert (recipe.data.prompt_key, recipe.data.answer_key, recipe.data.chat) == ("question", "result", True)
    assert (recipe.data.overlong, recipe.data.shuffle) == ("truncate_right", False)
    assert (recipe.rollout.temperature, recipe.rollout.top_k, recipe.rollout.top_p) == (0.9, 0, 0.95)
    assert recipe.rollout.max_response_tokens == 8192
    assert recipe.batch.max_tokens_per_micro_batch == 28672
    assert (recipe.schedule.steps, recipe.schedule.epochs) == (201, None)
    assert (recipe.checkpoint.every, recipe.checkpoint.at_end, recipe.checkpoint.resume) == (0, False, "auto")
    assert (recipe.logging.trackers, recipe.logging.project) == (["console", "wandb"], "rlinf")
    assert recipe.environment.reward.options == {"right": 1.0, "wrong": -1.0}
    assert recipe.train.recompute == "full"
    assert recipe.train.offload == ["parameters", "gradients", "optimiser"]
    assert plan.algorithm.old_logprobs == "engine"
    assert (plan.algorithm.clip_low, plan.algorithm.clip_high, plan.algorithm.dual_clip) == (0.2, 0.28, 3.0)
    assert plan.algorithm.max_mean_ratio is None
    assert plan.meshes["actor"].shard == 8


def test_of_today_s_file_learning_rates_count_steps(tmp_path: Path) -> None:
    migration = migrated(tmp_path, TODAY)
    optimiser = migration.recipe.optimiser
    assert optimiser.warmup_steps == 20 * 4
    assert (optimiser.schedule, optimiser.min_learning_rate_ratio) == ("cosine", pytest.approx(0.1))
    assert status(migration, "actor.lr_sched.lr_warmup_fraction") == "no effect"
    assert status(migration, "algorithm.early_stop_imp_ratio") == "no effect"


def test_every_key_of_a_file_is_in_the_report(tmp_path: Path) -> None:
    migration, config = migrated(tmp_path, FIRST_TIMES), Config()
    add_file(config, tmp_path / "rlinf.yaml")
    assert {one.given.key for one in migration.entries} == set(config.flat())
    assert all(one.outcome.note or one.outcome.ours for one in migration.entries)


def test_both_spellings_are_one_key() -> None:
    old = read(TABLE, "rollout.model_dir=/a", "rollout.model_arch=qwen2.5", "rollout.precision=fp16")
    new = read(TABLE, "rollout.model.model_path=/a", "rollout.model.model_type=qwen2.5", "rollout.model.precision=fp16")
    assert old.recipe == new.recipe
    [problem] = problems("rollout.model_dir=/a", "rollout.model.model_path=/b")
    assert "is the same key as rollout.model_dir=/a" in problem


@pytest.mark.parametrize("name", ["grpo", "math_grpo", "grpo-math"])
def test_grpo_has_had_several_names(name: str) -> None:
    assert read(TABLE, f"algorithm.adv_type={name}").recipe.algorithm.name == "grpo"


@pytest.mark.parametrize("key", ["algorithm.sampling_params.use_greedy=true", "algorithm.sampling_params.do_sample=no"])
def test_greedy_samples_are_nothing_to_learn_from(key: str) -> None:
    assert read(TABLE, key).unsupported


# --- placement


def test_gpus_of_a_node_follow_from_the_placement() -> None:
    spans = {"actor": "0-31", "rollout": "32-111", "inference": "112-127", "reward": "all"}
    lines = [f"cluster.component_placement.{name}={span}" for name, span in spans.items()]
    migration = read(TABLE, "cluster.num_nodes=16", *lines)
    assert migration.recipe.cluster.devices_per_node == 8
    assert "as many as the placement needs" in note(migration, "cluster.num_nodes")
    assert status(migration, "cluster.component_placement.reward") == "built in"


def test_gpus_of_a_node_that_nothing_counts_are_eight() -> None:
    migration = read(TABLE, "cluster.num_nodes=2", "cluster.component_placement.actor,rollout,reward=all")
    assert migration.recipe.cluster.devices_per_node == 8
    assert "set `cluster.devices_per_node` to yours" in note(migration, "cluster.num_nodes")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("0-3", "0-3"), ("0-1,4,6-7", "0-1,4,6-7"), ("0,,1", "0-1"), ("[0,1]", "0-1"), ("0-1:0-1,2-3:2-3", "0-3")],
)
def test_the_grammar_of_devices(written: str, expected: str) -> None:
    migration = read(TABLE, "cluster.num_gpus_per_node=8", f"cluster.component_placement.actor,rollout={written}")
    assert migration.unsupported == []
    assert migration.recipe.cluster.placement == {"actor,rollout": expected}


def test_one_device_needs_no_cluster() -> None:
    migration = read(TABLE, "cluster.num_nodes=1", "cluster.component_placement.actor,rollout=0")
    plan = planned(migration)
    assert "cluster" not in migration.recipe.model_fields_set
    assert plan.as_dict()["cluster"]["runtime"] == "local"
    assert migration.recipe.train.parallel.tensor == 1
    assert migration.recipe.train.offload == ["optimiser"]


def test_several_processes_of_a_device_are_unsupported() -> None:
    migration = read(TABLE, "cluster.num_gpus_per_node=8", "cluster.component_placement.actor,rollout=0-3:0-7")
    assert [one.given.value for one in migration.unsupported] == ["0-3:0-7"]
    assert migration.recipe.cluster.placement == {"actor,rollout": "0-3"}


def test_groups_of_nodes_are_unsupported() -> None:
    migration = read(TABLE, "cluster.component_placement.actor={node_group: a100, placement: 0-7}")
    assert len(migration.unsupported) == 2


def test_components_of_robots_are_unsupported() -> None:
    migration = read(TABLE, "cluster.component_placement.actor,env,rollout=all")
    assert "no component env" in migration.unsupported[0].outcome.note


def test_a_critic_is_where_the_actor_is() -> None:
    migration = read(TABLE, "cluster.component_placement.actor,rollout=all", "algorithm.adv_type=gae")
    assert migration.recipe.cluster.placement == {"actor,rollout,critic": "all"}
    assert planned(migration).placement.roles["critic"] == tuple(range(8))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["cluster.num_nodes=0"], "`cluster.num_nodes=0` should say how many nodes there are"),
        (["cluster.num_gpus_per_node=0"], "`cluster.num_gpus_per_node=0` should be the number of GPUs"),
        (
            ["cluster.num_gpus_per_node=8", "cluster.component_placement.actor,rollout=0-8"],
            "names device 8, and cluster.num_nodes 1 x 8 GPUs have 0-7",
        ),
        (["cluster.component_placement.actor,rollout=3-1"], "`3-1` runs backwards"),
        (["cluster.component_placement.actor,rollout=many"], "`many` is not a device"),
        (
            ["cluster.num_gpus_per_node=8", "actor.model.tensor_model_parallel_size=3"],
            "`actor.model.tensor_model_parallel_size=3` should divide the 8 devices of actor",
        ),
        (["actor.model.tensor_model_parallel_size=0"], "should divide the 8 devices of actor"),
        (["runner.seq_length=512"], "`runner.seq_length=512` should be above `data.max_prompt_length`, which is 1024"),
        (["algorithm.n_minibatches=0"], "`algorithm.n_minibatches=0` should be at least 1"),
        (["algorithm.group_size=many"], "`algorithm.group_size=many` should be a whole number"),
        (["actor.model.precision=fp12"], "`actor.model.precision=fp12` should be one of fp16"),
        (["actor.training_backend=deepspeed"], "should be megatron or fsdp"),
        (["algorithm.kl_beta=-1"], "`algorithm.kl_beta=-1` should be 0 or more"),
        (["runner.experiment_name=/"], "should name the run"),
        (["algorithm.grop_size=8"], "did you mean `algorithm.group_size`?"),
        (
            ["actor.lr_sched.lr_decay_style=linear", "actor.lr_sched.min_lr=1"],
            "would let the learning rate 2e-05 end at 1",
        ),
    ],
)
def test_what_is_wrong_is_said_at_its_key(overrides: list[str], line: str) -> None:
    assert any(line in problem for problem in problems(*overrides))


@pytest.mark.parametrize("override", ["cluster.num_nodes=0", "actor.model.precision=x", "algorithm.n_minibatches=0"])
def test_what_is_wrong_is_said_once(override: str) -> None:
    assert len(problems(override)) == 1


# --- batches


def test_updates_are_told_with_their_sizes() -> None:
    migration = read(TABLE, "data.rollout_batch_size=128", "algorithm.group_size=8", "algorithm.n_minibatches=2")
    assert note(migration, "algorithm.n_minibatches") == "128 x 8 = 1,024 trajectories a step, in 2 updates of 512"


def test_a_micro_batch_counts_sequences_of_the_whole_length() -> None:
    migration = read(TABLE, "algorithm.training_batch_size_per_gpu=4", "runner.seq_length=4096")
    assert migration.recipe.batch.max_tokens_per_micro_batch == 4 * 4096


def test_a_budget_of_tokens_holds_one_trajectory_at_least() -> None:
    migration = read(TABLE, "runner.enable_dynamic_batch_size=true", "runner.max_tokens_per_mbs=1000")
    assert migration.recipe.batch.max_tokens_per_micro_batch == 28672
    assert "28672 for one whole trajectory" in note(migration, "runner.max_tokens_per_mbs")


def test_fewer_new_tokens_than_there_is_room_for() -> None:
    migration = read(TABLE, "algorithm.sampling_params.max_new_tokens=2048")
    assert migration.recipe.rollout.max_response_tokens == 2048


@pytest.mark.parametrize(("written", "expected"), [(1000000, 0), (-1, 0), (0, 0), (50, 50)])
def test_all_tokens_have_several_names(written: int, expected: int) -> None:
    assert read(TABLE, f"algorithm.sampling_params.top_k={written}").recipe.rollout.top_k == expected


def test_batches_to_refill_are_dynamic_sampling() -> None:
    migration = read(TABLE, "algorithm.max_num_gen_batches=3")
    assert migration.recipe.algorithm.dynamic_sampling.enabled
    assert migration.recipe.algorithm.dynamic_sampling.max_rounds == 2
    assert planned(migration).algorithm.dynamic_sampling


# --- algorithms


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["algorithm.adv_type=gae"], "ppo"),
        (["algorithm.adv_type=reinpp", "algorithm.group_size=1"], "reinforce_plus_plus"),
        (["algorithm.adv_type=reinpp", "algorithm.use_reinpp_baseline=true"], "reinforce_plus_plus_baseline"),
        (["algorithm.adv_type=reinpp_baseline"], "reinforce_plus_plus_baseline"),
        (["algorithm.adv_type=raw"], "reinforce"),
        (["algorithm.adv_type=grpo_dynamic", "algorithm.advantage_mode=trajectory"], "grpo"),
    ],
)
def test_advantages(overrides: list[str], name: str) -> None:
    migration = read(TABLE, *overrides)
    assert migration.unsupported == []
    assert migration.recipe.algorithm.name == name
    assert planned(migration).algorithm.kl_where is None


def test_normalising_over_the_batch_is_not_grpo_s_own_deviation() -> None:
    for written in (True, False):
        migration = read(TABLE, f"algorithm.normalize_advantages={written}")
        assert (migration.recipe.algorithm.name, migration.recipe.algorithm.whiten) == ("grpo", written)


@pytest.mark.parametrize(("adv_type", "written"), [("gae", True), ("reinpp", True), ("reinpp", False)])
def test_some_advantages_are_normalised_anyway(adv_type: str, written: bool) -> None:
    migration = read(TABLE, f"algorithm.adv_type={adv_type}", f"algorithm.normalize_advantages={written}")
    assert migration.unsupported == []


def test_gspo_has_clips_and_a_mean_of_its_own() -> None:
    clips = ["algorithm.clip_ratio_low=0.0003", "algorithm.clip_ratio_high=0.0004"]
    migration = read(TABLE, "algorithm.loss_type=gspo", "algorithm.loss_agg_func=seq-mean-token-mean", *clips)
    algorithm = planned(migration).algorithm
    assert migration.unsupported == []
    assert (algorithm.loss, algorithm.clip_low, algorithm.clip_high) == ("gspo", 0.0003, 0.0004)


def test_gspo_without_clips_has_rlinfs() -> None:
    algorithm = planned(read(TABLE, "algorithm.loss_type=gspo")).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.2)


@pytest.mark.parametrize(
    ("written", "expected"), [("low_var_kl", "k3"), ("k2", "k2"), ("mse", "k2"), ("kl", "k1"), ("abs", "abs")]
)
def test_estimators_of_the_kl(written: str, expected: str) -> None:
    migration = read(TABLE, "algorithm.kl_beta=0.01", f"algorithm.kl_penalty_type={written}")
    algorithm = planned(migration).algorithm
    assert (algorithm.kl_where, algorithm.kl_estimator, algorithm.kl_coefficient) == ("loss", expected, 0.01)


def test_reinforce_plus_plus_has_its_kl_in_the_reward() -> None:
    migration = read(TABLE, "algorithm.adv_type=reinpp", "algorithm.reinpp_kl_beta=0.001")
    assert planned(migration).algorithm.kl_where == "reward"
    both = read(TABLE, "algorithm.adv_type=reinpp", "algorithm.reinpp_kl_beta=0.001", "algorithm.kl_beta=0.001")
    assert [one.given.key for one in both.unsupported] == ["algorithm.reinpp_kl_beta"]
    assert planned(both).algorithm.kl_where == "loss"


def test_a_mean_ratio_needs_a_second_update() -> None:
    assert planned(read(TABLE, "algorithm.early_stop_imp_ratio=4")).algorithm.max_mean_ratio == 4
    one = read(TABLE, "algorithm.early_stop_imp_ratio=4", "algorithm.n_minibatches=1")
    assert status(one, "algorithm.early_stop_imp_ratio") == "no effect"
    assert planned(one).algorithm.max_mean_ratio is None


def test_the_weights_of_another_engine() -> None:
    migration = read(TABLE, "algorithm.importance_sampling_fix=true", "algorithm.importance_sampling_clip=1.5")
    algorithm = planned(migration).algorithm
    assert (algorithm.correction_name, algorithm.correction_cap) == ("token_tis", 1.5)
    assert algorithm.old_logprobs == "recompute"


def test_an_entropy_that_is_not_calculated_is_no_bonus() -> None:
    migration = read(TABLE, "algorithm.entropy_bonus=0.01")
    assert status(migration, "algorithm.entropy_bonus") == "no effect"
    calculated = read(TABLE, "algorithm.entropy_bonus=0.01", "algorithm.calculate_entropy=true")
    assert calculated.recipe.algorithm.entropy_coefficient == 0.01


def test_ppo_with_its_critic() -> None:
    critic = ["critic.use_critic_model=true", "critic.optim.lr=2e-5", "critic.lr_sched.lr_decay_style=linear"]
    migration = read(TABLE, "algorithm.adv_type=gae", "algorithm.group_size=1", "algorithm.gae_lambda=0.95", *critic)
    recipe = migration.recipe
    assert migration.unsupported == []
    assert planned(migration).algorithm.lam == 0.95
    assert recipe.critic.optimiser.learning_rate == 2e-5
    assert recipe.critic.optimiser.schedule == "linear"
    assert recipe.critic.optimiser.weight_decay == 0.01


def test_without_a_critic_its_keys_do_nothing() -> None:
    migration = read(TABLE, "critic.optim.lr=1e-5", "algorithm.value_clip=0.2", "algorithm.gamma=0.9")
    assert {one.outcome.status for one in migration.entries} == {"no effect"}
    assert planned(migration).algorithm.advantage == "grpo"


# --- optimiser


def test_warming_up_is_a_share_of_the_decay() -> None:
    migration = read(TABLE, "actor.lr_sched.lr_warmup_fraction=0.285", "actor.lr_sched.lr_decay_iters=662")
    assert migration.recipe.optimiser.warmup_steps == 188
    assert note(migration, "actor.lr_sched.lr_warmup_fraction") == "0.285 of lr_decay_iters 662: 188 updates"


def test_warming_up_in_iterations_counts_updates() -> None:
    assert read(TABLE, "actor.lr_sched.lr_warmup_iters=30").recipe.optimiser.warmup_steps == 30


def test_a_decay_ends_at_its_least() -> None:
    migration = read(TABLE, "actor.lr_sched.lr_decay_style=cosine", "actor.lr_sched.min_lr=2e-6")
    assert migration.recipe.optimiser.schedule == "cosine"
    assert migration.recipe.optimiser.min_learning_rate_ratio == pytest.approx(0.1)


def test_a_constant_rate_has_no_least() -> None:
    assert status(read(TABLE, "actor.lr_sched.min_lr=2e-6"), "actor.lr_sched.min_lr") == "no effect"


# --- models and trainers


@pytest.mark.parametrize(
    ("written", "expected"), [("fp16", "float16"), ("16", "float16"), ("bf16", "bfloat16"), ("32", "float32")]
)
def test_precisions(written: str, expected: str) -> None:
    assert read(TABLE, f"actor.model.precision={written}").recipe.model.dtype == expected


def test_fsdp_has_no_example_of_megatron_s() -> None:
    recipe = read(TABLE, "actor.training_backend=fsdp").recipe
    assert recipe.train.parallel.tensor == 1
    assert (recipe.train.offload, recipe.train.recompute) == ([], "none")


def test_fsdp_in_groups() -> None:
    fsdp = ["actor.training_backend=fsdp", "actor.fsdp_config.sharding_strategy=hybrid_shard"]
    mesh = planned(read(TABLE, "cluster.num_nodes=2", *fsdp, "actor.fsdp_config.hybrid_shard_size=8")).meshes["actor"]
    assert (mesh.replicate, mesh.shard) == (2, 8)


def test_fsdp_that_does_not_shard() -> None:
    fsdp = ["actor.training_backend=fsdp", "actor.fsdp_config.sharding_strategy=no_shard", "actor.enable_offload=true"]
    migration = read(TABLE, *fsdp)
    assert planned(migration).meshes["actor"].is_whole
    assert migration.recipe.train.offload == ["optimiser"]


def test_other_ways_to_split_a_model() -> None:
    migration = read(TABLE, "actor.model.context_parallel_size=2", "actor.model.expert_model_parallel_size=2")
    mesh = planned(migration).meshes["actor"]
    assert (mesh.tensor, mesh.context, mesh.expert, mesh.shard) == (2, 2, 2, 1)


@pytest.mark.parametrize(
    "override",
    [
        "runner.task_type=embodied",
        "runner.task_type=reasoning_eval",
        "runner.task_type=sft",
        "runner.task_type=dance",
        "runner.resume_dir=/results/checkpoints/global_step_50",
        "runner.logger.logger_backends=[notebook]",
        "algorithm.adv_type=opd",
        "algorithm.adv_type=grpo_dynamic",
        "algorithm.loss_type=drpo",
        "algorithm.drpo_beta=1000.0",
        "algorithm.loss_agg_func=token-sum",
        "algorithm.sampling_params.repetition_penalty=1.1",
        "algorithm.sampling_params.min_new_tokens=5",
        "algorithm.down_sampling.do_down_sampling=true",
        "actor.model.pipeline_model_parallel_size=2",
        "actor.model.is_lora=true",
        "actor.model.moe_aux_loss_coeff=0.01",
        "actor.checkpoint_load_path=/checkpoints/tp2",
        "actor.optim.optimizer=muon",
        "actor.lr_sched.lr_decay_style=WSD",
        "rollout.model.model_type=qwen2.5_vl",
        "data.type=vision_language",
        "data.apply_chat_template_kwargs.enable_thinking=true",
        "reward.reward_type=code_offline",
        "reward.use_reward_model=true",
        "cluster.auto_scheduler=true",
        "agentloop.max_planner_turns=10",
        "env.train.total_num_envs=8",
    ],
)
def test_what_corral_does_not_have(override: str) -> None:
    migration = read(TABLE, override)
    [found] = migration.unsupported
    assert found.outcome.note
    planned(migration)


@pytest.mark.parametrize(
    "override",
    [
        "actor.model.is_lora=false",
        "cluster.auto_scheduler=false",
        "actor.model.pipeline_model_parallel_size=1",
        "reward.use_reward_model=false",
        "data.apply_chat_template_kwargs={}",
        "rollout.eos=null",
    ],
)
def test_what_is_off_is_no_loss(override: str) -> None:
    assert read(TABLE, override).unsupported == []


def test_another_tokenizer_than_the_models_is_unsupported() -> None:
    model = "rollout.model_dir=/models/one/"
    assert read(TABLE, model, "actor.tokenizer.tokenizer_model=/models/one").unsupported == []
    assert read(TABLE, model, "actor.tokenizer.tokenizer_model=/models/two").unsupported


def test_two_models_for_one_actor_are_a_contradiction() -> None:
    [problem] = problems("rollout.model.model_path=/a", "actor.model.model_path=/b")
    assert "both say what `model.path` is" in problem


def test_validation_is_not_run_over_there() -> None:
    migration = read(TABLE, "data.val_data_paths=[val.jsonl]", "runner.val_check_interval=1")
    assert {one.outcome.status for one in migration.entries} == {"no effect"}
    assert migration.recipe.data.validation is None


def test_starting_anew_is_what_null_means() -> None:
    assert read(TABLE, "runner.resume_dir=null").recipe.checkpoint.resume == "never"
    assert read(TABLE, "runner.resume_dir=auto").recipe.checkpoint.resume == "auto"


def test_rewards_have_their_own_bounds() -> None:
    scale = ["reward.reward_scale=2.0", "reward.reward_min_val=0.0", "reward.reward_max_val=1.0"]
    assert read(TABLE, *scale).recipe.environment.reward.options == {"right": 2.0, "wrong": 0.0}


def test_search_r1_is_the_environment_that_searches() -> None:
    migration = read(
        TABLE,
        "reward.reward_type=searchr1",
        "reward.reward_scale=1.0",
        "agentloop.toolcall_parser=searchr1-qwen",
        "agentloop.max_turns=2",
        "agentloop.max_tool_response_length=500",
        "agentloop.tool_response_truncate_side=right",
        "agentloop.is_dynamic_rollout_batch=true",
        "tools.search.server_addr=0.0.0.0:8000",
        "tools.search.topk=3",
        "algorithm.sampling_params.stop=[</search>, </answer>]",
        "algorithm.adv_type=grpo_dynamic",
        "algorithm.advantage_mode=trajectory",
    )
    recipe = migration.recipe
    assert migration.unsupported == []
    assert recipe.environment.name == "search"
    assert recipe.environment.options == {"prompt": None, "retriever": "http://0.0.0.0:8000", "topk": 3}
    assert recipe.environment.reward.name == "em"
    assert (recipe.rollout.max_turns, recipe.rollout.max_observation_tokens) == (1, 500)
    assert recipe.rollout.stop == ["</search>", "</answer>"]
    planned(migration)


# --- anything


SIZES = st.integers(-2, 40)
RATES = st.floats(-1, 2, allow_nan=False)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "cluster.num_nodes": st.integers(-1, 6),
    "cluster.num_gpus_per_node": st.integers(-1, 9),
    "cluster.component_placement.actor": st.sampled_from(["all", "0-7", "8-15", "0-3:0-3", "x", 0, "4-2", None]),
    "cluster.component_placement.rollout": st.sampled_from(["all", "0-7", "0-3", "8-11", "5,6", 1]),
    "cluster.component_placement.inference": st.sampled_from(["all", "12-15", "16", 2]),
    "runner.max_epochs": st.integers(-1, 4),
    "runner.max_steps": SIZES,
    "runner.save_interval": SIZES,
    "runner.seq_length": st.integers(0, 5000),
    "runner.enable_dynamic_batch_size": st.booleans(),
    "runner.max_tokens_per_mbs": st.integers(0, 9000),
    "runner.logger.logger_backends": st.lists(st.sampled_from(["wandb", "tensorboard", "other"]), max_size=2),
    "runner.logger.project_name": st.sampled_from(["mine", None]),
    "runner.experiment_name": st.sampled_from(["a/b", "", "..", "x"]),
    "algorithm.group_size": SIZES,
    "algorithm.n_minibatches": SIZES,
    "algorithm.training_batch_size_per_gpu": SIZES,
    "algorithm.adv_type": st.sampled_from(["grpo", "gae", "reinpp", "reinpp_baseline", "raw", "other", None]),
    "algorithm.use_reinpp_baseline": st.booleans(),
    "algorithm.loss_type": st.sampled_from(["actor", "gspo", "drpo", None]),
    "algorithm.loss_agg_func": st.sampled_from(["token-mean", "seq-mean-token-sum", "other", None]),
    "algorithm.kl_beta": st.sampled_from([0, 0.001, -1, None]),
    "algorithm.reinpp_kl_beta": st.sampled_from([0, 0.001, None]),
    "algorithm.kl_penalty_type": st.sampled_from(["kl", "low_var_kl", "other", None]),
    "algorithm.ratio_clip_eps": RATES,
    "algorithm.clip_ratio_low": RATES,
    "algorithm.clip_ratio_c": st.sampled_from([None, 0.5, 3.0]),
    "algorithm.gamma": RATES,
    "algorithm.gae_lambda": RATES,
    "algorithm.value_clip": RATES,
    "algorithm.entropy_bonus": RATES,
    "algorithm.calculate_entropy": st.booleans(),
    "algorithm.early_stop_imp_ratio": st.sampled_from([None, 0.5, 5.0]),
    "algorithm.recompute_logprobs": st.booleans(),
    "algorithm.importance_sampling_fix": st.booleans(),
    "algorithm.importance_sampling_clip": RATES,
    "algorithm.max_num_gen_batches": SIZES,
    "algorithm.sampling_params.temperature": RATES,
    "algorithm.sampling_params.top_k": SIZES,
    "algorithm.sampling_params.max_new_tokens": st.integers(-1, 5000),
    "data.max_prompt_length": st.integers(0, 3000),
    "data.rollout_batch_size": SIZES,
    "data.apply_chat_template": st.booleans(),
    "data.data_size": SIZES,
    "actor.training_backend": st.sampled_from(["megatron", "fsdp", None]),
    "actor.enable_offload": st.booleans(),
    "actor.offload_weight": st.sampled_from([True, False, None]),
    "actor.model.precision": st.sampled_from(["fp16", "bf16", 32, "odd", None]),
    "actor.model.tensor_model_parallel_size": st.integers(-1, 5),
    "actor.model.context_parallel_size": st.integers(-1, 3),
    "actor.fsdp_config.sharding_strategy": st.sampled_from(["full_shard", "no_shard", "hybrid_shard"]),
    "actor.fsdp_config.fsdp_size": st.integers(-1, 9),
    "actor.fsdp_config.mixed_precision.param_dtype": st.sampled_from(["fp16", None, "odd"]),
    "actor.optim.lr": RATES,
    "actor.optim.lr_scheduler": st.sampled_from(["constant", "cosine", "torch_cosine"]),
    "actor.optim.lr_warmup_steps": SIZES,
    "actor.optim.min_lr": RATES,
    "actor.lr_sched.lr_decay_style": st.sampled_from(["constant", "linear", "WSD", None]),
    "actor.lr_sched.lr_decay_iters": SIZES,
    "actor.lr_sched.lr_warmup_fraction": RATES,
    "actor.lr_sched.lr_warmup_iters": SIZES,
    "actor.lr_sched.min_lr": RATES,
    "reward.reward_type": st.sampled_from(["math", "searchr1", "code_offline", None]),
    "reward.reward_scale": RATES,
    "agentloop.max_turns": SIZES,
    "agentloop.max_tool_response_length": SIZES,
    "critic.use_critic_model": st.booleans(),
    "critic.optim.lr": RATES,
}


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(VALUES)), max_size=12, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: VALUES[key] for key in keys})
    )
)
def test_any_values_give_a_recipe_that_runs_or_a_line_that_says_why(values: dict[str, Any]) -> None:
    with suppress(RecipeError):
        planned(read(TABLE, *(f"{key}={format_value(value)}" for key, value in values.items())))


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.integers(1, 600),
    samples=st.integers(2, 32),
    updates=st.integers(1, 8),
    prompt=st.integers(1, 2000),
    response=st.integers(1, 30_000),
    sequences=st.integers(1, 8),
    nodes=st.integers(1, 8),
    kl=st.sampled_from([0, 0.001]),
    adv_type=st.sampled_from(["grpo", "gae", "reinpp", "reinpp_baseline"]),
)
def test_sensible_values_always_give_a_recipe_that_runs(
    prompts: int,
    samples: int,
    updates: int,
    prompt: int,
    response: int,
    sequences: int,
    nodes: int,
    kl: float,
    adv_type: str,
) -> None:
    migration = read(
        TABLE,
        f"cluster.num_nodes={nodes}",
        "cluster.component_placement.actor,rollout=all",
        f"data.rollout_batch_size={prompts}",
        f"algorithm.group_size={samples}",
        f"algorithm.n_minibatches={min(updates, prompts * samples)}",
        f"data.max_prompt_length={prompt}",
        f"runner.seq_length={prompt + response}",
        f"algorithm.training_batch_size_per_gpu={sequences}",
        f"algorithm.kl_beta={kl}",
        f"algorithm.adv_type={adv_type}",
    )
    plan = planned(migration).as_dict()
    assert plan["batch"]["trajectories"] == prompts * samples
    assert plan["batch"]["max_trajectory_tokens"] == prompt + response
    assert plan["batch"]["max_tokens_per_micro_batch"] == sequences * (prompt + response)


def test_what_rows_of_text_do_not_have_is_not_missed() -> None:
    """RLinf's math example for FSDP has it from one for images."""
    keys = ("data.image_keys=[image]", "data.choice_key=choices", "data.use_chat_template=true")
    weights = "reward.reward_weights.qa_accuracy=1.0"
    assert not read(TABLE, "data.type=math", *keys, weights).unsupported
    images = read(TABLE, "data.type=vision_language", *keys, "reward.reward_type=vqa", weights)
    assert {"data.image_keys", "reward.reward_weights.qa_accuracy"} <= {one.given.key for one in images.unsupported}


def test_settings_of_fsdp_are_for_its_trainer_where_nothing_names_one() -> None:
    """A file whose `defaults` are not at hand."""
    migration = read(TABLE, "actor.model.precision=fp32", "actor.fsdp_config.mixed_precision.param_dtype=bf16")
    assert migration.recipe.model.dtype == "bfloat16"
    assert migration.recipe.train.parallel.tensor == 1
    planned(migration)


def test_a_tokenizer_in_a_folder_of_the_models_name_is_the_models() -> None:
    paths = ("rollout.model.model_path=/path/to/model/Qwen-1.5B/", "actor.tokenizer.tokenizer_model=/model/Qwen-1.5B")
    assert not read(TABLE, *paths).unsupported


def test_checkpoints_that_a_run_never_comes_to_are_those_at_its_end() -> None:
    migration = read(TABLE, "runner.max_steps=10", "runner.save_interval=50")
    assert (migration.recipe.checkpoint.every, migration.recipe.checkpoint.at_end) == (0, True)
