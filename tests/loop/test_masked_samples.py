"""Samples that are cut off by length and masked, and samples that are alone in their group."""

from pathlib import Path

import pytest
from runs import rows_of, steps_here, steps_in_mode, steps_of, train_here

from corral.observe.ledger import Ledger
from corral.observe.trajectory_store import read_trajectories

MASKED = ("algorithm.mask_truncated=true", "rollout.stop=[a, e, t, s]", "schedule.steps=1")
FOUR_SAMPLES = ("batch.prompts_per_step=2", "batch.samples_per_prompt=2")
FOUR_PROMPTS = ("batch.prompts_per_step=4", "batch.samples_per_prompt=4")
ALL_CUT_OFF = ("algorithm.mask_truncated=true", "rollout.max_response_tokens=1", "schedule.steps=1", *FOUR_SAMPLES)
"""None of the four samples of one token happens to be an end-of-turn token."""


def test_a_masked_sample_is_in_its_group_and_in_no_loss(tmp_path: Path, tiny_model: Path) -> None:
    """With ratios of 1, the loss is minus the mean advantage of the tokens that are in it."""
    run = train_here(tmp_path, tiny_model, *MASKED, "logging.trajectories=true")
    records = list(read_trajectories(run / "trajectories" / "step_000001.parquet"))
    [step] = steps_of(run)
    cut = [one["stop"] == "length" for one in records]
    assert 0 < sum(cut) < 16
    assert step["samples/masked"] == step["stop/length"] == sum(cut) / 16
    for prompt_id in {one["prompt_id"] for one in records}:  # the masked ones are part of the mean that is subtracted
        group = [one for one in records if one["prompt_id"] == prompt_id]
        assert sum(one["advantages"][0] for one in group) == pytest.approx(0, abs=1e-4)
    in_loss = [number for one, is_cut in zip(records, cut, strict=True) if not is_cut for number in one["advantages"]]
    assert step["policy/loss"] == pytest.approx(-sum(in_loss) / len(in_loss), abs=1e-5)
    whole = [number for one in records for number in one["advantages"]]
    assert abs(sum(whole) / len(whole) - sum(in_loss) / len(in_loss)) > 1e-3


def test_prompts_that_are_too_hard_or_too_easy_are_in_no_loss(tmp_path: Path, tiny_model: Path) -> None:
    bounds = ("algorithm.mask_mean_reward=[0.03125, 0.25]", "schedule.steps=1", "logging.trajectories=true")
    run = train_here(tmp_path, tiny_model, *bounds, *FOUR_PROMPTS)
    records = list(read_trajectories(run / "trajectories" / "step_000001.parquet"))
    [step] = steps_of(run)
    in_loss, masked = list[float](), set[int]()
    for prompt_id in {one["prompt_id"] for one in records}:
        group = [one for one in records if one["prompt_id"] == prompt_id]
        is_between = 0.03125 < sum(one["reward"] for one in group) / len(group) < 0.25  # a bound is outside, as in ROLL
        assert {one["left_out"] for one in group} == (
            {None} if is_between else {"of a prompt that is too hard or too easy"}
        )
        if is_between:
            in_loss += [number for one in group for number in one["advantages"]]
        else:
            masked.add(prompt_id)
    assert 0 < len(masked) < 4
    assert step["samples/masked"] == len(masked) / 4
    assert step["policy/loss"] == pytest.approx(-sum(in_loss) / len(in_loss), abs=1e-5)
    audit = Ledger(run / "ledger.jsonl").audit()
    assert audit.clean
    assert audit.dropped == {"all samples of a prompt that is too hard or too easy": len(masked)}


@pytest.mark.parametrize("mode", ["pipelined", "recompute"])
@pytest.mark.slow
def test_masks_are_the_same_in_other_modes(tmp_path: Path, tiny_model: Path, mode: str) -> None:
    [plain] = steps_here(tmp_path, tiny_model, *MASKED)
    recomputed = ("algorithm.old_logprobs=recompute",) if mode == "recompute" else ()
    [other] = steps_in_mode(tmp_path, tiny_model, mode == "pipelined", *MASKED, *recomputed)
    for name in ("samples/masked", "policy/loss", "policy/gradient_norm", "updates/made"):
        assert other[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_step_of_masked_samples_alone_changes_nothing(tmp_path: Path, tiny_model: Path, algorithm: str) -> None:
    run = train_here(tmp_path, tiny_model, *ALL_CUT_OFF, f"algorithm.name={algorithm}")
    [step] = steps_of(run)
    assert (step["samples/masked"], step["updates/made"], step["updates/empty"]) == (1, 0, 1)
    audit = Ledger(run / "ledger.jsonl").audit()
    assert audit.clean
    assert (audit.trained, audit.dropped) == (0, {"all samples cut off by length": 2})


LONE = ("batch.samples_per_prompt=1", "batch.prompts_per_step=16", "schedule.steps=1", "logging.trajectories=true")


@pytest.mark.slow
def test_a_lone_sample_has_no_advantage_unless_its_reward_is_to_count(tmp_path: Path, tiny_model: Path) -> None:
    zero = train_here(tmp_path, tiny_model, *LONE, "name=zero")
    raw = train_here(tmp_path, tiny_model, *LONE, "name=raw", "algorithm.lone_sample=raw")
    assert (rows_of(zero)[0]["updates/made"], rows_of(zero)[0]["updates/empty"]) == (0, 1)
    assert (rows_of(raw)[0]["updates/made"], rows_of(raw)[0]["updates/empty"]) == (1, 0)
    records = list(read_trajectories(raw / "trajectories" / "step_000001.parquet"))
    assert any(one["reward"] for one in records)
    for one in records:
        assert one["advantages"] == pytest.approx([one["reward"]] * len(one["advantages"]))
