"""verl's keys, of its versions 0.3 to today's."""

from typing import Any

import pytest
from foreign import entry, read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.migrate.migration import Migration
from corral.migrate.verl import TABLE
from corral.recipe.errors import RecipeError
from corral.recipe.plan import Plan, make_plan

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
NEEDED = ("actor_rollout_ref.model.path=model", "data.train_files=train.parquet")
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8")
VALIDATED = "data.val_files=test.parquet"

DSTACK = (
    "data.train_files=/root/data/gsm8k/train.parquet",
    "data.val_files=/root/data/gsm8k/test.parquet",
    "data.train_batch_size=256",
    "data.max_prompt_length=512",
    "data.max_response_length=256",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "critic.optim.lr=1e-5",
    "critic.model.path=Qwen/Qwen2.5-7B-Instruct",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "trainer.project_name=ppo_training",
    "trainer.experiment_name=qwen-2.5-7B",
    "trainer.val_before_train=False",
    "trainer.default_hdfs_dir=null",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=2",
    "trainer.default_local_dir=/checkpoints",
    "trainer.save_freq=10",
    "trainer.test_freq=10",
    "trainer.total_epochs=15",
)
SLURM = (
    "data.train_files=../data/gsm8k/train.parquet",
    "data.val_files=../data/gsm8k/test.parquet",
    "data.train_batch_size=1024",
    "data.max_prompt_length=1024",
    "data.max_response_length=1024",
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.9",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "critic.optim.lr=1e-5",
    "critic.model.use_remove_padding=True",
    "critic.model.path=Qwen/Qwen2-7B-Instruct",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.ppo_micro_batch_size_per_gpu=8",
    "critic.model.fsdp_config.param_offload=False",
    "critic.model.fsdp_config.optimizer_offload=False",
    "algorithm.kl_ctrl.kl_coef=0.0001",
    "trainer.critic_warmup=0",
    "trainer.logger=['console','wandb']",
    "trainer.project_name=verl_example",
    "trainer.experiment_name=Qwen2.5-32B-Instruct_function_rm",
    "trainer.n_gpus_per_node=8",
    "trainer.val_before_train=False",
    "trainer.nnodes=2",
    "trainer.save_freq=-1",
    "trainer.test_freq=10",
    "trainer.total_epochs=15",
)


def migrated(*overrides: str) -> Migration:
    made = read(TABLE, *NEEDED, *overrides)
    make_plan(made.recipe)
    return made


def planned(*overrides: str) -> Plan:
    return make_plan(migrated(*overrides).recipe)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        migrated(*overrides)
    return list(caught.value.problems)


def status(made: Migration, key: str) -> str:
    return entry(made, key).outcome.status


def note(made: Migration, key: str) -> str:
    return entry(made, key).outcome.note


# --- the commands of the documents


def test_the_short_command_says_where_to_run_and_the_rest_is_verl_s() -> None:
    made = read(TABLE, "trainer.n_gpus_per_node=8", "trainer.nnodes=2").recipe
    assert (made.cluster.nodes, made.cluster.devices_per_node) == (2, 8)
    assert (made.model.path, made.data.train.path) == (
        "~/models/deepseek-llm-7b-chat",
        "~/data/rlhf/gsm8k/train.parquet",
    )


def test_the_command_for_dstack() -> None:
    made = read(TABLE, *DSTACK)
    plan = make_plan(made.recipe)
    batch = plan.as_dict()["batch"]
    assert (batch["prompts"], batch["samples_per_prompt"], batch["trainers"]) == (256, 1, 16)
    assert batch["update_sizes"] == [64] * 4
    assert batch["max_tokens_per_micro_batch"] == 4 * 768
    assert plan.algorithm.advantage == "gae"
    assert plan.algorithm.kl_where is None, "without use_kl_in_reward, kl_coef is read by nobody"
    assert "reference" not in plan.placement.roles
    assert not made.unsupported
    assert len(made.entries) == len(DSTACK)
    recipe = made.recipe
    assert recipe.name == "qwen-2.5-7B"
    assert (recipe.logging.runs, recipe.logging.project) == ("/checkpoints", "ppo_training")
    assert recipe.logging.trackers == ["console", "wandb"], "verl's default"
    assert recipe.environment.reward.name == "by_source"
    assert recipe.schedule.epochs == 15
    assert (recipe.checkpoint.every, recipe.validation.every) == (10, 10)
    assert not recipe.validation.before_training


def test_the_command_for_amd_and_slurm() -> None:
    made = read(TABLE, *SLURM)
    plan = make_plan(made.recipe)
    batch = plan.as_dict()["batch"]
    assert batch["prompts"] == 1024
    assert batch["update_sizes"] == [256] * 4
    assert batch["max_tokens_per_micro_batch"] == 8 * 2048
    assert made.recipe.train.gradient_checkpointing, "the last of two values counts"
    assert made.recipe.checkpoint.every == 0
    assert not made.unsupported
    assert len(made.entries) == len(SLURM) - 1
    assert status(made, "critic.model.fsdp_config.param_offload") == "built in"


def test_what_has_no_effect_is_told_with_the_reason() -> None:
    made = read(TABLE, *SLURM)
    for key in (
        "algorithm.kl_ctrl.kl_coef",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.fsdp_config.param_offload",
    ):
        assert status(made, key) == "no effect"
        assert "no KL" in note(made, key)


# --- sizes


@pytest.mark.parametrize(
    ("prompts", "size", "updates"), [(256, 64, 4), (1024, 256, 4), (100, 64, 2), (128, 256, 1), (8, 8, 1)]
)
def test_mini_batches_become_updates(prompts: int, size: int, updates: int) -> None:
    made = migrated(*GRPO, f"data.train_batch_size={prompts}", f"{ACTOR}.ppo_mini_batch_size={size}")
    assert made.recipe.batch.updates_per_step == updates
    assert str(size) in note(made, f"{ACTOR}.ppo_mini_batch_size")
    assert f"{updates} update" in note(made, f"{ACTOR}.ppo_mini_batch_size")


def test_what_verl_does_where_nothing_is_said() -> None:
    recipe = migrated().recipe
    assert (recipe.batch.prompts_per_step, recipe.batch.samples_per_prompt) == (1024, 1)
    assert recipe.batch.updates_per_step == 4
    assert (recipe.cluster.nodes, recipe.cluster.devices_per_node) == (1, 8)
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens) == (512, 512)
    assert recipe.optimizer.weight_decay == recipe.critic.optimizer.weight_decay == 0.01
    assert recipe.algorithm.dual_clip == 3
    assert recipe.algorithm.kl.where is None
    assert "where" in recipe.algorithm.kl.model_fields_set
    assert recipe.train.gradient_checkpointing
    assert recipe.schedule.epochs == 30
    assert recipe.data.validation is None
    assert recipe.data.answer_key == "reward_model.ground_truth"
    assert recipe.name == "gsm8k"


def test_one_device_needs_no_cluster() -> None:
    assert "cluster" not in migrated("trainer.n_gpus_per_node=1").recipe.model_fields_set


def test_a_micro_batch_of_all_devices_is_shared_by_them() -> None:
    made = migrated(f"{ACTOR}.ppo_micro_batch_size=64", "trainer.nnodes=2")
    assert made.recipe.batch.max_tokens_per_micro_batch == 64 // 16 * 1024
    assert "64 on 16 devices" in note(made, f"{ACTOR}.ppo_micro_batch_size")


def test_a_micro_batch_holds_a_whole_trajectory() -> None:
    assert migrated(f"{ACTOR}.ppo_micro_batch_size=4").recipe.batch.max_tokens_per_micro_batch == 1024
    dynamic = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=100")
    assert migrated(*dynamic).recipe.batch.max_tokens_per_micro_batch == 1024
    assert migrated("data.max_response_length=8192").recipe.batch.max_tokens_per_micro_batch == 8704


def test_a_budget_of_tokens_is_taken_as_it_is() -> None:
    made = migrated(f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    assert made.recipe.batch.max_tokens_per_micro_batch == 16384, "verl's default"
    assert status(made, f"{ACTOR}.ppo_micro_batch_size_per_gpu") == "no effect"
    made = migrated(f"{ACTOR}.ppo_max_token_len_per_gpu=20000", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    assert made.recipe.batch.max_tokens_per_micro_batch == 2048
    assert status(made, f"{ACTOR}.ppo_max_token_len_per_gpu") == "no effect"
    made = migrated(f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=24000")
    assert status(made, f"{ACTOR}.ppo_max_token_len_per_gpu") == "mapped", "the same number"


def test_devices_that_share_a_sequence_share_its_tokens() -> None:
    made = migrated(
        f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ACTOR}.use_dynamic_bsz=True", "data.max_response_length=30000"
    )
    assert made.recipe.train.parallel.context == 4
    assert made.recipe.batch.max_tokens_per_micro_batch == 4 * 16384


def test_both_micro_batches_are_one_too_many() -> None:
    [problem] = problems(f"{ACTOR}.ppo_micro_batch_size=64", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    assert "keep one of them" in problem


def test_a_critic_has_the_actors_updates() -> None:
    assert status(migrated("critic.ppo_mini_batch_size=256"), "critic.ppo_mini_batch_size") == "built in"
    assert status(migrated("critic.ppo_mini_batch_size=128"), "critic.ppo_mini_batch_size") == "unsupported"
    assert status(migrated(*GRPO, "critic.ppo_mini_batch_size=128"), "critic.ppo_mini_batch_size") == "no effect"


def test_copies_of_a_sharded_model() -> None:
    parallel = migrated(f"{ACTOR}.fsdp_config.fsdp_size=4", "trainer.nnodes=2").recipe.train.parallel
    assert (parallel.replicate, parallel.shard) == (4, 4)
    assert migrated(f"{ACTOR}.fsdp_config.fsdp_size=-1").recipe.train.parallel.shard is None
    [problem] = problems(f"{ACTOR}.fsdp_config.fsdp_size=3")
    assert "does not divide the 8 devices" in problem


def test_megatrons_axes() -> None:
    made = migrated(
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        f"{ACTOR}.megatron.context_parallel_size=2",
        f"{ACTOR}.megatron.expert_model_parallel_size=8",
        f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
    )
    assert made.recipe.train.parallel.tensor == made.recipe.train.parallel.context == 2
    assert made.recipe.train.parallel.expert == 1, "8 x 2 x 2 are more than there are"
    assert not made.unsupported


def test_what_is_offloaded() -> None:
    def offload(*overrides: str) -> list[str]:
        return list(migrated(*overrides).recipe.train.offload)

    assert offload(f"{ACTOR}.fsdp_config.param_offload=True") == ["parameters", "gradients"]
    assert offload(f"{ACTOR}.fsdp_config.optimizer_offload=True") == ["optimizer"]
    assert offload(f"{ACTOR}.fsdp_config.grad_offload=true") == ["parameters", "gradients"]
    assert offload("critic.model.fsdp_config.optimizer_offload=True") == ["optimizer"]
    assert offload(*GRPO, "critic.fsdp.optimizer_offload=True") == []
    assert offload(f"{ACTOR}.megatron.param_offload=True", "critic.fsdp.optimizer_offload=True") == [
        "parameters",
        "gradients",
        "optimizer",
    ]


def test_one_device_keeps_its_parameters() -> None:
    key = f"{ACTOR}.fsdp_config.param_offload"
    made = migrated("trainer.n_gpus_per_node=1", f"{key}=True", f"{ACTOR}.fsdp_config.optimizer_offload=True")
    assert made.recipe.train.offload == ["optimizer"]
    assert status(made, key) == "unsupported"


# --- KL


def test_kl_in_the_reward() -> None:
    algorithm = planned("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01").algorithm
    assert (algorithm.kl_where, algorithm.kl_estimator, algorithm.kl_coefficient) == ("reward", "k1", 0.01)
    adaptive = planned(
        "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"
    ).algorithm
    assert (adaptive.kl_controller, adaptive.kl_target) == ("adaptive", 0.2)


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("kl", "k1"),
        ("k1+", "k1+"),
        ("abs", "abs"),
        ("mse", "k2"),
        ("k2+", "k2"),
        ("low_var_kl", "k3"),
        ("low_var_kl+", "k3+"),
        ("k3+", "k3+"),
    ],
)
def test_estimators_of_the_kl(written: str, ours: str) -> None:
    on = (*GRPO, f"{ACTOR}.use_kl_loss=True")
    algorithm = planned(*on, f"{ACTOR}.kl_loss_type={written}").algorithm
    assert (algorithm.kl_where, algorithm.kl_estimator) == ("loss", ours)
    in_reward = planned("algorithm.use_kl_in_reward=True", f"algorithm.kl_penalty={written}").algorithm
    assert in_reward.kl_estimator == ours.removesuffix("+"), "a reward has no gradient"


def test_kl_in_both_places_is_in_the_loss() -> None:
    made = migrated(*GRPO, f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    assert made.recipe.algorithm.kl.where == "loss"
    assert status(made, "algorithm.use_kl_in_reward") == "unsupported"


def test_a_coefficient_of_0_is_no_kl() -> None:
    assert planned(*GRPO, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.0").algorithm.kl_where is None


def test_an_unknown_estimator_is_one_line() -> None:
    [problem] = problems(*GRPO, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k4")
    assert problem.startswith(f"test: `{ACTOR}.kl_loss_type=k4` should be one of kl")


# --- advantages and losses


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("gae", "gae"),
        ("grpo", "grpo"),
        ("grpo_vectorized", "grpo"),
        ("grpo_passk", "grpo_passk"),
        ("reinforce_plus_plus", "reinforce_plus_plus"),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
        ("rloo", "rloo"),
        ("rloo_vectorized", "rloo"),
        ("remax", "remax"),
        ("opo", "opo"),
        ("gpg", "gpg"),
    ],
)
def test_estimators_of_the_advantage(written: str, ours: str) -> None:
    algorithm = planned(f"algorithm.adv_estimator={written}", f"{ROLLOUT}.n=4").algorithm
    assert algorithm.advantage == ours
    assert algorithm.loss == "ppo", "verl's loss does not follow from its estimator"
    assert algorithm.kl_where is None


def test_an_estimator_that_corral_lacks() -> None:
    keys = ("+algorithm.gdpo_reward_keys=['right','form']", "+algorithm.codapo_top_k=4")
    made = migrated("algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=4", *keys)
    assert status(made, "algorithm.adv_estimator") == "unsupported"
    assert "has grpo instead" in note(made, "algorithm.adv_estimator")
    assert made.recipe.algorithm.name == "grpo"
    assert status(made, "algorithm.gdpo_reward_keys") == "unsupported"
    assert status(made, "algorithm.codapo_top_k") == "no effect", "of another estimator"


def test_comparing_one_sample_with_itself() -> None:
    [problem] = problems("algorithm.adv_estimator=grpo")
    assert "at least 2" in problem


def test_dr_grpo() -> None:
    algorithm = planned(
        *GRPO,
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor=1000",
    ).algorithm
    assert algorithm.advantage == "dr_grpo"
    assert (algorithm.aggregation, algorithm.aggregation_norm) == ("seq_mean_token_sum_norm", 1000)


@pytest.mark.parametrize(
    ("mode", "loss", "clips"),
    [
        ("vanilla", "ppo", (0.2, 0.2)),
        ("gspo", "gspo", (0.2, 0.2)),
        ("cispo", "cispo", (0.2, 0.2)),
        ("geo_mean", "gmpo", (0.2, 0.2)),
        ("sapo", "sapo", None),
        ("gpg", "gpg", None),
        ("dro", "dro", None),
        ("dppo_tv", "dppo_tv", None),
        ("dppo_kl", "dppo_kl", None),
    ],
)
def test_losses_clip_where_verl_clips(mode: str, loss: str, clips: tuple[float, float] | None) -> None:
    algorithm = planned(*GRPO, f"{ACTOR}.policy_loss.loss_mode={mode}").algorithm
    assert algorithm.loss == loss
    if clips is not None:
        assert (algorithm.clip_low, algorithm.clip_high) == clips
    if mode.startswith("dppo"):
        assert algorithm.dppo_threshold == 0.2


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov", "up", "bypass_mode", "mine"])
def test_losses_that_corral_lacks(mode: str) -> None:
    assert migrated(*GRPO, f"{ACTOR}.policy_loss.loss_mode={mode}").unsupported


def test_clip_higher() -> None:
    algorithm = planned(
        *GRPO, f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=10.0"
    )
    assert (algorithm.algorithm.clip_low, algorithm.algorithm.clip_high) == (0.2, 0.28)
    assert algorithm.algorithm.dual_clip == 10


def test_one_clip_ratio_is_for_both_sides_where_nothing_is_said_of_them() -> None:
    made = migrated(*GRPO, f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.3")
    algorithm = make_plan(made.recipe).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (0.1, 0.3)
    assert "null" in note(made, f"{ACTOR}.clip_ratio")
    both = migrated(f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_high=0.3", f"{ACTOR}.clip_ratio_low=0.3")
    assert status(both, f"{ACTOR}.clip_ratio") == "no effect"


def test_sapo_and_dro_have_numbers_of_their_own() -> None:
    on = (*GRPO, f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_pos=1.2", f"{ACTOR}.tau_neg=1.3")
    algorithm = planned(*on).algorithm
    assert (algorithm.sapo_tau_positive, algorithm.sapo_tau_negative) == (1.2, 1.3)
    assert status(migrated(*GRPO, f"{ACTOR}.tau_pos=1.2"), f"{ACTOR}.tau_pos") == "no effect"
    dro = planned(*GRPO, f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.policy_loss.dro_beta=0.1").algorithm
    assert dro.dro_beta == 0.1


def test_discounts_count_where_they_are_read() -> None:
    both = ("algorithm.gamma=0.99", "algorithm.gae_lambda=0.95")
    algorithm = planned(*both).algorithm
    assert (algorithm.gamma, algorithm.gae_lambda) == (0.99, 0.95)
    assert status(migrated(*GRPO, *both), "algorithm.gamma") == "no effect"


def test_dynamic_sampling_and_the_penalty_for_length() -> None:
    made = migrated(
        *GRPO,
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=5",
        "data.gen_batch_size=1536",
        "data.max_response_length=2048",
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=512",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False",
        "+reward_model.reward_kwargs.max_resp_len=2048",
    )
    algorithm = make_plan(made.recipe).algorithm
    assert (algorithm.dynamic_sampling, algorithm.max_rounds) == (True, 5)
    assert (algorithm.overlong_buffer, algorithm.overlong_penalty) == (512, 0.5)
    assert not made.unsupported


def test_a_length_penalty_that_is_off_leaves_nothing_behind() -> None:
    place = "reward.reward_kwargs.overlong_buffer_cfg"
    for overrides in (
        (
            f"+{place}.enable=False",
            f"+{place}.len=512",
            f"+{place}.penalty_factor=1.0",
            "reward.reward_manager.name=dapo",
        ),
        (f"+{place}.enable=True", f"+{place}.len=512", f"+{place}.penalty_factor=1.0"),
    ):
        assert planned(*GRPO, *overrides).algorithm.overlong_buffer is None
    made = migrated(*GRPO, f"+{place}.enable=True", f"+{place}.len=0", "reward.reward_manager.name=dapo")
    assert note(made, f"{place}.enable") == "`len` is 0"
    made = migrated(*GRPO, f"+{place}.enable=True", f"+{place}.len=512")
    assert note(made, f"{place}.len") == "the reward manager is not dapo"


@pytest.mark.parametrize(
    ("overrides", "name", "cap", "floor"),
    [
        (("rollout_is=token",), "token_tis", 2, None),
        (("rollout_is=sequence", "rollout_is_threshold=3.0"), "sequence_tis", 3, None),
        (("rollout_is=token", "rollout_is_threshold=0.5_5.0"), "icepop", 5, 0.5),
        (("rollout_rs=token_k1", "rollout_rs_threshold=0.5_2.0"), "rejection", 2, 0.5),
        (("rollout_rs=seq_sum_k1", "rollout_rs_threshold=4.0"), "rejection", 4, 0.25),
        (("rollout_rs=sequence", "rollout_rs_threshold=4.0", "rollout_rs_threshold_lower=0.5"), "rejection", 4, 0.5),
    ],
)
def test_corrections(overrides: tuple[str, ...], name: str, cap: float, floor: float | None) -> None:
    algorithm = planned(*GRPO, *(f"algorithm.rollout_correction.{one}" for one in overrides)).algorithm
    assert (algorithm.correction_name, algorithm.correction_cap, algorithm.old_logprobs) == (name, cap, "recompute")
    if floor is not None:
        assert algorithm.correction_floor == floor


def test_corrections_of_earlier_versions() -> None:
    assert planned(*GRPO, f"{ACTOR}.tis_imp_ratio_cap=2.5").algorithm.correction_cap == 2.5
    flat = ("algorithm.rollout_is=true", "algorithm.rollout_is_threshold=3.0", "algorithm.rollout_is_level=sequence")
    assert planned(*GRPO, *flat).algorithm.correction_name == "sequence_tis"
    masked = ("algorithm.rollout_is=true", "algorithm.rollout_is_threshold=4.0", "algorithm.rollout_is_mode=mask")
    algorithm = planned(*GRPO, *masked).algorithm
    assert (algorithm.correction_name, algorithm.correction_floor) == ("icepop", 0.25)
    assert planned(*GRPO, *flat[1:]).algorithm.correction_name == "none", "for metrics only"


def test_corrections_that_corral_lacks() -> None:
    prefix = "algorithm.rollout_correction"
    for overrides in (
        (f"{prefix}.rollout_rs=seq_mean_k3", f"{prefix}.rollout_rs_threshold=0.01"),
        (f"{prefix}.rollout_is=sequence", f"{prefix}.rollout_is_threshold=0.5_2.0"),
        (f"{prefix}.rollout_is=token", f"{prefix}.rollout_rs=token_k1", f"{prefix}.rollout_rs_threshold=2.0"),
        (f"{prefix}.bypass_mode=true", f"{prefix}.loss_type=reinforce"),
    ):
        assert migrated(*GRPO, *overrides).unsupported
    [problem, *_] = problems(*GRPO, f"{prefix}.rollout_is=token", f"{prefix}.rollout_is_threshold=much")
    assert "such as 2.0" in problem


# --- optimizers


def test_warm_up_in_steps_counts_updates_here() -> None:
    made = migrated(
        *GRPO,
        f"{ACTOR}.optim.lr_warmup_steps=10",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
        f"{ACTOR}.ppo_mini_batch_size=256",
        f"{ACTOR}.ppo_epochs=2",
    )
    assert made.recipe.optimizer.warmup_steps == 10 * 4 * 2
    assert made.recipe.optimizer.warmup_ratio is None
    assert "80 updates" in note(made, f"{ACTOR}.optim.lr_warmup_steps")


def test_warm_up_as_a_share_stays_one() -> None:
    recipe = migrated(
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.285",
        f"{ACTOR}.optim.lr_warmup_steps=-1",
        "critic.optim.lr_warmup_steps_ratio=0.015",
    ).recipe
    assert (recipe.optimizer.warmup_ratio, recipe.critic.optimizer.warmup_ratio) == (0.285, 0.015)


@pytest.mark.parametrize("key", ["warmup_style", "lr_scheduler_type", "lr_decay_style"])
def test_schedules_of_all_versions(key: str) -> None:
    recipe = migrated(f"{ACTOR}.optim.{key}=cosine", f"{ACTOR}.optim.min_lr_ratio=0.1").recipe
    assert (recipe.optimizer.schedule, recipe.optimizer.min_learning_rate_ratio) == ("cosine", 0.1)


def test_a_floor_in_learning_rate_becomes_a_share() -> None:
    recipe = migrated(
        f"{ACTOR}.optim.lr_decay_style=linear", f"{ACTOR}.optim.min_lr=1e-7", f"{ACTOR}.optim.lr=2e-6"
    ).recipe
    assert recipe.optimizer.min_learning_rate_ratio == pytest.approx(0.05)
    constant = migrated(f"{ACTOR}.optim.min_lr_ratio=0.1")
    assert status(constant, f"{ACTOR}.optim.min_lr_ratio") == "no effect"


def test_numbers_of_the_optimizer() -> None:
    recipe = migrated(
        f"{ACTOR}.optim.betas=[0.9,0.95]",
        f"{ACTOR}.optim.weight_decay=0.1",
        f"{ACTOR}.grad_clip=0.5",
        f"{ACTOR}.optim.clip_grad=1.0",
        "critic.optim.clip_grad=0.3",
        "critic.cliprange_value=0.2",
        "+actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-6",
    ).recipe
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.epsilon) == (0.1, 1e-6)
    assert recipe.optimizer.max_gradient_norm == 0.5
    assert recipe.critic.optimizer.max_gradient_norm == 0.3
    assert recipe.critic.value_clip == 0.2


def test_other_optimizers_are_not_there() -> None:
    for override in ("optimizer=SGD", "optimizer_impl=torchao.optim", "lr_scheduler_type=wsd"):
        assert migrated(f"{ACTOR}.optim.{override}").unsupported


def test_a_critic_warms_up_one_step_less() -> None:
    assert migrated("trainer.critic_warmup=0").recipe.critic.warmup_steps == 0
    assert migrated("trainer.critic_warmup=1").recipe.critic.warmup_steps == 0
    assert status(migrated("trainer.critic_warmup=0"), "trainer.critic_warmup") == "built in"
    made = migrated("trainer.critic_warmup=20")
    assert made.recipe.critic.warmup_steps == 19
    assert "from step 20 on: 19 steps" in note(made, "trainer.critic_warmup")


def test_no_critic_no_keys_of_one() -> None:
    made = migrated(*GRPO, "critic.optim.lr=1e-5", "critic.model.path=other", "trainer.critic_warmup=5")
    assert "critic" not in made.recipe.model_fields_set
    assert {one.outcome.status for one in made.entries if "critic" in one.given.key} == {"no effect"}


def test_a_critic_of_another_model() -> None:
    assert migrated("critic.model.path=other").recipe.critic.path == "other"
    assert migrated("critic.model.path=model").recipe.critic.path is None


# --- data, sampling, rewards


def test_files() -> None:
    recipe = migrated("data.train_files=['a.parquet','b.parquet']", VALIDATED).recipe
    assert recipe.data.train.path == ["a.parquet", "b.parquet"]
    assert recipe.data.validation is not None
    assert recipe.data.validation.path == "test.parquet"
    [problem] = problems("data.train_files=hdfs://x/train.parquet")
    assert "should be on a disk" in problem


def test_rows_that_are_not_all_taken() -> None:
    recipe = migrated("data.train_max_samples=1000", "data.val_max_samples=-1", VALIDATED).recipe
    assert recipe.data.train.max_rows == 1000
    assert recipe.data.validation is not None
    assert recipe.data.validation.max_rows is None


@pytest.mark.parametrize(
    ("overrides", "ours"),
    [
        (("data.truncation=left",), "truncate_left"),
        (("data.truncation=right",), "truncate_right"),
        (("data.truncation=error",), "error"),
        (("data.filter_overlong_prompts=True", "data.truncation=error"), "filter"),
    ],
)
def test_prompts_that_are_too_long(overrides: tuple[str, ...], ours: str) -> None:
    assert migrated(*overrides).recipe.data.overlong == ours


def test_words_that_truncation_does_not_know() -> None:
    assert migrated("data.truncation=middle").unsupported
    [problem] = problems("data.truncation=lef")
    assert problem == "test: `data.truncation=lef` should be error, left or right"


def test_sampling() -> None:
    rollout = migrated(f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=-1").recipe.rollout
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.7, 0.9, 0)
    assert migrated(f"{ROLLOUT}.top_k=50").recipe.rollout.top_k == 50


def test_validation_is_greedy_unless_it_samples() -> None:
    written = (VALIDATED, f"{ROLLOUT}.val_kwargs.temperature=0.6", f"{ROLLOUT}.val_kwargs.top_p=0.7")
    greedy = migrated(*written, f"{ROLLOUT}.mode=sync")
    assert greedy.recipe.validation.temperature == 0
    assert status(greedy, f"{ROLLOUT}.val_kwargs.top_p") == "no effect"
    assert migrated(VALIDATED).recipe.validation.temperature == 0
    unread = migrated(*written, f"{ROLLOUT}.val_kwargs.do_sample=False")
    assert (unread.recipe.validation.temperature, unread.recipe.validation.top_p) == (0.6, 0.7)
    assert status(unread, f"{ROLLOUT}.val_kwargs.do_sample") == "no effect"
    sampled = migrated(
        VALIDATED,
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        f"{ROLLOUT}.val_kwargs.temperature=0.6",
        f"{ROLLOUT}.val_kwargs.top_p=0.7",
        f"{ROLLOUT}.val_kwargs.n=8",
    ).recipe.validation
    assert (sampled.temperature, sampled.top_p, sampled.samples_per_prompt) == (0.6, 0.7, 8)


def test_without_rows_to_validate_on_nothing_is_validated() -> None:
    made = migrated("trainer.test_freq=5", "trainer.val_before_train=True", f"{ROLLOUT}.val_kwargs.n=4")
    assert "validation" not in made.recipe.model_fields_set
    assert {one.outcome.status for one in made.entries if one.given.key not in NEEDED[0] + NEEDED[1]} == {"no effect"}


def test_no_validation_in_between_is_none_at_the_end() -> None:
    validation = migrated(VALIDATED, "trainer.test_freq=-1").recipe.validation
    assert (validation.every, validation.after_training, validation.before_training) == (0, False, True)


@pytest.mark.parametrize("place", ["custom_reward_function", "reward.custom_reward_function"])
def test_a_reward_function_with_its_arguments(place: str) -> None:
    reward = migrated(
        f"{place}.path=rewards/mine.py",
        f"{place}.name=score",
        f"+{place}.reward_kwargs.bonus=0.1",
        f"+{place}.reward_kwargs.judge={{url: here, tries: 3}}",
        "reward.num_workers=4",
    ).recipe.environment.reward
    assert reward.name == "rewards/mine.py:score"
    assert reward.options == {"bonus": 0.1, "judge": {"url": "here", "tries": 3}}
    assert reward.workers == 4


def test_a_reward_function_has_a_usual_name() -> None:
    assert migrated("custom_reward_function.path=mine.py").recipe.environment.reward.name == "mine.py:compute_score"
    spec = migrated("reward.custom_reward_function.path=pkg://mine.rewards").recipe.environment.reward.name
    assert spec == "mine.rewards:compute_score"
    assert migrated("custom_reward_function.name=compute_score").recipe.environment.reward.name == "by_source"


@pytest.mark.parametrize(
    ("override", "supported"),
    [
        ("reward_model.reward_manager=naive", True),
        ("reward_model.reward_manager=prime", True),
        ("reward.reward_manager.name=dapo", True),
        ("reward_model.reward_manager=batch", False),
        ("reward.reward_manager.name=rate_limited", False),
        ("reward_model.enable=False", True),
        ("reward_model.enable=True", False),
        ("reward.reward_model.enable=True", False),
        ("reward_model.sandbox_fusion.url=http://x", False),
    ],
)
def test_where_rewards_come_from(override: str, supported: bool) -> None:
    assert (not migrated(override).unsupported) == supported


def test_tools() -> None:
    made = migrated(
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=5",
        f"{ROLLOUT}.multi_turn.max_user_turns=2",
        f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
        f"{ROLLOUT}.multi_turn.format=hermes",
    )
    recipe = made.recipe
    assert (recipe.environment.name, recipe.rollout.max_turns) == ("tools", 3)
    assert recipe.environment.options == {"max_calls_per_turn": 1, "max_result_characters": 256}
    assert [one.given.key for one in made.unsupported] == [f"{ROLLOUT}.multi_turn.tool_config_path"]
    assert (
        migrated(f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.max_turns=4").recipe.rollout.max_turns == 4
    )


def test_tools_that_are_off_have_no_keys() -> None:
    made = migrated(f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.multi_turn.max_assistant_turns=5")
    assert made.recipe.environment.name == "question"
    assert made.recipe.rollout.max_turns == 1
    assert status(made, f"{ROLLOUT}.multi_turn.max_assistant_turns") == "no effect"


# --- the run


def test_steps_win_over_epochs() -> None:
    made = migrated("trainer.total_epochs=15", "trainer.total_training_steps=100")
    assert (made.recipe.schedule.steps, made.recipe.schedule.epochs) == (100, None)
    assert status(made, "trainer.total_epochs") == "no effect"


def test_a_name_becomes_that_of_a_folder() -> None:
    made = migrated("trainer.experiment_name='qwen/7b: run 1'")
    assert made.recipe.name == "qwen-7b-run-1"
    assert status(made, "trainer.experiment_name") == "converted"
    [problem] = problems("trainer.experiment_name=..")
    assert "should name the run" in problem


def test_the_folder_of_runs() -> None:
    name = "trainer.experiment_name=exp"
    assert migrated(name, "trainer.default_local_dir=/ckpts/exp").recipe.logging.runs == "/ckpts"
    assert migrated(name, "trainer.default_local_dir=/ckpts").recipe.logging.runs == "/ckpts"
    usual = "trainer.default_local_dir=checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    assert migrated(name, "trainer.project_name=p", usual).recipe.logging.runs == "runs"


def test_trackers() -> None:
    logging = migrated("trainer.logger=console", "trainer.project_name=p").recipe.logging
    assert (logging.trackers, logging.project) == (["console"], "corral")
    logging = migrated("trainer.logger=[console,swanlab,file]", "trainer.project_name=p").recipe.logging
    assert (logging.trackers, logging.project) == (["console", "swanlab"], "p")
    made = migrated("trainer.logger=[console,clearml]")
    assert made.recipe.logging.trackers == ["console"]
    assert status(made, "trainer.logger") == "unsupported"


def test_resuming() -> None:
    assert migrated("trainer.resume_mode=auto").recipe.checkpoint.resume == "auto"
    assert migrated("trainer.resume_mode=disable").recipe.checkpoint.resume == "never"
    made = migrated("trainer.resume_mode=resume_path", "trainer.resume_from_path=ckpts/global_step_10")
    assert len(made.unsupported) == 2
    assert migrated("trainer.max_actor_ckpt_to_keep=5").recipe.checkpoint.keep == 5


@pytest.mark.parametrize(
    "override",
    [
        "trainer.val_only=True",
        "trainer.default_hdfs_dir=hdfs://x",
        "trainer.device=npu",
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.model.lora_rank=32",
        "actor_rollout_ref.model.lora.rank=32",
        "actor_rollout_ref.model.external_lib=mine",
        "actor_rollout_ref.model.tokenizer_path=other",
        "actor_rollout_ref.model.mtp.enable=True",
        "+actor_rollout_ref.model.override_config.attention_dropout=0.1",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "data.custom_cls.path=mine.py",
        "data.image_key=pictures",
        "data.reward_fn_key=kind",
        f"{ROLLOUT}.ignore_eos=True",
        f"{ROLLOUT}.over_sample_rate=0.1",
        f"{ROLLOUT}.quantization=fp8",
        f"{ROLLOUT}.skip_rollout=True",
        f"{ROLLOUT}.agent.agent_loop_config_path=loop.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=mine",
        f"{ACTOR}.router_replay.mode=R3",
        "algorithm.use_pf_ppo=True",
        "distillation.enabled=True",
        "global_profiler.tool=nsys",
        "critic.enable=False",
    ],
)
def test_what_corral_lacks(override: str) -> None:
    [found] = migrated(override).unsupported
    assert found.outcome.note


def test_of_a_part_that_corral_lacks_the_switch_says_why() -> None:
    made = migrated("reward_model.enable=True", "reward_model.model.path=judge", "reward_model.micro_batch_size=4")
    assert "no reward model" in note(made, "reward_model.enable")
    assert note(made, "reward_model.model.path") == "see `reward_model.enable`"
    assert len(made.unsupported) == 3


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-VL-7B-Instruct", "/models/InternVL3-2B", "zai-org/GLM-4.1V-9B"])
def test_a_model_of_pictures_is_told_by_its_name(model: str) -> None:
    made = read(TABLE, f"actor_rollout_ref.model.path={model}", "data.train_files=train.parquet")
    assert status(made, "actor_rollout_ref.model.path") == "unsupported"
    assert made.recipe.model.path == model


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-8B", "/vl/models/Qwen2.5-Math-7B"])
def test_a_model_of_text_is_taken(model: str) -> None:
    made = read(TABLE, f"actor_rollout_ref.model.path={model}", "data.train_files=train.parquet")
    assert status(made, "actor_rollout_ref.model.path") == "mapped"


def test_a_mixture_s_other_losses_are_not_there() -> None:
    place = f"{ACTOR}.megatron.override_transformer_config"
    made = migrated(
        f"+{place}.moe_aux_loss_coeff=0.01", f"+{place}.moe_z_loss_coeff=0", f"+{place}.moe_router_dtype=fp32"
    )
    assert [one.given.key for one in made.unsupported] == [f"{place}.moe_aux_loss_coeff"]


def test_keys_that_nobody_knows_are_told_with_the_nearest() -> None:
    [problem] = problems("actor_rollout_ref.actor.optim.lrr=1e-6")
    assert problem == (
        "test: `actor_rollout_ref.actor.optim.lrr=1e-06` is not a key of verl that Corral knows; "
        "did you mean `actor_rollout_ref.actor.optim.lr`?"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train_batch_size=many", "should be a whole number"),
        ("data.train_batch_size=0", "data.train_batch_size"),
        ("trainer.nnodes=0", "trainer.nnodes"),
        (f"{ACTOR}.ppo_mini_batch_size=0", "to be at least 1, and it is 0"),
        ("data.max_prompt_length=null", "to be at least 1, and it is null"),
        (f"{ACTOR}.optim.betas=0.9", "should be two numbers"),
        ("trainer.resume_mode=maybe", "should be auto, disable or resume_path"),
        (f"{ACTOR}.loss_agg_mode=mean", "should be one of token-mean"),
        ("algorithm.gae_lambda=2", "algorithm.gae_lambda=2"),
    ],
)
def test_wrong_values_are_told_in_words(override: str, words: str) -> None:
    assert any(words in problem for problem in problems(override))


def test_keys_of_the_first_versions() -> None:
    made = migrated(
        "data.shuffle_train_dataloader=False",
        f"{ACTOR}.checkpoint.contents=['model','hf_model']",
        f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=0",
        f"{ROLLOUT}.mode=sync",
        f"{ROLLOUT}.chat_scheduler=null",
        f"{ROLLOUT}.use_fire_sampling=False",
        "+ray_init.num_cpus=16",
        "trainer.profile_steps=null",
        "critic.model.fsdp_config.wrap_policy.min_num_params=0",
        f"{ACTOR}.use_token_level_loss=False",
        "trainer.remove_previous_ckpt_in_save=True",
        "reward_model.micro_batch_size=64",
        "reward_model.launch_reward_fn_async=False",
        "actor_rollout_ref.model.use_rmpad=True",
        "critic.model.use_rmpad=True",
        "trainer.val_generations_to_log_to_wandb=5",
        f"{ROLLOUT}.micro_batch_size=4",
        f"{ACTOR}.profile_ranks=[0,1]",
        f"{ROLLOUT}.profile_ranks_all=False",
        "critic.profile_discrete=True",
    )
    assert not made.recipe.data.shuffle
    assert made.recipe.logging.samples == 5
    assert made.recipe.algorithm.aggregation == "seq_mean_token_mean"
    assert made.recipe.checkpoint.keep == 1
    assert not made.unsupported


def test_the_kl_of_the_first_versions_is_pointed_out() -> None:
    """They had it in the reward, and no key that said so."""
    assert "since verl 0.3" in note(migrated("algorithm.kl_ctrl.kl_coef=0.001"), "algorithm.kl_ctrl.kl_coef")
    made = migrated("algorithm.kl_ctrl.kl_coef=0.001", "algorithm.use_kl_in_reward=False")
    assert note(made, "algorithm.kl_ctrl.kl_coef") == "there is no KL in the reward"


def test_keys_of_the_latest_versions() -> None:
    made = migrated(
        f"{ACTOR}.ppo_infer_max_token_len_per_gpu=12288",
        f"{ACTOR}.ppo_infer_micro_batch_size_per_gpu=1",
        "+data.need_tools_kwargs=True",
        f"{ROLLOUT}.skip.enable=False",
        f"{ROLLOUT}.agent.agent_loop_manager_class=null",
    )
    assert not made.unsupported
    assert migrated(f"+{ROLLOUT}.quantization.weight_dtype=fp8").unsupported


# --- any values

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "algorithm.adv_estimator": st.sampled_from(["gae", "grpo", "rloo", "reinforce_plus_plus", "gpg", "remax"]),
    f"{ROLLOUT}.n": st.integers(2, 16),
    "data.train_batch_size": st.integers(1, 2048),
    f"{ACTOR}.ppo_mini_batch_size": st.integers(1, 2048),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": st.integers(1, 64),
    f"{ACTOR}.use_dynamic_bsz": st.booleans(),
    f"{ACTOR}.ppo_max_token_len_per_gpu": st.integers(1, 100_000),
    "data.max_prompt_length": st.integers(1, 8192),
    "data.max_response_length": st.integers(1, 8192),
    "trainer.nnodes": st.integers(1, 4),
    "trainer.n_gpus_per_node": st.integers(1, 8),
    f"{ACTOR}.fsdp_config.fsdp_size": st.integers(-1, 9),
    f"{ACTOR}.fsdp_config.param_offload": st.booleans(),
    f"{ACTOR}.fsdp_config.optimizer_offload": st.booleans(),
    f"{ACTOR}.ulysses_sequence_parallel_size": st.sampled_from([1, 2, 3]),
    f"{ACTOR}.policy_loss.loss_mode": st.sampled_from(["vanilla", "gspo", "cispo", "geo_mean", "dppo_kl", "sapo"]),
    f"{ACTOR}.loss_agg_mode": st.sampled_from(["token-mean", "seq-mean-token-sum-norm"]),
    f"{ACTOR}.loss_scale_factor": st.integers(1, 1000),
    f"{ACTOR}.clip_ratio": st.floats(0, 1),
    f"{ACTOR}.clip_ratio_high": st.floats(0, 1),
    f"{ACTOR}.clip_ratio_c": st.floats(1.1, 10),
    f"{ACTOR}.use_kl_loss": st.booleans(),
    f"{ACTOR}.kl_loss_coef": st.sampled_from([0, 0.001, 1]),
    f"{ACTOR}.kl_loss_type": st.sampled_from(["kl", "mse", "low_var_kl+"]),
    "algorithm.use_kl_in_reward": st.booleans(),
    "algorithm.kl_ctrl.kl_coef": st.sampled_from([0, 0.01]),
    "algorithm.kl_ctrl.type": st.sampled_from(["fixed", "adaptive"]),
    "algorithm.kl_ctrl.target_kl": st.floats(0.01, 1),
    "algorithm.gamma": st.floats(0.1, 1),
    "algorithm.gae_lambda": st.floats(0.1, 1),
    "algorithm.norm_adv_by_std_in_grpo": st.booleans(),
    "algorithm.filter_groups.enable": st.booleans(),
    "algorithm.filter_groups.max_num_gen_batches": st.integers(-1, 20),
    "algorithm.rollout_correction.rollout_is": st.sampled_from(["token", "sequence", "null"]),
    "algorithm.rollout_correction.rollout_is_threshold": st.sampled_from(["2.0", "0.5_3.0"]),
    f"{ACTOR}.optim.lr_warmup_steps": st.integers(-1, 100),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": st.floats(0, 0.9),
    f"{ACTOR}.optim.warmup_style": st.sampled_from(["constant", "cosine"]),
    f"{ACTOR}.optim.min_lr_ratio": st.floats(0, 1),
    "critic.optim.lr_warmup_steps": st.integers(-1, 100),
    "critic.optim.min_lr_ratio": st.floats(0, 1),
    "critic.cliprange_value": st.floats(0.1, 1),
    "trainer.critic_warmup": st.integers(0, 50),
    "data.val_files": st.just("test.parquet"),
    "data.truncation": st.sampled_from(["left", "right", "error", "middle"]),
    "data.filter_overlong_prompts": st.booleans(),
    f"{ROLLOUT}.val_kwargs.do_sample": st.booleans(),
    f"{ROLLOUT}.val_kwargs.temperature": st.floats(0, 2),
    f"{ROLLOUT}.val_kwargs.top_p": st.floats(0.1, 1),
    f"{ROLLOUT}.top_k": st.integers(-1, 100),
    "trainer.logger": st.sampled_from(["console", "[wandb]", "[tensorboard]", "[]"]),
    "trainer.project_name": st.sampled_from(["p", "a/b"]),
    "trainer.test_freq": st.integers(-1, 10),
    "trainer.save_freq": st.integers(-1, 10),
    "trainer.total_training_steps": st.integers(1, 1000),
    "trainer.default_local_dir": st.sampled_from(["x", "gsm8k", "a/gsm8k"]),
    f"{ROLLOUT}.multi_turn.enable": st.booleans(),
    f"{ROLLOUT}.multi_turn.max_user_turns": st.integers(1, 5),
}


def told(*overrides: str) -> list[str]:
    """What is wrong; nothing where there is a plan."""
    try:
        make_plan(read(TABLE, *NEEDED, *overrides).recipe)
    except RecipeError as error:
        return list(error.problems)
    return []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_sensible_values_give_a_recipe_or_words(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=25))
    overrides = [f"{key}={data.draw(VALUES[key], label=key)}" for key in keys]
    problems = told(*overrides)
    assert all(problem.startswith(("test: `", "verl: `")) for problem in problems), "told at verl's keys, not at ours"
    assert problems or len(read(TABLE, *NEEDED, *overrides).entries) == len(
        {*keys, *(one.split("=")[0] for one in NEEDED)}
    )


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_values_that_make_no_sense_are_never_another_exception(data: st.DataObject) -> None:
    rows = [row.key for row in TABLE.rows if "*" not in row.key]
    keys = data.draw(st.lists(st.sampled_from(rows), unique=True, max_size=6))
    odd = st.sampled_from(["null", "-1", "0", "1e400", "nan", "words", "[]", "[1,2,3]", "{a: b}", "true", "''", "0.5"])
    assert all(told(*(f"{key}={data.draw(odd, label=key)}" for key in keys)))
