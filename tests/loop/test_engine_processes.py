"""Training with an engine in a process of its own: the same run, and one that goes on when that process is killed."""

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import start_corral
from deadlines import wait_until
from runs import steps_here, steps_of, write_recipe
from same_rows import assert_same
from tiny import SHAPE, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from corral.observe.ledger import Ledger

OWN_PROCESS = "rollout.engine={name: native, own_process: true}"
VLLM_PYTHON = os.environ.get("CORRAL_TEST_VLLM_PYTHON")
LIMIT_S = 240
APART = "cluster.placement={rollout: 0-1, actor: 2}"


@pytest.mark.slow
def test_it_is_the_run_of_one_process(tmp_path: Path, tiny_model: Path) -> None:
    rows = steps_here(tmp_path, tiny_model, OWN_PROCESS)
    assert_same(rows, steps_here(tmp_path, tiny_model))
    assert all(row["transfer/probe_deviation"] < 2e-4 for row in rows)
    assert all(row["policy/mismatch_kl"] < 1e-6 for row in rows)


def engine_processes(folder: Path) -> list[int]:
    """Ids of the engines' processes of a run in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"corral.rollout.engine_process" in (path / "cmdline").read_bytes() and (path / "cwd").samefile(folder):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def assert_engines_end(folder: Path) -> None:
    """One that was still being started again when the run ended dies with its worker, a moment later."""
    wait_until(lambda: not engine_processes(folder), 10)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    ("placement", "expected"),
    [((), "it is started again"), (("cluster.devices_per_node=3", APART), "are rolled out elsewhere")],
    ids=["colocated", "apart"],
)
@pytest.mark.usefixtures("real_workers")
def test_it_goes_on_when_the_engine_is_killed(
    tmp_path: Path, tiny_model: Path, placement: tuple[str, ...], expected: str
) -> None:
    long = ("schedule.steps=4", "batch.prompts_per_step=8")
    alone = steps_here(tmp_path, tiny_model, *long)
    (tmp_path / "calls").touch()
    write_recipe(tmp_path, tiny_model)
    reward = {"name": "vowels.py:slowly", "options": {"calls": str(tmp_path / "calls"), "seconds": 0.03}, "workers": 1}
    run = start_corral(
        tmp_path,
        "train",
        "recipe.yaml",
        f"environment.reward={json.dumps(reward)}",
        "name=killed",
        OWN_PROCESS,
        *placement,
        *long,
    )
    run.wait_until(lambda: (tmp_path / "calls").stat().st_size > 40, LIMIT_S)
    os.kill(engine_processes(tmp_path)[0], signal.SIGKILL)
    finished = run.wait(LIMIT_S)
    assert finished.code == 0, finished.stderr
    assert "was killed by signal 9" in finished.stdout + finished.stderr
    assert expected in finished.stdout + finished.stderr
    assert_same(steps_of(tmp_path / "runs" / "killed"), alone)
    audit = Ledger(tmp_path / "runs" / "killed" / "ledger.jsonl").audit()
    assert audit.clean
    assert audit.trained == 8 * 4
    assert_engines_end(tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    ("asked_to_stop", "where"),
    [(False, "runtime: local"), (True, "runtime: local"), (True, "devices_per_node: 2")],
    ids=["lost", "asked to stop", "asked to stop on ray"],
)
@pytest.mark.usefixtures("real_workers")
def test_an_engine_that_hangs_is_lost_and_no_run_waits_for_it(
    tmp_path: Path, tiny_model: Path, asked_to_stop: bool, where: str
) -> None:
    """After `cluster.worker_timeout_s`; sooner where the run is to stop."""
    steps, limit_s = (100_000, 300) if asked_to_stop else (6, 8)
    write_recipe(tmp_path, tiny_model)
    limits = (f"schedule.steps={steps}", f"cluster={{{where}, worker_timeout_s: {limit_s}}}")
    run = start_corral(tmp_path, "train", "recipe.yaml", "name=hung", OWN_PROCESS, *limits)
    folder = tmp_path / "runs" / "hung"
    run.wait_until(lambda: (folder / "metrics.jsonl").exists() and len(steps_of(folder)) >= 2, LIMIT_S)
    os.kill(engine_processes(tmp_path)[0], signal.SIGSTOP)
    if asked_to_stop:
        run.send(signal.SIGTERM)
    finished = run.wait(60 if asked_to_stop else LIMIT_S)
    assert finished.code == 0, finished.stderr
    assert Ledger(folder / "ledger.jsonl").audit().clean
    if not asked_to_stop:
        assert "showed no sign of life for 8 s (`cluster.worker_timeout_s`) and was killed" in finished.stdout
        assert len(steps_of(folder)) == steps
    assert_engines_end(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64: vLLM has no kernels for small ones."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "heads_of_64", tiny_tokenizer()
    shape = {**SHAPE, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**shape, tie_word_embeddings=True)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(VLLM_PYTHON is None, reason="CORRAL_TEST_VLLM_PYTHON names no interpreter that has vLLM")
@pytest.mark.parametrize(
    ("engine", "placement"),
    [
        ({}, ()),
        ({"tensor_parallel": 2}, ("cluster.devices_per_node=3", APART)),
        ({"tensor_parallel": 2}, ("cluster.devices_per_node=2", "train.parallel.shard=2")),
    ],
    ids=["one process", "two devices apart", "two devices with sharded trainers"],
)
def test_vllm_trains(tmp_path: Path, model: Path, engine: dict[str, Any], placement: tuple[str, ...]) -> None:
    """It samples other tokens than the native engine; what it is given is the same."""
    write_recipe(tmp_path, model)
    chosen = json.dumps({"name": "vllm", "python": VLLM_PYTHON, **engine})
    long = ("schedule.steps=8", "batch.prompts_per_step=8")
    run = start_corral(tmp_path, "train", "recipe.yaml", f"rollout.engine={chosen}", *placement, *long)
    finished = run.wait(LIMIT_S)
    assert finished.code == 0, finished.stderr
    rows = steps_of(tmp_path / "runs" / "tiny")
    assert all(row["transfer/probe_deviation"] < 2e-4 for row in rows)
    assert all(row["policy/mismatch_kl"] < 1e-6 for row in rows)
    assert rows[-1]["reward/mean"] > 2 * rows[0]["reward/mean"]
    assert_engines_end(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON is None, reason="CORRAL_TEST_VLLM_PYTHON names no interpreter that has vLLM")
def test_a_command_of_verl_trains_with_the_vllm_that_it_names(tmp_path: Path, model: Path) -> None:
    question = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1 + 1?"}]}
    rows = [{**question, "reward_model": {"ground_truth": "2"}}] * 8
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    rollout = "actor_rollout_ref.rollout"
    words = ["data.train_files=train.parquet", "data.train_batch_size=4", "data.max_prompt_length=48"]
    words += ["data.max_response_length=8", f"actor_rollout_ref.model.path={model}", "algorithm.adv_estimator=grpo"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.experiment_name=named", "trainer.nnodes=1"]
    words += ["trainer.n_gpus_per_node=1", "trainer.total_training_steps=1", "trainer.logger=console", f"{rollout}.n=2"]
    words += [f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.enforce_eager=True"]
    words += [f"{rollout}.max_num_seqs=8", f"{rollout}.enable_prefix_caching=False"]
    words += [f"+{rollout}.engine_kwargs.vllm.disable_cascade_attn=True"]
    (tmp_path / "train.sh").write_text(shlex.join(["python3", "-m", "verl.trainer.main_ppo", *words]))
    run = start_corral(tmp_path, "migrate", "train.sh", "--train", f"rollout.engine.python={VLLM_PYTHON}")
    finished = run.wait(LIMIT_S)
    assert finished.code == 0, finished.stderr
    [row] = steps_of(tmp_path / "runs" / "named")
    assert row["transfer/probe_deviation"] < 2e-4
    assert row["policy/mismatch_kl"] < 1e-6
