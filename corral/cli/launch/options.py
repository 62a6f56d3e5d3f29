"""Options that several launchers have."""

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to it.", show_default=False)]
Image = Annotated[str, typer.Option(help="With Corral in it, where the nodes can pull it from.", show_default=False)]
Names = Annotated[
    list[str] | None,
    typer.Option(help="Name of a variable that the containers get: WANDB_API_KEY.", show_default=False),
]
Head = Annotated[
    str | None, typer.Option(help="The first node's name or address, as the others know it.", show_default=False)
]
Keep = Annotated[bool, typer.Option("--keep", help="Leave the cluster up at the end.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Of the head.")]


def absolute(path: Path) -> Path:
    """As the user wrote it, links and all, but for `..` and `~`."""
    return Path(os.path.abspath(path.expanduser()))


def end_cleanly() -> None:
    """Signals that would end this process at once end it like Ctrl-C does: what it has started is taken down first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
