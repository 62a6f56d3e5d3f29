"""The first thing that a job does, in its folder on the head node: takes the environment that was sent with it, checks
what only the head can know, and becomes `corral train`."""

import os
import sys
from pathlib import Path

from corral.cluster.jobs.environment import take
from corral.cluster.jobs.instructions import RECIPE, Instructions
from corral.recipe.errors import UserError


def main() -> None:
    recipe, told = RECIPE.resolve(), Instructions.read(Path())
    try:
        variables = {} if told.environment is None else take(told.environment)
        told.check()
    except UserError as error:
        sys.exit(f"error: {error}")
    if told.runs_in_folder:
        os.chdir(told.submitted_from)
    command = [sys.executable, "-m", "corral.cli.main", "train", str(recipe)]
    os.execve(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
