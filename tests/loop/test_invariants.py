"""What must hold to rounding or to the bit: same seed, same numbers; on-policy is on-policy; packing is no matter."""

from pathlib import Path

import pytest
from runs import VALIDATION, rows_of, steps_here, train_here

SAMPLED_VALIDATION = (*VALIDATION, "validation.temperature=1.0", "validation.samples_per_prompt=2")


@pytest.mark.slow
def test_same_seed_gives_the_same_numbers_and_another_seed_others(tmp_path: Path, tiny_model: Path) -> None:
    def rows(name: str, seed: int) -> list[dict[str, float]]:
        overrides = (f"name={name}", f"seed={seed}", "schedule.steps=3", *SAMPLED_VALIDATION)
        return rows_of(train_here(tmp_path, tiny_model, *overrides))

    first, again, other = rows("first", 0), rows("again", 0), rows("other", 1)
    assert first == again
    assert all(row != another for row, another in zip(first, other, strict=True) if row["step"] > 0)


@pytest.mark.parametrize("limit", ["rollout.max_sequences=3", "rollout.max_prefill_tokens=20"])
@pytest.mark.slow
def test_rollouts_do_not_depend_on_how_much_fits_at_once(tmp_path: Path, tiny_model: Path, limit: str) -> None:
    [everything] = steps_here(tmp_path, tiny_model, "schedule.steps=1")
    [few] = steps_here(tmp_path, tiny_model, "schedule.steps=1", limit)
    for name in ("reward/mean", "length/mean", "samples/equal_groups"):
        assert everything[name] == few[name]


def test_first_update_is_on_policy_with_the_engines_log_probs(tmp_path: Path, tiny_model: Path) -> None:
    for row in steps_here(tmp_path, tiny_model, "schedule.steps=3"):
        assert row["policy/ratio_deviation"] < 1e-5


@pytest.mark.parametrize("micro_batch", [56, 256, 4096])
@pytest.mark.slow
def test_first_update_is_on_policy_to_the_bit_with_recomputed_log_probs(
    tmp_path: Path, tiny_model: Path, micro_batch: int
) -> None:
    overrides = ("algorithm.old_logprobs=recompute", "algorithm.kl.where=loss", "schedule.steps=3")
    steps = steps_here(tmp_path, tiny_model, *overrides, f"batch.max_tokens_per_micro_batch={micro_batch}")
    assert [row["policy/ratio_deviation"] for row in steps] == [0, 0, 0]
    assert steps[0]["kl/mean"] == 0
    assert steps[1]["kl/mean"] > 0


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "gspo", "ppo"])
@pytest.mark.slow
def test_gradient_does_not_depend_on_the_micro_batch(tmp_path: Path, tiny_model: Path, algorithm: str) -> None:
    rows = []
    for micro_batch in (30, 56, 150, 4096):  # a trajectory may have 56: with 30 it is trained in parts
        overrides = (f"algorithm.name={algorithm}", f"batch.max_tokens_per_micro_batch={micro_batch}")
        rows += steps_here(tmp_path, tiny_model, *overrides, "schedule.steps=1")
    norm, loss = rows[0]["policy/gradient_norm"], rows[0]["policy/loss"]
    assert [row["policy/gradient_norm"] for row in rows] == pytest.approx([norm] * 4, rel=1e-5)
    assert [row["policy/loss"] for row in rows] == pytest.approx([loss] * 4, abs=1e-6)


@pytest.mark.slow
def test_recomputing_activations_gives_the_same_weights(tmp_path: Path, tiny_model: Path) -> None:
    kept = steps_here(tmp_path, tiny_model)
    recomputed = steps_here(tmp_path, tiny_model, "train.gradient_checkpointing=true")
    assert [row["policy/gradient_norm"] for row in kept] == [row["policy/gradient_norm"] for row in recomputed]
