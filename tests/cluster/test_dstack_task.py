"""The dstack task. dstack's own models read it, in a Python where dstack is installed. None is run: that takes
a fleet of machines."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deadlines import within
from launching import HOSTILE, work

from corral.cluster.launchers.dstack import MAX_CODE_BYTES, RECIPE, dstack_launch
from corral.cluster.launchers.launch_spec import LaunchFiles, LaunchSpec, with_code
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe

READ = """\
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
for text in json.load(sys.stdin):
    try:
        read = parse_run_configuration(yaml.safe_load(text))
        print(json.dumps({"type": type(read).__name__, "nodes": read.nodes, "name": read.name}))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""


def launch(of: LaunchSpec, folder: Path, **options: Any) -> LaunchFiles:
    options["volumes"] = [*options.get("volumes", ()), f"results:{of.recipe.logging.runs}"]
    return dstack_launch(of, folder=folder, image="registry.example/corral:1", **options)


def task_text(of: LaunchSpec, folder: Path, **options: Any) -> str:
    return next(text for name, text in launch(of, folder, **options).files.items() if name.endswith(".dstack.yml"))


def task(of: LaunchSpec, folder: Path, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(task_text(of, folder, **options))
    return found


def read_by_dstack(*texts: str) -> list[dict[str, Any]]:
    python = os.environ.get("CORRAL_TEST_DSTACK_PYTHON")
    if not python:
        pytest.skip("CORRAL_TEST_DSTACK_PYTHON names no Python with dstack")
    command, limit_s = [python, "-c", READ], within(60)
    result = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=limit_s)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_dstack_reads_the_task(tmp_path):
    texts = [
        task_text(work(tmp_path), tmp_path, gpu="80GB", environment=["WANDB_API_KEY"], volumes=["/data:/data"]),
        task_text(work(tmp_path, accelerator="amd"), tmp_path, gpu="MI300X", fleets=["mine"], volumes=["models:/m"]),
        task_text(work(tmp_path, accelerator="none", nodes=1), tmp_path),
        task_text(with_code(work(tmp_path, HOSTILE), tmp_path, tmp_path, (), MAX_CODE_BYTES), tmp_path),
    ]
    read = read_by_dstack(*texts)
    assert [found.get("type") for found in read] == ["TaskConfiguration"] * 4, read
    assert [found["nodes"] for found in read] == [2, 2, 1, 2]


def test_dstack_would_say_if_a_key_were_wrong(tmp_path):
    good = task_text(work(tmp_path), tmp_path)
    read = read_by_dstack(good.replace("commands:", "commandz:"), good.replace("shm_size", "shm"))
    assert all("error" in found for found in read), read


def test_every_node_comes_up_and_the_first_one_trains(tmp_path):
    (script,) = task(work(tmp_path), tmp_path)["commands"]
    others, _, head = script.partition("\nfi\n")
    assert 'if [ "$DSTACK_NODE_RANK" != 0 ]' in others
    assert "corral up || exit 1\n  corral up --block ||" in others
    assert f"corral up && corral check 16 --nodes 2 || exit 1\ncorral train {RECIPE} &" in head
    assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0


@pytest.mark.parametrize(("worker", "code"), [("true", 0), ("false", 0), ("exit 1", 1)])
def test_a_node_that_never_came_up_fails_and_one_that_outlives_the_head_does_not(tmp_path, worker, code):
    """`worker`: what becomes of `corral up --block`, or of the first `corral up`."""
    (script,) = task(work(tmp_path), tmp_path)["commands"]
    program = tmp_path / "corral"
    block, first = ("true", worker) if worker == "exit 1" else (worker, "true")
    program.write_text(f'#!/bin/sh\ncase "$*" in *--block*) {block} ;; *) {first} ;; esac\n')
    program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DSTACK_NODE_RANK": "1"}
    assert subprocess.run(["sh", "-c", script], env=env).returncode == code


def test_the_run_is_over_when_the_first_node_is_done(tmp_path):
    assert task(work(tmp_path), tmp_path)["stop_criteria"] == "master-done"


def test_secrets_are_there_by_name_only(tmp_path):
    assert task(work(tmp_path), tmp_path, environment=["WANDB_API_KEY"])["env"] == ["RAY_AUTH_TOKEN", "WANDB_API_KEY"]
    with pytest.raises(UserError, match="WANDB_API_KEY="):
        launch(work(tmp_path), tmp_path, environment=["WANDB_API_KEY=hunter2"])


def test_devices_are_asked_for(tmp_path):
    assert task(work(tmp_path), tmp_path, gpu="H100")["resources"]["gpu"] == "nvidia:H100:8"
    assert task(work(tmp_path, accelerator="amd"), tmp_path)["resources"]["gpu"] == "amd:8"
    assert task(work(tmp_path, accelerator="none"), tmp_path)["resources"]["gpu"] == 0


def test_the_recipe_goes_along_with_its_overrides(tmp_path):
    of = work(tmp_path, "seed=7")
    files = launch(of, tmp_path).files
    name, text = next((name, text) for name, text in files.items() if name.endswith(".recipe.yaml"))
    assert task(of, tmp_path)["files"] == [f"{name}:{RECIPE}"]
    (tmp_path / name).write_text(text)
    assert load_recipe(tmp_path / name) == of.recipe


def test_a_hostile_name_stays_text(tmp_path):
    of = work(tmp_path, HOSTILE)
    found = task(of, tmp_path)
    assert found["name"] == "run-touch-no-x-rm-rf-y"
    assert "touch" not in found["commands"][0]


def test_a_long_name_is_cut_to_what_dstack_allows(tmp_path):
    assert len(task(work(tmp_path, f"name={'long-' * 20}"), tmp_path)["name"]) <= 41


def test_a_run_folder_on_the_containers_own_disk_is_refused(tmp_path: Path) -> None:
    of = work(tmp_path, "logging.runs=/runs/here")
    for volumes in ([], ["/data:/data"], ["results:/run"]):
        with pytest.raises(UserError, match=r"own disk.* --volume"):
            dstack_launch(of, folder=tmp_path, image="x", volumes=volumes)
    dstack_launch(of, folder=tmp_path, image="x", volumes=["/nfs:/runs"])


def test_code_of_the_recipe_goes_along_and_is_where_training_starts(tmp_path: Path) -> None:
    of = with_code(work(tmp_path), tmp_path, tmp_path, (), MAX_CODE_BYTES)
    files, found = launch(of, tmp_path).files, task(of, tmp_path)
    assert files["tiny.code/vowels.py"] == (tmp_path / "vowels.py").read_text()
    assert found["files"] == ["tiny.recipe.yaml:/corral/recipe.yaml", "tiny.code:/corral/code"]
    (script,) = found["commands"]
    assert script.index("cd /corral/code") < script.index(f"corral train {RECIPE}")
    (tmp_path / "there.yaml").write_text(files["tiny.recipe.yaml"])
    assert load_recipe(tmp_path / "there.yaml").environment.reward.name == "vowels.py:share_of_vowels"
