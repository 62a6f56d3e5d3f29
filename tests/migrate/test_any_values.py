"""Any values of keys of verl and Search-R1 give a recipe with a plan, or problems at their keys, and no other error."""

from typing import Any

import pytest
from foreign import read
from golden_migrations import GOLDEN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.migrate.config_sources import table_of
from corral.migrate.migration import migrate
from corral.migrate.outcome import ABSENT, ForeignValue
from corral.migrate.table import ForeignConfig
from corral.recipe.errors import RecipeError
from corral.recipe.plan import make_plan
from corral.recipe.presets import resolve_algorithm

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
NEEDED = ("actor_rollout_ref.model.path=model", "data.train_files=train.parquet")
VALUES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "verl": {
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
        "algorithm.lam": st.floats(0.1, 1),
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
        f"{ROLLOUT}.top_p": st.sampled_from([0.5, 1.0]),
        f"{ROLLOUT}.temperature": st.sampled_from([0.5, 1.0]),
        f"{ROLLOUT}.name": st.sampled_from(["vllm", "sglang", "hf", "trtllm", "???"]),
        f"{ROLLOUT}.tensor_model_parallel_size": st.sampled_from([1, 2, 3, 4, 8, 16]),
        f"{ROLLOUT}.gpu_memory_utilization": st.floats(0, 1),
        f"{ROLLOUT}.max_num_seqs": st.integers(1, 1024),
        f"{ROLLOUT}.engine_kwargs.vllm.block_size": st.integers(1, 128),
        "algorithm.rollout_correction.bypass_mode": st.booleans(),
        "trainer.logger": st.sampled_from(["console", "[wandb]", "[tensorboard]", "[]"]),
        "trainer.project_name": st.sampled_from(["p", "a/b"]),
        "trainer.test_freq": st.integers(-1, 10),
        "trainer.save_freq": st.integers(-1, 10),
        "trainer.total_training_steps": st.integers(1, 1000),
        "trainer.default_local_dir": st.sampled_from(["x", "gsm8k", "a/gsm8k"]),
        f"{ROLLOUT}.multi_turn.enable": st.booleans(),
        f"{ROLLOUT}.multi_turn.max_user_turns": st.integers(1, 5),
    },
    "search_r1": {
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
        f"{ROLLOUT}.name": st.sampled_from(["vllm", "hf"]),
        f"{ROLLOUT}.tensor_model_parallel_size": st.sampled_from([1, 2, 3, 8]),
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
    },
}
SCORES = ("structure_format", "final_format", "retrieval")
ODD = st.sampled_from(["null", "-1", "0", "1e400", "nan", "words", "[]", "[1,2,3]", "{a: b}", "true", "''", "0.5"])


def problems(system: str, *overrides: str) -> list[str]:
    """What is wrong; nothing where there is a plan."""
    try:
        make_plan(read(table_of(system), *NEEDED, *overrides).recipe)
    except RecipeError as error:
        return list(error.problems)
    return []


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("system", VALUES)
@given(data=st.data())
def test_sensible_values_give_a_recipe_or_problems_at_their_keys(system: str, data: st.DataObject) -> None:
    values = VALUES[system]
    keys = data.draw(st.lists(st.sampled_from(sorted(values)), unique=True, max_size=25))
    overrides = [f"{key}={data.draw(values[key], label=key)}" for key in keys]
    found = problems(system, *overrides)
    assert all(problem.startswith(("test: `", f"{table_of(system).title}: `")) for problem in found)
    if not found:
        written = {one.partition("=")[0] for one in (*NEEDED, *overrides)}
        assert {one.given.key for one in read(table_of(system), *NEEDED, *overrides).entries} == written


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("system", VALUES)
@given(data=st.data())
@pytest.mark.slow
def test_values_that_make_no_sense_are_never_another_exception(system: str, data: st.DataObject) -> None:
    rows = [row.key for row in table_of(system).rows if "*" not in row.key]
    keys = data.draw(st.lists(st.sampled_from(rows), unique=True, max_size=6))
    assert all(problems(system, *(f"{key}={data.draw(ODD, label=key)}" for key in keys)))


@pytest.mark.parametrize(("system", "case"), [("verl", "verl_today"), ("search_r1", "search_r1_defaults")])
def test_a_whole_configuration_says_what_its_defaults_say(system: str, case: str) -> None:
    whole = read(table_of(system), file=GOLDEN / case / "config.yaml")
    short = read(table_of(system), *NEEDED, "data.val_files=test.parquet")
    assert not whole.unsupported
    plans = [make_plan(made.recipe).as_dict() for made in (whole, short)]
    for part in ("batch", "schedule", "algorithm", "placement", "mesh", "cluster"):
        assert plans[0][part] == plans[1][part]
    for part in ("rollout", "validation", "optimizer", "critic"):
        assert getattr(whole.recipe, part) == getattr(short.recipe, part)
    rewards = [made.recipe.environment.reward.name for made in (whole, short)]
    assert rewards[0] == rewards[1] or system == "search_r1"  # whose file has keys of one of its two rewards


BASES = {
    "verl": (*NEEDED, "data.val_files=test.parquet", f"{ROLLOUT}.n=4", "algorithm.adv_estimator=grpo"),
    "search_r1": (*NEEDED, "data.val_files=test.parquet", f"{ROLLOUT}.n_agent=4", "algorithm.adv_estimator=grpo"),
    "verl_sft": ("model.path=model", "data.train_files=train.parquet"),
    "roll": ("pretrain=model",),
    "roll_sft": ("pretrain=model", "sequence_length=512", "sft_train.data_args.file_name=rows.jsonl"),
    "roll_dpo": ("pretrain=model", "sequence_length=512", "actor_train.data_args.file_name=rows.jsonl"),
    "rlinf": ("rollout.model.model_path=model",),
}
TELLING = ("num_return_sequences_in_group", *(f"reward_model.{name}_score" for name in SCORES))
"""Keys that say which pipeline or program it is, by being there."""


@pytest.mark.parametrize("system", BASES)
def test_a_default_that_is_written_changes_nothing(system: str) -> None:
    table = table_of(system)
    before = read(table, *BASES[system])
    config = ForeignConfig(table, {one.given.key: one.given for one in before.entries})
    written = {table.canonical(one.given.key) for one in before.entries}
    for row in table.rows:
        if row.default is ABSENT or "*" in row.key or row.key in (*written, *TELLING):
            continue
        default = ForeignValue(row.key, config.default(row.key), "test")
        after = migrate(table, {one.key: one for one in (*config.given.values(), default)})
        assert resolve_algorithm(after.recipe) == resolve_algorithm(before.recipe), default
        others = [made.recipe.model_dump(exclude={"algorithm"}) for made in (before, after)]
        assert others[0] == others[1], default


def test_the_loss_that_takes_the_place_of_an_unknown_one_gets_none_of_its_options() -> None:
    written = ("algorithm.adv_estimator=gpg", f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.clip_ratio_low=0.1")
    recipe = read(table_of("verl"), *NEEDED, *written, "actor_rollout_ref.rollout.n=4").recipe
    assert resolve_algorithm(recipe).loss.name == "gpg"


def test_search_r1_knows_every_key_of_verl_once() -> None:
    keys = [row.key for row in table_of("search_r1").rows]
    assert len(set(keys)) == len(keys)
    assert {row.key for row in table_of("verl").rows} <= set(keys)


@pytest.mark.parametrize("system", BASES)
def test_no_row_is_hidden_by_one_before_it(system: str) -> None:
    table = table_of(system)
    hidden = [row.key for row in table.rows if table.row(row.key.replace("**", "x.y").replace("*", "x")) is not row]
    assert hidden == []
