"""dstack: a task for as many nodes as the recipe has.

The same commands run on every node; `corral up` knows its rank and the head from the variables that dstack sets. The
first node trains, and what becomes of it is what becomes of the run.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corral.cluster.launchers.base import Launch, Work
from corral.cluster.launchers.texts import short_name, yaml_text
from corral.recipe.errors import UserError
from corral.recipe.load import dump_recipe

LONGEST_NAME = 41
DASHBOARD = 8265
RECIPE = "/corral/recipe.yaml"
"""In the container."""
TOKEN = "RAY_AUTH_TOKEN"


def dstack_launch(
    work: Work,
    *,
    folder: Path,
    image: str,
    gpu: str | None = None,
    shm: str = "16GB",
    environment: Sequence[str] = (),
    volumes: Sequence[str] = (),
    fleets: Sequence[str] = (),
) -> Launch:
    """`folder`: where the files will be. `gpu`: what kind, as dstack writes it: `H100`, `80GB`, `A100:80GB`. `volumes`:
    `/on/the/instance:/path`, or `name-of-a-volume:/path`."""
    name = short_name(work.name, LONGEST_NAME)
    recipe_file, task_file = f"{name}.recipe.yaml", f"{name}.dstack.yml"
    task = {
        "type": "task",
        "name": name,
        "nodes": work.num_nodes,
        "image": image,
        # Names: dstack takes the values from the environment of whoever applies this.
        "env": list(dict.fromkeys([TOKEN, *environment])),
        "files": [f"{recipe_file}:{RECIPE}"],
        "commands": [commands(work)],
        # The run is over when the first node is done; the others have nothing to end on.
        **({"stop_criteria": "master-done"} if work.num_nodes > 1 else {}),
        "ports": [DASHBOARD],
        "resources": {"gpu": gpus(work, gpu), "shm_size": shm},
        **({"volumes": list(volumes)} if volumes else {}),
        **({"fleets": list(fleets)} if fleets else {}),
    }
    if valued := [variable.partition("=")[0] for variable in environment if "=" in variable]:
        raise UserError(f"--env {valued[0]}=...: give the name alone; its value is taken from the environment")
    return Launch(
        files={task_file: yaml_text(task), recipe_file: dump_recipe(work.recipe)},
        commands=[["dstack", "apply", "--file", str(folder / task_file), "--yes"]],
        notes=[f"dstack takes {TOKEN} from your environment: export {TOKEN}=$(cat ~/.corral/token)"],
    )


def commands(work: Work) -> str:
    """`corral up` returns when all nodes are there, and with --block stays until the head is gone. A node that did not
    get so far fails, and with it the run; after that the first node alone decides."""
    devices = ["--devices", str(work.devices_per_node)] if work.accelerator == "none" else []
    up = shlex.join(["corral", "up", *devices])
    check = shlex.join(["corral", "check", str(work.num_devices), "--nodes", str(work.num_nodes)])
    train = shlex.join(["corral", "train", RECIPE])
    if work.num_nodes == 1:
        return f"{up} && {check} && {train}"
    return (
        'if [ "$DSTACK_NODE_RANK" = 0 ]; then\n'
        f"  {up} && {check} && {train}\n"
        "else\n"
        f"  {up} && {{ {up} --block || echo 'this node has left; the first one says what became of the run'; }}\n"
        "fi\n"
    )


def gpus(work: Work, kind: str | None) -> Any:
    if work.accelerator == "none":
        return 0
    return ":".join(filter(None, [work.accelerator, kind, str(work.devices_per_node)]))
