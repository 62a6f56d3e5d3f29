"""The manifests for KubeRay, against the operator's own schemas, and what it checks besides. No operator runs here."""

import copy
import os
from pathlib import Path
from typing import Any

import crd
import pytest
import yaml
from launching import HOSTILE, work

from corral.cli.launch import read_mapping
from corral.cluster.launchers.kuberay import MAX_CODE_BYTES, PodOptions, kuberay_launch
from corral.cluster.launchers.launch_spec import LaunchSpec, with_code
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
    "pod": PodOptions(
        tolerations=["nvidia.com/gpu", "dedicated=ml:NoSchedule"],
        node_selectors=["gpu=h100"],
        service_account="trainer",
        pull_secrets=["registry"],
        security_context={"runAsUser": 1000, "fsGroup": 1000},
        rdma="rdma/hca_shared_devices_a=2",
        patch={
            "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"}},
            "spec": {
                "priorityClassName": "high",
                "containers": [
                    {"name": "ray", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
                    {"name": "sidecar", "image": "busybox"},
                ],
            },
        },
    ),
}
ON_CLAIM = "logging.runs=/runs/here"


def manifests(of: LaunchSpec, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recipe's ConfigMap, and the job or cluster."""
    options.setdefault("claims", [f"results:{of.recipe.logging.runs}"])
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
@pytest.mark.slow
def test_the_operators_schema_takes_what_is_written(tmp_path, schemas, kind):
    for options in ({}, EVERYTHING):
        for accelerator in ("nvidia", "amd", "none"):
            for nodes in (1, 2):
                of = work(tmp_path, HOSTILE, ON_CLAIM, accelerator=accelerator, nodes=nodes)
                of = with_code(of, tmp_path, tmp_path, (), MAX_CODE_BYTES)
                options = {"claims": ["runs:/runs"], **options}
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
    cluster = cluster_of(manifests(work(tmp_path, ON_CLAIM), **EVERYTHING)[1])
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
    recipe, manifest = manifests(work(tmp_path, ON_CLAIM), **EVERYTHING)
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


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = cluster_of(manifest)
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("claims", [[], ["models:/models"], ["runs:/run"]])
def test_a_run_folder_on_a_pods_own_disk_is_refused(tmp_path: Path, claims: list[str]) -> None:
    with pytest.raises(UserError, match=r"/runs/here/tiny would be on a container's own disk.* --claim"):
        manifests(work(tmp_path, ON_CLAIM), claims=claims)
    with pytest.raises(UserError, match=r"runs/tiny would be"):
        manifests(work(tmp_path, "logging.runs=runs"), claims=["runs:/runs"])


def test_a_volume_of_a_patch_keeps_results_unless_it_goes_with_the_pod(tmp_path: Path) -> None:
    mounted = {"name": "ray", "volumeMounts": [{"name": "mine", "mountPath": "/runs"}]}
    for volume, is_kept in (({"nfs": {"server": "nas", "path": "/x"}}, True), ({"emptyDir": {}}, False)):
        patch = {"spec": {"volumes": [{"name": "mine", **volume}], "containers": [mounted]}}
        of, options = work(tmp_path, ON_CLAIM), {"claims": [], "pod": PodOptions(patch=patch)}
        if is_kept:
            _, manifest = manifests(of, **options)
            assert all(pod["spec"]["volumes"][-1] == {"name": "mine", **volume} for pod in pods(manifest))
        else:
            with pytest.raises(UserError, match="own disk"):
                manifests(of, **options)


def test_code_of_the_recipe_is_in_the_pods_where_the_recipe_finds_it(tmp_path: Path) -> None:
    """The files as the kubelet would lay them out, from keys and items: the reward is found among them."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "words.txt").write_text("ä\n")
    of = with_code(work(tmp_path), tmp_path, tmp_path, (), MAX_CODE_BYTES)
    recipe, manifest = manifests(of)
    for pod in pods(manifest):
        [volume] = [volume for volume in pod["spec"]["volumes"] if "configMap" in volume]
        there = tmp_path / "pod"
        for item in volume["configMap"]["items"]:
            (there / item["path"]).parent.mkdir(parents=True, exist_ok=True)
            (there / item["path"]).write_text(recipe["data"][item["key"]])
        loaded = load_recipe(there / "recipe.yaml")
        file, _, _ = loaded.environment.reward.name.partition(":")
        assert (there / "code" / file).read_text() == (tmp_path / "vowels.py").read_text()
        assert (there / "code" / "lib" / "words.txt").read_text() == "ä\n"
    assert manifest["spec"]["entrypoint"] == "env --chdir=/etc/corral/code corral train /etc/corral/recipe.yaml"


def test_code_that_an_annotation_does_not_hold_is_applied_by_the_server(tmp_path: Path) -> None:
    """Client-side, kubectl would copy all of it into an annotation, of which 256 KiB are allowed."""
    of, options = work(tmp_path), {"folder": tmp_path, "image": "x", "ray_version": "2.60.0"}
    claims = [f"results:{of.recipe.logging.runs}"]
    for launched in (of, with_code(of, tmp_path, tmp_path, (), MAX_CODE_BYTES)):
        [command] = kuberay_launch(launched, claims=claims, **options).commands
        assert ("--server-side" in command) == bool(launched.code)


def test_more_code_than_a_config_map_holds_is_refused(tmp_path: Path) -> None:
    of = work(tmp_path)
    (tmp_path / "large.py").write_text("x = 1\n" * 200_000)
    with pytest.raises(UserError, match=r"1.14 MiB.*--code DIR.*--no-code"):
        with_code(of, tmp_path, tmp_path, (), MAX_CODE_BYTES)
    sent_none = with_code(of, tmp_path, None, (), MAX_CODE_BYTES)
    assert sent_none.code == {}
    assert sent_none.recipe == of.recipe


def test_a_recipe_that_names_no_code_sends_none(tmp_path: Path) -> None:
    of = with_code(work(tmp_path, "environment.reward.name=exact"), tmp_path, tmp_path, (), MAX_CODE_BYTES)
    assert of.code == {}
    assert manifests(of)[1]["spec"]["entrypoint"] == "corral train /etc/corral/recipe.yaml"


@pytest.mark.parametrize(
    "override",
    [
        "data.train={path: rows.jsonl}",
        "model.path=./model",
        "reference.path=./other",
        "cluster.services={wiki: {retriever: index, port: 8000}}",
        "logging.prometheus={token_file: token}",
    ],
)
def test_a_path_of_this_machine_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="is relative to a folder of this machine"):
        with_code(work(tmp_path, override), tmp_path, tmp_path, (), MAX_CODE_BYTES)


def test_pods_are_as_the_rules_of_a_cluster_ask(tmp_path: Path) -> None:
    _, manifest = manifests(work(tmp_path, ON_CLAIM), **EVERYTHING)
    expected = {
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},
        ],
        "nodeSelector": {"gpu": "h100"},
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
    }
    # The operator's own pod that submits would have none of it, and could not pull the image.
    for pod in (*pods(manifest), manifest["spec"]["submitterPodTemplate"]):
        assert {name: pod["spec"].get(name) for name in expected} == expected
    for pod in pods(manifest):
        ray, sidecar = pod["spec"]["containers"]
        assert ray["resources"]["limits"]["rdma/hca_shared_devices_a"] == "2"
        assert ray["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert ray["name"].startswith("ray-")
        assert ray["env"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]
        assert len(ray["volumeMounts"]) == 4
        assert sidecar == {"name": "sidecar", "image": "busybox"}
        assert pod["spec"]["priorityClassName"] == "high"
        assert pod["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rdma-net"}


def test_without_rules_there_is_no_pod_of_our_own_to_submit(tmp_path: Path) -> None:
    assert "submitterPodTemplate" not in manifests(work(tmp_path))[1]["spec"]


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (PodOptions(tolerations=["a:Sometimes"]), "--toleration a:Sometimes is not"),
        (PodOptions(node_selectors=["gpu"]), "--node-selector gpu is not KEY=VALUE"),
        (PodOptions(patch={"containers": []}), "`metadata` and `spec`"),
    ],
)
def test_what_cannot_be_understood_is_refused(tmp_path: Path, pod: PodOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        manifests(work(tmp_path), pod=pod)


def test_a_patch_is_read_as_kubernetes_reads_it() -> None:
    assert read_mapping("--pod-patch", "{defaultMode: 0644, optional: yes}") == {"defaultMode": 0o644, "optional": True}
