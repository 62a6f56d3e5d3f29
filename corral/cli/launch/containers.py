"""`corral launch docker` and `corral launch podman`: lines for each node, and with --go, on this machine, the run."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from corral.cli.launch import Go, Kind, work_of
from corral.cli.launch.options import Head, Keep, Names, Overrides, Port, RecipeFile, absolute, end_cleanly
from corral.cluster.launchers.containers import Containers, Engine
from corral.recipe.errors import RunError, UserError

ENGINES: tuple[Engine, ...] = ("docker", "podman")
LONGEST_NAME = 60


def register(app: typer.Typer) -> None:
    for engine in ENGINES:
        help = f"Say how to start each node as a {engine} container, check them, and train."
        app.command(name=engine, help=help)(command_for(engine))


def command_for(engine: Engine) -> Callable[..., None]:
    def command(
        recipe: RecipeFile,
        overrides: Overrides = None,
        go: Go = False,
        image: Annotated[str, typer.Option(help="With Corral in it; docker/Dockerfile makes one.")] = "corral",
        head: Head = None,
        name: Annotated[
            str | None, typer.Option(help="Of the containers; default: the run's.", show_default=False)
        ] = None,
        accelerator: Kind = "nvidia",
        shm: Annotated[str, typer.Option(help="Size of the containers' /dev/shm.")] = "10g",
        mount: Annotated[
            list[str] | None, typer.Option(help="/here[:/there[:ro]], besides this folder.", show_default=False)
        ] = None,
        env: Names = None,
        token_file: Annotated[
            Path | None,
            typer.Option(
                help="With the cluster's token, the same on each node; default: ~/.corral/token. With `--env "
                "RAY_AUTH_TOKEN` it is in the environment instead.",
                show_default=False,
            ),
        ] = None,
        port: Port = 6379,
        infiniband: Annotated[bool, typer.Option("--infiniband", help="The containers get /dev/infiniband.")] = False,
        local: Annotated[
            bool, typer.Option("--local", help="All nodes are containers of this machine, on a network of their own.")
        ] = False,
        keep: Keep = False,
    ) -> None:
        from corral.cluster.launchers.texts import short_name
        from corral.cluster.token import make_token
        from corral.runtime.token import default_token

        work = work_of(recipe, overrides, accelerator)
        if local and work.accelerator != "none" and work.num_nodes > 1:
            raise UserError("--local: several containers would share this machine's GPUs; use --accelerator none")
        if head is None and work.num_nodes > 1 and not local:
            raise UserError("where is the head? --head HOST: the first node, as the others know it (or --local)")
        if go and work.num_nodes > 1 and not local:
            raise UserError(
                f"these lines belong on {work.num_nodes} machines, and --go starts containers on this one: run each "
                "line where it belongs, or start all nodes here with --local"
            )
        token = None if "RAY_AUTH_TOKEN" in (env or ()) else absolute(token_file or default_token())
        if go and token == default_token() and not token.is_file():
            make_token()
        called = name or short_name(work.name, LONGEST_NAME)
        cluster = Containers(
            engine=engine,
            work=work,
            image=image,
            name=called,
            head=f"{called}-0" if local else head,
            folder=Path.cwd(),
            token_file=token,
            shm=shm,
            mounts=tuple(mount or ()),
            environment=tuple(env or ()),
            port=port,
            infiniband=infiniband,
            is_local=local,
        )
        if go:
            start_here(cluster, keep)
        else:
            print_lines(cluster)

    return command


def print_lines(cluster: Containers) -> None:
    """As a shell would read them; where each belongs is a comment."""
    if cluster.token_file is not None:
        file, folder = (shlex.quote(str(path)) for path in (cluster.token_file, cluster.token_file.parent))
        print("# the token is the same on all nodes: make it on one, and copy it to the others")
        print(f"# (umask 077 && mkdir -p {folder} && openssl rand -hex 32 > {file})")
    if cluster.engine == "podman" and cluster.work.accelerator != "none":
        print("# as root; for another user, leave out each --ulimit that is above the user's own")
    place = ""
    up = cluster.bring_up()
    commands = [(step.where, step.command) for step in [*up, cluster.train()]]
    commands += [(step.where, step.undo) for step in reversed(up) if step.undo is not None]
    for where, command in commands:
        if where != place:
            print(f"# {where}")
            place = where
        print(shlex.join(command))


def start_here(cluster: Containers, is_kept: bool) -> None:
    """One step after the other. What was started is removed at the end, unless it is to be kept."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    undo: list[Sequence[str]] = []
    end_cleanly()
    try:
        for step in [*cluster.bring_up(), cluster.train(is_terminal)]:
            if step.made is not None and subprocess.run(step.made, capture_output=True).returncode == 0:
                raise UserError(
                    f"{step.made[-1]} is there already, perhaps with a run in it; remove it with "
                    f"`{shlex.join(step.undo or ())}`, or choose another --name"
                )
            print(shlex.join(step.command), flush=True)
            undo += [step.undo] if step.undo is not None else []
            if code := subprocess.run(step.command).returncode:
                for rank in range(cluster.work.num_nodes):
                    subprocess.run(cluster.logs(rank))
                raise RunError(f"{shlex.join(step.command[:3])} ... failed with exit code {code}")
    finally:
        if is_kept:
            print("the containers are kept; remove them with:")
        for command in reversed(undo):
            print(shlex.join(command), flush=True)
            if not is_kept:
                subprocess.run(command, stdout=subprocess.DEVNULL)
