"""A checkpoint is whole or not there, whatever happens while it is written."""

import json
import math
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import corral
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import make_manifest, train_here
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from corral.recipe.errors import UserError
from corral.recipe.shape import ModelShape
from corral.training import checkpoint as module
from corral.training.checkpoint import (
    export_model,
    find_checkpoint,
    list_checkpoints,
    problem_with,
    prune,
    read_state,
    retire_later_checkpoints,
    step_folder,
    writing_checkpoint,
)
from corral.training.tensor_files import load_tensors, save_tensors

TOKENS = torch.arange(5, 25)[None]


def write(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(bytes(1000))
    (folder / "config.json").write_text("{}")


def make(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        with writing_checkpoint(step_folder(checkpoints, step), {"step": step}) as work:
            write(work)


def test_a_checkpoint_is_valid_and_has_its_state(tmp_path: Path) -> None:
    make(tmp_path, 3)
    folder = step_folder(tmp_path, 3)
    assert problem_with(folder, hashes=True) is None
    assert read_state(folder) == {"step": 3}
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {"actor/weights", "config.json", "state.json"}


def test_what_fails_while_writing_leaves_nothing(tmp_path: Path) -> None:
    make(tmp_path, 1)

    def fail() -> None:
        with writing_checkpoint(step_folder(tmp_path, 2), {}) as work:
            write(work)
            raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        fail()
    assert os.listdir(tmp_path) == ["step_000001"]


def test_a_kill_while_writing_leaves_nothing_that_is_found(tmp_path: Path) -> None:
    make(tmp_path, 1)

    if (child := os.fork()) == 0:
        with writing_checkpoint(step_folder(tmp_path, 2), {}) as work:
            (work / "weights").write_bytes(bytes(1000))
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (tmp_path / ".step_000002.part" / "weights").exists()
    assert find_checkpoint(tmp_path, "auto") == step_folder(tmp_path, 1)
    make(tmp_path, 3)
    prune(tmp_path, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step_000001", "step_000003"]


def test_the_newest_valid_checkpoint_is_found(tmp_path: Path) -> None:
    make(tmp_path, 9, 10, 1_000_000)
    assert find_checkpoint(tmp_path, "auto") == step_folder(tmp_path, 1_000_000)
    (step_folder(tmp_path, 1_000_000) / "manifest.json").unlink()
    assert find_checkpoint(tmp_path, "auto") == step_folder(tmp_path, 10)
    (step_folder(tmp_path, 10) / "actor" / "weights").write_bytes(bytes(999) + b"1")
    assert find_checkpoint(tmp_path, "auto") == step_folder(tmp_path, 9)


def test_files_are_read_together_or_where_the_run_wrote_them_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a terabyte in one thread takes longer than what a restart is for."""
    make(tmp_path, 1)
    all_read, size_and_hash = threading.Barrier(3), module.size_and_hash

    def read(file: Path) -> dict[str, Any]:
        all_read.wait(20)
        return size_and_hash(file)

    monkeypatch.setattr(module, "size_and_hash", read)
    assert find_checkpoint(tmp_path, "auto") == step_folder(tmp_path, 1)
    (step_folder(tmp_path, 1) / "actor" / "weights").write_bytes(bytes(999) + b"1")
    assert find_checkpoint(tmp_path, "auto", hashes=False) == step_folder(tmp_path, 1)
    assert find_checkpoint(tmp_path, "auto") is None


def test_there_may_be_none(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "nowhere", "auto") is None
    make(tmp_path, 1)
    assert find_checkpoint(tmp_path, "never") is None


def test_one_that_is_named_must_be_valid(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    assert find_checkpoint(tmp_path, str(step_folder(tmp_path, 1))) == step_folder(tmp_path, 1)
    (step_folder(tmp_path, 2) / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"step_000002 is not a usable checkpoint: config\.json was changed or damaged"):
        find_checkpoint(tmp_path, str(step_folder(tmp_path, 2)))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"files": 1}', '{"files": {"config.json": 3}}', "\udcff"])
def test_a_manifest_that_makes_no_sense_is_no_manifest(tmp_path: Path, content: str) -> None:
    make(tmp_path, 1)
    (step_folder(tmp_path, 1) / "manifest.json").write_text(content, errors="surrogateescape")
    assert problem_with(step_folder(tmp_path, 1), hashes=False) == "its manifest.json is damaged"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"step": "x"}', "state.json: step: Input should be a valid integer"),
        ('{"step": 1e30}', "state.json: step: "),
        ('{"step": -1}', "state.json: step: "),
        ("{}", "state.json: step: Field required"),
        ("[]", "state.json: : Input should be"),
        ('{"step": 1, "sampler": {}}', "state.json: sampler.seed: Field required"),
        (
            '{"step": 1, "sampler": {"seed": 0, "num_rows": 4, "next_prompt_id": 1.5}}',
            "next_prompt_id: Input should be",
        ),
        ('{"step": 1, "trained_with": 3}', "state.json: trained_with: Input should be"),
        (
            '{"step": 1, "trained_with": {"recipe": 3}}',
            "state.json: trained_with.recipe: Input should be a valid string",
        ),
        ('{"step": 1, "skipped_in_a_row": []}', "state.json: skipped_in_a_row: Input should be a valid integer"),
        ('{"step": 1, "kl": {"coefficient": NaN}}', "state.json: kl.coefficient: Input should be a finite number"),
        ('{"step": 2}', "state.json is that of step 2"),
        ('{"step": 1, "validation": ' + "[" * 100_000, "state.json cannot be read: it is nested too deeply"),
    ],
    ids=lambda text: text[:40],
)
def test_a_state_that_makes_no_sense_is_no_state(tmp_path: Path, content: str, problem: str) -> None:
    """The manifest fits: both files are of one author."""
    with writing_checkpoint(step_folder(tmp_path, 1), {"step": 1}) as work:
        write(work)
    folder = step_folder(tmp_path, 1)
    (folder / "state.json").write_text(content)
    make_manifest(folder)
    assert problem in (problem_with(folder, hashes=True) or "")
    assert find_checkpoint(tmp_path, "auto") is None


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    assert problem_with(tmp_path / "recipe.yaml", hashes=True) == "it is not a folder"


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_damage_to_any_file_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("checkpoints") / "step_000001"
    with writing_checkpoint(folder, {"step": 1}) as work:
        write(work)
    names = ["actor/weights", "config.json", "state.json"]
    file = folder / data.draw(st.sampled_from(names))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[position]
    file.write_bytes(content)
    assert problem_with(folder, hashes=True) is not None


@pytest.mark.parametrize(("keep", "kept"), [(2, [3, 4]), (None, [1, 2, 3, 4])])
def test_only_the_newest_are_kept_or_all_if_asked_for(tmp_path: Path, keep: int | None, kept: list[int]) -> None:
    make(tmp_path, 1, 2, 3, 4)
    prune(tmp_path, keep=keep)
    assert [step for step, _ in list_checkpoints(tmp_path)] == kept


@pytest.mark.parametrize(("metric", "kept"), [("validation/loss", [1, 4]), ("validation/mean@1", [3, 4])])
def test_the_best_is_kept_whatever_is_not_a_number(tmp_path: Path, metric: str, kept: list[int]) -> None:
    for step, value in enumerate([1.0, 2.0, 3.0, math.nan], start=1):
        with writing_checkpoint(step_folder(tmp_path, step), {"step": step, "validation": {metric: value}}) as work:
            write(work)
    prune(tmp_path, keep=1, best=metric)
    assert [step for step, _ in list_checkpoints(tmp_path)] == kept


def test_a_kill_while_a_checkpoint_becomes_a_model_costs_nothing(tmp_path: Path) -> None:
    checkpoints, weights = tmp_path / "checkpoints", tmp_path / "weights"
    make(checkpoints, 1, 2, 3)
    weights.mkdir()
    (checkpoints / "step_000001").rename(weights / ".step_000001.part")  # that far the killed process had come
    prune(checkpoints, 1, weights=weights)
    assert sorted(os.listdir(weights)) == ["step_000001", "step_000002"]
    assert os.listdir(weights / "step_000001") == ["config.json"]


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    (step_folder(tmp_path, 3) / "manifest.json").unlink()
    prune(tmp_path, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 2, 3]


def test_later_checkpoints_are_renamed_not_deleted(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    (step_folder(tmp_path, 3) / "config.json").unlink()
    assert retire_later_checkpoints(tmp_path, 1) == [
        (step_folder(tmp_path, 2), None),
        (step_folder(tmp_path, 3), "config.json is missing"),
    ]
    assert find_checkpoint(tmp_path, "auto") == step_folder(tmp_path, 1)
    assert (tmp_path / "step_000002.unused" / "actor" / "weights").exists()
    make(tmp_path, 2)
    retire_later_checkpoints(tmp_path, 1)
    assert {"step_000002.unused", "step_000002.unused2"} <= set(os.listdir(tmp_path))


# --- the model in it


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    run = train_here(tmp_path_factory.mktemp("run"), tiny_model, "schedule.steps=1")
    return step_folder(run / "checkpoints", 1)


def logits(folder: Path) -> torch.Tensor:
    """As anyone else would load and run it: nothing of ours is involved."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")(TOKENS).logits


def test_transformers_loads_a_checkpoint_as_it_is(checkpoint: Path, tiny_model: Path) -> None:
    assert not torch.equal(logits(checkpoint), logits(tiny_model))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (checkpoint, tiny_model))
    assert ours == theirs  # nothing of how it was trained is in it
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tiny_model).get_vocab()
    assert tokenizer.chat_template


def test_an_exported_model_gives_the_same_logits(checkpoint: Path, tmp_path: Path) -> None:
    export_model(checkpoint, tmp_path / "out", "auto")
    assert torch.equal(logits(tmp_path / "out"), logits(checkpoint))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert not {"actor", "state.json", "manifest.json"} & set(os.listdir(tmp_path / "out"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_model_can_be_exported_in_another_precision(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    export_model(checkpoint, tmp_path / "out", dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    torch.testing.assert_close(model.float()(TOKENS).logits, logits(checkpoint), atol=2e-2, rtol=0)


def test_a_run_stands_for_its_newest_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    run = checkpoint.parents[1]
    assert find_checkpoint(tmp_path, str(run)) == checkpoint
    result = corral(tmp_path, "export", str(run), "out")
    assert result.code == 0, result.stderr
    assert torch.equal(logits(tmp_path / "out"), logits(checkpoint))
    with pytest.raises(UserError, match=rf"{run} is a run, so name its checkpoint {checkpoint}$"):
        ModelShape.read(str(run))


def test_export_refuses_what_would_go_wrong(checkpoint: Path, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        export_model(checkpoint, tmp_path, "auto")
    with pytest.raises(UserError, match=r"not a usable checkpoint: it has no manifest\.json"):
        export_model(tiny_model, tmp_path / "out", "auto")
    with pytest.raises(UserError, match="choose auto, float32, bfloat16 or float16"):
        export_model(checkpoint, tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())


def test_export_copies_what_the_manifest_names_and_follows_no_link(checkpoint: Path, tmp_path: Path) -> None:
    copy, secret = tmp_path / "step_000001", tmp_path / "secret"
    shutil.copytree(checkpoint, copy)
    secret.write_text("secret")
    (copy / "beside.txt").symlink_to(secret)
    (copy / "extra.bin").write_bytes(b"not of the checkpoint")
    export_model(copy, tmp_path / "out", "auto")
    assert not {"beside.txt", "extra.bin"} & set(os.listdir(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    (copy / "config.json").rename(tmp_path / "config.json")
    (copy / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config\.json is a link"):
        export_model(copy, tmp_path / "other", "auto")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ('{"files": {"../secret": {"size": 6, "sha256": ""}}}', "names ../secret, which is not in the folder"),
        ('{"files": {"/etc/passwd": {"size": 6, "sha256": ""}}}', "names /etc/passwd, which is not in the folder"),
        ('{"files": ' + "[" * 100_000, "its manifest.json is damaged"),
    ],
)
def test_a_hostile_manifest_is_refused_in_words(tmp_path: Path, manifest: str, problem: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    found = problem_with(tmp_path, hashes=True)
    assert found is not None
    assert problem in found


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).T, "b": torch.tensor(3.0), "c": torch.randn(2).bfloat16()}
    save_tensors(tensors, tmp_path / "file")
    loaded = load_tensors(tmp_path / "file")
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"format": "pt"}
