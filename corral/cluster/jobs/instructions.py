"""What a job is told, in a file of its folder. Read on the head node before anything else, so it imports little."""

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from corral.recipe.errors import UserError

RECIPE = Path(".corral", "recipe.yaml")
INSTRUCTIONS = Path(".corral", "job.json")
"""In the job's folder."""


@dataclass(frozen=True)
class Instructions:
    job: str
    """Makes the folder another one for every job: Ray keeps and shares copies of equal ones."""
    submitted_from: str
    is_folder_needed: bool
    """Whether the one that it was submitted from must be there on the head, too."""
    runs_in_folder: bool
    """In that one, instead of the job's own."""
    run_folder: str
    must_resume: bool
    environment: str | None
    """The package with the variables that were sent along."""

    def write(self, folder: Path) -> None:
        (folder / INSTRUCTIONS).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls(**json.loads((folder / INSTRUCTIONS).read_text()))

    def check(self) -> None:
        """What only the head node can know."""
        folder = Path(self.submitted_from)
        if self.is_folder_needed and not folder.is_dir():
            why = "`logging.runs` is relative to it; name a folder that the nodes have: logging.runs=/PATH"
            if self.runs_in_folder:
                why = "with --no-code the job runs there; submit from a folder that all nodes see"
            raise UserError(f"{folder}, from which this was submitted, is not on {socket.gethostname()}, and {why}")
        if self.must_resume:
            check_resumable(Path(self.run_folder))


def check_resumable(run_folder: Path) -> None:
    from corral.train.checkpoint import find_checkpoint

    if find_checkpoint(run_folder / "checkpoints", "auto") is None:
        raise UserError(f"--resume: there is no checkpoint in {run_folder} on {socket.gethostname()} to go on from")
