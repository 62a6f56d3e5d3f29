"""What a run writes down: `metrics.jsonl`, and the trackers that the recipe names (`trackers.py`), all as one.

A kill at any moment leaves the old content or the new, never half of it. A replaced file is written beside its target,
flushed to disk (fsync), and renamed over it, which is atomic; without the fsync a power failure could leave the new
name with no content. An appended line is written by one call, and a torn last line is dropped when the file is read.

`metrics.jsonl` is the record that everything else is drawn from: trackers and pictures can be made again from it. A
number that is not finite is written as null, since JSON has neither NaN nor infinity.
"""

import errno
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from corral.recipe.errors import UserError

logger = logging.getLogger(__name__)


def write_atomically(path: Path, content: str) -> None:
    with replacing(path) as file:
        file.write(content.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block succeeds, and is deleted when it raises.

    The temporary name is always the same, so that what a kill leaves behind is overwritten by the next attempt.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path), temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing say which file it was: a full disk is noticed by a descriptor, which has no name."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def json_line(record: Mapping[str, Any]) -> bytes:
    """The record as one line of UTF-8 JSON. JSON has no NaN and no infinity: both are written as null.

    Numbers and arrays of numpy and torch are written as plain ones.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_without_nan(record), ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8; its backslash form happens to be JSON's own escape for it.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return _without_nan(_plain(value))


@dataclass(frozen=True)
class StepSamples:
    """Some trajectories of a step as rows of a table, and numbers of all of them."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    histograms: Mapping[str, Any]
    """Arrays of numbers, by name."""


class Tracker(ABC):
    """Something that a run's numbers go to."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    shows_samples: bool = False
    """Whether `log_samples` does anything."""

    def log_samples(self, step: int, samples: "StepSamples") -> None:  # noqa: B027
        """Shows some trajectories of a step, where the tracker has tables and histograms."""

    def close(self) -> None:  # noqa: B027
        """Nothing to do, unless something is held open between two rows."""

    def state(self) -> dict[str, Any]:
        """What a tracker of this kind needs to continue the same run after a resume."""
        return {}


class MetricsFile(Tracker):
    """Appends to the file; every line is complete on disk when `log` returns."""

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        if (complete := content.rfind(b"\n") + 1) < len(content):
            os.truncate(path, complete)  # a last line that a kill cut short

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = json_line({"step": step, **dict(sorted(metrics.items()))})
        with naming(self.path), self.path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # no half line for the next one to be appended to
                raise

    def truncate_after(self, step: int) -> None:
        """Deletes the steps after `step`: a run that resumes from that checkpoint makes them again."""
        rows = read_metrics(self.path) if self.path.exists() else []
        if any(row["step"] > step for row in rows):
            with replacing(self.path) as file:
                file.writelines(json_line(row) for row in rows if row["step"] <= step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows in the order they were logged. A last line cut short by a kill is left out; null stays None."""
    *lines, _torn = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}, line {number} is not a JSON object with a `step`. Was it edited? Repair or delete that line."
            ) from error
        rows.append(row)
    return rows


# --- trackers


class Trackers(Tracker):
    """All trackers of a run as one tracker. `failures` counts, by tracker, what was lost."""

    def __init__(
        self, trackers: Mapping[str, Tracker], saved_state: Mapping[str, Any], failures: "TrackerFailures"
    ) -> None:
        self.failures = failures
        self._trackers = trackers
        self._saved_state = saved_state

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in self._trackers.items():
            with self.failures.counted(name):
                tracker.log(step, metrics)

    @property
    def shows_samples(self) -> bool:  # type: ignore[override]
        return any(tracker.shows_samples for tracker in self._trackers.values())

    def log_samples(self, step: int, samples: StepSamples) -> None:
        for name, tracker in self._trackers.items():
            with self.failures.counted(name):
                tracker.log_samples(step, samples)

    def state(self) -> dict[str, Any]:
        """The state of each tracker. Of one that could not start this time, what was saved before."""
        states = {name: tracker.state() for name, tracker in self._trackers.items()}
        return {**self._saved_state, **{name: state for name, state in states.items() if state}}

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            with self.failures.counted(name):
                tracker.close()
        for name, count in self.failures.items():
            if count > 1:
                logger.warning("the tracker %s failed %d times in this run", name, count)


class TrackerFailures(Counter[str]):
    """How often each tracker failed. The first time is a warning."""

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Counts what is raised in the block, which ends there."""
        try:
            yield
        except Exception as error:
            self[name] += 1
            if self[name] == 1:
                logger.warning(
                    "the tracker %s failed (%s); training goes on, further failures are counted", name, error
                )
