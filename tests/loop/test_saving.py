"""When checkpoints are saved, and that training goes on while they are written."""

import math
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from deadlines import within
from runs import VALIDATION, rows_of, train_here
from test_validation import SEVERAL
from transformers import AutoModelForCausalLM

from corral.loop import training_loop
from corral.loop.training_loop import RunState
from corral.loop.validation import ValidationResult
from corral.observe.console import Console
from corral.observe.run_files import read_metrics
from corral.recipe.errors import RunError, RunInterrupted
from corral.training.checkpoint import problem_with
from corral.training.tensor_files import DeferredWrites

EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep=9")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs" / "tiny" / "checkpoints").iterdir())


@pytest.mark.parametrize(("minutes", "steps"), [("0.00001", [1, 2, 3]), ("30", [3]), ("0", [3])])
@pytest.mark.slow
def test_a_run_saves_when_its_last_checkpoint_is_old(
    tmp_path: Path, tiny_model: Path, minutes: str, steps: list[int]
) -> None:
    train_here(tmp_path, tiny_model, "schedule.steps=3", f"checkpoint.minutes={minutes}", "checkpoint.keep=9")
    assert checkpoints(tmp_path) == [f"step_{step:06d}" for step in steps]


def give_validations(monkeypatch: pytest.MonkeyPatch, metrics: Sequence[dict[str, float]]) -> None:
    """The validations of the next run have these metrics, one after the other."""
    given = iter(metrics)

    async def validate(parts: object, console: object) -> ValidationResult:
        return ValidationResult(next(given), [], 6, "question")

    monkeypatch.setattr(training_loop, "validate", validate)


def test_the_best_checkpoint_by_validation_is_saved_and_kept(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of the validation are given here: the best is that after the second step."""
    give_validations(monkeypatch, [{"validation/mean@1": value} for value in (0.9, 0.1, 0.8, 0.3, 0.7)])
    settings = ("schedule.steps=4", "validation.every=1", "checkpoint.best=validation/mean@1", "checkpoint.keep=1")
    train_here(tmp_path, tiny_model, *VALIDATION, *settings)
    assert checkpoints(tmp_path) == ["step_000002", "step_000004"]


@pytest.mark.parametrize("steps", [(2, 4), (4,)])
@pytest.mark.slow
def test_a_score_that_was_not_finite_is_not_the_best_and_hinders_no_other(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, steps: Sequence[int]
) -> None:
    """A run that resumes in the middle reads its metrics, in which such a score is null."""
    give_validations(monkeypatch, [{"validation/mean@1": value} for value in (0.9, math.nan, 0.2, 0.8, 0.1)])
    settings = (*VALIDATION, "validation.every=1", "checkpoint.best=validation/mean@1", "checkpoint.keep=1")
    for number in steps:
        train_here(tmp_path, tiny_model, f"schedule.steps={number}", "optimizer.schedule=constant", *settings)
    assert checkpoints(tmp_path) == ["step_000003", "step_000004"]


def test_a_metric_that_the_validation_does_not_have_ends_the_run_with_those_it_has(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Before the first step, though it is not needed yet."""
    with pytest.raises(RunError, match=r"no metric accuracy; it has validation/.*mean@1"):
        train_here(tmp_path, tiny_model, *VALIDATION, "checkpoint.best=accuracy")
    assert [row["step"] for row in rows_of(tmp_path / "runs" / "tiny")] == [0]


@pytest.mark.slow
def test_why_samples_failed_is_said_before_the_metric_that_is_missing_with_them(
    tmp_path: Path, tiny_model: Path
) -> None:
    """A sample that failed is an error; one to which the reward does not apply leaves its source without metrics."""
    (tmp_path / "judge.py").write_text(
        "def fails(response, prompt): return 1 / 0 if '*' in str(prompt) else 0.5\n"
        "def passes(response, prompt): return None if '*' in str(prompt) else 0.5\n"
    )
    best, limit = "checkpoint.best=validation/products/mean@1", "environment.max_error_rate=0.2"
    settings = (*SEVERAL, best, limit, "logging.trajectories=true")
    with pytest.raises(RunError, match=r"2 of 6 samples failed.*ZeroDivisionError"):
        train_here(tmp_path, tiny_model, *settings, f"environment.reward.name={tmp_path}/judge.py:fails")
    assert len(list(tmp_path.rglob("*.validation.parquet"))) == 1
    train_here(tmp_path, tiny_model, *settings, f"environment.reward.name={tmp_path}/judge.py:passes", "name=other")
    assert (tmp_path / "runs" / "other" / "checkpoints" / "step_000002").is_dir()


@pytest.mark.slow
def test_a_metric_that_is_missing_once_is_a_warning(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_validations(
        monkeypatch, [{"validation/sums/mean@1": 0.1}, {"validation/mean@1": 0.2}, {"validation/sums/mean@1": 0.3}]
    )
    settings = ("validation.every=1", "checkpoint.best=validation/sums/mean@1", "checkpoint.keep=9")
    warnings: list[str] = []
    monkeypatch.setattr(Console, "warn", lambda console, message: warnings.append(message))
    train_here(tmp_path, tiny_model, *VALIDATION, *settings)
    assert checkpoints(tmp_path) == ["step_000002"]
    assert any("the validation has no metric validation/sums/mean@1" in warning for warning in warnings)


@pytest.mark.slow
def test_the_best_loss_is_the_lowest(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_validations(monkeypatch, [{"validation/loss": value} for value in (9.0, 2.0, 1.0, 3.0)])
    settings = ("schedule.steps=3", "validation.every=1", "checkpoint.best=validation/loss", "checkpoint.keep=1")
    train_here(tmp_path, tiny_model, *VALIDATION, *settings)
    assert checkpoints(tmp_path) == ["step_000002", "step_000003"]


def test_a_validation_without_any_reward_ends_the_run_with_a_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    """The judge is gone after the first step."""
    (tmp_path / "judge.py").write_text(
        "from pathlib import Path\n"
        "def judge(response, folder):\n"
        "    metrics = Path(folder, 'runs/tiny/metrics.jsonl')\n"
        "    if metrics.exists() and metrics.read_text().count('\\n') > 1:\n"
        "        raise ConnectionError('gone')\n"
        "    return len(response) / 8\n"
    )
    reward = f"{{name: '{tmp_path}/judge.py:judge', on_error: drop, options: {{folder: '{tmp_path}'}}}}"
    settings = (f"environment.reward={reward}", "environment.max_error_rate=null")
    with pytest.raises(RunError, match="none of 6 samples has a reward"):
        train_here(tmp_path, tiny_model, *VALIDATION, *settings, "validation.every=1", "schedule.steps=3")
    assert checkpoints(tmp_path) == ["step_000001"]


def test_a_run_folder_in_the_home_directory_is_made_there(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = train_here(tmp_path, tiny_model, "logging.runs=~/runs", "schedule.steps=1")
    assert run.parent == tmp_path / "home" / "runs"
    assert (run / "checkpoints" / "step_000001").is_dir()
    its_own = "checkpoint.resume=~/runs/tiny/checkpoints/step_000001"
    assert train_here(tmp_path, tiny_model, "logging.runs=~/runs", its_own, "schedule.steps=1") == run


def test_checkpoints_that_are_no_longer_kept_leave_their_models(tmp_path: Path, tiny_model: Path) -> None:
    settings = ("schedule.steps=3", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_weights=true")
    train_here(tmp_path, tiny_model, *settings)
    assert checkpoints(tmp_path) == ["step_000003"]
    weights = tmp_path / "runs" / "tiny" / "weights"
    assert sorted(path.name for path in weights.iterdir()) == ["step_000001", "step_000002"]
    model, loaded = AutoModelForCausalLM.from_pretrained(weights / "step_000002", output_loading_info=True)
    assert not loaded["missing_keys"]
    assert model.num_parameters() > 0
    assert not (weights / "step_000002" / "actor").exists()


def test_a_command_gets_every_checkpoint_before_it_can_be_deleted(tmp_path: Path, tiny_model: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    command = f'["cp", "-r", "{{checkpoint}}", "{store}/{{step}}"]'
    settings = ("schedule.steps=3", "checkpoint.every=1", "checkpoint.keep=1")
    train_here(tmp_path, tiny_model, *settings, f"checkpoint.upload={command}")
    assert sorted(path.name for path in store.iterdir()) == ["1", "2", "3"]
    assert all(problem_with(path, hashes=True) is None for path in store.iterdir())


def test_an_upload_that_fails_is_a_warning(tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = '["sh", "-c", "echo the store is closed; exit 3"]'
    train_here(tmp_path, tiny_model, "schedule.steps=1", f"checkpoint.upload={command}")
    assert checkpoints(tmp_path) == ["step_000001"]
    assert "the command for step 1 ended with exit code 3: the store is closed" in caplog.text


@pytest.fixture
def hold_writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Checkpoints are written only when the event is set."""
    may_write, write = threading.Event(), DeferredWrites.write

    def held(self: DeferredWrites) -> None:
        assert may_write.wait(within(60)), "nobody has let the checkpoint be written"
        write(self)

    monkeypatch.setattr(DeferredWrites, "write", held)
    return may_write


def on_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Does something when the step is over."""

    def recorded(run: RunState, *_: object) -> None:
        if run.step == step:
            action()

    monkeypatch.setattr(training_loop, "warn_if_idle", recorded)


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, tiny_model: Path, hold_writing: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is written only after the second step; until then it is not there. It holds the weights of its own
    step all the same: those of a run that was not held up."""
    seen: list[list[str]] = []

    def second_step() -> None:
        seen.append(checkpoints(tmp_path))
        hold_writing.set()

    on_step(monkeypatch, 2, second_step)
    run = train_here(tmp_path, tiny_model, "schedule.steps=3", *EVERY_STEP)
    assert seen == [[".step_000001.part"]]
    assert checkpoints(tmp_path) == [f"step_{step:06d}" for step in (1, 2, 3)]
    assert "time/save_s" in read_metrics(run / "metrics.jsonl")[-1]
    monkeypatch.undo()
    (tmp_path / "other").mkdir()
    other = train_here(tmp_path / "other", tiny_model, "schedule.steps=3", *EVERY_STEP)
    for name in ("model.safetensors", "actor/optimizer.safetensors", "ledger.jsonl"):
        first, second = (folder / "checkpoints" / "step_000001" / name for folder in (run, other))
        assert first.read_bytes() == second.read_bytes(), name


def test_what_was_not_written_when_a_run_ended_is_not_there(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for the second checkpoint, which is noticed while later steps are made."""
    write = DeferredWrites.write

    def full(self: DeferredWrites) -> None:
        self.wait_for_copies()
        if any("step_000002" in str(file) for file in self.copies):
            raise OSError(28, "No space left on device")
        write(self)

    monkeypatch.setattr(DeferredWrites, "write", full)
    with pytest.raises(RunError, match="the checkpoint of step 2 could not be written"):
        train_here(tmp_path, tiny_model, "schedule.steps=9", *EVERY_STEP)
    assert checkpoints(tmp_path) == ["step_000001"]


def test_a_run_that_fails_still_finishes_the_checkpoint_that_it_writes(
    tmp_path: Path, tiny_model: Path, hold_writing: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        threading.Timer(0.5, hold_writing.set).start()
        raise RunError("for this test")

    on_step(monkeypatch, 2, fail)
    with pytest.raises(RunError, match="for this test"):
        train_here(tmp_path, tiny_model, "schedule.steps=3", *EVERY_STEP)
    assert checkpoints(tmp_path) == ["step_000001"]
    assert problem_with(tmp_path / "runs" / "tiny" / "checkpoints" / "step_000001", hashes=True) is None


@pytest.mark.parametrize("end", ["stopped", "failed"])
@pytest.mark.slow
def test_an_upload_that_takes_long_does_not_keep_a_run_from_ending(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """The upload of the first checkpoint would take a day. Where the run is stopped, the last one is uploaded."""

    def leave() -> None:
        if end == "failed":
            raise RunError("for this test")
        signal.raise_signal(signal.SIGINT)

    on_step(monkeypatch, 2, leave)
    command = f'["sh", "-c", "if [ {{step}} = 1 ]; then sleep 86400; fi; touch {tmp_path}/{{step}}"]'
    with pytest.raises(RunError, match="for this test") if end == "failed" else pytest.raises(RunInterrupted):
        train_here(tmp_path, tiny_model, "schedule.steps=9", *EVERY_STEP, f"checkpoint.upload={command}")
    assert "the command for step 1 was ended, as the run ends" in caplog.text
    assert checkpoints(tmp_path) == ["step_000001", "step_000002"][: 1 if end == "failed" else 2]
    assert (tmp_path / "2").exists() == (end == "stopped")
