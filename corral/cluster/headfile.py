"""The head's address in a file on a file system that all nodes share, for clusters in which nobody knows it beforehand.

A file that an earlier cluster left behind sends workers to a machine that is off, or, worse, to somebody else's
cluster. So the file says of which cluster it is, and when it was written; a worker believes it only if that very
cluster answers.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from corral.cluster.gcs import Gcs, NoAnswer, Refused
from corral.observe.run_files import write_atomically
from corral.recipe.errors import UserError


@dataclass(frozen=True)
class HeadFile:
    id: str
    """Of the launcher's job, or made up by the head."""
    cluster_id: str
    """Ray's own, different for every start."""
    address: str
    time: float
    hostname: str

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None where there is none yet."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is not a head file of Corral; remove it") from error

    def refusal(self, id: str | None) -> str | None:
        """Why it is not to be believed, or None."""
        age = f"written {in_words(time.time() - self.time)} ago by {self.hostname}"
        if id is not None and self.id != id:
            return f"it is of another start ({self.id}, {age}), not of {id}"
        try:
            answering = Gcs(self.address).cluster_id
        except NoAnswer:
            return f"it is stale: {age}, and no cluster answers at {self.address}"
        except Refused:
            return f"it is not of the token that this node has: {age}, and {self.address} refuses it"
        if answering != self.cluster_id:
            return f"it is stale: {age}, and another cluster answers at {self.address} now"
        return None


def token_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.token")


def in_words(seconds: float) -> str:
    if abs(seconds) < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.1f} h"
