"""What the model played, on disk: one gzipped JSON-lines file per step.

`zcat step_000012.jsonl.gz | head` reads it, and so does every data-frame library. Records are plain mappings that the
caller prepared; this module knows nothing of what is in them.
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from corral.observe.files import json_line, replacing


class TrajectoryWriter:
    """Writes whole steps: a file is there completely or not at all, and writing a step again replaces it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, records: Iterable[Mapping[str, Any]], part: str | None = None) -> Path:
        """`part` keeps records apart that belong to the same step, such as those of a validation."""
        suffix = f".{part}" if part else ""
        path = self.folder / f"step_{step:06d}{suffix}.jsonl.gz"
        # No time and no name in the header: equal trajectories are equal files.
        with (
            replacing(path) as file,
            gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as zipped,
        ):
            for record in records:
                zipped.write(json_line(record))
        return path

    def truncate_after(self, step: int) -> None:
        """Deletes the steps after `step`: a run that goes on from that checkpoint plays them again."""
        for path in self.folder.glob("step_*.jsonl.gz"):
            if step_of(path) > step:
                path.unlink()


def read_trajectories(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def step_of(path: Path) -> int:
    match = re.match(r"step_(\d+)", path.name)
    if match is None:
        raise ValueError(f"{path} is not a trajectory file")
    return int(match.group(1))
