"""`corral launch ssh`: what to run on each host, and with --go the run."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from corral.cli.launch import Go, Kind, work_of
from corral.cli.launch.options import Head, Keep, Overrides, Port, RecipeFile, absolute, end_cleanly
from corral.recipe.errors import UserError


def register(app: typer.Typer) -> None:
    app.command()(ssh)


def ssh(
    recipe: RecipeFile,
    hosts: Annotated[
        Path, typer.Option(help="A file: [user@]host[:port] [devices=N] per line; the head first.", show_default=False)
    ],
    overrides: Overrides = None,
    go: Go = False,
    accelerator: Kind = "nvidia",
    head: Head = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="On the hosts; default: this folder's path.", show_default=False)
    ] = None,
    port: Port = 6379,
    program: Annotated[str, typer.Option("--corral", help="How it is called on the hosts.")] = "corral",
    ssh_config: Annotated[Path | None, typer.Option(help="For ssh, instead of yours.", show_default=False)] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for the hosts to come up.")] = 600,
    keep: Keep = False,
) -> None:
    """Start a cluster over ssh, train on its head, and take it down."""
    from corral.cluster.launchers.ssh import SshCluster, new_id, read_hosts, run_over_ssh

    work = work_of(recipe, overrides, accelerator)
    named = read_hosts(hosts)
    if len(named) < work.num_nodes:
        raise UserError(f"the recipe is for {work.num_nodes} nodes (`cluster.nodes`), and {hosts} has {len(named)}")
    cluster = SshCluster(
        work=work,
        hosts=named[: work.num_nodes],
        id=new_id(work.name),
        head=head or named[0].name,
        folder=directory or Path.cwd(),
        port=port,
        program=program,
        config=None if ssh_config is None else absolute(ssh_config),
        start_timeout_s=timeout,
    )
    if go:
        end_cleanly()
        run_over_ssh(cluster, lambda line: print(line, flush=True), is_kept=keep)
        return
    print("# the cluster's token, which travels in ssh's standard input: openssl rand -hex 32 > token")
    for remote in cluster.prepare():
        print(f"{shlex.join(remote.command(cluster.config))} < token")
    steps = [cluster.start_head(), *cluster.start_workers(), cluster.check(), cluster.train()]
    for remote in [*steps, *(cluster.stop(host) for host in cluster.hosts)]:
        print(shlex.join(remote.command(cluster.config)))
