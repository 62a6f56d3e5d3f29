"""What the processes of Corral on this node say of themselves, each in a small file, so that `corral stacks` can name
them. A file without its process is of one that ended, and is removed by who finds it."""

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from corral.recipe.errors import UserError
from corral.runtime.membership import state_folder

logger = logging.getLogger(__name__)

Kind = Literal["controller", "worker"]


@dataclass(frozen=True)
class Presence:
    pid: int
    started: int
    """As the kernel has it: a process id alone may come to mean another process."""
    kind: Kind
    run: str
    device: int | None
    roles: tuple[str, ...]


def announce(kind: Kind, run: str, device: int | None = None, roles: Sequence[str] = ()) -> None:
    """This process. Where that cannot be written the run goes on, and the process is not named."""
    pid = os.getpid()
    presence = Presence(pid, start_of(pid) or 0, kind, run, device, tuple(roles))
    try:
        folder = processes_folder()
        folder.mkdir(exist_ok=True)
        present()  # removes what others left behind
        (folder / f"{pid}.json").write_text(json.dumps(asdict(presence)))
    except (OSError, UserError) as error:
        logger.info("`corral stacks` will not know this process: %s", error)


def present() -> list[Presence]:
    """Of this node's processes, those that said so and still run."""
    found = []
    for path in sorted(processes_folder().glob("*.json")):
        try:
            fields = json.loads(path.read_text())
            presence = Presence(**{**fields, "roles": tuple(fields["roles"])})
        except (ValueError, TypeError, KeyError, OSError):
            continue
        if start_of(presence.pid) == presence.started:
            found.append(presence)
        else:
            path.unlink(missing_ok=True)
    return found


def processes_folder() -> Path:
    """One for each PID namespace: containers may share /tmp, and their process ids are their own."""
    namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    return state_folder() / f"processes-{namespace}"


def start_of(pid: int) -> int | None:
    """In ticks since the machine was started."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # it has ended, perhaps just now
        return None
