"""dstack: a task for as many nodes as the recipe has.

The same commands run on every node; `corral up` knows its rank and the head from the variables that dstack sets. The
first node trains, and its exit code is that of the run.
"""

from collections.abc import Sequence
from pathlib import Path

from corral.cluster.launchers.launch_spec import (
    LaunchFiles,
    LaunchSpec,
    check_names_only,
    check_run_folder,
    yaml_text,
)
from corral.cluster.launchers.pods import pods_script
from corral.recipe.load import dump_recipe

LONGEST_NAME = 41
DASHBOARD = 8265
RECIPE = "/corral/recipe.yaml"  # in the container
CODE = "/corral/code"
MAX_CODE_BYTES = 2_000_000  # dstack's server takes 2 MiB of files by default
TOKEN = "RAY_AUTH_TOKEN"


def dstack_launch(
    spec: LaunchSpec,
    *,
    folder: Path,
    image: str,
    gpu: str | None = None,
    shm: str = "16GB",
    environment: Sequence[str] = (),
    volumes: Sequence[str] = (),
    fleets: Sequence[str] = (),
) -> LaunchFiles:
    """`folder`: where the files will be. `gpu`: what kind, as dstack writes it: `H100`, `80GB`, `A100:80GB`. `volumes`:
    `/on/the/instance:/path`, or `name-of-a-volume:/path`."""
    check_names_only(environment)
    check_run_folder(spec.recipe, [volume.rpartition(":")[2] for volume in volumes], "--volume results:/runs")
    name = spec.short_name(LONGEST_NAME)
    kind = ":".join(filter(None, [spec.accelerator, gpu, str(spec.devices_per_node)]))
    recipe_file, code_folder, task_file = f"{name}.recipe.yaml", f"{name}.code", f"{name}.dstack.yml"
    task = {
        "type": "task",
        "name": name,
        "nodes": spec.num_nodes,
        "image": image,
        # Names: dstack takes the values from the environment of whoever applies this.
        "env": list(dict.fromkeys([TOKEN, *environment])),
        "files": [f"{recipe_file}:{RECIPE}", *([f"{code_folder}:{CODE}"] if spec.code else [])],
        "commands": [pods_script(spec, ["corral", "train", RECIPE], "$DSTACK_NODE_RANK", CODE if spec.code else None)],
        # The run is over when the first node is done; the others have nothing to end on.
        **({"stop_criteria": "master-done"} if spec.num_nodes > 1 else {}),
        "ports": [DASHBOARD],
        "resources": {"gpu": 0 if spec.accelerator == "none" else kind, "shm_size": shm},
        **({"volumes": list(volumes)} if volumes else {}),
        **({"fleets": list(fleets)} if fleets else {}),
    }
    return LaunchFiles(
        files={
            task_file: yaml_text(task),
            recipe_file: dump_recipe(spec.recipe),
            **{f"{code_folder}/{path}": text for path, text in spec.code.items()},
        },
        commands=[["dstack", "apply", "--file", str(folder / task_file), "--yes"]],
        notes=[f"dstack takes {TOKEN} from your environment: export {TOKEN}=$(cat ~/.corral/token)"],
    )
