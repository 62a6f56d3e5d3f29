"""`corral launch dstack`, `corral launch kuberay` and `corral launch host-setup`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from corral.cli.launch import Go, Kind, Out, emit, work_of
from corral.cli.launch.options import Image, Names, Overrides, RecipeFile, absolute
from corral.recipe.errors import UserError


def register(app: typer.Typer) -> None:
    app.command()(dstack)
    app.command()(kuberay)
    app.command(name="host-setup")(host_setup)


def dstack(
    recipe: RecipeFile,
    image: Image,
    overrides: Overrides = None,
    out: Out = Path("launch"),
    go: Go = False,
    accelerator: Kind = "nvidia",
    gpu: Annotated[
        str | None, typer.Option(help="What kind, as dstack writes it: H100, 80GB, A100:80GB.", show_default=False)
    ] = None,
    shm: Annotated[str, typer.Option(help="Size of the containers' /dev/shm.")] = "16GB",
    env: Names = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(help="/on/the/instance:/path, or name-of-a-volume:/path.", show_default=False),
    ] = None,
    fleet: Annotated[list[str] | None, typer.Option(help="To run on.", show_default=False)] = None,
) -> None:
    """Write a dstack task that starts a cluster on its nodes and trains on the first."""
    from corral.cluster.launchers.dstack import TOKEN, dstack_launch
    from corral.cluster.token import known_token, make_token

    launch = dstack_launch(
        work_of(recipe, overrides, accelerator),
        folder=absolute(out),
        image=image,
        gpu=gpu,
        shm=shm,
        environment=env or (),
        volumes=volume or (),
        fleets=fleet or (),
    )
    if go and TOKEN not in os.environ:
        os.environ[TOKEN] = known_token(None, None, os.environ) or make_token()
    emit(launch, out, go)


def kuberay(
    recipe: RecipeFile,
    image: Image,
    overrides: Overrides = None,
    out: Out = Path("launch"),
    go: Go = False,
    accelerator: Kind = "nvidia",
    kind: Annotated[str, typer.Option(help="job: trains and ends. cluster: stays, for you to train on.")] = "job",
    namespace: Annotated[str | None, typer.Option(help="Of Kubernetes.", show_default=False)] = None,
    shm: Annotated[str, typer.Option(help="Size of the pods' /dev/shm.")] = "16Gi",
    cpus: Annotated[str | None, typer.Option(help="Of each pod.", show_default=False)] = None,
    memory: Annotated[str | None, typer.Option(help="Of each pod: 200Gi.", show_default=False)] = None,
    claim: Annotated[
        list[str] | None,
        typer.Option(help="A persistent volume claim and its path: models:/models", show_default=False),
    ] = None,
    secret: Annotated[
        list[str] | None, typer.Option(help="A Secret whose keys become environment variables.", show_default=False)
    ] = None,
    token_secret: Annotated[
        str | None, typer.Option(help="A Secret with auth_token; default: KubeRay makes one.", show_default=False)
    ] = None,
    ray_version: Annotated[
        str | None, typer.Option(help="In the image; default: the one that is installed here.", show_default=False)
    ] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for a job's pods to start.")] = 1800,
) -> None:
    """Write a RayJob or RayCluster for KubeRay, with the recipe as a ConfigMap."""
    from corral.cluster.launchers.kuberay import kuberay_launch

    if kind not in ("job", "cluster"):
        raise UserError(f"--kind {kind} is not job or cluster")
    launch = kuberay_launch(
        work_of(recipe, overrides, accelerator),
        folder=absolute(out),
        image=image,
        kind=kind,  # type: ignore[arg-type]
        ray_version=ray_version or installed_ray(),
        namespace=namespace,
        shm=shm,
        cpus=cpus,
        memory=memory,
        claims=claim or (),
        secrets=secret or (),
        token_secret=token_secret,
        start_timeout_s=timeout,
    )
    emit(launch, out, go)


def installed_ray() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ray")
    except PackageNotFoundError:
        raise UserError("Ray is not installed here: say with --ray-version which one the image has") from None


def host_setup(
    family: Annotated[str | None, typer.Option(help="apt or yum; default: this machine's.", show_default=False)] = None,
    amd: Annotated[bool, typer.Option("--amd", help="For AMD's GPUs instead of NVIDIA's.")] = False,
) -> None:
    """Print a script that installs docker and what containers need for GPUs."""
    from shutil import which

    from corral.cluster.launchers.host_setup import host_setup as script_of

    found = family or ("yum" if which("dnf") or which("yum") else "apt")
    if found not in ("apt", "yum"):
        raise UserError(f"--family {found} is not apt or yum")
    print(script_of(found, amd), end="")  # type: ignore[arg-type]
