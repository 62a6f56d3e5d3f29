"""Pods of a job, all with the same command: PAI-DLC, Kubeflow's PyTorchJob and TrainJob, dstack and the like say in
variables which each one is.

The first one trains, and its exit code is that of the run. They need not share a folder, but for a token: who has it
may run anything, so it cannot follow from what everybody knows of a job, such as its name.
"""

import os
import shlex
from collections.abc import Sequence

from corral.cluster.launchers.launch_spec import LaunchSpec
from corral.http_server import TOKEN_BYTES
from corral.recipe.errors import UserError
from corral.runtime.token import find_token

RANK = "${NODE_RANK:-${PET_NODE_RANK:-${RANK:-0}}}"
"""Of a pod, as `corral up` finds it."""


def pods_script(spec: LaunchSpec, train: Sequence[str], rank: str = RANK, folder: str | None = None) -> str:
    """Shell script for each pod. `corral up` returns when all are there, and with --block stays until the head is gone.
    A pod that did not get so far fails, and with it the job; after that the first one alone decides. SIGTERM reaches
    the run, which saves itself. `train`: the command; `folder`: in which it runs."""
    up = shlex.join(spec.up_command())
    check = shlex.join(["corral", "check", str(spec.num_devices), "--nodes", str(spec.num_nodes)])
    enter = "" if folder is None else f"cd {shlex.quote(folder)} && "
    first = (
        f"{enter}{up} && {check} || exit 1\n"
        f"{shlex.join(train)} &\n"
        "trap 'kill -TERM $!' TERM INT\n"
        "wait $!; code=$?\n"
        "while kill -0 $! 2> /dev/null; do wait $!; code=$?; done  # a signal ends `wait`, and not the run\n"
        "corral down --force\n"
        "exit $code\n"
    )
    if spec.num_nodes == 1:
        return first
    left = "echo 'this pod has left; the first one says what became of the run'"
    return f'if [ "{rank}" != 0 ]; then\n  {up} || exit 1\n  {up} --block || {left}\n  exit 0\nfi\n{first}'


def check_common_token() -> None:
    """Raises if the pods would not have the same token, before the first of them waits for others."""
    if find_token(None, None, os.environ) is None:
        raise UserError(
            "these pods have no token in common: give the job a variable RAY_AUTH_TOKEN, best from a secret, with what "
            f"`openssl rand -hex {TOKEN_BYTES}` prints"
        )
