"""Plans of migrated configurations against numbers that were worked out by hand, with the other system's own formula.

Sources: verl 1dda039 (`verl/trainer/ppo/ray_trainer.py`, `verl/workers/fsdp_workers.py`: of B prompts with n samples, M
prompts are a mini-batch: B / M updates of M x n; floor(rows / B) steps in an epoch), Search-R1 a14dc3a (M counts
trajectories), ROLL 8eb27cc (`roll/configs/base_config.py`, `roll/pipeline`: per_device x accumulation x dp trajectories
in an update, dp = devices / (tp x pp x cp)), RLinf a3816b5 (`rlinf/config.py`: B x group / n_minibatches in an update).
"""

from dataclasses import dataclass

import pytest
from foreign import read

from corral.migrate.config_sources import table_of
from corral.recipe.plan import make_plan


@dataclass(frozen=True)
class Sizes:
    prompts: int
    """Prompts, rows or pairs of a step."""
    samples: int
    updates: int
    """Updates of a step, in all of its epochs."""
    of_update: int
    """Trajectories, rows or pairs of an update."""
    micro: int
    """Tokens of a micro-batch."""
    longest: int
    """Tokens of the longest trajectory or row."""
    steps: int


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = f"algorithm.adv_estimator=grpo trainer.nnodes=1 trainer.n_gpus_per_node=8 {ROLLOUT}.name=vllm"
GSM8K = f"{VERL} data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 {ROLLOUT}.n=5"
SEARCH = (
    f"data.train_batch_size=512 data.max_start_length=2048 data.max_prompt_length=4096 {ACTOR}.ppo_mini_batch_size=256 "
    "max_turns=2 retriever.url=http://127.0.0.1:8000/retrieve trainer.nnodes=1 trainer.n_gpus_per_node=8 do_search=true"
)
TRAINING, STRATEGY = "actor_train.training_args", "actor_train.strategy_args.strategy_config"
RLVR = (
    "pretrain=m actor_train.data_args.file_name=[a.jsonl] adv_estimator=grpo num_gpus_per_node=8 prompt_length=2048 "
    "rewards.math.worker_cls=roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"
)
SFT = "pretrain=m sft_train.data_args.file_name=a.json sft_train.device_mapping=list(range(0,8)) sequence_length=2048"
RLINF = (
    "data.rollout_batch_size=512 algorithm.group_size=16 algorithm.n_minibatches=4 data.train_data_paths=[a.jsonl] "
    "data.max_prompt_length=1024 cluster.num_nodes=1 cluster.num_gpus_per_node=8"
)
CASES = [
    # B 1024, n 5, M 256: 1024 / 256 updates of 256 x 5; 40 x (512 + 1024) tokens; floor(7473 / 1024) x 15 steps, of
    # which Corral makes floor(7473 x 15 / 1024), since it leaves no rows out: here with 7168 rows, where both are 105
    ("verl", f"{GSM8K} {ACTOR}.ppo_mini_batch_size=256 {ACTOR}.ppo_micro_batch_size_per_gpu=40 trainer.total_epochs=15",
     7168, Sizes(1024, 5, 4, 1280, 61440, 1536, 105)),
    # M 1024: one update of 1024 x 5; 16384 tokens on each of 2 devices that share a sequence; steps as written
    ("verl", f"{GSM8K} {ACTOR}.ppo_mini_batch_size=1024 {ACTOR}.use_dynamic_bsz=true trainer.total_training_steps=500 "
     f"{ACTOR}.ppo_max_token_len_per_gpu=16384 {ACTOR}.ulysses_sequence_parallel_size=2",
     None, Sizes(1024, 5, 1, 5120, 32768, 1536, 500)),
    # a micro-batch of all devices: 64 / 8 = 8 sequences of 1536 tokens
    ("verl", f"{GSM8K} {ACTOR}.ppo_mini_batch_size=512 {ACTOR}.ppo_micro_batch_size=64 trainer.total_epochs=1",
     10240, Sizes(1024, 5, 2, 2560, 12288, 1536, 10)),
    # with pairs of devices that share sequences: 64 / (8 / 2) = 16 sequences of 1536 tokens
    ("verl", f"{GSM8K} {ACTOR}.ppo_mini_batch_size=512 {ACTOR}.ppo_micro_batch_size=64 trainer.total_epochs=2 "
     f"{ACTOR}.ulysses_sequence_parallel_size=2", 10240, Sizes(1024, 5, 2, 2560, 24576, 1536, 20)),
    # ppo_epochs 2: twice 512 / 128 updates of 128 x 8
    ("verl", f"{VERL} data.train_batch_size=512 {ROLLOUT}.n=8 {ACTOR}.ppo_mini_batch_size=128 {ACTOR}.ppo_epochs=2 "
     f"data.max_prompt_length=1024 data.max_response_length=2048 {ACTOR}.ppo_micro_batch_size_per_gpu=2 "
     "trainer.total_training_steps=100", None, Sizes(512, 8, 8, 1024, 6144, 3072, 100)),
    # DAPO: 512 / 32 updates of 32 x 16; a trajectory of 2048 + 20480 tokens in a micro-batch
    ("verl", f"{VERL} data.train_batch_size=512 {ROLLOUT}.n=16 {ACTOR}.ppo_mini_batch_size=32 trainer.nnodes=16 "
     f"data.max_prompt_length=2048 data.max_response_length=20480 {ACTOR}.use_dynamic_bsz=true "
     f"{ACTOR}.ppo_max_token_len_per_gpu=22528 trainer.total_epochs=1",
     17408, Sizes(512, 16, 16, 512, 22528, 22528, 34)),
    # Megatron with tp 2: micro-batches are of sequences, whatever computes them: 2 x (1024 + 2048)
    ("verl", f"{VERL} data.train_batch_size=128 {ROLLOUT}.n=8 {ACTOR}.ppo_mini_batch_size=64 trainer.nnodes=2 "
     f"data.max_prompt_length=1024 data.max_response_length=2048 {ACTOR}.ppo_micro_batch_size_per_gpu=2 "
     f"{ACTOR}.megatron.tensor_model_parallel_size=2 trainer.total_training_steps=7",
     None, Sizes(128, 8, 2, 512, 6144, 3072, 7)),
    # Search-R1: M counts trajectories: 512 x 5 / 256 updates of 256; 64 / 8 sequences of 2048 + 4096 tokens
    ("search_r1", f"{SEARCH} algorithm.adv_estimator=grpo {ROLLOUT}.n_agent=5 {ACTOR}.ppo_micro_batch_size=64 "
     "trainer.total_training_steps=1005", None, Sizes(512, 5, 10, 256, 49152, 6144, 1005)),
    # with PPO a prompt has one trajectory: 512 / 256 updates of 256
    ("search_r1", f"{SEARCH} algorithm.adv_estimator=gae {ROLLOUT}.n_agent=1 {ACTOR}.ppo_micro_batch_size=64 "
     "trainer.total_epochs=15", 5120, Sizes(512, 1, 2, 256, 49152, 6144, 150)),
    # verl's SFT: an update has B rows; max_token_len_per_gpu tokens; floor(7424 / 256) x 4 steps
    ("verl_sft", "data.train_files=a.parquet model.path=m data.train_batch_size=256 data.max_length=1024 "
     "data.max_token_len_per_gpu=8192 trainer.total_epochs=4", 7424, Sizes(256, 1, 1, 256, 8192, 1024, 116)),
    # without dynamic batches 4 rows of 1024 tokens
    ("verl_sft", "data.train_files=a.parquet model.path=m data.train_batch_size=64 data.max_length=1024 "
     "data.use_dynamic_bsz=false data.micro_batch_size_per_gpu=4 trainer.total_training_steps=30",
     None, Sizes(64, 1, 1, 64, 4096, 1024, 30)),
    # ROLL: dp = 16 / (2 x 1 x 2) = 4, 1 x 32 x 4 = 128 in an update, 128 x 8 / 128 updates; 1 x (2048 + 4096) tokens
    ("roll", f"{RLVR} rollout_batch_size=128 num_return_sequences_in_group=8 response_length=4096 max_steps=500 "
     f"actor_train.device_mapping=list(range(0,16)) {STRATEGY}.tensor_model_parallel_size=2 "
     f"{STRATEGY}.context_parallel_size=2 {TRAINING}.per_device_train_batch_size=1 "
     f"{TRAINING}.gradient_accumulation_steps=32", None, Sizes(128, 8, 8, 128, 6144, 6144, 500)),
    # a pipeline of 2 stages: dp = 16 / (2 x 2 x 1) = 4, 2 x 16 x 4 = 128 in an update
    ("roll", f"{RLVR} rollout_batch_size=64 num_return_sequences_in_group=8 response_length=2048 max_steps=10 "
     f"actor_train.device_mapping=list(range(0,16)) {STRATEGY}.tensor_model_parallel_size=2 "
     f"{STRATEGY}.pipeline_model_parallel_size=2 {TRAINING}.per_device_train_batch_size=2 "
     f"{TRAINING}.gradient_accumulation_steps=16", None, Sizes(64, 8, 4, 128, 8192, 4096, 10)),
    # by epochs: 2 x 1280 / 64 steps; 2 ppo_epochs of 64 x 4 / (4 x 4 x 8) updates
    ("roll", f"{RLVR} rollout_batch_size=64 num_return_sequences_in_group=4 sequence_length=4096 max_steps=-1 "
     f"{TRAINING}.num_train_epochs=2 ppo_epochs=2 actor_train.device_mapping=list(range(0,8)) "
     f"{TRAINING}.per_device_train_batch_size=4 {TRAINING}.gradient_accumulation_steps=4",
     1280, Sizes(64, 4, 4, 128, 16384, 4096, 40)),
    # agentic: rollout_batch_size counts trajectories: 128 / 8 groups; 1 x 16 x 8 = 128 in an update
    ("roll", "pretrain=m adv_estimator=grpo rollout_batch_size=128 train_env_manager.group_size=8 sequence_length=8192 "
     "train_env_manager.tags=[FrozenLake] max_steps=1024 actor_train.device_mapping=list(range(0,8)) eval_steps=0 "
     f"{TRAINING}.per_device_train_batch_size=1 {TRAINING}.gradient_accumulation_steps=16",
     None, Sizes(16, 8, 1, 128, 8192, 8192, 1024)),
    # SFT: dp = 8 / (2 x 2 x 2) = 1, 2 x 16 x 1 rows in an update of 2 x 2048 tokens; floor(20480 / 32) x 1 steps
    ("roll_sft", f"{SFT} sft_train.training_args.per_device_train_batch_size=2 "
     "sft_train.training_args.gradient_accumulation_steps=16 sft_train.strategy_args.strategy_config."
     "tensor_model_parallel_size=2 sft_train.strategy_args.strategy_config.pipeline_model_parallel_size=2 "
     "sft_train.strategy_args.strategy_config.context_parallel_size=2", 20480, Sizes(32, 1, 1, 32, 4096, 2048, 640)),
    # without Megatron's sizes dp = 8: 2 x 16 x 8 rows; floor(20480 / 256) x 3 steps
    ("roll_sft", f"{SFT} sft_train.training_args.per_device_train_batch_size=2 "
     "sft_train.training_args.gradient_accumulation_steps=16 sft_train.training_args.num_train_epochs=3",
     20480, Sizes(256, 1, 1, 256, 4096, 2048, 240)),
    # DPO: 16 x 2 x 8 pairs; ROLL doubles the micro-batch, which has both answers: 2 x 16 x 512 tokens
    ("roll_dpo", "pretrain=m actor_train.data_args.file_name=[a.json] sequence_length=512 max_steps=500 "
     f"actor_train.device_mapping=list(range(0,8)) {TRAINING}.per_device_train_batch_size=16 "
     f"{TRAINING}.gradient_accumulation_steps=2", None, Sizes(256, 2, 1, 256, 16384, 512, 500)),
    # RLinf: 4 updates of 512 x 16 / 4; 1 x seq_length tokens, of which 1024 are the prompt's
    ("rlinf", f"{RLINF} runner.seq_length=28672 algorithm.training_batch_size_per_gpu=1 runner.max_steps=200 "
     "runner.enable_dynamic_batch_size=false", None, Sizes(512, 16, 4, 2048, 28672, 28672, 200)),
    # by tokens, and 3 epochs of 1536 / 512 steps
    ("rlinf", f"{RLINF} runner.seq_length=4096 runner.enable_dynamic_batch_size=true runner.max_tokens_per_mbs=32768 "
     "runner.max_steps=-1 runner.max_epochs=3", 1536, Sizes(512, 16, 4, 2048, 32768, 4096, 9)),
]  # fmt: skip


@pytest.mark.parametrize(("system", "words", "rows", "sizes"), CASES)
def test_a_plan_has_the_other_systems_numbers(system: str, words: str, rows: int | None, sizes: Sizes) -> None:
    recipe = read(table_of(system), *words.split()).recipe
    batch, of_row = recipe.batch, recipe.num_trajectories // recipe.batch.prompts_per_step
    assert sizes == Sizes(
        batch.prompts_per_step,
        of_row,
        batch.updates_per_step * batch.ppo_epochs,
        recipe.num_units // batch.updates_per_step,
        batch.max_tokens_per_micro_batch,
        recipe.max_trained_tokens,
        make_plan(recipe, num_rows=rows).num_steps or 0,
    )
