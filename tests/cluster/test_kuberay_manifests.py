"""The manifests for KubeRay, against the operator's own schemas, and what it checks besides. No operator runs here."""

import copy
import os
from pathlib import Path
from typing import Any

import crd
import pytest
import yaml
from launching import HOSTILE, work

from corral.cluster.launchers.kuberay import kuberay_launch
from corral.cluster.launchers.launch_spec import LaunchSpec
from corral.recipe.errors import UserError
from corral.recipe.load import load_recipe

FILES = {"RayJob": "ray.io_rayjobs.yaml", "RayCluster": "ray.io_rayclusters.yaml"}
EVERYTHING: dict[str, Any] = {
    "namespace": "team",
    "cpus": "32",
    "memory": "200Gi",
    "claims": ["models:/models", "runs:/runs"],
    "secrets": ["wandb"],
    "token_secret": "ray-token",
}


def manifests(of: LaunchSpec, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recipe's ConfigMap, and the job or cluster."""
    launch = kuberay_launch(of, folder=Path("/x"), image="registry.example/corral:1", ray_version="2.60.0", **options)
    (text,) = launch.files.values()
    recipe, manifest = yaml.safe_load_all(text)
    return recipe, manifest


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    return spec["rayClusterSpec"] if manifest["kind"] == "RayJob" else spec


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = cluster_of(manifest)
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


@pytest.fixture(scope="module")
def schemas() -> Path:
    folder = os.environ.get("CORRAL_TEST_KUBERAY_CRDS")
    if not folder:
        pytest.skip("CORRAL_TEST_KUBERAY_CRDS names no folder with KubeRay's schemas")
    pytest.importorskip("jsonschema")
    return Path(folder)


@pytest.mark.parametrize("kind", ["job", "cluster"])
def test_the_operators_schema_takes_what_is_written(tmp_path, schemas, kind):
    for options in ({}, EVERYTHING):
        for accelerator in ("nvidia", "amd", "none"):
            for nodes in (1, 2):
                of = work(tmp_path, HOSTILE, accelerator=accelerator, nodes=nodes)
                _, manifest = manifests(of, kind=kind, **options)
                assert crd.problems(schemas / FILES[manifest["kind"]], manifest) == []


def test_a_key_that_the_schema_does_not_know_would_be_found(tmp_path, schemas):
    _, manifest = manifests(work(tmp_path))
    wrong = copy.deepcopy(manifest)
    head = cluster_of(wrong)["headGroupSpec"]
    head["rayStartParam"] = head.pop("rayStartParams")
    cluster_of(wrong)["workerGroupSpecs"][0]["replicas"] = "one"
    found = crd.problems(schemas / FILES["RayJob"], wrong)
    assert any("rayStartParam" in problem for problem in found)
    assert any("replicas" in problem for problem in found)


def test_the_head_is_one_of_the_nodes(tmp_path):
    _, manifest = manifests(work(tmp_path, nodes=4))
    (group,) = cluster_of(manifest)["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 3)
    assert cluster_of(manifests(work(tmp_path, nodes=1))[1])["workerGroupSpecs"] == []


@pytest.mark.parametrize(("accelerator", "key"), [("nvidia", "nvidia.com/gpu"), ("amd", "amd.com/gpu")])
def test_every_pod_has_its_devices(tmp_path, accelerator, key):
    _, manifest = manifests(work(tmp_path, accelerator=accelerator))
    assert [container["resources"]["limits"][key] for container in containers(manifest)] == ["8", "8"]


def test_without_gpus_ray_is_told_of_worker_slots(tmp_path):
    """In one place of two: the operator refuses resources in both."""
    cluster = cluster_of(manifests(work(tmp_path, accelerator="none"))[1])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["resources"] == {"corral_device": "8"}
        assert not {"resources", "num-gpus", "labels"} & set(group["rayStartParams"])


def test_shared_memory_has_a_size(tmp_path):
    cluster = cluster_of(manifests(work(tmp_path), shm="64Gi")[1])
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_the_cluster_has_a_token_and_the_version_that_the_operator_asks_for(tmp_path):
    assert cluster_of(manifests(work(tmp_path))[1])["authOptions"] == {"mode": "token"}
    cluster = cluster_of(manifests(work(tmp_path), **EVERYTHING)[1])
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert cluster["rayVersion"] == "2.60.0"


def test_no_word_of_the_recipe_is_in_the_entrypoint(tmp_path):
    """The operator pastes it into a shell's command line."""
    of = work(tmp_path, HOSTILE, "seed=7")
    recipe, manifest = manifests(of)
    assert manifest["spec"]["entrypoint"] == "corral train /etc/corral/recipe.yaml"
    file = tmp_path / "there.yaml"
    file.write_text(recipe["data"]["recipe.yaml"])
    assert load_recipe(file) == of.recipe


def test_pods_see_the_recipe_the_claims_and_the_secrets(tmp_path):
    recipe, manifest = manifests(work(tmp_path), **EVERYTHING)
    for container in containers(manifest):
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert paths == {"/dev/shm", "/etc/corral", "/models", "/runs"}
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    volumes = cluster_of(manifest)["headGroupSpec"]["template"]["spec"]["volumes"]
    assert {"name": "recipe", "configMap": {"name": recipe["metadata"]["name"]}} in volumes


def test_names_are_short_enough_for_the_operator(tmp_path):
    recipe, manifest = manifests(work(tmp_path, f"name={'very-long-' * 10}"))
    assert len(manifest["metadata"]["name"]) <= 47
    assert recipe["metadata"] == manifest["metadata"]


def test_a_claim_without_a_path_is_refused(tmp_path):
    with pytest.raises(UserError, match="--claim models"):
        manifests(work(tmp_path), claims=["models"])
