"""Properties of ROLL's table. What becomes of single keys is in `golden`."""

from pathlib import Path
from typing import Any

import pytest
from foreign import read
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.migrate.config_sources import migrate_file, table_of
from corral.migrate.migration import Migration, recipe_text, report_text
from corral.recipe.errors import RecipeError
from corral.recipe.plan import make_plan

TABLE = table_of("roll")


def roll(*overrides: str) -> Migration:
    return read(TABLE, *overrides)


def values(migration: Migration) -> dict[str, Any]:
    return {".".join(path): setting.value for path, setting in migration.settings.items()}


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
        ("use_rollout_importance_sampling_ratio=true", "train_infer_correction.is_weight.enabled=true"),
    ],
)
def test_old_and_new_spellings_mean_the_same(old: str, new: str) -> None:
    assert values(roll(old)) == values(roll(new))


def test_every_alias_leads_to_a_row() -> None:
    starts = [new.removesuffix("**") for new in TABLE.aliases.values()]
    assert [start for start in starts if not any(row.key.startswith(start) for row in TABLE.rows)] == []


def test_a_model_that_reads_images_is_whole_on_each_device() -> None:
    """And updates are as large as where ROLL splits it."""
    split = ["strategy_config.tensor_model_parallel_size=2", "strategy_config.fsdp_size=2"]
    sizes = ["actor_train.device_mapping=list(range(0,8))", "rollout_batch_size=128"]
    made = roll("pretrain=Qwen/Qwen2.5-VL-7B-Instruct", "strategy_config.offload_policy=true", *sizes, *split)
    assert made.unsupported == []
    parallel = made.recipe.train.parallel
    assert (parallel.shard, parallel.replicate, parallel.tensor) == (1, 8, 1)
    assert made.recipe.train.offload == ["optimizer"]
    assert made.recipe.batch.updates_per_step == roll("pretrain=model", *sizes, *split).recipe.batch.updates_per_step
    assert [entry.given.key for entry in roll("pretrain=InternVL3-2B").unsupported] == ["pretrain"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pretrain: m\nrollout_batch_size: 8\nmax_steps: 3\n", "it has no `actor_train`"),
        ("max_tokens_per_step: 64\nmax_actions_per_traj: 3\n", "it has no `actor_train` or `actor_infer`"),
    ],
)
def test_a_file_that_trains_nothing_is_no_recipe(tmp_path: Path, text: str, expected: str) -> None:
    (file := tmp_path / "rollout.yaml").write_text(text)
    with pytest.raises(RecipeError, match=f"which is not migrated: {expected}"):
        migrate_file(file)
    file.write_text(f"{text}actor_train.training_args.learning_rate: 1e-6\n")
    assert migrate_file(file).recipe.optimizer.learning_rate == 1e-6


@pytest.mark.parametrize(("temperature", "differs"), [(0.99, True), (1.0, False)])
def test_a_temperature_that_rolls_trainer_does_not_divide_by_is_said(temperature: float, differs: bool) -> None:
    [entry] = roll(f"actor_infer.generating_args.temperature={temperature}").entries
    assert entry.outcome.differs == differs
    assert ("log-probs in training are of it, too, and ROLL's of 1" in entry.outcome.note) == differs


@pytest.mark.parametrize(
    "devices",
    ["list(range(0,4))", "list(range(0, 4))", "range(0,4)", "[0, 1, 2, 3]", "'[0,1,2,3]'", "'0,1,2,3'",
     "list([0,1,2,3])", "list(range(0,2)) + list(range(2,4))"],
)  # fmt: skip
def test_devices_are_ranges_and_lists(devices: str) -> None:
    cluster = roll(f"actor_train.device_mapping={devices}").recipe.cluster
    assert (cluster.devices_per_node, cluster.placement) == (4, {"actor,rollout,reference,critic,reward_model": "all"})


@pytest.mark.parametrize(
    "devices", ["__import__('os').system('true')", "list(range(int('4')))", "all", "0-3", "'[0-3]'", "[x]", "[1.5]",
                "list(range(-1,3))", "list(range(0,999999999))", "[0, 0]", "list(range(3,0))", "true"]
)  # fmt: skip
def test_other_devices_are_an_error_and_never_evaluated(devices: str) -> None:
    with pytest.raises(RecipeError) as caught:
        roll(f"actor_train.device_mapping={devices}")
    [problem] = caught.value.problems
    assert "should be a range or a list of device numbers" in problem


def test_secrets_are_neither_in_the_recipe_nor_in_the_report() -> None:
    migration = roll(
        "track_with=wandb", "tracker_kwargs.api_key=0123", "tracker_kwargs.login_kwargs.key=4567",
        "system_envs.HF_TOKEN=hf_89", "actor_train.device_mapping=[0, 1]",
    )  # fmt: skip
    shown = recipe_text(migration) + report_text(migration)
    assert not any(secret in shown for secret in ("0123", "4567", "hf_89"))


def test_the_options_of_environments_are_those_that_they_take() -> None:
    from corral.envs.built_in.frozen_lake import FrozenLakeEnv
    from corral.envs.built_in.sokoban import SokobanEnv

    classes: dict[str, Any] = {"sokoban": SokobanEnv, "frozen_lake": FrozenLakeEnv}
    tags = "[SimpleSokoban, LargerSokoban, SokobanDifferentGridVocab, FrozenLake, FrozenLakeThink]"
    recipe = roll(f"train_env_manager.tags={tags}").recipe
    for environment in recipe.environments.values():
        classes[environment.name](**environment.options)


@pytest.mark.parametrize(
    ("program", "keys", "algorithm"),
    [
        ("sft", "sft_train.data_args.file_name: rows.json", "sft"),
        ("dpo", "actor_train.data_args.file_name: [pairs.json]\nchosen_key: chosen", "dpo"),
        ("onpolicy_distill", "student_train.data_args.file_name: [rows.json]\nrollout_batch_size: 8", "distill"),
    ],
)
def test_each_of_rolls_pipelines_is_found_by_its_keys(program: str, keys: str, algorithm: str, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(f"pretrain: small\nsequence_length: 2048\n{keys}\n")
    script = tmp_path / "run.sh"
    script.write_text(f"python start_{program}_pipeline.py --config_path config --config_name mine\n")
    for source in (script, tmp_path / "config" / "mine.yaml"):
        assert migrate_file(source).recipe.algorithm.name == algorithm


@pytest.mark.parametrize(
    ("written", "differs"),
    [
        (["ppo_epochs=2"], True),
        (["ppo_epochs=1"], False),
        (["ppo_epochs=2", "adv_estimator=reinforce"], False),
        (["actor_train.training_args.per_device_train_batch_size=4"], True),
        (["actor_train.training_args.per_device_train_batch_size=8"], False),
        (["actor_train.training_args.gradient_accumulation_steps=2"], True),
        (["actor_train.training_args.per_device_train_batch_size=4", "adv_estimator=reinforce"], False),
    ],
)
def test_a_critic_that_roll_updates_otherwise_is_named(written: list[str], differs: bool) -> None:
    migration = roll("pretrain=model", "adv_estimator=gae", "max_steps=10", *written)
    entries = [entry for entry in migration.entries if entry.given.key == written[0].partition("=")[0]]
    assert [entry.outcome.differs for entry in entries] == [differs]


def test_a_top_k_that_roll_validates_with_by_default_is_named() -> None:
    files = ["actor_train.data_args.file_name=train.jsonl", "validation.data_args.file_name=test.jsonl"]
    names = ["validation.generating_args.temperature=0.6", "validation.generating_args.top_k=-1"]
    by_default, written = roll(*files, "eval_steps=5", names[0]), roll(*files, "eval_steps=5", *names)
    assert [entry.given.key for entry in by_default.entries if entry.outcome.differs] == [names[0].partition("=")[0]]
    assert [entry for entry in written.entries if entry.outcome.differs] == []


VALUES: dict[str, st.SearchStrategy[Any]] = {
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
    "actor_infer.strategy_args.strategy_name": st.sampled_from(["vllm", "sglang"]),
    "actor_infer.strategy_args.strategy_config.tensor_parallel_size": st.sampled_from([1, 2, 4]),
    "actor_infer.strategy_args.strategy_config.block_size": st.sampled_from([16, 32]),
    "actor_infer.generating_args.temperature": st.sampled_from([0, 0.5, 1]),
    "actor_infer.generating_args.top_k": st.sampled_from([-1, 0, 50]),
    "actor_infer.generating_args.max_new_tokens": st.integers(1, 5000),
    "num_return_sequences_in_group": st.sampled_from([1, 8]),
    "actor_train.data_args.file_name": st.just("train.jsonl"),
    "validation.data_args.file_name": st.just("test.jsonl"),
    "pretrain": st.sampled_from(["model", "Qwen2.5-VL-7B", "InternVL3-2B"]),
    "track_with": st.sampled_from(["wandb", "stdout", "tensorboard"]),
    "tracker_kwargs.project": st.just("mine"),
    "system_envs.NCCL_DEBUG": st.just("INFO"),
    "rpc_timeout": st.integers(1, 1000),
}


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_whatever_is_written_gives_a_recipe_with_a_plan_or_an_error(chosen: dict[str, Any]) -> None:
    overrides = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in chosen.items()]
    try:
        migration = roll(*overrides)
    except RecipeError:
        return
    make_plan(migration.recipe)


@pytest.mark.parametrize(("written", "differs"), [("MODELSCOPE", True), ("HUGGINGFACE_HUB", False)])
def test_a_model_of_modelscope_is_said_to_be_from_there(written: str, differs: bool) -> None:
    [entry] = roll(f"model_download_type={written}").entries
    assert (entry.outcome.differs, "`model.path: ms:OWNER/NAME`" in entry.outcome.note) == (differs, differs)
