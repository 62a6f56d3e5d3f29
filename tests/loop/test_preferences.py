"""Preference training: pairs of answers go through the same loop, and give what others' trainers give."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import rows_here, rows_of
from tiny import CHARACTERS, TEMPLATE, save_tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from corral.cluster.rehearsal_recipe import cut, prepare
from corral.data.batch import Pack
from corral.loop.train import train
from corral.observe.console import Console
from corral.observe.ledger import Ledger
from corral.observe.trajectory_store import TrajectoryStore
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.training.native_trainer import NativePolicyTrainer

RECIPE = """\
name: preferences
model: {{path: {model}, dtype: float32}}
data:
  train: {{path: {folder}/rows.jsonl}}
  max_prompt_tokens: 100
batch: {{prompts_per_step: 4, max_tokens_per_micro_batch: 250}}
algorithm: {{name: dpo}}
optimizer: {{learning_rate: 0.003, max_gradient_norm: 0.5, betas: [0.9, 0.95], weight_decay: 0.01}}
schedule: {{steps: 12}}
checkpoint: {{at_end: false}}
logging: {{runs: {folder}/runs, trajectories: false, curve: false}}
"""
WITHOUT_LINE_BREAK = TEMPLATE.replace("<|end|>\n", "<|end|>")
"""The tiny template without what stands behind a turn: TRL trains on it, and nobody generates it."""


def texts(number: int) -> list[dict[str, Any]]:
    """Prompts with two answers of different lengths, some of which begin alike."""
    random = np.random.default_rng(0)

    def words(most: int) -> str:
        return "".join(random.choice(list(CHARACTERS[2:]), size=int(random.integers(1, most))))

    return [
        {"prompt": words(20), "chosen": start + words(15), "rejected": start + words(25)}
        for start in (words(4) * int(random.integers(0, 2)) for _ in range(number))
    ]


def conversations(number: int) -> list[dict[str, Any]]:
    """The same as whole conversations, in which the assistant has spoken before."""
    earlier = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]

    def whole(row: dict[str, Any], answer: str) -> list[dict[str, str]]:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]
        return [*earlier, *turns]

    return [{answer: whole(row, answer) for answer in ("chosen", "rejected")} for row in texts(number)]


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    write_rows(tmp_path, conversations(18))
    path = tmp_path / "preferences.yaml"
    path.write_text(RECIPE.format(folder=tmp_path, model=tiny_model))
    return path


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(recipe: Path, *overrides: str) -> list[dict[str, Any]]:
    return rows_here(load_recipe(recipe, overrides))


def column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


NO_CHAT = ("data.chat=false",)
NO_LINE_BREAK = (f"model.chat_template={json.dumps(WITHOUT_LINE_BREAK)}",)
CASES = {
    "dpo": (texts, NO_CHAT, {"beta": 0.2}, {"loss_type": ["sigmoid"], "beta": 0.2}),
    "ipo": (conversations, NO_LINE_BREAK, {"beta": 0.2}, {"loss_type": ["ipo"], "beta": 0.2}),
    "simpo": (
        conversations,
        NO_LINE_BREAK,
        {"beta": 2.0, "gamma": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twelve_steps_and_the_weights_after_them_are_those_of_trl(
    recipe: Path, tiny_model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL pads and computes a prompt twice; Corral computes it once. The reference is the model before training."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import datasets
    import trl
    import trl.experimental.cpo

    make, overrides, options, theirs = CASES[name]
    classes = trl.DPOTrainer, trl.DPOConfig
    if name == "simpo":
        classes = trl.experimental.cpo.CPOTrainer, trl.experimental.cpo.CPOConfig
    write_rows(recipe.parent, make(18))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = WITHOUT_LINE_BREAK
    trainer = classes[0](
        model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        args=classes[1](
            output_dir=str(recipe.parent / "trl"), use_cpu=True, bf16=False, fp16=False, report_to=[], seed=0,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=12, learning_rate=0.003,
            lr_scheduler_type="constant", warmup_steps=0, adam_beta2=0.95, weight_decay=0.01, max_grad_norm=0.5,
            logging_steps=1, logging_nan_inf_filter=False, save_strategy="no", max_length=None, disable_tqdm=True,
            gradient_checkpointing=False, train_sampling_strategy="sequential", **theirs,
        ),
        train_dataset=datasets.Dataset.from_list([make(18)[i % 18] for i in range(48)]),
        processing_class=tokenizer,
    )  # fmt: skip
    # Every parameter decays in Corral, as in torch.optim.AdamW; transformers leaves out norms by default.
    trainer.create_optimizer()
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.01
    trainer.train()
    expected = [line for line in trainer.state.log_history if "loss" in line]
    changes = [f"algorithm.name={name}", *(f"algorithm.loss.{option}={value}" for option, value in options.items())]
    loaded = load_recipe(recipe, [*changes, "data.shuffle=false", "checkpoint.at_end=true", *overrides])
    run = train(loaded, make_plan(loaded), Console(io.StringIO()))
    rows = rows_of(run)
    names = {
        "policy/loss": "loss",
        "policy/gradient_norm": "grad_norm",
        "preference/margin": "rewards/margins",
        "preference/chosen_reward": "rewards/chosen",
    }
    if name != "simpo":  # there TRL has means over tokens
        names["preference/rejected_logprob"] = "logps/rejected"
    for ours, theirs in names.items():
        assert column(rows, ours) == pytest.approx(column(expected, theirs), abs=1e-4), ours
    assert column(rows, "preference/accuracy")[1:] == column(expected, "rewards/accuracies")[1:]  # the first are ties
    assert rows[-1]["policy/loss"] < rows[0]["policy/loss"] - 0.1
    trained = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step_000012").state_dict()
    for key, weight in trainer.model.state_dict().items():
        torch.testing.assert_close(trained[key], weight, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_trajectories_have_the_implicit_rewards_and_nothing_of_an_engine(recipe: Path) -> None:
    changes = ("schedule.steps=2", "batch.updates_per_step=2", "algorithm.loss.beta=0.25", "logging.trajectories=true")
    loaded = load_recipe(recipe, changes)
    run = train(loaded, make_plan(loaded), Console(io.StringIO()))
    samples = list(TrajectoryStore(run / "trajectories").records(2))
    assert [one["is_chosen"] for one in samples] == 4 * [True, False]
    for one in samples:
        assert one["reward"] == pytest.approx(0.25 * (one["trained_logprob"] - one["reference_logprob"]), abs=1e-5)
        assert one["trained_logprob"] == pytest.approx(sum(one["trained_logprobs"]), abs=1e-5)
        assert not one.keys() & {"logprobs", "versions"}
    margins = [
        chosen["reward"] - rejected["reward"] for chosen, rejected in zip(samples[::2], samples[1::2], strict=True)
    ]
    assert np.mean(margins) == pytest.approx(rows_of(run)[-1]["preference/margin"], abs=1e-5)
    assert np.ptp(margins) > 0


@pytest.mark.slow
def test_the_update_does_not_depend_on_micro_batches_nor_on_shared_beginnings(recipe: Path) -> None:
    """The general path computes every answer by itself, so no prompt is shared there. Two updates a step cut between
    pairs."""
    common = ("schedule.steps=3", "batch.updates_per_step=2")
    small = metrics(recipe, *common, "batch.max_tokens_per_micro_batch=200")
    for change in ("batch.max_tokens_per_micro_batch=4000", "model.implementation=general"):
        other = metrics(recipe, *common, change)
        for name in ("policy/loss", "policy/gradient_norm", "policy/entropy", "preference/margin"):
            assert column(other, name) == pytest.approx(column(small, name), abs=1e-5)


@pytest.mark.slow
def test_the_reference_computes_each_answer_once(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 pairs, of which 4 make a step: all were computed in the fifth, in which the second epoch begins."""
    computed: list[int] = []
    compute = NativePolicyTrainer.compute_logprobs

    def counting(trainer: NativePolicyTrainer, packs: Sequence[Pack | None]) -> Iterator[torch.Tensor]:
        if trainer.optimizer is None:  # the reference, which is never trained
            computed.append(sum(len(pack.rows) for pack in packs if pack is not None))
        return compute(trainer, packs)

    monkeypatch.setattr(NativePolicyTrainer, "compute_logprobs", counting)
    rows = metrics(
        recipe, "schedule.steps=10", f"data.validation.path={recipe.parent}/rows.jsonl", "validation.every=9"
    )
    assert computed == [36]  # the validation before training asks for all of them
    rows = metrics(recipe, "schedule.steps=10")
    assert computed[1:] == [8, 8, 8, 8, 4]
    assert column(rows, "samples/reference_computed") == [8, 8, 8, 8, 4, 0, 0, 0, 0, 0]


@pytest.mark.slow
def test_a_run_that_stops_goes_on_as_if_nothing_had_happened(recipe: Path) -> None:
    """In the second epoch, with what the reference computed in the first."""
    changes = ("checkpoint.every=5", "optimizer.warmup_steps=9", "batch.updates_per_step=2", "schedule.steps=9")
    changes += (f"data.validation.path={recipe.parent}/rows.jsonl", "validation.every=7", "logging.trajectories=true")

    expected = metrics(recipe, *changes, "name=whole")
    whole = recipe.parent / "runs" / "whole"
    again = load_recipe(recipe, [*changes, "name=again"])
    resumed = rows_here(again, resume_from=whole / "checkpoints" / "step_000005")
    assert resumed == [row for row in expected if row["step"] > 5]
    assert column(resumed, "samples/reference_computed") == [0, 0, 0, 0]
    audit = Ledger(whole / "ledger.jsonl").audit()
    assert audit.clean
    assert audit.as_dict()["trained"] == 36


def test_adapters_are_compared_with_the_model_without_them(recipe: Path) -> None:
    lora = ("model.lora.rank=4", "schedule.steps=8", "optimizer.learning_rate=0.02")
    rows = metrics(recipe, *lora)
    assert column(rows, "preference/margin")[0] == pytest.approx(0, abs=1e-5)
    assert column(rows, "policy/loss")[0] == pytest.approx(np.log(2), abs=1e-5)
    assert column(rows, "preference/margin")[-1] > 0.03
    assert set(make_plan(load_recipe(recipe, lora)).placement.roles) == {"actor"}


def test_another_reference_is_a_model_of_its_own_with_the_same_tokens(recipe: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny_model(other, seed=1)
    rows = metrics(recipe, f"reference.path={other}", "schedule.steps=1")
    assert abs(rows[0]["preference/chosen_reward"]) > 1e-3
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": ', '"\u00e4": '))
    with pytest.raises(UserError, match=r"reference.path: .* has other tokens than .*: 'a' is number"):
        metrics(recipe, f"reference.path={other}")


def test_a_loss_of_a_user_compares_pairs(recipe: Path) -> None:
    """A hinge on the margin (SLiC), which is at first 1 for every pair."""
    (recipe.parent / "own.py").write_text(
        "import torch, corral\n"
        "from corral.algorithms import ragged\n"
        "@corral.loss(trains_on_rows=True, trains_on_pairs=True, needs_reference=True, uses_old_policy=False,\n"
        "             aggregation='seq_mean_token_mean')\n"
        "def hinge(terms, options):\n"
        "    gain = ragged.segment_sum(terms.reference_log_ratio, terms.mask, terms.offsets)\n"
        "    return ragged.expand(torch.relu(1 - terms.margin(gain)), terms.offsets)\n"
    )
    rows = metrics(recipe, f"algorithm.loss={recipe.parent}/own.py:hinge", "schedule.steps=6")
    assert column(rows, "policy/loss")[0] == pytest.approx(1, abs=1e-5)
    assert column(rows, "policy/loss")[-1] < 0.9


def test_it_is_rehearsed_in_one_process(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    held_out = f"data.validation.path={recipe.parent}/rows.jsonl"
    rehearsal = cut(load_recipe(recipe, [held_out, "batch.updates_per_step=4"]), recipe.parent / "small")
    prepare(rehearsal)
    rows = rows_here(rehearsal.recipe)
    assert column(rows, "samples/trajectories") == [8]
    assert len(column(rows, "validation/accuracy")) == 1


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_two_processes_compute_the_loss_of_one(recipe: Path) -> None:
    """Parameters sharded, pairs split, also where there are fewer pairs than processes: FSDP over gloo, started by Ray
    on this machine."""
    validation = (f"data.validation.path={recipe.parent}/rows.jsonl", "validation.max_prompts=5", "schedule.steps=4")
    for pairs in (3, 1):
        changes = (*validation, f"batch.prompts_per_step={pairs}")
        here = metrics(recipe, *changes)
        there = metrics(recipe, *changes, "cluster.devices_per_node=2")
        for name in ("policy/loss", "policy/gradient_norm", "preference/margin", "validation/loss"):
            assert len(column(here, name)) == (2 if name.startswith("validation") else 4)
            assert column(there, name) == pytest.approx(column(here, name), abs=1e-5)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo"])
@pytest.mark.slow
def test_a_model_learns_which_answers_are_preferred(recipe: Path, name: str) -> None:
    """Which begin with "yes", whatever follows."""
    random = np.random.default_rng(1)

    def row() -> dict[str, str]:
        question, one, other = ("".join(random.choice(list("abcdefgh"), size=6)) for _ in range(3))
        return {"prompt": question, "chosen": f"yes {one}", "rejected": f"no {other}"}

    write_rows(recipe.parent, [row() for _ in range(64)])
    (recipe.parent / "held_out.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(32)))
    held_out = f"data.validation.path={recipe.parent}/held_out.jsonl"
    rows = metrics(
        recipe, held_out, f"algorithm.name={name}", "batch.prompts_per_step=8", "schedule.epochs=2", "~schedule.steps"
    )
    before, after = (row for row in rows if "validation/accuracy" in row)
    assert before["validation/accuracy"] < 0.85
    assert after["validation/accuracy"] >= 0.95
    assert after["validation/loss"] < before["validation/loss"]
    assert after["validation/chosen_reward"] > after["validation/rejected_reward"]
