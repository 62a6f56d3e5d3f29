"""The folder of a run: one place for everything it leaves behind.

    runs/<name>/
        recipe.yaml         as it was run; recipe.2.yaml, ... when it was resumed with another one
        plan.txt, plan.json
        metrics.jsonl
        ledger.jsonl        what happened to every prompt
        curve.png
        trajectories/       step_000012.parquet
        checkpoints/
        logs/               main.log, prints.log (of rewards and environments), and what trackers keep locally
        failures/
        attempts/           what was done before the first checkpoint, if it had to be done again

A run is never overwritten, and never written by two processes at once. Which checkpoint to resume from, and what is in
one, is up to the loop.
"""

import errno
import fcntl
import itertools
import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from corral.observe.run_files import write_atomically
from corral.recipe.errors import UserError
from corral.recipe.rules import problem_of_run_name

logger = logging.getLogger(__name__)

LOCK = ".lock"
PRINTS = "prints.log"
SUBFOLDERS = ("trajectories", "checkpoints", "logs", "failures")
NO_LOCKS_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class RunFolderInUse(UserError):
    """Another process writes this run."""


class RunFolder:
    """A run's folder, locked for this process until it is closed."""

    def __init__(self, path: Path) -> None:
        """Opens the folder as it is, or makes it. Use `open`, which chooses a path by the rules of `resume`."""
        _make(path)
        self.path = path
        self.recipe, self.plan = path / "recipe.yaml", path / "plan.txt"
        self.metrics, self.ledger, self.curve = path / "metrics.jsonl", path / "ledger.jsonl", path / "curve.png"
        self.trajectories, self.checkpoints = path / "trajectories", path / "checkpoints"
        self.weights = path / "weights"
        self.trained_with: dict[str, Any] = {}
        """What checkpoints say of how they were trained (`corral/loop/resuming.py`)."""
        self.logs, self.failures = path / "logs", path / "failures"
        self._lock: int | None = _lock(path / LOCK)
        os.register_at_fork(after_in_child=self._leave_lock_to_parent)
        for name in SUBFOLDERS:
            _make(path / name)

    @classmethod
    def open(cls, runs: Path, name: str, resume: str) -> Self:
        """`auto` continues in the folder of that name; `never` takes a new one beside it (`<name>-2`, ...) if it is
        used. A checkpoint's path as `resume` continues in the folder when the checkpoint is of this run, else it is
        `never`."""
        if problem := problem_of_run_name(name):
            raise UserError(problem)
        if resume == "auto" or (resume != "never" and _is_inside(Path(resume).expanduser(), runs / name)):
            return cls(runs / name)
        return cls._open_new(runs, name)

    @classmethod
    def _open_new(cls, runs: Path, name: str) -> Self:
        for number in itertools.count(1):
            path = runs / (name if number == 1 else f"{name}-{number}")
            if _is_used(path):
                continue
            try:
                folder = cls(path)
            except RunFolderInUse:
                continue  # another process was faster
            if not _is_used(path):
                return folder
            folder.close()
        raise AssertionError("unreachable")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def holds_run(self) -> bool:
        """Whether anything was computed in it."""
        return holds_run(self.path)

    @property
    def prints(self) -> Path:
        """What rewards and environments in processes of their own have printed."""
        return self.logs / PRINTS

    def write_recipe(self, text: str) -> Path:
        """Keeps every recipe the run was started with; the one with the highest number is the last that was used. Those
        of starts that failed before anything was computed are not kept."""
        if not self.holds_run and not (self.path / "attempts").exists():
            for path in itertools.takewhile(Path.exists, recipe_files(self.path)):
                path.unlink()
        latest = latest_recipe(self.path)
        if latest is not None and latest.read_text(encoding="utf-8") == text:
            return latest
        path = next(path for path in recipe_files(self.path) if not path.exists())
        write_atomically(path, text)
        return path

    def write_plan(self, text: str, plan: Mapping[str, Any]) -> None:
        """Writes it as it was printed, and for programs."""
        write_atomically(self.plan, text)
        write_atomically(self.plan.with_suffix(".json"), json.dumps(plan))

    def archive_attempt(self) -> Path:
        """Moves what an attempt without a checkpoint left behind to `attempts/<number>`."""
        number = next(n for n in itertools.count(1) if not (self.path / "attempts" / str(n)).exists())
        attempt = self.path / "attempts" / str(number)
        _make(attempt)
        for path in (self.metrics, self.ledger, self.trajectories, self.curve):
            if path.exists():
                os.replace(path, attempt / path.name)
        _make(self.trajectories)
        return attempt

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A forked worker that outlives this process would otherwise hold the lock of a run that nobody writes.
    _leave_lock_to_parent = close


def recipe_files(folder: Path) -> Iterator[Path]:
    """The names of the recipes that a run is started with, one after the other."""
    yield folder / "recipe.yaml"
    for number in itertools.count(2):
        yield folder / f"recipe.{number}.yaml"


def latest_recipe(folder: Path) -> Path | None:
    """The recipe that a run was last started with."""
    written = list(itertools.takewhile(Path.exists, recipe_files(folder)))
    return written[-1] if written else None


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the run folder {path}: {error.strerror}. `logging.runs` says where run folders are made"
        ) from error


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"cannot write to the run folder {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 1000).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise RunFolderInUse(
            f"the run folder {path.parent} is in use by {owner}; stop that one, or give this run another `name`"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            os.close(descriptor)
            raise
        logger.warning(
            "%s cannot be locked (%s): see to it that no other process writes it", path.parent, error.strerror
        )
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor


def holds_run(path: Path) -> bool:
    """Whether anything was computed in a folder, which need not be open."""
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    return (metrics.exists() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def is_in_use(path: Path) -> bool:
    """Whether a process writes the run, as far as can be seen from here; for readers, who hold no lock themselves."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        owner = re.fullmatch(r"process ([0-9]+) on (.+)\n", os.read(descriptor, 1000).decode(errors="replace"))
        if owner is not None and owner[2] == socket.gethostname():
            os.kill(int(owner[1]), 0)  # raises if it has ended; then the lock is not tried: a run may start just now
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # PermissionError: another user's process
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _is_used(path: Path) -> bool:
    """Whether there is any file in it, ours or not."""
    return any(file.name != LOCK for file in path.rglob("*") if not file.is_dir())


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
