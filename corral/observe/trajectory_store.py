"""The trajectories of a run, one file for each step and part: written whole, read one by one.

What is long (text, tokens, and numbers that go with tokens) is read only of the trajectory that is looked at.
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from corral.observe.run_files import json_line, replacing
from corral.recipe.errors import UserError

FILE_NAME = re.compile(r"step_(\d{6,})(?:\.(\w+))?\.jsonl\.gz")
PREVIEW_LENGTH = 160
"""Number of characters of the response that a summary has."""
SUMMARY = ("prompt_id", "sample", "row", "tag", "reward", "rewards", "metrics", "stop", "error", "left_out")


class TrajectoryWriter:
    """Writes the trajectories of whole steps, one file for each; writing a step again replaces it.

    `zcat step_000012.jsonl.gz | head` reads one, and so does every data-frame library. Records are plain mappings that
    the caller prepared.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, records: Iterable[Mapping[str, Any]], part: str | None = None) -> Path:
        """`part` separates records of the same step, such as those of a validation."""
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
        """Deletes the steps after `step`: a run that resumes from that checkpoint generates them again."""
        for path in self.folder.glob("step_*.jsonl.gz"):
            if int(path.name.split(".")[0].removeprefix("step_")) > step:
                path.unlink()


class TrajectoryStore:
    """Reads the folder `trajectories` of a run, which may be written meanwhile, or not be there at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def parts(self) -> list[tuple[int, str]]:
        """Step and part of each file, sorted. The part is empty for what was trained on, else `validation`."""
        return sorted(self._paths())

    def summaries(self, step: int, part: str = "") -> list[dict[str, Any]]:
        """What a list of the trajectories of a step shows of each: its `index`, ids, rewards, lengths and a preview."""
        records = enumerate(read_trajectories(self._path(step, part)))
        return [{"index": index, **_summary(record)} for index, record in records]

    def trajectory(self, step: int, index: int, part: str = "") -> dict[str, Any]:
        """The whole record of one trajectory. Numbers that are not finite are None."""
        path = self._path(step, part)
        record = next(islice(read_trajectories(path), index, None), None) if index >= 0 else None
        if record is not None:
            return record
        raise UserError(f"{path} has no trajectory {index}")

    def _path(self, step: int, part: str) -> Path:
        paths = self._paths()
        if (step, part) not in paths:
            there = sorted(number for number, own in paths if own == part)
            raise UserError(f"{self.folder} has no {part or 'training'} trajectories of step {step}; it has {there}")
        return paths[step, part]

    def _paths(self) -> dict[tuple[int, str], Path]:
        found = ((path, FILE_NAME.fullmatch(path.name)) for path in self.folder.glob("step_*"))
        return {(int(match[1]), match[2] or ""): path for path, match in found if match is not None}


def read_trajectories(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: record.get(name) for name in SUMMARY},
        "num_prompt_tokens": len(record.get("prompt_tokens", ())),
        "num_response_tokens": len(record.get("response_tokens", ())),
        "num_generated": sum(record.get("generated", ())),
        "num_turns": len(record.get("turn_rewards", ())),
        "preview": record.get("response", "")[:PREVIEW_LENGTH],
    }
