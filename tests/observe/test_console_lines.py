import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from corral.observe.console import cut, duration, score_text, step_line, validation_line, visible

FULL = {
    "reward/mean": 0.412,
    "kl/mean": 0.0012,
    "policy/entropy": 1.21,
    "length/mean": 5.1,
    "speed/tokens_per_s": 412.3,
    "time/rollout_s": 1.2,
    "time/train_s": 2.8,
    "time/step_s": 4.3,
    "eta_s": 200.0,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m"), (273600, "3d04h"), (math.nan, "?")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_step_is_one_line_with_every_number() -> None:
    line = " ".join(step_line(12, 60, FULL, set(), None).plain.split())
    assert line == (
        "step 12/60 reward 0.412 kl 0.0012 entropy 1.21 length 5.1 412 tok/s "
        "rollout 1.2s train 2.8s step 4.3s eta 3m20s"
    )


def test_a_number_that_was_not_measured_is_not_in_the_line() -> None:
    assert step_line(1, 60, {"reward/mean": 0.5}, set(), None).plain == "step  1/60  reward  0.500"


def test_the_place_of_a_number_that_earlier_lines_had_stays_free() -> None:
    full = step_line(1, 60, FULL, set(), None).plain
    without = {name: value for name, value in FULL.items() if name != "kl/mean"}
    gap = step_line(2, 60, without, set(FULL), None).plain
    assert len(gap) == len(full)
    assert gap.index("entropy") == full.index("entropy")
    assert "kl" not in gap


@given(st.floats(-9.9, 9.9), st.integers(-99, 999).map(lambda n: n / 1e6), st.floats(0, 9e4), st.floats(0, 1e6))
def test_lines_align_whatever_the_numbers(reward: float, kl: float, length: float, seconds: float) -> None:
    numbers = {"reward/mean": reward, "kl/mean": kl, "length/mean": length, "time/step_s": seconds, "eta_s": seconds}
    line = step_line(7, 60, {**FULL, **numbers}, set(), None).plain
    assert len(line) == len(step_line(12, 60, FULL, set(), None).plain)


@pytest.mark.parametrize("width", range(30, 160, 10))
def test_a_line_fits_a_narrow_terminal_and_keeps_the_reward(width: int) -> None:
    line = step_line(12, 60, FULL, set(), width).plain
    assert len(line) <= width
    assert "reward" in line


def test_skipped_updates_are_shown_only_when_there_are_some() -> None:
    assert "skipped" not in step_line(1, 60, {**FULL, "updates/skipped": 0}, set(), None).plain
    assert step_line(1, 60, {**FULL, "updates/skipped": 2}, set(), None).plain.endswith("skipped updates 2")


def test_a_validation_line_is_a_percentage_with_its_interval() -> None:
    metrics = {"validation/mean@1": 0.31, "validation/ci95": 0.041, "validation/pass@1": 0.31}
    assert (
        validation_line("before training", metrics, 200) == "validation before training: 31.0 % ± 4.1 (200 questions)"
    )


def test_a_validation_with_several_samples_shows_pass_at_k() -> None:
    metrics = {"validation/mean@8": 0.31, "validation/pass@8": 0.62}
    assert (
        validation_line("after step 20", metrics, 1) == "validation after step 20: 31.0 %, pass@8 62.0 % (1 question)"
    )


def test_a_loss_on_held_out_rows_is_shown_alone_or_with_the_score() -> None:
    assert score_text({"validation/loss": 0.43111}) == "loss 0.4311"
    both = {"validation/mean@1": 0.31, "validation/ci95": 0.041, "validation/loss": 0.43111}
    assert score_text(both) == "31.0 % ± 4.1 and loss 0.4311"


def test_scores_that_are_not_fractions_stay_numbers() -> None:
    assert score_text({"validation/mean@1": -1.25, "validation/ci95": 0.5}) == "-1.250 ± 0.500"
    whole = {"validation/mean@1": 0.7, "validation/ci95": 0.1, "validation/min": 0.0}
    assert score_text({**whole, "validation/max": 1.0}) == "70.0 % ± 10.0"
    assert score_text({**whole, "validation/max": 1.1}) == "0.700 ± 0.100"


def test_line_breaks_and_control_codes_are_visible() -> None:
    assert visible("a\nb\r\nc\x1b[31md\u202e") == "a⏎b⏎c\\x1b[31md\\u202e"


def test_letters_of_any_language_stay_as_they_are() -> None:
    assert visible("你好 می\u200cخواهم 👩\u200d🚀") == "你好 می\u200cخواهم 👩\u200d🚀"


@pytest.mark.parametrize(("keep", "text"), [("start", "abc…"), ("end", "…fgh"), ("both", "a…gh")])
def test_cutting_keeps_the_part_that_matters(keep: str, text: str) -> None:
    assert cut("abcdefgh", 4, keep) == text  # type: ignore[arg-type]


@given(st.text(), st.integers(0, 30), st.sampled_from(["start", "end", "both"]))
def test_a_cut_text_is_never_wider_than_asked(text: str, width: int, keep: str) -> None:
    assert cell_len(cut(visible(text), width, keep)) <= width  # type: ignore[arg-type]
