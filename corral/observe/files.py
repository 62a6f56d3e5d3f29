"""Writing files so that a kill at any moment leaves the old content or the new, never half of it."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, content: str) -> None:
    with replacing(path) as file:
        file.write(content.encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends well, and vanishes when it does not.

    The temporary name is always the same, so that what a kill leaves behind is overwritten by the next attempt.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
