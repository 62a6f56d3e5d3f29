"""The first thing that a job does, in its folder on the head node: takes the environment that was sent with it, checks
what only the head can know, and becomes `corral train`. It reads a file of the job's folder, and imports little."""

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from corral.recipe.errors import UserError

RECIPE = Path(".corral", "recipe.yaml")
INSTRUCTIONS = Path(".corral", "job.json")  # in the job's folder


@dataclass(frozen=True)
class JobInstructions:
    job: str  # makes the folder's content unique: Ray keeps and shares copies of equal ones
    submitted_from: str
    is_folder_needed: bool  # the folder that it was submitted from must be on the head, too
    runs_in_folder: bool  # in that folder, instead of the job's own
    run_folder: str
    must_resume: bool
    environment: str | None  # the package with the variables that were sent along
    resume_anyway: bool = False

    def write(self, folder: Path) -> None:
        (folder / INSTRUCTIONS).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / INSTRUCTIONS).read_text()))

    def check(self) -> None:
        """Checks what only the head node can know."""
        folder = Path(self.submitted_from)
        if self.is_folder_needed and not folder.is_dir():
            why = "`logging.runs` is relative to it; name a folder that the nodes have: logging.runs=/PATH"
            if self.runs_in_folder:
                why = "with --no-code the job runs there; submit from a folder that all nodes see"
            raise UserError(f"{folder}, from which this was submitted, is not on {socket.gethostname()}, and {why}")
        if self.must_resume:
            check_resumable(Path(self.run_folder).expanduser())


def check_resumable(run_folder: Path) -> None:
    from corral.training.checkpoint import find_checkpoint

    if find_checkpoint(run_folder / "checkpoints", "auto") is None:
        raise UserError(f"--resume: there is no checkpoint in {run_folder} on {socket.gethostname()} to go on from")


def take_variables(package: str) -> dict[str, str]:
    """The variables that `submit.pack_variables` packed, from the head's memory, where they are deleted."""
    from corral.cluster.gcs import Gcs, find_head

    gcs, key = Gcs(find_head()), f"gcs://{package}".encode()
    found = gcs.get_of_ray(key, None)
    if found is None:
        raise UserError("the environment that was sent with this job is gone: another process took it; submit it again")
    gcs.delete_of_ray(key, None)
    return dict(json.loads(found)[1])


def main() -> None:
    recipe, instructions = RECIPE.resolve(), JobInstructions.read(Path())
    try:
        variables = {} if instructions.environment is None else take_variables(instructions.environment)
        instructions.check()
    except UserError as error:
        sys.exit(f"error: {error}")
    if instructions.runs_in_folder:
        os.chdir(instructions.submitted_from)
    command = [sys.executable, "-m", "corral.cli.main", "train", str(recipe)]
    command += ["--resume-anyway"] * instructions.resume_anyway
    os.execve(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
