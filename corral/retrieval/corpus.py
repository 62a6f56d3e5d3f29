r"""The passages: a file with one JSON object per line, read where it lies.

A line is `{"id": ..., "contents": "\"Title\"\ntext"}`, as Search-R1 has it, or
`{"id": ..., "title": ..., "text": ...}`. One pass over the file checks every line and writes down where it begins; from
then on any passage is one look into a mapped file, and memory does not grow with the number of passages.
"""

import hashlib
import json
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from corral.recipe.errors import UserError, first_line
from corral.retrieval.searcher import Passage

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, out of how much."""

REPORT_EVERY = 20_000
"""Lines between two reports, and lines whose offsets are written at once."""


def silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class CorpusFacts:
    """The identity of the file that an index was made from."""

    path: str
    size: int
    mtime_ns: int
    sha256: str
    num_passages: int


class Corpus:
    def __init__(self, path: Path, offsets: Path) -> None:
        self.path = path
        self.offsets: npt.NDArray[np.int64] = np.load(offsets, mmap_mode="r")
        """Offsets at which each line begins, and where the last one ends."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Passage:
        line = self._bytes[int(self.offsets[row]) : int(self.offsets[row + 1])]
        return parse_line(line, self.path, row + 1)

    def contents(self, start: int, stop: int) -> list[str]:
        return [self[row].contents for row in range(start, stop)]


def scan(path: Path, offsets: Path, progress: Progress = silent) -> CorpusFacts:
    """Checks every line, and writes the offsets at which they begin."""
    status = stat(path)
    digest, row = hashlib.sha256(), 0
    with path.open("rb") as file, offsets.open("wb") as out:
        length = write_header(out, 0)
        position, starts = 0, [0]
        for row, line in whole_lines(file, path):
            parse_line(line, path, row)
            digest.update(line)
            position += len(line)
            starts.append(position)
            if len(starts) >= REPORT_EVERY:
                out.write(np.array(starts, np.int64).tobytes())
                starts = []
                progress("reading the corpus", position, status.st_size)
        out.write(np.array(starts, np.int64).tobytes())
        if row == 0:
            raise UserError(f"{path} has no passages")
        out.seek(0)
        assert write_header(out, row + 1) == length  # numpy leaves room for a longer number
    return CorpusFacts(str(path.resolve()), status.st_size, status.st_mtime_ns, digest.hexdigest(), row)


def whole_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. Empty ones are allowed at the end only, so that a line's number is its passage's."""
    empty = 0
    for number, line in enumerate(file, 1):
        if not line.strip():
            empty = empty or number
            continue
        if empty:
            raise UserError(f"{path}:{empty}: the line is empty; each line is one passage")
        yield number, line


def parse_line(line: bytes, path: Path, number: int) -> Passage:
    where = f"{path}:{number}"
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not a line of JSON: {first_line(error)}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object but {type(record).__name__}")
    contents = record.get("contents")
    if contents is None:
        title, text = record.get("title"), record.get("text")
        if text is None:
            raise UserError(f'{where}: has neither "contents" nor "text" (with "title"); it has: {", ".join(record)}')
        contents = text if title is None or not isinstance(text, str) else f'"{title}"\n{text}'
    if not isinstance(contents, str):
        raise UserError(f"{where}: the passage is not a text but {type(contents).__name__}")
    name = record.get("id")
    return Passage(str(number if name is None else name), contents)


def same_file(path: Path, facts: CorpusFacts) -> bool:
    """Whether the corpus is still what it was. Its bytes are read again only if its time has changed, its size not."""
    status = stat(path)
    if status.st_size != facts.size:
        return False
    if status.st_mtime_ns == facts.mtime_ns:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == facts.sha256


def stat(path: Path) -> Any:
    if path.suffix in (".gz", ".zst", ".bz2", ".xz"):
        raise UserError(f"{path} is compressed; unpack it first: passages are read from where they lie")
    if not path.is_file():
        raise UserError(f"the corpus {path} is not a file")
    return path.stat()


def write_header(file: BinaryIO, num_offsets: int) -> int:
    """Writes the header of a .npy file; returns its length."""
    description = {"descr": "<i8", "fortran_order": False, "shape": (num_offsets,)}
    np.lib.format.write_array_header_1_0(file, description)
    return file.tell()
