"""The verbs of a cluster: up, down, check, status."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.runtime.membership import Membership

Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of the head; default: the cluster of this node.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
HeadFilePath = Annotated[
    Path | None,
    typer.Option(
        "--head-file", help="On a file system that all nodes share: says where the head is.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command()(down)
    app.command()(check)
    app.command()(status)


def up(
    head: Annotated[bool, typer.Option("--head", help="Start a cluster here; the same as RANK=0.")] = False,
    join: Annotated[str | None, typer.Option(help="Join the one at HOST[:PORT].", show_default=False)] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Of this node; default: $RANK.", show_default=False)] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="How many there are; default: $WORLD_SIZE.", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Of the head; default: $MASTER_PORT, else 6379.", show_default=False)
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=0, help="Of this node; default: its GPUs, or one slot.", show_default=False)
    ] = None,
    head_file: HeadFilePath = None,
    id: Annotated[
        str | None, typer.Option(help="Of this start, the same on all nodes: no other's head file is believed.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the head, and for all nodes.")] = 600.0,
    wait: Annotated[bool, typer.Option(help="For all nodes to be there.")] = True,
    block: Annotated[bool, typer.Option("--block", help="Stay; a signal ends this node's part.")] = False,
    address: Annotated[
        str | None, typer.Option(help="Of this node; default: the one that routes to the head.", show_default=False)
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="With the cluster's token; default: ~/.corral/token.", show_default=False)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No token: whoever reaches this node can run commands on it.")
    ] = False,
    dashboard_host: Annotated[str, typer.Option(help="Where the head serves its dashboard.")] = "127.0.0.1",
    dashboard_port: Annotated[int, typer.Option(help="The next free one is taken.")] = 8265,
    debugger: Annotated[str | None, typer.Option(help="legacy: for `ray debug`.", show_default=False)] = None,
    beside: Annotated[bool, typer.Option("--beside", help="Another Ray may run on this node.")] = False,
    temp_dir: Annotated[
        Path | None, typer.Option(help="For Ray's logs and what it spills.", show_default=False)
    ] = None,
    ray_options: Annotated[
        list[str] | None, typer.Argument(help="After --: for `ray start`.", metavar="[-- RAY OPTIONS]")
    ] = None,
) -> None:
    """Make this node part of a cluster: the same command on every node. RANK=0 is the head."""
    from corral.cluster.identity import Options, check_port, find_identity
    from corral.cluster.ray_node import stop_ray
    from corral.cluster.up import Ended, Foreground, Wish, wait_for_all
    from corral.cluster.up import up as bring_up
    from corral.observe.status_line import Countdown, StatusLine

    if debugger not in (None, "legacy"):
        raise UserError(f"--debugger {debugger}: there is only `legacy`; Ray's other debugger needs nothing here")
    if debugger is not None:
        from corral.runtime.remote_debugger import has_legacy_debugger

        if not has_legacy_debugger():
            raise UserError(f"--debugger {debugger}: the installed Ray has no `ray debug` any more")
    if port is not None:
        check_port(port, "--port")
    wish = Wish(
        identity=find_identity(Options(head, join, rank, nodes, port, id, head_file is not None), os.environ),
        devices=devices,
        head_file=head_file,
        timeout_s=timeout,
        address=address,
        token_file=token_file,
        is_insecure=insecure,
        dashboard=(dashboard_host, check_port(dashboard_port, "--dashboard-port")),
        debugger=debugger,
        is_beside=beside,
        temp_dir=temp_dir,
        ray_options=tuple(ray_options or ()),
    )
    line, foreground, member = StatusLine(), Foreground() if block else None, None
    try:
        member = bring_up(wish, line)
        print_place(member)
        if wait and member.num_nodes is not None:
            wait_for_all(member, member.num_nodes, Countdown(timeout, line))
            print(f"all {member.num_nodes} nodes are there", flush=True)
        if member.is_head:
            print(f"dashboard {member.dashboard}", flush=True)
        if foreground is not None:
            foreground.stay(member)
    except Ended:
        pass
    finally:
        line.clear()
        if block and member is not None:
            stop_ray(member)


def print_place(member: "Membership") -> None:
    place = "joined" if member.rank is None else f"rank {member.rank}{' (head)' if member.is_head else ''}"
    print(f"{place}: {member.node_address}, {member.devices} devices, cluster {member.address}", flush=True)
    if member.token_file is None:
        print("no token: whoever reaches this node can run commands on it (--insecure)", flush=True)
    if member.is_head and member.num_nodes != 1 and not member.address.startswith("127."):
        how = f"--head-file {member.head_file}" if member.head_file else f"--join {member.address}"
        hand = "" if member.head_file else ", where ~/.corral/token is that of this node"
        print(f"others join with: corral up {how} and their own RANK{hand}", flush=True)


def down(
    port: Annotated[int | None, typer.Option(help="Of one cluster; default: all.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Even if training runs.")] = False,
) -> None:
    """End what `corral up` started on this node, and nothing else."""
    from corral.cluster.down import down as bring_down

    ended = bring_down(port, force)
    for member, count in ended:
        print(f"ended {count} processes of the cluster {member.address}")
    if not ended:
        print("nothing was up on this node")


def check(
    devices: Annotated[int, typer.Argument(min=0, help="At least so many.", show_default=False)],
    nodes: Annotated[int, typer.Option(min=0, help="On at least so many nodes.")] = 0,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for them.")] = 300.0,
    address: Address = None,
    head_file: HeadFilePath = None,
    as_json: AsJson = False,
) -> None:
    """Wait until the cluster has so many devices, and say what it has. Exits with 1 and what is missing."""
    from corral.cluster.census import NotThere
    from corral.cluster.census import check as check_cluster
    from corral.cluster.reach import await_cluster
    from corral.observe.status_line import Countdown, StatusLine

    countdown = Countdown(timeout, StatusLine())
    gcs = await_cluster(address, head_file, countdown)
    try:
        census = check_cluster(gcs, devices, nodes, countdown)
    except NotThere as error:
        print(json.dumps(error.census.as_dict(), indent=2) if as_json else error.census.text())
        raise
    print(json.dumps(census.as_dict(), indent=2) if as_json else census.text())
    if census.mixtures:
        raise typer.Exit(1)


def status(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Say how this job does instead.", show_default=False)
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Say who is in the cluster, and what runs on it; or how one job does."""
    from corral.cluster.census import take_census
    from corral.cluster.gcs import Gcs
    from corral.cluster.jobs.dashboard import open_jobs
    from corral.cluster.jobs.job import describe_job, list_jobs, table
    from corral.cluster.reach import reach

    if job is not None:
        found, words = describe_job(open_jobs(address), job)
        print(json.dumps(found.as_dict(), indent=2) if as_json else words)
        return
    census = take_census(Gcs(reach(address)))
    try:
        jobs = [one for one in list_jobs(open_jobs(address)) if one.is_open]
    except UserError:  # only the head may be able to say
        jobs = []
    if as_json:
        print(json.dumps({**census.as_dict(), "jobs": [one.as_dict() for one in jobs]}, indent=2))
    else:
        print("\n".join([census.text(), *([table(jobs)] if jobs else [])]))
