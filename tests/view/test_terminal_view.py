"""`corral status RUN` and `corral compare`: the numbers of the run's files, live in a terminal, once elsewhere."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
from commands import corral, start_corral
from deadlines import within
from guides import block
from runs import write_recipe
from view_runs import HOSTILE, lines_of, metrics_of, write_run

from corral.observe.run_files import MetricsFile
from corral.observe.run_folder import LOCK, RunFolder
from corral.view.runs import RunReader
from corral.view.terminal_view import open_runs, run_status, sparkline, stages, workers

CORRAL = [sys.executable, "-m", "corral.cli.main"]


def status(run: Path) -> dict[str, Any]:
    return run_status(open_runs([run])[0])


def test_the_status_has_the_last_numbers_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", of=10)
    found = status(run)
    rows = lines_of(run / "metrics.jsonl")
    assert (found["state"], found["step"], found["num_steps"]) == ("stopped", 3, 10)
    assert found["metrics"]["reward/mean"]["values"] == [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert found["stages_s"] == {"rollout": 1.5, "train": 1.25, "other": 0.25}
    assert found["warnings"] == ["2026-01-01T00:00:00+0000 WARNING corral.x: ab"]
    assert (found["eta_s"], found["workers"]) == (None, [])


def test_a_running_run_has_an_estimate_of_the_time_left(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", of=10)
    with RunFolder(run):
        found = status(run)
    assert (found["state"], found["eta_s"]) == ("running", 7 * 3.0)


def test_a_run_that_has_measured_nothing_yet_has_a_status(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "new"):
        found = status(tmp_path / "new")
    assert (found["state"], found["step"], found["metrics"], found["stages_s"]) == ("running", 0, {}, {})


def test_a_stage_that_was_not_measured_is_not_shown() -> None:
    assert stages([{"step": 1, "time/step_s": 2.0, "time/rollout_s": 0.5}]) == {"rollout": 0.5, "other": 1.5}
    assert stages([{"step": 1, "validation/mean@1": 0.5}]) == {}


def test_a_sparkline_goes_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([1.0, 2.0, 8.0]) == "▁▂█"
    assert sparkline([3.0, 3.0]) == "▁▁"


def test_the_status_is_printed_once_where_there_is_no_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one")
    with RunFolder(run):
        printed = corral(tmp_path, "status", "one")
    assert printed.code == 0, printed.stderr
    assert "running  step 3/3" in printed.stdout
    assert "25.0 % ± 10.0 -> 75.0 % ± 10.0" in printed.stdout
    assert "rollout 50%, train 42%, other 8%" in printed.stdout
    assert "\x1b" not in printed.stdout
    assert json.loads(corral(tmp_path, "status", str(run), "--json").stdout)["state"] == "finished"


def test_hostile_text_does_not_reach_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path, "hostile", text=HOSTILE, model=json.dumps("\x1b]0;hacked\x07"))
    for arguments in (("status", "hostile"), ("compare", "hostile")):
        printed = corral(tmp_path, *arguments).stdout
        assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", printed), arguments


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    (tmp_path / "empty").mkdir()
    for arguments, expected in {
        ("status", "no/such"): "no/such is no folder",
        ("status", "./empty"): "is not the folder of a run",
        ("compare", "one", "empty"): "empty is not the folder of a run",
        ("compare", "one", "./one"): "is named twice",
    }.items():
        refused = corral(tmp_path, *arguments)
        assert refused.code == 2
        assert expected in refused.stderr


def test_compare_has_scores_speed_and_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "one")
    write_run(tmp_path / "b", "one", steps=2, of=9)
    folders = ("a/one", "b/one")
    found = json.loads(corral(tmp_path, "compare", *folders, "--json").stdout)
    first, second = found["runs"]
    assert first["after"] == {"kind": "score", "value": 0.75, "ci95": 0.1, "min": None, "max": None}
    assert first["end"] == {"reward/mean": pytest.approx(2 / 7)}
    assert (first["minutes"], second["minutes"], second["tokens_per_s"]) == (0.15, 0.1, 101.5)
    assert found["recipe"] == {"schedule.steps": {str(tmp_path / "a/one"): 3, str(tmp_path / "b/one"): 9}}
    table = corral(tmp_path, "compare", *folders).stdout
    assert re.search(r"held-out score after\s+75.0 % ± 10.0\s+75.0 % ± 10.0", table)
    assert re.search(r"schedule.steps\s+3\s+9", table)


def test_a_key_that_one_recipe_lacks_is_its_default(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    other = write_run(tmp_path, "two")
    with (other / "recipe.yaml").open("a") as file:
        file.write("seed: null\n")
    found = json.loads(corral(tmp_path, "compare", "one", "two", "--json").stdout)
    assert found["recipe"] == {"seed": {"two": None}}
    assert re.search(r"seed\s+default\s+None", corral(tmp_path, "compare", "one", "two").stdout)


def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / "runs", name)
    for command in block("status-run").commands:
        assert corral(tmp_path, *command.split()[1:]).code == 0, command


def follow(folder: Path) -> "pexpect.spawn[str]":
    command = [*CORRAL[1:], "status", "one"]
    return pexpect.spawn(CORRAL[0], command, cwd=folder, encoding="utf-8", timeout=within(60))


@pytest.mark.slow
def test_the_view_in_a_terminal_follows_the_run_and_ends_with_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", of=5)
    with RunFolder(run):
        view = follow(tmp_path)
        view.expect("running.*step 3/5")
        MetricsFile(run / "metrics.jsonl").log(4, metrics_of(4))
        view.expect("step 4/5")
    view.expect("stopped")
    view.expect(pexpect.EOF)
    assert view.wait() == 0
    with RunFolder(run):
        view = follow(tmp_path)
        view.expect("running")
        view.sendintr()
        view.expect("the run goes on")
        view.expect(pexpect.EOF)
        assert view.wait() == 0


@pytest.mark.slow
def test_the_status_of_a_run_that_is_trained_says_what_its_processes_do(tmp_path: Path, tiny_model: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model)
    training = start_corral(tmp_path, "train", str(recipe), "schedule.steps=10000")
    try:
        training.wait_until(lambda: (tmp_path / "runs/tiny/metrics.jsonl").exists())
        printed = subprocess.run(
            [*CORRAL, "status", "runs/tiny", "--json"], cwd=tmp_path, capture_output=True, check=True, env=os.environ
        )
        found = json.loads(printed.stdout)
    finally:
        training.process.kill()
        training.wait()
    assert found["state"] == "running"
    controller = next(one for one in found["workers"] if one["pid"] == training.process.pid)
    assert controller["what"].startswith("controller of run tiny")
    assert controller["doing"]


TRAINS = """
import sys, time
from corral.runtime.presence import announce

announce("controller", "same", folder=sys.argv[1])
print(flush=True)
time.sleep(60)
"""


def test_runs_of_the_same_name_in_different_folders_are_not_mixed(tmp_path: Path) -> None:
    folders = [tmp_path / name / "same" for name in ("one", "other")]
    processes = []
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            process = subprocess.Popen([sys.executable, "-c", TRAINS, str(folder)], stdout=subprocess.PIPE)
            processes.append(process)
            assert process.stdout is not None
            process.stdout.readline()
            (folder / LOCK).write_text(f"process {process.pid} on {socket.gethostname()}\n")
        assert [[one["pid"] for one in workers(RunReader("same", folder))] for folder in folders] == [
            [one.pid] for one in processes
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()
