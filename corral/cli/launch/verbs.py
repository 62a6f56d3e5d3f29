"""All launchers, as verbs below `corral launch`."""

import typer

from corral.cli.launch import containers, others, slurm, ssh


def register(app: typer.Typer) -> None:
    launch = typer.Typer(no_args_is_help=True, help="Write what a launcher needs to run a recipe, and start it.")
    for module in (slurm, containers, others, ssh):
        module.register(launch)
    app.add_typer(launch, name="launch")
