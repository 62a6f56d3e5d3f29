"""What verl's table says beside values. What becomes of single keys is in `golden`."""

from pathlib import Path

import pytest
from foreign import read

from corral.migrate.config_sources import table_of
from corral.migrate.migration import Migration, recipe_text
from corral.model.families import checked_plan
from corral.recipe.errors import RecipeError
from corral.recipe.mesh import MeshShape

ACTOR = "actor_rollout_ref.actor"
AGGREGATION = "actor_rollout_ref.actor.loss_agg_mode"


@pytest.mark.parametrize(
    ("written", "differs"),
    [
        ([f"{AGGREGATION}=seq-mean-token-mean"], True),
        ([f"{AGGREGATION}=token-mean"], False),
        ([f"{AGGREGATION}=seq-mean-token-mean", "critic.loss_agg_mode=token-mean"], False),
        ([f"{AGGREGATION}=seq-mean-token-mean", "algorithm.adv_estimator=grpo"], False),
    ],
)
def test_a_critics_loss_that_verl_aggregates_otherwise_is_named(written: list[str], differs: bool) -> None:
    needed = ["actor_rollout_ref.model.path=model", "data.train_files=train.parquet", "actor_rollout_ref.rollout.n=4"]
    migration = read(table_of("verl"), *needed, "algorithm.adv_estimator=gae", *written)
    assert [entry.outcome.differs for entry in migration.entries if entry.given.key == AGGREGATION] == [differs]


def verl(*overrides: str, model: object = "model") -> Migration:
    needed = [
        f"actor_rollout_ref.model.path={model}",
        "data.train_files=train.parquet",
        "actor_rollout_ref.rollout.n=4",
    ]
    return read(table_of("verl"), *needed, "algorithm.adv_estimator=grpo", *overrides)


@pytest.mark.parametrize(
    "split",
    [
        (),
        (f"{ACTOR}.fsdp_config.fsdp_size=-1", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron.pipeline_model_parallel_size=2"),
        (f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"),
    ],
)
def test_a_model_that_reads_images_is_whole_on_each_device(tmp_path: Path, split: tuple[str, ...]) -> None:
    """Which is the only mesh that such a model has in Corral: the plan takes it with the model's own configuration."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2_5_VLConfig(text_config={**small, "num_key_value_heads": 2, "vocab_size": 1000})
    config.save_pretrained(model := tmp_path / "Qwen2.5-VL-7B-Instruct")
    recipe = verl("trainer.nnodes=2", *split, model=model).recipe
    assert checked_plan(recipe).meshes["actor"] == MeshShape(replicate=16)


@pytest.mark.parametrize(
    ("model", "is_known"),
    [("OpenGVLab/InternVL3-2B", True), ("zai/GLM-4.1V-9B", True), ("llava-1.5-7b", True), ("/models/vl", False),
     ("/data/vision/Qwen3-8B", False), ("Qwen/Qwen3-8B", False), ("./omni/", False)],
)  # fmt: skip
def test_other_models_of_images_are_known_by_their_names(model: str, is_known: bool) -> None:
    assert bool(verl(model=model).unsupported) == is_known


def test_a_reward_model_needs_no_workers_for_functions() -> None:
    written = ["reward.num_workers=8", "reward.reward_model.enable=true", "reward.reward_model.model_path=classifier"]
    assert checked_plan(verl(*written).recipe).recipe.environment.reward.name == "reward_model"
    assert verl("reward.num_workers=8").recipe.environment.reward.workers == 8


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"`actor_rollout_ref.model.path=` names no model; .* --define NAME=VALUE"):
        verl(model="")


@pytest.mark.parametrize(("expert", "ours"), [(8, 1), (4, 4)])
def test_experts_that_megatron_spreads_over_matrices_are_sharded_with_the_rest(expert: int, ours: int) -> None:
    """Megatron's groups of experts lie across those of tensor parallelism, so their sizes need not multiply."""
    sft = ["model.path=m", "data.train_files=x.parquet", "trainer.n_gpus_per_node=8", "engine.tp_size=2"]
    recipe = read(table_of("verl_sft"), *sft, f"engine.ep_size={expert}").recipe
    assert (recipe.train.parallel.tensor, recipe.train.parallel.expert) == (2, ours)
    assert checked_plan(recipe).meshes["actor"].size == 8


def test_a_teacher_with_gpus_of_its_own_is_said() -> None:
    written = ["distillation.enabled=true", "distillation.teacher_models.teacher_model.model_path=big",
               "distillation.distillation_loss.loss_mode=k1", "distillation.distillation_loss.use_policy_gradient=true",
               "distillation.distillation_loss.use_task_rewards=false", "distillation.n_gpus_per_node=4"]  # fmt: skip
    [entry] = [one for one in verl(*written).entries if one.given.key == "distillation.n_gpus_per_node"]
    assert entry.outcome.differs
    assert "shares the students' devices" in entry.outcome.note


def test_what_a_reader_compares_is_written_out() -> None:
    """Also where it is what Corral would take anyway."""
    text = recipe_text(verl())
    assert "\nalgorithm:\n  name: grpo  # algorithm.adv_estimator" in text
    assert "  learning_rate: 1.0e-06  # verl's default: actor_rollout_ref.actor.optim.lr" in text
