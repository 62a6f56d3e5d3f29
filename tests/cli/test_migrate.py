"""`corral migrate` and `python -m corral.verl`: what is written for other systems, printed, planned and trained."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from commands import Finished, corral, start_corral
from deadlines import within
from tiny import save_tiny_model

from corral.observe.ledger import Ledger
from corral.recipe.load import load_recipe

GOLDEN = Path(__file__).parent.parent / "migrate" / "golden"
BATCHES = {
    "verl_submit/input.sh": "1024 prompts x 1 sample = 1024 trajectories -> 4 updates of 256 on 16 trainers",
    "verl_dstack/input.sh": "256 prompts x 1 sample = 256 trajectories -> 4 updates of 64 on 16 trainers",
    "verl_slurm/input.sh": "1024 prompts x 1 sample = 1024 trajectories -> 4 updates of 256 on 16 trainers",
    "search_r1_multinode/input.sh": "512 prompts x 1 sample = 512 trajectories -> 2 updates of 256 on 16 trainers",
    "roll_guide_two_nodes/input.yaml": "64 prompts x 1 sample = 64 trajectories -> 1 update of 64 on 4 trainers",
    "roll_guide_one_device/input.yaml": "16 prompts x 1 sample = 16 trajectories -> 1 update of 16 on 1 trainer",
    "rlinf_shared_devices/input.yaml": "512 prompts x 16 samples = 8192 trajectories -> 4 updates of 2048 on 32",
    "rlinf_devices_apart/input.yaml": "512 prompts x 16 samples = 8192 trajectories -> 4 updates of 2048 on 8 trainers",
}
"""Commands and configurations of guides, with what `corral plan` has to say of them."""


def migrated(folder: Path, name: str, *options: str) -> Finished:
    return corral(folder, "migrate", str(GOLDEN / name), *options)


def refused(folder: Path, *words: str) -> str:
    """What the command that is refused writes to standard error."""
    ended = corral(folder, *words)
    assert ended.code == 2
    assert "Traceback" not in ended.stderr
    return ended.stderr


def trains_a_step(folder: Path) -> None:
    """The migrated recipe, in one process."""
    trained = corral(folder, "rehearse", "recipe.yaml", "--quick")
    assert trained.code == 0, trained.stderr
    assert "step 1/1" in trained.stdout


@pytest.fixture(params=BATCHES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_guides_say_is_read_without_loss_and_plans(tmp_path: Path, name: str) -> None:
    made = migrated(tmp_path, name, "--strict")
    assert made.code == 0, made.stderr
    (tmp_path / "recipe.yaml").write_text(made.stdout)
    planned = corral(tmp_path, "plan", "recipe.yaml")
    assert planned.code == 0, planned.stderr
    assert BATCHES[name] in planned.stdout


def test_devices_of_roles_apart_add_up(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(migrated(tmp_path, "rlinf_devices_apart/input.yaml").stdout)
    placement = json.loads(corral(tmp_path, "plan", "recipe.yaml", "--json").stdout)["placement"]
    assert {role: len(devices) for role, devices in placement.items()} == {"rollout": 20, "idle": 4, "actor": 8}


def test_every_key_that_was_written_is_in_the_report(tmp_path: Path, name: str) -> None:
    report = json.loads(migrated(tmp_path, name, "--json").stdout)
    told = {one["key"] for one in report["keys"]}
    assert told == written_keys(GOLDEN / name)
    assert all(one["note"] or one["ours"] for one in report["keys"]), report["keys"]


def written_keys(path: Path) -> set[str]:
    """Found in another way than the reader's."""
    if path.suffix == ".yaml":
        return set(leaves(yaml.safe_load(path.read_text())))
    command = path.read_text().partition("main_ppo")[2].partition("2>&1")[0]
    return {key.lstrip("+") for key in re.findall(r"^\s+([+\w.]+)=", command, re.MULTILINE)}


def leaves(values: object, prefix: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [prefix]
    return [leaf for key, value in values.items() for leaf in leaves(value, f"{prefix}.{key}".lstrip("."))]


def test_migrating_what_was_migrated_changes_nothing(tmp_path: Path, name: str) -> None:
    once = migrated(tmp_path, name).stdout
    (tmp_path / "recipe.yaml").write_text(once)
    again = corral(tmp_path, "migrate", "recipe.yaml")
    assert (again.code, again.stdout) == (0, once)
    assert "already" in again.stderr


@pytest.mark.slow
def test_shrunk_it_trains_a_step_in_one_process(tmp_path: Path, name: str) -> None:
    (tmp_path / "recipe.yaml").write_text(migrated(tmp_path, name).stdout)
    trains_a_step(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_shrunk_it_trains_a_step_whatever_engine_roll_names(tmp_path: Path, engine: str) -> None:
    sampling = "actor_infer.generating_args: {temperature: 1.0, top_p: 1.0, top_k: 0}\n"
    chosen = f"actor_infer.strategy_args: {{strategy_name: {engine}, strategy_config: {{tensor_parallel_size: 2}}}}\n"
    guide = (GOLDEN / "roll_guide_two_nodes/input.yaml").read_text()
    (tmp_path / "engine.yaml").write_text(f"{guide}{sampling}{chosen}")
    (tmp_path / "recipe.yaml").write_text(corral(tmp_path, "migrate", "engine.yaml").stdout)
    assert load_recipe(tmp_path / "recipe.yaml").rollout.engine.name == engine
    trains_a_step(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_rolls_training_on_rows_trains_a_step_when_it_is_shrunk(tmp_path: Path, kind: str) -> None:
    words = (GOLDEN / f"roll_{kind}/command.txt").read_text().split("\n\n")[0].split()
    (tmp_path / "recipe.yaml").write_text(corral(tmp_path, "migrate", *words[:2], "--", *words[2:]).stdout)
    trains_a_step(tmp_path)


SMALL = """
    model.dtype=float32 data.train.path=arithmetic:addition data.train.size=32 data.prompt_key=prompt
    data.answer_key=answer logging.trackers=[console] cluster.start_timeout_s=300 environment.max_error_rate=null
"""
"""Changes to a migrated recipe that leave its batches, devices, and how its model is spread over them."""
BATCH = (
    "rollout_batch_size=4 num_return_sequences_in_group=2 prompt_length=64 response_length=16 max_steps=2 "
    "actor_train.training_args.per_device_train_batch_size=1 actor_train.training_args.gradient_accumulation_steps=2 "
    "actor_train.device_mapping=[0,1,2,3] actor_infer.device_mapping=[0,1,2,3] num_gpus_per_node=4"
)


@dataclass(frozen=True)
class Strategy:
    """A strategy of ROLL on four devices, and what it is in Corral."""

    name: str
    settings: str
    ours: dict[str, object]
    data_parallel: int
    """Devices that have trajectories of their own: 4 / (tensor x pipeline x context)."""
    family: str = "llama"


STRATEGIES = {
    "tensor": Strategy(
        "megatron_train",
        "tensor_model_parallel_size=2 use_distributed_optimizer=true optimizer_cpu_offload=true",
        {"tensor": 2, "offload": ["optimizer"]},
        data_parallel=2,
    ),
    "pipeline": Strategy(
        "megatron_train",
        "tensor_model_parallel_size=2 pipeline_model_parallel_size=2 use_distributed_optimizer=true",
        {"tensor": 2, "pipeline": 2, "offload": []},
        data_parallel=1,
    ),
    "experts": Strategy(
        "megatron_train",
        "tensor_model_parallel_size=2 expert_model_parallel_size=2 use_distributed_optimizer=true "
        "recompute_granularity=full",
        {"tensor": 2, "expert": 2, "offload": []},
        data_parallel=2,
        family="qwen3_moe",
    ),
    "experts in stages": Strategy(
        "megatron_train",
        "pipeline_model_parallel_size=2 expert_model_parallel_size=2 use_distributed_optimizer=true",
        {"pipeline": 2, "expert": 2, "offload": []},
        data_parallel=2,
        family="qwen3_moe",
    ),
    "ZeRO 2": Strategy(
        "deepspeed_train",
        "zero_optimization.stage=2 zero_optimization.offload_optimizer.device=cpu",
        {"offload": ["optimizer"]},
        data_parallel=4,
    ),
    "ZeRO 3": Strategy(
        "deepspeed_train",
        "zero_optimization.stage=3 zero_optimization.offload_param.device=cpu "
        "zero_optimization.offload_optimizer.device=cpu",
        {"offload": ["parameters", "gradients", "optimizer"]},
        data_parallel=4,
        family="qwen3_moe",
    ),
}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("case", STRATEGIES)
def test_strategies_of_roll_train_on_four_processes_with_its_arithmetic(tmp_path: Path, case: str) -> None:
    strategy = STRATEGIES[case]
    save_tiny_model(tmp_path / "model", strategy.family)
    words = (GOLDEN / "roll_strategies/command.txt").read_text().split("\n\n")[0].split()[2:]
    ours = {word.partition("=")[0] for word in BATCH.split()} | {"pretrain"}
    kept = [word for word in words if "strategy_" not in word and word.partition("=")[0] not in ours]
    chosen = [f"actor_train.strategy_args.strategy_config.{setting}" for setting in strategy.settings.split()]
    named = f"actor_train.strategy_args.strategy_name={strategy.name}"
    written = [*kept, *BATCH.split(), *chosen, named, f"pretrain={tmp_path / 'model'}"]
    (tmp_path / "recipe.yaml").write_text(corral(tmp_path, "migrate", "--system", "roll", "--", *written).stdout)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert {**recipe.train.parallel.model_dump(exclude_unset=True), "offload": recipe.train.offload} == strategy.ours
    # per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks trajectories in an update
    num_updates = 4 * 2 // (1 * 2 * strategy.data_parallel)
    assert (recipe.batch.prompts_per_step, recipe.batch.samples_per_prompt) == (4, 2)
    assert recipe.batch.updates_per_step == num_updates
    assert recipe.batch.max_tokens_per_micro_batch == 64 + 16
    trained = start_corral(tmp_path, "train", "recipe.yaml", *SMALL.split()).wait(timeout_s=400)
    assert trained.code == 0, trained.stderr
    assert "step 2/2" in trained.stdout
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    made = [sum(row[f"updates/{kind}"] for kind in ("made", "empty")) for row in rows if "updates/made" in row]
    assert made == [num_updates] * 2
    assert Ledger(run / "ledger.jsonl").audit().trained == 8


# --- what is wrong is one clear line, and nothing runs


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("verl.trainer.main_ppo data.trian_batch_size=4", "did you mean `data.train_batch_size`?"),
        ("verl.trainer.main_ppo data.train_batch_size", "is not an override; write `key=value`"),
        ("verl.trainer.main_ppo data.train_batch_size=many", "should be a whole number"),
        ("something.else a=1", "does not start a training that is known"),
    ],
)
def test_a_wrong_command_is_one_clear_line(tmp_path: Path, command: str, problem: str) -> None:
    [line] = refused(tmp_path, "migrate", "--", "python3", "-m", *command.split()).strip().splitlines()
    assert problem in line


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("a.sh", "python3 -m verl.trainer.main_ppo data.train_files=$(touch hit)", "nothing is run here"),
        ("a.sh", "python3 -m verl.trainer.main_ppo data.train_files=`touch hit`", "nothing is run here"),
        ("a.sh", "touch hit; rm -rf hit", "no command in it starts a training"),
        ("a.sh", "python3 -m verl.trainer.main_ppo 'a=1", "is not closed"),
        ("a.yaml", "pretrain: ${model}\nmodel: ${pretrain}\nmax_steps: 1", "in a circle"),
        (
            "a.yaml",
            "num_gpus_per_node: 1\nactor_train.device_mapping: __import__('os').system('touch hit')",
            "should be a range",
        ),
        ("a.yaml", "num_gpus_per_node: &x [*x]", "alias"),
        ("a.yaml", "some: thing\nof: nobody", "none of its keys is known"),
    ],
)
def test_a_wrong_file_is_one_clear_line_and_nothing_runs(tmp_path: Path, file: str, text: str, problem: str) -> None:
    (tmp_path / file).write_text(text)
    assert problem in refused(tmp_path, "migrate", file)
    assert not (tmp_path / "hit").exists()


def test_a_variable_can_be_given_from_outside(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=$NODES trainer.n_gpus_per_node=8")
    made = corral(tmp_path, "migrate", "run.sh", "--define", "NODES=4")
    assert made.code == 0, made.stderr
    assert "nodes: 4" in made.stdout


def test_an_unset_variable_is_named_where_it_does_harm(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo trainer.nnodes=$NODES")
    said = refused(tmp_path, "migrate", "run.sh")
    assert "`trainer.nnodes=` should be a whole number" in said
    assert "$NODES is not set in the script" in said


def test_only_what_starts_a_program_counts(tmp_path: Path) -> None:
    lines = [
        "pkill -f verl.trainer.main_ppo",
        "echo python -m verl.trainer.main_ppo",
        "python -m verl.trainer.main_ppo \\",
        "  trainer.nnodes=1 trainer.n_gpus_per_node=1 # \\",
        "  data.train_batch_size=64",
        "data.val_batch_size=2",
    ]
    (tmp_path / "run.sh").write_text("\n".join(lines))
    made = corral(tmp_path, "migrate", "run.sh")
    assert made.code == 0, made.stderr
    assert "`data.train_batch_size=64` begins a command of its own" in made.stderr


def test_a_script_that_has_a_script_in_it(tmp_path: Path) -> None:
    inner = "python -m verl.trainer.main_ppo trainer.nnodes=3 trainer.n_gpus_per_node=1"
    (tmp_path / "run.sh").write_text(f'docker exec box bash -lc "cd verl && {inner}"\n')
    assert "nodes: 3" in corral(tmp_path, "migrate", "run.sh").stdout


def test_keys_that_were_added_are_unsupported_and_no_error(tmp_path: Path) -> None:
    made = corral(tmp_path, "migrate", "--json", "--", "python3", "-m", "verl.trainer.main_ppo", "+my.own.key=1")
    assert made.code == 0, made.stderr
    [entry] = json.loads(made.stdout)["keys"]
    assert (entry["key"], entry["status"]) == ("my.own.key", "unsupported")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "max_steps: 1\nsystem_envs: {HF_TOKEN: s3cret}\ntracker_kwargs: {api_key: s3cret}\n"
    )
    for options in ((), ("--json",)):
        made = corral(tmp_path, "migrate", "a.yaml", *options)
        assert made.code == 0, made.stderr
        assert "s3cret" not in made.stdout + made.stderr


def test_a_script_is_no_recipe(tmp_path: Path) -> None:
    for command in ("plan", "evaluate"):
        said = refused(tmp_path, command, str(GOLDEN / "verl_dstack/input.sh"))
        assert "is a script; `corral migrate" in said


@pytest.mark.parametrize(
    "options",
    [("--define", "A=1"), ("--strict",), ("--all",), ("--system", "verl"), ("--define", "A=1", "--plan")],
    ids=str,
)
def test_options_for_other_systems_are_refused_with_a_recipe(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\nmodel: {path: blank-1m}\ndata: {train: {path: rows.jsonl}}\n")
    said = refused(tmp_path, "migrate", "recipe.yaml", *options)
    assert "--define, --strict and --all are for other systems" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--strict", "--plan"), "--all and --strict belong to the report"),
        (("--strict", "--train"), "--all and --strict belong to the report"),
        (("--json", "--train"), "--json belongs to the report and to --plan"),
        (("--allow-unsupported",), "--allow-unsupported belongs to --plan and --train"),
        (("--plan", "--debug"), "--debug, --post-mortem, --insecure and --resume-anyway belong to --train"),
    ],
)
def test_options_belong_together(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    [line] = refused(tmp_path, "migrate", str(GOLDEN / "verl_dstack/input.sh"), *options).splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_plan_goes_on_from_the_migrated_recipe(tmp_path: Path, name: str) -> None:
    planned = migrated(tmp_path, name, "--plan")
    assert planned.code == 0, planned.stderr
    assert BATCHES[name] in planned.stdout


def test_a_mesh_that_training_refuses_is_refused_of_a_script_and_of_a_recipe(tmp_path: Path) -> None:
    script, own = GOLDEN / "verl_submit/input.sh", tmp_path / "own.yaml"
    own.write_text(corral(tmp_path, "migrate", str(script)).stdout)
    for file in (script, own):
        mesh = ("model.path=blank-1m", "model.implementation=general", "train.parallel.tensor=2")
        said = refused(tmp_path, "migrate", str(file), *mesh)
        assert "train.parallel.tensor: blank-1m is computed sequence by sequence" in said


def test_keys_of_the_recipe_can_be_changed(tmp_path: Path) -> None:
    changes = ["batch.prompts_per_step=64", "~logging.project", "algorithm.loss=gspo", "algorithm.loss.clip_high=0.3"]
    made = migrated(tmp_path, "verl_dstack/input.sh", *changes)
    assert made.code == 0, made.stderr
    assert "  prompts_per_step: 64  # changed on the command line\n" in made.stdout
    (tmp_path / "recipe.yaml").write_text(made.stdout)
    changed = load_recipe(tmp_path / "recipe.yaml")
    assert (changed.batch.prompts_per_step, changed.logging.project) == (64, "corral")
    assert changed.algorithm.loss.model_dump() == {"name": "gspo", "clip_high": 0.3}
    (tmp_path / "unchanged.yaml").write_text(migrated(tmp_path, "verl_dstack/input.sh").stdout)
    assert changed == load_recipe(tmp_path / "unchanged.yaml", changes)
    said = refused(tmp_path, "migrate", str(GOLDEN / "verl_dstack/input.sh"), "batch.prompt_per_step=64")
    assert "did you mean `batch.prompts_per_step`?" in said


def test_strict_refuses_what_corral_lacks(tmp_path: Path) -> None:
    words = ["--", "python3", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.actor.qat.enable=true"]
    said = refused(tmp_path, "migrate", "--strict", *words)
    assert "`actor_rollout_ref.actor.qat.enable=true` is unsupported" in said
    assert corral(tmp_path, "migrate", *words).code == 0


# --- the report


SCRIPT = """ARGS=(
  data.train_files=/d/train.parquet  # rows
  actor_rollout_ref.actor.qat.enable=true
  data.train_max_samples=100
)
python3 -m verl.trainer.main_ppo "${ARGS[@]}" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
  trainer.nnodes=$NODES trainer.balance_batch=true trainer.use_v1=true
"""


def test_what_changes_the_training_stands_first_with_its_line_and_both_values(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT.replace("=$NODES", "=1"))
    report = corral(tmp_path, "migrate", "run.sh").stderr
    first, *rest = report.partition("changes the training, or needs a decision\n")[2].split("\n\n")
    assert first.startswith("  run.sh:3: actor_rollout_ref.actor.qat.enable=true; here nothing")
    assert "run.sh:4: data.train_max_samples=100; here data.train.max_rows: 100" in first
    assert "speed and memory: trainer.balance_batch, trainer.use_v1" in "\n".join(rest)
    assert "trainer.use_v1=true" not in report
    assert "trainer.use_v1=true (speed and memory)" in corral(tmp_path, "migrate", "run.sh", "--all").stderr


def test_what_is_refused_has_its_report_and_remarks_are_not_errors(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    said = refused(tmp_path, "migrate", "run.sh")
    assert "run.sh:3: actor_rollout_ref.actor.qat.enable=true; here nothing" in said
    [error] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error == "error: run.sh:7: `trainer.nnodes=` should be a whole number"
    assert "\n  run.sh:7: $NODES is not set in the script, so it is empty\n" in said
    found = json.loads(corral(tmp_path, "migrate", "run.sh", "--json").stdout)
    assert (found["recipe"], found["problems"]) == (None, [error.removeprefix("error: ")])
    assert {one["key"]: one["where"] for one in found["keys"]}["data.train_files"] == "run.sh:2"


@pytest.mark.parametrize("change", ["rollout.n=5", "actor_rollout_ref.rollout.n=5", "batch.samples_per_prompt=5"])
def test_keys_of_either_side_can_be_changed_behind_the_file(tmp_path: Path, change: str) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    made = corral(tmp_path, "migrate", "run.sh", "--define", "NODES=1", change)
    assert made.code == 0, made.stderr
    assert yaml.safe_load(made.stdout)["batch"]["samples_per_prompt"] == 5


QWEN_72B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("slurm", "devices", "needs"),
    [
        ("", 4, "373 GiB for rollout, without activations and a KV cache, and no GPU has more than 268"),
        ("#SBATCH --nodes=1 --gres=gpu:h100:8", 8, "25[4-9] GiB for rollout, without a KV cache, and has 80"),
        ("#SBATCH --gpus-per-node=a100_40gb:8", 8, "25[4-9] GiB for rollout, without a KV cache, and has 40"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path: Path, slurm: str, devices: int, needs: str) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(QWEN_72B))
    sizes = f"trainer.nnodes=1 trainer.n_gpus_per_node={devices} actor_rollout_ref.model.path=large"
    (tmp_path / "run.sh").write_text(
        f"#!/bin/bash\n{slurm}\npython3 -m verl.trainer.main_ppo data.train_files=a.parquet {sizes} "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1 algorithm.adv_estimator=grpo\n"
    )
    made = corral(tmp_path, "migrate", "run.sh")
    assert made.code == 2
    [error] = [line for line in made.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(f"needs {needs}", error)  # 254 are weights and states, the rest is an estimate of activations
    memory = yaml.safe_load(made.stdout)["cluster"].get("device_memory")
    assert memory == (int(needs.rpartition(" ")[2]) if slurm else None)
    assert corral(tmp_path, "migrate", "run.sh", "--plan").code == 2


# --- commands of other systems, run as they are


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """As verl's own preparation writes them."""
    table = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{one} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(one + 1)},
        }
        for one in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def overrides(rows: Path, model: Path) -> list[str]:
    return [
        f"data.train_files={rows}",
        "data.train_batch_size=4",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.logger=['console']",
        "trainer.experiment_name=dropped-in",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.total_training_steps=1",
        "trainer.default_local_dir=runs",
    ]


def test_a_command_of_verl_trains(tmp_path: Path, rows: Path, tiny_model: Path) -> None:
    trained = corral(tmp_path, "migrate", "--system", "verl", "--train", "--", *overrides(rows, tiny_model))
    assert trained.code == 0, trained.stderr
    assert "4 prompts x 2 samples = 8 trajectories -> 2 updates of 4 on 1 trainer" in trained.stdout
    assert "step 1/1" in trained.stdout


@pytest.mark.slow
def test_corral_verl_is_a_drop_in_for_main_ppo(tmp_path: Path, rows: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "corral.verl", *overrides(rows, tiny_model)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=within(120))
    assert ended.returncode == 0, ended.stderr
    assert "step 1/1" in ended.stdout
    assert (tmp_path / "runs" / "dropped-in" / "metrics.jsonl").exists()


def test_what_is_unsupported_is_not_run_unless_it_is_allowed(tmp_path: Path, rows: Path, tiny_model: Path) -> None:
    words = ["migrate", "--system", "verl", "--train", "--", *overrides(rows, tiny_model)]
    words += ["actor_rollout_ref.actor.qat.enable=true"]
    said = refused(tmp_path, *words)
    assert "qat.enable=true` is unsupported" in said
    assert "--allow-unsupported goes on without" in said
    assert corral(tmp_path, words[0], "--allow-unsupported", *words[1:]).code == 0


@pytest.mark.parametrize("system", ["roll", "rlinf"])
def test_configurations_are_found_by_path_and_name(tmp_path: Path, system: str) -> None:
    (tmp_path / "configs").mkdir()
    source = {"roll": "roll_guide_two_nodes/input.yaml", "rlinf": "rlinf_devices_apart/input.yaml"}[system]
    (tmp_path / "configs" / "mine.yaml").write_text((GOLDEN / source).read_text())
    command = ["migrate", "--system", system, "--plan", "--config_path", "configs", "--config_name"]
    planned = corral(tmp_path, *command, "mine")
    assert planned.code == 0, planned.stderr
    assert BATCHES[source] in planned.stdout
    assert "other.yaml is in none of these folders" in refused(tmp_path, *command, "other")
