"""Supervised fine-tuning: rows with answers go through the same loop, and give what others' trainers give."""

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import corral, start_corral
from runs import rows_of, write_recipe
from tiny import CHARACTERS, TEMPLATE, tiny_tokenizer

from corral.observe.ledger import Ledger
from corral.observe.trajectory_store import read_trajectories
from corral.runtime.model_workers import ActorWorker

RECIPE = """\
name: sft
model: {{path: {model}, dtype: float32}}
data:
  train: {{path: {folder}/rows.jsonl}}
  max_prompt_tokens: 200
batch: {{prompts_per_step: 4, max_tokens_per_micro_batch: 400}}
algorithm: {{name: sft}}
optimizer: {{learning_rate: 0.003, max_gradient_norm: 0.5, betas: [0.9, 0.95], weight_decay: 0.01}}
schedule: {{steps: 20}}
checkpoint: {{at_end: false}}
logging: {{runs: {folder}/runs, trajectories: false, curve: false}}
"""
MARKED = TEMPLATE.replace(
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n",
    "<|start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>"
    "{% endif %}{{ '\\n' }}",
)
"""The tiny template, which marks what the model says."""
assert MARKED != TEMPLATE


def conversations(number: int) -> list[dict[str, Any]]:
    """Rows of one to three turns of different lengths, all with the same system message."""
    random = np.random.default_rng(0)

    def words(most: int) -> str:
        return "".join(random.choice(list(CHARACTERS[1:]), size=int(random.integers(1, most))))

    rows = []
    for _ in range(number):
        messages = [{"role": "system", "content": "Answer shortly, and be kind."}]
        for _ in range(int(random.integers(1, 4))):
            messages += [{"role": "user", "content": words(12)}, {"role": "assistant", "content": words(20)}]
        rows.append({"messages": messages})
    return rows


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations(30)))
    path = tmp_path / "sft.yaml"
    path.write_text(RECIPE.format(folder=tmp_path, model=tiny_model))
    return path


def train_sft(recipe: Path, *overrides: str) -> list[dict[str, Any]]:
    """The rows of metrics of the run, whose name may be among the overrides."""
    finished = corral(recipe.parent, "sft", str(recipe), *overrides)
    assert finished.code == 0, finished.stdout + finished.stderr
    name = next((text.removeprefix("name=") for text in overrides if text.startswith("name=")), "sft")
    return rows_of(recipe.parent / "runs" / name)


def losses(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["policy/loss"] for row in rows if "policy/loss" in row]


@pytest.mark.slow
def test_twenty_steps_are_those_of_trl(recipe: Path, tiny_model: Path) -> None:
    """TRL pads and masks; Corral computes the system message once. Losses and gradient norms are the same."""
    import datasets
    import trl
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = MARKED
    shown = [conversations(30)[i % 30] for i in range(80)]
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        args=trl.SFTConfig(
            output_dir=str(recipe.parent / "trl"), use_cpu=True, bf16=False, fp16=False, report_to=[], seed=0,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=20, learning_rate=0.003,
            lr_scheduler_type="constant", warmup_steps=0, adam_beta2=0.95, weight_decay=0.01, max_grad_norm=0.5,
            logging_steps=1, logging_nan_inf_filter=False, save_strategy="no", assistant_only_loss=True, packing=False,
            max_length=None, gradient_checkpointing=False, disable_tqdm=True, dataset_num_proc=None,
            train_sampling_strategy="sequential",
        ),
        train_dataset=datasets.Dataset.from_list(shown),
        processing_class=tokenizer,
    )  # fmt: skip
    # Every parameter decays in Corral, as in torch.optim.AdamW; transformers leaves out norms by default.
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.01
    trainer.train()
    expected = [line for line in trainer.state.log_history if "loss" in line]
    rows = train_sft(recipe, "data.shuffle=false")
    assert losses(rows) == pytest.approx([line["loss"] for line in expected], abs=1e-4)
    norms = [row["policy/gradient_norm"] for row in rows]
    assert norms == pytest.approx([line["grad_norm"] for line in expected], abs=1e-3)
    assert losses(rows)[-1] < losses(rows)[0] - 0.1


@pytest.mark.slow
def test_the_update_does_not_depend_on_micro_batches_nor_on_shared_beginnings(recipe: Path) -> None:
    """The general path computes every row by itself, so no beginning is shared there."""
    small = train_sft(recipe, "batch.max_tokens_per_micro_batch=200", "schedule.steps=4")
    for change in ("batch.max_tokens_per_micro_batch=4000", "model.implementation=general"):
        other = train_sft(recipe, change, "schedule.steps=4", f"name={change.split('.')[0]}")
        for name in ("policy/loss", "policy/gradient_norm", "policy/entropy"):
            assert [row[name] for row in other] == pytest.approx([row[name] for row in small], abs=1e-5)


def test_other_aggregations_weigh_rows_instead_of_tokens(recipe: Path) -> None:
    """By hand: the mean over rows of each one's mean, of what `policy/nll` is the mean over tokens."""
    by_row = train_sft(recipe, "algorithm.aggregation=seq_mean_token_mean", "schedule.steps=1")
    assert by_row[0]["policy/loss"] != pytest.approx(by_row[0]["policy/nll"], abs=1e-6)
    one = ("batch.prompts_per_step=1", "schedule.steps=4", "optimizer.learning_rate=1e-12")
    alone = train_sft(recipe, *one, "name=alone")
    assert by_row[0]["policy/loss"] == pytest.approx(np.mean(losses(alone)), abs=1e-5)


def hang_after_step_6() -> None:
    """Once its checkpoint is there."""
    accumulate = ActorWorker.accumulate

    def held(self: ActorWorker, *arguments: Any) -> Any:
        while Path("runs/sft/checkpoints/step_000006").is_dir():
            time.sleep(1)
        return accumulate(self, *arguments)

    ActorWorker.accumulate = held  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(recipe: Path) -> None:
    changes = ("checkpoint.every=3", "batch.updates_per_step=2", "optimizer.warmup_steps=9", "schedule.epochs=1.5")
    changes += ("~schedule.steps",)  # 30 rows of which 4 make a step: 12 steps, in two epochs
    expected = train_sft(recipe, *changes, "name=whole")
    run = start_corral(recipe.parent, "sft", str(recipe), *changes, before=hang_after_step_6)
    run.wait_until((recipe.parent / "runs" / "sft" / "checkpoints" / "step_000006").is_dir)
    run.send(signal.SIGKILL)
    assert run.wait().code == -signal.SIGKILL
    assert train_sft(recipe, *changes) == expected
    assert expected[-1]["samples/epoch"] == 48 / 30
    audit = Ledger(recipe.parent / "runs" / "sft" / "ledger.jsonl").audit()
    assert audit.clean
    assert audit.as_dict()["trained"] == 48


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_two_processes_compute_the_loss_of_one(recipe: Path) -> None:
    """Parameters sharded, rows split: FSDP over gloo, started by Ray on this machine."""
    validation = (f"data.validation.path={recipe.parent}/rows.jsonl", "validation.max_prompts=5", "schedule.steps=4")
    here = train_sft(recipe, *validation)
    there = train_sft(recipe, *validation, "name=there", "cluster.devices_per_node=2")
    for name in ("policy/loss", "policy/gradient_norm", "validation/loss"):
        own, other = ([row[name] for row in rows if name in row] for rows in (here, there))
        assert len(own) == (2 if name.startswith("validation") else 4)
        assert other == pytest.approx(own, abs=1e-5)


LEARNING = (
    "data.train={path: arithmetic:addition, size: 55, options: {digits: 1, question: '{expression}'}}",
    "data.validation={path: arithmetic:addition, size: 55, options: {digits: 1, question: '{expression}'}}",
    "environment.reward.name=exact",
    "rollout.max_response_tokens=4",
    "batch.prompts_per_step=55",
    "optimizer.learning_rate=0.01",
    "optimizer.max_gradient_norm=1",
    "checkpoint.at_end=true",
)


@pytest.mark.slow
def test_a_model_learns_what_it_is_shown_and_rl_goes_on_from_its_checkpoint(recipe: Path) -> None:
    rows = train_sft(recipe, *LEARNING, "schedule.steps=150")
    before, after = [row for row in rows if "validation/loss" in row]
    assert before["validation/mean@1"] == 0
    assert before["validation/loss"] == pytest.approx(losses(rows)[0], abs=1e-4)  # the same rows, the same model
    assert after["validation/loss"] < 0.5
    assert after["validation/mean@1"] > 0.6
    assert after["validation/perplexity"] == pytest.approx(np.exp(after["validation/loss"]))
    checkpoint = recipe.parent / "runs" / "sft" / "checkpoints" / "step_000150"
    rl = write_recipe(recipe.parent, checkpoint)
    change = (
        "name=rl",
        "environment.reward.name=exact",
        "rollout.max_response_tokens=4",
        "data.train.options.digits=1",
    )
    question = ("data.train.options.question='{expression}'", *[text for text in LEARNING if "validation" in text])
    finished = corral(recipe.parent, "train", str(rl), f"model.path={checkpoint}", *change, *question)
    assert finished.code == 0, finished.stdout + finished.stderr
    start = next(row for row in rows_of(recipe.parent / "runs" / "rl") if "validation/mean@1" in row)
    assert start["validation/mean@1"] == after["validation/mean@1"]


def test_no_engine_is_built_where_nothing_is_generated(recipe: Path) -> None:
    rows, where = recipe.parent / "rows.jsonl", "data.validation.sources"
    sources = (f"{where}.first={{path: {rows}, max_rows: 5}}", f"{where}.all={{path: {rows}}}")
    validation = (*sources, "validation.every=1", "schedule.steps=2")
    finished = corral(recipe.parent, "sft", str(recipe), *validation)
    assert finished.code == 0, finished.stderr
    assert "no engine is built" in finished.stdout
    rows = rows_of(recipe.parent / "runs" / "sft")
    assert [row["step"] for row in rows if "validation/loss" in row] == [0, 1, 2]
    by_source = [rows[0][f"validation/{name}/loss"] for name in ("first", "all")]
    assert min(by_source) < rows[0]["validation/loss"] < max(by_source)
    assert "corral evaluate" not in finished.stdout
    refused = corral(recipe.parent, "evaluate", str(recipe), *validation)
    assert (refused.code, "there is no reward to score" in refused.stderr) == (2, True)


def test_trajectories_show_which_tokens_were_trained_on(recipe: Path) -> None:
    train_sft(recipe, "schedule.steps=1", "logging.trajectories=true", "data.shuffle=false")
    folder = recipe.parent / "runs" / "sft" / "trajectories"
    for record, row in zip(read_trajectories(folder / "step_000001.parquet"), conversations(4), strict=True):
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        tokens = [t for t, own in zip(record["response_tokens"], record["generated"], strict=True) if own]
        assert tiny_tokenizer().decode(tokens) == "".join(f"{text}<|end|>" for text in said)


def test_it_is_rehearsed_in_one_process(recipe: Path) -> None:
    finished = corral(recipe.parent, "rehearse", str(recipe), "algorithm.name=sft", "--quick")
    assert finished.code == 0, finished.stdout + finished.stderr
    assert "step 1/1" in finished.stdout
