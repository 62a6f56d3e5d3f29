"""Checkpoints: a folder that is either whole or not there.

Written to a temporary folder, flushed, described by a manifest with the size and hash of every file, and put in place
by a rename. What has no valid manifest does not exist as far as resuming is concerned. The model's files are in
Hugging Face layout: `AutoModelForCausalLM.from_pretrained(folder)` loads them as they are.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corral.recipe.errors import UserError
from corral.train.tensors import fsync

MANIFEST = "manifest.json"


def write_checkpoint(folder: Path, write: Callable[[Path], None], state: dict[str, Any]) -> None:
    """`write` puts the files into the folder it is given; `state` becomes state.json."""
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        write(work)
        (work / "state.json").write_text(json.dumps(state, indent=1))
        files = {str(file.relative_to(work)): describe(file) for file in sorted(work.rglob("*")) if file.is_file()}
        (work / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=1))
        for path in [*work.rglob("*"), work]:
            fsync(path)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
        fsync(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def problem_with(folder: Path, hashes: bool) -> str | None:
    """What is wrong with a checkpoint, or None. Without `hashes` only names and sizes are compared."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"no valid manifest ({error})"
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['size']}"
        if hashes and describe(file)["sha256"] != expected["sha256"]:
            return f"{name} was changed or damaged"
    return None


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:06d}"


def valid_checkpoints(checkpoints: Path) -> list[Path]:
    """Oldest first."""
    found = sorted(checkpoints.glob("step_*"), key=lambda folder: folder.name)
    return [folder for folder in found if problem_with(folder, hashes=False) is None]


def find_checkpoint(checkpoints: Path, resume: str) -> Path | None:
    """The one to go on from: the newest valid one (auto), none (never), or the one at a path, which must be valid."""
    if resume == "never":
        return None
    if resume != "auto":
        if problem := problem_with(Path(resume), hashes=True):
            raise UserError(f"checkpoint.resume: {resume} is not a usable checkpoint: {problem}")
        return Path(resume)
    for folder in reversed(valid_checkpoints(checkpoints)):
        if problem_with(folder, hashes=True) is None:
            return folder
    return None


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def prune(checkpoints: Path, keep: int) -> None:
    for folder in valid_checkpoints(checkpoints)[:-keep]:
        shutil.rmtree(folder)
