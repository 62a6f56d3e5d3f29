"""`corral launch slurm`: a batch script, and with --go the job."""

from pathlib import Path
from typing import Annotated

import typer

from corral.cli.launch import Go, Kind, Out, emit, work_of
from corral.cli.launch.options import Names, Overrides, RecipeFile, absolute
from corral.recipe.errors import UserError


def register(app: typer.Typer) -> None:
    app.command()(slurm)


def slurm(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Out = Path("launch"),
    go: Go = False,
    accelerator: Kind = "nvidia",
    partition: Annotated[str | None, typer.Option(help="As for sbatch.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option(help="As for sbatch.", show_default=False)] = None,
    time: Annotated[str | None, typer.Option(help="As for sbatch: 2-00:00:00", show_default=False)] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="CPUs of each node.", show_default=False)] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each node: 200G", show_default=False)] = None,
    gpus_per_node: Annotated[
        str | None, typer.Option(help="8, h100:8; default: the recipe's devices.", show_default=False)
    ] = None,
    nodelist: Annotated[str | None, typer.Option(help="As for sbatch: gpu-[0,1]", show_default=False)] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="That all nodes share; default: logs, beside the script.", show_default=False)
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A line of shell for the script's beginning: 'module load cuda'.", show_default=False),
    ] = None,
    check_timeout: Annotated[int, typer.Option(min=1, help="Seconds for the nodes to come up.")] = 600,
    grace: Annotated[int, typer.Option(min=1, help="Seconds before the time limit, to save a checkpoint.")] = 120,
    port: Annotated[
        int | None, typer.Option(help="Of Ray's head; default: made of the job's number.", show_default=False)
    ] = None,
    container: Annotated[str | None, typer.Option(help="docker or podman.", show_default=False)] = None,
    image: Annotated[str | None, typer.Option(help="With Corral in it, for containers.", show_default=False)] = None,
    shm: Annotated[str, typer.Option(help="Size of the containers' /dev/shm.")] = "10g",
    mount: Annotated[
        list[str] | None, typer.Option(help="For containers: /here[:/there[:ro]].", show_default=False)
    ] = None,
    env: Names = None,
) -> None:
    """Write a batch script that starts a cluster on the job's nodes, trains, and ends it."""
    from corral.cluster.launchers.slurm import SlurmOptions, slurm_launch

    if container not in (None, "docker", "podman"):
        raise UserError(f"--container {container} is not docker or podman")
    if (container is None) != (image is None):
        raise UserError("--container docker|podman and --image go together")
    if container is None and (mount or env):
        raise UserError(
            "--mount and --env are for containers; without --container the job has your files and variables"
        )
    asked = {
        "partition": partition,
        "account": account,
        "time": time,
        "cpus-per-task": cpus_per_task,
        "mem": mem,
        "gpus-per-node": gpus_per_node,
        "nodelist": nodelist,
    }
    work = work_of(recipe, overrides, accelerator)
    options = SlurmOptions(
        work_folder=Path.cwd(),
        log_folder=absolute(log_dir or out / "logs"),
        ask={name: str(value) for name, value in asked.items() if value is not None},
        setup=tuple(setup or ()),
        check_timeout_s=check_timeout,
        grace_s=grace,
        port=port,
        engine=container,  # type: ignore[arg-type]
        image=image or "",
        shm=shm,
        mounts=tuple(mount or ()),
        environment=tuple(env or ()),
    )
    launch = slurm_launch(work, options, absolute(out))
    options.log_folder.mkdir(parents=True, exist_ok=True)
    emit(launch, out, go)
