"""Properties of RLinf's table. What becomes of single keys is in `golden`."""

from contextlib import suppress
from typing import Any

import pytest
from foreign import read
from golden_migrations import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.migrate.config import RawConfig, add_file
from corral.migrate.config_sources import table_of
from corral.migrate.migration import Migration
from corral.migrate.value_kinds import format_value
from corral.recipe.errors import RecipeError
from corral.recipe.plan import make_plan

TABLE = table_of("rlinf")
FIRST_VERSION = GOLDEN / "rlinf_megatron_first_version" / "input.yaml"


def test_a_file_says_the_same_as_the_piece_of_it_in_the_guide() -> None:
    piece = read(TABLE, "cluster.num_nodes=16", file=GOLDEN / "rlinf_shared_devices" / "input.yaml").recipe
    whole = read(TABLE, file=FIRST_VERSION).recipe
    own = {"model": whole.model, "data": whole.data, "logging": whole.logging}
    written = piece.model_copy(update=own).model_dump(exclude={"algorithm"})
    assert written == whole.model_dump(exclude={"algorithm"})
    assert make_plan(piece).algorithm == make_plan(whole).algorithm


def test_every_key_of_a_file_is_in_the_report() -> None:
    migration, config = read(TABLE, file=FIRST_VERSION), RawConfig()
    add_file(config, FIRST_VERSION)
    assert {one.given.key for one in migration.entries} == set(config.flat())
    assert all(one.outcome.note or one.outcome.ours for one in migration.entries)


def test_both_spellings_are_one_key() -> None:
    old = read(TABLE, "rollout.model_dir=/a", "rollout.model_arch=qwen2.5", "rollout.precision=fp16")
    new = read(TABLE, "rollout.model.model_path=/a", "rollout.model.model_type=qwen2.5", "rollout.model.precision=fp16")
    assert old.recipe == new.recipe


@pytest.mark.parametrize("override", ["cluster.num_nodes=0", "actor.model.precision=x", "algorithm.n_minibatches=0"])
def test_what_is_wrong_is_reported_once(override: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(TABLE, override)
    assert len(caught.value.problems) == 1


def rlinf(*overrides: str) -> Migration:
    return read(TABLE, "cluster.num_nodes=1", "cluster.component_placement.actor,rollout=0-7", *overrides)


def test_a_model_that_reads_images_is_whole_on_each_device() -> None:
    images = ["data.type=vlm", "data.image_keys=[picture]", "data.system_prompt=Look.", "actor.training_backend=fsdp"]
    made = rlinf("actor.model.model_type=qwen2.5_vl", "actor.fsdp_config.fsdp_size=2", *images)
    assert made.unsupported == []
    parallel = made.recipe.train.parallel
    assert (parallel.shard, parallel.replicate, parallel.tensor) == (1, 8, 1)
    assert (made.recipe.data.images_key, made.recipe.data.system) == ("picture", "Look.")
    for other in ("internvl3_vl", "openvla_oft"):
        [entry] = rlinf(f"actor.model.model_type={other}").unsupported
        assert "Qwen2.5-VL" in entry.outcome.note


@pytest.mark.parametrize(("expert", "ours"), [(8, 1), (4, 4)])
def test_experts_that_megatron_spreads_over_matrices_are_sharded_with_the_rest(expert: int, ours: int) -> None:
    split = [f"actor.model.expert_model_parallel_size={expert}", "actor.model.tensor_model_parallel_size=2"]
    recipe = rlinf(*split).recipe
    assert (recipe.train.parallel.expert, make_plan(recipe).meshes["actor"].size) == (ours, 8)


def test_components_that_share_some_devices_are_refused_by_their_names() -> None:
    placed = ["cluster.component_placement.rollout=0-3", "cluster.component_placement.actor=0-7"]
    with pytest.raises(RecipeError, match="actor=0-7` shares some of its devices with rollout"):
        read(TABLE, "cluster.num_nodes=1", *placed)


SIZES = st.integers(-2, 40)
RATES = st.floats(-1, 2, allow_nan=False)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "cluster.num_nodes": st.integers(-1, 6),
    "actor.model.model_type": st.sampled_from(["qwen2.5", "qwen2.5_vl", "openvla"]),
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
    "rollout.rollout_backend": st.sampled_from(["vllm", "sglang", "huggingface", None]),
    "rollout.tensor_parallel_size": st.integers(-1, 8),
    "rollout.gpu_memory_utilization": RATES,
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


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(VALUES)), max_size=12, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: VALUES[key] for key in keys})
    )
)
def test_any_values_give_a_recipe_that_runs_or_an_error(values: dict[str, Any]) -> None:
    with suppress(RecipeError):
        make_plan(read(TABLE, *(f"{key}={format_value(value)}" for key, value in values.items())).recipe)


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "cluster.num_nodes": st.integers(1, 8),
            "data.rollout_batch_size": st.integers(1, 600),
            "data.max_prompt_length": st.integers(1, 2000),
            "algorithm.group_size": st.integers(2, 32),
            "algorithm.training_batch_size_per_gpu": st.integers(1, 8),
            "algorithm.kl_beta": st.sampled_from([0, 0.001]),
            "algorithm.adv_type": st.sampled_from(["grpo", "gae", "reinpp", "reinpp_baseline"]),
        }
    ),
    st.integers(1, 8),
    st.integers(1, 30_000),
)
@pytest.mark.slow
def test_sensible_values_always_give_a_recipe_that_runs(chosen: dict[str, Any], updates: int, response: int) -> None:
    trajectories = chosen["data.rollout_batch_size"] * chosen["algorithm.group_size"]
    length = chosen["data.max_prompt_length"] + response
    own = (f"algorithm.n_minibatches={min(updates, trajectories)}", f"runner.seq_length={length}")
    written = [f"{key}={value}" for key, value in chosen.items()]
    recipe = read(TABLE, "cluster.component_placement.actor,rollout=all", *own, *written).recipe
    batch = make_plan(recipe).as_dict()["batch"]
    assert batch["trajectories"] == trajectories
    assert batch["max_trajectory_tokens"] == length
    assert batch["max_tokens_per_micro_batch"] == chosen["algorithm.training_batch_size_per_gpu"] * length
