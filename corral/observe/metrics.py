"""The numbers of a run, one JSON line per logged step, in `metrics.jsonl`.

This file is the record that everything else is drawn from: trackers and pictures can be made again from it.
A number that is not finite is written as null, since JSON has neither NaN nor infinity.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corral.observe.files import json_line, replacing
from corral.recipe.errors import UserError


class MetricsFile:
    """Appends to the file; every line is complete on disk when `log` returns."""

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            _drop_torn_line(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        line = json_line({"step": step, **dict(sorted(metrics.items()))})
        with self.path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            except OSError:
                file.truncate(size)  # no half line for the next one to be glued to
                raise

    def truncate_after(self, step: int) -> None:
        """Forgets the steps after `step`: a run that goes on from that checkpoint makes them again."""
        if not self.path.exists():
            return
        rows = read(self.path)
        if any(row["step"] > step for row in rows):
            with replacing(self.path) as file:
                file.writelines(json_line(row) for row in rows if row["step"] <= step)

    def close(self) -> None:
        """Nothing is held open between two lines."""

    def state(self) -> dict[str, str]:
        return {}


def read(path: Path) -> list[dict[str, Any]]:
    """The rows in the order they were logged. A last line cut short by a kill is left out; null stays None."""
    return list(_rows(path))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}, line {number} is not a JSON object with a `step`. Was it edited? Repair or delete that line."
            ) from error
        yield row


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)
