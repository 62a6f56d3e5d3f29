"""A configuration that names its engine keeps it, and its algorithm. What becomes of single keys is in `golden`."""

from pathlib import Path

import pytest
from foreign import read
from golden_migrations import GOLDEN

from corral.cluster.rehearsal_recipe import cut
from corral.migrate.config_sources import migrate_file, table_of
from corral.migrate.migration import Migration, recipe_text
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.recipe.presets import resolve_algorithm

ROLLOUT = "actor_rollout_ref.rollout"
INFER = "actor_infer.strategy_args"
PLAIN = [f"actor_infer.generating_args.{one}" for one in ("temperature=1.0", "top_p=1.0", "top_k=0")]
"""ROLL's demo has a temperature and excludes tokens, of which vLLM has no log-probs that could be trained on."""
VERL = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")


def script(folder: Path, name: str, *replacements: tuple[str, str]) -> Migration:
    text = (GOLDEN / name).read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    (folder / "train.sh").write_text(text)
    return migrate_file(folder / "train.sh")


def seed(folder: Path, name: str, engine: str) -> Migration:
    """What a guide says, with an engine that is named."""
    if name == "verl_dstack":
        with_name = f"{ROLLOUT}.name={engine} {ROLLOUT}.gpu_memory_utilization"
        return script(folder, f"{name}/input.sh", (f"{ROLLOUT}.gpu_memory_utilization", with_name))
    if name in ("verl_slurm", "search_r1_multinode"):
        return script(folder, f"{name}/input.sh", ("rollout.name=vllm", f"rollout.name={engine}"))
    if name.startswith("roll"):
        return read(table_of("roll"), f"{INFER}.strategy_name={engine}", *PLAIN, file=GOLDEN / name / "input.yaml")
    return read(table_of("rlinf"), f"rollout.rollout_backend={engine}", file=GOLDEN / name / "input.yaml")


SEEDS = ["verl_dstack", "verl_slurm", "search_r1_multinode", "roll_guide_two_nodes", "roll_guide_one_device"]
SEEDS += ["rlinf_shared_devices", "rlinf_devices_apart"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", SEEDS)
def test_a_named_engine_stays_and_corrects_nothing_that_was_not_corrected(
    tmp_path: Path, name: str, engine: str
) -> None:
    migration = seed(tmp_path, name, engine)
    assert migration.unsupported == []
    (tmp_path / "recipe.yaml").write_text(recipe_text(migration))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    make_plan(recipe)
    assert recipe.rollout.engine.name == engine
    algorithm = resolve_algorithm(recipe)
    assert (algorithm.correction.name, algorithm.old_logprobs) == ("none", "recompute")
    small = cut(recipe, tmp_path).recipe
    make_plan(small)
    assert small.rollout.engine.name == "native"
    assert resolve_algorithm(small).correction.name == "none"


@pytest.mark.parametrize(("name", "size"), [("verl_dstack", 1), ("verl_slurm", 2), ("search_r1_multinode", 1)])
def test_vllm_is_spread_over_as_many_devices_as_before(tmp_path: Path, name: str, size: int) -> None:
    assert seed(tmp_path, name, "vllm").recipe.rollout.engine.tensor_parallel == size
    assert seed(tmp_path, name, "sglang").recipe.rollout.engine.tensor_parallel == 1


def test_a_change_of_the_engine_s_size_is_told_with_both_numbers(tmp_path: Path) -> None:
    migration = seed(tmp_path, "verl_slurm", "sglang")
    [entry] = [one for one in migration.entries if one.given.key == f"{ROLLOUT}.tensor_model_parallel_size"]
    assert (entry.outcome.status, entry.given.value) == ("converted", 2)
    assert entry.outcome.ours == {("rollout", "engine", "tensor_parallel"): 1}
    assert "2, here 1" in entry.outcome.note


@pytest.mark.parametrize("sampling", [(0.6, 0.95, -1), (0.6, 1.0, 20)])
def test_where_vllm_has_no_log_probs_to_train_on_the_native_engine_samples_alike(
    sampling: tuple[float, float, int],
) -> None:
    temperature, top_p, top_k = sampling
    written = (f"{ROLLOUT}.temperature={temperature}", f"{ROLLOUT}.top_p={top_p}", f"{ROLLOUT}.top_k={top_k}")
    migration = read(table_of("verl"), *VERL, f"{ROLLOUT}.name=vllm", *written)
    make_plan(migration.recipe)
    rollout = migration.recipe.rollout
    assert (rollout.engine.name, rollout.temperature, rollout.top_p) == ("native", temperature, top_p)
    [entry] = [one for one in migration.entries if one.given.key == f"{ROLLOUT}.name"]
    assert f"temperature {temperature:g}" in entry.outcome.note
    assert read(table_of("verl"), *VERL, f"{ROLLOUT}.name=sglang", *written).recipe.rollout.engine.name == "sglang"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("algorithm.rollout_correction.rollout_is=token", "token_tis"),
        ("algorithm.rollout_correction.rollout_is=sequence", "sequence_tis"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2.0", "token_tis"),
        ("algorithm.rollout_correction.bypass_mode=true", "none"),
    ],
)
def test_a_correction_stays_what_it_was(written: str, name: str) -> None:
    recipe = read(table_of("verl"), *VERL, f"{ROLLOUT}.name=vllm", written).recipe
    make_plan(recipe)
    algorithm = resolve_algorithm(recipe)
    assert algorithm.correction.name == name
    assert algorithm.old_logprobs == ("engine" if name == "none" else "recompute")


def test_trainers_that_compute_otherwise_than_the_engine_get_no_correction_either() -> None:
    written = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    assert resolve_algorithm(read(table_of("verl"), *VERL, written).recipe).correction.name == "none"


@pytest.mark.parametrize(
    "written",
    [f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2", f"{ROLLOUT}.quantization=fp8",
     f"{ROLLOUT}.pipeline_model_parallel_size=2", f"{ROLLOUT}.engine_kwargs.vllm.quantization=fp8",
     f"{ROLLOUT}.tensor_model_parallel_size=16"],
)  # fmt: skip
def test_what_engines_cannot_do_is_unsupported_and_the_rest_has_a_plan(written: str) -> None:
    migration = read(table_of("verl"), *VERL, "trainer.nnodes=2", f"{ROLLOUT}.name=vllm", written)
    assert [one.given.key for one in migration.unsupported] == [written.partition("=")[0]]
    make_plan(migration.recipe)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_arguments_that_are_decided_elsewhere_are_in_no_recipe(engine: str) -> None:
    from corral.rollout import sglang_backend, vllm_backend

    own = {"vllm": vllm_backend.OWN, "sglang": sglang_backend.OWN}[engine]
    written = [f"{ROLLOUT}.engine_kwargs.{engine}.{name}=1" for name in own]
    migration = read(table_of("verl"), *VERL, f"{ROLLOUT}.name={engine}", *written)
    assert migration.recipe.rollout.engine.arguments == {}
    assert len(migration.unsupported) == len(own)
