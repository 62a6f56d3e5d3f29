import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import within

from corral.observe.run_folder import RunFolder
from corral.recipe.errors import UserError

HOLD = """
import sys, time
from pathlib import Path
from corral.observe.run_folder import RunFolder
folder = RunFolder.open(Path(sys.argv[1]), "run", "auto")
print("open", flush=True)
time.sleep(60)
"""

FORK = """
import os, sys, time
from pathlib import Path
from corral.observe.run_folder import RunFolder
folder = RunFolder.open(Path(sys.argv[1]), "run", "auto")
if os.fork():
    os._exit(9)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_new_run_has_every_subfolder(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "runs", "run", "auto") as folder:
        assert folder.path == tmp_path / "runs" / "run"
        assert all(sub.is_dir() for sub in (folder.trajectories, folder.checkpoints, folder.logs, folder.failures))
        assert not folder.holds_run


@pytest.mark.parametrize(
    ("earlier", "resume", "name"),
    [
        (["run"], "auto", "run"),
        (["run", "run-2"], "never", "run-3"),
        (["run"], "{runs}/run/checkpoints/step_000010", "run"),
        (["run", "other"], "{runs}/other/checkpoints/step_000010", "run-2"),
    ],
    ids=["goes on", "takes the next free number", "a checkpoint of this run", "a checkpoint of another run"],
)
def test_a_run_goes_on_in_its_folder_or_takes_another_one(
    tmp_path: Path, earlier: list[str], resume: str, name: str
) -> None:
    for run in earlier:
        with RunFolder.open(tmp_path, run, "auto") as folder:
            folder.metrics.write_text('{"step": 1}\n')
    with RunFolder.open(tmp_path, "run", resume.format(runs=tmp_path)) as folder:
        assert folder.name == name
        assert folder.holds_run == (name == "run")


def test_a_folder_with_only_checkpoints_holds_a_run(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, "run", "auto") as folder:
        (folder.checkpoints / "step_000001").mkdir()
    with RunFolder.open(tmp_path, "run", "auto") as folder:
        assert folder.holds_run


def test_never_takes_the_name_itself_when_nothing_was_written_there(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, "run", "never").close()
    with RunFolder.open(tmp_path, "run", "never") as folder:
        assert folder.name == "run"


def test_never_stays_away_from_files_that_are_not_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with RunFolder.open(tmp_path, "run", "never") as folder:
        assert folder.name == "run-2"


def test_never_takes_another_folder_while_one_is_being_written(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, "run", "never"), RunFolder.open(tmp_path, "run", "never") as second:
        assert second.name == "run-2"


def test_two_processes_cannot_write_one_run_and_the_error_names_the_other(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=rf"in use by process {other.pid} on "):
            RunFolder.open(tmp_path, "run", "auto")
        other.kill()
    RunFolder.open(tmp_path, "run", "auto").close()


def test_a_forked_worker_that_outlives_its_run_does_not_hold_the_folder(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert parent.wait(within(10)) == 9
        try:
            RunFolder.open(tmp_path, "run", "auto").close()
        finally:
            os.kill(worker, signal.SIGKILL)


def test_the_recipe_is_written_once(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, "run", "auto") as folder:
        assert folder.write_recipe("name: run\n") == folder.recipe
        assert folder.write_recipe("name: run\n") == folder.recipe
        assert not (folder.path / "recipe.2.yaml").exists()


def test_another_recipe_is_kept_beside_the_first(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, "run", "auto") as folder:
        folder.write_recipe("seed: 0\n")
        folder.metrics.write_text("{}\n")
        assert folder.write_recipe("seed: 1\n").name == "recipe.2.yaml"
        assert folder.write_recipe("seed: 0\n").name == "recipe.3.yaml"
        assert folder.recipe.read_text() == "seed: 0\n"


def test_the_recipe_of_a_start_that_failed_is_not_kept(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, "run", "auto") as folder:
        for seed in (0, 1):
            assert folder.write_recipe(f"seed: {seed}\n") == folder.recipe
        assert folder.recipe.read_text() == "seed: 1\n"
        folder.metrics.write_text("{}\n")
        folder.archive_attempt()
        assert folder.write_recipe("seed: 2\n").name == "recipe.2.yaml"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\nb"])
def test_a_name_that_is_no_folder_name_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name of a folder"):
        RunFolder.open(tmp_path, name, "auto")


@pytest.mark.parametrize("name", ["run & more", "(a) $x", "运行"])
def test_names_that_a_recipe_may_have_are_fine(tmp_path: Path, name: str) -> None:
    with RunFolder.open(tmp_path, name, "auto") as folder:
        assert folder.path == tmp_path / name


def test_a_place_where_no_folder_can_be_made_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match=r"logging\.runs"):
        RunFolder.open(tmp_path / "runs", "run", "auto")


def test_an_attempt_without_a_checkpoint_is_kept_aside(tmp_path: Path) -> None:
    for number in (1, 2):
        with RunFolder.open(tmp_path, "run", "auto") as folder:
            folder.metrics.write_text(f"{number}")
            (folder.trajectories / "step_000001.parquet").write_bytes(b"")
            attempt = folder.archive_attempt()
            assert attempt == folder.path / "attempts" / str(number)
            assert (attempt / "metrics.jsonl").read_text() == f"{number}"
            assert (attempt / "trajectories" / "step_000001.parquet").exists()
            assert not folder.metrics.exists()
            assert not any(folder.trajectories.iterdir())
