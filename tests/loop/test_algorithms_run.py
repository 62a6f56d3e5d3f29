"""Every algorithm, and every option of one, goes through the same loop."""

import json
import re
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
from runs import steps_here, steps_in_mode, steps_of, train_here
from tiny import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from corral.observe.ledger import Ledger
from corral.observe.trajectory_store import read_trajectories
from corral.recipe.errors import RunError
from corral.recipe.parts import PRESETS
from corral.runtime.model_workers import LossStats

RARE = ("environment.reward.name=regex", "environment.reward.options.pattern=a|e|i|o|u", "batch.samples_per_prompt=2")
"""A reward that the random model earns about every other time: many groups of two have equal rewards."""
NEVER = ("environment.reward.name=regex", "environment.reward.options.pattern=nothing like it")
ALWAYS = ("environment.reward.name=regex", "environment.reward.options.pattern=^")
IN_TWO_MODES = pytest.mark.parametrize("pipelined", [False, True], ids=["synchronous", "pipelined"])


def trajectories_in(folder: Path) -> list[dict[str, Any]]:
    """Trajectories of the only step of the only run."""
    [file] = folder.glob("runs/*/trajectories/step_000001.parquet")
    return list(read_trajectories(file))


# Those that train on rows and that need a teacher have their own tests.
WITH_ROLLOUTS = [name for name, preset in PRESETS.items() if name != "distill" and not preset.trains_on_rows]


@pytest.mark.parametrize("name", WITH_ROLLOUTS)
def test_algorithm_trains(tmp_path: Path, tiny_model: Path, name: str) -> None:
    steps = steps_here(tmp_path, tiny_model, f"algorithm.name={name}")
    assert [row["updates/made"] for row in steps] == [1, 1]
    assert all(row["policy/gradient_norm"] > 0 for row in steps)


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo"])
@pytest.mark.slow
def test_several_updates_and_passes(tmp_path: Path, tiny_model: Path, name: str) -> None:
    overrides = ("batch.updates_per_step=3", "batch.ppo_epochs=2", "optimizer.learning_rate=0.003")
    steps = steps_here(tmp_path, tiny_model, f"algorithm.name={name}", *overrides)
    assert [row["updates/made"] + row["updates/empty"] for row in steps] == [6, 6]
    assert all(row["policy/ratio_deviation"] > 1e-3 for row in steps)  # the later updates are off-policy


def test_the_loss_of_a_router_is_trained_where_rewards_are_equal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    with torch.no_grad():  # all tokens have something in common, and the first expert is chosen for it
        model.model.embed_tokens.weight[:, 0] += 0.1
        for layer in model.model.layers:
            layer.mlp.gate.weight[0, 0] += 0.04
    model.save_pretrained(tmp_path / "mixture")
    tiny_tokenizer().save_pretrained(tmp_path / "mixture")
    overrides = (*ALWAYS, "train.router_aux_loss_coef=0.5", "optimizer.learning_rate=0.001")
    first, last = steps_here(tmp_path, tmp_path / "mixture", *overrides)
    assert 0.5 * 2 < last["policy/router_loss"] < first["policy/router_loss"]  # two experts: 2 is the least there is
    assert all(1 < row["experts/load_max"] <= 2 for row in (first, last))  # two of four experts for each token
    assert all(row["experts/unused"] < 0.5 for row in (first, last))


@pytest.mark.slow
def test_dynamic_sampling_replaces_zero_variance_groups(tmp_path: Path, tiny_model: Path) -> None:
    steps = steps_here(tmp_path, tiny_model, "algorithm.name=dapo", *RARE, "schedule.steps=4")
    assert any(row.get("samples/dropped_groups", 0) > 0 for row in steps)
    assert any(row.get("samples/rounds", 1) > 1 for row in steps)
    assert [row["samples/trajectories"] for row in steps] == [8] * 4
    assert [row["samples/equal_groups"] for row in steps] == [0] * 4


def test_dynamic_sampling_goes_on_with_what_it_has_after_max_rounds(tmp_path: Path, tiny_model: Path) -> None:
    limit = "algorithm.dynamic_sampling.max_rounds=1"
    steps = steps_here(tmp_path, tiny_model, "algorithm.name=dapo", *RARE, limit)
    assert 0 < min(row["samples/trajectories"] for row in steps) < 8


def test_dynamic_sampling_says_so_when_nothing_teaches(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(RunError, match=re.escape("found no group with different rewards in 3 rounds")):
        steps_here(tmp_path, tiny_model, "algorithm.name=dapo", *NEVER, "algorithm.dynamic_sampling.max_rounds=3")


def test_a_step_that_teaches_nothing_changes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    steps = steps_here(tmp_path, tiny_model, *NEVER)
    assert [(row["updates/made"], row["updates/empty"]) for row in steps] == [(0, 1), (0, 1)]
    assert [row["samples/equal_groups"] for row in steps] == [1, 1]


def test_remax_compares_with_the_greedy_answer(tmp_path: Path, tiny_model: Path) -> None:
    """Of the random model that is a line break eight times, worth nothing: the advantage is the reward itself."""
    run = train_here(tmp_path, tiny_model, "algorithm.name=remax", "logging.trajectories=true", "schedule.steps=1")
    for record in read_trajectories(run / "trajectories" / "step_000001.parquet"):
        assert record["advantages"] == pytest.approx([record["reward"]] * len(record["advantages"]))


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.slow
def test_adaptive_kl_moves_its_coefficient(tmp_path: Path, tiny_model: Path, where: str) -> None:
    kl = (f"algorithm.kl.where={where}", "algorithm.kl.controller=adaptive", "algorithm.kl.controller.horizon=20")
    target = ("algorithm.kl.controller.target=1e-6", "algorithm.kl.estimator=k3")
    steps = steps_here(tmp_path, tiny_model, *kl, *target, "schedule.steps=4")
    coefficients = [row["kl/coefficient"] for row in steps]
    assert coefficients[0] == 0.001
    assert coefficients[1] < coefficients[0]  # at first the policy is the reference
    assert coefficients[3] > coefficients[2] > coefficients[1]  # and then farther from it than the target


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "icepop", "rejection"])
@pytest.mark.slow
def test_correction_of_recomputed_log_probs(tmp_path: Path, tiny_model: Path, name: str) -> None:
    overrides = (f"algorithm.correction.name={name}", "algorithm.old_logprobs=recompute")
    for row in steps_here(tmp_path, tiny_model, *overrides):
        assert row["correction/ratio_mean"] == pytest.approx(1, abs=1e-5)  # the engine computes what the trainer does
        assert row["correction/dropped_fraction"] == 0
        assert row["updates/made"] == 1


@IN_TWO_MODES
def test_rejected_tokens_leave_the_counts_of_the_loss(tmp_path: Path, tiny_model: Path, pipelined: bool) -> None:
    rejection = ["algorithm.correction.name=rejection", "algorithm.old_logprobs=recompute", "schedule.steps=1"]
    rejection += ["algorithm.correction.floor=1", "algorithm.correction.cap=1.1"]  # what rounding makes of 1 decides
    [row] = steps_in_mode(tmp_path, tiny_model, pipelined, *rejection, "algorithm.correction.count_dropped=false")
    assert 0 < row["correction/dropped_fraction"] < 1
    assert row["updates/made"] == 1
    assert row["policy/ratio"] == pytest.approx(1, abs=1e-4)  # a mean over the tokens that are left


def test_overlong_answers_are_penalised(tmp_path: Path, tiny_model: Path) -> None:
    overrides = (
        "algorithm.shaping=overlong",
        "algorithm.shaping.buffer_tokens=4",
        "algorithm.shaping.penalty=0.5",
    )
    for row in steps_here(tmp_path, tiny_model, *overrides):
        assert -0.5 <= row["reward/shaping"] < -0.3  # nearly all answers of a random model are cut off
        assert row["reward/mean"] >= 0  # what is reported is what was earned


def test_advantages_are_whitened(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("algorithm.whiten=true", "logging.trajectories=true", "schedule.steps=1")
    steps_here(tmp_path, tiny_model, *overrides)
    found = [advantage for record in trajectories_in(tmp_path) for advantage in record["advantages"] if advantage]
    assert mean(found) == pytest.approx(0, abs=1e-3)
    assert pstdev(found) == pytest.approx(1, abs=0.05)


def test_domains_are_whitened_by_themselves(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": "1+1=", "data_source": "a"}, {"prompt": "2+3=", "data_source": "b"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rewards = (
        f"{name}: {{name: '{tmp_path}/vowels.py:share_of_vowels', sources: [{name}], weight: {weight}}}"
        for name, weight in (("a", 1), ("b", 3))
    )
    steps_here(
        *(tmp_path, tiny_model, f"data={{train: {{path: '{tmp_path}/rows.jsonl'}}, max_prompt_tokens: 48}}"),
        *(f"environment={{rewards: {{{', '.join(rewards)}}}}}", "batch.prompts_per_step=2", "schedule.steps=1"),
        *("algorithm.name=reinforce_plus_plus", "algorithm.whiten_by=rewards", "logging.trajectories=true"),
    )
    records = trajectories_in(tmp_path)
    for prompt in {record["prompt_id"] for record in records}:
        own = [record["advantages"] for record in records if record["prompt_id"] == prompt]
        found = [advantage for advantages in own for advantage in advantages if advantage]
        assert mean(found) == pytest.approx(0, abs=1e-3)
        assert pstdev(found) == pytest.approx(1, abs=0.05)


@IN_TWO_MODES
def test_advantages_are_clipped(tmp_path: Path, tiny_model: Path, pipelined: bool) -> None:
    overrides = ("algorithm.advantage_clip=0.5", "logging.trajectories=true", "schedule.steps=1")
    [row] = steps_in_mode(tmp_path, tiny_model, pipelined, *overrides)
    assert row["updates/made"] == 1
    assert max(abs(advantage) for record in trajectories_in(tmp_path) for advantage in record["advantages"]) == 0.5


@IN_TWO_MODES
def test_rewards_are_clipped_for_training_and_reported_as_they_were(
    tmp_path: Path, tiny_model: Path, pipelined: bool
) -> None:
    overrides = ("algorithm.name=reinforce", "algorithm.reward_clip=0.1", "logging.trajectories=true")
    [row] = steps_in_mode(tmp_path, tiny_model, pipelined, *overrides, "schedule.steps=1")
    records = trajectories_in(tmp_path)
    assert max(record["reward"] for record in records) > 0.1
    assert row["reward/mean"] == pytest.approx(mean(record["reward"] for record in records))
    for record in records:
        assert set(record["advantages"]) == {np.float32(min(record["reward"], 0.1))}


@pytest.mark.slow
def test_dynamic_sampling_drops_groups_whose_clipped_rewards_are_equal(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "letters.py").write_text("def number(response): return 1 + sum(map(str.isalpha, response))")
    overrides = (f"environment.reward.name={tmp_path}/letters.py:number", "algorithm.name=dapo", "schedule.steps=1")
    [whole] = steps_here(tmp_path, tiny_model, *overrides)
    assert whole["updates/made"] == 1
    with pytest.raises(RunError, match="found no group with different rewards"):
        steps_here(tmp_path, tiny_model, *overrides, "algorithm.reward_clip=0.5")


def test_remax_clips_the_greedy_answers_reward_too(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("algorithm.name=remax", "algorithm.reward_clip=0.3", "schedule.steps=1", *ALWAYS)
    [row] = steps_here(tmp_path, tiny_model, *overrides)
    assert (row["reward/mean"], row["updates/empty"]) == (1, 1)


@pytest.mark.slow
def test_an_update_whose_mean_ratio_is_too_high_is_not_made(tmp_path: Path, tiny_model: Path) -> None:
    """The first of a step is on-policy. That several in a row are skipped is no reason to end the run."""
    overrides = ("batch.ppo_epochs=8", "optimizer.learning_rate=0.02", "algorithm.max_mean_ratio=1.02")
    run = train_here(tmp_path, tiny_model, *overrides)
    rows = steps_of(run)
    assert all(row["updates/made"] >= 1 and row["updates/made"] + row["updates/skipped"] == 8 for row in rows)
    skipped = int(rows[0]["updates/skipped"])
    assert skipped > 3
    log = (run / "logs" / "main.log").read_text()
    assert re.search(rf"step 1: {skipped} of 8 updates skipped, mean ratio 1\.\d+, above .*max_mean_ratio: 1\.02", log)
    assert not list((run / "failures").iterdir())
    assert Ledger(run / "ledger.jsonl").audit().trained == 8


@IN_TWO_MODES
@pytest.mark.slow
def test_nothing_is_left_of_a_step_whose_updates_were_all_skipped(
    tmp_path: Path, tiny_model: Path, pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next gradient is that of a run which never moved."""
    _, unmoved = steps_in_mode(tmp_path, tiny_model, pipelined, "optimizer.learning_rate=1e-30")
    ratios = iter([9.0, 9.0, 1.0])  # compared, and reported
    monkeypatch.setattr(LossStats, "mean_ratio", property(lambda sums: next(ratios)))
    rows = steps_in_mode(tmp_path, tiny_model, pipelined, "algorithm.max_mean_ratio=1.5", "name=skipped")
    assert [(row["updates/made"], row["updates/skipped"]) for row in rows] == [(0, 1), (1, 0)]
    assert rows[1]["policy/gradient_norm"] == pytest.approx(unmoved["policy/gradient_norm"], rel=1e-4)
    audit = Ledger(tmp_path / "runs" / "skipped" / "ledger.jsonl").audit()
    assert (audit.trained, audit.dropped) == (4, {"mean ratio too high": 4})


@pytest.mark.slow
def test_entropy_bonus_keeps_the_policy_more_random(tmp_path: Path, tiny_model: Path) -> None:
    plain = steps_here(tmp_path, tiny_model, "schedule.steps=8")
    bonus = steps_here(tmp_path, tiny_model, "schedule.steps=8", "algorithm.entropy_coefficient=1")
    assert bonus[-1]["policy/entropy"] > plain[-1]["policy/entropy"]


@pytest.mark.slow
def test_llds_is_felt_once_a_likelihood_falls(tmp_path: Path, tiny_model: Path) -> None:
    updates = ("batch.updates_per_step=2", "batch.ppo_epochs=2", "schedule.steps=1")
    [plain] = steps_here(tmp_path, tiny_model, *updates)
    [llds] = steps_here(tmp_path, tiny_model, *updates, "algorithm.llds_coefficient=10")
    assert llds["reward/mean"] == plain["reward/mean"]
    assert llds["policy/loss"] > plain["policy/loss"]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_that_compares_the_samples_of_a_prompt_trains(tmp_path: Path, tiny_model: Path, kind: str) -> None:
    (tmp_path / "ranking.py").write_text(
        f"{kind} rank(responses, answer):\n"
        "    vowels = [sum(letter in 'aeiou' for letter in one) for one in responses]\n"
        "    return [{'score': sum(o < n for o in vowels), 'vowels': n, 'size': len(vowels)} for n in vowels]\n"
    )
    name = f"environment.reward.name={tmp_path}/ranking.py:rank"
    run = train_here(tmp_path, tiny_model, name, "logging.trajectories=true", "schedule.steps=1")
    [step] = steps_of(run)
    assert (step["environment/size"], step["samples/errors"], step["updates/made"]) == (4, 0, 1)
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in trajectories_in(tmp_path):
        groups.setdefault(record["prompt_id"], []).append(record)
    assert len(groups) == 4
    for group in groups.values():
        for record in group:
            worse = [one for one in group if one["metrics"]["vowels"] < record["metrics"]["vowels"]]
            assert record["reward"] == len(worse)
            assert record["turn_rewards"] == [len(worse)]
