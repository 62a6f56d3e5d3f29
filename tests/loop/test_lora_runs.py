"""Runs that train adapters: the same loop, checkpoints and transfer; what does not arrive is noticed."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import pytest
import torch
from commands import corral
from peft import PeftModel
from runs import VALIDATION, rows_of, same_outcome, steps_here, train_here, write_recipe
from same_rows import assert_same
from tiny_families import save_with_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from corral.api import checked_plan
from corral.loop.train import evaluate
from corral.observe.console import Console
from corral.recipe.errors import RunError, UserError
from corral.recipe.load import load_recipe
from corral.recipe.shape import ModelShape
from corral.rollout.native_engine import NativeEngine
from corral.training.checkpoint import export_model
from corral.training.native_trainer import NativePolicyTrainer

LORA = ("model.lora={rank: 4}", "optimizer.learning_rate=0.01")
ON_RAY = ("cluster.devices_per_node=2", "cluster.placement={rollout: 0, actor: 1}")


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


@pytest.mark.slow
def test_only_adapters_are_trained_and_saved(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, *LORA)
    checkpoint = max((run / "checkpoints").glob("step_*"))
    assert not list(checkpoint.glob("model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, checkpoint)
    moved = [p.abs().max() for name, p in theirs.named_parameters() if "lora_B" in name]
    assert len(moved) > 0
    assert all(most > 1e-4 for most in moved)
    steps = [row for row in rows_of(run) if "policy/gradient_norm" in row]
    assert all(row["policy/mismatch_max"] < 1e-3 for row in steps)
    export_model(checkpoint, tmp_path / "adapter", "auto")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    export_model(checkpoint, tmp_path / "merged", "auto", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.tensor([[5, 9, 33, 7, 60]])
    torch.testing.assert_close(merged(tokens).logits, theirs.eval()(tokens).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="has no adapters"):
        export_model(
            train_here(tmp_path, tiny_model, "name=full") / "checkpoints" / "step_000002",
            tmp_path / "x",
            "auto",
            merge=True,
        )


@pytest.mark.slow
def test_a_run_resumes_as_if_nothing_had_happened(tmp_path: Path, tiny_model: Path) -> None:
    whole = train_here(tmp_path, tiny_model, *LORA, "name=whole", "schedule.steps=4")
    train_here(tmp_path, tiny_model, *LORA, "name=parts", "schedule.steps=4", "checkpoint.every=2")
    for later in ("step_000003", "step_000004"):
        folder = tmp_path / "runs" / "parts" / "checkpoints" / later
        if folder.exists():
            folder.rename(folder.with_name(f"x{later}"))
    parts = train_here(tmp_path, tiny_model, *LORA, "name=parts", "schedule.steps=4", "checkpoint.every=2")
    assert same_outcome(whole, parts, 4)


@pytest.mark.slow
def test_the_reference_is_the_actor_without_adapters(tmp_path: Path, tiny_model: Path) -> None:
    kl = ("algorithm.kl.where=loss", "algorithm.kl.coefficient=0.1", "schedule.steps=3")
    ours = steps_here(folder(tmp_path, "a"), tiny_model, *LORA, *kl)
    a_model = steps_here(folder(tmp_path, "b"), tiny_model, *LORA, *kl, f"reference.path={tiny_model}")
    assert [row["kl/mean"] for row in ours] == pytest.approx([row["kl/mean"] for row in a_model], abs=1e-6)
    assert ours[-1]["kl/mean"] > 0


def test_a_checkpoint_with_adapters_is_gone_on_from_in_a_plan_a_run_and_an_evaluation(
    tmp_path: Path, tiny_model: Path
) -> None:
    [checkpoint] = (train_here(tmp_path, tiny_model, *LORA, "schedule.steps=1") / "checkpoints").glob("step_*")
    for lora in (LORA, ()):  # these very adapters, or a whole model that they are merged into
        recipe = load_recipe(tmp_path / "recipe.yaml", [f"model.path={checkpoint}", *lora])
        assert checked_plan(recipe).shape == ModelShape.read(str(tiny_model))
        assert steps_here(tmp_path, checkpoint, *lora, f"name=again{len(lora)}", "schedule.steps=1")
    assert evaluate(load_recipe(tmp_path / "recipe.yaml", VALIDATION), str(checkpoint), Console(io.StringIO()))


def test_a_critic_has_adapters_too(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, *LORA, "algorithm.name=ppo")
    checkpoint = max((run / "checkpoints").glob("step_*"))
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert files["critic/model.safetensors"]["size"] < files["actor/optimizer.safetensors"]["size"]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_two_processes_send_adapters_and_nothing_else(tmp_path: Path, tiny_model: Path) -> None:
    here = steps_here(folder(tmp_path, "here"), tiny_model, *LORA)
    there = steps_here(folder(tmp_path, "there"), tiny_model, *LORA, *ON_RAY)
    assert_same(there, here)


OWN_PROCESS = "rollout.engine={name: native, own_process: true}"


@pytest.mark.slow
def test_an_engine_in_its_own_process_gets_merged_weights(tmp_path: Path, tiny_model: Path) -> None:
    same = ("algorithm.correction=none", "algorithm.old_logprobs=engine")
    here = steps_here(folder(tmp_path, "here"), tiny_model, *LORA, *same)
    there = steps_here(folder(tmp_path, "there"), tiny_model, *LORA, OWN_PROCESS, *same)
    for row, other in zip(here, there, strict=True):
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], abs=1e-5)
        assert other["transfer/probe_deviation"] < 2e-4


@pytest.mark.slow
def test_an_engine_in_its_own_process_resumes_with_the_adapters(tmp_path: Path, tiny_model: Path) -> None:
    """It loads the base model by itself: its first log-probs would be those of the bare model."""
    options = (*LORA, OWN_PROCESS, "checkpoint.every=1")
    train_here(tmp_path, tiny_model, *options, "schedule.steps=2", "optimizer.learning_rate=0.1")
    run = train_here(tmp_path, tiny_model, *options, "schedule.steps=3", "optimizer.learning_rate=0.1")
    third = [row for row in rows_of(run) if "policy/gradient_norm" in row][-1]
    assert third["step"] == 3
    assert third["policy/mismatch_max"] < 1e-3
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), [*options, *VALIDATION])
    with pytest.raises(UserError, match="is an adapter, and native in a process of its own would load its"):
        evaluate(recipe, str(run / "checkpoints" / "step_000003"), Console(io.StringIO()))


@pytest.mark.slow
def test_adapters_that_do_not_arrive_end_the_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has its own copy, in bfloat16, as where trainers are sharded: the probe alone would not see it."""
    monkeypatch.setattr(NativePolicyTrainer, "whole_model", None)
    apart = ("model.dtype=bfloat16", "schedule.steps=2")
    assert len(steps_here(tmp_path, tiny_model, *LORA, *apart)) == 2

    def lose(engine: NativeEngine, weights: Iterable[tuple[str, Tensor]], version: int) -> float:
        engine.version = version
        return float(sum(0 for _ in weights))

    monkeypatch.setattr(NativeEngine, "_replace_weights", lose)
    with pytest.raises(
        RunError, match=r"after the transfer of version 1 .* has other adapters than the trainer: 14 of 28 differ"
    ):
        steps_here(tmp_path, tiny_model, *LORA, *apart)


def learn(folder: Path, family: str, *options: str) -> Path:
    """The last checkpoint of 15 steps with a model of the family, in which rewards rise."""
    model = save_with_tokenizer(family, folder / "model")
    run = train_here(folder, model, *options, "optimizer.learning_rate=0.01", "schedule.steps=15")
    rewards = [row["reward/mean"] for row in rows_of(run) if "reward/mean" in row]
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.15
    differences = [row["policy/mismatch_max"] for row in rows_of(run) if "policy/mismatch_max" in row]
    assert max(differences) < 1e-3
    return max((run / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_adapters_of_experts_alone_learn(tmp_path: Path) -> None:
    experts = "model.lora={rank: 8, targets: [experts.gate_up_proj, experts.down_proj]}"
    checkpoint = learn(tmp_path, "qwen3_moe", experts)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), checkpoint).eval()
    export_model(checkpoint, tmp_path / "merged", "auto", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.tensor([[5, 9, 33, 7, 60]])
    torch.testing.assert_close(merged(tokens).logits, theirs(tokens).logits, atol=2e-4, rtol=1e-4)
    whole = dict(theirs.merge_and_unload().named_parameters())
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, whole[name], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_adapters_beside_weights_in_four_bits_learn(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    checkpoint = learn(tmp_path, "llama", "model.lora={rank: 8}", "model.quantization.bits=4")
    finished = corral(tmp_path, "export", str(checkpoint), str(tmp_path / "merged"), "--merge")
    assert "its weights are those of 4 bits" in finished.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.model_type == "llama"
