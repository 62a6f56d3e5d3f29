"""`corral stacks`."""

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(stacks)


def stacks(
    address: Annotated[
        str | None, typer.Option(help="Of the cluster's head, HOST:PORT, if this node is not part of it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    native: Annotated[bool, typer.Option("--native", help="Also frames of compiled libraries. Slower.")] = False,
) -> None:
    """Say what every process of Corral is doing right now: on all nodes of the cluster, without one on this machine."""
    import sys

    from corral.cluster.stacks import in_words, stacks_here, stacks_of_cluster
    from corral.runtime.connection import find_cluster

    problems: list[str] = []
    if find_cluster(address) is None:
        processes = stacks_here(native)
    else:
        from corral.cluster.reach import attached

        with attached(address):
            processes, problems = stacks_of_cluster(native)
    if as_json:
        print(json.dumps({"processes": [one.as_dict() for one in processes], "problems": problems}, indent=2))
    else:
        print(in_words(processes) or "no process of Corral is running")
        for problem in problems:
            print(f"warning: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)
