"""The loop learns, and leaves a run folder in which one finds one's way."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from commands import corral
from runs import VALIDATION, rows_of, steps_here, train_here, write_recipe
from tiny_families import save_with_tokenizer

from corral.model.families import FAMILIES, FAST_TYPES
from corral.observe.run_files import read_metrics
from corral.observe.trajectory_store import read_trajectories
from corral.recipe.errors import RunError

PPO = ("algorithm.name=ppo", "critic.optimizer.learning_rate=0.01")


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float:
    return mean(row[name] for row in rows)


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    finished = corral(tmp_path, "train", "recipe.yaml", "logging.trajectories=true", "logging.curve=true", *VALIDATION)
    assert finished.code == 0, finished.stderr
    run = tmp_path / "runs" / "tiny"
    visible = {path.name for path in run.iterdir() if not path.name.startswith(".")}
    folders = {"checkpoints", "trajectories", "logs", "failures"}
    assert visible == folders | {
        "recipe.yaml",
        "plan.txt",
        "plan.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "curve.png",
    }
    measured = [row for row in read_metrics(run / "metrics.jsonl") if "reward/mean" in row]
    assert all(0.05 < row["memory/process_gib"] < 100 for row in measured)
    assert "2 steps = 8 prompts, 32 trajectories" in (run / "plan.txt").read_text()
    assert [row["step"] for row in rows_of(run)] == [0, 1, 2, 2]
    assert {file.name for file in (run / "trajectories").iterdir()} == {
        "step_000000.validation.parquet",
        "step_000001.parquet",
        "step_000002.parquet",
        "step_000002.validation.parquet",
    }
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step_000002"]
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list((run / "failures").iterdir())


def test_what_a_run_says_fits_what_it_did(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    finished = corral(tmp_path, "train", "recipe.yaml", "logging.curve=true", *VALIDATION)
    assert finished.stderr == ""
    for expected in (
        "validation before training",
        "step 2/2",
        "validation after training",
        "curve.png",
        "corral export",
    ):
        assert expected in finished.stdout


def test_a_run_without_a_picture_draws_and_names_none(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    finished = corral(tmp_path, "train", "recipe.yaml", "schedule.steps=1", "logging.curve=false")
    assert "corral export" in finished.stdout
    assert "curve" not in finished.stdout
    assert not (tmp_path / "runs" / "tiny" / "curve.png").exists()


def test_the_recipe_in_the_folder_repeats_the_run(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    corral(tmp_path, "train", "recipe.yaml", "seed=5", "batch.prompts_per_step=2")
    corral(tmp_path, "train", "runs/tiny/recipe.yaml", "name=again")
    assert rows_of(tmp_path / "runs" / "again") == rows_of(tmp_path / "runs" / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [("algorithm.name=grpo",), PPO], ids=["grpo", "ppo"])
def test_reward_rises(tmp_path: Path, tiny_model: Path, algorithm: tuple[str, ...]) -> None:
    steps = steps_here(tmp_path, tiny_model, "schedule.steps=15", *algorithm)
    assert mean_of(steps[:3], "reward/mean") < 0.1
    assert mean_of(steps[-3:], "reward/mean") > 0.3
    assert mean_of(steps[-3:], "policy/entropy") < mean_of(steps[:3], "policy/entropy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("qwen3_5_text", "general"),
        ("mistral-window8", "fast"),
        ("gpt_oss-window8", "fast"),
        ("qwen3_moe", "fast"),
        ("deepseek_v3-v<qk", "fast"),
    ],
)
def test_other_families_learn_too(tmp_path: Path, name: str, path: str) -> None:
    """A hybrid, windows, sinks, a mixture of experts, latent attention."""
    steps = steps_here(tmp_path, save_with_tokenizer(name, tmp_path / "model"), "schedule.steps=15")
    assert f"computed on the {path} path" in corral(tmp_path, "plan", "recipe.yaml").stdout
    assert mean_of(steps[-3:], "reward/mean") > mean_of(steps[:3], "reward/mean") + 0.15
    assert all(abs(row["policy/approx_kl"]) < 0.01 for row in steps[:1])


@pytest.mark.parametrize("old_logprobs", ["engine", "recompute"])
@pytest.mark.slow
def test_a_model_that_engine_and_trainer_compute_differently_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_logprobs: str
) -> None:
    """A hybrid on the fast path, which the guard at load would have refused."""
    model = save_with_tokenizer("qwen3_5_text", tmp_path / "model")
    monkeypatch.setitem(FAST_TYPES, "qwen3_5_text", FAMILIES[0])
    monkeypatch.setattr("corral.model.families.LAYER_TYPES", {"full_attention", "linear_attention"})
    monkeypatch.setattr("corral.model.model_loading.check_model", lambda *_: None)
    monkeypatch.setattr("corral.rollout.native_engine.NativeEngine.check", lambda *_: None)
    with pytest.raises(RunError, match=r"before the first update, engine and trainer disagree .* by \d"):
        steps_here(tmp_path, model, f"algorithm.old_logprobs={old_logprobs}")


def test_a_model_that_is_decoded_without_a_cache_is_trained_and_says_so(tmp_path: Path) -> None:
    write_recipe(tmp_path, save_with_tokenizer("openai-gpt", tmp_path / "model"))
    finished = corral(tmp_path, "train", "recipe.yaml", "schedule.steps=1")
    assert finished.code == 0, finished.stderr
    assert "by a forward pass over the whole sequence" in " ".join((finished.stdout + finished.stderr).split())


@pytest.mark.slow
def test_ppo_has_a_critic_and_a_kl_in_the_reward(tmp_path: Path, tiny_model: Path) -> None:
    steps = steps_here(tmp_path, tiny_model, "schedule.steps=6", "algorithm.kl.coefficient=0.1", *PPO)
    assert steps[0]["kl/mean"] == pytest.approx(0, abs=1e-5)
    assert abs(steps[-1]["kl/mean"]) > 1e-3
    assert all(row["kl/coefficient"] == 0.1 and row["value/loss"] > 0 for row in steps)


def test_only_the_critic_is_trained_while_it_warms_up(tmp_path: Path, tiny_model: Path) -> None:
    steps = steps_here(tmp_path, tiny_model, "schedule.steps=3", "critic.warmup_steps=2", *PPO)
    assert [row["updates/made"] for row in steps] == [0, 0, 1]
    assert [row["value/loss"] > 0 for row in steps] == [True] * 3


def test_the_schedule_of_the_policy_begins_when_the_critic_is_warm(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("schedule.steps=4", "critic.warmup_steps=2", "optimizer.schedule=linear")
    rates = [row.get("policy/learning_rate") for row in steps_here(tmp_path, tiny_model, *overrides, *PPO)]
    assert rates[2:] == pytest.approx([0.01, 0.005])


def test_warm_up_is_a_share_of_the_updates_that_so_many_epochs_have(tmp_path: Path, tiny_model: Path) -> None:
    """40 rows, 4 a step: 5 steps of 2 updates."""
    overrides = ("~schedule.steps", "schedule.epochs=0.5", "batch.updates_per_step=2", "optimizer.warmup_ratio=0.4")
    rates = [row["policy/learning_rate"] for row in steps_here(tmp_path, tiny_model, *overrides)]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.01])


def test_the_score_on_held_out_questions_rises(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, "schedule.steps=12", *VALIDATION)
    before, after = [row["validation/mean@1"] for row in rows_of(run) if "validation/mean@1" in row]
    assert before == 0
    assert after > 0.5


def test_trajectories_hold_what_was_generated_and_trained_on(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, "logging.trajectories=true")
    records = list(read_trajectories(run / "trajectories" / "step_000002.parquet"))
    expected = [(prompt_id, sample) for prompt_id in range(4, 8) for sample in range(4)]
    assert [(record["prompt_id"], record["sample"]) for record in records] == expected
    for record in records:
        assert record["prompt"].startswith("<|start|>user\nWhat is ")
        output = re.sub(r"<pad>|<\|\w+\|>", "", record["response"])
        assert record["reward"] == sum(letter in "aeiou" for letter in output) / 8
        assert set(record["versions"]) == {1}
        length = len(record["response_tokens"])
        assert all(len(record[name]) == length for name in ("generated", "logprobs", "versions", "advantages"))
    step = next(row for row in read_metrics(run / "metrics.jsonl") if row["step"] == 2)
    assert step["reward/mean"] == pytest.approx(mean(record["reward"] for record in records))


CONVERSATION = """
from corral.envs.base import StepResult

class AskTwice:
    async def reset(self, row, seed):
        self.turns = 0
        return row.prompt

    async def step(self, reply):
        self.turns += 1
        reward = sum(letter in "aeiou" for letter in reply) / 8
        again = [{"role": "user", "content": "Again?"}]
        return StepResult(again, reward, done=self.turns == 2, metrics={"turns": 1})

    async def close(self):
        pass
"""


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.slow
def test_conversations_go_through_the_same_loop(tmp_path: Path, tiny_model: Path, algorithm: str) -> None:
    (tmp_path / "talk.py").write_text(CONVERSATION)
    budget = ("rollout.max_turns=2", "rollout.max_response_tokens=60", "rollout.stop=[a, e, i, o, u]")
    overrides = (f"environment.name={tmp_path}/talk.py:AskTwice", *budget, f"algorithm.name={algorithm}")
    for row in steps_here(tmp_path, tiny_model, *overrides):
        assert 1 < row["environment/turns"] <= 2
        assert row["reward/mean"] > 0
        assert row["updates/made"] == 1
        assert row["policy/ratio_deviation"] < 1e-5
