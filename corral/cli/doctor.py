"""`corral doctor`: what is wrong with this node or the cluster, before a run finds out."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from corral.recipe.errors import UserError


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="Also check what this recipe needs.", show_default=False)
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it.", show_default=False)] = None,
    everywhere: Annotated[bool, typer.Option("--all", help="All nodes; an error where no cluster is up.")] = False,
    here: Annotated[bool, typer.Option("--here", help="This node only, also where a cluster is up.")] = False,
    address: Annotated[str | None, typer.Option(help="Of the cluster's head, HOST:PORT.", show_default=False)] = None,
    shared: Annotated[
        list[str] | None, typer.Option(help="A folder that all nodes are to share. Repeatable.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for any one answer of a node.")] = 120.0,
) -> None:
    """Look for what is wrong with this node, or with all nodes of the cluster: devices, memory, disks, network,
    versions, shared folders; with a recipe, what that needs. Exits with 1 if there is an error."""
    from corral.cluster.doctor.diagnosis import Order
    from corral.cluster.doctor.findings import num_of
    from corral.cluster.doctor.survey import check
    from corral.cluster.doctor.text import in_words

    if here and (everywhere or address):
        raise UserError("--here is this node only: leave out --all and --address")
    diagnosis = check(Order(recipe, overrides or (), shared or (), timeout, say), address, everywhere, here)
    say("")
    print(json.dumps(diagnosis.as_dict(), indent=2) if as_json else in_words(diagnosis))
    if num_of("error", diagnosis.findings):
        raise typer.Exit(1)


def say(what: str) -> None:
    """While it goes on, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="\r", file=sys.stderr, flush=True)
