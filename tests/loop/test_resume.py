"""A run that is killed and started again is, to the bit, the run that was not killed."""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import corral, start_corral
from runs import VALIDATION, num_steps, rows_of, same_outcome, train_here, write_recipe

from corral.observe.trajectory_store import read_trajectories
from corral.recipe.errors import UserError
from corral.training.tensor_files import DeferredWrites

GRPO = (*VALIDATION, "validation.every=2", "validation.temperature=1.0", "validation.samples_per_prompt=2")
PPO = (
    "algorithm.name=ppo",
    "algorithm.kl.controller=adaptive",
    "algorithm.kl.controller.horizon=50",
    "critic.optimizer.learning_rate=0.01",
    "optimizer.schedule=cosine",
    "batch.updates_per_step=2",
)
EVERY_STEP = ("schedule.steps=5", "checkpoint.every=1", "logging.trajectories=true")


FOUR_STEPS = ("schedule.steps=4", "checkpoint.every=1", "checkpoint.keep=4")


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A finished run with all its checkpoints; to be copied, not changed."""
    return train_here(tmp_path_factory.mktemp("four_steps"), tiny_model, *FOUR_STEPS)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.deadline("a process is killed at random moments")
@pytest.mark.parametrize(("overrides", "num_kills"), [(GRPO, 7), (PPO, 5)], ids=["grpo", "ppo"])
def test_kills_leave_no_trace(tmp_path: Path, tiny_model: Path, overrides: tuple[str, ...], num_kills: int) -> None:
    write_recipe(tmp_path, tiny_model)
    command = ("train", "recipe.yaml", *EVERY_STEP, *overrides)
    run = tmp_path / "runs" / "killed"
    chance = random.Random(num_kills)
    for _ in range(num_kills):
        process = start_corral(tmp_path, *command, "name=killed")
        target = num_steps(run) + chance.randint(0, 2)
        process.wait_until(lambda target=target: num_steps(run) >= target)
        time.sleep(chance.uniform(0, 0.2))
        process.send(signal.SIGKILL)
        if process.wait().code == 0:  # it was faster
            break
    finished = corral(tmp_path, *command, "name=killed")
    assert finished.code == 0, finished.stderr
    assert corral(tmp_path, *command, "name=whole").code == 0
    assert same_outcome(run, tmp_path / "runs" / "whole", step=5)


def hang_in_third_checkpoint() -> None:
    write = DeferredWrites.write

    def held(self: DeferredWrites) -> None:
        self.wait_for_copies()
        if any("step_000003" in str(file) for file in self.copies):
            time.sleep(600)
        write(self)

    DeferredWrites.write = held  # type: ignore[method-assign]


@pytest.mark.slow
def test_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    command = ("train", "recipe.yaml", *EVERY_STEP)
    corral(tmp_path, *command, "name=whole")
    run = tmp_path / "runs" / "killed"
    process = start_corral(tmp_path, *command, "name=killed", before=hang_in_third_checkpoint)
    process.wait_until(lambda: (run / "checkpoints" / ".step_000003.part").exists())
    process.send(signal.SIGKILL)
    assert process.wait().code == -signal.SIGKILL
    assert checkpoints(run)[-1] == "step_000002"
    finished = corral(tmp_path, *command, "name=killed")
    assert "resumed after step 2" in finished.stdout
    assert same_outcome(run, tmp_path / "runs" / "whole", step=5)
    assert checkpoints(run) == ["step_000004", "step_000005"]  # and nothing is left of the unfinished one


def test_a_finished_run_stays_as_it_is(tmp_path: Path, tiny_model: Path) -> None:
    run = train_here(tmp_path, tiny_model, *GRPO)
    manifest = run / "checkpoints" / "step_000002" / "manifest.json"
    before, written = rows_of(run), manifest.stat().st_mtime_ns
    train_here(tmp_path, tiny_model, *GRPO)
    assert rows_of(run) == before
    assert manifest.stat().st_mtime_ns == written


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_finished_run_can_be_made_longer(tmp_path: Path, tiny_model: Path, dtype: str) -> None:
    overrides = (f"model.dtype={dtype}", "train.logits_chunk=16")
    train_here(tmp_path, tiny_model, "schedule.steps=2", "name=longer", *overrides)
    longer = train_here(tmp_path, tiny_model, "schedule.steps=3", "name=longer", *overrides)
    whole = train_here(tmp_path, tiny_model, "schedule.steps=3", "name=whole", *overrides)
    assert same_outcome(longer, whole, step=3)
    assert (longer / "recipe.2.yaml").exists()


def damage_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("{")


def empty_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("[]")


def remove_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def flip_a_bit_of_the_weights(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)


def cut_off_the_optimizer(checkpoint: Path) -> None:
    file = checkpoint / "actor" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage", [damage_manifest, empty_manifest, remove_manifest, flip_a_bit_of_the_weights, cut_off_the_optimizer]
)
@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_used(
    tmp_path: Path, tiny_model: Path, four_steps: Path, damage: Callable[[Path], None]
) -> None:
    damaged = shutil.copytree(four_steps, tmp_path / "runs" / "damaged")
    damage(damaged / "checkpoints" / "step_000004")
    train_here(tmp_path, tiny_model, *FOUR_STEPS, "name=damaged")
    assert same_outcome(damaged, four_steps, step=4)
    assert "step_000004.unused" in checkpoints(damaged)


@pytest.mark.slow
@pytest.mark.parametrize("due", ["checkpoint.every=2", "checkpoint.best=validation/mean@1"])
def test_the_last_step_is_saved_when_it_is_due_also_without_a_checkpoint_at_the_end(
    tmp_path: Path, tiny_model: Path, due: str
) -> None:
    run = train_here(tmp_path, tiny_model, *VALIDATION, "validation.every=2", due, "checkpoint.at_end=false")
    assert [folder.name for folder in (run / "checkpoints").glob("step_*")] == ["step_000002"]


@pytest.mark.slow
def test_resume_never_makes_a_new_folder(tmp_path: Path, tiny_model: Path) -> None:
    first = train_here(tmp_path, tiny_model)
    before = rows_of(first)
    second = train_here(tmp_path, tiny_model, "checkpoint.resume=never", "seed=1")
    assert second.name == "tiny-2"
    assert [row["step"] for row in rows_of(second)] == [1, 2]
    assert rows_of(first) == before


@pytest.mark.slow
def test_epochs_of_other_steps_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    epochs = ("~schedule.steps", "schedule.epochs=0.2")
    train_here(tmp_path, tiny_model, *epochs)
    with pytest.raises(
        UserError, match=r"batch.prompts_per_step: 4 -> 2: with `schedule.epochs` .* the 2 that were made"
    ):
        train_here(tmp_path, tiny_model, *epochs, "batch.prompts_per_step=2")


@pytest.mark.slow
def test_a_new_run_from_a_checkpoint_may_have_another_controller_of_the_kl(
    tmp_path: Path, tiny_model: Path, four_steps: Path
) -> None:
    run, kl = four_steps, ("algorithm.kl.where=loss", "checkpoint.every=1")
    for step, controller in ((5, "fixed"), (6, "adaptive")):
        start = (
            f"checkpoint.resume={run}/checkpoints/step_{step - 1:06d}",
            f"schedule.steps={step}",
            f"name={controller}",
        )
        run = train_here(tmp_path, tiny_model, *start, *kl, f"algorithm.kl.controller={controller}")
        assert [row["step"] for row in rows_of(run)] == [step]


@pytest.mark.slow
def test_logs_are_in_the_folder_of_their_run(tmp_path: Path, tiny_model: Path) -> None:
    own_process = ("rollout.engine.own_process=true", "checkpoint.resume=never", "schedule.steps=1")
    for _ in range(2):
        run = train_here(tmp_path, tiny_model, *own_process)
        assert (run / "logs" / "engine-0.log").is_file()


def test_resume_from_an_earlier_checkpoint_of_the_same_run(tmp_path: Path, tiny_model: Path, four_steps: Path) -> None:
    run = shutil.copytree(four_steps, tmp_path / "runs" / "tiny")
    resume = f"checkpoint.resume={run}/checkpoints/step_000002"
    assert train_here(tmp_path, tiny_model, *FOUR_STEPS, "checkpoint.keep=2", resume) == run
    assert same_outcome(run, four_steps, step=4)
    assert checkpoints(run) == ["step_000003", "step_000003.unused", "step_000004", "step_000004.unused"]


def test_resume_from_a_checkpoint_of_another_run(tmp_path: Path, tiny_model: Path, four_steps: Path) -> None:
    resume = f"checkpoint.resume={four_steps}/checkpoints/step_000002"
    other = train_here(tmp_path, tiny_model, "schedule.steps=4", "name=other", resume)
    assert rows_of(other) == [row for row in rows_of(four_steps) if row["step"] > 2]


def test_resume_from_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    for path, problem in ((tmp_path / "nowhere", "there is no such folder"), (tiny_model, "it has no manifest.json")):
        finished = corral(tmp_path, "train", "recipe.yaml", f"checkpoint.resume={path}")
        assert finished.code == 2
        assert finished.errors == [f"error: checkpoint.resume: {path} is not a usable checkpoint: {problem}"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("seed=1", "was made with seed 0; the recipe says 1"),
        ("model.dtype=bfloat16", "was made with model.dtype float32; now it is bfloat16"),
        ("data.train.size=30", "made with 40 rows of data, now there are 30"),
        ("algorithm.name=ppo", "has no critic; it was made with another algorithm"),
    ],
)
def test_a_recipe_that_does_not_fit_the_checkpoint_is_refused_and_nothing_is_lost(
    tmp_path: Path, tiny_model: Path, four_steps: Path, change: str, expected: str
) -> None:
    write_recipe(tmp_path, tiny_model)
    run = shutil.copytree(four_steps, tmp_path / "runs" / "tiny")
    remove_manifest(run / "checkpoints" / "step_000004")
    before = rows_of(run)
    finished = corral(tmp_path, "train", "recipe.yaml", "schedule.steps=4", change, "--resume-anyway")
    assert finished.code == 2
    assert len(finished.errors) == 1
    assert expected in finished.errors[0]
    assert rows_of(run) == before
    assert "step_000004" in checkpoints(run)


@pytest.mark.slow
def test_prompts_are_drawn_exactly_once_over_resumes(tmp_path: Path, tiny_model: Path) -> None:
    steps = ("checkpoint.every=1", "logging.trajectories=true")
    train_here(tmp_path, tiny_model, *steps, "schedule.steps=2")
    run = train_here(tmp_path, tiny_model, *steps, "schedule.steps=4")
    prompt_ids = [
        record["prompt_id"]
        for file in sorted((run / "trajectories").iterdir())
        for record in read_trajectories(file)
        if record["sample"] == 0
    ]
    assert prompt_ids == list(range(16))
    state = json.loads((run / "checkpoints" / "step_000004" / "state.json").read_text())
    assert state["sampler"]["next_prompt_id"] == 16
