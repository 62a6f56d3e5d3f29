"""Every verb runs, in tiny: the work is the same for all sides; times are not checked."""

import importlib
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import start_corral
from deadlines import within
from guides import block
from typer.testing import CliRunner

from corral.bench.benchmark_models import endless_copy, prompt_texts, save_random_model
from corral.bench.comparison import OnEvent, choose_sides, compare, why_skipped
from corral.bench.side_process import SideFailed, SideReporter
from corral.bench.workloads import CPU_WORKLOADS, SMALL_STEP, BenchSettings, PeerOptions
from corral.cli.bench import app
from corral.recipe.errors import RunError, UserError


class LocalReporter(SideReporter):
    """Reports within this process."""

    def __init__(self, side: str, on_event: OnEvent) -> None:
        super().__init__(side)
        self._send = on_event  # type: ignore[method-assign]


def run_here(side: str, function: str, settings: BenchSettings, on_event: OnEvent, python: str | None = None) -> None:
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(settings, LocalReporter(side, on_event))


def settings_of(verb: str, model: Path, **other: Any) -> BenchSettings:
    small: dict[str, Any] = {"max_sequences": 8, "max_prefill_tokens": 64, "micro_batch_tokens": 64, "step": SMALL_STEP}
    return BenchSettings(
        verb=verb, model=str(model), folder=str(model), device="cpu", dtype="float32", smoke=True, **small, **other
    )


def rows_of(verb: str, model: Path, out: Path, *sides: str, **other: Any) -> list[dict[str, Any]]:
    """Rows of the JSON file."""
    compare(settings_of(verb, model, **other), sides, out, ["corral"], lambda text: None, run_here)
    rows: list[dict[str, Any]] = json.loads((out / f"bench_{verb}.json").read_text())["rows"]
    return rows


@pytest.mark.slow
def test_rollout_is_measured(tiny_model: Path, tmp_path: Path) -> None:
    rows = rows_of("rollout", tiny_model, tmp_path, "corral", "transformers")
    assert [(row["side"], row["workload"]) for row in rows] == [
        ("corral", "fixed-128"),
        ("corral", "fixed-512"),
        ("corral", "ragged"),
        ("transformers", "fixed-128"),
    ]
    assert all(-6 < row["mean_logprob"] < -4 for row in rows[:3])  # its 98 tokens are about equally likely


def test_samples_of_one_prompt_are_measured_in_rounds(tiny_model: Path, tmp_path: Path) -> None:
    rows = rows_of("rollout", tiny_model, tmp_path, "corral", "transformers", workloads=CPU_WORKLOADS, rounds=2)
    turn = [(side, workload) for side in ("corral", "transformers") for workload in CPU_WORKLOADS]
    assert [(row["side"], row["workload"], row["round"]) for row in rows] == [(*one, n) for n in (0, 1) for one in turn]
    assert {(row["workload"], row["num_requests"], row["tokens"]) for row in rows} == {
        ("distinct", 4, 16),
        ("grouped", 4, 16),
    }
    assert all(-6 < row["mean_logprob"] < -4 for row in rows)  # all sides sample from the same distribution


def test_training_is_measured_with_and_without_recomputing(tiny_model: Path, tmp_path: Path) -> None:
    rows = rows_of("train", tiny_model, tmp_path, "corral", "transformers")
    assert [row["recompute"] for row in rows] == ["full", "none", "full", "none"]
    assert all(row["gradient_norm"] > 0 for row in rows)


def test_a_step_is_measured(tiny_model: Path, tmp_path: Path) -> None:
    [row] = rows_of("step", tiny_model, tmp_path, "corral")
    assert row["tokens"] == 2 * 4 * 4


@pytest.mark.slow
def test_the_command_in_the_guide_runs_a_side_in_a_process_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    [command] = block("bench-smoke").commands
    words = [*shlex.split(command)[1:], "--model", str(tiny_model), "--sides", "corral"]
    result = start_corral(tmp_path, *words).wait(within(180))
    assert result.code == 0, result.stderr
    assert "| Corral " in result.stdout
    assert (tmp_path / "bench" / "bench_train.md").is_file()


def test_a_side_that_fails_leaves_the_others_their_turn(tiny_model: Path, tmp_path: Path) -> None:
    def run(side: str, function: str, settings: BenchSettings, on_event: OnEvent, python: str | None = None) -> None:
        if side == "corral":
            raise SideFailed("corral ended with code 1")
        run_here(side, function, settings, on_event)

    printed: list[str] = []
    with pytest.raises(RunError, match="1 of 2 sides failed: corral"):
        compare(settings_of("train", tiny_model), ["corral", "transformers"], tmp_path, ["corral"], printed.append, run)
    found = json.loads((tmp_path / "bench_train.json").read_text())
    assert {row["side"] for row in found["rows"]} == {"transformers"}
    assert found["remarks"] == ["corral ended with code 1"]
    assert "corral ended with code 1" in printed


def test_a_side_whose_package_is_missing_is_skipped_with_a_line(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_skipped("corral", settings_of("rollout", tiny_model)) is None
    assert why_skipped("trl", replace(settings_of("step", tiny_model), device="cuda")) == (
        "trl is skipped: trl and datasets and vllm not installed (pip install trl==1.16.0; pip install vllm==0.25.1)"
    )
    printed: list[str] = []
    compare(settings_of("step", tiny_model), ["trl"], tmp_path, ["corral"], printed.append, run_here)
    assert "trl is skipped: trl and datasets not installed (pip install trl==1.16.0)" in printed


def test_vllm_without_a_gpu_and_sglang_are_chosen_only_if_their_python_is_given(tiny_model: Path) -> None:
    assert choose_sides("rollout", [], "cpu", PeerOptions()) == ["corral", "transformers"]
    assert choose_sides("rollout", [], "cpu", PeerOptions(vllm_python="p")) == ["corral", "transformers", "vllm"]
    assert choose_sides("rollout", [], "cuda", PeerOptions()) == ["corral", "transformers", "vllm"]
    assert choose_sides("rollout", [], "cpu", PeerOptions(sglang_python="p")) == ["corral", "transformers", "sglang"]
    settings = settings_of("rollout", tiny_model, peers=PeerOptions(vllm_python=sys.executable))
    assert why_skipped("vllm", settings) == f"vllm is skipped: not installed in --vllm-python {sys.executable}"
    with pytest.raises(UserError, match="--vllm-python no/where: cannot be run"):
        why_skipped("vllm", replace(settings, peers=PeerOptions(vllm_python="no/where")))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rollout", "--sides", "corall"], "--sides corall: not a side of `corral bench rollout`, which has"),
        (["train", "--model", "no/where"], "--model no/where: is not a folder, and the known models are qwen2-1.5b,"),
        (
            ["rollout", "--workloads", "raged"],
            "--workloads raged: there are fixed-128, fixed-512, ragged, distinct, grouped; did you mean",
        ),
        (["step", "--trl-micro-batch", "7"], "--trl-micro-batch 7: must divide the 512 samples of a step"),
        (["step", "--prompts", "3", "--trl-micro-batch", "7"], "--trl-micro-batch 7: must divide the 24 samples"),
    ],
)
def test_what_a_user_got_wrong_is_one_line(arguments: list[str], line: str) -> None:
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, UserError)
    assert str(error).startswith(line)
    assert "\n" not in str(error)


def test_a_random_model_has_text_for_every_token_and_an_end_that_is_never_sampled(
    tmp_path: Path,
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    save_random_model("tiny", tmp_path / "model", "cpu", "float32")
    endless_copy(tmp_path / "model", tmp_path / "copy")
    for folder in (tmp_path / "model", tmp_path / "copy"):
        config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert len({tokenizer.decode([token]) for token in range(300, config.vocab_size)}) == config.vocab_size - 300
        assert config.eos_token_id is None
        assert tokenizer.eos_token_id == config.vocab_size
        texts = prompt_texts(tokenizer, 5, 16)
        assert {len(tokenizer(text)["input_ids"]) for text in texts} == {16}
        assert len(set(texts)) == 5
        alike = [tokenizer(text)["input_ids"] for text in prompt_texts(tokenizer, 5, 16, num_shared=12)]
        assert {tuple(tokens[:12]) for tokens in alike} == {tuple(alike[0][:12])}
        assert len({tuple(tokens) for tokens in alike}) == 5


def test_a_copy_without_an_end_leaves_the_model_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    endless_copy(tiny_model, tmp_path / "copy")
    assert {file.name: file.read_bytes() for file in tiny_model.iterdir()} == before
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["eos_token_id"] is None
