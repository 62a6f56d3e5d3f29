"""`corral launch`: writes what a launcher needs, and with --go starts it."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from corral.cluster.launchers.base import Accelerator, Launch, Work
from corral.recipe.errors import RunError, UserError

Out = Annotated[Path, typer.Option(help="Folder for the files that are written.")]
Go = Annotated[bool, typer.Option("--go", help="Run the commands as well.")]
Kind = Annotated[str, typer.Option("--accelerator", help="nvidia, amd, or none for worker slots on CPUs.")]


def work_of(recipe: Path, overrides: Sequence[str] | None, accelerator: str = "nvidia") -> Work:
    """The recipe as it would be trained, checked as `corral plan` checks it."""
    from corral.cli.planning import planned

    if accelerator not in Accelerator.__args__:  # type: ignore[attr-defined]
        known = ", ".join(Accelerator.__args__)  # type: ignore[attr-defined]
        raise UserError(f"--accelerator {accelerator} is not one of {known}")
    loaded, _ = planned(recipe, overrides or [])
    return Work(loaded, recipe, tuple(overrides or ()), accelerator)  # type: ignore[arg-type]


def emit(launch: Launch, out: Path, go: bool) -> None:
    """Writes the files, prints the commands, and runs them if asked to."""
    for name, text in launch.files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
        print(f"wrote {path}")
    for note in launch.notes:
        print(note)
    if launch.commands and not go:
        print("start it with --go, or with:" if launch.files else "run it with --go, or yourself:")
    for command in launch.commands:
        print(f"  {shlex.join(command)}", flush=True)
        if go and (code := subprocess.run(list(command), cwd=out).returncode):
            raise RunError(f"{command[0]} failed with exit code {code}")
