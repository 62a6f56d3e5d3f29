"""KubeRay: manifests for the operator that runs Ray on Kubernetes.

The first pod is the head and has devices like any other node, so that the recipe's numbering is the same everywhere.
The operator starts Ray itself, `corral up` is not involved; it also makes the token, and hands it to all pods.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from corral.cluster.launchers.launch_spec import LaunchFiles, LaunchSpec, yaml_text
from corral.recipe.errors import UserError
from corral.recipe.load import dump_recipe
from corral.runtime.nodes import RANK_LABEL, WORKER_SLOT

RayKind = Literal["job", "cluster"]

LONGEST_NAME = 47  # of a RayJob; the operator makes longer names out of it
FOLDER = "/etc/corral"
RECIPE = "recipe.yaml"
GPU = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
KEEP_FINISHED_S = 600


def kuberay_launch(
    spec: LaunchSpec,
    *,
    folder: Path,
    image: str,
    kind: RayKind = "job",
    ray_version: str,
    namespace: str | None = None,
    shm: str = "16Gi",
    cpus: str | None = None,
    memory: str | None = None,
    claims: Sequence[str] = (),
    secrets: Sequence[str] = (),
    token_secret: str | None = None,
    start_timeout_s: int = 1800,
) -> LaunchFiles:
    """`folder`: for the file. `claims`: persistent volume claims as `name:/path`. `secrets`: Secrets whose keys become
    variables. `token_secret`: one with the key auth_token, instead of the operator's."""
    name = spec.short_name(LONGEST_NAME)
    named = {"name": name, **({"namespace": namespace} if namespace else {})}
    requests = {name: value for name, value in (("cpu", cpus), ("memory", memory)) if value is not None}
    has_gpus = spec.accelerator != "none"
    # The operator reads GPUs from the pod's limits; Ray cannot see worker slots itself.
    resources = {} if has_gpus else {"resources": {WORKER_SLOT: str(spec.devices_per_node)}}
    limits = {**requests, **({GPU[spec.accelerator]: str(spec.devices_per_node)} if has_gpus else {})}
    volumes, mounts = pod_volumes(name, shm, [split_claim(claim) for claim in claims])

    def template(container: str) -> dict[str, Any]:
        inside = {
            "name": container,
            "image": image,
            **({"resources": {"limits": limits, "requests": limits}} if limits else {}),
            "volumeMounts": mounts,
            **({"envFrom": [{"secretRef": {"name": secret}} for secret in secrets]} if secrets else {}),
        }
        return {"spec": {"containers": [inside], "volumes": volumes}}

    cluster = {
        "rayVersion": ray_version,
        "authOptions": {"mode": "token", **({"secretName": token_secret} if token_secret else {})},
        "headGroupSpec": {
            # The operator and the submitter reach the dashboard over the pod's network; it asks for the token.
            "rayStartParams": {"dashboard-host": "0.0.0.0"},
            **resources,
            "labels": {RANK_LABEL: "0"},
            "template": template("ray-head"),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": spec.num_nodes - 1,
                "minReplicas": spec.num_nodes - 1,
                "maxReplicas": spec.num_nodes - 1,
                "rayStartParams": {},
                **resources,
                "template": template("ray-worker"),
            }
        ][: spec.num_nodes - 1],
    }
    recipe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": {RECIPE: dump_recipe(spec.recipe)}}
    job = {
        # The operator pastes this into a shell's command line: no word of the recipe belongs here.
        "entrypoint": f"corral train {FOLDER}/{RECIPE}",
        "preRunningDeadlineSeconds": start_timeout_s,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEEP_FINISHED_S,
        "rayClusterSpec": cluster,
    }
    called, content = {"job": ("RayJob", job), "cluster": ("RayCluster", cluster)}[kind]
    file = f"{name}.{called.lower()}.yaml"
    manifest = {"apiVersion": "ray.io/v1", "kind": called, "metadata": named, "spec": content}
    where = ["--namespace", namespace] if namespace else []
    kubectl = " ".join(["kubectl", *where])
    train = f"{kubectl} exec --stdin service/{name}-head-svc -- corral train {FOLDER}/{RECIPE}"
    then = {"job": f"follow it with: {kubectl} logs --follow job/{name}", "cluster": f"then train with: {train}"}
    return LaunchFiles(
        files={file: yaml_text(recipe, manifest)},
        commands=[["kubectl", *where, "apply", "--filename", str(folder / file)]],
        notes=["needs KubeRay 1.6 or newer (`authOptions`) and Ray 2.52 or newer in the image", then[kind]],
    )


def pod_volumes(recipe: str, shm: str, claims: Sequence[tuple[str, str]]) -> tuple[list[Any], list[Any]]:
    """Volumes of a pod, and where its container mounts them. `recipe`: name of its ConfigMap."""
    volumes = {
        # Kubernetes gives a pod 64 MB of shared memory; Ray's object store and NCCL need more.
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        "recipe": {"configMap": {"name": recipe}},
        **{f"claim-{n}": {"persistentVolumeClaim": {"claimName": claim}} for n, (claim, _) in enumerate(claims)},
    }
    mounts: dict[str, dict[str, Any]] = {
        "shm": {"mountPath": "/dev/shm"},
        "recipe": {"mountPath": FOLDER, "readOnly": True},
        **{f"claim-{n}": {"mountPath": path} for n, (_, path) in enumerate(claims)},
    }
    return [{"name": name, **one} for name, one in volumes.items()], [
        {"name": name, **one} for name, one in mounts.items()
    ]


def split_claim(claim: str) -> tuple[str, str]:
    name, _, path = claim.partition(":")
    if not name or not path.startswith("/"):
        raise UserError(f"--claim {claim} is not the name of a claim and a path: models:/models")
    return name, path
