"""Ctrl-C and SIGTERM: once ends the run in good order, twice ends it at once."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command, Finished, corral, start_corral
from runs import VALIDATION, rows_of, same_outcome, write_recipe

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
STEPS = ("schedule.steps=3", "logging.trajectories=true")
CALLS_BEFORE_TRAINING = 1
"""To see that it can be called, before the model is loaded."""
CALLS_PER_STEP = 16
CALLS_PER_VALIDATION = 6
LONG_UPDATES = "batch.ppo_epochs=20"


class Watched:
    """A run whose reward function tells how often it was called: the way to hit it at a certain moment."""

    def __init__(self, folder: Path, model: Path, *overrides: str, seconds: float = 0.0) -> None:
        self.folder, self.path = folder, folder / "runs" / "tiny"
        self.calls = folder / "calls"
        write_recipe(folder, model)
        self.command = ("train", "recipe.yaml", *STEPS, *overrides)
        slow = (
            f"environment.reward.name={folder}/vowels.py:slowly",
            f"environment.reward.options.calls={self.calls}",
            f"environment.reward.options.seconds={seconds}",
        )
        self.process: Command = start_corral(folder, *self.command, *slow)

    def num_calls(self) -> int:
        return self.calls.stat().st_size - CALLS_BEFORE_TRAINING if self.calls.exists() else 0

    def interrupt(self, when: Callable[["Watched"], bool], number: signal.Signals = signal.SIGINT) -> Finished:
        self.process.wait_until(lambda: when(self))
        self.process.send(number)
        return self.process.wait()

    def resumed_equals_uninterrupted(self) -> bool:
        # Without what makes the reward slow and counts its calls: another function, with the same rewards.
        assert corral(self.folder, *self.command, "--resume-anyway").code == 0
        assert corral(self.folder, *self.command, "name=whole").code == 0
        return same_outcome(self.path, self.folder / "runs" / "whole", step=3)


def is_rolling_out_step_3(run: Watched) -> bool:
    return run.num_calls() > 2 * CALLS_PER_STEP + 2


def is_training_in_step_2(run: Watched) -> bool:
    """The last answer was scored; a moment later the updates have begun."""
    if run.num_calls() < 2 * CALLS_PER_STEP:
        return False
    time.sleep(0.1)
    return True


def is_validating_after_step_1(run: Watched) -> bool:
    return run.num_calls() > CALLS_PER_VALIDATION + CALLS_PER_STEP + 2


@pytest.mark.slow
@BOTH
def test_interrupt_during_a_rollout(tmp_path: Path, tiny_model: Path, number: signal.Signals) -> None:
    run = Watched(tmp_path, tiny_model, seconds=0.03)
    finished = run.interrupt(is_rolling_out_step_3, number)
    assert finished.code == 0
    assert finished.stderr == ""
    assert "the same command again (stopped after step 2 of 3)" in finished.stdout
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step_000002"]
    assert [row["step"] for row in rows_of(run.path)] == [1, 2]
    assert run.resumed_equals_uninterrupted()


@pytest.mark.slow
def test_interrupt_during_training(tmp_path: Path, tiny_model: Path) -> None:
    run = Watched(tmp_path, tiny_model, LONG_UPDATES)
    finished = run.interrupt(is_training_in_step_2)
    assert finished.code == 0
    assert finished.stderr == ""
    assert "stopping as soon as this step is done" in finished.stdout
    assert "the same command again (stopped after step 2 of 3)" in finished.stdout
    assert run.resumed_equals_uninterrupted()


@pytest.mark.slow
def test_interrupt_while_validating(tmp_path: Path, tiny_model: Path) -> None:
    """The validation that was cut short is made by the run that goes on."""
    run = Watched(tmp_path, tiny_model, *VALIDATION, "validation.every=1", seconds=0.03)
    finished = run.interrupt(is_validating_after_step_1)
    assert "stopped after step 1 of 3" in finished.stdout
    assert [row["step"] for row in rows_of(run.path)] == [0, 1]
    assert run.resumed_equals_uninterrupted()


@pytest.mark.slow
def test_interrupts_at_any_moment_leave_no_trace(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    command = ("train", "recipe.yaml", *STEPS, *VALIDATION, "validation.every=1", "checkpoint.every=2")
    run = tmp_path / "runs" / "tiny"
    chance = random.Random(0)
    for _ in range(5):
        process = start_corral(tmp_path, *command)
        process.wait_until(lambda: (run / "logs" / "main.log").exists())
        time.sleep(chance.uniform(0.1, 0.7))
        process.send(chance.choice([signal.SIGINT, signal.SIGTERM]))
        finished = process.wait()
        assert "Traceback" not in finished.stderr
        if "corral evaluate" in finished.stdout:  # it had been faster
            break
    assert corral(tmp_path, *command).code == 0
    assert corral(tmp_path, *command, "name=whole").code == 0
    assert same_outcome(run, tmp_path / "runs" / "whole", step=3)


def test_interrupt_before_the_first_step_leaves_nothing_to_resume_but_a_way_to_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = Watched(tmp_path, tiny_model)
    finished = run.interrupt(lambda run: (run.path / "logs" / "main.log").exists())
    assert finished.code == 0
    assert "the same command again (stopped after step 0 of 3)" in finished.stdout
    assert not list((run.path / "checkpoints").iterdir())


@pytest.mark.slow
def test_interrupting_a_run_in_a_new_folder_says_how_to_go_on_in_it(tmp_path: Path, tiny_model: Path) -> None:
    run = Watched(tmp_path, tiny_model, "checkpoint.resume=never", seconds=0.02)
    finished = run.interrupt(is_rolling_out_step_3)
    [line] = [line for line in finished.stdout.splitlines() if line.startswith("resume")]
    change = line.split(" with ")[1].split(" (")[0].split()
    assert corral(tmp_path, *run.command, *change, "--resume-anyway").code == 0
    assert [row["step"] for row in rows_of(run.path)] == [1, 2, 3]


@BOTH
def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path, tiny_model: Path, number: signal.Signals) -> None:
    run = Watched(tmp_path, tiny_model, "batch.ppo_epochs=100000", "checkpoint.every=1")
    run.process.wait_until(lambda: run.num_calls() >= CALLS_PER_STEP)
    time.sleep(0.3)  # to train, for a very long time
    run.process.send(number)
    time.sleep(0.3)
    assert run.process.is_running()
    run.process.send(number)
    finished = run.process.wait(timeout_s=10)
    assert finished.code == 130
    assert finished.errors == ["error: stopped at once; what was saved before is as it was"]
    assert "Traceback" not in finished.stderr
    assert not list((run.path / "checkpoints").iterdir())


def test_an_interrupt_does_not_wait_for_a_reward_that_hangs(tmp_path: Path, tiny_model: Path) -> None:
    run = Watched(tmp_path, tiny_model, "environment.reward.timeout_s=600", seconds=600)
    started = time.monotonic()
    finished = run.interrupt(lambda run: run.calls.exists())
    assert finished.code == 0
    assert time.monotonic() - started < 20
