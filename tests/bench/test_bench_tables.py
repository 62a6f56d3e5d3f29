"""Cells of the tables, and the files that they are written to."""

import json
from pathlib import Path
from typing import Any

from corral.bench.comparison import ComparisonReport, format_table, table_cells
from corral.bench.rollout_sides import decode_bytes
from corral.bench.workloads import BenchSettings, RolloutWork
from corral.recipe.shape import ModelShape

PEAKS = {"device": "a device", "matrix_tflops": 800.0, "matrix": "m", "copy_tbs": 4.0, "copy": "c"}


def rollout_row(side: str, tokens_per_s: float, **other: Any) -> dict[str, Any]:
    measured = {"workload": "fixed-128", "variant": "", "num_requests": 128, "tokens": 100, "seconds": [0.011, 0.01]}
    measured |= {"mean_logprob": -11.5, "decode_bytes": 10**10, "start_up_s": 12.3, "peak_gb": 8.04}
    return {**measured, "side": side, "tokens_per_s": tokens_per_s, **other}


def test_a_rollout_is_compared_with_corral_and_with_the_bandwidth() -> None:
    rows = [rollout_row("corral", 10_000.0), rollout_row("vllm", 5_000.0, variant="no log-probs", mean_logprob=None)]
    _, ours, theirs = table_cells("rollout", rows, PEAKS)
    assert ours[1:7] == ["Corral", "10,000", "1.00 x", "25.0%", "0.01, 0.01", "-11.500"]
    assert theirs[1:7] == ["vLLM (no log-probs)", "5,000", "0.50 x", "12.5%", "0.01, 0.01", ""]


def test_training_is_compared_with_the_matrix_peak_and_with_the_same_recompute() -> None:
    common = {"masters": "float32", "tokens_per_s": 50_000.0, "peak_gb": 65.0}
    rows = [
        {**common, "side": "corral", "recompute": "full", "step_s": 0.2, "tflops": 400.0},
        {**common, "side": "transformers", "recompute": "none", "step_s": 0.164, "tflops": 480.0},
    ]
    _, full, none = table_cells("train", rows, PEAKS)
    assert full == ["Corral", "full", "float32", "200.0", "50,000", "50.0%", "1.00 x", "65.0"]
    assert none[5:7] == ["60.0%", ""]


def test_steps_are_compared_by_their_time() -> None:
    common = {"variant": "", "generation_s": 2.0, "rest_s": 3.0, "tokens_per_s": 26_214.0, "start_up_s": 30.0}
    rows = [
        {**common, "side": "corral", "seconds": [5.0, 4.5, 5.5], "step_s": 5.0},
        {**common, "side": "trl", "seconds": [10.0], "step_s": 10.0},
    ]
    _, ours, theirs = table_cells("step", rows, PEAKS)
    assert ours[:2] == ["Corral", "5.00 (4.50-5.50)"]
    assert theirs[5] == "2.00 x"


def test_columns_of_a_table_are_as_wide_as_their_widest_cell() -> None:
    assert format_table([["a", "long"], ["wide cell", "b"]]).splitlines() == [
        "| a         | long |",
        "| --------- | ---- |",
        "| wide cell | b    |",
    ]


def test_results_are_in_both_files_as_soon_as_they_are_reported(tmp_path: Path) -> None:
    settings = BenchSettings(verb="rollout", model="tiny", folder=".", device="cpu", dtype="float32")
    report = ComparisonReport(settings, tmp_path, ["corral", "bench", "rollout"])
    report.add_event({"facts": PEAKS})
    report.add_event({"row": rollout_row("corral", 10_000.0)})
    report.add_remark("vllm is skipped")
    text = (tmp_path / "bench_rollout.md").read_text()
    for part in (
        "`corral bench rollout`",
        "a device: 800 TFLOP/s (m), 4 TB/s (copy of c)",
        "10,000",
        "vllm is skipped",
    ):
        assert part in text
    found = json.loads((tmp_path / "bench_rollout.json").read_text())
    assert found["rows"][0]["tokens_per_s"] == 10_000.0
    assert found["settings"]["model"] == "tiny"


def test_the_least_to_read_is_the_weights_at_every_step_and_the_cache_of_every_token() -> None:
    shape = ModelShape(4, 1, 1, 1, 4, 8, vocab_size=10, tie_word_embeddings=False)
    work = RolloutWork("two", num_prompts=2, prompt_tokens=3, min_new_tokens=2, max_new_tokens=2)
    weights, cached_values = shape.num_parameters - 40, 2 * 4
    read_tokens = 2 * (4 + 5)
    assert decode_bytes(shape, work, 2, 2) == 2 * (2 * weights + cached_values * read_tokens)
    assert decode_bytes(shape, work, 1, 2) == 2 * (4 * weights + cached_values * read_tokens)
