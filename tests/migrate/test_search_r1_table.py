"""Search-R1's keys: those of an early verl, and its own."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign import entry, read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.migrate.migration import Migration
from corral.migrate.search_r1 import TABLE
from corral.migrate.verl import TABLE as VERL
from corral.recipe.errors import RecipeError
from corral.recipe.plan import make_plan

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
NEEDED = ("actor_rollout_ref.model.path=model", "data.train_files=train.parquet")
VALIDATED = "data.val_files=test.parquet"

MULTINODE = (
    "data.train_files=data/nq_search/train.parquet",
    "data.val_files=data/nq_search/test.parquet",
    "data.train_data_num=null",
    "data.val_data_num=null",
    "data.train_batch_size=512",
    "data.val_batch_size=256",
    "data.max_prompt_length=4096",
    "data.max_response_length=500",
    "data.max_start_length=2048",
    "data.max_obs_length=500",
    "data.shuffle_train_dataloader=True",
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size=64",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.grad_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size=128",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.ref.log_prob_micro_batch_size=128",
    "actor_rollout_ref.ref.fsdp_config.param_offload=False",
    "actor_rollout_ref.rollout.n_agent=1",
    "actor_rollout_ref.rollout.temperature=1",
    "actor_rollout_ref.rollout.top_p=1.0",
    "actor_rollout_ref.actor.state_masking=true",
    "critic.optim.lr=1e-5",
    "critic.model.use_remove_padding=True",
    "critic.optim.lr_warmup_steps_ratio=0.015",
    "critic.model.path=Qwen/Qwen2.5-7B",
    "critic.model.enable_gradient_checkpointing=true",
    "critic.ppo_micro_batch_size=16",
    "critic.model.fsdp_config.param_offload=False",
    "critic.model.fsdp_config.grad_offload=False",
    "critic.model.fsdp_config.optimizer_offload=False",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "algorithm.no_think_rl=false",
    "trainer.critic_warmup=0",
    "trainer.logger=['wandb']",
    "+trainer.val_only=false",
    "+trainer.val_before_train=false",
    "trainer.default_hdfs_dir=null",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=2",
    "trainer.save_freq=100",
    "trainer.test_freq=100",
    "trainer.project_name=Search-R1-release",
    "trainer.experiment_name=search-r1-ppo-qwen2.5-7b-em-multinode-2",
    "trainer.total_epochs=15",
    "trainer.total_training_steps=1005",
    "trainer.default_local_dir=verl_checkpoints/search-r1-ppo-qwen2.5-7b-em-multinode-2",
    "max_turns=4",
    "retriever.url=http://127.0.0.1:8000/retrieve",
    "retriever.topk=3",
)
GRPO = (
    *(override for override in MULTINODE if not override.startswith("critic.")),
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.actor.fsdp_config.grad_offload=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    "actor_rollout_ref.rollout.n_agent=5",
    "trainer.nnodes=1",
    "max_turns=2",
)


def migrated(*overrides: str) -> Migration:
    made = read(TABLE, *NEEDED, *overrides)
    make_plan(made.recipe)
    return made


def problems(*overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        migrated(*overrides)
    return list(caught.value.problems)


def status(made: Migration, key: str) -> str:
    return entry(made, key).outcome.status


def note(made: Migration, key: str) -> str:
    return entry(made, key).outcome.note


# --- its commands


def test_the_command_for_several_nodes() -> None:
    made = read(TABLE, *MULTINODE)
    plan, recipe = make_plan(made.recipe), made.recipe
    batch = plan.as_dict()["batch"]
    assert (batch["prompts"], batch["samples_per_prompt"], batch["trainers"]) == (512, 1, 16)
    assert batch["update_sizes"] == [256, 256]
    assert batch["max_trajectory_tokens"] == 2048 + 4096
    assert batch["max_tokens_per_micro_batch"] == 4 * 6144, "64 on 16 devices: 4 on each"
    assert (recipe.optimizer.warmup_ratio, recipe.critic.optimizer.warmup_ratio) == (0.285, 0.015)
    assert (plan.algorithm.kl_where, plan.algorithm.kl_estimator, plan.algorithm.kl_coefficient) == (
        "reward",
        "k1",
        0.001,
    )
    assert plan.algorithm.entropy_coefficient == 0.001
    assert plan.algorithm.dual_clip is None
    assert set(plan.placement.roles) == {"actor", "rollout", "reference", "critic"}
    assert recipe.schedule.steps == 1005
    assert not made.unsupported
    assert len(made.entries) == len(MULTINODE)


def test_its_search() -> None:
    recipe = read(TABLE, *MULTINODE).recipe
    assert recipe.environment.name == "search"
    assert recipe.environment.options == {
        "prompt": None,
        "retriever": "http://127.0.0.1:8000/retrieve",
        "topk": 3,
    }
    assert recipe.environment.reward.name == "em"
    rollout = recipe.rollout
    assert (rollout.max_turns, rollout.max_turn_tokens, rollout.max_observation_tokens) == (4, 500, 500)
    assert rollout.max_response_tokens == 4096
    assert rollout.stop == ["</search>", "</answer>"]
    assert (recipe.data.max_prompt_tokens, recipe.data.overlong) == (2048, "truncate_left")


def test_its_run() -> None:
    recipe = read(TABLE, *MULTINODE).recipe
    assert recipe.name == "search-r1-ppo-qwen2.5-7b-em-multinode-2"
    assert (recipe.logging.runs, recipe.logging.trackers) == ("verl_checkpoints", ["wandb"])
    assert recipe.logging.project == "Search-R1-release"
    assert (recipe.checkpoint.every, recipe.validation.every) == (100, 100)
    assert not recipe.validation.before_training
    assert recipe.validation.after_training


def test_grpo_updates_once_for_every_256_trajectories() -> None:
    made = read(TABLE, *GRPO)
    plan = make_plan(made.recipe)
    batch = plan.as_dict()["batch"]
    assert batch["update_sizes"] == [256] * 10, "n_agent does not scale the mini-batch"
    assert "512 prompts x 5: 10 updates" in note(made, f"{ACTOR}.ppo_mini_batch_size")
    assert batch["max_tokens_per_micro_batch"] == 8 * 6144
    assert (plan.algorithm.kl_where, plan.algorithm.kl_estimator) == ("loss", "k3")
    assert made.recipe.train.offload == ["parameters", "gradients", "optimizer"]
    assert "critic" not in made.recipe.model_fields_set
    assert status(made, "algorithm.kl_ctrl.kl_coef") == "no effect"
    assert not made.unsupported


def test_the_sampling_of_grpo_is_truncated_unless_it_says_otherwise() -> None:
    recipe = read(TABLE, *(one for one in GRPO if "top_p" not in one)).recipe
    assert recipe.rollout.top_p == 0.95


# --- its keys


def test_what_search_r1_does_where_nothing_is_said() -> None:
    recipe = migrated().recipe
    plan = make_plan(recipe)
    assert recipe.rollout.top_p == 0.95
    assert recipe.rollout.max_turns == 10
    assert recipe.algorithm.entropy_coefficient == 0.001
    assert plan.algorithm.kl_where == "reward"
    assert plan.algorithm.dual_clip is None
    assert recipe.train.gradient_checkpointing == "none"
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens) == (256, 512)
    assert recipe.batch.max_tokens_per_micro_batch == 8 * 768, "64 on 8 devices"
    assert recipe.environment.options["retriever"] == "http://127.0.0.1:8000/retrieve"
    assert recipe.optimizer.weight_decay == 0.01


def test_kl_is_in_the_reward_or_in_the_loss() -> None:
    def where(*overrides: str) -> str | None:
        return make_plan(migrated(*overrides).recipe).algorithm.kl_where

    assert where() == "reward"
    assert where(f"{ACTOR}.use_kl_loss=true") == "loss"
    assert where("algorithm.kl_ctrl.kl_coef=0") is None
    assert where(f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0") is None


def test_validation_samples_as_training_does() -> None:
    validation = migrated(VALIDATED, f"{ROLLOUT}.temperature=0.8").recipe.validation
    assert (validation.temperature, validation.top_p) == (0.8, 0.95)
    assert migrated(VALIDATED, "do_search=false").recipe.validation.temperature == 0


def test_a_retriever_without_http() -> None:
    [problem] = problems("retriever.url=127.0.0.1:8000/retrieve")
    assert problem == "test: `retriever.url=127.0.0.1:8000/retrieve` should begin with http://"


def test_scores_of_the_form_choose_the_reward() -> None:
    reward = migrated(
        "reward_model.structure_format_score=0.2",
        "reward_model.final_format_score=0.1",
    ).recipe.environment.reward
    assert reward.name == "search_r1"
    assert reward.options == {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0}


def test_a_function_of_ones_own_beats_both() -> None:
    reward = migrated("custom_reward_function.path=mine.py").recipe.environment.reward
    assert reward.name == "mine.py:compute_score"


def test_without_a_search() -> None:
    made = migrated(
        "do_search=false",
        "max_turns=4",
        "retriever.url=nowhere",
        "data.max_start_length=100",
        "data.max_obs_length=100",
        "data.max_prompt_length=1000",
        "data.max_response_length=400",
        f"{ROLLOUT}.n=4",
        "algorithm.adv_estimator=grpo",
    )
    recipe = made.recipe
    assert recipe.environment.options == {"prompt": None, "do_search": False}
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens) == (1000, 400)
    assert recipe.data.overlong == "filter"
    assert (recipe.batch.samples_per_prompt, recipe.rollout.max_turns) == (4, 1)
    assert status(made, "retriever.url") == "no effect"


def test_replies_are_no_longer_than_all_of_them() -> None:
    assert migrated("data.max_response_length=9000").recipe.rollout.max_turn_tokens == 512


def test_rows_of_which_only_some_are_taken() -> None:
    data = migrated("data.train_data_num=100", "data.val_data_num=10", VALIDATED).recipe.data
    assert data.train.max_rows == 100
    assert data.validation is not None
    assert data.validation.max_rows == 10


def test_search_r1_stops_one_step_early() -> None:
    made = migrated("trainer.total_training_steps=1005")
    assert made.recipe.schedule.steps == 1005
    assert "after 1004" in note(made, "trainer.total_training_steps")


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.no_think_rl=true",
        f"{ACTOR}.state_masking=false",
        "reranker.do_rerank=true",
        f"{ROLLOUT}.n=5",
        "+trainer.val_only=true",
    ],
)
def test_what_corral_lacks(override: str) -> None:
    [found] = migrated(override).unsupported
    assert found.outcome.note


def test_a_reranker_is_the_retrievers() -> None:
    made = migrated("reranker.do_rerank=true", "reranker.url=http://10.0.0.1:6980/rerank", "reranker.topk=3")
    assert len(made.unsupported) == 3
    assert "--reranker" in note(made, "reranker.do_rerank")
    assert not migrated("reranker.do_rerank=false", "reranker.topk=3").unsupported


def test_a_group_of_one_is_told() -> None:
    [problem] = problems("algorithm.adv_estimator=grpo")
    assert "n_agent" in problem


def test_every_key_of_verl_is_known_here() -> None:
    keys = {row.key for row in TABLE.rows}
    assert keys >= {row.key for row in VERL.rows}
    assert len(keys) == len(TABLE.rows)


CONFIG: dict[str, Any] = {
    "data": {
        "tokenizer": None,
        "train_files": "train.parquet",
        "val_files": "test.parquet",
        "train_data_num": None,
        "val_data_num": None,
        "prompt_key": "prompt",
        "max_prompt_length": 512,
        "max_response_length": 512,
        "max_start_length": 256,
        "max_obs_length": 512,
        "train_batch_size": 1024,
        "val_batch_size": 1312,
        "return_raw_input_ids": False,
        "return_raw_chat": False,
        "shuffle_train_dataloader": True,
    },
    "actor_rollout_ref": {
        "hybrid_engine": True,
        "model": {"path": "m", "external_lib": None, "override_config": {}, "enable_gradient_checkpointing": False},
        "actor": {
            "strategy": "fsdp",
            "ppo_mini_batch_size": 256,
            "ppo_micro_batch_size": 64,
            "use_dynamic_bsz": False,
            "ppo_max_token_len_per_gpu": 16384,
            "grad_clip": 1.0,
            "clip_ratio": 0.2,
            "entropy_coeff": 0.001,
            "use_kl_loss": False,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "ppo_epochs": 1,
            "shuffle": False,
            "ulysses_sequence_parallel_size": 1,
            "optim": {"lr": 1e-6, "lr_warmup_steps_ratio": 0.0, "min_lr_ratio": None, "warmup_style": "constant"},
            "fsdp_config": {"wrap_policy": {"min_num_params": 0}, "param_offload": False, "fsdp_size": -1},
        },
        "ref": {
            "fsdp_config": {"param_offload": False, "wrap_policy": {"min_num_params": 0}, "fsdp_size": -1},
            "log_prob_micro_batch_size": 128,
            "log_prob_use_dynamic_bsz": "${actor_rollout_ref.actor.use_dynamic_bsz}",
            "log_prob_max_token_len_per_gpu": "${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}",
            "ulysses_sequence_parallel_size": "${actor_rollout_ref.actor.ulysses_sequence_parallel_size}",
        },
        "rollout": {
            "name": "vllm",
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 0.95,
            "prompt_length": "${data.max_prompt_length}",
            "response_length": "${data.max_response_length}",
            "load_format": "dummy_dtensor",
            "do_sample": True,
            "n": 1,
            "n_agent": 1,
        },
    },
    "critic": {
        "strategy": "fsdp",
        "optim": {"lr": 1e-5, "min_lr_ratio": None, "warmup_style": "constant", "total_training_steps": -1},
        "model": {"path": "m", "tokenizer_path": "${actor_rollout_ref.model.path}", "fsdp_config": {"fsdp_size": -1}},
        "ppo_mini_batch_size": "${actor_rollout_ref.actor.ppo_mini_batch_size}",
        "ppo_micro_batch_size": 64,
        "forward_micro_batch_size": "${critic.ppo_micro_batch_size}",
        "ppo_epochs": "${actor_rollout_ref.actor.ppo_epochs}",
        "grad_clip": 1.0,
        "cliprange_value": 0.5,
    },
    "reward_model": {
        "enable": False,
        "model": {"input_tokenizer": "m", "fsdp_config": {"min_num_params": 0}},
        "micro_batch_size": 64,
        "max_length": None,
    },
    "retriever": {"url": "http://127.0.0.1:8000/retrieve", "topk": 3},
    "reranker": {"do_rerank": False, "url": "http://127.0.0.1:8000/rerank", "topk": 3},
    "algorithm": {
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "adv_estimator": "gae",
        "no_think_rl": False,
        "kl_penalty": "kl",
        "kl_ctrl": {"type": "fixed", "kl_coef": 0.001},
        "state_masking": {"start_state_marker": "<information>", "end_state_marker": "</information>"},
    },
    "trainer": {
        "total_epochs": 30,
        "total_training_steps": None,
        "project_name": "verl_examples",
        "experiment_name": "gsm8k",
        "logger": ["console", "wandb"],
        "nnodes": 1,
        "n_gpus_per_node": 8,
        "save_freq": -1,
        "test_freq": -1,
        "critic_warmup": 0,
        "default_hdfs_dir": None,
        "default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    },
    "max_turns": 10,
    "do_search": True,
}
"""Its configuration, with the defaults."""


def test_its_configuration_says_what_its_defaults_say(tmp_path: Path) -> None:
    file = tmp_path / "ppo_trainer.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    whole, short = read(TABLE, file=file), migrated(VALIDATED)
    assert not whole.unsupported
    plans = [make_plan(made.recipe).as_dict() for made in (whole, short)]
    for part in ("batch", "schedule", "algorithm", "placement", "mesh"):
        assert plans[0][part] == plans[1][part]
    assert whole.recipe.rollout == short.recipe.rollout
    assert whole.recipe.validation == short.recipe.validation
    changed = read(TABLE, f"{ROLLOUT}.n_agent=5", "algorithm.adv_estimator=grpo", file=file)
    assert make_plan(changed.recipe).as_dict()["batch"]["update_sizes"] == [256] * 20


# --- any values

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "do_search": st.booleans(),
    "max_turns": st.integers(1, 10),
    "retriever.url": st.sampled_from(["http://x:1/retrieve", "x:1"]),
    "retriever.topk": st.integers(1, 10),
    "data.max_prompt_length": st.integers(1, 8192),
    "data.max_response_length": st.integers(1, 8192),
    "data.max_start_length": st.integers(1, 8192),
    "data.max_obs_length": st.integers(1, 8192),
    "data.train_batch_size": st.integers(1, 1024),
    "data.val_files": st.just("test.parquet"),
    "data.train_data_num": st.integers(1, 100),
    "data.val_data_num": st.integers(1, 100),
    f"{ROLLOUT}.n_agent": st.integers(1, 8),
    f"{ROLLOUT}.n": st.integers(1, 8),
    f"{ROLLOUT}.temperature": st.floats(0.1, 2),
    f"{ROLLOUT}.top_p": st.floats(0.1, 1),
    f"{ACTOR}.ppo_mini_batch_size": st.integers(1, 1024),
    f"{ACTOR}.ppo_micro_batch_size": st.integers(1, 256),
    f"{ACTOR}.use_kl_loss": st.booleans(),
    f"{ACTOR}.state_masking": st.booleans(),
    f"{ACTOR}.fsdp_config.grad_offload": st.booleans(),
    "algorithm.adv_estimator": st.sampled_from(["gae", "grpo"]),
    "algorithm.kl_penalty": st.sampled_from(["kl", "low_var_kl"]),
    "algorithm.kl_ctrl.kl_coef": st.sampled_from([0, 0.01]),
    "reward_model.structure_format_score": st.floats(0, 1),
    "reward_model.retrieval_score": st.floats(0, 1),
    "trainer.test_freq": st.integers(-1, 10),
    "trainer.total_training_steps": st.integers(1, 1000),
    "trainer.nnodes": st.integers(1, 3),
    "trainer.n_gpus_per_node": st.integers(1, 8),
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
    keys = data.draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=20))
    overrides = [f"{key}={data.draw(VALUES[key], label=key)}" for key in keys]
    assert all(problem.startswith(("test: `", "Search-R1: `")) for problem in told(*overrides))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_values_that_make_no_sense_are_never_another_exception(data: st.DataObject) -> None:
    rows = [row.key for row in TABLE.rows if "*" not in row.key]
    keys = data.draw(st.lists(st.sampled_from(rows), unique=True, max_size=6))
    odd = st.sampled_from(["null", "-1", "0", "1e400", "nan", "words", "[]", "[1,2,3]", "{a: b}", "true", "''", "0.5"])
    assert all(told(*(f"{key}={data.draw(odd, label=key)}" for key in keys)))
