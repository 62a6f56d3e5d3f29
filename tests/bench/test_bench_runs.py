"""Every verb still runs, in tiny; what it measures is not looked at."""

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from commands import start_corral
from guides import block
from typer.testing import CliRunner

from corral.bench.models import endless_copy, make_shape, prompt_texts
from corral.bench.process import SideFailed
from corral.bench.run import OnEvent, bench
from corral.bench.settings import Settings
from corral.bench.side import Tell
from corral.bench.sides import chosen_sides, why_skipped
from corral.cli.bench import app
from corral.recipe.errors import RunError, UserError


class HereTell(Tell):
    """Within this process."""

    def __init__(self, side: str, on_event: OnEvent) -> None:
        super().__init__(side)
        self._send = on_event  # type: ignore[method-assign]


def run_here(side: str, function: str, settings: Settings, on_event: OnEvent) -> None:
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(settings, HereTell(side, on_event))


def settings_of(verb: str, model: Path, **other: Any) -> Settings:
    small = {"max_sequences": 8, "max_prefill_tokens": 64, "micro_batch_tokens": 64, "smoke": True}
    return Settings(verb=verb, model=str(model), folder=str(model), device="cpu", dtype="float32", **small, **other)


def rows_of(verb: str, model: Path, out: Path, *sides: str) -> list[dict[str, Any]]:
    """What was found, by way of the file."""
    bench(settings_of(verb, model), sides, out, ["corral"], lambda text: None, run_here)
    rows: list[dict[str, Any]] = json.loads((out / f"bench_{verb}.json").read_text())["rows"]
    return rows


def test_rollout_is_measured(tiny_model: Path, tmp_path: Path) -> None:
    rows = rows_of("rollout", tiny_model, tmp_path, "corral", "transformers")
    assert [(row["side"], row["workload"]) for row in rows] == [
        ("corral", "fixed-128"),
        ("corral", "fixed-512"),
        ("corral", "ragged"),
        ("transformers", "fixed-128"),
    ]
    assert all(-6 < row["mean_logprob"] < -4 for row in rows[:3])  # the model says its 98 tokens about equally often


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
    result = start_corral(tmp_path, *words).wait(180)
    assert result.code == 0, result.stderr
    assert "| Corral " in result.stdout
    assert (tmp_path / "bench" / "bench_train.md").is_file()


def test_a_side_that_fails_leaves_the_others_their_turn(tiny_model: Path, tmp_path: Path) -> None:
    def run(side: str, function: str, settings: Settings, on_event: OnEvent) -> None:
        if side == "corral":
            raise SideFailed("corral ended with code 1")
        run_here(side, function, settings, on_event)

    said: list[str] = []
    with pytest.raises(RunError, match="1 of 2 sides failed: corral"):
        bench(settings_of("train", tiny_model), ["corral", "transformers"], tmp_path, ["corral"], said.append, run)
    found = json.loads((tmp_path / "bench_train.json").read_text())
    assert {row["side"] for row in found["rows"]} == {"transformers"}
    assert found["remarks"] == ["corral ended with code 1"]
    assert "corral ended with code 1" in said


def test_a_side_whose_package_is_missing_is_skipped_with_a_line(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_skipped("rollout", "corral", "cpu") is None
    assert why_skipped("step", "trl", "cuda") == (
        "trl is skipped: trl and datasets and vllm not installed (pip install trl==1.16.0; pip install vllm==0.25.1)"
    )
    said: list[str] = []
    bench(settings_of("step", tiny_model), ["trl"], tmp_path, ["corral"], said.append, run_here)
    assert "trl is skipped: trl and datasets not installed (pip install trl==1.16.0)" in said


def test_without_a_gpu_only_those_that_can_do_without_are_chosen() -> None:
    assert chosen_sides("rollout", None, "cpu") == ["corral", "transformers"]
    assert chosen_sides("rollout", None, "cuda") == ["corral", "transformers", "vllm"]
    with pytest.raises(UserError, match="--sides vllm: needs a GPU"):
        chosen_sides("rollout", ["vllm"], "cpu")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rollout", "--sides", "corall"], "--sides corall: not a side of `corral bench rollout`, which has"),
        (["train", "--model", "no/where"], "--model no/where: is not a folder, and the shapes are qwen2-1.5b, tiny"),
        (
            ["rollout", "--workloads", "raged"],
            "--workloads raged: there are fixed-128, fixed-512, ragged; did you mean",
        ),
        (["step", "--trl-micro-batch", "7"], "--trl-micro-batch 7: must divide the 512 samples of a step"),
    ],
)
def test_what_a_user_got_wrong_is_one_line(arguments: list[str], line: str) -> None:
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, UserError)
    assert str(error).startswith(line)
    assert "\n" not in str(error)


def test_a_shape_has_a_tokenizer_that_writes_every_token_and_an_end_that_is_never_drawn(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    make_shape("tiny", tmp_path / "model", "cpu", "float32")
    endless_copy(tmp_path / "model", tmp_path / "copy")
    for folder in (tmp_path / "model", tmp_path / "copy"):
        config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert len({tokenizer.decode([token]) for token in range(300, config.vocab_size)}) == config.vocab_size - 300
        assert config.eos_token_id is None
        assert tokenizer.eos_token_id == config.vocab_size
        texts = prompt_texts(tokenizer, 5, 16)
        assert {len(tokenizer(text)["input_ids"]) for text in texts} == {16}
        assert len(set(texts)) == 5


def test_a_copy_without_an_end_leaves_the_model_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    endless_copy(tiny_model, tmp_path / "copy")
    assert {file.name: file.read_bytes() for file in tiny_model.iterdir()} == before
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["eos_token_id"] is None
