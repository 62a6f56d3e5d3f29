"""Failure is data: what fails costs what it must, is written down, and says why if the run has to end."""

import io
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import corral, start_corral
from deadlines import within
from runs import rows_of, same_outcome, steps_of, train_here, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from corral.loop.train import train
from corral.model.families import checked_plan
from corral.observe.console import Console
from corral.recipe.load import load_recipe
from corral.training.checkpoint import problem_with, step_folder

REWARDS = '''
import pathlib, time

def count(calls):
    with open(calls, "a") as file:
        file.write(".")
    return pathlib.Path(calls).stat().st_size

def share(response):
    return sum(letter in "aeiou" for letter in response) / 8

def raises(response, calls):
    if count(calls) == 3:
        raise ValueError("the scorer is\\nbroken")
    return share(response)

def hangs(response, calls):
    if count(calls) == 3:
        time.sleep(600)
    return share(response)

def dies(response, calls):
    import os
    if count(calls) == 3:
        os._exit(1)
    return share(response)

def is_not_finite(response, calls):
    return float("nan") if count(calls) == 3 else share(response)

def is_huge_in_step_2(response, calls):
    """Finite, but the square of its gradient is not. The first call is the one before the model is loaded."""
    return share(response) * (1e30 if 17 < count(calls) <= 33 else 1)

def is_huge(response, calls):
    return share(response) * 1e30

def prints(response, calls):
    import sys
    print("seen", repr(response))
    print("twice", file=sys.stderr)
    return share(response)
'''


def reward(folder: Path, name: str) -> tuple[str, ...]:
    (folder / "rewards.py").write_text(REWARDS)
    return (
        f"environment.reward.name={folder}/rewards.py:{name}",
        f"environment.reward.options.calls={folder}/calls",
    )


# --- rewards


def test_what_a_reward_prints_is_in_a_log_and_counted_on_the_console(
    tmp_path: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), reward(tmp_path, "prints"))
    out = io.StringIO()
    folder = train(recipe, checked_plan(recipe), Console(out))
    printed = (folder / "logs" / "prints.log").read_text()
    assert printed.count("seen ") == printed.count("twice\n") == 1 + 2 * 16  # one call before the model is loaded
    first, last = (line for line in out.getvalue().splitlines() if "prints.log" in line)
    assert first == f"printed by rewards or environments: 34 lines in {folder}/logs/prints.log"
    assert last.split() == ["prints", "66", "lines", "in", f"{folder}/logs/prints.log"]
    assert "twice" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("raises", "ValueError: the scorer is broken (rewards.py:"),
        ("hangs", f"the reward function took longer than {within(0.5):g} s and was killed"),
        ("dies", "the reward function's process died: it ended with exit code 1"),
        ("is_not_finite", "the reward must be finite; the function returned nan"),
    ],
)
@pytest.mark.slow
def test_a_reward_that_fails_costs_one_sample(tmp_path: Path, tiny_model: Path, name: str, expected: str) -> None:
    soon = f"environment.reward.timeout_s={within(0.5):g}"
    run = train_here(tmp_path, tiny_model, *reward(tmp_path, name), soon, "schedule.steps=3")
    assert [row["samples/errors"] for row in steps_of(run)] == [1, 0, 0]
    assert steps_of(run)[0]["stop/error"] == 1 / 16
    assert expected in (run / "logs" / "main.log").read_text()


ENVIRONMENT = """
class Broken:
    is_down = False

    async def reset(self, row, seed):
        if Broken.is_down:
            raise OSError("the game server is down")
        Broken.is_down = True  # it was up before the model was loaded
        return row.prompt

    async def step(self, reply): ...
    async def close(self): ...
"""


@pytest.mark.slow
def test_a_run_in_which_every_environment_fails_ends_with_the_reason(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    (tmp_path / "games.py").write_text(ENVIRONMENT)
    finished = corral(tmp_path, "train", "recipe.yaml", "environment.name=games.py:Broken")
    assert finished.code == 1
    [error] = finished.errors
    assert error.startswith("error: step 1: all 16 samples failed, 16 of them with: reset: OSError: the game server")
    assert "(games.py:7)" in error
    assert "Traceback" not in finished.stderr


# --- numbers that are not finite


@pytest.fixture(scope="module")
def poisoned_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One weight is not a number; so is, soon, everything."""
    folder = tmp_path_factory.mktemp("models") / "poisoned"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def assert_ended_by_three_skipped_updates(folder: Path, model: Path, *overrides: str, last_step: int = 3) -> None:
    """A run of nine steps, which leaves no checkpoint."""
    write_recipe(folder, model)
    finished = corral(folder, "train", "recipe.yaml", "schedule.steps=9", *overrides)
    assert finished.code == 1
    [error] = finished.errors
    assert error.startswith(f"error: step {last_step}: 3 updates in a row were not finite (")
    assert "Traceback" not in finished.stderr
    run = folder / "runs" / "tiny"
    rows = steps_of(run)
    assert [row["updates/skipped"] for row in rows[-3:]] == [1, 1, 1]
    failures = sorted(path.name for path in (run / "failures").iterdir())
    assert failures == [f"step_{step:06d}.npz" for step in range(last_step - 2, last_step + 1)]
    assert not list((run / "checkpoints").iterdir())


def test_a_model_with_a_bad_weight_is_refused_when_it_is_loaded(tmp_path: Path, poisoned_model: Path) -> None:
    write_recipe(tmp_path, poisoned_model)
    finished = corral(tmp_path, "train", "recipe.yaml")
    assert finished.code == 2
    assert finished.errors == [
        f"error: model.path: {poisoned_model}: its log-probs are NaN: weights or config.json are bad"
    ]


@pytest.mark.parametrize(
    "overrides",
    [(), ("algorithm.name=ppo",), ("algorithm.kl.where=loss", "algorithm.kl.controller=adaptive")],
    ids=["grpo", "ppo", "adaptive KL, which does not hide the reason"],
)
def test_a_learning_rate_that_breaks_the_model_ends_the_run(
    tmp_path: Path, tiny_model: Path, overrides: tuple[str, ...]
) -> None:
    rate = ("optimizer.learning_rate=1e30", "checkpoint.every=2")
    assert_ended_by_three_skipped_updates(tmp_path, tiny_model, *rate, *overrides, last_step=4)


def test_rewards_that_overflow_end_the_run(tmp_path: Path, tiny_model: Path) -> None:
    overrides = (*reward(tmp_path, "is_huge"), "algorithm.name=dr_grpo")
    assert_ended_by_three_skipped_updates(tmp_path, tiny_model, *overrides)


def test_one_bad_step_is_skipped_and_its_batch_kept(tmp_path: Path, tiny_model: Path) -> None:
    overrides = (*reward(tmp_path, "is_huge_in_step_2"), "schedule.steps=4", "algorithm.name=dr_grpo")
    run = train_here(tmp_path, tiny_model, *overrides, "checkpoint.every=2")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000003", "step_000004"]
    assert [row["updates/made"] for row in steps_of(run)] == [1, 0, 1, 1]
    assert [row["updates/skipped"] for row in steps_of(run)] == [0, 1, 0, 0]
    assert [path.name for path in (run / "failures").iterdir()] == ["step_000002.npz"]
    with np.load(run / "failures" / "step_000002.npz") as batch:
        assert len(batch["groups"]) == 16
        assert {"tokens", "logprobs", "advantages", "token_rewards", "old_logprobs"} <= set(batch)
    assert "update skipped" in (run / "logs" / "main.log").read_text()


# --- a full disk


def limit_file_size() -> None:
    """Less than a checkpoint's largest file, more than all others."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one_usable(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    command = ("train", "recipe.yaml", "checkpoint.every=1")
    corral(tmp_path, *command, "schedule.steps=2")
    finished = corral(tmp_path, *command, "schedule.steps=4", before=limit_file_size)
    assert finished.code == 1
    [error] = finished.errors
    assert error.startswith("error: the checkpoint of step 3 could not be written (")
    assert "Traceback" not in finished.stderr
    run = tmp_path / "runs" / "tiny"
    assert sorted(os.listdir(run / "checkpoints")) == ["step_000001", "step_000002"]
    assert problem_with(step_folder(run / "checkpoints", 2), hashes=True) is None
    assert corral(tmp_path, *command, "schedule.steps=4").code == 0
    assert corral(tmp_path, *command, "schedule.steps=4", "name=whole").code == 0
    assert same_outcome(run, tmp_path / "runs" / "whole", step=4)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for two checkpoints, not for three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "none", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_ends_the_run_with_the_reason(tmp_path: Path, tiny_model: Path, small_disk: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    keep = ("checkpoint.every=1", "checkpoint.keep=9", "schedule.steps=9", f"logging.runs={small_disk}")
    finished = corral(tmp_path, "train", "recipe.yaml", *keep)
    assert finished.code == 1
    [error] = finished.errors
    assert "the checkpoint of step 3 could not be written" in error
    assert "No space left on device" in error
    assert "Traceback" not in finished.stderr
    assert problem_with(step_folder(small_disk / "tiny" / "checkpoints", 2), hashes=True) is None
    # It is noticed while later steps are made, and before the next checkpoint.
    assert [row["step"] for row in rows_of(small_disk / "tiny")] in ([1, 2, 3], [1, 2, 3, 4])


# --- two at once


def test_a_second_process_names_who_has_the_run(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    first = start_corral(tmp_path, "train", "recipe.yaml", "batch.ppo_epochs=100000")
    first.wait_until(lambda: (tmp_path / "runs" / "tiny" / "logs" / "main.log").exists())
    second = corral(tmp_path, "train", "recipe.yaml")
    owner = f"process {first.process.pid} on {socket.gethostname()}"
    first.process.kill()
    first.wait()
    assert second.code == 2
    [error] = second.errors
    assert f"tiny is in use by {owner}" in error
    third = corral(tmp_path, "train", "recipe.yaml")
    assert third.code == 0, third.stderr  # a killed process holds no lock
