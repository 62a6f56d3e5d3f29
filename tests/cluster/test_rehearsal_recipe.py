"""`corral rehearse --quick` runs a step of any recipe, whatever large parts it names. What a whole rehearsal keeps."""

import json
import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from commands import corral
from runs import write_recipe

from corral.cluster import rehearsal_recipe
from corral.cluster.rehearsal_recipe import cut, prepare
from corral.model.families import checked_plan
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe
from corral.recipe.mesh import MeshShape


@pytest.mark.parametrize(
    "teacher", ["reference.path=large/teacher", "reference.endpoint={url: 'http://127.0.0.1:1/v1', model: large}"]
)
def test_a_teacher_is_as_small_as_the_model(tmp_path: Path, tiny_model: Path, teacher: str) -> None:
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), ["algorithm.name=distill", teacher])
    small = cut(recipe, tmp_path / "small").recipe
    assert small.reference.path == small.model.path == str(tmp_path / "small" / "model")


def test_a_sharded_reward_model_is_whole_in_one_process(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ["environment.reward={name: reward_model}", "reward_model={path: classifier, shard: 2}"]
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), overrides)
    assert cut(recipe, tmp_path).recipe.reward_model.shard == 1


def test_devices_meshes_and_engines_are_those_of_the_recipe(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal_recipe, "available_memory", lambda: 1 << 40)
    overrides = [
        "cluster={nodes: 4, devices_per_node: 8, placement: {rollout: 0-19, actor: 24-31}}",
        "train.parallel={tensor: 2, pipeline: 2}",
        "schedule.max_staleness=1",
        "rollout.engine=vllm",
    ]
    rehearsal = cut(load_recipe(write_recipe(tmp_path, tiny_model), overrides), tmp_path / "small", "here")
    prepare(rehearsal)
    plan = checked_plan(rehearsal.recipe)
    assert plan.meshes["actor"] == MeshShape(pipeline=2, shard=2, tensor=2)
    assert {role: len(devices) for role, devices in plan.placement.roles.items()} == {"actor": 8, "rollout": 20}
    assert plan.recipe.cluster.is_here
    assert plan.recipe.schedule.max_staleness == 1
    assert plan.recipe.rollout.engine.own_process
    assert any(line.startswith("vllm, which is not installed here") for line in rehearsal.replaced)


def test_rows_that_can_be_read_are_kept_and_others_replaced(tmp_path: Path, tiny_model: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, tiny_model))
    kept = cut(recipe, tmp_path)
    assert kept.recipe.data.train.path == recipe.data.train.path
    assert kept.recipe.environment.max_error_rate == recipe.environment.max_error_rate
    missing = load_recipe(write_recipe(tmp_path, tiny_model), ["data.train={path: missing.jsonl}"])
    replaced = cut(missing, tmp_path)
    assert replaced.recipe.data.train.path == "arithmetic:addition"
    assert replaced.recipe.environment.max_error_rate is None
    assert any("missing.jsonl" in line for line in replaced.replaced)


def test_the_configuration_comes_from_the_hub_where_it_is_not_here(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is a mirror (`HF_ENDPOINT`)."""
    (tmp_path / "one" / "model" / "resolve").mkdir(parents=True)
    shutil.copytree(tiny_model, tmp_path / "one" / "model" / "resolve" / "main")
    overrides = ["model.path=one/model", f"data.train.path={tmp_path}/rows.jsonl"]
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), overrides)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url)
        found = cut(recipe, tmp_path).replaced
        server.shutdown()
    model_type = json.loads((tiny_model / "config.json").read_text())["model_type"]
    assert any(line.startswith(f"the model one/model: few narrow layers of {model_type}, ") for line in found)
    assert any("neither on this machine nor to be had" in line for line in cut(recipe, tmp_path).replaced)


def test_processes_that_memory_has_no_room_for_are_left_away(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["cluster={devices_per_node: 8}", "rollout.engine={name: native, own_process: true}"]
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), overrides)
    monkeypatch.setattr(rehearsal_recipe, "available_memory", lambda: 16 * rehearsal_recipe.PROCESS_BYTES)
    assert cut(recipe, tmp_path, "here").recipe.rollout.engine.own_process
    monkeypatch.setattr(rehearsal_recipe, "available_memory", lambda: 12 * rehearsal_recipe.PROCESS_BYTES)
    rehearsal = cut(recipe, tmp_path, "here")
    assert not rehearsal.recipe.rollout.engine.own_process
    assert "no memory for 8 more processes" in rehearsal.replaced[-1]
    monkeypatch.setattr(rehearsal_recipe, "available_memory", lambda: 7 * rehearsal_recipe.PROCESS_BYTES)
    with pytest.raises(UserError, match="memory for 7 of 8 workers"):
        cut(recipe, tmp_path, "here")


@pytest.mark.slow
def test_rows_belong_to_the_environments_of_the_recipe(tmp_path: Path, tiny_model: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model)
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith("environment:")]
    environment = f"{{reward: {{name: '{tmp_path}/vowels.py:share_of_vowels', workers: 1}}}}"
    recipe.write_text("\n".join([*lines, f"environments: {{one: {environment}, two: {environment}}}"]))
    ended = corral(tmp_path, "rehearse", str(recipe), "--quick")
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "step 1/1" in ended.stdout
