"""Ctrl-C and SIGTERM: once ends the run in good order, twice, or before training, ends it at once."""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Finished, corral, start_corral
from deadlines import within
from runs import VALIDATION, rows_of, same_outcome, slowly, write_recipe
from terminal import Terminal

from corral.runtime.group import LocalRuntime
from corral.runtime.model_workers import ActorWorker

EXIT_CODE = {signal.SIGINT: 130, signal.SIGTERM: 0}
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
STEPS = ("schedule.steps=3", "logging.trajectories=true")
CALLS_BEFORE_TRAINING = 1
"""To see that it can be called, before the model is loaded."""
CALLS_PER_STEP = 16
CALLS_PER_VALIDATION = 6
CALLS_BEFORE_STEP_3 = 2 * CALLS_PER_STEP


class Watched:
    """A run whose reward function tells how often it was called: the way to hit it at a certain moment. `hangs_after`
    so many calls in training it does not answer any more."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *overrides: str,
        hangs_after: int = 10**6,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.folder, self.path = folder, folder / "runs" / "tiny"
        self.calls = folder / "calls"
        write_recipe(folder, model)
        self.command = ("train", "recipe.yaml", *STEPS, *overrides)
        slow = (
            f"environment.reward.name={folder}/vowels.py:slowly",
            f"environment.reward.options.calls={self.calls}",
            "environment.reward.options.seconds=600",
            f"environment.reward.options.after={CALLS_BEFORE_TRAINING + hangs_after}",
            "environment.reward.timeout_s=600",
        )
        self.process: Command = start_corral(folder, *self.command, *slow, before=before)

    def num_calls(self) -> int:
        return self.calls.stat().st_size - CALLS_BEFORE_TRAINING if self.calls.exists() else 0

    def interrupt_at(self, num_calls: int, number: signal.Signals = signal.SIGINT) -> Finished:
        """At the one with which the reward function hangs."""
        self.process.wait_until(lambda: self.num_calls() > num_calls)
        self.process.send(number)
        return self.process.wait()

    def interrupt_update(self, number: signal.Signals = signal.SIGINT) -> None:
        """Returns when it has said what becomes of that."""
        self.process.wait_until((self.folder / "updating").exists)
        self.process.send(number)
        self.process.wait_until(lambda: "stopping as soon as this step is done" in self.process.stdout.read_text())

    def resumed_equals_uninterrupted(self) -> bool:
        # Without what makes the reward slow and counts its calls: another function, with the same rewards.
        assert corral(self.folder, *self.command, "--resume-anyway").code == 0
        assert corral(self.folder, *self.command, "name=whole").code == 0
        return same_outcome(self.path, self.folder / "runs" / "whole", step=3)


def hold_updates(step: int) -> None:
    """Those of a step say that they have begun, and wait for a file, `go`."""
    accumulate = ActorWorker.accumulate

    def held(self: ActorWorker, *arguments: Any) -> Any:
        if Path("calls").stat().st_size == CALLS_BEFORE_TRAINING + step * CALLS_PER_STEP:
            Path("updating").touch()
            while not Path("go").exists():
                time.sleep(0.01)
        return accumulate(self, *arguments)

    ActorWorker.accumulate = held  # type: ignore[method-assign]


@pytest.mark.slow
@BOTH
def test_interrupt_during_a_rollout(tmp_path: Path, tiny_model: Path, number: signal.Signals) -> None:
    run = Watched(tmp_path, tiny_model, hangs_after=CALLS_BEFORE_STEP_3 + 2)
    finished = run.interrupt_at(CALLS_BEFORE_STEP_3 + 2, number)
    assert finished.code == EXIT_CODE[number]
    assert finished.stderr == ""
    assert "the same command again (stopped after step 2 of 3)" in finished.stdout
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step_000002"]
    assert [row["step"] for row in rows_of(run.path)] == [1, 2]
    assert run.resumed_equals_uninterrupted()


@pytest.mark.slow
def test_interrupt_during_training(tmp_path: Path, tiny_model: Path) -> None:
    run = Watched(tmp_path, tiny_model, before=partial(hold_updates, step=2))
    run.interrupt_update()
    (tmp_path / "go").touch()
    finished = run.process.wait()
    assert finished.code == 130
    assert finished.stderr == ""
    assert "the same command again (stopped after step 2 of 3)" in finished.stdout
    assert run.resumed_equals_uninterrupted()


@pytest.mark.slow
def test_interrupt_while_validating(tmp_path: Path, tiny_model: Path) -> None:
    """The validation that was cut short is made by the run that goes on."""
    num_calls = CALLS_PER_VALIDATION + CALLS_PER_STEP + 2
    run = Watched(tmp_path, tiny_model, *VALIDATION, "validation.every=1", hangs_after=num_calls)
    finished = run.interrupt_at(num_calls)
    assert "stopped after step 1 of 3" in finished.stdout
    assert [row["step"] for row in rows_of(run.path)] == [0, 1]
    assert run.resumed_equals_uninterrupted()


@pytest.mark.slow
@pytest.mark.deadline("signals come at random moments of a process")
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


def hold_loading() -> None:
    """The model is loaded, without an end."""

    def held(*_: Any) -> None:
        Path("loading").touch()
        while True:
            time.sleep(0.01)

    LocalRuntime.build = held  # type: ignore[method-assign]


@BOTH
@pytest.mark.deadline("the model is loaded without an end")
def test_an_interrupt_while_the_model_is_loaded_ends_the_run_at_once(
    tmp_path: Path, tiny_model: Path, number: signal.Signals
) -> None:
    run = Watched(tmp_path, tiny_model, before=hold_loading)
    run.process.wait_until((tmp_path / "loading").exists)
    run.process.send(number)
    finished = run.process.wait(timeout_s=10)
    assert finished.code == EXIT_CODE[number]
    if number == signal.SIGINT:
        assert finished.errors == ["error: stopped at once; what was saved before is as it was"]
    else:
        assert finished.stdout.endswith("there was nothing to save; the same command again starts it\n")
    assert "Traceback" not in finished.stderr
    assert (run.path / "logs" / "main.log").read_text() == ""
    assert not list((run.path / "checkpoints").iterdir())


def test_an_interrupt_of_the_first_rollout_leaves_nothing_to_resume_but_a_way_to_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = Watched(tmp_path, tiny_model, hangs_after=0)
    finished = run.interrupt_at(0)
    assert finished.code == 130
    assert "the same command again (stopped after step 0 of 3)" in finished.stdout
    assert not list((run.path / "checkpoints").iterdir())


@pytest.mark.slow
def test_interrupting_a_run_in_a_new_folder_says_how_to_go_on_in_it(tmp_path: Path, tiny_model: Path) -> None:
    run = Watched(tmp_path, tiny_model, "checkpoint.resume=never", hangs_after=CALLS_BEFORE_STEP_3 + 2)
    finished = run.interrupt_at(CALLS_BEFORE_STEP_3 + 2)
    [line] = [line for line in finished.stdout.splitlines() if line.startswith("resume")]
    change = line.split(" with ")[1].split(" (")[0].split()
    assert corral(tmp_path, *run.command, *change, "--resume-anyway").code == 0
    assert [row["step"] for row in rows_of(run.path)] == [1, 2, 3]


@BOTH
def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path, tiny_model: Path, number: signal.Signals) -> None:
    (tmp_path / "go").touch()
    before = partial(hold_updates, step=1)
    run = Watched(tmp_path, tiny_model, "batch.ppo_epochs=100000", "checkpoint.every=1", before=before)
    run.interrupt_update(number)
    assert run.process.is_running()  # and trains, for a very long time
    run.process.send(number)
    finished = run.process.wait(timeout_s=10)
    assert finished.code == 130
    assert finished.errors == ["error: stopped at once; what was saved before is as it was"]
    assert "Traceback" not in finished.stderr
    assert not list((run.path / "checkpoints").iterdir())


def test_ctrl_c_on_a_terminal_leaves_no_traceback(tmp_path: Path, tiny_model: Path) -> None:
    """Rollouts that are cancelled report themselves as finished when their progress bar is gone."""
    write_recipe(tmp_path, tiny_model)
    options = (f"environment.reward.options.after={CALLS_BEFORE_TRAINING}", "environment.reward.timeout_s=600")
    terminal = Terminal(tmp_path, "train", "recipe.yaml", *STEPS, *slowly(tmp_path, 600.0), *options)
    terminal.command.wait_until(
        lambda: (tmp_path / "calls").exists() and (tmp_path / "calls").stat().st_size > CALLS_BEFORE_TRAINING
    )
    terminal.press_ctrl_c()
    code, _ = terminal.finish()
    assert code == 130
    log = (tmp_path / "runs" / "tiny" / "logs" / "main.log").read_text()
    assert log.splitlines()[-1].endswith("INFO corral.loop.train: stopped after step 0 of 3")
    assert "Traceback" not in log


def test_an_interrupt_does_not_wait_for_a_reward_that_hangs(tmp_path: Path, tiny_model: Path) -> None:
    run = Watched(tmp_path, tiny_model, hangs_after=-CALLS_BEFORE_TRAINING)
    started = time.monotonic()
    run.process.wait_until(run.calls.exists)
    run.process.send(signal.SIGINT)
    finished = run.process.wait()
    assert finished.code == 130
    assert time.monotonic() - started < within(20)
