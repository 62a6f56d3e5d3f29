"""ROLL's table: the configurations of its guides, today's, and what becomes of single keys."""

from pathlib import Path
from typing import Any

import pytest
from foreign import entry, read
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.migrate.migration import Migration
from corral.migrate.roll import ALIASES, TABLE
from corral.migrate.table import KeyRow
from corral.recipe.errors import RecipeError
from corral.recipe.plan import Plan, make_plan

CHANGES = """
rollout_batch_size: {batch}
val_batch_size: 16
actor_train.model_args.dtype: fp16
actor_infer.model_args.dtype: fp16
reference.model_args.dtype: fp16
strategy_name: megatron_train
strategy_config:
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 1
  expert_model_parallel_size: 1
  use_distributed_optimizer: true
  recompute_granularity: full
max_actions_per_traj: 10
train_env_manager.env_groups: 1
train_env_manager.n_groups: 1
val_env_manager.env_groups: 2
val_env_manager.n_groups: [1, 1]
val_env_manager.tags: [SimpleSokoban, FrozenLake]
max_steps: 100
"""
"""What the guides for one and for several nodes change in ROLL's demo."""

TWO_NODES = """
num_gpus_per_node: 2
actor_train.device_mapping: list(range(0,4))
actor_infer.device_mapping: list(range(0,4))
reference.device_mapping: list(range(0,4))
actor_train.training_args.per_device_train_batch_size: 1
actor_train.training_args.gradient_accumulation_steps: 16
""" + CHANGES.format(batch=64)

ONE_DEVICE = """
num_gpus_per_node: 1
actor_train.device_mapping: list(range(0,1))
actor_infer.device_mapping: list(range(0,1))
reference.device_mapping: list(range(0,1))
""" + CHANGES.format(batch=16)

GAMES = """
defaults:
  - ../config/traj_envs@_here_
  - ../config/deepspeed_zero3@_here_
hydra:
  run:
    dir: .
  output_subdir: null
exp_name: "agentic_pipeline"
seed: 42
logging_dir: ./output/logs
output_dir: ./output
render_save_dir: ./output/render
system_envs:
  USE_MODELSCOPE: '1'
track_with: tensorboard
tracker_kwargs:
  log_dir: ./output/tensorboard
checkpoint_config:
  type: file_system
  output_dir: /data/models/${exp_name}
num_gpus_per_node: 8
max_steps: 1024
save_steps: 10000
logging_steps: 1
eval_steps: 10
resume_from_checkpoint: false
rollout_batch_size: 1024
val_batch_size: 1024
sequence_length: 8192
advantage_clip: 0.2
ppo_epochs: 1
adv_estimator: "grpo"
init_kl_coef: 0.0
whiten_advantages: true
entropy_loss_coef: 0
max_grad_norm: 1.0
pretrain: Qwen/Qwen2.5-0.5B-Instruct
reward_pretrain: Qwen/Qwen2.5-0.5B-Instruct
actor_train:
  model_args:
    attn_implementation: fa2
    disable_gradient_checkpointing: false
    dtype: bf16
    model_type: ~
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 64
    warmup_steps: 10
    lr_scheduler_type: cosine
  data_args:
    template: qwen2_5
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: ${deepspeed_zero3}
  device_mapping: list(range(0,4))
  infer_batch_size: 2
actor_infer:
  model_args:
    disable_gradient_checkpointing: true
    dtype: bf16
  generating_args:
    max_new_tokens: 128
    top_p: 0.99
    top_k: 100
    num_beams: 1
    temperature: 0.99
    num_return_sequences: 1
  data_args:
    template: qwen2_5
  strategy_args:
    strategy_name: vllm
    strategy_config:
      gpu_memory_utilization: 0.8
      block_size: 16
      load_format: auto
  device_mapping: list(range(4,8))
reference:
  model_args:
    attn_implementation: fa2
    disable_gradient_checkpointing: true
    dtype: bf16
    model_type: ~
  data_args:
    template: qwen2_5
  strategy_args:
    strategy_name: hf_infer
    strategy_config: ~
  device_mapping: list(range(4,8))
  infer_batch_size: 2
reward_normalization:
  grouping: traj_group_id
  method: mean_std
train_env_manager:
  format_penalty: -0.15
  max_env_num_per_worker: 16
  num_env_groups: 128
  group_size: 8
  tags: [FrozenLake]
  num_groups_partition: [128]
val_env_manager:
  max_env_num_per_worker: 32
  num_env_groups: 1024
  group_size: 1
  tags: [SimpleSokoban, LargerSokoban, SokobanDifferentGridVocab, FrozenLake]
  num_groups_partition: [256, 256, 256, 256]
max_tokens_per_step: 64
custom_envs:
  SimpleSokoban:
    ${custom_env.SimpleSokoban}
  LargerSokoban:
    ${custom_env.LargerSokoban}
  SokobanDifferentGridVocab:
    ${custom_env.SokobanDifferentGridVocab}
  FrozenLake:
    ${custom_env.FrozenLake}
  FrozenLakeThink:
    ${custom_env.FrozenLakeThink}
"""
"""A whole configuration, with files of ROLL's that are not there."""

QUESTIONS = """
pg_variant: ppo
exp_name: Qwen3-8B-RLVR-${pg_variant}
num_gpus_per_node: 16
max_steps: 100
rollout_batch_size: 16
prompt_length: 2048
response_length: 8192
num_return_sequences_in_group: 8
adv_estimator: "reinforce"
value_clip: 0.5
reward_clip: 10
advantage_clip: 2.0
dual_clip_loss: true
norm_mean_type: batch
norm_std_type: batch
max_len_mask: true
difficulty_mask: true
difficulty_low_threshold: 0.2
difficulty_high_threshold: 0.95
error_max_len_clip: false
difficulty_loss_weight: false
length_loss_weight: false
add_token_level_kl: false
whiten_advantages: true
pretrain: Qwen/Qwen3-8B-Base
reward_pretrain: Qwen/Qwen3-8B-Base
validation:
  data_args:
    template: qwen3
    file_name:
      - data/math_benchmarks.jsonl
  generating_args:
    top_p: 0.6
    top_k: 50
    num_beams: 1
    temperature: 0.6
    num_return_sequences: 1
  eval_steps: 10
actor_train:
  worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker
  pg_variant: ppo
  model_args:
    flash_attn: fa2
    dtype: bf16
  training_args:
    learning_rate: 1.0e-6
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 8
    warmup_steps: 20
    num_train_epochs: 50
  data_args:
    template: qwen3
    file_name:
      - data/math_deepmath_deal.jsonl
    domain_interleave_probs:
      math_rule: 1
    dataset_dir: data
    messages: messages
    interleave_probs: "1.0"
    preprocessing_num_workers: 16
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config:
      zero_optimization:
        stage: 3
        offload_optimizer: {device: cpu, pin_memory: true}
        offload_param: {device: cpu}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args:
    max_new_tokens: ${response_length}
    top_p: 0.99
    top_k: 100
    temperature: 0.99
    num_return_sequences: ${num_return_sequences_in_group}
  device_mapping: list(range(8,12))
reference:
  device_mapping: list(range(12,16))
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    model_args:
      model_name_or_path: ${reward_pretrain}
    data_args:
      template: qwen3
    tag_included: [deepmath_103k, 'MATH-500']
    world_size: 8
    infer_batch_size: 1
"""

ASK = ("pretrain=model", "actor_train.data_args.file_name=train.jsonl", "num_return_sequences_in_group=8")
"""The shortest configuration that asks questions."""
GROUPS = ("train_env_manager.group_size=8", "reward_normalization.grouping=traj_group_id")


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """A configuration in a file, read."""

    def read_text(text: str, *overrides: str) -> Migration:
        path = tmp_path / "roll.yaml"
        path.write_text(text)
        return read(TABLE, *overrides, file=path)

    return read_text


def roll(*overrides: str) -> Migration:
    return read(TABLE, *overrides)


def plan(migration: Migration) -> Plan:
    return make_plan(migration.recipe)


def values(migration: Migration) -> dict[str, Any]:
    return {".".join(path): setting.value for path, setting in migration.settings.items()}


def status(migration: Migration, key: str) -> str:
    return entry(migration, key).outcome.status


def problems(*overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        roll(*overrides)
    return list(caught.value.problems)


# --- the guides


def test_the_guide_for_two_nodes_reads_on_its_own_and_makes_one_update_of_a_step(written: Any) -> None:
    migration = written(TWO_NODES)
    assert not migration.unsupported
    recipe = migration.recipe
    assert (recipe.cluster.nodes, recipe.cluster.devices_per_node) == (2, 2)
    assert recipe.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert recipe.model.dtype == "float16"
    assert recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt == 64
    assert recipe.batch.updates_per_step == 1
    assert recipe.rollout.max_turns == 10
    assert recipe.schedule.steps == 100
    assert recipe.train.recompute == "full"
    assert "cluster.placement" not in values(migration)
    note = entry(migration, "actor_train.training_args.gradient_accumulation_steps").outcome.note
    assert "1 x 16 x 4 = 64 trajectories per update, of 64: 1 update per step" in note
    assert plan(migration).placement.colocated


def test_every_key_of_the_guides_is_told_of(written: Any) -> None:
    for text, count in ((TWO_NODES, 24), (ONE_DEVICE, 22)):
        assert len({one.given.key for one in written(text).entries}) == count


def test_the_guide_for_one_device_keeps_what_it_does_not_say_from_the_demo(written: Any) -> None:
    migration = written(ONE_DEVICE)
    assert not migration.unsupported
    recipe = migration.recipe
    assert "cluster" not in recipe.model_fields_set
    assert recipe.batch.updates_per_step == 1
    assert recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens == 4096
    assert recipe.rollout.max_turn_tokens == 64
    assert recipe.algorithm.name == "reinforce_plus_plus"
    assert (recipe.algorithm.reward_clip, recipe.algorithm.advantage_clip) == (20, 10)
    assert recipe.optimiser.warmup_steps == 10
    assert recipe.batch.max_tokens_per_micro_batch == 4096
    plan(migration)


def test_the_guides_train_on_sokoban_and_validate_on_two_games(written: Any) -> None:
    recipe = written(TWO_NODES).recipe
    assert {tag: one.name for tag, one in recipe.environments.items()} == {
        "SimpleSokoban": "sokoban",
        "FrozenLake": "frozen_lake",
    }
    assert recipe.shares("train") == {"SimpleSokoban": 1, "FrozenLake": 0}
    assert recipe.shares("validation") == {"SimpleSokoban": 1, "FrozenLake": 1}
    assert (recipe.data.train.path, recipe.data.train.size) == ("boards", 6400)
    assert recipe.data.validation is not None
    assert recipe.data.validation.size == 16
    assert recipe.environments["FrozenLake"].options == {"format_penalty": -0.01}


# --- whole configurations


def test_a_whole_configuration_of_games_reads_without_the_files_of_roll(written: Any) -> None:
    migration = written(GAMES)
    assert migration.unsupported == []
    recipe = migration.recipe
    assert recipe.algorithm.whiten
    assert (recipe.batch.prompts_per_step, recipe.batch.samples_per_prompt) == (128, 8)
    assert recipe.batch.updates_per_step == 2
    assert recipe.algorithm.name == "grpo"
    assert recipe.shares("train") == {
        "FrozenLake": 128, "SimpleSokoban": 0, "LargerSokoban": 0, "SokobanDifferentGridVocab": 0,
    }  # fmt: skip
    assert set(recipe.shares("validation").values()) == {256}
    assert recipe.environments["LargerSokoban"].options["dim_room"] == [10, 10]
    assert recipe.environments["SokobanDifferentGridVocab"].options["grid_vocab"]["box"] == "B"
    assert recipe.cluster.placement == {"actor": "0-3", "rollout": "4-7"}
    assert recipe.logging.runs == "/data/models/agentic_pipeline"
    made = plan(migration)
    assert made.num_steps == 1024
    assert not made.placement.colocated


def test_a_whole_configuration_of_questions_reads(written: Any) -> None:
    migration = written(QUESTIONS)
    assert {one.given.key for one in migration.unsupported} == {
        "reward_clip", "actor_train.data_args.messages", "max_len_mask", "difficulty_mask",
    }  # fmt: skip
    recipe = migration.recipe
    assert recipe.name == "Qwen3-8B-RLVR-ppo"
    assert (recipe.batch.prompts_per_step, recipe.batch.samples_per_prompt) == (16, 8)
    assert recipe.batch.updates_per_step == 2
    assert recipe.data.train.path == "data/math_deepmath_deal.jsonl"
    assert (recipe.data.answer_key, recipe.data.overlong) == ("ground_truth", "filter")
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens) == (2048, 8192)
    assert recipe.environment.reward.name == "math"
    assert recipe.algorithm.name == "reinforce_plus_plus"
    assert recipe.algorithm.dual_clip == pytest.approx(1.4)
    assert recipe.train.offload == ["parameters", "optimiser"]
    assert (recipe.validation.temperature, recipe.validation.top_p) == (0.6, 0.6)
    assert not recipe.environments
    plan(migration)


def test_a_whole_configuration_takes_the_defaults_of_roll_and_not_of_its_demo() -> None:
    recipe = roll("pretrain=model", "adv_estimator=reinforce").recipe
    assert recipe.algorithm.name == "reinforce"
    assert (recipe.algorithm.reward_clip, recipe.algorithm.advantage_clip) == (None, None)
    assert recipe.optimiser.learning_rate == 5e-5
    assert recipe.optimiser.warmup_steps == 0
    assert recipe.rollout.temperature == 1
    assert recipe.batch.updates_per_step == 16  # 128 trajectories, 8 at a time


def test_nothing_at_all_is_the_demo() -> None:
    migration = roll()
    assert migration.recipe.name == "agentic_pipeline"
    assert migration.recipe.environment.name == "sokoban"
    plan(migration)


def test_a_null_where_a_number_is_meant_is_as_nothing_written() -> None:
    migration = roll("rollout_batch_size=null", "max_steps=null", "train_env_manager.tags=null", "advantage_clip=null")
    assert migration.recipe.batch.prompts_per_step == 128
    assert migration.recipe.algorithm.advantage_clip is None
    plan(migration)


# --- spellings of both versions


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("train_env_manager.env_groups=4", "train_env_manager.num_env_groups=4"),
        ("train_env_manager.n_groups=4", "train_env_manager.num_groups_partition=[4]"),
        ("actor_train.model_args.flash_attn=fa2", "actor_train.model_args.attn_implementation=fa2"),
        ("max_steps_per_traj=7", "max_actions_per_traj=7"),
        ("strategy_name=fsdp2_train", "actor_train.strategy_args.strategy_name=fsdp2_train"),
        ("strategy_config.offload_policy=true", "actor_train.strategy_args.strategy_config.offload_policy=true"),
        ("train_env_manager.generating_args.top_k=5", "actor_infer.generating_args.top_k=5"),
        (
            "use_rollout_importance_sampling_ratio=true",
            "train_infer_correction.is_weight.enabled=true",
        ),
    ],
)
def test_old_and_new_spellings_mean_the_same(old: str, new: str) -> None:
    assert values(roll(old)) == values(roll(new))


def test_every_alias_leads_to_a_row() -> None:
    for new in ALIASES.values():
        assert TABLE.row(new.replace("**", "x")) is not None, new


def test_no_row_is_hidden_by_one_before_it() -> None:
    def plain(row: KeyRow) -> str:
        return row.key.replace("**", "x").replace("*", "x")

    assert [row.key for row in TABLE.rows if TABLE.row(plain(row)) is not row] == []


def test_a_key_that_nobody_knows_is_an_error_with_a_hint() -> None:
    [line] = problems("rollout_batchsize=64")
    assert "rollout_batchsize=64" in line
    assert "rollout_batch_size" in line


# --- batch and lengths


def test_a_batch_that_does_not_divide_into_groups_is_an_error() -> None:
    [line] = problems("rollout_batch_size=60", "train_env_manager.group_size=8", *GROUPS[1:])
    assert "`rollout_batch_size=60` should be a multiple of `train_env_manager.group_size`, 8" in line


def test_games_count_trajectories_and_questions_count_prompts() -> None:
    games = roll("rollout_batch_size=64", "train_env_manager.group_size=8").recipe.batch
    questions = roll("rollout_batch_size=64", *ASK, "adv_estimator=grpo").recipe.batch
    assert (games.prompts_per_step, games.samples_per_prompt) == (8, 8)
    assert (questions.prompts_per_step, questions.samples_per_prompt) == (64, 8)


@pytest.mark.parametrize(
    ("trajectories", "each", "times", "devices", "updates"),
    [(64, 1, 16, 4, 1), (16, 1, 16, 1, 1), (256, 2, 8, 4, 4), (100, 1, 16, 2, 4), (8, 4, 64, 1, 1)],
)
def test_updates_are_of_the_size_that_devices_and_accumulation_give(
    trajectories: int, each: int, times: int, devices: int, updates: int
) -> None:
    migration = roll(
        f"rollout_batch_size={trajectories}",
        f"actor_train.training_args.per_device_train_batch_size={each}",
        f"actor_train.training_args.gradient_accumulation_steps={times}",
        f"actor_train.device_mapping=list(range(0,{devices}))",
    )
    assert migration.recipe.batch.updates_per_step == updates
    plan(migration)


def test_devices_that_share_a_model_do_not_count_for_the_size_of_an_update() -> None:
    migration = roll(
        "actor_train.device_mapping=list(range(0,8))",
        "strategy_config.tensor_model_parallel_size=2",
        "strategy_config.pipeline_model_parallel_size=2",
        "rollout_batch_size=64",
    )
    assert migration.recipe.batch.updates_per_step == 2  # 1 x 16 x 2
    assert status(migration, "strategy_config.pipeline_model_parallel_size") == "unsupported"
    plan(migration)


def test_what_is_computed_at_once_is_the_sequences_of_a_device() -> None:
    migration = roll("actor_train.training_args.per_device_train_batch_size=3", "sequence_length=2048")
    assert migration.recipe.batch.max_tokens_per_micro_batch == 3 * 2048


def test_a_budget_of_tokens_goes_before_the_number_of_sequences_and_holds_a_trajectory() -> None:
    dynamic = ("actor_train.use_dynamic_batching_in_train=true", "sequence_length=2048")
    large = roll(*dynamic, "actor_train.max_tokens_per_microbatch_in_train=9000")
    small = roll(*dynamic, "actor_train.max_tokens_per_microbatch_in_train=100")
    assert large.recipe.batch.max_tokens_per_micro_batch == 9000
    assert small.recipe.batch.max_tokens_per_micro_batch == 2048
    plan(large)
    plan(small)


def test_a_sequence_is_parted_into_prompt_and_response() -> None:
    recipe = roll("sequence_length=8192").recipe
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens) == (1024, 7168)
    recipe = roll("sequence_length=512").recipe
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens) == (256, 256)
    recipe = roll("prompt_length=600", "response_length=300").recipe
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens) == (600, 300)


def test_a_sequence_that_is_not_longer_than_the_prompt_is_an_error() -> None:
    [line] = problems(*ASK, "adv_estimator=grpo", "prompt_length=2048", "sequence_length=2048")
    assert "`sequence_length=2048` should be above the prompt's length, 2048" in line


def test_the_least_of_three_limits_bounds_a_turn() -> None:
    assert roll("max_tokens_per_step=100").recipe.rollout.max_turn_tokens == 100
    limits = ("max_tokens_per_step=100", "actor_infer.generating_args.max_new_tokens=32")
    assert roll(*limits).recipe.rollout.max_turn_tokens == 32
    assert roll("max_tokens_per_step=9999", "sequence_length=512").recipe.rollout.max_turn_tokens == 256


def test_games_are_validated_with_the_temperature_of_the_training() -> None:
    recipe = roll("actor_infer.generating_args.temperature=0.7").recipe
    assert recipe.rollout.temperature == recipe.validation.temperature == 0.7


def test_a_temperature_of_0_is_an_error() -> None:
    [line] = problems("actor_infer.generating_args.temperature=0")
    assert "should be above 0" in line


# --- devices


@pytest.mark.parametrize(
    "devices",
    ["list(range(0,4))", "list(range(0, 4))", "range(0,4)", "[0, 1, 2, 3]", "'[0,1,2,3]'", "'0,1,2,3'",
     "list(range(0,2)) + list(range(2,4))"],
)  # fmt: skip
def test_devices_are_ranges_and_lists(devices: str) -> None:
    migration = roll(f"actor_train.device_mapping={devices}")
    assert migration.recipe.cluster.devices_per_node == 4
    assert migration.recipe.cluster.placement == {"actor,rollout,reference,critic": "all"}


@pytest.mark.parametrize(
    "devices", ["__import__('os').system('true')", "list(range(int('4')))", "all", "0-3", "'[0-3]'", "[x]", "[1.5]",
                "list(range(-1,3))", "list(range(0,999999999))", "[0, 0]", "list(range(3,0))", "true"]
)  # fmt: skip
def test_anything_else_is_an_error_and_never_evaluated(devices: str) -> None:
    [line] = problems(f"actor_train.device_mapping={devices}")
    assert "should be a range or a list of device numbers" in line


def test_nodes_follow_from_the_highest_device() -> None:
    both = ("actor_train.device_mapping=list(range(0,12))", "num_gpus_per_node=8")
    migration = roll(*both)
    cluster = migration.recipe.cluster
    assert (cluster.nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.placement == {"actor,rollout": "0-11"}
    assert "2 nodes of 8" in entry(migration, "num_gpus_per_node").outcome.note
    plan(migration)


def test_devices_of_a_node_that_nobody_uses_are_left_out() -> None:
    migration = roll("actor_train.device_mapping=list(range(0,2))", "num_gpus_per_node=8")
    assert migration.recipe.cluster.devices_per_node == 2
    assert "other 6 are not used" in entry(migration, "num_gpus_per_node").outcome.note


def test_one_device_runs_in_one_process() -> None:
    for devices in ("[0]", "[3]"):
        migration = roll(*(f"{role}.device_mapping={devices}" for role in ("actor_train", "actor_infer", "reference")))
        assert "cluster" not in migration.recipe.model_fields_set


def test_an_engine_on_other_devices_can_play_ahead() -> None:
    apart = ("actor_train.device_mapping=[0, 1]", "actor_infer.device_mapping=[2, 3]")
    migration = roll(*apart, "async_generation_ratio=1")
    assert migration.recipe.cluster.placement == {"actor": "0-1", "rollout": "2-3"}
    assert migration.recipe.schedule.max_staleness == 1
    plan(migration)


def test_an_engine_on_the_same_devices_cannot() -> None:
    migration = roll("async_generation_ratio=1")
    assert status(migration, "async_generation_ratio") == "unsupported"
    assert migration.recipe.schedule.max_staleness == 0


def test_devices_that_play_and_train_by_turns_become_separate() -> None:
    migration = roll("actor_train.device_mapping=[0, 1]", "actor_infer.device_mapping=[0, 1, 2, 3]")
    assert status(migration, "actor_infer.device_mapping") == "unsupported"
    assert migration.recipe.cluster.placement == {"actor": "0-1", "rollout": "2-3"}
    plan(migration)


def test_an_engine_on_some_of_the_training_devices_and_on_others_is_an_error() -> None:
    [line] = problems("actor_train.device_mapping=[0, 1]", "actor_infer.device_mapping=[1, 2]")
    assert "should have all of actor_train's devices, some of them alone, or none of them" in line


def test_an_engine_that_leaves_some_training_devices_to_a_judge_has_them_all() -> None:
    """As ROLL's own RLVR configurations have it."""
    mapping = ("actor_train.device_mapping=list(range(0,8))", "actor_infer.device_mapping=list(range(0,6))")
    migration = roll(*mapping)
    assert status(migration, "actor_infer.device_mapping") == "built in"
    assert "all of the training's play" in entry(migration, "actor_infer.device_mapping").outcome.note
    assert "placement" not in migration.recipe.cluster.model_fields_set
    kl = ("use_kl_loss=true", "kl_loss_coef=0.1", "reference.device_mapping=list(range(8,16))")
    migration = roll(*mapping, *kl)
    assert migration.recipe.cluster.placement == {"actor,rollout": "0-7", "reference": "8-15"}
    plan(migration)


def test_a_reference_model_has_its_own_devices_where_there_is_kl() -> None:
    apart = (
        "actor_train.device_mapping=[0, 1]", "actor_infer.device_mapping=[2, 3]", "reference.device_mapping=[4, 5]",
    )  # fmt: skip
    assert roll(*apart).recipe.cluster.placement == {"actor": "0-1", "rollout": "2-3"}
    migration = roll(*apart, "use_kl_loss=true", "kl_loss_coef=0.01")
    assert migration.recipe.cluster.placement == {"actor": "0-1", "rollout": "2-3", "reference": "4-5"}
    plan(migration)


def test_a_reference_model_that_would_not_fit_goes_to_the_actor() -> None:
    migration = roll(
        "actor_train.device_mapping=list(range(0,4))", "actor_infer.device_mapping=list(range(4,8))",
        "reference.device_mapping=[3, 4, 5]", "use_kl_loss=true", "kl_loss_coef=0.01",
    )  # fmt: skip
    assert migration.recipe.cluster.placement == {"actor,reference": "0-3", "rollout": "4-7"}
    assert "with the training on 0-3" in entry(migration, "reference.device_mapping").outcome.note
    plan(migration)


def test_models_are_spread_as_asked() -> None:
    migration = roll(
        "actor_train.device_mapping=list(range(0,8))",
        "strategy_config.tensor_model_parallel_size=2",
        "strategy_config.context_parallel_size=2",
        "strategy_config.expert_model_parallel_size=2",
    )
    parallel = migration.recipe.train.parallel
    assert (parallel.tensor, parallel.context, parallel.expert) == (2, 2, 2)
    plan(migration)


def test_devices_that_do_not_divide_are_one_error() -> None:
    [line] = problems("actor_train.device_mapping=list(range(0,6))", "strategy_config.tensor_model_parallel_size=4")
    assert "has 6 devices, and tensor 4 x pipeline 1 x context 1 parallel needs a multiple of 4" in line


def test_experts_that_cannot_be_dealt_beside_the_rest_are_unsupported() -> None:
    migration = roll(
        "actor_train.device_mapping=list(range(0,8))",
        "strategy_config.tensor_model_parallel_size=4",
        "strategy_config.expert_model_parallel_size=8",
    )
    assert status(migration, "strategy_config.expert_model_parallel_size") == "unsupported"
    plan(migration)


def test_copies_of_a_sharded_model() -> None:
    migration = roll("actor_train.device_mapping=list(range(0,8))", "strategy_config.fsdp_size=2")
    parallel = migration.recipe.train.parallel
    assert (parallel.shard, parallel.replicate) == (2, 4)
    plan(migration)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("strategy_name=megatron_train", "strategy_config.recompute_granularity=full"), "full"),
        (("strategy_name=megatron_train", "strategy_config.recompute_granularity=selective"), "none"),
        (("strategy_name=megatron_train",), "none"),
        (("strategy_name=deepspeed_train",), "full"),
        (("actor_train.model_args.disable_gradient_checkpointing=true",), "none"),
    ],
)
def test_activations_are_computed_again_where_the_back_end_would(overrides: tuple[str, ...], expected: str) -> None:
    assert roll(*overrides).recipe.train.recompute == expected


@pytest.mark.parametrize(
    ("key", "devices", "expected"),
    [
        ("strategy_config.offload_policy", 4, ["parameters", "gradients", "optimiser"]),
        ("strategy_config.offload_policy", 1, ["optimiser"]),
        ("strategy_config.optimizer_cpu_offload", 4, ["optimiser"]),
        ("is_offload_optimizer_states_in_train_step", 1, ["optimiser"]),
    ],
)
def test_what_lives_in_the_memory_of_the_host(key: str, devices: int, expected: list[str]) -> None:
    migration = roll(f"{key}=true", f"actor_train.device_mapping=list(range(0,{devices}))")
    assert migration.recipe.train.offload == expected
    plan(migration)


def test_roles_that_compute_otherwise_are_unsupported() -> None:
    migration = roll("actor_train.model_args.dtype=fp16", "actor_infer.model_args.dtype=bf16")
    assert migration.recipe.model.dtype == "float16"
    assert status(migration, "actor_infer.model_args.dtype") == "unsupported"


def test_a_dtype_that_is_none_is_an_error() -> None:
    [line] = problems("actor_train.model_args.dtype=fp8")
    assert "should be one of fp16, bf16, fp32" in line


# --- environments


def test_one_tag_for_all_is_one_environment() -> None:
    tags = ("train_env_manager.tags=[FrozenLake]", "val_env_manager.tags=FrozenLake")
    migration = roll(*tags)
    assert not migration.recipe.environments
    assert migration.recipe.environment.name == "frozen_lake"
    plan(migration)


def test_shares_are_the_groups_of_tags() -> None:
    migration = roll(
        "train_env_manager.tags=[SimpleSokoban, FrozenLake]", "train_env_manager.n_groups=[3, 1]", "eval_steps=0"
    )
    assert migration.recipe.shares("train") == {"SimpleSokoban": 3, "FrozenLake": 1}
    assert migration.recipe.data.validation is None
    plan(migration)


def test_groups_that_do_not_add_up_are_an_error() -> None:
    [line] = problems("train_env_manager.num_env_groups=8", "train_env_manager.num_groups_partition=[3]")
    assert "adds up to 3 groups, and `train_env_manager.num_env_groups` is 8" in line


def test_groups_for_another_number_of_tags_are_an_error() -> None:
    [line] = problems("train_env_manager.n_groups=[1, 1]")
    assert "should have one number for each of the tags SimpleSokoban" in line


def test_a_tag_that_nobody_knows_is_an_error() -> None:
    [line] = problems("train_env_manager.tags=[Chess]")
    assert "names Chess" in line


def test_a_game_of_the_users_has_its_options() -> None:
    base = "custom_envs.Lake"
    migration = roll(
        "train_env_manager.tags=[Lake]", "val_env_manager.tags=[Lake]",
        f"{base}.env_type=frozen_lake", f"{base}.env_config.size=8", f"{base}.env_config.p=0.9",
        f"{base}.env_config.is_slippery=true", f"{base}.env_config.format_penalty=-0.5", f"{base}.max_steps=30",
        f"{base}.max_tokens_per_step=40", f"{base}.env_config.env_instruction=Walk.",
        f"{base}.env_config.action_lookup={{1: west, 2: Down, 3: Right, 4: Up}}",
    )  # fmt: skip
    environment = migration.recipe.environment
    assert environment.name == "frozen_lake"
    assert environment.options == {
        "size": 8, "p": 0.9, "slippery": True, "format_penalty": -0.5, "prompts": {"instruction": "Walk."},
        "actions": {"Left": "west"},
    }  # fmt: skip
    assert (migration.recipe.rollout.max_turns, migration.recipe.rollout.max_turn_tokens) == (30, 40)
    assert not migration.unsupported
    plan(migration)


def test_a_tag_of_roll_can_be_changed() -> None:
    both = ("train_env_manager.tags=[LargerSokoban]", "val_env_manager.tags=[LargerSokoban]")
    options = roll(
        *both, "custom_envs.LargerSokoban.env_config.dim_x=8", "custom_envs.LargerSokoban.env_config.dim_y=7"
    )
    assert options.recipe.environment.options == {"dim_room": [8, 7], "num_boxes": 2, "search_depth": 10}


OLD_LAKE = (
    "train_env_manager.env_groups=1", "train_env_manager.tags=[FrozenLake]", "val_env_manager.tags=[FrozenLake]",
    "custom_envs.FrozenLake.env_type=frozen_lake", "custom_envs.FrozenLake.env_config.is_slippery=false",
)  # fmt: skip


def test_a_game_of_older_versions_has_its_instruction_and_turns_beside_its_options() -> None:
    base = "custom_envs.FrozenLake"
    migration = roll(*OLD_LAKE, f"{base}.env_instruction=Walk.", f"{base}.max_steps_per_traj=7")
    assert migration.recipe.environment.options["prompts"] == {"instruction": "Walk."}
    assert migration.recipe.rollout.max_turns == 7
    assert not migration.unsupported
    plan(migration)


def test_the_penalty_of_older_versions_is_that_of_all_games() -> None:
    penalty = "train_env_manager.format_penalty=-0.001"
    assert roll(*OLD_LAKE, penalty).recipe.environment.options == {"format_penalty": -0.001}
    middle = roll(*OLD_LAKE[1:], penalty, "custom_envs.FrozenLake.user_prompt_format=<answer>")
    assert middle.recipe.environment.options == {"format_penalty": -0.001}
    own = roll(*OLD_LAKE, penalty, "custom_envs.FrozenLake.env_config.format_penalty=-0.5")
    assert own.recipe.environment.options == {"format_penalty": -0.5}


def test_todays_penalty_is_that_of_the_game() -> None:
    migration = roll(*OLD_LAKE[1:], "train_env_manager.format_penalty=-0.001")
    assert status(migration, "train_env_manager.format_penalty") == "no effect"
    assert migration.recipe.environment.options == {"format_penalty": -0.01}


def test_the_words_of_older_versions_are_no_limit() -> None:
    migration = roll(
        *OLD_LAKE, "custom_envs.FrozenLake.max_tokens=100", "actor_infer.generating_args.max_new_tokens=300"
    )
    assert status(migration, "custom_envs.FrozenLake.max_tokens") == "no effect"
    assert migration.recipe.rollout.max_turn_tokens == 300


def test_a_tag_that_is_not_played_lacks_nothing() -> None:
    base = "custom_envs.Shop"
    migration = roll(
        f"{base}.env_type=webshop", f"{base}.env_config.observation_mode=text", f"{base}.reward_template=Reward",
        f"{base}.env_instruction=Buy.", f"{base}.env_config.grid_vocab.W=wall", f"{base}.colour=red",
    )  # fmt: skip
    assert {one.outcome.status for one in migration.entries if one.given.key.startswith(base)} == {"no effect"}


def test_the_templates_of_rolls_files_are_only_what_games_take_of_them() -> None:
    migration = roll(
        "user_prompt_no_think_format=<answer>", "user_prompt_think_format=<think>", "reward_template=Reward: {reward}",
        "custom_envs.SimpleSokoban.reward_template=Reward: {reward}",
        "custom_envs.SimpleSokoban.agent_template=State: {state}",
    )  # fmt: skip
    assert [one.given.key for one in migration.unsupported] == ["custom_envs.SimpleSokoban.reward_template"]
    assert migration.recipe.environment.options["prompts"]["turn"] == "State: {observation}"
    plan(migration)


def test_keys_of_trackers_are_not_shown() -> None:
    migration = roll("track_with=wandb", "tracker_kwargs.api_key=0123", "tracker_kwargs.login_kwargs.key=4567")
    shown = [str(one.given) for one in migration.entries]
    assert not any("0123" in line or "4567" in line for line in shown)


def test_options_that_are_out_of_bounds_are_errors() -> None:
    [line] = problems("custom_envs.SimpleSokoban.env_config.dim_room=[2, 2]")
    assert "should be a whole number, at least 4" in line
    [line] = problems("custom_envs.FrozenLake.env_config.action_pattern='(('")
    assert "should be a regular expression" in line


def test_prompts_keep_their_places() -> None:
    base = "custom_envs.SimpleSokoban"
    migration = roll(
        f"{base}.agent_system_template=Play.",
        base + ".agent_template='Turn {turn_idx}, {actions_left} left: {observation}'",
    )  # fmt: skip
    prompts = migration.recipe.environment.options["prompts"]
    assert prompts["system"] == "Play."
    assert prompts["turn"] == "Turn {turn}, {actions_left} left: {observation}"
    assert prompts["opening"].endswith(prompts["turn"])
    assert "{instruction}" in prompts["opening"]


def test_a_prompt_with_a_place_that_corral_lacks_is_unsupported() -> None:
    migration = roll("custom_envs.SimpleSokoban.agent_template='{history} {observation}'")
    assert status(migration, "custom_envs.SimpleSokoban.agent_template") == "unsupported"
    assert "prompts" not in migration.recipe.environment.options


def test_replies_that_think_have_a_form() -> None:
    both = ("train_env_manager.tags=[FrozenLakeThink]", "val_env_manager.tags=[FrozenLakeThink]")
    options = roll(*both).recipe.environment.options
    assert options["answer_format"].startswith("<think>")


def test_the_games_that_come_out_can_be_played() -> None:
    """The options are those of the environments."""
    from corral.envs.games.frozen_lake import FrozenLakeEnv
    from corral.envs.games.sokoban import SokobanEnv

    classes: dict[str, Any] = {"sokoban": SokobanEnv, "frozen_lake": FrozenLakeEnv}
    tags = "[SimpleSokoban, LargerSokoban, SokobanDifferentGridVocab, FrozenLake, FrozenLakeThink]"
    recipe = roll(f"train_env_manager.tags={tags}").recipe
    for environment in recipe.environments.values():
        classes[environment.name](**environment.options)


def test_an_environment_that_corral_lacks_is_named_for_the_user_to_write() -> None:
    migration = roll(
        "train_env_manager.tags=[Shop]", "val_env_manager.tags=[Shop]", "custom_envs.Shop.env_type=webshop"
    )
    assert status(migration, "custom_envs.Shop.env_type") == "unsupported"
    assert migration.recipe.environment.name == "my_environments:Shop"
    plan(migration)


def test_environments_that_differ_in_turns_get_the_most() -> None:
    migration = roll(
        "train_env_manager.tags=[SimpleSokoban, FrozenLake]", "custom_envs.SimpleSokoban.max_steps=20",
        "custom_envs.FrozenLake.max_steps=5",
    )  # fmt: skip
    assert migration.recipe.rollout.max_turns == 20
    assert status(migration, "custom_envs.FrozenLake.max_steps") == "unsupported"


def test_validation_games_in_groups_are_samples_of_a_board() -> None:
    migration = roll("val_batch_size=64", "val_env_manager.group_size=4")
    assert migration.recipe.data.validation is not None
    assert migration.recipe.data.validation.size == 16
    assert migration.recipe.validation.samples_per_prompt == 4
    [line] = problems("val_batch_size=63", "val_env_manager.group_size=4")
    assert "should be a multiple of `val_env_manager.group_size`, 4" in line


def test_a_game_by_turns_of_its_own_is_unsupported() -> None:
    name = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
    assert status(roll(f"env_manager_cls={name}"), "env_manager_cls") == "unsupported"


# --- advantages and losses


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "reinforce_plus_plus"),
        (("whiten_advantages=false",), "reinforce"),
        ((*GROUPS, "reward_normalization.method=mean_std"), "grpo"),
        ((*GROUPS, "reward_normalization.method=mean_std", "whiten_advantages=false"), "grpo"),
        ((*GROUPS, "reward_normalization.method=mean"), "reinforce_plus_plus_baseline"),
        ((*GROUPS, "reward_normalization.method=mean", "whiten_advantages=false"), "dr_grpo"),
        (("reward_normalization.grouping=batch", "reward_normalization.method=mean_std"), "reinforce_plus_plus"),
        (("reward_normalization.method=mean_std",), "reinforce_plus_plus"),  # by tags, and there is one
        ((*GROUPS, "reward_normalization.norm_mean_type=group"), "reinforce_plus_plus_baseline"),
        (
            (*GROUPS, "reward_normalization.norm_mean_type=group", "reward_normalization.norm_std_type=batch"),
            "reinforce_plus_plus_baseline",
        ),
        ((*GROUPS, "adv_estimator=gigpo", "reward_normalization.method=mean_std"), "gigpo"),
        (("adv_estimator=step_reinforce", "step_reward_gamma=1.0"), "reinforce_plus_plus"),
        (
            (
                "adv_estimator=step_reinforce", "step_reward_gamma=1.0",
                "reward_normalization.grouping=batch", "reward_normalization.method=mean_std",
            ),
            "reinforce_plus_plus",
        ),
        (("adv_estimator=gae",), "ppo"),
        ((*ASK, "adv_estimator=grpo"), "grpo"),
        ((*ASK, "adv_estimator=reinforce"), "reinforce"),
        (
            (*ASK, "adv_estimator=reinforce", "norm_mean_type=group", "whiten_advantages=true"),
            "reinforce_plus_plus_baseline",
        ),
        ((*ASK, "adv_estimator=reinforce", "reward_norm=group", "reward_shift=true"), "dr_grpo"),
    ],
)  # fmt: skip
def test_estimator_normalisation_and_whitening_together_are_an_algorithm(
    overrides: tuple[str, ...], expected: str
) -> None:
    migration = roll(*overrides)
    assert migration.recipe.algorithm.name == expected
    plan(migration)


def test_the_note_of_an_estimator_has_both() -> None:
    note = entry(roll("adv_estimator=grpo"), "adv_estimator").outcome.note
    assert note.startswith("grpo, rewards as they are, whitened: reinforce_plus_plus")


def test_groups_of_one_that_are_compared_are_an_error() -> None:
    lines = problems("adv_estimator=grpo", *GROUPS[1:], "reward_normalization.method=mean_std")
    assert len(lines) == 1
    assert "`train_env_manager.group_size` is 1: nothing would be learnt" in lines[0]


def test_a_normalisation_that_corral_lacks_is_unsupported() -> None:
    migration = roll(*ASK, "adv_estimator=reinforce", "norm_mean_type=running", "norm_std_type=running")
    assert status(migration, "norm_mean_type") == "unsupported"
    plan(migration)


def test_gigpo_keeps_its_weights() -> None:
    base = (*GROUPS, "adv_estimator=gigpo", "reward_normalization.method=mean_std", "step_reward_gamma=0.9")
    algorithm = roll(*base, "step_reward_weight=0.5").recipe.algorithm
    assert (algorithm.turn_gamma, algorithm.turn_weight) == (0.9, 0.5)
    assert status(roll(*base, "episode_reward_weight=2"), "episode_reward_weight") == "unsupported"


def test_a_critic_has_its_own_keys() -> None:
    migration = roll(
        "adv_estimator=gae", "lambd=0.9", "gamma=0.99", "value_clip=0.2", "critic_warmup=5",
        "reward_pretrain=other", "critic.training_args.learning_rate=1.0e-5",
    )  # fmt: skip
    recipe = migration.recipe
    assert (recipe.algorithm.lam, recipe.algorithm.gamma) == (0.9, 0.99)
    assert (recipe.critic.value_clip, recipe.critic.warmup_steps, recipe.critic.path) == (0.2, 5, "other")
    assert recipe.critic.optimiser.learning_rate == 1e-5
    assert recipe.algorithm.kl.where is None
    assert "where" in recipe.algorithm.kl.model_fields_set
    plan(migration)


def test_without_a_critic_its_keys_say_nothing() -> None:
    migration = roll("lambd=0.9", "value_clip=0.2", "critic_warmup=5", "critic.training_args.learning_rate=1.0e-5")
    assert {one.outcome.status for one in migration.entries} == {"no effect"}
    plan(migration)


@pytest.mark.parametrize(
    ("overrides", "where", "coefficient", "estimator"),
    [
        (("use_kl_loss=true", "kl_loss_coef=0.01"), "loss", 0.01, "k3"),
        (("use_kl_loss=true",), None, None, None),
        (("add_token_level_kl=true", "init_kl_coef=0.1"), "reward", 0.1, "k1"),
        (("add_token_level_kl=true", "init_kl_coef=0.1", "kl_penalty=mse"), "reward", 0.1, "k2"),
        (("init_kl_coef=0.1",), None, None, None),
        (("init_kl_coef=0.1", "train_env_manager.env_groups=1"), "reward", 0.1, "k1"),  # as older versions had it
        ((*ASK, "adv_estimator=grpo", "add_token_level_kl=true"), "reward", 0.2, "k1"),
    ],
)
def test_kl_is_where_roll_has_it(
    overrides: tuple[str, ...], where: str | None, coefficient: float | None, estimator: str | None
) -> None:
    resolved = plan(roll(*overrides)).algorithm
    assert resolved.kl_where == where
    if where is not None:
        assert (resolved.kl_coefficient, resolved.kl_estimator) == (coefficient, estimator)


def test_an_adaptive_kl_has_a_target() -> None:
    kl = roll("add_token_level_kl=true", "init_kl_coef=0.1", "target_kl=6", "kl_horizon=500").recipe.algorithm.kl
    assert (kl.controller, kl.target, kl.horizon) == ("adaptive", 6, 500)


def test_kl_in_both_places_stays_in_the_loss() -> None:
    both = ("use_kl_loss=true", "kl_loss_coef=0.01", "add_token_level_kl=true", "init_kl_coef=0.1")
    migration = roll(*both)
    assert plan(migration).algorithm.kl_where == "loss"
    assert status(migration, "init_kl_coef") == "unsupported"


def test_clips_are_one_number_or_two() -> None:
    assert roll("pg_clip=0.1").recipe.algorithm.clip_high == 0.1
    algorithm = roll("use_pg_clip_range=true", "pg_clip_low=0.2", "pg_clip_high=0.28", "pg_clip=0.1").recipe.algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
    assert status(roll("pg_clip_high=0.3"), "pg_clip_high") == "no effect"


def test_ratios_of_sequences_are_gspo() -> None:
    migration = roll(*ASK, "adv_estimator=grpo", "importance_sampling=seq", "pg_clip=0.001")
    algorithm = migration.recipe.algorithm
    assert (algorithm.loss, algorithm.clip_low) == ("gspo", 0.001)
    plan(migration)


@pytest.mark.parametrize(("variant", "loss"), [("ppo", "ppo"), ("vanilla", "gpg"), ("cispo", "cispo"), ("topr", "ppo")])
def test_variants_are_losses(variant: str, loss: str) -> None:
    worker = "actor_train.worker_cls=roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
    migration = roll(worker, f"actor_train.pg_variant={variant}")
    assert plan(migration).algorithm.loss == loss
    assert (status(migration, "actor_train.pg_variant") == "unsupported") == (variant == "topr")


def test_a_variant_says_nothing_without_its_worker() -> None:
    assert status(roll("actor_train.pg_variant=cispo"), "actor_train.pg_variant") == "no effect"


def test_losses_are_summed_up_as_asked() -> None:
    assert roll("loss_agg_mode=token-mean").recipe.algorithm.aggregation == "token_mean"
    algorithm = roll("loss_agg_mode=seq-mean-token-sum-norm", "sequence_length=2048").recipe.algorithm
    assert (algorithm.aggregation, algorithm.aggregation_norm) == ("seq_mean_token_sum_norm", 2048)


def test_a_clip_of_rewards_that_is_never_reached_is_left_out() -> None:
    groups = (*GROUPS, "reward_normalization.method=mean_std")
    migration = roll(*groups, "reward_clip=10")
    assert migration.recipe.algorithm.reward_clip is None
    assert "within 2.47 deviations" in entry(migration, "reward_clip").outcome.note
    assert status(roll(*groups, "reward_clip=1"), "reward_clip") == "unsupported"
    assert roll("reward_clip=5").recipe.algorithm.reward_clip == 5


def test_weights_between_engine_and_trainer() -> None:
    migration = roll("train_infer_correction.is_weight.enabled=true")
    resolved = plan(migration).algorithm
    assert (resolved.correction_name, resolved.correction_cap, resolved.old_logprobs) == ("token_tis", 1.2, "recompute")
    sequences = (
        "train_infer_correction.is_weight.enabled=true",
        "train_infer_correction.is_weight.weight_type=sequence",
    )
    assert plan(roll(*sequences, "train_infer_correction.is_weight.upper_bound=3")).algorithm.correction_cap == 3


def test_a_filter_by_the_ratio_is_rejection() -> None:
    rules = "train_infer_correction.filters=[{enabled: true, agg_type: sequence, ratio_low: 0.5, ratio_high: 2.0}]"
    resolved = plan(roll(rules)).algorithm
    assert (resolved.correction_name, resolved.correction_level) == ("rejection", "sequence")
    assert (resolved.correction_floor, resolved.correction_cap) == (0.5, 2)
    off = roll("train_infer_correction.filters=[{enabled: false}]")
    assert status(off, "train_infer_correction.filters") == "built in"
    by_difference = roll("train_infer_correction.filters=[{enabled: true, diff_enabled: true}]")
    assert status(by_difference, "train_infer_correction.filters") == "unsupported"


# --- the run around it


def test_a_name_becomes_that_of_a_folder() -> None:
    migration = roll("exp_name='my run: 7/8'")
    assert migration.recipe.name == "my-run-7-8"
    assert status(migration, "exp_name") == "converted"
    [line] = problems("exp_name='//'")
    assert "should name the run" in line


def test_checkpoints_beyond_the_end_are_the_one_at_the_end() -> None:
    migration = roll("max_steps=100", "save_steps=500")
    assert migration.recipe.checkpoint.every == 0
    assert "at the end only" in entry(migration, "save_steps").outcome.note


def test_all_checkpoints_are_kept_unless_a_number_is_said() -> None:
    assert roll("pretrain=model", "adv_estimator=reinforce", "max_steps=500").recipe.checkpoint.keep == 11
    assert roll("max_ckpt_to_keep=3", "save_steps=10").recipe.checkpoint.keep == 3


def test_without_steps_to_validate_there_is_no_validation() -> None:
    migration = roll("eval_steps=0")
    assert migration.recipe.data.validation is None
    assert not [key for key in values(migration) if key.startswith("validation")]
    plan(migration)


def test_questions_are_validated_where_there_is_a_file() -> None:
    without = roll(*ASK, "adv_estimator=grpo", "validation.generating_args.temperature=0.6")
    assert without.recipe.data.validation is None
    plan(without)
    having = roll(*ASK, "adv_estimator=grpo", "validation.data_args.file_name=[a.jsonl, b.jsonl]", "eval_steps=5")
    assert having.recipe.data.validation is not None
    assert having.recipe.data.validation.path == ["a.jsonl", "b.jsonl"]
    assert having.recipe.validation.every == 5
    plan(having)


def test_steps_of_no_number_need_passes_over_data() -> None:
    epochs = roll(*ASK, "adv_estimator=grpo", "max_steps=-1", "actor_train.training_args.num_train_epochs=3")
    assert (epochs.recipe.schedule.epochs, epochs.recipe.schedule.steps) == (3, None)
    plan(epochs)
    [line] = problems("max_steps=-1")
    assert "should be above 0" in line


def test_warming_up_counts_updates_in_both() -> None:
    assert roll("actor_train.training_args.warmup_steps=7").recipe.optimiser.warmup_steps == 7
    ratio = ("actor_train.training_args.warmup_ratio=0.1", "actor_train.training_args.warmup_steps=0")
    assert roll(*ratio).recipe.optimiser.warmup_ratio == 0.1
    both = roll("actor_train.training_args.warmup_ratio=0.1")
    assert status(both, "actor_train.training_args.warmup_ratio") == "no effect"


@pytest.mark.parametrize(
    ("written", "ours"),
    [("constant_with_warmup", "constant"), ("cosine", "cosine"), ("linear", "linear"), ("polynomial", None)],
)
def test_schedules_have_their_names(written: str, ours: str | None) -> None:
    migration = roll(f"actor_train.training_args.lr_scheduler_type={written}")
    key = "actor_train.training_args.lr_scheduler_type"
    assert status(migration, key) == ("unsupported" if ours is None else "mapped")
    assert migration.recipe.optimiser.schedule == (ours or "constant")


def test_a_constant_schedule_has_no_warm_up_but_in_megatron() -> None:
    constant = "actor_train.training_args.lr_scheduler_type=constant"
    assert roll(constant).recipe.optimiser.warmup_steps == 0
    assert roll(constant, "strategy_name=megatron_train").recipe.optimiser.warmup_steps == 10


def test_the_least_learning_rate_is_a_share() -> None:
    arguments = "actor_train.training_args"
    migration = roll(
        f"{arguments}.lr_scheduler_type=cosine_with_min_lr", f"{arguments}.learning_rate=1.0e-5",
        f"{arguments}.lr_scheduler_kwargs.min_lr=1.0e-6",
    )  # fmt: skip
    assert migration.recipe.optimiser.min_learning_rate_ratio == pytest.approx(0.1)
    plan(migration)


def test_starting_anew_and_going_on() -> None:
    assert roll("resume_from_checkpoint=false").recipe.checkpoint.resume == "never"
    assert roll("resume_from_checkpoint=true").recipe.checkpoint.resume == "auto"
    assert roll("resume_from_checkpoint=/old/checkpoint-5").recipe.checkpoint.resume == "/old/checkpoint-5"
    assert roll().recipe.checkpoint.resume == "auto"


def test_a_project_needs_a_tracker_that_has_them() -> None:
    migration = roll("track_with=wandb", "tracker_kwargs.project=mine", "tracker_kwargs.api_key=secret")
    assert migration.recipe.logging.project == "mine"
    assert migration.recipe.logging.trackers == ["console", "wandb"]
    assert "secret" not in str(values(migration))
    assert status(roll("tracker_kwargs.project=mine"), "tracker_kwargs.project") == "no effect"


def test_variables_are_passed_on_by_name_where_there_are_workers() -> None:
    variables = ("system_envs.NCCL_DEBUG=INFO", "actor_train.system_envs.HF_HOME=/hub", "system_envs.VLLM_USE_V1=1")
    assert "cluster" not in roll(*variables).recipe.model_fields_set
    migration = roll(*variables, "actor_train.device_mapping=[0, 1]", "actor_infer.device_mapping=[0, 1]")
    assert migration.recipe.cluster.environment == ["HF_HOME", "NCCL_DEBUG"]
    assert status(migration, "system_envs.VLLM_USE_V1") == "built in"
    plan(migration)


def test_models_that_see_are_unsupported() -> None:
    assert status(roll("pretrain=Qwen/Qwen2.5-VL-7B-Instruct", "adv_estimator=reinforce"), "pretrain") == "unsupported"


def test_adapters_are_unsupported_only_where_they_are_used() -> None:
    target, rank = "actor_train.model_args.lora_target", "actor_train.model_args.lora_rank"
    assert status(roll(f"{rank}=8"), rank) == "no effect"
    migration = roll(f"{rank}=8", f"{target}=all-linear")
    assert {status(migration, rank), status(migration, target)} == {"unsupported"}


@pytest.mark.parametrize(
    "override",
    ["beta=0.1", "chosen_key=chosen", "sft_train.device_mapping=list(range(0,8))", "student_pretrain=small",
     "kd_objective=forward_kl", "is_pure_opd=true", "teacher.model_args.dtype=bf16", "vlm_filter.enable=true"],
)  # fmt: skip
def test_pipelines_that_corral_lacks_are_told_in_words(override: str) -> None:
    migration = roll(override)
    [one] = migration.unsupported
    assert one.outcome.note


def test_a_reward_that_corral_lacks_is_named_for_the_user_to_write() -> None:
    name = "roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker"
    migration = roll(*ASK, "adv_estimator=grpo", f"rewards.code.worker_cls={name}")
    assert status(migration, "rewards.code.worker_cls") == "unsupported"
    assert migration.recipe.environment.reward.name == "my_rewards:code"
    plan(migration)


def test_groups_whose_rewards_are_equal_are_left_out_where_that_is_asked() -> None:
    migration = roll(*ASK, "adv_estimator=grpo", "rewards.math.query_filter_config.type=std_filter")
    assert migration.recipe.algorithm.dynamic_sampling.enabled
    plan(migration)


def test_rows_of_a_defaults_section_are_no_keys() -> None:
    assert roll("hydra.run.dir=.", "custom_envs=null", "rewards=null", "actor_train.strategy_args=null").recipe
    [line] = problems("rewards=5")
    assert "should be a section of keys and values" in line


# --- all kinds of values

SENSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "rollout_batch_size": st.integers(0, 300),
    "train_env_manager.group_size": st.sampled_from([1, 2, 8]),
    "train_env_manager.tags": st.sampled_from(["[FrozenLake]", "[SimpleSokoban, FrozenLake]", "[LargerSokoban]"]),
    "val_env_manager.tags": st.sampled_from(["[FrozenLake]", "[SimpleSokoban, SokobanDifferentGridVocab]"]),
    "val_batch_size": st.sampled_from([-1, 16, 128]),
    "max_steps": st.integers(0, 1000),
    "eval_steps": st.integers(-1, 50),
    "save_steps": st.integers(0, 2000),
    "sequence_length": st.integers(0, 9000),
    "prompt_length": st.integers(1, 5000),
    "response_length": st.integers(1, 5000),
    "max_tokens_per_step": st.integers(1, 9000),
    "adv_estimator": st.sampled_from(["gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce"]),
    "reward_normalization.method": st.sampled_from(["identity", "mean", "mean_std", "asym_clip"]),
    "reward_normalization.grouping": st.sampled_from(["tags", "batch", "traj_group_id", "state"]),
    "whiten_advantages": st.booleans(),
    "advantage_clip": st.sampled_from(["null", 0.2, 10]),
    "reward_clip": st.sampled_from(["null", 1, 20]),
    "gamma": st.sampled_from([1, 0.9]),
    "use_kl_loss": st.booleans(),
    "kl_loss_coef": st.sampled_from([0, 0.01]),
    "init_kl_coef": st.sampled_from([0, 0.1]),
    "add_token_level_kl": st.booleans(),
    "target_kl": st.sampled_from(["null", 0.1]),
    "pg_clip": st.sampled_from([0.1, 0.2]),
    "dual_clip_loss": st.booleans(),
    "loss_agg_mode": st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
    "importance_sampling": st.sampled_from(["token", "seq"]),
    "train_infer_correction.is_weight.enabled": st.booleans(),
    "async_generation_ratio": st.sampled_from([0, 1, 1.5]),
    "num_gpus_per_node": st.integers(1, 8),
    "actor_train.device_mapping": st.sampled_from(["list(range(0,4))", "[0]", "list(range(0,6))", "nonsense"]),
    "actor_infer.device_mapping": st.sampled_from(["list(range(0,4))", "[0]", "list(range(4,8))", "list(range(0,8))"]),
    "reference.device_mapping": st.sampled_from(["list(range(0,4))", "[0]", "list(range(4,6))", "list(range(8,12))"]),
    "strategy_config.tensor_model_parallel_size": st.sampled_from([1, 2]),
    "strategy_config.context_parallel_size": st.sampled_from([1, 2]),
    "strategy_config.expert_model_parallel_size": st.sampled_from([1, 2, 4]),
    "strategy_config.fsdp_size": st.sampled_from([-1, 1, 2]),
    "strategy_config.offload_policy": st.booleans(),
    "actor_train.training_args.per_device_train_batch_size": st.integers(1, 8),
    "actor_train.training_args.gradient_accumulation_steps": st.integers(1, 64),
    "actor_train.training_args.lr_scheduler_type": st.sampled_from(["constant", "cosine", "linear"]),
    "actor_train.training_args.warmup_ratio": st.sampled_from([0, 0.1]),
    "actor_infer.generating_args.temperature": st.sampled_from([0, 0.5, 1]),
    "actor_infer.generating_args.top_k": st.sampled_from([-1, 0, 50]),
    "actor_infer.generating_args.max_new_tokens": st.integers(1, 5000),
    "num_return_sequences_in_group": st.sampled_from([1, 8]),
    "actor_train.data_args.file_name": st.just("train.jsonl"),
    "validation.data_args.file_name": st.just("test.jsonl"),
    "pretrain": st.just("model"),
    "track_with": st.sampled_from(["wandb", "stdout", "tensorboard"]),
    "tracker_kwargs.project": st.just("mine"),
    "system_envs.NCCL_DEBUG": st.just("INFO"),
    "rpc_timeout": st.integers(1, 1000),
}


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({}, optional=SENSIBLE))
def test_whatever_is_written_gives_a_recipe_with_a_plan_or_an_error_in_words(chosen: dict[str, Any]) -> None:
    overrides = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in chosen.items()]
    try:
        migration = roll(*overrides)
    except RecipeError:
        return
    plan(migration)


def test_of_several_rewards_the_one_that_corral_has_is_that_of_all_rows() -> None:
    workers = "roll.pipeline.rlvr.rewards"
    migration = roll(
        *ASK,
        f"rewards.ifeval.worker_cls={workers}.ifeval_rule_reward_worker.GeneralRuleRewardWorker",
        f"rewards.math_rule.worker_cls={workers}.math_rule_reward_worker.MathRuleRewardWorker",
    )
    assert migration.recipe.environment.reward.name == "math"
    assert "that of math_rule" in entry(migration, "rewards.ifeval.worker_cls").outcome.note


def test_gigpo_without_the_deviation_says_only_what_differs() -> None:
    migration = roll(*GROUPS, "adv_estimator=gigpo", "reward_normalization.method=mean")
    found = entry(migration, "reward_normalization.method").outcome
    assert (found.status, found.note) == ("unsupported", "gigpo divides by the group's deviation")
