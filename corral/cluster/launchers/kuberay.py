"""KubeRay: manifests for the operator that runs Ray on Kubernetes.

The first pod is the head and has devices like any other node, so that the recipe's numbering is the same everywhere.
The operator starts Ray itself, `corral up` is not involved; it also makes the token, and hands it to all pods. Recipe
and code are a ConfigMap; the run folder must be on a volume that outlives the pods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from corral.cluster.launchers.launch_spec import LaunchFiles, LaunchSpec, check_run_folder, yaml_text
from corral.recipe.errors import UserError
from corral.recipe.load import dump_recipe
from corral.runtime.nodes import RANK_LABEL, WORKER_SLOT

RayKind = Literal["job", "cluster"]

LONGEST_NAME = 47  # of a RayJob; the operator makes longer names out of it
FOLDER = "/etc/corral"
RECIPE = "recipe.yaml"
CODE = "code"
MAX_CODE_BYTES = 900_000  # a ConfigMap is 1 MiB at most, with the recipe and all names
GPU = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
KEEP_FINISHED_S = 600
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
RAY_CONTAINER = "ray"  # in a patch: the container of each pod that runs Ray
MERGE_KEYS = ("name", "mountPath")  # of lists that Kubernetes merges item by item
LOST_WITH_POD = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral")
"""Kinds of volumes on which nothing outlives a pod."""


@dataclass(frozen=True)
class PodOptions:
    """What a cluster's rules ask of pods."""

    tolerations: Sequence[str] = ()  # KEY[=VALUE][:EFFECT]
    node_selectors: Sequence[str] = ()  # KEY=VALUE
    service_account: str | None = None
    pull_secrets: Sequence[str] = ()
    security_context: Mapping[str, Any] = field(default_factory=dict)
    rdma: str | None = None  # RESOURCE[=NUMBER] of a device plugin
    patch: Mapping[str, Any] = field(default_factory=dict)  # a part of a pod's template, merged into each

    @property
    def scheduling(self) -> dict[str, Any]:
        """The part of a pod's spec that also the pod which submits the job must have."""
        found = {
            "tolerations": [toleration(text) for text in self.tolerations],
            "nodeSelector": dict(split_pair("--node-selector", text) for text in self.node_selectors),
            "serviceAccountName": self.service_account,
            "imagePullSecrets": [{"name": name} for name in self.pull_secrets],
            "securityContext": dict(self.security_context),
        }
        return {name: value for name, value in found.items() if value}


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
    pod: PodOptions = PodOptions(),
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
    if pod.rdma is not None:
        resource, _, number = pod.rdma.partition("=")
        limits[resource] = number or "1"
    volumes, mounts = pod_volumes(name, spec.code, shm, [split_claim(claim) for claim in claims])

    def template(container: str) -> dict[str, Any]:
        inside = {
            "name": container,
            "image": image,
            **({"resources": {"limits": limits, "requests": limits}} if limits else {}),
            "volumeMounts": mounts,
            **({"envFrom": [{"secretRef": {"name": secret}} for secret in secrets]} if secrets else {}),
            # RDMA pins memory, which the default limit does not let a container do.
            **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if pod.rdma is not None else {}),
        }
        made = {"spec": {**pod.scheduling, "containers": [inside], "volumes": volumes}}
        patched: dict[str, Any] = merged(made, renamed(pod.patch, container))
        return patched

    head, worker = template("ray-head"), template("ray-worker")
    check_run_folder(spec.recipe, kept_paths(head), "--claim results:/runs")
    cluster = {
        "rayVersion": ray_version,
        "authOptions": {"mode": "token", **({"secretName": token_secret} if token_secret else {})},
        "headGroupSpec": {
            # The operator and the submitter reach the dashboard over the pod's network; it asks for the token.
            "rayStartParams": {"dashboard-host": "0.0.0.0"},
            **resources,
            "labels": {RANK_LABEL: "0"},
            "template": head,
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": spec.num_nodes - 1,
                "minReplicas": spec.num_nodes - 1,
                "maxReplicas": spec.num_nodes - 1,
                "rayStartParams": {},
                **resources,
                "template": worker,
            }
        ][: spec.num_nodes - 1],
    }
    data = {RECIPE: dump_recipe(spec.recipe), **{code_key(n): text for n, text in enumerate(spec.code.values())}}
    recipe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": data}
    # The operator pastes this into a shell's command line: no word of the recipe belongs here, and no `&&`.
    train = f"corral train {FOLDER}/{RECIPE}"
    train = f"env --chdir={FOLDER}/{CODE} {train}" if spec.code else train
    job = {
        "entrypoint": train,
        "preRunningDeadlineSeconds": start_timeout_s,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": KEEP_FINISHED_S,
        **({"submitterPodTemplate": submitter(image, pod)} if pod.scheduling else {}),
        "rayClusterSpec": cluster,
    }
    called, content = {"job": ("RayJob", job), "cluster": ("RayCluster", cluster)}[kind]
    file = f"{name}.{called.lower()}.yaml"
    manifest = {"apiVersion": "ray.io/v1", "kind": called, "metadata": named, "spec": content}
    where = ["--namespace", namespace] if namespace else []
    # Else kubectl keeps a copy of what it applies in an annotation, which is 256 KiB at most.
    server_side = ["--server-side"] if spec.code else []
    kubectl = " ".join(["kubectl", *where])
    by_hand = f"{kubectl} exec --stdin service/{name}-head-svc -- {train}"
    then = {"job": f"follow it with: {kubectl} logs --follow job/{name}", "cluster": f"then train with: {by_hand}"}
    notes = ["needs KubeRay 1.6 or newer (`authOptions`) and Ray 2.52 or newer in the image"]
    if spec.num_nodes > 1:
        notes.append(f"claims are mounted by all {spec.num_nodes} pods: across nodes they must be ReadWriteMany")
    return LaunchFiles(
        files={file: yaml_text(recipe, manifest)},
        commands=[["kubectl", *where, "apply", *server_side, "--filename", str(folder / file)]],
        notes=[*notes, then[kind]],
    )


def pod_volumes(
    recipe: str, code: Mapping[str, str], shm: str, claims: Sequence[tuple[str, str]]
) -> tuple[list[Any], list[Any]]:
    """Volumes of a pod, and where its container mounts them. `recipe`: name of its ConfigMap."""
    # Keys of a ConfigMap have no slashes, so each says where its file belongs.
    items = [{"key": RECIPE, "path": RECIPE}]
    items += [{"key": code_key(number), "path": f"{CODE}/{path}"} for number, path in enumerate(code)]
    volumes: dict[str, dict[str, Any]] = {
        # Kubernetes gives a pod 64 MB of shared memory; Ray's object store and NCCL need more.
        "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        "recipe": {"configMap": {"name": recipe, **({"items": items} if code else {})}},
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


def code_key(number: int) -> str:
    return f"code-{number}"


def kept_paths(template: dict[str, Any]) -> list[str]:
    """Where a pod's first container has volumes that outlive it."""
    volumes = [one for one in template["spec"]["volumes"] if not set(one).intersection(LOST_WITH_POD)]
    kept = {one["name"] for one in volumes}
    return [one["mountPath"] for one in template["spec"]["containers"][0]["volumeMounts"] if one["name"] in kept]


def submitter(image: str, pod: PodOptions) -> dict[str, Any]:
    """The pod that submits the job. The operator's own default has none of what the others are given, so it could not
    even pull the image."""
    resources = {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m", "memory": "200Mi"}}
    container = {"name": "ray-job-submitter", "image": image, "resources": resources}
    return {"spec": {**pod.scheduling, "restartPolicy": "Never", "containers": [container]}}


def toleration(text: str) -> dict[str, str]:
    pair, _, effect = text.rpartition(":")
    if effect not in EFFECTS:
        pair, effect = text, ""
    key, equals, value = pair.partition("=")
    if not key or ":" in pair:
        raise UserError(f"--toleration {text} is not KEY[=VALUE][:EFFECT]; effects are {', '.join(EFFECTS)}")
    wanted = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **wanted, **({"effect": effect} if effect else {})}


def split_pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"{option} {text} is not KEY=VALUE")
    return key, value


def split_claim(claim: str) -> tuple[str, str]:
    name, _, path = claim.partition(":")
    if not name or not path.startswith("/"):
        raise UserError(f"--claim {claim} is not the name of a claim and a path: models:/models")
    return name, path


# --- a patch of the pods


def renamed(patch: Mapping[str, Any], container: str) -> dict[str, Any]:
    """The patch, with the name that the container of Ray has in this pod."""
    if not set(patch) <= {"metadata", "spec"}:
        raise UserError("--pod-patch: a part of a pod's template has the keys `metadata` and `spec`")
    spec = patch.get("spec") or {}
    others = [
        {**one, "name": container} if one.get("name") == RAY_CONTAINER else one for one in spec.get("containers") or []
    ]
    return {**patch, "spec": {**spec, **({"containers": others} if others else {})}}


def merged(base: Any, patch: Any) -> Any:
    """Mappings key by key; lists of things with a name, and mounts, one by one; other lists are made longer. null
    removes."""
    if isinstance(base, dict) and isinstance(patch, dict):
        found = {**base, **{key: merged(base.get(key), value) for key, value in patch.items()}}
        return {key: value for key, value in found.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list):
        found_items, key = list(base), merge_key([*base, *patch])
        for item in patch:
            same = [n for n, one in enumerate(found_items) if key is not None and one[key] == item[key]]
            if same:
                found_items[same[0]] = merged(found_items[same[0]], item)
            else:
                found_items.append(item)
        return found_items
    return patch


def merge_key(items: Sequence[Any]) -> str | None:
    """`mountPath` before `name`: a volume can be mounted twice."""
    keys = [key for key in reversed(MERGE_KEYS) if all(isinstance(one, dict) and key in one for one in items)]
    return keys[0] if keys else None
